"""Bytes that a step sends, by where they go: inside hosts, between hosts of a site, between sites, by trunk and NIC."""

from typing import NamedTuple

import numpy as np

from planner.cost import compute as costs
from planner.cost import outer
from planner.cost.link_seconds import ring_leads
from planner.cost.sizes import MASTER
from planner.report.contents import Report

Array = np.ndarray
LEVELS = ("inside hosts", "between hosts of a site", "between sites")


class Flows(NamedTuple):
    """Flows between tensor groups in a step, all of one purpose and one direction.

    Attributes:
        what: purpose.
        senders: place of each sender, see `planner.cost.link_seconds.Fabric.places`.
        receivers: place of each receiver, of the same shape.
        bytes: bytes from each sender, those of all its devices together.
    """

    what: str
    senders: Array
    receivers: Array
    bytes: Array


def flows(report: Report) -> list[Flows]:
    """Return what a step of the chosen plan sends, on links or inside hosts.

    Messages and reductions count as they are, also where the plan compresses them. Sums inside tensor groups, which
    never leave a host, do not count.
    """
    problem, c, fabric = report.problem, report.chosen.candidate, report.fabric
    places = fabric.places(report.chosen.placement.hosts[None])[0]  # [D, P]
    found: list[Flows] = []

    def add(what: str, senders: Array, receivers: Array, size: Array | float) -> None:
        """Add flows of which each tensor rank sends `size` bytes."""
        found.append(
            Flows(what, senders, receivers, np.broadcast_to(c.tensor * np.asarray(size, float), senders.shape))
        )

    def exchange(what: str, one: Array, other: Array, size: Array | float) -> None:
        """Add flows of `size` bytes each way."""
        add(what, one, other, size)
        add(what, other, one, size)

    def ring_of(ranks: Array) -> Array:
        """Return the places [..., D] in the order in which rings visit them."""
        return np.take_along_axis(ranks, ring_leads(fabric.hosts(ranks)), -1)

    # Activations go on and gradients back over each hop: between neighbors once a chunk, around the ring once less.
    times = np.full(c.pipe, c.chunks)
    times[-1] -= 1
    sent = np.array(c.of_ranks)[:, None] * problem.message * times * (c.pipe > 1)
    exchange("messages between stages", places, np.roll(places, -1, axis=1), sent)
    groups = places.reshape(c.apart, c.together, c.pipe)
    ring = ring_of(np.swapaxes(groups, 1, 2))  # [G, P, D / G]
    layers, table = problem.layer_parameters, problem.embedding_parameters * problem.meets
    share = (c.together - 1) / c.together

    def around(what: str, size: Array) -> None:
        """Add turns of all rings, whose stages [P] have `size` bytes."""
        add(what, ring, np.roll(ring, -1, axis=2), (share * size)[:, None])

    reduced = (layers + table) * costs.ITEM[c.reduce_dtype]
    around("gradients over data", reduced if c.zero1 else 2 * reduced)
    if c.zero1:
        around("weights over data", (layers + table) * costs.ITEM[report.model.dtype])
    if problem.swaps:
        size = problem.embedding_parameters * MASTER / c.together
        exchange("tied embedding", places[:, 0], places[:, -1], size)
    if c.apart > 1:
        across = ring_of(np.moveaxis(groups, 0, 2))  # [D / G, P, G]
        of_round = sum(size for size, _ in outer.sent(problem))
        add("differences between groups", across, np.roll(across, -1, axis=2), of_round / c.outer.every)
    return found


def traffic(report: Report) -> dict[str, Array]:
    """Return the bytes of a step of the chosen plan, [levels] by purpose, those of all devices together."""
    sites = np.array(report.cluster.sites or np.zeros(len(report.cluster.hosts), int))
    found: dict[str, Array] = {}
    for what, *ends, size in flows(report):
        senders, receivers = map(report.fabric.hosts, ends)
        level = np.where(senders == receivers, 0, np.where(sites[senders] == sites[receivers], 1, 2))
        levels = np.bincount(level.ravel(), weights=size.ravel(), minlength=len(LEVELS))
        if levels.any():
            found[what] = found.get(what, 0) + levels
    return found


def through_trunks(report: Report) -> Array:
    """Return the bytes of a step that leave by each trunk of the cluster, [K]; as many come in."""
    if (trunks := report.cluster.trunks) is None:
        return np.zeros(0)
    found = np.zeros(len(trunks))
    for _, *ends, size in flows(report):
        senders, receivers = map(report.fabric.hosts, ends)
        crossing = trunks.behind[:, senders] != trunks.behind[:, receivers]
        # Messages go there and back, and a ring that leaves comes in again.
        found += (crossing * size).reshape(len(found), -1).sum(axis=1) / 2
    return found


def trunk_words(report: Report) -> str:
    """Return what leaves by the busiest trunk in a step, in words; empty without trunks."""
    if not (trunks := report.cluster.trunks):
        return ""
    sent = through_trunks(report)
    seconds = sent / trunks.bandwidth
    busiest = int(np.argmax(seconds))
    rate, many = trunks.bandwidth[busiest] * 8e-9, f"{len(trunks)} trunk{'s' * (len(trunks) > 1)}"
    behind = int(trunks.behind[busiest].sum())
    of = f"that of {behind} host{'s' * (behind > 1)}, {rate:.4g} Gbit/s"
    return f"{many}; by the busiest, {of}, {sent[busiest] / 1e9:.3g} GB leave in a step, in {seconds[busiest]:.3g} s"


def by_nics(report: Report) -> tuple[Array, float]:
    """Return the bytes of a step that leave by each NIC, [H, nics], and those that change rails; there are rails."""
    fabric, tensor, rails = report.fabric, report.chosen.candidate.tensor, report.cluster.rails
    assert rails is not None
    found, changed = np.zeros((len(report.cluster.hosts), fabric.nics)), 0.0
    for _, senders, receivers, size in flows(report):
        hosts = fabric.hosts(senders)
        each = (size * (hosts != fabric.hosts(receivers)) / tensor)[..., None]
        leaving, entering = fabric.rail_of(senders, tensor), fabric.rail_of(receivers, tensor)
        np.add.at(found, (hosts[..., None], entering if rails.pxn else leaving), each)
        changed += float((each * (leaving != entering)).sum())
    return found, changed


def rail_words(report: Report) -> str:
    """Return what leaves by the busiest NIC in a step, and what changes rails, in words; empty without rails."""
    if not (rails := report.cluster.rails):
        return ""
    sent, changed = by_nics(report)
    host, rail = np.unravel_index(np.argmax(sent), sent.shape)
    busiest = f"{sent[host, rail] / 1e9:.3g} GB leave in a step by the busiest NIC, rail {rail} of "
    busiest += f"{report.cluster.hosts[host]}; the mean is {sent.mean() / 1e9:.3g} GB"
    way = "after a move inside the sender's host" if rails.pxn else "over the spine"
    return f"{sent.shape[1]} rails; {busiest}; {changed / 1e9:.3g} GB change rails, {way}"


def words(report: Report) -> str:
    """Return the bytes of a step by level, in words; empty if nothing is sent."""
    whole = sum(traffic(report).values(), np.zeros(len(LEVELS)))
    parts = [f"{size / 1e9:.3g} GB {level}" for size, level in zip(whole, LEVELS) if size > 0]
    return f"a step sends {', '.join(parts)}, all devices together" if parts else ""


def rows(report: Report) -> list[list[str]]:
    """Return heads and a row of cells for each purpose: GB a step by level; levels without a byte are left out."""
    found = traffic(report)
    whole = np.sum(list(found.values()), axis=0) if found else np.zeros(len(LEVELS))
    used = [n for n in range(len(LEVELS)) if whole[n] > 0]
    lines = [[what, *(f"{sizes[n] / 1e9:.3g}" for n in used)] for what, sizes in found.items()]
    return [["GB a step", *(LEVELS[n] for n in used)], *lines] if used else []
