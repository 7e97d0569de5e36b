"""The search bounds all candidates, simulates those that the bound leaves, and places the best of them.

1. The memory of every candidate is estimated; those that do not fit are out.
2. Every other candidate is bounded in closed form (planner.search.pruning).
3. By rising bound, candidates are simulated in two plain layouts and two splits of the layers. If N plans are asked
   for, this ends when the next bound is above the worst of the best N: no other candidate can be among them.
4. By rising time, candidates are placed (planner.placement.place), until the bound over all placements of one is
   above the best placed time.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from paxtrain.config import REDUCE_DTYPES, SAVE_MODES, ModelConfig
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import SPECS, name_of
from planner.cluster.cluster import Cluster
from planner.cost import step_time
from planner.cost.link_seconds import Paths, fabric, paths
from planner.cost.step_time import Candidate, Problem
from planner.placement.bounds import lower
from planner.placement.place import Placement, place
from planner.search import layers, pruning
from planner.search.budget import Budget
from planner.search.space import BACKWARD, Choices, Space, enumerate_candidates

Array = np.ndarray


# Candidates that are simulated in one go: those of one table cost hardly more than one alone.
_TOGETHER = 256


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the search.

    Attributes:
        top: number of plans to rank; the rest is bounded away.
        placed: most meshes and schedules to place.
        quantile: quantile of the link samples' bandwidths, for which placements are optimized.
        seed: seed of the annealing.
        uneven: also split layers unevenly.
        gain: least gain of each kind of compression, as a share of the step, because it changes what is trained.
    """

    top: int = 10
    placed: int = 4
    quantile: float = 0.5
    seed: int = 0
    uneven: bool = True
    gain: float = 0.01


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A candidate with its prediction.

    Attributes:
        index: place of the candidate in the space.
        candidate: candidate with its split of the layers.
        placement: hosts of the tensor groups, their step time, and the bound over all placements.
        plain: seconds on the devices in order, pipeline neighbors side by side, as a run without a plan has them.
        layout: seconds on the devices in order, in the better of that layout and of data ranks side by side.
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
        return self.seconds * (1 + gain * ((self.candidate.backward != "none") + (self.candidate.data_rank > 0)))


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """The result of a search.

    Attributes:
        ranked: best candidates, quickest first.
        enumerated: number of all candidates.
        fitting: number of those that fit into memory.
        simulated: number of those that were simulated.
        placed: number of those that were placed.
        seconds: wall clock of the search.
        space: all candidates.
        bytes: bytes per device of all candidates.
        bounds: closed-form bounds of all candidates; inf: does not fit.
        points: [simulated, 2] seconds and bytes of those that were simulated, in plain layouts.
    """

    ranked: list[Found]
    enumerated: int
    fitting: int
    simulated: int
    placed: int
    seconds: float
    space: Space
    bytes: Array
    bounds: Array
    points: Array


def candidate_of(space: Space, i: int, counts: tuple[int, ...]) -> Candidate:
    """Return a candidate of the space with a split of the layers.

    Args:
        space: candidates.
        i: place of the candidate.
        counts: layers of each virtual stage.
    """
    return Candidate(
        data=int(space.data[i]),
        pipe=int(space.pipe[i]),
        tensor=int(space.tensor[i]),
        micro_batch=int(space.micro_batch[i]),
        micro_batches=int(space.micro_batches[i]),
        schedule=name_of(space.schedule[i]),
        chunks=int(space.chunks[i]),
        save=SAVE_MODES[space.save[i]],
        zero1=bool(space.zero1[i]),
        sequence_parallel=bool(space.sequence_parallel[i]),
        reduce_dtype=REDUCE_DTYPES[space.reduce_dtype[i]],
        backward=BACKWARD[space.backward[i]],
        backward_rank=int(space.backward_rank[i]) or 16,
        data_rank=int(space.data_rank[i]),
        counts=counts,
    )


def _mesh(c: Candidate) -> tuple:
    """Return the mesh and schedule: candidates that share them share good placements."""
    return c.data, c.pipe, c.tensor, c.schedule, c.chunks


class Search:
    """One model and batch on one cluster."""

    def __init__(
        self,
        cluster: Cluster,
        model: ModelConfig,
        global_batch: int,
        choices: Choices,
        budget: Budget,
        options: Options,
    ) -> None:
        self.cluster, self.model, self.budget, self.options = cluster, model, budget, options
        self.fabric = fabric(cluster, options.quantile)
        self._placed: dict[tuple, Placement] = {}
        self._layouts: dict[tuple[int, int, int], tuple[Array, Paths]] = {}
        self.space = enumerate_candidates(cluster, model, global_batch, choices)
        self.bytes = budget.bytes(cluster, model, self.space)
        self.limit = budget.limit(cluster)
        self.bounds = np.where(self.bytes <= self.limit, pruning.lower_bound(cluster, model, self.space), np.inf)
        kinds = (self.space.backward > 0).astype(float) + (self.space.data_rank > 0)
        self.scores = self.bounds * (1 + options.gain * kinds)  # bounds of what candidates are ranked by

    def require_one(self) -> None:
        """Require that a candidate fits into memory.

        Raises:
            UserError: none fits; the sentence names the closest and by how much it does not.
        """
        if np.isfinite(self.bounds).any():
            return
        i = int(np.argmin(self.bytes))
        c = candidate_of(self.space, i, layers.even(self.model.layers, int(self.space.pipe[i] * self.space.chunks[i])))
        raise UserError(
            f"no configuration fits into {self.limit / 1e9:.1f} GB per device: the closest, data={c.data} "
            f"pipe={c.pipe} tensor={c.tensor} micro_batch={c.micro_batch} {c.schedule} save={c.save}, needs "
            f"{self.bytes[i] / 1e9:.1f} GB, {(self.bytes[i] - self.limit) / 1e9:.1f} GB too much; more devices, a "
            "smaller model or a shorter sequence would help"
        )

    # --- One candidate ------------------------------------------------------------------------------------------------

    def splits(self, some: list[int]) -> list[tuple[int, tuple[int, ...], float]]:
        """Return some candidates with even layers, and with the best split if it differs and fits; and their bytes."""
        stages = [int(self.space.pipe[i] * self.space.chunks[i]) for i in some]
        even = [(i, layers.even(self.model.layers, count), float(self.bytes[i])) for i, count in zip(some, stages)]
        if not self.options.uneven:
            return even
        other = []
        for i, counts, _ in even:
            problem = Problem(self.cluster, self.model, candidate_of(self.space, i, counts))
            best = self._split(problem, np.zeros(problem.candidate.pipe, int))
            if best != counts:
                other.append((i, best))
        memory = self._memory([i for i, _ in other], [max(counts) for _, counts in other])
        return even + [(*split, size) for split, size in zip(other, memory.tolist()) if size <= self.limit]

    def _split(self, problem: Problem, kinds: Array) -> tuple[int, ...]:
        """Return the best split of the layers over stages of these kinds, int [P]."""
        c, on = problem.candidate, np.tile(kinds, problem.candidate.chunks)
        unit = np.array([x.forward + x.backward for x in problem.layer])[on]
        extra = np.zeros(len(on))
        extra[0] = problem.layer[on[0]].embedding
        # The head runs m times; layers run more often in stages that compute while idle.
        rows = c.micro_batches + (c.pipe - 1 if SPECS[c.schedule].masks(self.cluster.overlaps) else 0)
        extra[-1] += problem.layer[on[-1]].head * c.micro_batches / rows
        return layers.split(self.model.layers, unit, extra)

    def _memory(self, some: list[int], slots: list[int]) -> Array:
        """Return the bytes per device of candidates with other numbers of layer slots, [len(some)]."""
        other = dataclasses.replace(self.space.take(np.array(some, int)), slots=np.array(slots, int))
        return self.budget.bytes(self.cluster, self.model, other)

    def layouts(self, candidate: Candidate) -> tuple[Array, Paths]:
        """Return two layouts of devices in order: pipeline neighbors side by side, and data ranks side by side."""
        key = candidate.data, candidate.pipe, candidate.tensor
        if key not in self._layouts:
            hosts = step_time.host_order(candidate, self.cluster.devices_per_host)
            if self.cluster.devices_per_host > candidate.tensor:
                groups = np.arange(candidate.groups).reshape(1, candidate.pipe, candidate.data)
                other = np.swapaxes(groups, 1, 2) // (self.cluster.devices_per_host // candidate.tensor)
                hosts = np.concatenate([hosts, other])
            self._layouts[key] = hosts, paths(self.fabric, hosts, candidate.tensor)
        return self._layouts[key]

    def simulate(self, some: list[int]) -> list[Found]:
        """Return each of some candidates with the better of its splits and layouts."""
        tried = [(i, candidate_of(self.space, i, counts), memory) for i, counts, memory in self.splits(some)]
        problems = [Problem(self.cluster, self.model, candidate) for _, candidate, _ in tried]
        layouts = [self.layouts(candidate) for _, candidate, _ in tried]
        steps = step_time.steps(
            problems, [(where, p.kind_of_host[hosts]) for p, (hosts, where) in zip(problems, layouts)]
        )
        found: dict[int, Found] = {}
        for (i, candidate, memory), (hosts, _), step in zip(tried, layouts, steps):
            best = int(np.argmin(step.total))
            seconds = float(step.total[best])
            if i not in found or seconds < found[i].seconds:
                placement = Placement(hosts[best], seconds, 0.0, "layout", len(hosts))
                plain, bound = float(step.total[0]), float(self.bounds[i])
                found[i] = Found(i, candidate, placement, plain, seconds, memory, bound)
        return list(found.values())

    def without_compression(self, chosen: Found) -> Found:
        """Return the quickest candidate that compresses nothing, or the chosen one if it does not compress."""
        if chosen.candidate.backward == "none" and not chosen.candidate.data_rank:
            return chosen
        return self.run((self.space.backward == 0) & (self.space.data_rank == 0), top=1).ranked[0]

    def _known(self, problem: Problem, placement: Placement) -> Placement:
        """Return the placement, or a better one of a candidate placed before with the same mesh and schedule."""
        other = self._placed.get(_mesh(problem.candidate))
        if other is None:
            return placement
        seconds = float(problem.step(self.fabric, other.hosts[None]).total[0])
        if seconds >= placement.seconds:
            return placement
        return dataclasses.replace(other, seconds=seconds, bound=min(placement.bound, seconds))

    def _resplit(self, f: Found, problem: Problem, placement: Placement) -> Found:
        """Return the placed candidate; if devices differ, split layers by the slowest kind that each stage lies on.

        Args:
            f: candidate before its placement.
            problem: the same candidate on the cluster.
            placement: where it was placed.
        """
        found = dataclasses.replace(f, placement=placement)
        if len(problem.layer) == 1 or not self.options.uneven or f.candidate.pipe == 1:
            return found
        work = np.array([x.forward + x.backward for x in problem.layer])
        kinds = problem.kind_of_host[placement.hosts]  # [D, P]
        slowest = np.take_along_axis(kinds, np.argmax(work[kinds], axis=0)[None], 0)[0]
        counts = self._split(problem, slowest)
        memory = float(self._memory([f.index], [max(counts)])[0])
        if counts == f.candidate.counts or memory > self.limit:
            return found
        other = Problem(self.cluster, self.model, dataclasses.replace(f.candidate, counts=counts))
        again = place(other, self.fabric, seed=self.options.seed, start=placement.hosts)
        if again.seconds >= placement.seconds:
            return found
        hosts, where = self.layouts(other.candidate)
        [step] = step_time.steps([other], [(where, other.kind_of_host[hosts])])
        plain, layout = float(step.total[0]), float(step.total.min())
        return dataclasses.replace(
            f, candidate=other.candidate, placement=again, plain=plain, layout=layout, memory=memory
        )

    # --- All of them --------------------------------------------------------------------------------------------------

    def run(
        self,
        among: Array | bool = True,
        top: int | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Outcome:
        """Rank the candidates, and place the best of them.

        Args:
            among: bool [N], candidates to look at.
            top: number of plans to rank; None: that of the options.
            progress: called with a sentence now and then.

        Raises:
            UserError: nothing fits into memory.
        """
        began = time.perf_counter()
        self.require_one()
        scores = np.where(among, self.scores, np.inf)
        order = np.argsort(scores, kind="stable")
        order = order[np.isfinite(scores[order])]
        found, points = self._rank(order, scores, top or self.options.top, progress)
        ranked, placed = self._place(found, progress)
        return Outcome(
            ranked=ranked,
            enumerated=len(self.space),
            fitting=len(order),
            simulated=len(points),
            placed=placed,
            seconds=time.perf_counter() - began,
            space=self.space,
            bytes=self.bytes,
            bounds=self.bounds,
            points=np.array(points),
        )

    def _key(self, found: Found) -> float:
        return found.score(self.options.gain)

    def _rank(
        self, order: Array, scores: Array, top: int, progress: Callable[[str], None]
    ) -> tuple[list[Found], list[tuple[float, float]]]:
        """Simulate candidates in the order of their bounds until the next bound is above the worst of the best.

        Args:
            order: int [n], candidates by rising score.
            scores: bound [N] of each candidate, with the handicap of its compression.
            top: how many of the best to keep.
            progress: called with a sentence now and then.

        Returns:
            The best candidates, and (seconds, bytes) of all that were simulated.
        """
        found: list[Found] = []
        points: list[tuple[float, float]] = []
        worst, simulated = np.inf, 0
        while simulated < len(order) and scores[order[simulated]] < worst:
            some = order[simulated : simulated + _TOGETHER]
            new = self.simulate(some[scores[some] < worst].tolist())
            points += [(f.seconds, f.memory) for f in new]
            simulated += len(some)
            found = sorted(found + new, key=self._key)[:top]
            if len(found) == top:
                worst = self._key(found[-1])
            progress(f"{simulated:,} of {len(order):,} candidates simulated, best {found[0].seconds:.4g} s")
        return found, points

    def _place(self, found: list[Found], progress: Callable[[str], None]) -> tuple[list[Found], int]:
        """Place those that a placement could make the best; return all in their new order, and how many were placed."""
        found, best, placed = list(found), np.inf, 0
        for n, f in enumerate(found):
            problem = Problem(self.cluster, self.model, f.candidate)
            bound = lower(problem, self.fabric)
            known = self._known(problem, dataclasses.replace(f.placement, bound=bound))
            f = dataclasses.replace(f, placement=known)
            mesh = _mesh(f.candidate)
            if bound * self._key(f) / f.seconds < best and placed < self.options.placed and mesh not in self._placed:
                progress(f"placing candidate {n + 1} of {len(found)}")
                placement = place(problem, self.fabric, seed=self.options.seed, start=known.hosts)
                self._placed[mesh] = placement
                placed += 1
                f = self._resplit(f, problem, placement)
            found[n] = f
            best = min(best, self._key(f))
        return sorted(found, key=self._key), placed
