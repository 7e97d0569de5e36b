"""A plan's seconds under many settings of the constants that it is priced with, all in one batch.

A setting has a factor for each constant that differs from the cluster's own. The names are those of
planner/fit/constants.py; efficiencies and latencies are factors on the cluster's links, and `compute` is one on all
times of a compute profile.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig
from planner.cluster.cluster import Cluster, Shares, TrainerExecution, between, of_hosts, with_crossing
from planner.cost import compute as costs
from planner.cost.candidate import Candidate
from planner.cost.compute import LayerCosts
from planner.cost.link_seconds import Paths, fabric
from planner.cost.step_time import Problem, counted, steps
from planner.fit.applied import EXECUTED, SHARES

Array = np.ndarray
Setting = Mapping[str, float]

LINKS = ("intra_latency", "intra_efficiency", "inter_latency", "inter_efficiency")
COMPUTE = "compute"


def with_setting(cluster: Cluster, setting: Setting) -> Cluster:
    """Return the cluster with a setting, except for the factor on a compute profile.

    Args:
        cluster: cluster whose constants the factors are on.
        setting: factors by name.
    """

    def moved(names: Sequence[str], what: Shares | TrainerExecution) -> dict[str, Any]:
        return {name: setting[name] * getattr(what, name) for name in names if name in setting}

    found = dataclasses.replace(
        cluster,
        shares=dataclasses.replace(cluster.shares, **moved(SHARES, cluster.shares)),
        execution=dataclasses.replace(cluster.execution, **moved(EXECUTED, cluster.execution)),
        host_seconds=cluster.host_seconds * setting.get("host_seconds", 1.0),
    )
    return _with_links(found, setting) if any(name in setting for name in LINKS) else found


def _with_links(cluster: Cluster, setting: Setting) -> Cluster:
    """Return the cluster with factors on its links."""
    apart, (inner_wait, inner, outer_wait, outer) = between(cluster), (setting.get(name, 1.0) for name in LINKS)
    trunks = cluster.trunks
    return dataclasses.replace(
        cluster,
        alpha=cluster.alpha * np.where(apart, outer_wait, inner_wait),
        samples=cluster.samples * np.where(apart, outer, inner),
        trunks=trunks and dataclasses.replace(trunks, bandwidth=trunks.bandwidth * outer),
        parts=cluster.parts and _with_links(cluster.parts, setting),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class PricedPlan:
    """A plan whose seconds are asked for under several settings.

    Attributes:
        candidate: what it does.
        hosts: int [D, P], host of each tensor group.
    """

    candidate: Candidate
    hosts: Array


class PlanSettings:
    """PlanSettings of one cluster's constants, under which plans for one model are priced."""

    def __init__(self, cluster: Cluster, model: ModelConfig, quantile: float, settings: Sequence[Setting]) -> None:
        """Prepare what plans have in common.

        Args:
            cluster: the cluster.
            model: model to train.
            quantile: quantile of the link samples.
            settings: the settings.
        """
        self.model, self.settings = model, settings
        by = cluster.execution
        # What a batch has values of is added to it, not to the cluster.
        neutral = TrainerExecution(by.trainer, by.rows, by.overlaps)
        self.cluster = dataclasses.replace(cluster, execution=neutral, host_seconds=0.0)
        self.clusters = [with_setting(_slowest_inside(cluster), setting) for setting in settings]  # for layers
        links = [tuple(setting.get(name, 1.0) for name in LINKS) for setting in settings]
        self.links = list(dict.fromkeys(links))
        self.link_of = np.array([self.links.index(one) for one in links])
        self.quantile = quantile

    def _layer(self, problem: Problem) -> list[LayerCosts]:
        """Return a layer's costs on each kind of device, in each setting in turn."""
        c, found = problem.candidate, []
        how = (c.layer_sizes, c.micro_batch, c.save, c.sequence_parallel)
        for cluster, setting in zip(self.clusters, self.settings):
            priced = with_crossing(cluster, c.tensor) if problem.crosses else cluster
            for kind in sorted(set(cluster.kinds)):
                one = costs.layer(priced, kind, self.model, *how)
                if COMPUTE in setting:
                    values = dataclasses.asdict(one)
                    one = LayerCosts(**{name: setting[COMPUTE] * value for name, value in values.items()})
                found.append(one)
        return found

    def _paths(self, problem: Problem, some: Sequence[Paths]) -> Paths:
        """Return the paths of a placement in each setting.

        Args:
            problem: the plan.
            some: its paths on each of the different links.
        """
        where = some[0]
        for more in some[1:]:
            where = where.join(more)
        where = where.take(self.link_of)

        def values(name: str) -> Array:
            return np.array([getattr(cluster.execution, name) for cluster in self.clusters])

        c = problem.candidate
        layers = int(c.stage_map.by_stage(c.counts).sum(axis=0).max())
        return counted(
            where,
            hop=values("hop_ratio"),
            overhead=problem.crosses * values("message_seconds"),
            data=values("data_ratio"),
            turns=1 + layers * values("buckets"),
            tied=values("tied_ratio") * problem.whole_tables(self.clusters[0].execution),
        )

    def seconds(self, plans: Sequence[PricedPlan]) -> Array:
        """Return the seconds of a step [settings, plans]."""
        problems = []
        for plan in plans:
            plain = Problem(self.cluster, self.model, plan.candidate)
            problems.append(Problem(self.cluster, self.model, plan.candidate, layer=self._layer(plain)))
        paths: list[list[Paths]] = [[] for _ in plans]
        for factors in self.links:  # one at a time, since links between many hosts are large
            links = fabric(_with_links(self.cluster, dict(zip(LINKS, factors))), self.quantile)
            for known, problem, plan in zip(paths, problems, plans):
                known.append(problem.paths(links, plan.hosts[None]))
        placements, count = [], len(set(self.cluster.kinds))
        for problem, plan, known in zip(problems, plans, paths):
            on = problem.kind_of_host[plan.hosts] + count * np.arange(len(self.settings))[:, None, None]
            placements.append((self._paths(problem, known), on))
        found = np.stack([step.total for step in steps(problems, placements)], axis=1)
        return found + np.array([cluster.host_seconds for cluster in self.clusters])[:, None]


def _slowest_inside(cluster: Cluster) -> Cluster:
    """Return the hosts of a cluster that have the longest latency, or the slowest links inside, of their kind."""
    if cluster.parts is not None:  # links between the hosts that are taken as one count, too
        return cluster
    kinds, latency, rate = np.array(cluster.kinds), np.diagonal(cluster.alpha), np.diagonal(cluster.bandwidth)
    chosen = set()
    for kind in set(cluster.kinds):
        where = np.flatnonzero(kinds == kind)
        chosen |= {int(where[latency[where].argmax()]), int(where[rate[where].argmin()])}
    return of_hosts(cluster, [cluster.hosts[i] for i in sorted(chosen)])
