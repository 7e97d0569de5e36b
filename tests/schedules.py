"""Schedules by their shape, and where their chunks lie, said apart from the product."""

from paxtrain.schedule.table import IDLE

SIMPLE = ("eager_1f1b", "gpipe", "1f1b")
FOLDED = ("zb_v", "dualpipe_v")


def virtual_of(schedule, stage: int, chunk: int) -> int:
    """Return the virtual stage of a stage's chunk; in a V every second chunk runs back."""
    back = schedule.name in FOLDED and chunk % 2
    return chunk * schedule.stages + (schedule.stages - 1 - stage if back else stage)


def busy(schedule, phase):
    """Return whether a stage has an op of a phase in a row, [rows, stages]."""
    return getattr(schedule, phase) != IDLE


def in_flight(schedule):
    """Return, per stage, the most micro-batches (of all chunks) between F and their last op: F of a row is first."""
    last = "weights" if schedule.splits else "backward"
    forwards, backwards = (busy(schedule, phase).cumsum(axis=0) for phase in ("forward", last))
    return (forwards - backwards + busy(schedule, last)).max(axis=0)
