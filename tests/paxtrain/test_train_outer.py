"""Runs in groups end to end: they continue bit for bit, with an exchange in flight too, and on other meshes."""

import contextlib
import io
import json

import numpy as np
import pytest

from paxtrain.errors import UserError
from paxtrain.run import metrics, sampling
from tests import small
from tests.paxtrain import training
from tests.paxtrain.training import losses, past

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("quiet_orbax")]
STEPS, EVERY = 12, 4


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small.corpus(tmp_path_factory.mktemp("outer"), 4_000)


def finished(home, out, **changes):
    """Return a finished run and its last state by path."""
    values = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "dtype": "float32"},
        "mesh": {"data": 4, "pipe": 1, "tensor": 1},
        "batch": {"global_batch": 16, "micro_batch": 2},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3, "schedule": "constant"},
        "outer": {"every": EVERY, "groups": 2},
        "compress": {"outer_codec": "int8", "min_ratio": 0.0},
        "data": {"train": str(home / "data/train"), "validation": str(home / "data/validation")},
        "checkpoint": {"every": 2, "keep": 9},
        "run": {"steps": STEPS, "out": str(out), "eval_every": 6, "eval_batches": 1, "sample_tokens": 0},
    }
    return training.finished(values, changes)


def reported(home, out, **changes):
    """Return the folder of a finished run, the run, its last state by path, and what it printed."""
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = finished(home, out, **changes)
    return out, *found, said.getvalue()


@pytest.fixture(scope="module")
def reference(home):
    return reported(home, home / "reference", run__sample_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 6])  # after an exchange, and between two
def test_continuing_is_bit_exact(home, reference, tmp_path, step):
    _, state = finished(home, past(reference[0], tmp_path / "run", step))
    assert losses(tmp_path / "run") == losses(reference[0])
    assert state.keys() == reference[2].keys()
    assert [path for path in state if not np.array_equal(state[path], reference[2][path])] == []
    assert any(".codec['outer']" in path and np.any(x != 0) for path, x in state.items())


def test_the_table_and_the_sample_are_of_the_shared_weights(reference):
    out, _, state, said = reference
    assert "2 of 2 data ranks each train apart" in said and "every 4 steps" in said and "QuantisedBlocks(bits=8" in said
    params, *_ = sampling.load(out)
    np.testing.assert_array_equal(params["final_norm"]["scale"], state[".params['final_norm']['scale']"][0])
    assert "a sample:" in said
    recorded = [json.loads(line) for line in (out / metrics.FILE).read_text().splitlines()]
    validated = {r["step"]: r["validation_loss"] for r in recorded if "validation_loss" in r}
    assert validated[STEPS] < validated[0]


@pytest.mark.slow
def test_another_mesh_inside_a_group_continues(home, reference, tmp_path, capsys):
    out = past(reference[0], tmp_path / "run", 8)
    finished(home, out, mesh__data=4, mesh__pipe=2)
    assert "compression starts afresh" in capsys.readouterr().out
    assert losses(out)[8] == losses(reference[0])[8]
    assert losses(out)[9] == pytest.approx(losses(reference[0])[9], rel=1e-4)


def test_groups_and_all_together_do_not_continue_each_other(home, reference, tmp_path):
    out = past(reference[0], tmp_path / "run", 8)
    alone = {"outer__every": 0, "outer__groups": 0, "compress__outer_codec": ""}
    with pytest.raises(UserError, match=r"was trained in groups, and this run has none \(outer.every=0\)"):
        finished(home, out, **alone)
    finished(home, tmp_path / "dense", run__steps=4, **alone)
    with pytest.raises(UserError, match=r"was trained without groups, and this run has groups \(outer.every=4\)"):
        finished(home, tmp_path / "dense")
    with pytest.raises(UserError, match="holds other arrays"):
        finished(home, past(reference[0], tmp_path / "four", 8), outer__groups=4)


# --- Fragments whose exchanges are overlapped -------------------------------------------------------------------------

# Fragment 0 is sent after step 3, travels under step 4 and is taken after step 5.
STREAMING = {"outer__every": 6, "outer__fragments": 2, "outer__overlap": 2}


@pytest.fixture(scope="module")
def streaming(home):
    return reported(home, home / "streaming", **STREAMING)


# With an exchange in flight, and with one that the next step will carry.
@pytest.mark.parametrize("step", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_continuing_with_an_exchange_in_flight_is_bit_exact(home, streaming, tmp_path, step):
    _, state = finished(home, past(streaming[0], tmp_path / "run", step), **STREAMING)
    assert losses(tmp_path / "run") == losses(streaming[0])
    assert [path for path in state if not np.array_equal(state[path], streaming[2][path])] == []
    assert not np.array_equal(state[".outer.params['final_norm']['scale']"][0], state[".params['final_norm']['scale']"])


def test_the_tables_say_what_travels_when(streaming):
    said = streaming[-1]
    assert "every 6 steps in 2 fragments, one every 3 steps" in said
    assert "under the next step; taken 2 steps after it was sent, with 0.5 of a group's own weights" in said
    assert "a step from a device on average" in said and "4 exchanges, " in said


def test_an_exchange_in_flight_is_not_taken_by_another_timetable(home, streaming, tmp_path):
    out = past(streaming[0], tmp_path / "run", 4)
    for change in ({"outer__every": 4, "outer__overlap": 1}, {"outer__overlap": 0}, {"outer__fragments": 1}):
        with pytest.raises(UserError, match=r"has an exchange of groups in flight .* continue with \d"):
            finished(home, out, **STREAMING | change)


@pytest.mark.slow
def test_an_exchange_in_flight_arrives_on_another_mesh(home, streaming, tmp_path, capsys):
    out = past(streaming[0], tmp_path / "run", 4)
    finished(home, out, **STREAMING, mesh__data=4, mesh__pipe=2)
    assert "compression starts afresh" in capsys.readouterr().out
    assert losses(out)[5] == pytest.approx(losses(streaming[0])[5], rel=1e-5)
    assert losses(out)[6] == pytest.approx(losses(streaming[0])[6], rel=1e-4)  # after the exchange was taken


def test_an_exchange_that_is_due_is_not_dropped(home, streaming, tmp_path):
    """After step 6 a fragment is to be sent, under step 7."""
    out = past(streaming[0], tmp_path / "run", 6)
    with pytest.raises(UserError, match=r"has an exchange of groups due .*outer.overlap=2, .* continue with 2"):
        finished(home, out, **STREAMING | {"outer__overlap": 0})
    with pytest.raises(UserError, match=r"that the next step would carry, but run.steps is 6, too; .*run.steps=12"):
        finished(home, out, **STREAMING, run__steps=6)


def test_fragments_have_codecs_of_their_own(home, streaming, tmp_path):
    out = past(streaming[0], tmp_path / "run", 8)  # no exchange is due or in flight
    with pytest.raises(UserError, match=r"outer.fragments is 2 there and absent here"):
        finished(home, out, **STREAMING | {"outer__fragments": 1})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer_codec": "int4"}, r"QuantisedBlocks\(bits=8, block=64.* there and QuantisedBlocks\(bits=4"),
        (
            {"outer_options": {"block": 32}},
            r"QuantisedBlocks\(bits=8, block=64, .* there and QuantisedBlocks\(bits=8, block=32",
        ),
        ({"outer_codec": "fp8"}, r"QuantisedBlocks.* there and Float8Blocks"),
    ],
)
def test_a_state_of_another_outer_codec_of_equal_shapes_is_refused(home, reference, tmp_path, changes, words):
    out = past(reference[0], tmp_path / "run", 8)
    with pytest.raises(UserError, match=f"outer codec is {words}"):
        finished(home, out, **{f"compress__{name}": value for name, value in changes.items()})
    assert len(losses(out)) == STEPS  # no step was lost


@pytest.mark.slow
def test_a_longer_run_does_not_send_again_what_was_waited_for(home, streaming, tmp_path):
    """The last exchange of 12 steps was waited for. So it is not in step 13, also if a start is interrupted there."""
    longer = STREAMING | {"run__steps": STEPS + 6, "checkpoint__every": 1}
    whole = past(streaming[0], tmp_path / "whole", STEPS)
    run, right = finished(home, whole, **longer)
    assert run._timetable.settled == STEPS
    _, state = finished(home, past(whole, tmp_path / "again", STEPS + 1), **longer)
    assert losses(tmp_path / "again") == losses(whole)
    assert [path for path in state if not np.array_equal(state[path], right[path])] == []
