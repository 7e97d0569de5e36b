"""Data ranks with different numbers of micro-batches: the step against jax.grad of the plain model on one device."""

import dataclasses

import jax
import numpy as np
import pytest

from paxtrain.config import BatchConfig, OuterConfig
from paxtrain.errors import UserError
from paxtrain.parallel import step
from paxtrain.pipeline.program import Share, share_of
from paxtrain.study.variants import require_alike
from tests import small
from tests.compress_settings import compression
from tests.paxtrain.parallel.test_gradients import (
    HIDDEN,
    SEQUENCE,
    TOLERANCE,
    check,
    config,
    errors,
    reference,
    trainer,
)
from tests.paxtrain.xla import counted


def uneven(c, counts, micro_batch=2):
    """Return a configuration whose data ranks have some numbers of micro-batches."""
    text = ",".join(map(str, counts))
    return dataclasses.replace(c, batch=BatchConfig(sum(counts) * micro_batch, micro_batch, text))


def case(mesh, counts, **settings):
    return uneven(config(mesh, **{"idle": "auto", **settings}), counts)


CASES = [
    case((2, 2, 1), (3, 1), layers=2),
    case((2, 3, 1), (1, 3), schedule="1f1b", layers=4, pipe_layers="1,2,1"),
    case((4, 2, 1), (1, 3, 3, 2), schedule="gpipe", save="residuals", shard="none"),
    case((2, 2, 1), (2, 1), schedule="zb_h1", shard="none"),
    case((2, 4, 1), (2, 5), schedule="1f1b", layers=5, pipe_layers="1,2,1,1"),
    case((2, 2, 2), (3, 1), schedule="zb_h1", shard="none", dropout=0.2),
    case((2, 2, 1), (2, 5), schedule="interleaved_1f1b", virtual_stages=2, separator=5),
    case((4, 1, 2), (3, 1, 1, 1), shard="none", save="inputs", shape="llama untied"),
    case((2, 2, 1), (3, 5), schedule="zb_v", virtual_stages=2),
    case((2, 2, 2), (1, 3), sequence=True, schedule="1f1b"),
    case((4, 1, 1), (4, 4, 2, 1), dropout=0.2, scan_layers="off"),
    case((2, 3, 1), (6, 2), layers=6, schedule="1f1b", in_flight=4, shape="llama"),
]


def name(c) -> str:
    m = c.mesh
    return f"{m.data}x{m.pipe}x{m.tensor} {c.pipeline.schedule} {c.batch.data_micro_batches.replace(',', '-')}"


@pytest.mark.parametrize(
    "c",
    [pytest.param(c, marks=pytest.mark.slow if i else ()) for i, c in enumerate(CASES)],
    ids=name,
)
def test_gradients_equal_one_device(c):
    check(c)


@pytest.mark.slow
def test_gradients_equal_one_device_in_the_rows_of_gpus():
    check(case((2, 2, 1), (3, 1), schedule="1f1b"), overlap=True)


@pytest.mark.slow
def test_gradients_equal_one_device_in_more_rows_of_gpus():
    check(case((2, 2, 1), (5, 2), schedule="1f1b"), overlap=True)
    check(case((2, 2, 1), (2, 4), schedule="gpipe"), overlap=True)


@pytest.mark.slow
def test_emulated_ranks_compute_what_devices_do():
    c = case((2, 2, 1), (2, 1), layers=2)
    found = errors(small.emulated(c), reference(c.batch.global_batch, 0.0, c.model.layers))
    assert max(found.values()) <= TOLERANCE


@pytest.mark.once
def test_weights_of_ranks_instead_of_sequences_show(monkeypatch):
    """Each rank's mean over its own sequences is another mean, if ranks have different numbers of them."""
    c = case((2, 1, 1), (2, 1))

    def by_rank(*given) -> Share:
        return Share(*share_of(*given)[:2], mean=2 - jax.lax.axis_index("data"))

    monkeypatch.setattr(step, "share_of", by_rank)
    found = errors(trainer(c), reference(c.batch.global_batch, 0.0, c.model.layers))
    assert found.pop("loss") > 10 * TOLERANCE and min(found.values()) > 1000 * TOLERANCE


# --- Compression ------------------------------------------------------------------------------------------------------

FULL = {"min_ratio": 0.0, "backward_rank": 32, "forward_rank": 32, "data_rank": 32}  # as many as a matrix has columns
COMPRESSED = {
    "between stages": ((2, 2, 1), {}, {"backward_messages": "all", "forward_messages": "all"}),
    "epilogue": ((2, 4, 1), {"schedule": "1f1b"}, {"backward_messages": "epilogue", "error": "explicit"}),
    "ranks of links": ((2, 4, 1), {"schedule": "1f1b"}, {"backward_messages": "all", "backward_ranks": "32,31,32"}),
    "over data": ((2, 2, 1), {"shard": "none"}, {"data_stages": "all"}),
    "over data, ZeRO-1": ((2, 1, 1), {}, {"data_stages": "all"}),
    "identity": ((2, 2, 1), {}, {f"{place}_codec": "identity" for place in ("backward", "forward", "data")}),
}
REPEATED = "epilogue", "ranks of links", "over data", "over data, ZeRO-1", "identity"  # what the others have one by one


@pytest.mark.once
@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.slow if how in REPEATED else ()) for how in COMPRESSED]
)
def test_full_rank_is_no_compression(how):
    mesh, settings, compress = COMPRESSED[how]
    c = case(mesh, (2, 1, 1, 1)[: mesh[0]], **settings)
    c = dataclasses.replace(c, compress=compression(**(FULL | compress)))
    found = errors(trainer(c), reference(c.batch.global_batch, 0.0, c.model.layers))
    assert max(found.values()) <= 2e-4  # normal equations with a ridge of 1e-6


@pytest.mark.slow
def test_a_rank_that_skips_keeps_the_state_of_its_codecs():
    """Rank 1 has one micro-batch. In a run of that one alone the codec has the same state."""
    compress = compression(backward_messages="all", backward_rank=2, min_ratio=0.0)
    both = dataclasses.replace(case((2, 2, 1), (3, 1), layers=2), compress=compress)
    alone = dataclasses.replace(config((1, 2, 1), 2, layers=2, idle="auto"), compress=compress)
    ref = reference(8, 0.0, 2)

    def state(c, tokens):
        trained = trainer(c)
        params = jax.device_put(jax.jit(trained.layout.from_canonical)(ref.params), trained.state_shardings.params)
        _, _, codec, *_ = jax.jit(trained.loss_and_gradients)(params, jax.device_put(tokens, trained.batch_sharding))
        return jax.tree.map(lambda x: np.asarray(x[-1]), codec["backward"])

    # The last rank's loss is divided by the mean number of micro-batches, 2, and so is what its messages hold.
    found, right = state(both, ref.tokens[both.batch_samples]), state(alone, ref.tokens[-2:])
    compared = jax.tree.map(lambda a, b: np.abs(2 * a - b).max() / max(np.abs(b).max(), 1e-30), found, right)
    same = jax.tree.map(lambda a, b: np.abs(a - b).max(), found, right)
    assert all(min(pair) <= 1e-5 for pair in zip(jax.tree.leaves(compared), jax.tree.leaves(same), strict=True))


# --- What crosses the links -------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize("schedule", [pytest.param("eager_1f1b", marks=pytest.mark.slow), "1f1b"])
def test_a_rank_sends_the_messages_of_its_own_micro_batches(schedule):
    """Two messages a micro-batch each way; devices of rank 0 are 0 to 2, those of rank 1 are 3 to 5."""
    trained = trainer(case((2, 3, 1), (1, 2), layers=3, schedule=schedule))
    message, table = 2 * SEQUENCE * HIDDEN * 4, trained.config.model.padded_vocab * HIDDEN * 4 // 2
    sent = counted.permute_bytes_by_pair(trained.compile_step().as_text())
    edges = {(first, last) for rank in (0, 3) for first, last in ((rank, rank + 2), (rank + 2, rank))}
    for rank, count in ((0, 1), (3, 2)):
        for stage in range(rank, rank + 2):
            assert sent.pop((stage, stage + 1)) == sent.pop((stage + 1, stage)) == count * message
    assert sent == dict.fromkeys(edges, table)


@pytest.mark.once
def test_equal_numbers_are_the_program_without_them():
    c = config((2, 2, 1), 12)
    named = dataclasses.replace(c, batch=BatchConfig(12, 2, "3,3"))
    texts = [t.step.lower(t.abstract_state(), t.abstract_batch()).as_text() for t in map(trainer, (c, named))]
    assert texts[0] == texts[1]


# --- Samples, evaluation and mistakes ---------------------------------------------------------------------------------


def test_samples_go_to_rank_after_rank():
    c = case((4, 1, 1), (3, 1, 2, 1))
    rows = c.batch_samples.reshape(4, 3, 2)
    own = [rows[rank, 3 - count :].ravel().tolist() for rank, count in enumerate((3, 1, 2, 1))]
    assert own == [[0, 1, 2, 3, 4, 5], [6, 7], [8, 9, 10, 11], [12, 13]]
    np.testing.assert_array_equal(config((4, 1, 1), 8).batch_samples, np.arange(8))


@pytest.mark.parametrize("mesh", [pytest.param((2, 2, 1), marks=pytest.mark.slow), (2, 1, 1)], ids=str)
def test_evaluation_is_the_mean_over_all_sequences(mesh):
    c = case(mesh, (4, 1))
    trained, ref = trainer(c), reference(c.batch.global_batch, 0.0, c.model.layers)
    params = jax.device_put(jax.jit(trained.layout.from_canonical)(ref.params), trained.state_shardings.params)
    tokens = jax.device_put(ref.tokens[c.batch_samples], trained.batch_sharding)
    assert float(trained.evaluate(params, tokens)) == pytest.approx(ref.loss, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("counts", "global_batch", "message"),
    [
        ("4,2", 16, "takes 12 sequences, but batch.global_batch=16; batch.global_batch=12 with pipeline.idle=skip"),
        ("4,2,2", 16, "names 3 data ranks, but mesh.data=2"),
        ("8", 16, "names 1 data rank, but mesh.data=2"),
        ("8,0", 16, "must be positive integers joined by commas, got '8,0'"),
        ("8,-1", 16, "must be positive integers joined by commas"),
        ("8,x", 16, "must be positive integers joined by commas"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(counts, global_batch, message):
    with pytest.raises(UserError) as raised:
        dataclasses.replace(config((2, 1, 1)), batch=BatchConfig(global_batch, 2, counts))
    assert message in str(raised.value)


def test_what_needs_equal_ranks_is_refused():
    with pytest.raises(UserError, match=r"pipeline\.idle=compute needs data ranks that all run the same rows"):
        case((2, 2, 1), (4, 2), idle="compute")
    outer = dataclasses.replace(config((2, 1, 1), idle="auto"), outer=OuterConfig(every=5))
    with pytest.raises(UserError, match="weighs sequences of data ranks that train together"):
        uneven(outer, (4, 2))
    with pytest.raises(UserError, match="the study takes equal data ranks"):
        require_alike(case((2, 2, 1), (4, 2)))
