"""Compression inside the training step: what it changes between stages, what stays equal, and every byte sent.

The four defects of the released Optimus-CC code have one test each, here or in test_compression_data.py. The docstring
of each names its defect.
"""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress import wire_bytes
from compress.codecs.quantised import QuantisedBlocks
from paxtrain.config import CompressConfig, Config
from paxtrain.errors import UserError
from paxtrain.parallel.compression import checks
from paxtrain.parallel.compression.named import settle_implementation
from paxtrain.parallel.step import Trainer
from paxtrain.xla import hlo
from tests.compress.topk import TopK
from tests.paxtrain.compressed import (
    FULL,
    MESSAGE,
    SCATTER,
    all_reduced,
    assert_close,
    batch,
    by_pair,
    canonical,
    compiled,
    config,
    differences,
    evaluated,
    exact,
    matrices,
    trained_steps,
    trainer,
)

pytestmark = pytest.mark.once

# --- Gradients between the stages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "c",
    [
        pytest.param(config((1, 3, 1), 2, layers=3, error="explicit", **FULL), marks=pytest.mark.slow),
        pytest.param(config((1, 3, 1), 2, layers=3, schedule="1f1b", error="explicit", **FULL), marks=pytest.mark.slow),
        config((1, 2, 2), 2, sequence=True, forward_messages="all", forward_rank=16, **(FULL | {"backward_rank": 16})),
        pytest.param(config(forward_messages="all", forward_rank=32, **FULL), marks=pytest.mark.slow),
        pytest.param(
            config((1, 2, 1), schedule="interleaved_1f1b", chunks=2, **(FULL | {"backward_messages": "epilogue"})),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["explicit", "1f1b explicit", "sequence parallel", "forward too", "interleaved epilogue"],
)
def test_full_rank_is_no_compression(c):
    loss, grads, *_ = evaluated(c)
    right_loss, right = exact(c)
    assert abs(loss - right_loss) <= 1e-5 * right_loss
    assert_close(grads, right, 2e-4)  # normal equations with a ridge of 1e-6


@pytest.mark.slow
def test_full_rank_gives_the_same_loss_curve_and_low_rank_another():
    dense, full, low = (
        trained_steps(config((1, 2, 1), 2, **compress), 8)[0]
        for compress in ({}, FULL, {"backward_messages": "all", "backward_rank": 1})
    )
    assert dense[-1] < dense[0] - 0.5
    np.testing.assert_allclose(full, dense, rtol=1e-3)
    assert max(abs(np.subtract(low, dense))) > 2e-3
    assert low[0] == pytest.approx(dense[0], rel=1e-6)  # the forward does not pass the codec


def test_the_forward_and_evaluation_are_untouched():
    low = {"backward_messages": "all", "backward_rank": 2}
    plain, compressed = config((1, 2, 1), 2), config((1, 2, 1), 2, forward_messages="all", forward_rank=2, **low)
    right, _ = exact(plain)
    assert evaluated(config((1, 2, 1), 2, **low))[0] == pytest.approx(right, rel=1e-6)
    assert abs(evaluated(compressed)[0] / right - 1) > 1e-4  # a compressed forward is another one
    trained = trainer(compressed)
    params = jax.device_put(jax.jit(trained.layout.from_canonical)(canonical()), trained.state_shardings.params)
    tokens = batch(trained)
    assert float(trained.evaluate(params, tokens)) == float(trainer(plain).evaluate(params, tokens))


@pytest.mark.parametrize(
    ("links", "above"), [pytest.param("", 2, marks=pytest.mark.slow), ("0", 1)], ids=["all links", "the first link"]
)
def test_only_the_stages_below_a_compressed_link_are_changed(links, above):
    """Gradients on the last stage come before any compressed message."""
    c = config((1, 3, 1), 2, layers=3, backward_messages="all", backward_rank=2, backward_links=links)
    _, grads, *_ = evaluated(c)
    _, right = exact(c)

    def layers(tree, part):
        return jax.tree.map(lambda x: x[part], tree["layers"])

    assert_close(layers(grads, slice(above, 3)), layers(right, slice(above, 3)))
    assert min(differences(layers(grads, slice(0, above)), layers(right, slice(0, above))).values()) > 1e-3


# --- Every byte -------------------------------------------------------------------------------------------------------


def wire(rank: int, width: int = 4) -> int:
    return rank * sum(MESSAGE) * width


DENSE = MESSAGE[0] * MESSAGE[1] * 4


@pytest.mark.parametrize(
    ("schedule", "micro_batches"),
    [("eager_1f1b", 3), pytest.param("eager_1f1b", 1, marks=pytest.mark.slow), ("1f1b", 1)],
)
def test_epilogue_sends_exactly_the_last_messages_of_each_link_compressed(schedule, micro_batches):
    m = micro_batches
    how = {"schedule": schedule, "backward_messages": "epilogue", "backward_rank": 4}
    found = by_pair(trainer(config((1, 3, 1), m, layers=3, **how)))
    expected = {(k, k + 1): m * DENSE for k in range(2)}
    for k in range(2):
        count = min(3 - 1 - k, m)
        expected[k + 1, k] = count * wire(4) + (m - count) * DENSE
    assert found == expected


def test_bytes_of_links_that_compress_and_of_those_that_do_not():
    """Each link has its rank; factors of int8 have a scale a column; activations have another codec on other links."""
    ways = {"backward_messages": "all", "backward_ranks": "2,6,4", "backward_links": "1,2", "factors": "int8"}
    trained = trainer(config((1, 4, 1), 1, **ways, forward_codec="int8", forward_links="0,2"))
    message = trained.compression.message
    eight = wire_bytes(QuantisedBlocks(8), message.shape, message.dtype)
    expected = {(k, k + 1): DENSE if k == 1 else eight for k in range(3)}
    expected |= {(k + 1, k): wire(rank, 1) + 2 * rank * 4 for k, rank in ((1, 6), (2, 4))} | {(1, 0): DENSE}
    assert by_pair(trained) == expected
    assert trained.compression.link_settings()["backward links"] == [1, 2]
    told = dict(trained.compression.describe())
    assert told["gradients between stages"].startswith("all on links 1, 2 of 3: ")
    assert told["activations between stages"].startswith("all on links 0, 2 of 3: ")


def test_with_sequence_parallelism_each_device_compresses_its_part():
    found = by_pair(trainer(config((1, 2, 2), 1, sequence=True, backward_messages="all", backward_rank=4)))
    part, k = MESSAGE[0] // 2, MESSAGE[1]
    assert found == {(0, 1): part * k * 4, (1, 0): 4 * (part + k) * 4}


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_everything_compressed_sends_the_formulas_bytes(zero1):
    """One device of (2,3,1) sends, to the byte, between stages, over data and for the embedding, and nothing else."""
    some = {"mesh": (2, 3, 1), "micro_batches": 2, "layers": 3, "zero1": zero1}
    c = config(**some, backward_messages="all", backward_rank=4, data_stages="all", data_rank=4, data_start=0.0)
    dense, packed = trainer(config(**some)), trainer(c)
    shapes = matrices(packed.compression)
    expected = {"qkv": (32, 96), "out": (32, 32), "up": (32, 128), "down": (128, 32)}
    assert shapes == {(name, "kernel"): shape for name, shape in expected.items()}
    kernels = sum(n * k for n, k in shapes.values()) * 4
    factors = sum(4 * (n + k) for n, k in shapes.values()) * 4
    scalars = 2 * 4  # two squared norms for the log, which gathers their ratio from each stage
    for stage in (0, 1, 2):  # the first one reduces in its last B, the others behind the rows
        before, after = all_reduced(dense, stage), all_reduced(packed, stage)
        if zero1:
            assert after[SCATTER] == before[SCATTER] - kernels
            assert after["all-reduce"] == before["all-reduce"] + factors + scalars
        else:
            assert after["all-reduce"] == before["all-reduce"] - kernels + factors + scalars
            assert after[SCATTER] == before[SCATTER]
        assert after["all-gather"] == before["all-gather"] + 4
    found = by_pair(packed)
    assert found == {(k, k + 1): 2 * DENSE for k in range(2)} | {(k + 1, k): 2 * wire(4) for k in range(2)}
    # No dense copy of a compressed message: no collective is as large as one.
    text = compiled(packed).as_text()
    backward = {(s + 3 * d, s + 3 * d - 1) for d in (0, 1) for s in (1, 2)}
    sizes = [op.bytes for op in hlo.collectives(text) if op.pairs and set(op.pairs) <= backward]
    assert sizes
    assert max(sizes) < DENSE


def test_identity_codecs_cost_nothing():
    """A run that compresses nothing has the collectives that the schedule and the layout call for, and no state."""
    trained, through = (trainer(config((1, 3, 1), 2, layers=3)) for _ in range(2))
    assert not jax.tree.leaves(trained.abstract_state().codec)
    found = by_pair(trained)
    assert found == {(k, k + 1): 2 * DENSE for k in range(2)} | {(k + 1, k): 2 * DENSE for k in range(2)}
    kinds = [dataclasses.replace(k, receive=(), receive_compressed=k.receive) for k in trained.buffers.kinds]
    vars(through)["buffers"] = dataclasses.replace(trained.buffers, kinds=kinds)
    texts = [compiled(t).as_text() for t in (trained, through)]
    listed = [sorted((c.kind, c.bytes, c.pairs, c.executions) for c in hlo.collectives(text)) for text in texts]
    assert listed[0] == listed[1]


# --- State ------------------------------------------------------------------------------------------------------------

EVERYTHING = {
    "backward_messages": "all",
    "backward_rank": 4,
    "forward_messages": "all",
    "forward_rank": 4,
    "data_stages": "all",
    "data_rank": 4,
}


CODED = {f"{place}_codec": "int8" for place in ("backward", "forward", "data", "embedding")}


@pytest.mark.parametrize("codecs", [EVERYTHING, pytest.param(CODED, marks=pytest.mark.slow)], ids=["low rank", "int8"])
def test_gradients_that_are_not_finite_leave_the_state_as_it_was(codecs):
    """Defect "state is not guarded": e and Q stay as before, bit for bit, and the next step is an ordinary one."""
    trained = trainer(config((2, 2, 1), 1, **codecs))
    good, tokens = trained.from_params(canonical()), batch(trained)
    good, _ = compiled(trained)(good, tokens)
    before = jax.device_get(good)
    broken = jax.tree.map(jnp.copy, good.params)
    broken["final_norm"]["scale"] = broken["final_norm"]["scale"].at[-1, 0].set(jnp.nan)
    after, metrics = compiled(trained)(good.replace(params=broken), tokens)
    assert not metrics["finite"]
    assert all(any(np.any(x) for x in jax.tree.leaves(state)) for state in before.codec.values())
    for old, new in zip(jax.tree.leaves(before.codec), jax.tree.leaves(jax.device_get(after.codec)), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("factors", ["float32", "bfloat16", "int8"])
def test_one_value_that_is_not_finite_in_one_message_is_seen(factors):
    """For every dtype of the factors it must reach a gradient, so that the step is dropped with its state."""
    trained = trainer(config((1, 2, 1), micro_batches=2, backward_messages="all", backward_rank=4, factors=factors))
    codec = trained.compression.links.backward
    message = jnp.ones(trained.compression.message.shape).at[0, 0, 0].set(jnp.inf)
    wire, _ = codec.encode(codec.init(message.shape, message.dtype), message)
    assert not np.isfinite(np.asarray(codec.decode(wire, message))).all()


def test_every_direction_and_chunk_has_its_link_its_rank_and_its_state():
    """Both directions are compressed; links, including the one back to the first stage, have different ranks."""
    both = {
        "backward_messages": "all",
        "backward_ranks": "4,2",
        "forward_messages": "all",
        "forward_rank": 3,
        "error": "explicit",
    }
    trained = trainer(config((1, 2, 1), micro_batches=2, schedule="interleaved_1f1b", chunks=2, **both))
    assert by_pair(trained) == {
        (0, 1): 2 * 2 * wire(3) + 2 * wire(2),  # two activations per micro-batch, and the gradient of the second chunk
        (1, 0): 2 * wire(3) + 2 * 2 * wire(4),
    }
    state, _ = compiled(trained)(trained.from_params(canonical()), batch(trained))
    errors = {
        way: jax.device_get(state.codec[way].error.e)[0, :, 0, 0] for way in ("backward", "forward")
    }  # [P, chunks, ...]
    sent = {way: np.any(e != 0, axis=(2, 3)).tolist() for way, e in errors.items()}
    # The first virtual stage, chunk 0 of stage 0, sends no gradient; the last, chunk 1 of stage 1, no activation.
    assert sent == {"backward": [[False, True], [True, True]], "forward": [[True, True], [True, False]]}
    assert not np.array_equal(errors["forward"][0, 0], errors["forward"][0, 1])
    assert not np.array_equal(errors["backward"][1, 0], errors["backward"][1, 1])


def test_state_changes_where_messages_are_sent_and_nowhere_else():
    trained = trainer(config((2, 3, 1), 2, layers=3, backward_messages="epilogue", backward_rank=4))
    state = trained.from_params(canonical(3))
    before = jax.device_get(state.codec)
    state, _ = compiled(trained)(state, batch(trained))
    changed = [
        np.array([[np.any(new[d, s] != old[d, s]) for s in range(3)] for d in range(2)])
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.codec)), strict=True)
    ]
    assert not np.any([c[:, 0] for c in changed])  # stage 0 sends no gradient
    assert np.all(np.any(changed, axis=0)[:, 1:])


@pytest.mark.slow
def test_the_virtual_mesh_compresses_as_the_real_one_does():
    """Gradients and states agree for dense and compressed messages, some links, and stages of different ranks."""
    on_links = {"backward_links": "0,2", "forward_messages": "all", "forward_rank": 4, "forward_links": "1"}
    c = config(
        (2, 4, 1),
        micro_batches=5,
        backward_messages="epilogue",
        backward_ranks="2,4,4",
        data_stages="0,1",
        data_rank=4,
        **on_links,
    )
    loss, _, grads, codec = evaluated(c, virtual=True)
    right_loss, _, right, right_codec = evaluated(c)
    assert loss == pytest.approx(right_loss, rel=1e-6)
    assert_close(grads, right, 1e-4)
    assert_close(codec, right_codec, 1e-3)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compress", "mesh", "words"),
    [
        (
            {"backward_messages": "all", "backward_rank": 17},
            (2, 4, 1),
            ["backward.rank=17", "32 x 32", "largest useful rank is 8"],
        ),
        (
            {"backward_messages": "all", "backward_ranks": "2,99,2"},
            (2, 4, 1),
            ["backward.ranks=99", "largest useful rank is 8"],
        ),
        ({"backward_messages": "all", "backward_rank": 33, "min_ratio": 0.0}, (2, 4, 1), ["largest useful rank is 32"]),
        ({"forward_messages": "all", "forward_rank": 9}, (2, 4, 1), ["forward.rank=9", "largest useful rank is 8"]),
        ({"data_stages": "all"}, (2, 4, 1), ["data.rank=128", "128 x 32", "largest useful rank is 12"]),
    ],
)
def test_ranks_that_save_nothing_are_refused(compress, mesh, words):
    with pytest.raises(UserError) as error:
        checks.check(trainer(config(mesh, **compress)).compression)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_triton_needs_a_gpu():
    with pytest.raises(
        UserError, match="implementation=triton needs NVIDIA A100, H100, H200 or B200 GPUs, got cpu; auto or xla would"
    ):
        _ = trainer(config(implementation="triton")).compression


@pytest.mark.parametrize(
    ("capability", "rank", "best"),
    [
        ("8.0", 64, "triton"),
        ("8.0", 65, "xla"),
        ("8.6", 16, "xla"),
        ("9.0", 16, "triton"),
        ("9.0", 200, "xla"),
        ("10.0", 16, "triton"),
        ("12.0", 16, "xla"),
    ],
)
def test_auto_picks_the_kernels_that_a_gpu_can_run(capability, rank, best):
    gpu = types.SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a GPU")
    assert settle_implementation(config(backward_messages="all", backward_rank=rank), gpu) == best


def test_sections_default_to_no_compression():
    assert CompressConfig() == Config().compress
    assert (Config().compress.backward.messages, Config().compress.data.stages) == ("none", "none")


# --- Codecs of users --------------------------------------------------------------------------------------------------


class Flat(TopK):
    """A codec that forgets the message's shape."""

    def decode(self, wire, like):
        return super().decode(wire, like).reshape(-1)


def topk(**changes) -> Trainer:
    return dataclasses.replace(trainer(config(**changes)), codec=TopK(64))


@pytest.mark.slow
def test_a_given_codec_sends_its_bytes_and_nothing_else():
    """Without compress.backward the codec encodes all gradients; with "epilogue" it encodes those."""
    message = 64 * (4 + 4)
    assert wire_bytes(TopK(64), (2, 16, 32), "float32") == message
    some = {"mesh": (1, 2, 1), "micro_batches": 2}
    assert by_pair(topk(**some)) == {(0, 1): 2 * DENSE, (1, 0): 2 * message}
    assert by_pair(topk(**some, backward_messages="epilogue")) == {(0, 1): 2 * DENSE, (1, 0): message + DENSE}


def test_a_given_codec_needs_no_settings_and_is_named():
    c = config(backward_rank=999)  # which is not used
    trained = dataclasses.replace(trainer(c), codec=TopK(64))
    checks.check(trained.compression)
    [row] = trained.compression.describe()
    assert row == ("gradients between stages", "all: TopK(k=64, feedback=True), 512 of 4096 bytes, 8.0 times smaller")
    assert trained.compression.link_settings() == {"backward_ranks": [], "codec": "TopK(k=64, feedback=True)"}


@pytest.mark.parametrize(
    ("c", "given", "words"),
    [
        (config((8, 1, 1)), {}, ["TopK", "needs messages between stages", "mesh.pipe=1"]),
        (
            config(backward_messages="all", backward_ranks="2,2,2"),
            {},
            ["compress.backward.ranks=2,2,2", "TopK", "codec=None"],
        ),
        (config(), {"codec": object()}, ["object is no codec", "it lacks decode, describe, encode", "compress.Codec"]),
        (config(), {"codec": Flat(64)}, ["float32[1024]", "float32[2,16,32]", "`like`"]),
    ],
    ids=["one stage", "ranks", "no codec", "shape"],
)
def test_a_given_codec_that_does_not_fit_is_refused(c, given, words):
    trained = dataclasses.replace(trainer(c), **{"codec": TopK(64)} | given)
    with pytest.raises(UserError) as error:
        checks.check(trained.compression)
        _ = trained.compression.links
    assert all(word in str(error.value) for word in words), str(error.value)
