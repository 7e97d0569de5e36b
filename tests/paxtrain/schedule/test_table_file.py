"""Schedules from CSV files, as PyTorch's pipelining writes them: what is run, and what is refused and where."""

import pathlib

import jax
import numpy as np
import pytest

from paxtrain.errors import UserError
from paxtrain.schedule import table_file
from paxtrain.schedule.drawing import draw_schedule
from paxtrain.schedule.schedules import build, spec_of
from planner.pipeline import simulator
from planner.pipeline.rows import Table
from planner.pipeline.simulator import Seconds
from tests import small

# 1F1B as torch.distributed.pipelining prints it: two ranks, three micro-batches.
TORCH_1F1B = "0F0,0F1,,0B0,0F2,0B1,,0B2\n,1F0,1B0,1F1,1B1,1F2,1B2,\n"
# Interleaved zero bubble, with whole and split backwards, two ranks with two stages each.
TORCH_SPLIT = (
    "0F0,0F1,2F0,2F1,,2I0,2W0,2I1,0B0,2W1,0I1,0W1\n,1F0,1F1,3F0,3B0,3F1,3B1,1I0,1W0,1I1,1W1,\n"  # 3B is I and W
)


# PyTorch's order of ScheduleZBVZeroBubble, and of ScheduleDualPipeV, whose cells may have a forward and a backward.
TORCH_ZBV = (
    "0F0,0F1,0F2,3F0,3I0,3W0,3F1,3I1,3W1,0I0,0W0,3F2,3I2,3W2,0I1,0W1,0I2,0W2\n"
    ",1F0,2F0,1F1,2F1,2I0,2W0,1F2,1I0,1W0,2F2,2I1,2W1,1I1,2I2,1I2,1W1,2W2,1W2\n"
)
TORCH_DUALPIPEV = (
    "0F0,0F1,0F2,3F0,3I0,3W0,3F1,(0F3;3B1)OVERLAP_F_B,(3F2;0B0)OVERLAP_F_B,3B2,(3F3;0B1)OVERLAP_F_B,3B3,0I2,0W2,0I3,0W3\n"
    "1F0,2F0,1F1,2F1,1F2,2B0,(2F2;1B0)OVERLAP_F_B,(1F3;2B1)OVERLAP_F_B,(2F3;1B1)OVERLAP_F_B,2B2,1B2,2I3,1I3,2W3,1W3\n"
)


def config(schedule: str, pipe: int = 2, micro_batches: int = 3, chunks: int = 1):
    return small.config((1, pipe), (micro_batches, 1), pipeline={"schedule": schedule, "virtual_stages": chunks})


def written(tmp_path: pathlib.Path, text: str) -> str:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    return str(path)


def gradients(c, overlap: bool | None = None) -> list[np.ndarray]:
    trained = small.trainer(c, overlap=overlap)
    return jax.tree.leaves(small.gradients(trained, small.canonical(c.model), small.tokens(c)))


@pytest.mark.slow
def test_the_csv_of_1f1b_trains_bit_equal_to_1f1b(tmp_path):
    mine = gradients(config(written(tmp_path, TORCH_1F1B)))
    for one, other in zip(gradients(config("1f1b")), mine, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.once
def test_whole_and_split_backwards_in_one_file_make_the_right_gradients(tmp_path):
    mine = gradients(config(written(tmp_path, TORCH_SPLIT), micro_batches=2, chunks=2), overlap=True)
    for one, other in zip(gradients(config("1f1b", micro_batches=2)), mine, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize("name", ["1f1b", "zb_h1", "interleaved_1f1b", "eager_1f1b", "zb_v"])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_table_written_and_read_is_the_same(tmp_path, name, overlap):
    chunks = 2 if name in ("interleaved_1f1b", "zb_v") else 1
    table = build(name, 4, 8, chunks, overlap)
    path = written(tmp_path, table_file.text(table))
    again = build(path, 4, 8, chunks, overlap)
    if name != "eager_1f1b":
        for phase in ("forward", "backward", "weights", "forward_chunk", "backward_chunk", "weights_chunk"):
            np.testing.assert_array_equal(getattr(again, phase), getattr(table, phase))
    assert [again.row_of.keys() == table.row_of.keys(), again.splits] == [True, table.splits]
    assert again.stage_map == table.stage_map


@pytest.mark.parametrize(
    ("text", "name", "m"), [(TORCH_ZBV, "zb_v", 3), (TORCH_DUALPIPEV, "dualpipe_v", 4)], ids=["ZBV", "DualPipeV"]
)
def test_v_shaped_files_are_those_of_pytorch(tmp_path, text, name, m):
    read, table = build(written(tmp_path, text), 2, m, 2), build(name, 2, m, 2)
    assert read.stage_map.stage_of == (0, 1, 1, 0)
    np.testing.assert_array_equal(read.forward, table.forward)
    np.testing.assert_array_equal(read.backward_chunk, table.backward_chunk)
    np.testing.assert_array_equal(read.weights, table.weights)


def test_it_is_simulated_and_drawn(tmp_path):
    path = written(tmp_path, table_file.text(build("1f1b", 4, 16, 1, overlap=False)))
    one = np.ones((1, 4))
    for c in (0.0, 0.5, 1.0):
        times = Seconds(one, 2 * one, c, c)
        found = [simulator.pipeline(Table(name, 4, 16), times).max() for name in (path, "1f1b")]
        assert found[0] == found[1]
    assert draw_schedule(build(path, 4, 16)).axes[0].get_title().startswith(path)
    assert spec_of(path).in_flight(np.arange(4), 4, 1, 16).tolist() == [4, 3, 2, 1]


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (TORCH_1F1B.replace("0B1", ""), "line 1", "0B1 is missing"),
        (TORCH_1F1B.replace("1F0,1B0", "1B0,1F0"), "line 1, cell 4 (0B0)", "needs 1B0"),
        ("0F0,0B0\n,1B0,1F0\n".replace("0F0,0B0", "0F0,,,0B0"), "line 1, cell 4 (0B0)", "needs 1B0"),
        (TORCH_1F1B.replace("0F0,0F1,,0B0", "0F0,0B0,0F1,"), "", ""),  # slow, but right
        ("0F0,0B0,0F1,0B1\n,1F1,1B1,1F0,1B0\n", "line 1, cell 2 (0B0)", "needs 1B0"),
        (TORCH_1F1B + "2F0,2B0\n", "line 3", "2F1 is missing"),
        (TORCH_1F1B + "1F0,1B0\n", "mine.csv has 3 lines", "as many on each line"),
        (TORCH_1F1B.replace("1F0", "0F0"), "line 2, cell 2", "belongs on line 1"),
        (TORCH_ZBV.replace("2F0", "3F0"), "line 2, cell 3", "belongs on line 1"),
        (TORCH_DUALPIPEV.replace("0F3;3B1", "0F3;3X1"), "line 1, cell 8", "is no op"),
        (TORCH_1F1B.replace("0F1", "0F0"), "line 1, cell 2", "there already"),
        (TORCH_1F1B.replace("0F1", "0X1"), "line 1, cell 2", "is no op"),
        (TORCH_1F1B.replace("0F1", "\u0660F\u0661"), "line 1, cell 2", "is no op"),
        (TORCH_1F1B.replace("0F1", "9" * 5000 + "F1"), "line 1, cell 2", "is no op"),
        (TORCH_1F1B.replace("0F1", "0" * 200_000 + "F1"), "mine.csv", "field larger than field limit"),
        ("", "mine.csv", "has no op"),
    ],
)
def test_broken_files_are_refused_by_line_and_cell(tmp_path, text, place, what):
    path = written(tmp_path, text)
    if not what:
        assert config(path).pipeline.spec.size == (2, 1, 3)
        return
    with pytest.raises(UserError) as refused:
        config(path)
    assert place in str(refused.value)
    assert what in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_or_has_other_numbers_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        config(str(tmp_path / "none.csv"))
    path = written(tmp_path, TORCH_1F1B)
    for pipe, m in ((4, 3), (2, 4)):
        with pytest.raises(UserError, match="has 2 stages of 1 chunks and 3 micro-batches"):
            config(path, pipe, m)
