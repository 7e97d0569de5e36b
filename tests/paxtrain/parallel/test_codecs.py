"""Codecs by name inside the training step: what they send, what they keep, and that Identity changes no bit."""

import dataclasses

import jax
import numpy as np
import pytest

import compress
from paxtrain import tables
from paxtrain.errors import UserError
from paxtrain.parallel.compression import checks
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout
from paxtrain.study import measurements
from tests.paxtrain.compressed import (
    MESSAGE,
    SCATTER,
    all_reduced,
    assert_close,
    batch,
    by_pair,
    canonical,
    collectives,
    config,
    evaluated,
    exact,
    matrices,
    trained_steps,
    trainer,
)

pytestmark = pytest.mark.once
TOPK = "tests.compress.topk:TopK"
BOTH = {
    "backward_codec": "int8",
    "backward_options": {"block": 32},
    "forward_codec": "int8",
    "data_codec": "int8",
    "data_options": {"block": 32},
}

ALL = BOTH | {"embedding_codec": "int8"}


@pytest.mark.parametrize(
    ("mesh", "zero1"),
    [
        ((2, 2, 2), True),
        pytest.param((2, 2, 1), False, marks=pytest.mark.slow),
        pytest.param((2, 4, 1), False, marks=pytest.mark.slow),
        pytest.param((2, 2, 2), False, marks=pytest.mark.slow),
    ],
)
def test_identity_gives_the_bits_of_no_compression(mesh, zero1):
    """With ZeRO-1 weights, too, are gathered through it."""
    places = ("backward", "forward", "data", "embedding", *(["weights"] if zero1 else []))
    names = {f"{place}_codec": "identity" for place in places}
    loss, grads, *_ = evaluated(config(mesh, 2, zero1=zero1, min_ratio=0.0, **names))
    right_loss, right, *_ = evaluated(config(mesh, 2, zero1=zero1))
    assert loss == right_loss
    for mine, dense in zip(jax.tree.leaves(grads), jax.tree.leaves(right), strict=True):
        np.testing.assert_array_equal(mine, dense)


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_codecs_send_the_declared_bytes(zero1):
    """Between stages codes and scales of each message; over data those of each rank's part of each kernel."""
    coded, dense = (trainer(config((2, 2, 1), 1, zero1=zero1, **compress)) for compress in (BOTH, {}))
    message = MESSAGE[0] * MESSAGE[1]
    backward, forward = (message + 2 * message // block for block in (32, 64))
    assert by_pair(coded) == {(0, 1): forward, (1, 0): backward}
    kernels = 2 * sum(n * k for n, k in matrices(coded.compression).values())  # of two layers
    wire = kernels + 2 * kernels // 32  # of both parts
    for stage in (0, 1):
        before, after = all_reduced(dense, stage), all_reduced(coded, stage)
        two_norms = 2 * 4
        if zero1:
            assert after[SCATTER] == before[SCATTER] - 4 * kernels + wire
            assert after["all-reduce"] == before["all-reduce"] + two_norms
            assert after["all-gather"] == before["all-gather"] + 4
        else:
            assert after["all-reduce"] == before["all-reduce"] - 4 * kernels + two_norms
            assert after[SCATTER] == before[SCATTER] + wire
            assert after["all-gather"] == before["all-gather"] + 4 + wire // 2
    declared = sum(
        coded.compression.reducer.wire_bytes(shape, coded.compression.shards[path])
        for path, shape in coded.compression.kernels.items()
    )
    assert 2 * declared == wire / 2 * (1 if zero1 else 2)


@pytest.mark.slow  # the gate runs it on the newer Python
def test_a_users_class_trains_on_both_axes_of_eight_devices():
    names = {"backward_codec": TOPK, "backward_options": {"k": 128}, "data_codec": TOPK, "data_options": {"k": 64}}
    losses, state = trained_steps(config((2, 2, 2), 2, **names, data_start=0.0), 12)
    dense, _ = trained_steps(config((2, 2, 2), 2), 12)
    assert losses[-1] < losses[0] - 0.5
    assert losses[0] == pytest.approx(dense[0], rel=1e-6)
    assert max(abs(np.subtract(losses, dense))) > 1e-3
    sent = state.codec["data"].sent
    assert [x.shape[:4] for x in sent] == [(2, 2, 1, 2)] * 8
    assert all(np.any(x) for x in sent)


@dataclasses.dataclass(frozen=True)
class NothingUnsent(compress.Identity):
    """A codec that returns no number for a message that is not sent, as it may."""

    def encode(self, state, x, active=True):
        return jax.numpy.where(active, x, jax.numpy.nan), state


def test_the_virtual_mesh_uses_no_message_that_is_not_sent():
    """Its rows carry messages that are not due, to stages that compute on what they have."""
    names = {f"{place}_codec": f"{__name__}:NothingUnsent" for place in ("backward", "forward")}
    c = config((1, 3, 1), layers=3, min_ratio=0.0, **names)
    loss, grads, *_ = evaluated(c, virtual=True)
    right_loss, right = exact(c)
    assert loss == pytest.approx(right_loss, rel=1e-6)
    assert_close(grads, right)


def test_the_study_counts_the_bytes_of_codecs():
    coded = measurements.wire_bytes(trainer(config((2, 2, 1), **BOTH)))
    dense = measurements.wire_bytes(trainer(config((2, 2, 1))))
    assert coded["backward"] < dense["backward"] / 3.5
    assert coded["reduce-scatter"] < dense["reduce-scatter"] / 2  # beside the embedding's


def test_the_table_and_the_identity_name_codecs_and_no_rank():
    trained = trainer(config(**BOTH, backward_rank=999))
    checks.check(trained.compression)
    rows = dict(trained.compression.describe())
    assert rows["gradients between stages"].startswith(
        "all: QuantisedBlocks(bits=8, block=32, feedback=True, rotate=False), 1088"
    )
    assert "of 4096 bytes, 3.8 times smaller" in rows["gradients between stages"]
    assert rows["gradients over data"].startswith("all: QuantisedBlocks(bits=8, block=32")
    assert "of down, out, qkv, up" in rows["gradients over data"]
    assert not any("rank" in text for text in rows.values())
    settings = trained.compression.link_settings()
    assert settings["codec"] == settings["data codec"] == repr(trained.compression.backward_codec)
    assert trained.compression.levels_text((1, 0, 1, 0)) == "on stages 0, 2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"backward_codec": "no.module:Codec"}, ["compress.backward.codec=no.module:Codec cannot be imported"]),
        ({"data_codec": "int8", "data_options": {"blok": 1}}, ["compress.data.codec=int8 has no option 'blok'"]),
        ({"data_codec": "identity"}, ["compress.data.codec=identity makes no kernel", "2 times smaller"]),
        ({"forward_codec": "compress:Scattered"}, ["needs the option codec"]),
        (
            {"backward_codec": f"{__name__}:Thirds"},
            ["Thirds()", "does not take messages of [2, 16, 32]", "cannot reshape"],
        ),
        ({"data_codec": f"{__name__}:Thirds"}, ["Thirds()", "does not take messages of"]),
        ({"backward_codec": f"{__name__}:Thirds", "forward_codec": "identity"}, ["Thirds()"]),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_compiled(changes, words):
    with pytest.raises(UserError) as error:
        checks.check(trainer(config(**changes)).compression)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


def test_weights_travel_as_codes_and_evaluation_takes_them_as_they_are():
    """A device sends codes and scales of its shard of each kernel; norms, biases and embeddings are as they were."""
    c = config((2, 2, 1), 1, weights_codec="int8")
    coded, dense = trainer(c), trainer(config((2, 2, 1), 1))
    kernels = sum(n * k for n, k in matrices(coded.compression).values())  # of one shard of two layers
    for stage in (0, 1):
        before, after = (all_reduced(trained, stage)["all-gather"] for trained in (dense, coded))
        assert after == before - 4 * kernels + kernels + 2 * kernels // 64
    params = jax.device_put(jax.jit(dense.layout.from_canonical)(canonical()), dense.state_shardings.params)
    assert float(coded.evaluate(params, batch(dense))) == float(dense.evaluate(params, batch(dense)))
    assert 1e-6 < abs(evaluated(c)[0] / exact(c)[0] - 1) < 0.02
    rows = dict(coded.compression.describe())
    assert rows["weights over data"].startswith("kernels: QuantisedBlocks(bits=8")


# --- In groups of data ranks ------------------------------------------------------------------------------------------

GROUPS = {"data_codec": "int8", "data_options": {"block": 32}, "data_inside": 2}
EXACT = {"data_codec": "identity", "data_inside": 2, "min_ratio": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "chunks", "zero1"),
    [
        ((4, 2, 1), "eager_1f1b", 1, True),
        pytest.param((4, 1, 2), "eager_1f1b", 1, False, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), "1f1b", 1, False, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), "gpipe", 1, True, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), "zb_h1", 1, False, marks=pytest.mark.slow),
        pytest.param((4, 2, 1), "interleaved_1f1b", 2, True, marks=pytest.mark.slow),
    ],
)
def test_identity_between_groups_is_the_dense_reduction(mesh, schedule, chunks, zero1):
    """Sums are in another order. The tied table and norms, which travel as they are, have the same bits."""
    layers = mesh[1] * chunks  # one in each chunk; the virtual mesh below has two
    how = {"micro_batches": 2, "layers": layers, "zero1": zero1, "schedule": schedule, "chunks": chunks}
    _, grads, *_ = evaluated(config(mesh, **how, **EXACT))
    _, right, *_ = evaluated(config(mesh, **how))
    assert_close(grads, right, 2e-6)
    for mine, dense in zip(jax.tree.leaves(grads["final_norm"]), jax.tree.leaves(right["final_norm"]), strict=True):
        np.testing.assert_array_equal(mine, dense)


def test_one_group_of_all_data_ranks_is_the_dense_program():
    alike = [trainer(config((4, 2, 1), **changes)) for changes in ({}, GROUPS | {"data_inside": 4})]
    texts = [trained.step.lower(trained.abstract_state(), trained.abstract_batch()).as_text() for trained in alike]
    assert texts[0] == texts[1]
    assert alike[1].compression.levels == (0, 0)
    assert dict(alike[1].compression.describe())["gradients over data"] == (
        "as they are: all 4 data ranks are one group"
    )


def by_group(trained, stage):
    """Return the bytes that a device of a stage sends over data in each kind: inside groups of two, and otherwise."""
    sent = ({}, {})
    stride = trained.config.mesh.pipe * trained.config.mesh.tensor
    for op in collectives(trained, stage):
        ranks = sorted({number // stride for number in op.groups[0]}) if op.groups else list(range(4))
        if op.kind in RING and len(ranks) > 1:
            near = len(ranks) == 2 and ranks[1] - ranks[0] == 1
            sent[near][op.kind] = sent[near].get(op.kind, 0) + RING[op.kind](len(ranks)) * op.bytes * op.executions
    return sent[1], sent[0]


RING = {"all-to-all": lambda n: (n - 1) / n, "all-gather": lambda n: n - 1, "all-reduce": lambda n: 2 * (n - 1) / n}


LOW_RANK_GROUPS = {"data_stages": "all", "data_rank": 2, "data_rank_min": 2, "data_inside": 2}


@pytest.mark.parametrize(
    ("codec", "zero1"),
    [
        (GROUPS, True),
        pytest.param(LOW_RANK_GROUPS, False, marks=pytest.mark.slow),
        pytest.param(GROUPS, False, marks=pytest.mark.slow),
        pytest.param(LOW_RANK_GROUPS, True, marks=pytest.mark.slow),
    ],
)
def test_a_group_sends_kernels_as_they_are_and_between_groups_what_is_declared(codec, zero1):
    """Of the compiled program, on four data ranks; beside them two norms for the log are summed over data."""
    coded, dense = (trainer(config((4, 2, 1), 1, zero1=zero1, **changes)) for changes in (codec, {}))
    reducer, shards = coded.compression.reducer, coded.compression.shards
    slots = 2  # layers of a stage
    for stage in (0, 1):
        (near, far), (none, before) = by_group(coded, stage), by_group(dense, stage)
        assert none == {}
        inside, between, plain = {}, {}, {}
        for path, shape in coded.compression.kernels.items():
            for kind, size in reducer.inside_traffic(shape, shards[path]):
                inside[kind] = inside.get(kind, 0) + slots * size
            for kind, size in reducer.traffic(shape, shards[path]):
                between[kind] = between.get(kind, 0) + slots * size
            kind, times = ("all-to-all", 3 / 4) if zero1 else ("all-reduce", 6 / 4)
            plain[kind] = plain.get(kind, 0) + times * slots * 4 * np.prod(shape)
        scattered = {"all-to-all": inside["reduce-scatter"]}  # on CPUs
        assert near == scattered | ({} if zero1 else {"all-gather": inside["all-gather"]})
        expected = {kind: before[kind] - plain.get(kind, 0) + between.get(kind, 0) for kind in RING if kind in before}
        expected |= {kind: size for kind, size in between.items() if kind not in before}
        expected["all-reduce"] = expected.get("all-reduce", 0) + 2 * 3 / 4 * 2 * 4
        assert {kind: far[kind] for kind in expected if kind != "all-gather"} == pytest.approx(
            {kind: size for kind, size in expected.items() if kind != "all-gather"}
        )
        assert far["all-gather"] == pytest.approx(expected["all-gather"], abs=32)  # which also gathers the norm


def test_the_error_of_a_group_has_the_shape_of_its_ranks_part():
    losses, state = trained_steps(config((4, 2, 1), 1, **GROUPS, data_start=0.0), 12)
    dense, _ = trained_steps(config((4, 2, 1), 1), 12)
    assert losses[-1] < losses[0] - 0.5
    assert max(abs(np.subtract(losses, dense))) > 1e-6
    made = trainer(config((4, 2, 1), **GROUPS)).compression
    for error, (path, _) in zip(state.codec["data"].sent, [(path, 0) for path in made.data_kernels] * 2):
        size = np.prod(made.kernels[path])
        assert error.shape[:5] == (4, 2, 1, 1, 2)  # of data, pipe, context and tensor; to two groups
        assert np.prod(error.shape[5:]) == size / 4
        assert np.any(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes, compress, within, zero1",
    [
        # A sum in another order may move a number to the next code.
        pytest.param((2, 2, 1), ALL, 0.02, True, id="all, ZeRO-1"),
        pytest.param((2, 2, 1), ALL, 0.02, False, id="all", marks=pytest.mark.slow),
        pytest.param((4, 2, 1), EXACT, 1e-5, False, id="groups", marks=pytest.mark.slow),
        pytest.param((4, 2, 1), EXACT, 1e-5, True, id="groups, ZeRO-1", marks=pytest.mark.slow),
    ],
)
def test_the_virtual_mesh_does_what_the_real_one_does(sizes, compress, within, zero1):
    c = config(sizes, zero1=zero1, micro_batches=2, **compress)
    loss, _, grads, _ = evaluated(c, virtual=True)
    right_loss, _, right, _ = evaluated(c)
    assert loss == pytest.approx(right_loss, rel=1e-6 if compress is EXACT else 1e-4)
    assert_close(grads, right, within)


def test_the_table_says_what_travels_inside_groups_and_between():
    trained = trainer(config((4, 2, 1), **GROUPS))
    checks.check(trained.compression)
    text = dict(trained.compression.describe())["gradients over data"]
    kernels = 2 * sum(n * k for n, k in matrices(trained.compression).values())  # two layers on a stage
    inside, between = kernels / 2 * 4, kernels / 4 * (1 + 2 / 32)
    assert "between groups of 2 of " in text
    assert f"a device sends {tables.size(inside, 'B')} inside its group and {tables.size(between, 'B')} between" in text
    settings = trained.compression.link_settings()
    assert settings["data codec"].endswith("between groups of 2")
    low = trainer(config((4, 2, 1), **LOW_RANK_GROUPS)).compression
    assert low.link_settings()["data inside"] == 2


@dataclasses.dataclass(frozen=True)
class OverAll(compress.PowerSGD):
    """A reducer that averages over the axis that it is given by jax's own collectives."""

    rank: int = 2

    def exchange(self, wire, kept, shards):
        jax.lax.pmean(wire[0], shards[0].axis)
        return super().exchange(wire, kept, shards)


@dataclasses.dataclass(frozen=True)
class NamesTheAxis(compress.PowerSGD):
    """A reducer that averages over all data ranks, whatever axis it is given; between groups means would be wrong."""

    rank: int = 2

    def exchange(self, wire, kept, shards):
        return super().exchange(wire, kept, [shard._replace(axis="data") for shard in shards])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"data_codec": "int8", "data_inside": 0}, ["compress.data.inside must be 1 or more", "got 0"]),
        ({"data_codec": "int8", "data_inside": 3}, ["compress.data.inside=3 does not divide mesh.data=4", "2 or 4"]),
        ({"data_inside": 2}, ["compress.data.inside=2 is about", "compress.data.stages=all, or"]),
        (
            {"data_codec": f"{__name__}:OverAll", "data_inside": 2},
            ["OverAll(rank=2", "does not reduce between groups", "unbound axis name", "compress.collectives"],
        ),
        (
            {"data_codec": f"{__name__}:NamesTheAxis", "data_inside": 2},
            ["NamesTheAxis(rank=2", "does not reduce between groups", "unbound axis name: data"],
        ),
        ({"data_stages": "all", "data_rank": 64, "data_inside": 2}, ["compress.data.rank=64", "in 2 parts"]),
        ({"data_codec": "identity", "data_inside": 2}, ["compress.data.codec=identity makes no kernel"]),
        ({"data_codec": "int5", "data_inside": 4}, ["compress.data.codec=int5"]),  # though one group needs none
    ],
)
def test_groups_that_do_not_fit_are_refused(changes, words):
    with pytest.raises(UserError) as error:
        checks.check(trainer(config((4, 2, 1), **changes)).compression)
    assert all(word in str(error.value) for word in words), error.value
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("codec", [{"data_stages": "all", "data_rank": 4}, {"data_codec": "int8"}])
def test_groups_whose_parts_would_not_be_equal_are_refused(codec):
    made = Compression(Layout(config((10, 1, 1), data_inside=5, **codec)))
    with pytest.raises(UserError, match=r"compress\.data\.inside=5 cuts no kernel of a layer"):
        checks.check(made)


@dataclasses.dataclass(frozen=True)
class Thirds(compress.Identity):
    """A codec for messages that can be cut into blocks of three."""

    def encode(self, state, x, active=True):
        return x.reshape(-1, 3), state

    def decode(self, wire, like):
        return wire.reshape(like.shape)
