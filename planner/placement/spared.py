"""Links on which messages between stages travel as they are although others compress, since it costs no time.

A codec on a link costs loss whether the link is slow or not. So a plan whose placement is known compresses only where
it gains: the quickest links are left out, as many as the step does not wait for.
"""

import dataclasses

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.options import LINKED
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import Fabric, Paths
from planner.cost.step_time import Problem
from planner.placement.place import Placement

_FREE = 1e-3  # share of the step that all links which are left out may cost together


def spared(
    cluster: Cluster, model: ModelConfig, fabric: Fabric, candidate: Candidate, placement: Placement
) -> tuple[Candidate, Placement]:
    """Return a plan that compresses on as few links as it can at almost no more time, and its placement.

    Args:
        cluster: cluster of the plan.
        model: model of the plan.
        fabric: links of the cluster.
        candidate: plan that compresses on all links, or none that compresses.
        placement: its placement, which stays; only the seconds and their bound change.
    """
    c, hosts = candidate, placement.hosts[None]
    count = c.stage_map.links
    places = [place for place, on in zip(LINKED, (c.backward != "none", c.compresses_forward)) if on]
    if count < 2 or not places:
        return c, placement
    problem = Problem(cluster, model, c)
    paths, kinds = problem.paths(fabric, hosts), problem.kind_of_host[hosts]

    def seconds(sparing: Candidate) -> float:
        other = Problem(cluster, model, sparing)
        return float(other.evaluate(other.links(paths), kinds).total[0])

    for place in places:
        order = _slowest_first(paths, place, problem.message, count)
        few, many = 0, count  # the `many` slowest links are enough, the `few` slowest are not
        while many - few > 1:
            some = (few + many) // 2
            enough = seconds(_on(c, place, order[:some])) <= placement.seconds * (1 + _FREE)
            few, many = (few, some) if enough else (some, many)
        if many < count:
            c = _on(c, place, order[:many])
    if c is candidate:
        return c, placement
    least = seconds(c)
    return c, dataclasses.replace(placement, seconds=least, bound=min(placement.bound, least))


def _slowest_first(paths: Paths, place: str, size: int, count: int) -> list[int]:
    """Return the numbers of the links, the one first on which a message of a place takes longest.

    Args:
        paths: paths of one placement.
        place: "backward" or "forward".
        size: bytes of the message.
        count: number of links.
    """
    latency, per_byte = paths.forward if place == "forward" else paths.backward
    by_sender = (latency + size * per_byte).reshape(-1, latency.shape[-1]).max(axis=0)
    by_link = by_sender if place == "forward" else np.roll(by_sender, -1)  # gradients go to the stage before
    return np.argsort(-by_link[:count], kind="stable").tolist()


def _on(candidate: Candidate, place: str, links: list[int]) -> Candidate:
    """Return a candidate that compresses the messages of a place on some links only."""
    some = tuple(sorted(links))
    if place == "forward":
        return dataclasses.replace(candidate, forward_links=some)
    return dataclasses.replace(candidate, backward_links=some)
