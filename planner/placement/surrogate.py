"""The time of a pipeline as the largest of linear functions of its durations, which is much quicker than its replay.

What the simulator adds up are paths of ops and messages, and a stage ends with the longest of them: its time is the
largest of linear functions, whose slopes say how often a path has each op and message. Differences at one pipeline give
the slopes of its longest paths. Those of a few pipelines give the times of similar ones to within a part in a thousand.
"""

import dataclasses

import numpy as np

from planner.cost.step_time import Problem
from planner.pipeline.rows import runs
from planner.pipeline.simulator import Seconds

Array = np.ndarray

_CLOSE = 1e-3  # share of the time to which the functions are to agree with the replay
_MOST = 24  # most pipelines at which slopes are taken in one go
_REPLAYED = 2048  # most pipelines that are replayed to learn from
_LONG = 600  # rows of a table from which on replays are rough
_NOISE = 1e-4  # by which share durations are changed, so that no two paths are equally long
_STEP = 1e-7  # of the differences, as a share of the shortest duration: too short to change which path is the longest
_PRODUCT = 2**18  # multiplications in one product of matrices: with more, threads of BLAS would wait for each other
_LINKS = ("activation", "gradient", "packed", "start")
_DEVICES = ("forward", "backward", "weights", "head", "encode", "decode")


class Surrogate:
    """Linear functions of the durations of a candidate's pipelines.

    What does not differ between placements is part of the functions' constants.

    Attributes:
        problem: candidate on its cluster.
        names: durations that differ between placements.
        rough: whether it learns from rough replays; if not, times are never above those of a replay.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.names = _LINKS + _DEVICES * (len(problem.layer) > 1)
        self.rough = sum(len(rows) * times for rows, times in runs(problem.table, problem.overlap)) > _LONG
        self._rng = np.random.default_rng(0)
        self._slopes: list[list[Array]] = [[] for _ in range(problem.candidate.pipe)]  # [F] each, by stage
        self._constants: list[list[float]] = [[] for _ in range(problem.candidate.pipe)]
        # Slopes [F, functions] and constants of all, stage after stage, and the first function of each stage.
        self._functions: tuple[Array, Array, Array]

    def times(self, seconds: Seconds) -> Array:
        """Return about the time at which each stage of each pipeline leaves its last row, [pipelines, P]."""
        slopes, constants, first = self._functions
        columns = self._columns(seconds)
        every = np.empty((len(columns), len(constants)))
        few = max(_PRODUCT // slopes.size, 1)
        for i in range(0, len(columns), few):
            np.matmul(columns[i : i + few], slopes, out=every[i : i + few])
        every += constants
        return np.maximum.reduceat(every, first, axis=1)

    def learn(self, seconds: Seconds) -> None:
        """Add functions until they agree with the replay of some pipelines, or until there are many more."""
        count = len(seconds.forward)
        if count > _REPLAYED:
            seconds = _taken(seconds, self._rng.choice(count, _REPLAYED, replace=False))
        columns, true = self._columns(seconds), self._replayed(seconds)
        known = self.times(seconds) if self._constants[0] else np.full(true.shape, -np.inf)
        worth = _CLOSE * true.max(axis=1, keepdims=True)
        left = np.ones(len(true), bool)
        for _ in range(_MOST):
            gap = np.where(left, ((true - known) / worth).max(axis=1), -np.inf)
            i = int(np.argmax(gap))
            if gap[i] <= 1:
                break
            left[i] = False  # differences may fail there
            slopes, constants = self._at(seconds, i)
            new = columns @ slopes + constants
            for stage in np.flatnonzero((new - known > worth / 10).any(axis=0)):
                self._slopes[stage].append(slopes[:, stage])
                self._constants[stage].append(float(constants[stage]))
            known = np.maximum(known, new)
        slopes = np.concatenate([np.array(one) for one in self._slopes])
        first = np.cumsum([0, *map(len, self._slopes)])[:-1]
        self._functions = np.ascontiguousarray(slopes.T), np.concatenate(self._constants), first

    def _replayed(self, seconds: Seconds) -> Array:
        return self.problem.replayed(self.problem.table, seconds, self.rough)

    def _columns(self, seconds: Seconds) -> Array:
        """Return the durations that differ, [pipelines, F]."""
        given = (np.asarray(getattr(seconds, name), float) for name in self.names)
        return np.concatenate([x.reshape(len(x), -1) for x in given if x.ndim], axis=1)

    def _at(self, seconds: Seconds, i: int) -> tuple[Array, Array]:
        """Return slopes [F, P] and constants [P] of the longest paths of the i-th pipeline."""
        width = self._columns(_taken(seconds, np.array([i]))).shape[1]
        many = _taken(seconds, np.full(width + 1, i))
        changed, moved = {}, []
        for name in self.names:
            x = np.asarray(getattr(many, name), float)
            if x.ndim:
                changed[name] = x * (1 + _NOISE * self._rng.random(x.shape[1:]))
                moved += [(name, at) for at in np.ndindex(x.shape[1:])]
        step = _STEP * min(float(x[x > 0].min()) for x in changed.values() if (x > 0).any())
        for row, (name, at) in enumerate(moved):
            changed[name][(row + 1, *at)] += step
        many = dataclasses.replace(many, **changed)
        times = self._replayed(many)
        slopes = np.round(2 * (times[1:] - times[0]) / step) / 2  # what comes up in halves is a rough replay's
        first = np.concatenate([changed[name][0].ravel() for name in changed])
        return slopes, times[0] - first @ slopes


def _taken(seconds: Seconds, where: Array) -> Seconds:
    """Return the durations of some of the pipelines."""
    values = {field.name: getattr(seconds, field.name) for field in dataclasses.fields(seconds)}
    return Seconds(**{name: x[where] if np.ndim(x) else x for name, x in values.items()})
