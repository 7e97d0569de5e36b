"""Compression inside the training step: what it changes, what it must not, and every byte that it sends.

The four defects of the released Optimus-CC code have a test each, named so.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain import gradients, hlo, model
from paxtrain.config import CompressConfig, Config, from_dict
from paxtrain.errors import UserError
from paxtrain.mesh import make_mesh
from paxtrain.step import Trainer

FAST = {"xla_backend_optimization_level": 0}  # half the time to compile; the HLO is the same
HIDDEN, SEQUENCE, VOCABULARY = 32, 16, 61
MESSAGE = (2 * SEQUENCE, HIDDEN)


def config(
    mesh=(2, 4, 1), micro_batches=6, layers=4, zero1=True, sequence=False, schedule="eager_1f1b", chunks=1, **compress
) -> Config:
    data, pipe, tensor = mesh
    return from_dict({
        "model": {"layers": layers, "hidden": HIDDEN, "heads": 4, "sequence": SEQUENCE, "vocab_size": VOCABULARY,
                  "vocab_multiple": 64, "dtype": "float32"},
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor, "zero1": zero1, "sequence_parallel": sequence},
        "pipeline": {"schedule": schedule, "virtual_stages": chunks},
        "batch": {"global_batch": 2 * micro_batches * data, "micro_batch": 2},
        "optimizer": {"learning_rate": 1e-2, "warmup_steps": 1},
        "run": {"steps": 100},
        "compress": compress,
    })  # fmt: skip


def trainer(c: Config, **kwargs) -> Trainer:
    return Trainer(c, make_mesh(c.mesh, devices=jax.devices()[: c.mesh.devices]), **kwargs)


def compiled(trained: Trainer) -> jax.stages.Compiled:
    return trained.step.lower(trained.abstract_state(), trained.abstract_batch()).compile(FAST)


@functools.cache
def canonical(layers: int = 4) -> model.Params:
    """Large random parameters, so that nothing hides behind zeros."""
    params = model.init(config((1, 1, 1), layers=layers).model, jax.random.key(0))
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape), params)


def batch(trained: Trainer) -> jax.Array:
    shape = trained.abstract_batch().shape
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, shape, dtype=np.int32)
    return jax.device_put(tokens, trained.batch_sharding)


@functools.cache
def evaluated(c: Config, stage_ranks: tuple[int, ...] | None = None) -> tuple[float, dict, dict, np.ndarray]:
    """Loss, canonical gradients, mesh-layout gradients and codec state of one step's gradients."""
    trained = trainer(c, stage_ranks=stage_ranks)
    params = jax.device_put(
        jax.jit(trained.layout.from_canonical)(canonical(c.model.layers)), trained.state_shardings.params
    )
    tokens = batch(trained)
    run = jax.jit(trained.loss_and_gradients).lower(params, tokens).compile(FAST)
    loss, grads, codec, _ = run(params, tokens)
    return float(loss), jax.device_get(trained.layout.to_canonical(grads)), jax.device_get(grads), jax.device_get(codec)


def trained_steps(c: Config, steps: int) -> tuple[list[float], dict]:
    trained = trainer(c)
    state = trained.from_params(canonical(c.model.layers))
    tokens, losses = batch(trained), []
    step = compiled(trained)
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state)


def differences(mine, right) -> dict[str, float]:
    """Per array max |difference| / max |right|."""
    error = jax.tree.map(lambda a, b: float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)), mine, right)
    return {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(error)}


def assert_close(mine, right, tolerance=1e-5):
    wrong = {name: e for name, e in differences(mine, right).items() if not e <= tolerance}
    assert not wrong, wrong


FULL = {"backward": "all", "backward_rank": 32, "min_ratio": 0.0}


# --- Gradients between the stages -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("c", "dense"),
    [
        (config(**FULL), config()),
        (config(forward="all", forward_rank=32, form="qr", **FULL), config()),
        (config((1, 4, 2), micro_batches=3, schedule="1f1b", error="explicit", **FULL),
         config((1, 4, 2), micro_batches=3, schedule="1f1b")),
        (config((1, 2, 1), schedule="interleaved_1f1b", chunks=2, **(FULL | {"backward": "epilogue"})),
         config((1, 2, 1), schedule="interleaved_1f1b", chunks=2)),
        (config((1, 2, 2), sequence=True, forward="all", forward_rank=16, **(FULL | {"backward_rank": 16})),
         config((1, 2, 2))),
    ],
    ids=["eager", "forward too, qr", "1f1b explicit", "interleaved epilogue", "sequence parallel"],
)  # fmt: skip
def test_full_rank_is_no_compression(c, dense):
    loss, grads, *_ = evaluated(c)
    right_loss, right, *_ = evaluated(dense)
    assert abs(loss - right_loss) <= 1e-5 * right_loss
    assert_close(grads, right, 2e-4)  # normal equations with a ridge of 1e-6


def test_full_rank_gives_the_same_loss_curve_and_low_rank_another():
    dense, _ = trained_steps(config((1, 2, 1)), 8)
    full, _ = trained_steps(config((1, 2, 1), **FULL), 8)
    low, _ = trained_steps(config((1, 2, 1), backward="all", backward_rank=1), 8)
    assert dense[-1] < dense[0] - 0.5
    np.testing.assert_allclose(full, dense, rtol=1e-3)
    assert max(abs(np.subtract(low, dense))) > 2e-3
    assert low[0] == pytest.approx(dense[0], rel=1e-6)  # the forward does not pass the codec


def test_the_forward_and_evaluation_are_untouched():
    c = config(backward="all", backward_rank=2, forward="all", forward_rank=2)
    assert evaluated(config(backward="all", backward_rank=2))[0] == pytest.approx(evaluated(config())[0], rel=1e-6)
    assert abs(evaluated(c)[0] / evaluated(config())[0] - 1) > 1e-4  # a compressed forward is another one
    plain, compressed = trainer(config()), trainer(c)
    params = jax.device_put(jax.jit(plain.layout.from_canonical)(canonical()), plain.state_shardings.params)
    assert float(plain.evaluate(params, batch(plain))) == float(compressed.evaluate(params, batch(plain)))


def test_only_the_stages_below_a_compressed_link_are_changed():
    """Gradients on the last stage come before any compressed message."""
    _, grads, *_ = evaluated(config(backward="all", backward_rank=2))
    _, right, *_ = evaluated(config())
    layers = lambda tree, part: jax.tree.map(lambda x: x[part], tree["layers"])  # noqa: E731
    assert_close(layers(grads, slice(3, 4)), layers(right, slice(3, 4)))
    assert min(differences(layers(grads, slice(0, 3)), layers(right, slice(0, 3))).values()) > 1e-3


# --- Every byte -------------------------------------------------------------------------------------------------------


def by_pair(trained: Trainer) -> dict[tuple[int, int], int]:
    """Bytes from stage to stage on the links of data rank 0, tensor rank 0, without the tied embedding's exchange."""
    mesh = trained.config.mesh
    found = hlo.permute_bytes_by_pair(compiled(trained).as_text())
    stages = {s * mesh.tensor: s for s in range(mesh.pipe)}
    pairs = {(stages[a], stages[b]): size for (a, b), size in found.items() if a in stages and b in stages}
    table = trained.config.model.padded_vocab // mesh.tensor * HIDDEN * 4 // mesh.data
    for pair in ((0, mesh.pipe - 1), (mesh.pipe - 1, 0)):
        pairs[pair] = pairs.get(pair, 0) - table
    return {pair: size for pair, size in pairs.items() if size}


def wire(rank: int, width: int = 4) -> int:
    return rank * sum(MESSAGE) * width


DENSE = MESSAGE[0] * MESSAGE[1] * 4


@pytest.mark.parametrize(("schedule", "micro_batches"), [("eager_1f1b", 6), ("eager_1f1b", 2), ("1f1b", 5)])
def test_epilogue_sends_exactly_the_last_messages_of_each_link_compressed(schedule, micro_batches):
    m = micro_batches
    found = by_pair(trainer(config(micro_batches=m, schedule=schedule, backward="epilogue", backward_rank=4)))
    expected = {(k, k + 1): m * DENSE for k in range(3)}
    for k in range(3):
        count = min(4 - 1 - k, m)
        expected[k + 1, k] = count * wire(4) + (m - count) * DENSE
    assert found == expected


def test_bytes_of_ranks_by_link_and_of_int8_factors():
    found = by_pair(trainer(config(backward="all", backward_ranks="2,6,4", factors="int8")))
    scales = lambda rank: 2 * rank * 4  # noqa: E731
    expected = {(k, k + 1): 6 * DENSE for k in range(3)}
    expected |= {(k + 1, k): 6 * (wire(rank, 1) + scales(rank)) for k, rank in enumerate((2, 6, 4))}
    assert found == expected


def test_with_sequence_parallelism_each_device_compresses_its_part():
    found = by_pair(trainer(config((1, 4, 2), sequence=True, backward="all", backward_rank=4)))
    part, k = MESSAGE[0] // 2, MESSAGE[1]
    expected = {(s, s + 1): 6 * part * k * 4 for s in range(3)}
    assert found == expected | {(s + 1, s): 6 * 4 * (part + k) * 4 for s in range(3)}


def all_reduced(trained: Trainer) -> dict[str, int]:
    found = hlo.collective_bytes(compiled(trained).as_text())
    return {kind: found.get(kind, 0) for kind in ("all-reduce", "reduce-scatter", "all-gather")}


@pytest.mark.parametrize("zero1", [True, False])
def test_everything_compressed_sends_the_formulas_bytes(zero1):
    """Collectives of one device of (2,4,1), to the byte: between stages, over data, embedding, and nothing else."""
    c = config(zero1=zero1, backward="all", backward_rank=4, data="all", data_rank=4, data_start=0.0)
    dense, packed = trainer(config(zero1=zero1)), trainer(c)
    shapes = packed.compression.matrices
    assert shapes == {("qkv", "kernel"): (32, 96), ("out", "kernel"): (32, 32), ("up", "kernel"): (32, 128),
                      ("down", "kernel"): (128, 32)}  # fmt: skip
    kernels = sum(n * k for n, k in shapes.values()) * 4
    factors = sum(4 * (n + k) for n, k in shapes.values()) * 4
    before, after = all_reduced(dense), all_reduced(packed)
    scalars = 2 * 4  # what was left out and of how much, for the log, which gathers a ratio from each stage
    if zero1:
        assert after["reduce-scatter"] == before["reduce-scatter"] - kernels
        assert after["all-reduce"] == before["all-reduce"] + factors + scalars
    else:
        assert after["all-reduce"] == before["all-reduce"] - kernels + factors + scalars
        assert after["reduce-scatter"] == before["reduce-scatter"]
    assert after["all-gather"] == before["all-gather"] + 4
    found = by_pair(packed)
    assert found == {(k, k + 1): 6 * DENSE for k in range(3)} | {(k + 1, k): 6 * wire(4) for k in range(3)}
    # No dense copy of a compressed message: no collective is as large as one.
    text = compiled(packed).as_text()
    backward = {(s + 4 * d, s + 4 * d - 1) for d in (0, 1) for s in (1, 2, 3)}
    sizes = [op.bytes for op in hlo.collectives(text) if op.pairs and set(op.pairs) <= backward]
    assert sizes
    assert max(sizes) < DENSE


def test_identity_codecs_cost_nothing():
    """A run that compresses nothing has the collectives that the schedule and the layout call for, and no state."""
    trained, through = trainer(config(micro_batches=2)), trainer(config(micro_batches=2))
    assert not jax.tree.leaves(trained.abstract_state().codec)
    found = by_pair(trained)
    assert found == {(k, k + 1): 2 * DENSE for k in range(3)} | {(k + 1, k): 2 * DENSE for k in range(3)}
    kinds = [dataclasses.replace(k, receive=(), receive_compressed=k.receive) for k in trained.buffers.kinds]
    vars(through)["buffers"] = dataclasses.replace(trained.buffers, kinds=kinds)
    texts = [compiled(t).as_text() for t in (trained, through)]
    listed = [sorted((c.kind, c.bytes, c.pairs, c.executions) for c in hlo.collectives(text)) for text in texts]
    assert listed[0] == listed[1]


# --- Tied embedding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mesh", "zero1"),
    [
        ((1, 2, 1), True),
        ((1, 3, 2), True),
        ((2, 2, 2), True),
        ((2, 2, 2), False),
        ((4, 2, 1), True),
        ((4, 2, 1), False),
    ],
)
def test_fused_equals_unfused_embedding(mesh, zero1):
    """Defect "embedding sums across vocabulary shards": with tensor=2 each rank's rows are its own."""
    layers = 3 if mesh[1] == 3 else 4
    plain = config((1, 1, 1), micro_batches=4 * mesh[0], layers=layers)
    right = jax.jit(jax.grad(functools.partial(model.loss, config=plain.model)))(
        canonical(layers), batch(trainer(plain))
    )
    for embedding in ("fused", "unfused"):
        c = config(mesh, micro_batches=4, layers=layers, zero1=zero1, embedding=embedding)
        _, grads, mesh_layout, _ = evaluated(c)
        token = mesh_layout["embedding"]["token"]
        np.testing.assert_array_equal(token[0], token[-1])
        assert_close(grads["embedding"]["token"], jax.device_get(right["embedding"]["token"]))


@pytest.mark.parametrize("zero1", [True, False])
def test_fused_embedding_sends_the_formulas_bytes(zero1):
    """Without ZeRO-1: V(2D-1)/D of a ring for V bytes of table and D data ranks, and V(3D-2)/D unfused."""
    ranks = 4
    table = 64 * HIDDEN * 4

    def sent(embedding: str) -> float:
        text = compiled(trainer(config((ranks, 2, 1), zero1=zero1, embedding=embedding))).as_text()
        total = 0.0
        for op in hlo.collectives(text):
            ring = {
                "all-reduce": 2 * (ranks - 1) / ranks,
                "reduce-scatter": (ranks - 1) / ranks,
                "all-gather": ranks - 1,
            }
            total += op.executions * op.bytes * (1 if op.pairs else ring.get(op.kind, 0))
        return total

    saved = sent("unfused") - sent("fused")
    fused = (2 * ranks - 1) / ranks if not zero1 else 1.0
    assert saved == pytest.approx(table * ((3 * ranks - 2) / ranks - fused))


def test_tied_copies_stay_identical():
    for embedding in ("fused", "unfused"):
        _, state = trained_steps(
            config((2, 2, 2), embedding=embedding, backward="all", backward_rank=4, data="0", data_rank=4), 5
        )
        [adam] = [
            part for part in jax.tree.leaves(state.optimizer, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(part, "mu")
        ]
        for tree in (state.params, adam.mu):
            token = tree["embedding"]["token"]
            np.testing.assert_array_equal(token[0], token[-1])


@pytest.mark.parametrize("zero1", [True, False])
def test_everything_together_keeps_the_embedding_gradient(zero1):
    """Defect "SC and FE together drop the input embedding's gradient": here it is the dense run's."""
    everything = {**FULL, "data": "all", "data_rank": 4, "embedding": "fused"}
    _, grads, *_ = evaluated(config(zero1=zero1, **everything))
    _, right, *_ = evaluated(config(zero1=zero1))
    assert_close(grads["embedding"], right["embedding"], 2e-4)
    assert np.abs(grads["embedding"]["token"]).max() > 0.01
    # What is compressed over data does differ, and only that.
    assert differences(grads["layers"]["up"]["kernel"], right["layers"]["up"]["kernel"])[""] > 0.01
    _, grads, *_ = evaluated(config(zero1=zero1, data="all", data_rank=4))
    assert_close(grads["embedding"], right["embedding"], 1e-6)


# --- Gradients over data ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero1", [True, False])
def test_stages_that_are_not_chosen_are_bit_equal_to_dense(zero1):
    _, grads, *_ = evaluated(config(zero1=zero1, data="1,2", data_rank=4))
    _, right, *_ = evaluated(config(zero1=zero1))
    for path, mine in jax.tree_util.tree_leaves_with_path(grads):
        dense = functools.reduce(lambda tree, key: tree[key.key], path, right)
        if path[0].key != "layers":
            np.testing.assert_array_equal(mine, dense)
            continue
        np.testing.assert_array_equal(mine[[0, 3]], dense[[0, 3]])
        if path[-1].key == "kernel":
            assert np.abs(mine[1:3] - dense[1:3]).max() > 1e-3 * np.abs(dense).max()
        else:  # norms and biases go dense on every stage
            np.testing.assert_array_equal(mine, dense)


def test_none_chosen_is_dense():
    _, grads, *_ = evaluated(config(data="all", data_rank=4), stage_ranks=(0, 0, 0, 0))
    assert all(e == 0 for e in differences(grads, evaluated(config())[1]).values())


def test_a_kernel_that_higher_ranks_leave_dense_takes_its_error_along():
    """From rank 4 to 10 the smallest kernel goes dense: its gradient and what was left out arrive, no error stays."""
    low = trainer(config((2, 2, 1), data="all", data_rank=10, data_rank_min=4, data_adapt_every=5), stage_ranks=(4, 4))
    high = dataclasses.replace(low, stage_ranks=(10, 10))
    params = jax.device_put(jax.jit(low.layout.from_canonical)(canonical()), low.state_shardings.params)
    tokens, names = batch(low), [name for name, _ in low.compression.power_kernels]
    gradients = {}
    state = jax.jit(low.compression.init, out_shardings=low.state_shardings.codec)()
    for t in (low, high):
        run = jax.jit(lambda p, x, s, t=t: t.loss_and_gradients(p, x, None, s))
        _, grads, state, _ = run.lower(params, tokens, state).compile(FAST)(params, tokens, state)
        gradients[t.stage_ranks] = jax.device_get(grads)["layers"]["out"]["kernel"]
    where = [i for i, name in enumerate(names) if name == "out"]
    errors = jax.device_get(state["data"].error)
    assert len(errors) == 2 * len(names)  # two layers a stage
    for i, error in enumerate(errors):
        assert np.any(error) == (names[i % len(names)] != "out")
    assert where
    right = evaluated(config((2, 2, 1)))[2]["layers"]["out"]["kernel"]
    # What the first step left out arrives with the second: together they are twice the gradient.
    np.testing.assert_allclose(gradients[4, 4] + gradients[10, 10], 2 * right, atol=1e-5 * np.abs(right).max())


@pytest.mark.parametrize("mesh", [(1, 2, 1), (2, 2, 2), (4, 2, 1)])
def test_full_rank_over_data_is_no_compression(mesh):
    """On any number of data ranks. With tensor=2 one kernel's smaller side is below the rank: it goes dense."""
    _, grads, *_ = evaluated(config(mesh, data="all", data_rank=32, min_ratio=0.0))
    assert_close(grads, evaluated(config(mesh))[1], 1e-3)


def test_the_ratio_gate_leaves_small_kernels_dense():
    """Defect "no minimum-ratio gate": rank 10 halves all kernels but the smallest, which would shrink 1.6 times."""
    c = config(data="all", data_rank=10)
    assert {name for name, _ in trainer(c).compression.power_kernels} == {"qkv", "up", "down"}
    _, grads, *_ = evaluated(c)
    _, right, *_ = evaluated(config())
    np.testing.assert_array_equal(grads["layers"]["out"]["kernel"], right["layers"]["out"]["kernel"])
    assert differences(grads["layers"]["up"]["kernel"], right["layers"]["up"]["kernel"])[""] > 1e-3


def test_data_ranks_agree_on_the_factor_and_keep_errors_of_their_own():
    c = config((4, 2, 1), data="all", data_rank=4)
    state = trained_steps(c, 3)[1].codec["data"]
    for q in state.q:
        np.testing.assert_array_equal(q, np.broadcast_to(q[:1], q.shape))
    assert all(np.abs(e[0] - e[1]).max() > 0 for e in state.error)


# --- State ------------------------------------------------------------------------------------------------------------

EVERYTHING = {"backward": "all", "backward_rank": 4, "forward": "all", "forward_rank": 4, "data": "all", "data_rank": 4}


def test_gradients_that_are_not_finite_leave_the_state_as_it_was():
    """Part of defect "state is not guarded": e and Q are as before, bit for bit; the next step is an ordinary one."""
    trained = trainer(config((2, 2, 1), **EVERYTHING))
    good, tokens = trained.from_params(canonical()), batch(trained)
    good, _ = compiled(trained)(good, tokens)
    before = jax.device_get(good)
    broken = jax.tree.map(jnp.copy, good.params)
    broken["final_norm"]["scale"] = broken["final_norm"]["scale"].at[-1, 0].set(jnp.nan)
    after, metrics = compiled(trained)(good.replace(params=broken), tokens)
    assert not metrics["finite"]
    for old, new in zip(jax.tree.leaves(before.codec), jax.tree.leaves(jax.device_get(after.codec)), strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("factors", ["float32", "bfloat16", "int8"])
def test_one_value_that_is_not_finite_in_one_message_is_seen(factors):
    """Whatever the factors' dtype: it must reach a gradient, so that the step is dropped with its state."""
    trained = trainer(config((1, 2, 1), micro_batches=2, backward="all", backward_rank=4, factors=factors))
    codec = trained.compression.links.backward.codec
    message = jnp.ones(trained.compression.message.shape).at[0, 0, 0].set(jnp.inf)
    wire, _ = codec.encode(codec.init(message.shape, message.dtype), message)
    assert not np.isfinite(np.asarray(codec.decode(wire, message))).all()


def test_every_direction_and_chunk_has_its_link_and_its_rank():
    """Interleaved, both directions compressed, links of different ranks, the one back to the first stage included."""
    c = config((1, 2, 1), micro_batches=4, schedule="interleaved_1f1b", chunks=2, backward="all", backward_ranks="4,2")
    assert by_pair(trainer(c)) == {
        (0, 1): 2 * 4 * DENSE + 4 * wire(2),  # two activations per micro-batch, and the gradient of the second chunk
        (1, 0): 4 * DENSE + 2 * 4 * wire(4),
    }
    both = {"backward": "all", "backward_rank": 3, "forward": "all", "forward_rank": 3, "error": "explicit"}
    trained = trainer(config((1, 2, 1), micro_batches=4, schedule="interleaved_1f1b", chunks=2, **both))
    state, _ = compiled(trained)(trained.from_params(canonical()), batch(trained))
    errors = {
        way: jax.device_get(state.codec[way].error.e)[0, :, 0] for way in ("backward", "forward")
    }  # [P, chunks, ...]
    sent = {way: np.any(e != 0, axis=(2, 3)).tolist() for way, e in errors.items()}
    # The first virtual stage, chunk 0 of stage 0, sends no gradient; the last, chunk 1 of stage 1, no activation.
    assert sent == {"backward": [[False, True], [True, True]], "forward": [[True, True], [True, False]]}
    assert not np.array_equal(errors["forward"][0, 0], errors["forward"][0, 1])


def test_state_changes_where_messages_are_sent_and_nowhere_else():
    trained = trainer(config((2, 4, 1), backward="epilogue", backward_rank=4))
    state = trained.from_params(canonical())
    before = jax.device_get(state.codec)
    state, _ = compiled(trained)(state, batch(trained))
    changed = [
        np.array([[np.any(new[d, s] != old[d, s]) for s in range(4)] for d in range(2)])
        for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(jax.device_get(state.codec)), strict=True)
    ]
    assert not np.any([c[:, 0] for c in changed])  # stage 0 sends no gradient
    assert np.all(np.any(changed, axis=0)[:, 1:])


def test_each_chunk_has_a_state_of_its_own():
    trained = trainer(config((1, 2, 1), schedule="interleaved_1f1b", chunks=2, backward="all", backward_rank=4))
    state, _ = compiled(trained)(trained.from_params(canonical()), batch(trained))
    states = [x for x in jax.tree.leaves(jax.device_get(state.codec)) if x.ndim > 4]
    assert states
    assert all(x.shape[3] == 2 for x in states)
    assert any(np.any(x[0, 1, 0, 0] != x[0, 1, 0, 1]) for x in states)


def test_the_virtual_mesh_compresses_as_the_real_one_does():
    """Gradients and every state of a step on one device: dense and compressed messages, stages of different ranks."""
    c = config((2, 4, 1), micro_batches=5, backward="epilogue", backward_ranks="2,4,4", data="0,1", data_rank=4)
    one = dataclasses.replace(c.mesh, data=1, pipe=1)
    emulated = Trainer(c, make_mesh(one, devices=jax.devices()[:1]), virtual=True)
    params = jax.jit(emulated.layout.from_canonical)(canonical())
    tokens = batch(emulated)
    run = jax.jit(emulated.loss_and_gradients).lower(params, tokens).compile(FAST)
    loss, grads, codec, _ = jax.device_get(run(params, tokens))
    right_loss, _, right, right_codec = evaluated(c)
    assert loss == pytest.approx(right_loss, rel=1e-6)
    assert_close(grads, right, 1e-4)
    assert_close(codec, right_codec, 1e-3)


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("compress", "mesh", "words"),
    [
        (
            {"backward": "all", "backward_rank": 17},
            (2, 4, 1),
            ["backward_rank=17", "32 x 32", "largest useful rank is 8"],
        ),
        ({"backward": "all", "backward_ranks": "2,99,2"}, (2, 4, 1), ["backward_ranks=99", "largest useful rank is 8"]),
        ({"backward": "all", "backward_rank": 33, "min_ratio": 0.0}, (2, 4, 1), ["largest useful rank is 32"]),
        ({"forward": "all", "forward_rank": 9}, (2, 4, 1), ["forward_rank=9", "largest useful rank is 8"]),
        ({"data": "all"}, (2, 4, 1), ["data_rank=128", "128 x 32", "largest useful rank is 12"]),
    ],
)
def test_ranks_that_save_nothing_are_refused(compress, mesh, words):
    with pytest.raises(UserError) as error:
        trainer(config(mesh, **compress)).compression.check()
    assert all(word in str(error.value) for word in words), str(error.value)


def test_triton_needs_a_gpu():
    with pytest.raises(
        UserError, match="implementation=triton needs NVIDIA A100, H100, H200 or B200 GPUs, got cpu; auto or xla would"
    ):
        _ = trainer(config(implementation="triton")).compression


def test_the_sums_see_a_reduction_that_was_left_out(monkeypatch):
    """Negative control of the comparisons over data: without the mean of one array they fail."""
    monkeypatch.setattr(gradients, "packed_scatter", lambda arrays, dims, axis: [
        jax.lax.dynamic_slice_in_dim(x, 0, x.shape[d] // 2, axis=d) for x, d in zip(arrays, dims, strict=True)
    ])  # fmt: skip
    _, grads, *_ = evaluated(config(data="all", data_rank=5))
    _, right, *_ = evaluated(config())
    assert differences(grads["layers"]["qkv"]["bias"], right["layers"]["qkv"]["bias"])[""] > 0.01


def test_sections_default_to_no_compression():
    assert CompressConfig() == Config().compress
    assert (Config().compress.backward, Config().compress.data) == ("none", "none")
