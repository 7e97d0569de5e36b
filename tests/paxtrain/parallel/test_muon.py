"""Muon against its formula in float64, on one device and on meshes, in checkpoints; and its transfers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from paxtrain.config import CheckpointConfig, MeshConfig
from paxtrain.errors import UserError
from paxtrain.model import parameters, transformer
from paxtrain.parallel.layout import names
from paxtrain.parallel.muon import is_matrix, route
from paxtrain.parallel.optimizer import make_optimizer
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.xla import hlo
from tests import small

RATE, DECAY, MOMENTUM, STEPS = 0.01, 0.3, 0.9, 5
LLAMA = {"family": "llama", "kv_heads": 2, "intermediate": 24, "tied_head": False}
# Number of matrices in each kernel of a layer.
KERNELS = {
    "gpt2": {"qkv": 3, "out": 1, "up": 1, "down": 1},
    "llama": {"q": 1, "kv": 2, "out": 1, "gate_up": 2, "down": 1},
}


def config(mesh=(1, 1, 1), layers=3, name="muon", zero1=True, shape=None, **sections):
    optimizer = {"name": name, "learning_rate": RATE, "schedule": "constant", "warmup_steps": 0, "clip_norm": 0.0}
    optimizer |= {"weight_decay": DECAY, "muon_momentum": MOMENTUM, "muon_steps": STEPS}
    return small.config(
        mesh,
        (16, 2),
        model={"layers": layers, "hidden": 16, "sequence": 8, "vocab_size": 31, "vocab_multiple": 32, **(shape or {})},
        mesh={"shard": MeshConfig.of_zero1(zero1)},
        pipeline={"schedule": "1f1b"} | sections.get("pipeline", {}),
        optimizer=optimizer | sections.get("optimizer", {}),
    )


def drawn(architecture, seed):
    """Return a canonical tree of numbers between -1 and 1, with some matrices of low rank."""
    random = np.random.default_rng(seed)

    def draw(path, x):
        value = random.uniform(-1, 1, x.shape)
        if names(path)[-2:] == ("up", "kernel"):
            value = value[:, :, :3] @ random.uniform(-1, 1, (x.shape[0], 3, x.shape[2]))
        return value.astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, transformer.shapes(architecture))


def matrices(path, x):
    """Return the single matrices [n, k] of a canonical kernel, [L, n, k] or [L, n, several, k]."""
    several = (KERNELS["gpt2"] | KERNELS["llama"])[names(path)[1]]
    return [layer[:, i] if several > 1 else layer for layer in x for i in range(several)]


def joined(parts, shape):
    """Return the kernel of the given shape from its matrices."""
    x = np.stack(parts)
    return x if len(shape) == 3 else np.moveaxis(x.reshape(shape[0], shape[2], shape[1], shape[3]), 1, 2)


@pytest.mark.parametrize("shape", [None, LLAMA], ids=KERNELS)
def test_kernels_are_its_and_nothing_else(shape):
    """Muon applies to no embedding, head, norm or bias."""
    model = config(shape=shape).model
    leaves = jax.tree_util.tree_leaves_with_path(transformer.shapes(model))
    kernels = KERNELS["llama" if shape else "gpt2"]
    found = {names(path) for path, _ in leaves if is_matrix(model, path)}
    assert found == {("layers", name, "kernel") for name in kernels}


# --- The formula ------------------------------------------------------------------------------------------------------


def orthogonal(m):
    """Return the result of the Newton-Schulz iteration as printed by Jordan et al."""
    if m.shape[0] > m.shape[1]:
        return orthogonal(m.T).T
    x = m / np.linalg.norm(m)
    for _ in range(STEPS):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def reference(theta, gradients, rms):
    """Return the parameters after all gradients, by torch.optim.Muon's formula on a single matrix in float64."""
    momentum = np.zeros_like(theta)
    for g in gradients:
        momentum = momentum + (1 - MOMENTUM) * (g - momentum)
        ahead = g + MOMENTUM * (momentum - g)
        n, k = theta.shape
        scale = rms * np.sqrt(max(n, k)) if rms else np.sqrt(max(1, k / n))
        theta = theta - RATE * (scale * orthogonal(ahead) + DECAY * theta)
    return theta


@pytest.mark.parametrize("rms", [0.2, 0.0])
def test_muon_does_what_its_authors_wrote_and_all_else_is_adamws(rms):
    settings = config(optimizer={"muon_rms": rms})
    first, *gradients = (drawn(settings.model, seed) for seed in range(101))

    def trained(transformation):
        params, state, update = first, transformation.init(first), jax.jit(transformation.update)
        for g in gradients:
            updates, state = update(g, state, params)
            params = optax.apply_updates(params, updates)
        return params

    found, adamw = (trained(make_optimizer(c)) for c in (settings, config(name="adamw")))

    def check(path, x, other, start, *grads):
        if not is_matrix(settings.model, path):
            np.testing.assert_allclose(x, other, rtol=1e-6, atol=1e-7)  # two programs round differently
            return
        each = zip(*(matrices(path, np.float64(value)) for value in (start, *grads)), strict=True)
        expected = joined([reference(theta, g, rms) for theta, *g in each], x.shape)
        np.testing.assert_allclose(x, expected, atol=2e-5, rtol=0)
        assert np.abs(x - other).max() > 1e-3

    jax.tree_util.tree_map_with_path(check, found, adamw, first, *gradients)


def test_updates_are_as_large_as_adamws():
    """Updates have entries of about 0.2 for each shape of a matrix, so that Muon and AdamW share a learning rate."""
    settings = config(optimizer={"weight_decay": 0.0})
    params, transformation = drawn(settings.model, 0), make_optimizer(settings)
    updates, _ = jax.jit(transformation.update)(drawn(settings.model, 1), transformation.init(params), params)
    for name in ("qkv", "out", "down"):
        x = np.asarray(updates["layers"][name]["kernel"]) / RATE
        assert 0.15 < np.sqrt(np.square(x).mean()) < 0.25
    # The update has rank 3: the noise of float32, which has full rank, is not amplified.
    kernel = np.asarray(updates["layers"]["up"]["kernel"][0]) / RATE / (0.2 * 8)
    values = np.linalg.svd(kernel, compute_uv=False)
    assert values[:3].min() > 0.5 and values[:3].max() < 1.3 and values[3] < 1e-3


# --- On meshes --------------------------------------------------------------------------------------------------------

MESHES = {
    "all of a stage's matrices dealt out": config((2, 1, 2), layers=4),
    "uneven stages": config((2, 2, 2), pipeline={"pipe_layers": "2,1"}),
    "chunks": config((1, 2, 4), layers=4, pipeline={"schedule": "interleaved_1f1b", "virtual_stages": 2}),
    "nothing divides": config((2, 1, 4)),
    "replicated": config((4, 2, 1), layers=4, zero1=False),
    "llama, all dealt out": config((2, 2, 2), layers=8, shape=LLAMA),
    "llama, nothing divides": config((2, 2, 2), layers=5, shape=LLAMA),
}


@functools.cache
def one_device(architecture):
    """Return the canonical parameters after two updates, of every matrix by the formula and of all else by optax."""
    adamw, bare = (optax.adamw(RATE, b2=0.95, weight_decay=decay) for decay in (DECAY, 0.0))
    updates = {optimizer: jax.jit(optimizer.update) for optimizer in (adamw, bare)}

    def trained(optimizer, x, *gradients):
        state = optimizer.init(x)
        for g in gradients:
            change, state = updates[optimizer](g, state, x)
            x = optax.apply_updates(x, change)
        return np.asarray(x)

    def each(path, *values):
        if names(path)[-1] == "kernel":
            parts = zip(*(matrices(path, np.float64(value)) for value in values), strict=True)
            return joined([reference(theta, g, 0.2) for theta, *g in parts], values[0].shape)
        return trained(bare if names(path)[-1] in ("scale", "bias") else adamw, *values)

    return jax.tree_util.tree_map_with_path(each, *(drawn(architecture, seed) for seed in range(3)))


@functools.cache
def updated(name):
    """Return the trainer, its compiled update, and its state after the same two updates."""
    trained = small.trainer(MESHES[name])

    def update(state, loss, grads):
        return trained.update(state, loss, grads, state.codec)

    shardings, scalar = trained.state_shardings, jax.ShapeDtypeStruct((), jnp.float32)
    grads = trained.abstract_state().params
    update = jax.jit(update, out_shardings=(shardings, None)).lower(trained.abstract_state(), scalar, grads).compile()
    place = jax.jit(trained.layout.from_canonical, out_shardings=shardings.params)
    state = trained.from_params(drawn(trained.config.model, 0))
    for seed in (1, 2):
        state, _ = update(state, jnp.float32(1), place(drawn(trained.config.model, seed)))
    return trained, update, state


GATE = "uneven stages", "chunks", "llama, nothing divides"


@pytest.mark.parametrize("name", [n if n in GATE else pytest.param(n, marks=pytest.mark.slow) for n in MESHES])
def test_updates_on_a_mesh_are_those_of_one_device_and_padding_stays_zero(name):
    trained, update, state = updated(name)
    found = jax.device_get(trained.layout.to_canonical(state.params))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), found, one_device(trained.config.model)
    )
    empty = trained.layout.layer_of.reshape(-1) < 0
    assert empty.any() == (name in ("uneven stages", "llama, nothing divides"))
    momentum = state.optimizer.inner_states["muon"].inner_state[1].trace
    for tree in (state.params["layers"], momentum["layers"]):
        for x in jax.tree.leaves(tree):
            assert np.isfinite(x).all() and not np.asarray(x)[empty].any()

    poisoned = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), state.params)
    after, values = update(state, jnp.float32(1), poisoned)
    assert not values["finite"]
    before, after = (jax.device_get((s.params, s.optimizer)) for s in (state, after))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_momenta_are_split_by_rows_as_far_as_they_divide():
    specs = {name: route(small.trainer(c).layout)[-1]["layers"] for name, c in MESHES.items()}
    assert {name: tuple(spec.get("up", spec.get("gate_up"))["kernel"]) for name, spec in specs.items()} == {
        "all of a stage's matrices dealt out": (("pipe", "data", "tensor"), None, None),
        "uneven stages": (("pipe", "data"), None, "tensor"),
        "chunks": ("pipe", None, "tensor"),
        "nothing divides": ("pipe", "data", "tensor"),
        "replicated": ("pipe", None, "tensor"),
        "llama, all dealt out": (("pipe", "data", "tensor"), None, None, None),
        "llama, nothing divides": ("pipe", "data", None, "tensor"),
    }
    for name in MESHES:
        _, _, state = updated(name)
        for kernel in KERNELS[MESHES[name].model.family]:
            x = state.optimizer.inner_states["muon"].inner_state[1].trace["layers"][kernel]["kernel"]
            assert x.sharding.spec == specs[name][kernel]["kernel"]
        assert specs[name]["ln1"] == small.trainer(MESHES[name]).layout.specs()["layers"]["ln1"]


def sent(name):
    """Return (kind, bytes of a device's operands) of the update's collectives."""
    _, update, _ = updated(name)
    return [(c.kind, c.bytes) for c in hlo.collectives(update.as_text())]


SMALL = 64  # bytes: norms are a number for each matrix at most


@pytest.mark.parametrize("name", ["all of a stage's matrices dealt out", "llama, all dealt out"])
def test_dealt_out_matrices_travel_twice_and_newton_schulz_sends_nothing(name):
    dealt, c = [(kind, size) for kind, size in sent(name) if size > SMALL], MESHES[name]
    assert {kind for kind, _ in dealt} == {"all-to-all"}
    share = 4 * c.model.layers * parameters.count(c.model, role="kernel") // c.mesh.devices  # bytes of a device
    # Each matrix moves there and back, over data and over tensor.
    assert sum(size for _, size in dealt) == 4 * share


def test_matrices_that_are_not_dealt_out_are_multiplied_over_the_mesh():
    everything = {"all-gather", "all-reduce", "reduce-scatter", "collective-permute"}
    assert {kind for kind, size in sent("nothing divides") if size > SMALL} & everything


# --- Checkpoints ------------------------------------------------------------------------------------------------------


def test_checkpoints_go_from_mesh_to_mesh_bit_by_bit_and_not_to_adamw(tmp_path):
    trained, _, state = updated("uneven stages")
    tree, architecture = trained.canonical(state), {"layers": 3}
    with Checkpoints(tmp_path, CheckpointConfig()) as checkpoints:
        checkpoints.save(2, tree, {"model": architecture})
    other, update, same = updated("nothing divides")
    restored, _ = Checkpoints(tmp_path, CheckpointConfig()).restore(other.abstract_canonical(), architecture)
    moved = other.from_canonical(restored)
    assert jax.tree.structure(moved) == jax.tree.structure(same)
    assert jax.tree.all(jax.tree.map(lambda a, b: a.sharding == b.sharding, moved, same))
    back = jax.device_get(other.canonical(moved))
    jax.tree.map(np.testing.assert_array_equal, back, jax.device_get(tree))
    # The momentum was restored, so the next update is the one that would have followed.
    place = jax.jit(other.layout.from_canonical, out_shardings=other.state_shardings.params)
    grads = place(drawn(other.config.model, 3))
    found, expected = (jax.device_get(update(s, jnp.float32(1), grads)[0].params) for s in (moved, same))
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), found, expected)

    adamw = small.trainer(config(name="adamw"))
    with pytest.raises(UserError, match=r"checkpoint 2 in .* holds other arrays: optimizer/.* is absent there"):
        Checkpoints(tmp_path, CheckpointConfig()).restore(adamw.abstract_canonical(), architecture)
