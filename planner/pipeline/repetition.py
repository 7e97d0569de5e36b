"""A stretch of rows that repeats many times, of which few repetitions are replayed.

The stages' times after a repetition are maxima of sums of their times before it, so what is added to all stages before
is added to all of them after. Once one or two repetitions have moved all stages by the same time, every further one or
two will. Stages of which some wait for others get there within a few repetitions. Stages that never wait for each other
within the stretch do not, and are replayed to its end.
"""

from typing import Protocol

import numpy as np

from planner.pipeline.rows import Row

Array = np.ndarray

# Increments that agree this well, relative to the time so far, are equal except for rounding.
EQUAL = 1e-13
_SOON = 5  # repetitions, at least, that a rough answer replays
_ROWS = 10  # rows for each stage, at least, that it replays


class Stages(Protocol):
    """The stages of a batch of candidates, which can replay rows.

    Attributes:
        now: [P, batch] time of each stage.
    """

    now: Array

    def replay(self, rows: tuple[Row, ...]) -> None:
        """Run rows once."""

    def narrow(self, where: Array) -> "Stages":
        """Return some candidates of the batch."""


def repeat(stages: Stages, rows: tuple[Row, ...], times: int, rough: bool = False) -> Array:
    """Return the times [P, batch] of stages after a stretch of rows has been run many times.

    Args:
        stages: stages before the stretch; their times change.
        rows: the stretch.
        times: repetitions.
        rough: take stages that are not in step soon to go on at the pace of the slowest of them.
    """
    final = np.empty_like(stages.now)
    at, past = np.arange(final.shape[1]), [stages.now.copy()]
    soon = max(_SOON, -(-_ROWS * len(final) // len(rows))) if rough else times
    for left in reversed(range(times)):
        stages.replay(rows)
        past = [*past[-2:], stages.now.copy()]
        if left == 0:
            final[:, at] = stages.now
            break
        limit, done = EQUAL * past[-1].max(axis=0), np.zeros(len(at), bool)
        for some in (1, 2)[: len(past) - 1]:
            first, last = (past[-1][stage] - past[-1 - some][stage] for stage in (0, -1))
            if not (np.abs(first - last) <= limit).any():  # which is seen sooner of two stages than of all
                continue
            moved = past[-1] - past[-1 - some]
            same = ~done & (moved.max(axis=0) - moved.min(axis=0) <= limit)
            if same.any():
                # Whole multiples of one or two repetitions are left after the last state or after the one before.
                behind = -left % some
                ends = past[-1 - behind] + (left + behind) // some * moved
                final[:, at[same]] = ends[:, same]
                done |= same
        if done.all():
            break
        if times - left >= soon:
            final[:, at[~done]] = (stages.now + left / 2 * (past[-1] - past[-3]).max(axis=0))[:, ~done]
            break
        if done.any():
            stages, at = stages.narrow(~done), at[~done]
            past = [np.compress(~done, x, axis=-1) for x in past]
    return final
