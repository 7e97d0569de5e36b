"""Placement: on which host each tensor group lies, so that the predicted step is shortest.

The objective is the simulated step time itself (planner.cost.step_time). If placements are few, all are evaluated
except those that symmetry makes equal (planner.placement.exact). Else they are annealed (planner.placement.anneal).
Either comes with a lower bound on the step time of any placement (planner.placement.bounds).
"""

import dataclasses
import functools
import math

import numpy as np

from paxtrain.config.axes import shown
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import Fabric, LinkSeconds, Paths, paths
from planner.cost.step_time import Problem
from planner.pipeline.rows import runs
from planner.placement import anneal, bounds, exact
from planner.placement.climb import Climbed, climb, racks_of
from planner.placement.surrogate import Surrogate

Array = np.ndarray

_EXACT = 50_000  # placements, without those that symmetry makes equal, up to which all are evaluated
_RESTARTS, _AGREE = 4, 0.003  # annealings at most, which end once the two best agree to within that share
_ITERATIONS = 60, 300  # iterations of an annealing at least, and if there are not very many groups
_FEW = 800  # placements up to which all are evaluated for a quick answer
_BEGIN = 1, 3  # placements that climbs for a quick answer begin with; more if all could be evaluated
_BATCHES = 40  # batches of placements that a climb evaluates at most, if there are not very many groups
_SHORT = 8  # rows up to which a replay is as quick as its surrogate
_LEARNED, _TRUE = 4, 1e-3  # climbs at most, until the step at the end is what it was taken for, to within that share
_GROUPS = 4096  # in all chains: a batch that costs little more than the calls that evaluate it


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A placement of the tensor groups.

    Attributes:
        hosts: int [D, P].
        seconds: the predicted step.
        bound: seconds below which no placement can be.
        source: "exact", "annealed", "climbed", "layout" (a plain one, which no move made better), "known" (one that was
            found for another candidate of the same mesh) or "host order".
        evaluations: placements that were evaluated for it.
    """

    hosts: Array
    seconds: float
    bound: float
    source: str
    evaluations: int

    @property
    def gap(self) -> float:
        """Share of the bound by which the step is above it: a better placement saves no more."""
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


def slots_per_host(c: Candidate, cluster: Cluster) -> int:
    """Return the number of a candidate's tensor groups on a host.

    Raises:
        UserError: the mesh does not fill the cluster with whole groups inside hosts.
    """
    if cluster.devices_per_host % c.seat or c.groups * c.seat != cluster.devices:
        sizes = " x ".join(map(str, shown(c.sizes).values()))
        raise UserError(
            f"a mesh of {sizes} cannot be placed on {len(cluster.hosts)} hosts of "
            f"{cluster.devices_per_host} devices; it must use all devices, with tensor groups inside hosts"
        )
    return cluster.devices_per_host // c.seat


def place(
    problem: Problem,
    fabric: Fabric,
    *,
    seed: int = 0,
    start: Array | None = None,
    iterations: int | None = None,
    chains: int | None = None,
    exactly: bool = True,
    bound: float | None = None,
) -> Placement:
    """Return the best placement found on these links.

    It is deterministic for a seed. It anneals anew until two annealings agree.

    Args:
        problem: candidate to place, on its cluster.
        fabric: links of the cluster.
        seed: seed of the annealing.
        start: hosts [D, P] to begin with, beside the plain layouts.
        iterations: iterations of an annealing; None: fewer, the more rows a schedule has.
        chains: chains to anneal at once; None: as many as cost little more than one.
        exactly: evaluate all placements if they are few.
        bound: seconds that no placement is below, if they are known.

    Raises:
        UserError: the mesh does not fill the cluster with whole groups inside hosts.
    """
    one = _Placing(problem, fabric, bound)
    if one.plain_seconds <= one.enough:
        return one.host_order(1)
    if exactly and (best := one.exactly(_EXACT)):
        return best
    chains = chains or one.batch
    iterations = iterations or max(int(_ITERATIONS[1] / one.size), _ITERATIONS[0])
    ends, evaluations, started = [], 0, False
    for rng in np.random.default_rng(seed).spawn(_RESTARTS):
        begin = _starts(one, start, rng)
        one.learn(np.array([some.order[some.layout] for some in begin]))
        found = anneal.anneal(one.rough, begin, one.slots > 1, rng, chains, iterations, one.enough, one.rack)
        end = one.climb(found.hosts, rng)
        ends.append((end.value, end.hosts))
        evaluations += found.evaluations + end.evaluations
        started = found.started and (end.hosts == found.hosts).all()
        least = sorted(value for value, _ in ends)
        # With racks two annealings may end at the same local optimum.
        agree = len(least) > 1 + bool(one.rack.max()) and least[1] <= least[0] * (1 + _AGREE)
        if agree or least[0] <= one.enough:
            break
    last = [min(ends, key=lambda end: end[0])[1], *([] if start is None else [start])]
    return one.better(last, "layout" if started and len(ends) == 1 else "annealed", evaluations)


def are_few(c: Candidate, cluster: Cluster) -> bool:
    """Return whether a candidate's placements are so few that `place` evaluates all."""
    return _are_few(c.groups, c.data, slots_per_host(c, cluster))


@functools.cache
def _are_few(groups: int, data: int, slots: int) -> bool:
    logs = math.lgamma(groups + 1) - math.lgamma(slots + 1) * (groups // slots) - math.log(data)
    return logs <= math.log(_EXACT)


def quickly(problem: Problem, fabric: Fabric, starts: Array, seed: int = 0) -> Placement:
    """Return the best placement at which climbs from given ones end, or the best of all if there are very few.

    Its bound is 0 unless it is the best of all.

    Args:
        problem: candidate to place, on its cluster.
        fabric: links of the cluster.
        starts: hosts [K, D, P], of which the best few are begun with, and the first.
        seed: seed of the order of the exchanges.
    """
    one = _Placing(problem, fabric)
    if best := one.exactly(_FEW):
        return best
    one.learn(starts)
    rng, values = np.random.default_rng(seed), one.rough(starts)
    some = np.argsort(values, kind="stable")[: _BEGIN[are_few(problem.candidate, problem.cluster)]]
    ends = [one.climb(starts[i], rng) for i in some]
    last = np.array([*(end.hosts for end in ends), starts[0]])
    values = one.objective(last)
    least = int(np.argmin(values))
    evaluations = len(starts) + sum(end.evaluations for end in ends) + len(last)
    return Placement(last[least], float(values[least]), 0.0, "climbed", evaluations)


class _Placing:
    """A problem on links, and its placement in host order.

    Attributes:
        slots: tensor groups on a host.
        plain: hosts [D, P] in order, and its seconds.
        rack: [H] rack of each host.
        batch: placements that are evaluated at once.
        size: by which factor that takes longer than a batch of about _GROUPS groups.
        surrogate: quick times of pipelines; None if replays are as quick.
    """

    def __init__(self, problem: Problem, fabric: Fabric, bound: float | None = None) -> None:
        self.problem, self.fabric, self.slots = problem, fabric, slots_per_host(problem.candidate, problem.cluster)
        if bound is not None:
            self.bound = bound
        self.plain = host_order(problem.candidate, problem.cluster.devices_per_host)[0]
        self.plain_seconds = float(self.objective(self.plain[None])[0])
        self.rack = racks_of(fabric)
        stretches = runs(problem.table, overlap=problem.overlap)
        groups = problem.candidate.groups
        self.batch = int(np.clip(_GROUPS // groups, 8, 64))
        several = sum(len(rows) * times for rows, times in stretches) > _SHORT and problem.candidate.pipe > 1
        self.surrogate = Surrogate(problem) if several else None
        self.size = max(self.batch * groups / _GROUPS, 1)

    @functools.cached_property
    def bound(self) -> float:
        """Seconds that no placement is below."""
        return bounds.lower(self.problem, self.fabric)

    @property
    def enough(self) -> float:
        """Seconds at which a placement counts as the best."""
        return self.bound * (1 + bounds.ROUNDING * 2)

    def objective(self, where: Array) -> Array:
        """Return the steps [batch] in seconds of placements [batch, D, P]."""
        return self.problem.step(self.fabric, where).total

    def rough(self, where: Array) -> Array:
        """Return about the steps [batch] in seconds of placements [batch, D, P], soon even with many rows."""
        if self.surrogate is None:
            return self.objective(where)
        links, kinds = self._links(where)
        return self.problem.finish(links, kinds, self.surrogate.times(self.problem.seconds(links, kinds))).total

    def learn(self, where: Array) -> None:
        """Make the rough steps of some placements [batch, D, P] good, and of those like them."""
        if self.surrogate is not None:
            self.surrogate.learn(self.problem.seconds(*self._links(where)))

    def _links(self, where: Array) -> tuple[LinkSeconds, Array]:
        """Return the link seconds and the device kinds [batch, D, P] of placements."""
        found = self.problem.links(self.problem.paths(self.fabric, where))
        return found, self.problem.kind_of_host[where]

    def host_order(self, evaluations: int) -> Placement:
        """Return the placement in host order."""
        bound = min(self.bound, self.plain_seconds)
        return Placement(self.plain, self.plain_seconds, bound, "host order", evaluations)

    def better(self, ends: list[Array], source: str, evaluations: int) -> Placement:
        """Return the best of some placements, or host order if that is as good.

        Args:
            ends: hosts [D, P] of each.
            source: how they were found.
            evaluations: placements that were evaluated for them.
        """
        values = self.objective(np.array(ends))
        best, evaluations = int(np.argmin(values)), evaluations + len(ends) + 1
        if values[best] >= self.plain_seconds * (1 - bounds.ROUNDING):
            return self.host_order(evaluations)
        return Placement(ends[best], float(values[best]), self.bound, source, evaluations)

    def exactly(self, most: int) -> Placement | None:
        """Return the best of all placements; None if there are more than `most` without those that are alike."""
        c, twins = self.problem.candidate, exact.twins(self.fabric, self.problem.kind_of_host)
        found = _every(self.fabric, c.data, c.pipe, c.seat, tuple(twins.tolist()), most, c.inside, c.apart)
        if found is None:
            return None
        every, links = found

        def objective(some: Array) -> Array:
            return self.problem.evaluate(
                self.problem.links(links.take(some)), self.problem.kind_of_host[every[some]]
            ).total

        at, least = exact.search(objective, len(every), c.groups)
        where = every[at]
        if least >= self.plain_seconds * (1 - bounds.ROUNDING):
            where, least = self.plain, self.plain_seconds
        return Placement(where, least, least, "exact", len(every) + 1)

    def climb(self, start: Array, rng: np.random.Generator) -> Climbed:
        """Return the end of a climb, with about its seconds.

        Args:
            start: hosts [D, P] to begin with.
            rng: random numbers for the order of the exchanges.
        """
        most, used, best = self.batch * max(int(_BATCHES / self.size), 8), 0, (math.inf, start)
        for _ in range(_LEARNED):
            value = float(self.rough(start[None])[0])
            end = climb(self.rough, start, value, self.rack, self.slots > 1, rng, self.batch, most)
            true, used = float(self.objective(end.hosts[None])[0]), used + end.evaluations
            best = min(best, (true, end.hosts), key=lambda one: one[0])
            if true <= end.value * (1 + _TRUE):
                break
            self.learn(end.hosts[None])
            start = end.hosts
        return Climbed(best[1], best[0], used)


@functools.lru_cache(maxsize=4)
def _every(
    fabric: Fabric, data: int, pipe: int, tensor: int, twins: tuple[int, ...], most: int, inside: int, apart: int
) -> tuple[Array, Paths] | None:
    """Return all placements [count, D, P] and their paths; see `exact.placements`."""
    slots = data * pipe // len(twins)
    every = exact.placements(data, pipe, slots, np.array(twins), most, turns=slots == 1 or fabric.rails is None)
    return None if every is None else (every, paths(fabric, every, tensor, inside, apart))


def _starts(one: _Placing, start: Array | None, rng: np.random.Generator) -> list[anneal.Start]:
    """Return the placements that annealing begins with: plain layouts, and `start` if it is given."""
    problem, hosts = one.problem, len(one.problem.cluster.hosts)
    c = problem.candidate
    begin = anneal.starts(
        (c.data, c.pipe, one.slots),
        one.fabric.slowness,
        speed=problem.work.sum(axis=1)[problem.kind_of_host],
        load=c.stage_map.by_stage(problem.work[0]).sum(axis=0),
        rng=rng,
        rack=one.rack,
    )
    if start is not None:
        begin.append(anneal.Start(start, np.arange(hosts), (1, hosts)))
    return begin
