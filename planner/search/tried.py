"""Simulation of candidates on known placements, each with the splits of its layers that are worth a try."""

import dataclasses
import itertools

import numpy as np

from paxtrain.config import ModelConfig
from planner.cluster.cluster import Cluster
from planner.cost import step_time
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import Fabric, Paths
from planner.cost.shares import by_speed
from planner.cost.step_time import Problem
from planner.placement.place import Placement
from planner.search.budget import Budget
from planner.search.pool import Pools
from planner.search.space import Choices, Space, candidate_of
from planner.search.splitting import Counts, Splits, slowest

Array = np.ndarray

_AROUND = 8  # most layers that are moved one after the other
_PAIRS = 40  # most pairs of stages that are exchanged


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A candidate with its prediction.

    Attributes:
        index: place of the candidate in the space.
        candidate: candidate with its split of the layers.
        placement: hosts of the tensor groups, their step time, and the bound over all placements.
        plain: seconds on the devices in order, pipeline neighbors side by side, as a run without a plan has them; nan
            until the plan is among those that are ranked.
        layout: seconds on the devices in order, in the better of that layout and of data ranks side by side; likewise.
        memory: bytes per device.
        screened: closed-form bound in seconds.
    """

    index: int
    candidate: Candidate
    placement: Placement
    plain: float
    layout: float
    memory: float
    screened: float

    @property
    def seconds(self) -> float:
        return self.placement.seconds

    def score(self, gain: float) -> float:
        """Return the seconds with a handicap of `gain` for each kind of compression."""
        return self.seconds * handicap(self.candidate, gain)


def handicap(candidate: Candidate, gain: float) -> float:
    """Return the factor by which a candidate's seconds count more, by `gain` for each kind of compression."""
    return 1 + gain * ((candidate.backward != "none") + (candidate.data_rank > 0) + candidate.compresses_forward)


def _within(
    problems: list[Problem], used: list[tuple[Array, Paths]], index: list[int], limit: float
) -> list[tuple[int, tuple[Array, Paths]]]:
    """Return the numbers of the problems whose slowest stage may end within a limit, and on which placements it may.

    Each candidate keeps the placement on which its slowest stage is the quickest.

    Args:
        problems: candidates with their splits.
        used: placements of each, and their paths.
        index: place of each problem's candidate in the space.
        limit: seconds.
    """
    loads, least = [], dict.fromkeys(index, np.inf)
    for i, problem, (hosts, _) in zip(index, problems, used):
        c = problem.candidate
        stages = c.stage_map.by_stage(problem.work).sum(axis=1)  # [kinds, P]
        work = stages[problem.kind_of_host[hosts], np.arange(c.pipe)].max(axis=2)  # [K, D]
        loads.append((work * np.array(c.rank_micro_batches)).max(axis=1))
        least[i] = min(least[i], float(loads[-1].min()))
    found = []
    for n, (i, load, (hosts, path)) in enumerate(zip(index, loads, used)):
        keep = np.flatnonzero((load < limit) | (load <= least[i]))
        if len(keep):
            found.append((n, (hosts[keep], path.take(keep)) if len(keep) < len(hosts) else (hosts, path)))
    return found


class Tried:
    """The simulations of a space's candidates.

    Attributes:
        pools: placements that each mesh's candidates are simulated on.
        splits: splits of the layers that are tried.
    """

    def __init__(
        self,
        cluster: Cluster,
        model: ModelConfig,
        fabric: Fabric,
        space: Space,
        budget: Budget,
        uneven: bool,
        choices: Choices,
    ) -> None:
        self.choices = choices
        self.cluster, self.model, self.fabric, self.space = cluster, model, fabric, space
        self.pools, self.uneven = Pools(fabric), uneven
        self.splits = Splits(cluster, model, budget, space)
        self.bytes = budget.bytes(cluster, model, space)
        self.bounds = np.zeros(len(space))
        self._of_splits: dict[tuple, Array] = {}  # what `_with` has simulated, to which plans come back

    def problem(self, i: int, counts: Counts) -> Problem:
        """Return a candidate with a split of the layers on the cluster."""
        return Problem(self.cluster, self.model, candidate_of(self.space, i, counts, self.choices))

    def simulate(self, some: list[int], only: Array | None = None, limit: float = np.inf) -> list[Found]:
        """Return each of some candidates with the best of its splits and of the known placements of its mesh.

        Candidates with uneven data ranks are left out if no placement suits them.

        Args:
            some: places of the candidates in the space.
            only: placements [K, D, P] of the one mesh that all of them have, to try instead of those known.
            limit: seconds; what certainly takes longer need not be simulated, as long as each candidate is.
        """
        problems = [self.problem(i, self.splits.even(i)) for i in some]
        if only is None:
            used = [self.pools.of(problem).placements for problem in problems]
        else:  # those with the same groups have the same paths
            by_group = {problem.candidate.shard_group: problem for problem in problems}
            given = {group: problem.paths(self.fabric, only) for group, problem in by_group.items()}
            used = [(only, given[problem.candidate.shard_group]) for problem in problems]
        memory, index = [float(self.bytes[i]) for i in some], list(some)
        if self.uneven:
            other = [
                (n, counts, on)
                for n, problem in enumerate(problems)
                for counts, on in self.splits.others(problem, used[n][0])
            ]
            sizes = self.splits.memory([some[n] for n, *_ in other], [counts for _, counts, _ in other]).tolist()
            for (n, counts, on), size in zip(other, sizes):
                if size <= self.splits.limit:
                    hosts, path = used[n]
                    problems.append(self.problem(some[n], counts))
                    used.append((hosts, path) if len(on) == len(hosts) else (hosts[on], path.take(on)))
                    memory.append(size)
                    index.append(some[n])
        if self.space.uneven_data[some].any():
            problems, used, memory, index = self._by_speed(problems, used, memory, index)
        if len(set(self.cluster.kinds)) > 1 and np.isfinite(limit):
            tried = _within(problems, used, index, limit)
            problems, used = [problems[n] for n, _ in tried], [left for _, left in tried]
            memory, index = [memory[n] for n, _ in tried], [index[n] for n, _ in tried]
        steps = step_time.steps(problems, [(path, p.kind_of_host[hosts]) for p, (hosts, path) in zip(problems, used)])
        found: dict[int, Found] = {}
        for i, problem, size, (hosts, _), step in zip(index, problems, memory, used, steps):
            best = int(np.argmin(step.total))
            seconds = float(step.total[best])
            if i not in found or seconds < found[i].seconds:
                placement = Placement(hosts[best], seconds, 0.0, "known", len(hosts))
                found[i] = Found(i, problem.candidate, placement, np.nan, np.nan, size, float(self.bounds[i]))
        return list(found.values())

    def _by_speed(
        self, problems: list[Problem], used: list[tuple[Array, Paths]], memory: list[float], index: list[int]
    ) -> tuple[list[Problem], list[tuple[Array, Paths]], list[float], list[int]]:
        """Return the problems, those of uneven data ranks with the numbers of micro-batches that suit their placements.

        Candidates for which there are none, since the ranks of all placements are alike or memory is short, are left
        out.

        Args:
            problems: candidates with their splits.
            used: placements of each, and their paths.
            memory: bytes of each.
            index: place of each problem's candidate in the space.
        """
        found: list[tuple[Problem, tuple[Array, Paths], float, int]] = []
        for problem, (hosts, path), size, i in zip(problems, used, memory, index):
            if not self.space.uneven_data[i]:
                found.append((problem, (hosts, path), size, i))
                continue
            for other, on in by_speed(problem, hosts):
                c = other.candidate
                [size] = self.splits.memory([i], [c.counts], [c.micro_batches]).tolist()
                if size <= self.splits.limit:
                    found.append((other, (hosts[on], path.take(on)), size, i))
        return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found], [f[3] for f in found]

    def around(self, f: Found) -> Found:
        """Return a plan with its split moved layer by layer, on its placement, as long as that makes it quicker."""
        for _ in range(_AROUND):
            found = self._with(f, self.splits.around(f.candidate.counts), f.placement.hosts[None])
            best = min(found, key=lambda other: other.seconds, default=f)
            if best.seconds >= f.seconds * (1 - 1e-9):
                break
            f = best
        return f

    def variants(self, f: Found, most: int, everywhere: bool) -> list[Found]:
        """Return a plan with the splits near the even one and near its own that are best.

        Args:
            f: plan.
            most: number of splits.
            everywhere: try them on all known placements, not on the plan's alone.
        """
        even = self.splits.even(f.index)
        some = [even, *self.splits.around(even), *self.splits.around(f.candidate.counts)]
        some += self.splits.found.get((f.candidate.pipe, f.candidate.chunks), [])
        problem = Problem(self.cluster, self.model, f.candidate)
        pool = self.pools.of(problem)
        other = [counts for counts in dict.fromkeys(some) if counts != f.candidate.counts]
        known = pool.placements if everywhere else (f.placement.hosts[None],)
        found = [*self._with(f, other, *known), *self._exchanged(f)]
        best: dict[Counts, Found] = {}
        for other_split in sorted(found, key=lambda one: one.seconds):
            best.setdefault(other_split.candidate.counts, other_split)
        return list(best.values())[:most]

    def _exchanged(self, f: Found) -> list[Found]:
        """Return a plan with hosts and layers of two stages exchanged, for pairs of stages that differ in either.

        If they differ in kind, layers are also split anew.
        """
        c, hosts = f.candidate, f.placement.hosts
        problem = Problem(self.cluster, self.model, c)
        kinds, counts = slowest(problem, hosts[None])[0], c.stage_map.by_stage(c.counts)
        tried: list[tuple[Counts, Array]] = []
        for a, b in itertools.islice(itertools.combinations(range(c.pipe), 2), _PAIRS):
            if kinds[a] == kinds[b] and (counts[:, a] == counts[:, b]).all():
                continue
            order = np.arange(c.pipe)
            order[[a, b]] = b, a
            splits = [tuple(c.stage_map.by_model(counts[:, order]).tolist())]
            if kinds[a] != kinds[b]:
                splits.append(self.splits.best(problem, kinds[order]))
            tried += [(split, hosts[:, order]) for split in splits]
        if not self.uneven or not tried:
            return []
        sizes = self.splits.memory([f.index] * len(tried), [split for split, _ in tried]).tolist()
        fitting = [(split, new, size) for (split, new), size in zip(tried, sizes) if size <= self.splits.limit]
        if not fitting:
            return []
        every = np.array([new for _, new, _ in fitting])
        candidates = [dataclasses.replace(c, counts=split) for split, *_ in fitting]
        problems = [Problem(self.cluster, self.model, candidate) for candidate in candidates]
        where = problem.paths(self.fabric, every)
        on = [(where.take(slice(n, n + 1)), problem.kind_of_host[every[n : n + 1]]) for n in range(len(every))]
        found = []
        for candidate, (_, new, size), step in zip(candidates, fitting, step_time.steps(problems, on)):
            placement = Placement(new, float(step.total[0]), 0.0, f.placement.source, 1)
            found.append(dataclasses.replace(f, candidate=candidate, placement=placement, memory=size))
        return found

    def _with(self, f: Found, every: list[Counts], hosts: Array, where: Paths | None = None) -> list[Found]:
        """Return a plan with each of some splits that fit, on the best of some placements.

        Args:
            f: plan.
            every: splits.
            hosts: placements [K, D, P].
            where: their paths, if they are known.
        """
        if not self.uneven or f.candidate.pipe == 1:
            return []
        sizes = self.splits.memory([f.index] * len(every), every).tolist()
        fitting = [(counts, size) for counts, size in zip(every, sizes) if size <= self.splits.limit]
        if not fitting:
            return []
        splits = tuple(counts for counts, _ in fitting)
        asked = f.index, f.candidate.data_micro_batches, splits, len(hosts), hosts.tobytes()
        if asked not in self._of_splits:
            problem = Problem(self.cluster, self.model, f.candidate)
            where = where or problem.paths(self.fabric, hosts)
            self._of_splits[asked] = step_time.of_splits(problem, splits, where, problem.kind_of_host[hosts])
        found = []
        for (counts, size), step in zip(fitting, self._of_splits[asked]):
            best = int(np.argmin(step))
            placement = Placement(hosts[best], float(step[best]), 0.0, f.placement.source, len(hosts))
            candidate = dataclasses.replace(f.candidate, counts=counts)
            found.append(dataclasses.replace(f, candidate=candidate, placement=placement, memory=size))
        return found

    def completed(self, every: list[Found]) -> list[Found]:
        """Return plans with their seconds on the plain layouts, and with that for their source if they lie on one."""
        problems = [Problem(self.cluster, self.model, f.candidate) for f in every]
        pools = [self.pools.of(problem) for problem in problems]
        layouts = [pool.hosts[: pool.plain] for pool in pools]
        where = [pool.paths.take(slice(0, pool.plain)) for pool in pools]
        kinds = [problem.kind_of_host[hosts] for problem, hosts in zip(problems, layouts)]
        found = []
        for f, hosts, step in zip(every, layouts, step_time.steps(problems, list(zip(where, kinds)))):
            placement = f.placement
            if placement.source == "known" and (hosts == placement.hosts).all(axis=(1, 2)).any():
                placement = dataclasses.replace(placement, source="layout")
            plain, layout = float(step.total[0]), float(step.total.min())
            found.append(dataclasses.replace(f, placement=placement, plain=plain, layout=layout))
        return found
