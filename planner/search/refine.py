"""The joint choice of plan and placement, from candidates that were simulated on known placements.

Placements and splits that are found for one candidate are tried with all others of its mesh, whose best may then be
another one, which is placed in turn.
"""

import dataclasses
import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from planner.cost.candidate import Candidate
from planner.cost.step_time import Problem
from planner.placement.bounds import lower
from planner.placement.place import Placement, are_few, place, quickly
from planner.search.tried import Found, Tried, handicap

# Of the tuples the first is for problems with so many placements that they are annealed, the second for those whose
# placements can all be evaluated.
_QUICK = 16  # most meshes with schedules that are placed quickly
# By which share a plan may be behind the best to be placed thoroughly: at least, and in multiples of what that has
# gained so far. If all placements can be evaluated, other splits are tried too, and what they gain is not known before.
_BEHIND, _GAINS, _OTHER_SPLIT = 0.003, 1.5, 0.5
_FEW = 0.25  # a plan whose placements can all be evaluated counts as that part of one that is placed thoroughly
_TURNS = (1, 3)  # most turns of placing and of splitting anew
_AGAIN, _EACH = 64, 12  # most candidates of a mesh, and of a schedule on it, that a new placement is tried with
# Of a plan that is placed thoroughly: most rounds, how many other splits are placed quickly in each, and how many of
# these thoroughly, if they take that share longer at most.
_ROUNDS, _SPLITS, _CAREFUL, _CLOSE = (1, 3), (3, 16), (0, 8), (0.0, 0.2)
_WORTH = 1e-6  # share of the step that counts as a gain
_LAST = 4  # most times that the best plan is placed anew since another one became the best


def kind_of(c: Candidate) -> tuple:
    """Return the mesh and the schedule: candidates that share them share good placements."""
    return *c.sizes.values(), c.schedule, c.chunks


class Refinement:
    """The plans found so far, which get better by placements and splits.

    Attributes:
        found: best plan of each candidate, by the candidate's place in the space.
        placed: number of plans that were placed.
        most: most meshes and schedules to place thoroughly, of those with few placements four times as many.
        quick: most of them to place quickly.
    """

    def __init__(self, tried: Tried, gain: float, seed: int, most: int, quick: int | None = None) -> None:
        self.tried, self.gain, self.seed, self.most = tried, gain, seed, most
        self.quick = _QUICK * bool(most) if quick is None else quick
        self.found: dict[int, Found] = {}
        self.placed = 0
        self._gained = 0.0  # most that care has gained over a quick placement, as a share
        # Over all placements, and whether they are as close as they get, by (index, counts).
        self._bounds: dict[tuple, tuple[float, bool]] = {}
        self._done: dict[tuple, int] = {}  # effort with which (index, counts) was placed
        self._exact: dict[tuple, Placement] = {}  # best of all placements, by (index, counts) and effort
        self._split: dict[tuple, Found] = {}  # what `_resplit` has simulated

    def key(self, f: Found) -> float:
        """Return what plans are ranked by."""
        return f.score(self.gain)

    @property
    def best(self) -> Found:
        """The best plan."""
        return min(self.found.values(), key=self.key)

    def ranked(self, top: int) -> list[Found]:
        """Return the best plans, the best first."""
        return heapq.nsmallest(top, self.found.values(), key=self.key)

    def leaders(self, top: int) -> list[Found]:
        """Return the best plan of each mesh, the best first."""
        best: dict[tuple, Found] = {}
        for f in sorted(self.found.values(), key=self.key):
            best.setdefault(tuple(f.candidate.sizes.values()), f)
        return list(best.values())[:top]

    def add(self, new: list[Found]) -> None:
        """Add plans that were simulated."""
        self.found |= {f.index: f for f in new}

    def quickly(self, most: int, progress: Callable[[str], None]) -> None:
        """Place the best plans of meshes and schedules quickly.

        Args:
            most: most of them.
            progress: called with a sentence now and then.
        """
        for _, f in zip(range(min(most, self.quick)), self._leaders(0)):
            progress(f"placing quickly; best {self.best.seconds:.4g} s")
            self.quick -= 1
            self._place(f, 0)

    def carefully(self, progress: Callable[[str], None]) -> None:
        """Place the best plans thoroughly, and the best of all in any case.

        Args:
            progress: called with a sentence now and then.
        """
        spent, leaders = 0.0, self._leaders(1)
        while spent < self.most and (f := next(leaders, None)) is not None:
            spent += _FEW if self._few(f) else 1
            progress(f"placing, {math.ceil(spent)} of {self.most}; best {self.best.seconds:.4g} s")
            self._place(f, 1)
        for _ in range(_LAST * bool(self.most)):
            if self._done.get(self._name(self.best), -1) >= 1 or self.best.candidate.data_micro_batches:
                break
            self._place(self.best, 1)

    def _name(self, f: Found) -> tuple:
        return f.index, f.candidate.counts

    def _leaders(self, effort: int) -> Iterator[Found]:
        """Yield the best plan of each mesh and schedule that is not placed and could be the best; new meshes first.

        Args:
            effort: 0: quickly, 1: thoroughly.
        """
        seen: set[tuple] = set()
        while self.found:
            best = self.key(self.best)
            leaders: dict[tuple, Found] = {}
            for f in sorted(self.found.values(), key=self.key):
                if not f.candidate.data_micro_batches:  # whose placements are those found for others of their mesh
                    leaders.setdefault(self._group(f), f)
            open_ = [f for f in leaders.values() if self._name(f) not in seen and self._open(f, effort, best)]
            if not open_:
                return
            meshes = {kind[:3] for kind in (kind_of(self.found[name[0]].candidate) for name in seen)}
            new = [f for f in open_ if kind_of(f.candidate)[:3] not in meshes]
            f = (new or open_)[0]
            seen.add(self._name(f))
            if self._could_be_best(f, effort, best):
                yield f

    def _group(self, f: Found) -> tuple:
        """Return what plans share of which only the best is placed: less if placing is quick."""
        c = f.candidate
        return (*kind_of(c), c.shard, c.shard_group, c.micro_batch) if self._few(f) else kind_of(c)

    def _open(self, f: Found, effort: int, best: float) -> bool:
        late = self._done.get(self._name(f), -1) >= effort
        return not late and f.screened * handicap(f.candidate, self.gain) < best

    def _could_be_best(self, f: Found, effort: int, best: float) -> bool:
        """Return whether a placement of a plan could be the best of all."""
        if self._few(f):
            if self.key(f) <= best * (1 + _OTHER_SPLIT):
                return True  # with another split, which the bound below does not know, if not with this one
        elif effort > 0 and self.key(f) > best * (1 + max(_BEHIND, _GAINS * self._gained)):
            return False
        least = best / handicap(f.candidate, self.gain)
        return self.key(f) <= best or self.bound(f, least) < least

    def bound(self, f: Found, enough: float = math.inf) -> float:
        """Return seconds that no placement of a plan is below.

        Args:
            f: plan.
            enough: seconds; see `lower`.
        """
        if f.candidate.data_micro_batches:  # placements are bounded for data ranks that are alike
            return f.screened
        known, closest = self._bounds.get(self._name(f), (0.0, False))
        if not closest and known < enough:
            known = lower(self._problem(f), self.tried.fabric, enough)
            self._bounds[self._name(f)] = known, known < enough
        return known

    def _few(self, f: Found) -> bool:
        """Return whether a plan's placements are so few that all are evaluated if it is placed thoroughly."""
        return are_few(f.candidate, self.tried.cluster)

    def _problem(self, f: Found) -> Problem:
        return Problem(self.tried.cluster, self.tried.model, f.candidate)

    def _place(self, f: Found, effort: int) -> None:
        """Place a plan, split its layers anew, and try what was found with the others of its mesh.

        Args:
            f: plan.
            effort: 0: by a climb, 1: thoroughly, and with other splits, too.
        """
        self.placed += 1
        few, quick = self._few(f), self._done.get(self._name(f), -1) == 0
        known, f = f.seconds, self._settled(f, effort)
        if effort > 0 and quick:
            self._gained = max(self._gained, known / f.seconds - 1)
        for _ in range(_ROUNDS[few] * effort):
            before = f
            # Their splits are kept at first, since on the placement of another split that split is the best.
            others = [self._once(other, 0) for other in self.tried.variants(f, _SPLITS[few], bool(few))]
            for n, other in enumerate(sorted(others, key=self.key)):
                if n < _CAREFUL[few] and other.seconds < f.seconds * (1 + _CLOSE[few]):
                    other = self._settled(self._once(other, 1), 0)
                f = min(f, other, key=self.key)
            self._keep(f)
            if f.seconds >= before.seconds * (1 - _WORTH):
                break

    def _settled(self, f: Found, effort: int) -> Found:
        """Return a plan after turns of placing and of splitting anew, until neither makes it quicker."""
        tried, few = self.tried, self._few(f)
        if not few:
            f = tried.around(self._resplit(f))
        for turn in range(_TURNS[few]):
            f = self._once(f, effort if turn == 0 else 0)
            again = tried.around(self._resplit(f))
            self._keep(f)
            if again.seconds >= f.seconds * (1 - _WORTH):
                break
            f = again
            tried.splits.keep(self._problem(f))
        self._keep(f)
        return f

    def _once(self, f: Found, effort: int) -> Found:
        """Return a plan with its split on the best placement found for it."""
        tried, start, name = self.tried, f.placement.hosts, self._name(f)
        self._done[name] = max(self._done.get(name, -1), effort)
        problem = self._problem(f)
        if (name, effort) in self._exact:
            placement = self._exact[name, effort]
        elif effort > 0:
            placement = place(problem, tried.fabric, seed=self.seed, start=start, bound=self.bound(f))
        else:
            known = tried.pools.of(problem).hosts
            placement = quickly(problem, tried.fabric, np.concatenate([start[None], known]), seed=self.seed)
        if placement.source == "exact":  # wherever the search begins
            self._exact[name, effort] = placement
        better = placement.source == "exact" or placement.seconds < f.seconds
        return dataclasses.replace(f, placement=placement) if better else f

    def _resplit(self, f: Found) -> Found:
        """Return the plan with the best of the splits that suit its placement."""
        hosts, known = f.placement.hosts, self.tried.splits.found.get((f.candidate.pipe, f.candidate.chunks), ())
        asked = f.index, tuple(known), hosts.tobytes()
        if asked not in self._split:
            [self._split[asked]] = self.tried.simulate([f.index], only=hosts[None])
        other = self._split[asked]
        return other if other.seconds < f.seconds else f

    def _keep(self, f: Found) -> None:
        """Keep a plan if it is better than the one known, and try its placement with others of its mesh."""
        if f.seconds < self.found[f.index].seconds or self.found[f.index].placement.hosts is f.placement.hosts:
            self.found[f.index] = f
        if not self.tried.pools.add(self._problem(f), f.placement.hosts):
            return
        best = self.key(self.best)
        mesh = kind_of(f.candidate)[:3]
        some = [
            other
            for other in self.found.values()
            if kind_of(other.candidate)[:3] == mesh
            and other.screened * handicap(other.candidate, self.gain) < best
            and other.index != f.index
        ]
        taken: dict[tuple, int] = {}
        few = []
        for other in sorted(some, key=self.key):
            kind = kind_of(other.candidate)
            taken[kind] = taken.get(kind, 0) + 1
            if taken[kind] <= _EACH:
                few.append(other)
        some = few[:_AGAIN]
        if not some:
            return
        for other in self.tried.simulate([s.index for s in some], only=f.placement.hosts[None]):
            if other.seconds < self.found[other.index].seconds:
                self.found[other.index] = other
