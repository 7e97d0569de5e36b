"""Splits of the layers over the stages that the search tries for a candidate."""

import dataclasses
import itertools

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.model.parameters import differ
from paxtrain.schedule.schedules import spec_of
from planner.cluster.cluster import Cluster
from planner.cost.step_time import Problem
from planner.pipeline import layer_split
from planner.search.budget import Budget
from planner.search.space import Space

Array = np.ndarray
Counts = tuple[int, ...]

_KNOWN = 4  # splits found last that are tried with other candidates
_MOVES = 120  # most splits that are looked at around one


class Splits:
    """The splits of the candidates of a space.

    Attributes:
        found: splits that were found good for some candidate, by its pipe size and chunks.
    """

    def __init__(self, cluster: Cluster, model: ModelConfig, budget: Budget, space: Space) -> None:
        self.cluster, self.model, self.budget, self.space = cluster, model, budget, space
        self.limit = budget.limit(cluster)
        self.found: dict[tuple[int, int], list[Counts]] = {}
        self._bytes: dict[tuple[int, Counts, int | None], float] = {}

    def even(self, i: int) -> Counts:
        """Return the even split of a candidate."""
        return layer_split.even(self.model.layers, int(self.space.pipe[i] * self.space.chunks[i]))

    def memory(self, some: list[int], splits: list[Counts], micro_batches: list[int] | None = None) -> Array:
        """Return the bytes per device of candidates with other splits, [len(some)].

        Args:
            some: places of the candidates in the space.
            splits: layers of each virtual stage of each.
            micro_batches: micro-batches of the data rank that has most; None: the candidates' own.
        """
        # Of layers that are alike only the fullest virtual stage matters.
        sizes = splits if differ(self.model) else [(max(counts),) for counts in splits]
        asked = list(zip(some, sizes, [None] * len(some) if micro_batches is None else micro_batches))
        if new := [key for key in dict.fromkeys(asked) if key not in self._bytes]:
            other = self.space.take(np.array([i for i, *_ in new], int))
            other = dataclasses.replace(other, slots=np.array([max(counts) for _, counts, _ in new], int))
            if micro_batches is not None:
                other = dataclasses.replace(other, micro_batches=np.array([count for *_, count in new], int))
            own = [counts for _, counts, _ in new]
            self._bytes |= zip(new, self.budget.bytes(self.cluster, self.model, other, own).tolist())
        return np.array([self._bytes[key] for key in asked])

    def best(self, problem: Problem, kinds: Array) -> Counts:
        """Return the split whose slowest stage is the quickest on stages of these kinds, int [P]."""
        c, on = problem.candidate, np.take(kinds, problem.candidate.stage_map.stage_of)
        unit = np.array([x.forward + x.backward for x in problem.layer])[on]
        extra = np.zeros(len(on))
        extra[0] = problem.layer[on[0]].embedding
        # The head runs m times; layers run more often in stages that compute while idle.
        rows = c.micro_batches + (c.pipe - 1 if spec_of(c.schedule).masks(self.cluster.overlaps) else 0)
        extra[-1] += problem.layer[on[-1]].head * c.micro_batches / rows
        return layer_split.split(self.model.layers, unit, extra, _relative(problem))

    def others(self, problem: Problem, hosts: Array) -> list[tuple[Counts, Array]]:
        """Return the splits beside the even one that are worth a try on some placements.

        Args:
            problem: candidate with the even split.
            hosts: placements [K, D, P].

        Returns:
            Each split, and on which of the placements it is: int [n].
        """
        c, every = problem.candidate, np.arange(len(hosts))
        if c.pipe == 1:
            return []
        if len(problem.layer) == 1:  # one kind of device, under all stages
            on, which = np.zeros((1, c.pipe), int), np.zeros(len(hosts), int)
        else:
            on, which = np.unique(slowest(problem, hosts), axis=0, return_inverse=True)
        found: dict[Counts, Array] = {}
        for i, kinds in enumerate(on):
            counts = self.best(problem, kinds)
            found[counts] = np.concatenate([found.get(counts, every[:0]), every[which.ravel() == i]])
        for counts in self.found.get((c.pipe, c.chunks), [])[-_KNOWN:]:
            found[counts] = every
        return [(counts, where) for counts, where in found.items() if counts != c.counts]

    def keep(self, problem: Problem) -> None:
        """Remember a problem's split for other candidates with as many virtual stages."""
        c = problem.candidate
        known = self.found.setdefault((c.pipe, c.chunks), [])
        if c.counts not in known:
            known.append(c.counts)

    def around(self, counts: Counts) -> list[Counts]:
        """Return the splits that differ by one layer on two stages; only on close stages if there are many."""
        stages = range(len(counts))
        pairs = [(a, b) for a, b in itertools.permutations(stages, 2) if counts[a] > 1]
        if len(pairs) > _MOVES:
            ends = (0, len(counts) - 1)
            pairs = [(a, b) for a, b in pairs if abs(a - b) == 1 or a in ends or b in ends][:_MOVES]
        found = []
        for a, b in pairs:
            new = list(counts)
            new[a], new[b] = new[a] - 1, new[b] + 1
            found.append(tuple(new))
        return found


def _relative(problem: Problem) -> Array | None:
    """Return the seconds of each layer over the mean one's, on the first kind of device; None: all are alike."""
    if not problem.of_layers:
        return None
    one, own = problem.layer[0], problem.of_layers[0]
    return (one.forward * own["forward"] + one.backward * own["backward"]) / (one.forward + one.backward)


def slowest(problem: Problem, hosts: Array) -> Array:
    """Return the slowest kind of device of each stage [K, P] on placements [K, D, P]."""
    work = np.array([x.forward + x.backward for x in problem.layer])
    kinds = problem.kind_of_host[hosts]
    return np.take_along_axis(kinds, np.argmax(work[kinds], axis=1)[:, None], 1)[:, 0]
