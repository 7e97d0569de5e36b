"""Compressed runs end to end: they resume bit for bit, print if compression starts anew, and refuse bad input."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.errors import UserError
from paxtrain.parallel import compressed_stages
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics
from paxtrain.run.run import Run
from paxtrain.xla import hlo
from tests import small
from tests.compress.topk import TopK
from tests.paxtrain import training
from tests.paxtrain.training import losses, past

pytestmark = [pytest.mark.once, pytest.mark.usefixtures("quiet_orbax")]
STEPS, EVERY = 12, 4
COMPRESS = {
    "backward_messages": "epilogue",
    "backward_rank": 4,
    "factors": "int8",
    "data_stages": "all",
    "data_rank": 8,
    "data_rank_min": 2,
    "data_start": 0.25,
    "data_adapt_every": 4,
    "data_residual_low": 0.98,
    "data_residual_high": 1.0,
    "embedding_codec": "int8",
}
NOTHING = {"compress__backward_messages": "none", "compress__data_stages": "none", "compress__embedding_codec": ""}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return small.corpus(tmp_path_factory.mktemp("compressed"), 4_000)


def finished(home, out, codec=None, **changes) -> tuple[Run, dict]:
    """Return a finished run and its last state by path."""
    values = {
        "model": {"layers": 2, "hidden": 32, "heads": 2, "sequence": 32, "dtype": "float32"},
        "mesh": {"data": 2, "pipe": 2, "tensor": 1},
        "batch": {"global_batch": 4, "micro_batch": 2},
        "optimizer": {"warmup_steps": 2, "learning_rate": 3e-3},
        "compress": COMPRESS,
        "data": {"train": str(home / "data/train"), "validation": str(home / "data/validation")},
        "checkpoint": {"every": EVERY, "keep": 9},
        "run": {"steps": STEPS, "out": str(out), "eval_every": 0, "eval_batches": 1, "sample_tokens": 0},
    }
    values["optimizer"] |= {"schedule": "constant"}  # the same program for any number of steps
    return training.finished(values, changes, codec)


@pytest.fixture(scope="module")
def reference(home):
    return home / "reference", *finished(home, home / "reference")


# After compression has started, and after a rank has changed.
@pytest.mark.parametrize("step", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_continuing_is_bit_exact_before_and_between_adaptions(home, reference, tmp_path, step, capsys):
    """A resumed run continues the state of every codec, the phase, the ranks and the errors that decide them."""
    _, whole, state = reference
    run, again = finished(home, past(reference[0], tmp_path / "run", step))
    said = capsys.readouterr().out
    assert f"resumed from step {step}" in said
    assert "ranks over data, by stage: " + ("8, 8" if step == 4 else "4, 4") in said
    assert losses(tmp_path / "run") == losses(reference[0])
    assert run.ranks.to_json() == whole.ranks.to_json()
    assert state.keys() == again.keys()
    different = [path for path in state if not np.array_equal(state[path], again[path])]
    assert not different
    assert sum(".codec" in path for path in state) > 10


def test_dense_before_the_start_and_ranks_adapt_at_logged_steps(home, reference, capsys, tmp_path):
    run, _ = finished(home, tmp_path / "run", checkpoint__every=0)
    said = "".join(capsys.readouterr())
    assert "step 4: compression over data starts, ranks by stage 8, 8" in said
    assert "step 7: ranks of the stages' gradients over data are now 4, 4" in said
    assert run.ranks.current == (2, 2)  # and after step 11; nothing in a gradient of this model is above the bounds
    recorded = [r for r in metrics.read(tmp_path / "run" / metrics.FILE) if "loss" in r]
    assert [r["step"] for r in recorded if "left_out_stage_0" in r] == list(range(4, STEPS + 1))
    assert all(0 < r["left_out_stage_1"] < 1 for r in recorded if r["step"] > 3)
    assert run.ranks.at(3) == (0, 0)
    assert losses(tmp_path / "run") == losses(reference[0])


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"mesh__data": 1}, "compression starts afresh: its state in checkpoint 8 in"),
        pytest.param(
            {"compress__data_rank": 4, "checkpoint__reset_codec": True},
            "compression starts afresh, as asked for",
            marks=pytest.mark.slow,
        ),
        pytest.param(NOTHING, "is left out: this run compresses nothing", marks=pytest.mark.slow),
    ],
)
def test_a_state_that_is_not_continued_is_logged(home, reference, tmp_path, capsys, changes, line):
    out = past(reference[0], tmp_path / "run", 8)
    finished(home, out, run__steps=STEPS, **changes)
    assert line in capsys.readouterr().out
    assert losses(out)[8] == losses(reference[0])[8]
    assert losses(out)[STEPS] == pytest.approx(losses(reference[0])[STEPS], rel=0.05)


@pytest.mark.slow
def test_turning_compression_on_later_is_logged(home, tmp_path, capsys):
    finished(home, tmp_path / "run", run__steps=4, **NOTHING)
    finished(home, tmp_path / "run", run__steps=6)
    assert "compression starts afresh: checkpoint 4" in capsys.readouterr().out


def test_a_state_of_other_shapes_is_refused(home, reference, tmp_path):
    out = past(reference[0], tmp_path / "run", 8)
    with pytest.raises(UserError) as error:
        finished(home, out, compress__backward_rank=2)
    assert "holds another state of the compression" in str(error.value)
    assert "--config.checkpoint.reset_codec=True" in str(error.value)
    assert len(losses(out)) == STEPS  # no step was lost


@pytest.mark.slow
def test_a_made_up_codec_trains_and_continues_bit_for_bit(home, tmp_path, capsys):
    """On three stages, with nothing said of ranks; another codec's state of the same shapes is refused."""
    changes = {"mesh__pipe": 3, "model__layers": 3, **NOTHING}
    _, state = finished(home, tmp_path / "whole", codec=TopK(256), run__steps=8, **changes)
    said = capsys.readouterr().out
    assert "TopK(k=256, feedback=True), 2048 of 8192 bytes, 4.0 times smaller" in said
    assert "rank" not in said.partition("gradients between stages")[2].partition("\n")[0]
    finished(home, tmp_path / "run", codec=TopK(256), run__steps=4, **changes)
    _, again = finished(home, tmp_path / "run", codec=TopK(256), run__steps=8, **changes)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert [path for path in state if not np.array_equal(state[path], again[path])] == []
    errors = [value for path, value in state.items() if ".codec" in path]
    assert [np.any(x[:, stage] != 0) for x in errors for stage in range(3)] == [False, True, True]
    with pytest.raises(UserError, match=r"codec is TopK\(k=256, feedback=True\) there and TopK\(k=128, .* here"):
        finished(home, tmp_path / "run", codec=TopK(128), run__steps=9, **changes)
    with pytest.raises(UserError, match=r"codec is TopK\(k=256, feedback=True\) there and absent here"):
        finished(home, tmp_path / "run", run__steps=9, **changes | {"compress__backward_messages": "all"})


@pytest.mark.slow
def test_codecs_without_a_state_may_change_and_a_line_says_so(home, tmp_path, capsys):
    forgetful = {"feedback": False}
    changes = {
        **NOTHING,
        "compress__backward_codec": "int8",
        "compress__backward_options": forgetful,
        "compress__data_adapt_every": 0,
    }
    _, state = finished(home, tmp_path / "run", run__steps=4, **changes)
    assert not [path for path in state if ".codec" in path]
    finished(home, tmp_path / "run", run__steps=5, **changes)
    assert "codecs have changed" not in capsys.readouterr().out
    finished(home, tmp_path / "run", run__steps=6, **changes | {"compress__backward_codec": "int4"})
    said = capsys.readouterr().out
    assert "codecs have changed since the checkpoint, and keep no state: codec is QuantisedBlocks(bits=8" in said
    assert "there and QuantisedBlocks(bits=4" in said and "starts afresh" not in said


@pytest.mark.slow
def test_groups_of_data_ranks_continue_bit_for_bit(home, tmp_path, capsys):
    """With the errors of their parts; other groups have errors of other parts, and are refused."""
    changes = {
        "mesh__data": 4,
        "batch__global_batch": 8,
        "compress__backward_messages": "none",
        "compress__data_codec": "int8",
        "compress__data_inside": 2,
        "compress__data_start": 0.0,
        "compress__data_adapt_every": 0,
    }
    _, state = finished(home, tmp_path / "whole", run__steps=8, **changes)
    assert "between groups of 2 of" in capsys.readouterr().out
    finished(home, tmp_path / "run", run__steps=4, **changes)
    _, again = finished(home, tmp_path / "run", run__steps=8, **changes)
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not [path for path in state if not np.array_equal(state[path], again[path])]
    errors = [value for path, value in state.items() if ".codec" in path]
    assert errors and all(np.any(error) for error in errors)
    with pytest.raises(UserError, match=r"data codec is Quantised.* between groups of 2 there and Quantised.*\) here"):
        finished(home, tmp_path / "run", run__steps=9, **changes | {"compress__data_inside": 1})


def test_other_link_ranks_are_refused_though_the_shapes_are_equal():
    """A link's rank is in the zero columns of its state, and its wire is cut to the rank that this run has."""
    ranks = {name: compression(name).link_settings() for name in ("4,2,4", "2,4,4")}
    meta = {"identity": compression("4,2,4").identity(), "link_ranks": ranks["4,2,4"]}
    kinds = {"codec/backward/q": "float32[4]"}
    assert compression("4,2,4").why_reset(meta, kinds, kinds, "checkpoint 1") == ""
    with pytest.raises(UserError, match=r"backward_ranks is \[4, 2, 4\] there and \[2, 4, 4\] here"):
        compression("2,4,4").why_reset(meta, kinds, kinds, "checkpoint 1")


def test_other_codecs_are_refused_though_the_shapes_are_equal_and_said_if_they_have_no_state():
    one, other = (compression(codec="int8", options={"block": block}) for block in (64, 32))
    meta = {"identity": one.identity(), "link_ranks": one.link_settings()}
    kinds = {"codec/backward/error": "float32[4]"}
    assert one.why_reset(meta, kinds, kinds, "checkpoint 1") == one.changed(meta) == ""
    with pytest.raises(UserError, match=r"codec is Quantised.*, block=64.* there and Quant.*block=32.* here"):
        other.why_reset(meta, kinds, kinds, "checkpoint 1")
    assert other.why_reset(meta, {}, {}, "checkpoint 1") == ""
    assert "codecs have changed since the checkpoint, and keep no state: codec is Quant" in other.changed(meta)
    assert "compression starts afresh: checkpoint 1" in one.why_reset(meta, {}, kinds, "checkpoint 1")


def compression(ranks: str = "", **backward) -> Compression:
    values = {"messages": "all", **({"ranks": ranks} if ranks else {}), **backward}
    return Compression(Layout(from_dict({"mesh": {"pipe": 4}, "compress": {"backward": values}})))


def test_ranks_start_anew_with_a_line_where_their_rule_changes(home, reference, tmp_path, capsys):
    run, _ = finished(home, past(reference[0], tmp_path / "run", 8), compress__data_residual_low=0.5)
    assert "ranks over data start anew" in capsys.readouterr().out
    assert run.ranks.current == (4, 4)  # from the highest rank, halved after step 11; continued they would be at 2


@pytest.mark.slow
def test_ranks_of_codecs_without_state_start_anew_on_another_mesh(home, tmp_path, capsys):
    codec = {"compress__data_codec": "int8", "compress__data_options": {"feedback": False}}
    changes = {
        "compress__backward_messages": "none",
        "compress__embedding_codec": "",
        "compress__data_adapt_every": 0,
    } | codec
    finished(home, tmp_path / "run", run__steps=4, **changes)
    run, _ = finished(home, tmp_path / "run", run__steps=8, mesh__pipe=1, **changes)
    assert "ranks over data start anew, because the mesh" in capsys.readouterr().out
    assert len(run.ranks.current) == 1 and len(losses(tmp_path / "run")) == 8


@pytest.mark.slow
def test_selective_measures_or_takes_given_times(home, tmp_path, capsys):
    given = {"data_stage_seconds": "1.0,0.2", "data_reduce_seconds": "0.5,0.5", "data_compressed_seconds": "0.1,0.1"}
    changes = {f"compress__{key}": value for key, value in given.items()}
    run, _ = finished(
        home, tmp_path / "given", compress__data_stages="selective", run__steps=4, checkpoint__every=0, **changes
    )
    assert run.ranks.chosen == (8, 0)
    said = capsys.readouterr().out
    assert re.search("compressed over data +stages 0\n", said)
    assert re.search("gradients over data +selective, stages 0: rank 8", said)
    run, _ = finished(home, tmp_path / "measured", compress__data_stages="selective", run__steps=4, checkpoint__every=0)
    said = capsys.readouterr().out
    assert "last backward ends (measured)" in said
    chosen = [s for s, rank in enumerate(run.ranks.chosen) if rank]
    assert ("stages " + ", ".join(map(str, chosen)) if chosen else "no stage") in said


def test_selective_that_chooses_no_stage_says_so_in_both_tables(home, tmp_path, capsys):
    given = {"data_stage_seconds": "1.0,0.2", "data_reduce_seconds": "0.1,0.1", "data_compressed_seconds": "0.5,0.5"}
    changes = {f"compress__{key}": value for key, value in given.items()}
    run, _ = finished(home, tmp_path, compress__data_stages="selective", run__steps=2, checkpoint__every=0, **changes)
    assert run.ranks.chosen == (0, 0)
    said = capsys.readouterr().out
    assert said.count("no stage, because the step would not end sooner") == 2
    assert re.search("gradients over data +selective: no stage", said)
    assert "rank 8" not in said


def test_measured_times_are_of_one_stage_at_a_time(home):
    """No collective outside the loop that only the chosen stage enters; and the rows that each stage waits for."""
    values = {"mesh": {"data": 2, "pipe": 2}, "model": {"layers": 2, "hidden": 32, "heads": 2, "dtype": "float32"}}
    c = from_dict(values | {"compress": {"data": {"stages": "all", "rank": 4}}})
    trainer = small.trainer(c)
    assert compressed_stages.finish_rows(trainer) == (trainer.schedule.rows, trainer.schedule.rows - 1)
    late = from_dict(values | {"pipeline": {"schedule": "zb_h1"}, "compress": {"data": {"stages": "all", "rank": 4}}})
    split = Trainer(late, trainer.mesh)  # gradients of weights come last, on all stages
    assert compressed_stages.finish_rows(split) == (split.schedule.rows, split.schedule.rows)
    state = trainer.abstract_state()
    _, grads = jax.eval_shape(compressed_stages.pipelined(trainer), state.params, trainer.abstract_batch(), state.codec)
    for rank in (0, 4):
        program = compressed_stages.reduction(trainer, rank)
        lowered = program.lower(jnp.int32(0), grads, state.codec["data"])
        found = hlo.collectives(lowered.compile().as_text(), unknown_trip_count=0)
        assert sum(op.executions for op in found) == 0
        # All arrays in one; or the factors in two all-reduces, and the rest.
        assert len(hlo.collectives(lowered.compile().as_text())) >= (3 if rank else 1)
