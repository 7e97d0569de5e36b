"""A drawn schedule shows every op once, where the table has it."""

import pytest

from paxtrain.schedule import schedules
from paxtrain.schedule.drawing import draw_schedule


@pytest.mark.parametrize(
    ("name", "chunks"), [("eager_1f1b", 1), ("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zb_v", 2)]
)
def test_every_op_has_its_box_and_its_micro_batch(name, chunks, tmp_path):
    schedule = schedules.build(name, 4, 8, chunks)
    figure = draw_schedule(schedule)
    [axes] = figure.axes
    phases = ("forward", "backward", "weights")
    expected = sorted(
        (row, stage, f"{phase[0].upper()}{mb}") for phase in phases for row, stage, mb, _ in schedule.ops(phase)
    )
    found = sorted((int(text.get_position()[0]), int(text.get_position()[1]), text.get_text()) for text in axes.texts)
    assert found == expected and len(axes.collections) == len(expected)
    figure.savefig(tmp_path / "schedule.png")
    assert (tmp_path / "schedule.png").stat().st_size > 1000


def test_an_unknown_schedule_is_named():
    with pytest.raises(ValueError, match="no schedule 'zigzag'; there are"):
        schedules.build("zigzag", 4, 8)
