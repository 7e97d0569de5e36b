"""The search bounds all candidates, simulates those that the bound leaves, and chooses plan and placement together.

1. The memory of every candidate is estimated; those that do not fit are out.
2. Every other candidate is bounded in closed form (planner.search.pruning).
3. By rising bound, candidates are simulated on the known placements of their mesh (planner.search.pool), with several
   splits of the layers (planner.search.splitting). If N plans are asked for, this ends when all other bounds are above
   the worst of the best N. Also passed over are candidates that would be if they were about as far above their bound
   as others of the same mesh and schedule.
4. The best plan of each mesh and schedule is placed quickly, the best of these thoroughly (planner.search.refine), as
   long as their bound is below the best plan.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, in_words
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.pipeline import layer_split
from planner.placement.spared import spared
from planner.search import pruning
from planner.search.budget import Budget
from planner.search.enumeration import enumerate_candidates
from planner.search.refine import Refinement
from planner.search.space import Choices, Space, candidate_of
from planner.search.tried import Found, Tried

Array = np.ndarray


# Candidates that are simulated in one go, first and later: those of one table cost hardly more than one alone.
_FIRST, _TOGETHER = 64, 256
# Candidates that are alike in mesh and some columns: how many of them are simulated to judge the others, and the factor
# by which the others may be nearer to their bound.
_ALIKE = (
    (("schedule", "chunks", "uneven_data", "micro_batch"), 3, 0.8),
    (("schedule", "chunks", "uneven_data"), 8, 0.7),
)
_QUICKLY, _LEAST = 2, 8  # most plans that are placed quickly after these, and at the end
_LEADERS = 16  # most meshes whose best candidate is told


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the search.

    Attributes:
        top: number of plans to rank; the rest is bounded away.
        placed: most meshes and schedules to place thoroughly.
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
class Outcome:
    """The result of a search.

    Attributes:
        ranked: best candidates, quickest first.
        enumerated: number of all candidates.
        fitting: number of those that fit into memory.
        simulated: number of those that were simulated.
        placed: number of times that a plan was placed.
        seconds: wall clock of the search.
        space: all candidates.
        bytes: bytes per device of all candidates.
        bounds: closed-form bounds of all candidates, of those that do not fit, too.
        bound: seconds that no plan that fits is below, wherever it is placed.
        points: [simulated, 3] place in the space, seconds and bytes of those that were simulated, in plain layouts.
        leaders: best candidate of each mesh that was simulated, quickest first.
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
    bound: float
    points: Array
    leaders: tuple[Found, ...] = ()


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
        self.global_batch, self.choices = global_batch, choices
        self.fabric = fabric(cluster, options.quantile)
        self.space = enumerate_candidates(cluster, model, global_batch, choices)
        self.tried = Tried(cluster, model, self.fabric, self.space, budget, options.uneven, choices)
        self.bytes = self.tried.bytes
        self.limit, self.coded = budget.limit(cluster), choices.coded
        bounds = pruning.lower_bound(cluster, model, self.space, self.coded)
        self.every_bound = bounds
        self.bounds = np.where(self.bytes <= self.limit, bounds, np.inf)
        self.tried.bounds = self.bounds
        kinds = (self.space.backward > 0).astype(float) + (self.space.data_rank > 0)
        kinds = kinds + (self.space.pipe > 1) * self.coded.compresses_forward
        self._handicaps = 1 + options.gain * kinds
        self.scores = self.bounds * self._handicaps  # bounds of what candidates are ranked by
        self._alike = [_alike([self.space.column(name) for name in (*AXES, *names)]) for names, *_ in _ALIKE]

    def candidate(self, i: int, counts: tuple[int, ...]) -> Candidate:
        """Return candidate i with a split of the layers."""
        return candidate_of(self.space, i, counts, self.choices)

    def among(self, choices: Choices) -> "Search":
        """Return a search among other choices that knows the placements that this one has found."""
        other = Search(self.cluster, self.model, self.global_batch, choices, self.budget, self.options)
        other.tried.pools = self.tried.pools
        return other

    def require_one(self) -> None:
        """Require that a candidate fits into memory.

        Raises:
            UserError: none fits; the sentence names the closest and by how much it does not.
        """
        if np.isfinite(self.bounds).any():
            return
        i = int(np.argmin(self.bytes))
        c = self.candidate(i, layer_split.even(self.model.layers, int(self.space.pipe[i] * self.space.chunks[i])))
        raise UserError(
            f"no configuration fits into {self.limit / 1e9:.1f} GB per device: the closest, {in_words(c.sizes)} "
            f"micro_batch={c.micro_batch} {c.schedule} save={c.save}, needs "
            f"{self.bytes[i] / 1e9:.1f} GB, {(self.bytes[i] - self.limit) / 1e9:.1f} GB too much; more devices, a "
            "smaller model or a shorter sequence would help"
        )

    def simulate(self, some: list[int], limit: float = np.inf) -> list[Found]:
        """Return each of some candidates with the best of its splits and of the known placements of its mesh.

        Args:
            some: places of the candidates in the space.
            limit: seconds; see `Tried.simulate`.
        """
        return self.tried.simulate(some, limit=limit)

    def without_compression(self, chosen: Found) -> Found:
        """Return the quickest plan on known placements that compresses nothing, or the chosen one if it does not."""
        c = chosen.candidate
        if c.backward == "none" and not (c.data_rank or c.compresses_forward or c.compresses_embedding):
            return chosen
        if self.coded.compresses_forward or self.coded.embedding is not None:  # all candidates have these, if they can
            dense = dataclasses.replace(self.coded, forward=None, forward_rank=0, embedding=None)
            other = self.among(dataclasses.replace(self.choices, coded=dense))
            return other.run((other.space.backward == 0) & (other.space.data_rank == 0), top=1, placed=0).ranked[0]
        return self.run((self.space.backward == 0) & (self.space.data_rank == 0), top=1, placed=0).ranked[0]

    # --- All of them --------------------------------------------------------------------------------------------------

    def run(
        self,
        among: Array | bool = True,
        top: int | None = None,
        placed: int | None = None,
        quick: int | None = None,
        limit: float = np.inf,
        progress: Callable[[str], None] = lambda text: None,
    ) -> Outcome:
        """Rank the candidates, and place the best of them.

        Args:
            among: bool [N], candidates to look at.
            top: number of plans to rank; None: that of the options.
            placed: most meshes and schedules to place thoroughly; None: that of the options.
            quick: most of them to place quickly; None: as many as are worth it, or none if none is placed thoroughly.
            limit: seconds; of candidates that take longer any may be passed over once one was simulated.
            progress: called with a sentence now and then.

        Raises:
            UserError: nothing fits into memory, or only uneven data ranks may be chosen and all are alike.
        """
        began = time.perf_counter()
        self.require_one()
        scores = np.where(among, self.scores, np.inf)
        order = np.argsort(scores, kind="stable")
        order = order[np.isfinite(scores[order])]
        top, placed = top or self.options.top, self.options.placed if placed is None else placed
        refined = Refinement(self.tried, self.options.gain, self.options.seed, placed, quick)
        points = self._rank(order, scores, top, limit, refined, progress)
        if not refined.found:
            raise UserError(
                "no candidate has data ranks whose devices differ in speed, as --uneven_data=yes demands; "
                "--uneven_data=both would work"
            )
        refined.carefully(progress)
        ranked = [self._bounded(f, refined) for f in self.tried.completed(refined.ranked(top))]
        ranked = sorted(map(self._spared, ranked), key=refined.key)
        return Outcome(
            ranked=ranked,
            enumerated=len(self.space),
            fitting=len(order),
            simulated=len(points),
            placed=refined.placed,
            seconds=time.perf_counter() - began,
            space=self.space,
            bytes=self.bytes,
            bounds=self.every_bound,
            bound=min(float(self.bounds[order].min()), *(f.seconds for f in ranked)),
            points=np.array(points),
            leaders=tuple(refined.leaders(_LEADERS)),
        )

    def _rank(
        self, order: Array, scores: Array, top: int, limit: float, refined: Refinement, progress: Callable[[str], None]
    ) -> list[tuple[int, float, float]]:
        """Simulate candidates in the order of their bounds until no other one can be, or is like, one of the best.

        Now and then the best are placed quickly, so that the others are passed sooner.

        Args:
            order: int [n], candidates by rising score.
            scores: bound [N] of each candidate, with the handicap of its compression.
            top: how many of the best are asked for.
            limit: seconds above which nothing is asked for once one was simulated.
            refined: where the simulated candidates are added.
            progress: called with a sentence now and then.

        Returns:
            (place in the space, seconds, bytes) of all that were simulated.
        """
        points: list[tuple[int, float, float]] = []
        worst, left = np.inf, order
        while True:
            open_ = left[(self._expected(scores, refined) < np.minimum(worst, limit * self._handicaps))[left]]
            some = open_[: min(_TOGETHER, _FIRST + len(points))]
            new = self.simulate(some.tolist(), worst) if len(some) else []
            points += [(f.index, f.seconds, f.memory) for f in new]
            left = left[~np.isin(left, some)]
            refined.add(new)
            tried = refined.placed
            refined.quickly(_QUICKLY if len(some) else _LEAST, progress)
            if not len(some) and refined.placed == tried:
                return points
            best = refined.ranked(top)
            if len(best) == top:
                worst = refined.key(best[-1])
            if best:
                progress(f"{len(points):,} of {len(order):,} candidates simulated, best {best[0].seconds:.4g} s")

    def _expected(self, scores: Array, refined: Refinement) -> Array:
        """Return what candidates [N] take at least if they are above their bounds as others like them are.

        The bounds of candidates with the same mesh and schedule lack the same transfers.

        Args:
            scores: bound [N] of each candidate, with the handicap of its compression.
            refined: the plans found so far.
        """
        known = np.fromiter(refined.found, int, len(refined.found))
        above = np.array([f.seconds / f.screened for f in refined.found.values()])
        found = scores
        for alike, (_, several, nearer) in zip(self._alike, _ALIKE):
            least, count = np.full(len(self.space), np.inf), np.bincount(alike[known], minlength=len(self.space))
            np.minimum.at(least, alike[known], above)
            found = np.maximum(found, scores * np.where(count >= several, least * nearer, 1.0)[alike])
        return found

    def _spared(self, f: Found) -> Found:
        """Return a plan that compresses only on those links between stages that need it."""
        candidate, placement = spared(self.cluster, self.model, self.fabric, f.candidate, f.placement)
        return f if candidate is f.candidate else dataclasses.replace(f, candidate=candidate, placement=placement)

    def _bounded(self, f: Found, refined: Refinement) -> Found:
        """Return a plan with a bound over all placements."""
        if f.placement.source == "exact":
            return f
        bound = min(refined.bound(f), f.seconds)
        return dataclasses.replace(f, placement=dataclasses.replace(f.placement, bound=bound))


def _alike(columns: list[Array]) -> Array:
    """Return a number [N] for each candidate, the same for those that are alike in all columns."""
    key = np.zeros(len(columns[0]), int)
    for column in columns:  # one number for all columns, which is sorted much quicker than rows of them
        key = key * (int(column.max()) + 1) + column
    return np.unique(key, return_inverse=True)[1]
