"""Groups that train apart: each as a trainer alone, joined by an outer step that numpy repeats."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from paxtrain.config import Config, MeshConfig, from_dict, to_dict
from paxtrain.errors import UserError
from paxtrain.outer.trainer import GROUP, on_host
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.profiling.breakdown import axes
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.compressed import FAST, assert_close

pytestmark = pytest.mark.once
EVERY, ROUNDS = 2, 2


def config(
    mesh=(4, 2, 1), groups=2, zero1=True, optimizer=None, compress=None, dropout=0.0, micro_batches=1, **outer
) -> Config:
    return small.config(
        mesh,
        (2 * micro_batches * mesh[0], 2),
        model={"layers": 2, "vocab_multiple": 64, "embedding_dropout": dropout},
        mesh={"shard": MeshConfig.of_zero1(zero1)},
        pipeline={"scan_layers": "on"},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 1} | (optimizer or {}),
        outer={"every": EVERY, "groups": groups} | outer if groups else {},
        run={"steps": 100},
        compress=compress or {},
    )


def batches(count: int, size: int) -> list[np.ndarray]:
    """Return the same global batches for every trainer."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, small.VOCABULARY, (size, 17), dtype=np.int32) for _ in range(count)]


def params(c: Config):
    return small.canonical(dataclasses.replace(c.model, embedding_dropout=0.0))


@functools.cache
def compiled(c: Config):
    """Return the trainer of a configuration and its compiled step."""
    made = small.trainer(c)
    return made, made.step.lower(made.abstract_state(), made.abstract_batch()).compile(FAST)


def trained(c: Config, tokens, poison=None, every=None):
    """Return the trainer, the state after a step for each batch and its exchanges, and the metrics of the steps.

    Args:
        c: configuration.
        tokens: global batches.
        poison: function of a step's number and the state before it, whose result is trained instead.
        every: steps from an exchange to the next; None: as the configuration says.
    """
    made, step = compiled(c)
    every = every or c.outer.every
    state, figures = made.from_params(params(c)), []
    for number, batch in enumerate(tokens, 1):
        if poison:
            state = poison(number, state)
        state, metrics = step(state, jax.device_put(batch, made.batch_sharding))
        figures.append(on_host(metrics))
        if every and number % every == 0:
            state = made.exchanged(state)
    return made, state, figures


def shared(made, state):
    return jax.device_get(made.canonical(state))["params"]


SGD = {"name": "sgd", "weight_decay": 0.0, "clip_norm": 0.0, "schedule": "constant"}


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_exchange_after_each_step_of_sgd_is_dense_training(zero1):
    """With dropout, too: its masks belong to the samples of the whole batch."""
    more = {"mesh": (4, 1, 1), "zero1": zero1, "optimizer": SGD, "dropout": 0.2, "micro_batches": 2}
    tokens = batches(4, 16)
    made, state, _ = trained(config(every=1, lr=1.0, momentum=0.0, **more), tokens)
    dense, right, _ = trained(config(groups=0, **more), tokens)
    assert_close(shared(made, state), shared(dense, right), 2e-6)
    later, other, _ = trained(config(every=1, lr=1.0, momentum=0.0, **more), tokens, every=4)
    with pytest.raises(AssertionError):  # exchanges that come later are other training
        assert_close(shared(later, other), shared(dense, right), 2e-6)


@pytest.mark.slow
def test_gradients_may_be_summed_inside_pairs_of_a_groups_data_ranks():
    tokens, pairs = batches(2, 16), {"data_codec": "identity", "data_inside": 2, "min_ratio": 0.0}
    made, state, _ = trained(config((8, 1, 1), optimizer=SGD, compress=pairs), tokens)
    dense, right, _ = trained(config((8, 1, 1), optimizer=SGD), tokens)
    assert made.compression.reducer.inside == 2 and dense.compression.reducer is None
    assert_close(shared(made, state), shared(dense, right), 2e-6)


@pytest.mark.parametrize(
    "mesh, groups, optimizer",
    [
        ((4, 2, 1), 2, "adamw"),
        pytest.param((4, 1, 2), 4, "adamw", marks=pytest.mark.slow),
        pytest.param((4, 2, 1), 2, "muon", marks=pytest.mark.slow),
    ],
)
def test_groups_are_trainers_alone_joined_by_nesterov(mesh, groups, optimizer):
    """AdamW or Muon in each group, and the outer step in float64, as the paper's algorithm has it."""
    c = config(mesh, groups, optimizer={"name": optimizer})
    tokens = batches(EVERY * ROUNDS, c.batch.global_batch)
    made, state, figures = trained(c, tokens)

    one = dataclasses.replace(c.of_group(), outer=type(c.outer)())
    alone, step = compiled(one)
    states = [alone.from_params(params(c)) for _ in range(groups)]
    theta = jax.tree.map(lambda x: np.asarray(x, np.float64), params(c))
    momentum, losses = jax.tree.map(np.zeros_like, theta), []
    for number, batch in enumerate(tokens, 1):
        parts = np.split(batch, groups)
        found = [step(state, jax.device_put(part, alone.batch_sharding)) for state, part in zip(states, parts)]
        states = [state for state, _ in found]
        losses.append(np.mean([float(metrics["loss"]) for _, metrics in found]))
        if number % EVERY == 0:
            own = [shared(alone, state) for state in states]
            delta = jax.tree.map(lambda t, *some: t - np.mean(some, axis=0, dtype=np.float64), theta, *own)
            momentum = jax.tree.map(lambda m, d: c.outer.momentum * m + d, momentum, delta)
            update = jax.tree.map(lambda m, d: c.outer.momentum * m + d, momentum, delta)
            theta = jax.tree.map(lambda t, u: t - c.outer.lr * u, theta, update)
            joined = jax.jit(alone.layout.from_canonical)(jax.tree.map(np.float32, theta))
            joined = jax.device_put(joined, alone.state_shardings.params)
            states = [state.replace(params=jax.tree.map(lambda x: x + 0, joined)) for state in states]
    np.testing.assert_allclose([f["loss"] for f in figures], losses, rtol=2e-6)
    assert_close(without_key_biases(shared(made, state)), without_key_biases(theta), 2e-5)
    for leaf, common in zip(jax.tree.leaves(state.outer.params), jax.tree.leaves(state.params), strict=True):
        np.testing.assert_array_equal(leaf, np.broadcast_to(common, leaf.shape))


def without_key_biases(tree):
    """Return parameters without the biases of keys: the loss does not depend on them, and Adam scales noise up."""
    bias = np.array(tree["layers"]["qkv"]["bias"])
    bias[:, 1] = 0
    return {**tree, "layers": {**tree["layers"], "qkv": {**tree["layers"]["qkv"], "bias": bias}}}


def over(program: jax.stages.Compiled, mesh) -> set[str]:
    """Return the mesh axes that the collectives of a program cross."""
    found = [i for i in hlo.instructions(program.as_text()).values() if i.kind]
    return set().union(*(axes(i.groups, mesh) for i in found))


def compiled_exchange(made):
    function = jax.jit(
        made._exchanged, in_shardings=(made.state_shardings,), out_shardings=made.state_shardings, donate_argnums=0
    )
    return function.lower(made.abstract_state()).compile(FAST)


def test_only_the_exchange_crosses_groups():
    made, step = compiled(config())
    assert GROUP not in over(step, made.mesh) and "data" in over(step, made.mesh)
    exchange = compiled_exchange(made)
    assert GROUP in over(exchange, made.mesh) and not {"data", "tensor"} & over(exchange, made.mesh)


@pytest.mark.parametrize("codec", ["identity", "int8"])
def test_differences_go_through_a_codec(codec):
    compress = {"outer_codec": codec, "min_ratio": 0.0}
    c = config(compress=compress | ({"outer_options": {"block": 32}} if codec == "int8" else {}))
    tokens = batches(EVERY * ROUNDS, c.batch.global_batch)
    made, state, _ = trained(c, tokens)
    dense, right, _ = trained(config(), tokens)
    mine, exact = (without_key_biases(tree) for tree in (shared(made, state), shared(dense, right)))
    if codec == "identity":
        assert_close(mine, exact, 1e-6)
    else:
        kernel, other = mine["layers"]["up"]["kernel"], exact["layers"]["up"]["kernel"]
        assert 1e-6 < np.abs(kernel - other).max() / np.abs(other).max() < 0.02
        np.testing.assert_allclose(mine["final_norm"]["scale"], exact["final_norm"]["scale"], rtol=1e-2)
        assert made.exchange.sent() < 0.5 * dense.exchange.sent()
        assert any(np.abs(x).max() > 0 for x in jax.tree.leaves(jax.device_get(state.codec["outer"])))


@pytest.mark.slow
def test_the_virtual_mesh_agrees():
    # Neither int8 nor Adam, which make a difference of the last bit a large one now and then.
    c = config(optimizer=SGD, compress={"outer_codec": "identity", "min_ratio": 0.0})
    tokens = batches(EVERY, c.batch.global_batch)
    made, state, figures = trained(c, tokens)
    emulated = small.trainer(c, mesh=one_device(made.mesh), virtual=True)
    mine = emulated.from_params(params(c))
    for batch, right in zip(tokens, figures):
        mine, metrics = emulated.step(mine, batch)
        np.testing.assert_allclose(on_host(metrics)["loss"], right["loss"], rtol=1e-5)
    assert_close(shared(emulated, emulated.exchanged(mine)), shared(made, state), 2e-6)


def one_device(mesh):
    return jax.sharding.Mesh(mesh.devices[:1, :1, :1, :1], mesh.axis_names, axis_types=mesh.axis_types)


def test_a_group_whose_gradients_are_not_finite_waits_alone():
    def poison(number, state):
        if number != 1:
            return state
        own = jax.device_get(state.outer.params)
        own["final_norm"]["scale"] = own["final_norm"]["scale"].copy()
        own["final_norm"]["scale"][1] = np.nan
        placed = jax.tree.map(jax.device_put, own, made.state_shardings.outer.params)
        return state.replace(outer=state.outer.replace(params=placed))

    made, _ = compiled(config())
    _, state, figures = trained(config(), batches(1, 8), poison)
    assert np.asarray(state.outer.skipped).tolist() == [0, 1] and not figures[0]["finite"]
    count = [np.asarray(x) for x in jax.tree.leaves(state.optimizer) if x.shape == (2,)]
    assert count and all(x.tolist() == [1, 0] for x in count)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"outer": {"every": 7}}, r"outer.every=7 does not divide run.steps=100.*; outer.every=5 or 10 would fit"),
        (
            {"outer": {"every": 10, "groups": 3}},
            r"outer.groups=3 does not divide mesh.data=4; outer.groups=2 or 4 would",
        ),
        ({"outer": {"groups": 2}}, r"outer.groups=2 needs outer.every"),
        ({"outer": {"every": 10, "lr": 0.0}}, r"outer.lr must be positive"),
        ({"outer": {"every": 10, "momentum": 1.0}}, r"outer.momentum must be in \[0, 1\)"),
        ({"outer": {"fragments": 2}}, r"outer.fragments=2 needs outer.every"),
        ({"outer": {"overlap": 2}}, r"outer.overlap=2 needs outer.every"),
        ({"outer": {"every": 10, "fragments": 0}}, r"outer.fragments must be positive"),
        (
            {"outer": {"every": 10, "fragments": 4}},
            r"outer.fragments=4 does not divide outer.every=10; .*=2 or 5 would",
        ),
        ({"outer": {"every": 10, "fragments": 5}}, r"outer.fragments=5 is more than model.layers=2, .*=2 or 1 would"),
        ({"outer": {"every": 10, "overlap": -1}}, r"outer.overlap must not be negative"),
        (
            {"outer": {"every": 10, "overlap": 10}},
            r"overlap=10 is not below the 10 steps .*outer.overlap=9 would fit",
        ),
        ({"outer": {"every": 10, "fragments": 2, "overlap": 5}}, r"not below the 5 steps .* outer.overlap=4 would fit"),
        ({"outer": {"every": 10, "overlap": 1, "mix": 1.5}}, r"outer.mix must be in \[0, 1\], got 1.5"),
        ({"outer": {"every": 10, "mix": 0.25}}, r"outer.mix=0.25 needs outer.overlap"),
        ({"outer": {}, "compress": {"outer": {"codec": "int8"}}}, r"compress.outer.codec=int8 needs groups"),
        ({"compress": {"outer": {"codec": "lowrank"}}}, r"compress.outer.codec=lowrank is not offered"),
        ({"compress": {"outer": {"options": {"block": 3}}}}, r"compress.outer.options.block is an option of a codec"),
        (
            {"compress": {"data": {"stages": "selective"}}},
            r"compress.data.stages=selective is decided by all data ranks together",
        ),
        ({"compress": {"data": {"stages": "all", "rank": 4, "adapt_every": 5}}}, r"compress.data.adapt_every=5 is dec"),
    ],
)
def test_groups_that_make_no_sense_are_one_sentence(changes, words):
    values = to_dict(config())
    with pytest.raises(UserError, match=words):
        from_dict({**values, **{name: values[name] | some for name, some in changes.items() if name != "outer"},
                   "outer": changes.get("outer", values["outer"])})  # fmt: skip


def test_programs_that_know_no_groups_refuse_them():
    c = config()
    with pytest.raises(UserError, match=r"outer.every=2 trains in groups, which this program does not"):
        Trainer(c, make_mesh(c.mesh, devices=jax.devices()[:8]))
