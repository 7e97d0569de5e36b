"""Schedules by their shape, and where their chunks lie, said apart from the product."""

SIMPLE = ("eager_1f1b", "gpipe", "1f1b")
FOLDED = ("zb_v", "dualpipe_v")


def virtual_of(schedule, stage: int, chunk: int) -> int:
    """Return the virtual stage of a stage's chunk; in a V every second chunk runs back."""
    back = schedule.name in FOLDED and chunk % 2
    return chunk * schedule.stages + (schedule.stages - 1 - stage if back else stage)
