"""Weights and sums of gradients in shards over data: gradients against one device, bytes, memory, resuming."""

import collections
import dataclasses
import itertools

import jax
import numpy as np
import pytest

from compress.collectives import own_part
from paxtrain.config import SPLIT_SAVES, Config
from paxtrain.config.axes import REPLICA
from paxtrain.config.options import OptionValues
from paxtrain.model import transformer
from paxtrain.parallel import gradients
from paxtrain.parallel.reduction import DataShards
from paxtrain.pipeline.program import Sums
from paxtrain.schedule.schedules import SPECS, names
from paxtrain.xla import hlo
from tests import small
from tests.compress_settings import compression
from tests.paxtrain.parallel import test_gradients
from tests.paxtrain.parallel.test_gradients import HIDDEN, TOLERANCE, check, errors, reference
from tests.paxtrain.xla import counted
from tests.small import trainer

MIXED = "tests.paxtrain.model.mixed:Mixed"


def config(mesh, global_batch=8, shard="weights", **settings) -> Config:
    return test_gradients.config(mesh, global_batch, shard=shard, **settings)


def name(c: Config) -> str:
    groups = f" in {c.mesh.copies} groups" if c.mesh.shard_group else ""
    return f"{c.mesh.shard}{groups} {test_gradients.name(c)}"


QUICK = [
    config((2, 1, 1), save="residuals"),  # four layers in a loop
    config((4, 1, 1), 16, layers=2, scan_layers="off", dropout=0.2),
    config((2, 2, 1), layers=2, shape="llama untied", schedule="1f1b", save="inputs"),
    config((2, 2, 2), layers=2, schedule="zb_h1", sequence=True, dropout=0.2, separator=5, scan_layers="off"),
    config((2, 2, 1), shard="gradients", save="layer_inputs", shape="llama"),
    config((4, 1, 1), 16, group=2, save="residuals"),
    config((4, 2, 1), 8, group=2, layers=2, schedule="zb_h1", scan_layers="off", shape="llama untied"),
]


def everywhere() -> list[Config]:
    """Return each mesh with each schedule, save mode and model, every other one with scanned layers."""
    meshes, saves = ((2, 1, 1), (4, 1, 1), (2, 2, 1), (2, 2, 2)), ("dots", "layer_inputs", "residuals", "inputs")
    found = []
    for mesh, schedule, save, shape in itertools.product(meshes, names(), saves, test_gradients.SHAPES):
        spec = SPECS[schedule]
        chunks = 2 if spec.interleaves else 1
        if (chunks == 1 or mesh[1] > 1) and (not spec.splits or save in SPLIT_SAVES):
            how = {"virtual_stages": chunks, "scan_layers": "off" if len(found) % 2 else "on"}
            batch = 8 * mesh[0] if schedule == "dualpipe_v" else 4 * mesh[0]
            found.append(config(mesh, batch, schedule=schedule, save=save, shape=shape, **how))
    return found


MORE = [
    config((4, 2, 1), 16, layers=5, schedule="1f1b", pipe_layers="3,2", save="layer_inputs", scan_layers="off"),
    config((2, 3, 1), 8, layers=5, schedule="zb_h1", pipe_layers="1,2,2", save="residuals", shape="llama untied"),
    config((2, 2, 1), 8, idle="skip", dropout=0.2, separator=5),
    config((2, 1, 4), 8, sequence=True, save="inputs", shape="gpt2 untied"),
    config((2, 2, 1), 8, shard="gradients", schedule="zb_v", virtual_stages=2, shape="llama untied"),
    config((4, 1, 2), 16, shard="gradients", scan_layers="off", shape="gpt2 untied"),
    config((2, 2, 2), 8, shard="gradients", schedule="1f1b", save="inputs", sequence=True),
    # Groups of data ranks, the fourth size is context's.
    config((8, 1, 1), 16, group=4, scan_layers="off", dropout=0.2),
    config((8, 1, 1), 16, group=2, shape="gpt2 untied"),
    config((4, 2, 1), 16, group=2, schedule="1f1b", save="inputs", separator=5),
    config((4, 2, 1), 16, group=2, schedule="zb_v", virtual_stages=2, shape="llama untied", scan_layers="off"),
    config((4, 2, 1), 16, group=2, schedule="interleaved_1f1b", virtual_stages=2, shape="llama"),
    config((4, 1, 2), 16, group=2, sequence=True, dropout=0.2, scan_layers="off"),
    config((2, 2, 2), 8, group=1, schedule="1f1b"),
    config((4, 1, 1, 2), 16, group=2, separator=5),
    config((2, 1, 2, 2), 8, group=1, sequence=True, shape="llama untied", scan_layers="off"),
    config((4, 2, 1), 16, group=2, shard="gradients", schedule="1f1b", scan_layers="off"),
    config((4, 2, 1), 16, group=2, shard="gradients", schedule="zb_v", virtual_stages=2, shape="llama untied"),
    config((4, 1, 1, 2), 16, group=2, shard="gradients", shape="llama"),
]
SLOW = [c for c in [*MORE, *test_gradients.missing_threes(everywhere(), [*MORE, *QUICK])] if c not in QUICK]
CASES = [*QUICK, *(pytest.param(c, marks=pytest.mark.slow) for c in SLOW)]


@pytest.mark.parametrize("c", CASES, ids=name)
def test_gradients_equal_one_device(c):
    check(c)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b", "zb_h1", "gpipe"])
def test_gradients_equal_one_device_in_the_rows_of_gpus(schedule):
    check(config((2, 2, 1), 8, schedule=schedule, scan_layers="off"), overlap=True)


@pytest.mark.parametrize("shard", ["weights", pytest.param("gradients", marks=pytest.mark.slow)])
def test_gradients_of_two_kinds_of_layers_equal_one_device(shard):
    """Scalars of layers are of a micro-batch, so the reference takes one at a time."""
    model = {"layers": 4, "module": MIXED, "intermediate": 48, "vocab_multiple": 64}
    c = small.config((2, 2, 1), (4, 1), model=model, mesh={"shard": shard}, pipeline={"schedule": "1f1b"})
    params, tokens = small.canonical(c.model), small.tokens(c)

    def objective(params: transformer.Params) -> jax.Array:
        each = [transformer.loss_and_scalars(params, tokens[i : i + 1], c.model) for i in range(4)]
        return sum(transformer.objective(*one, c.model) for one in each) / 4

    right = jax.jit(jax.grad(objective))(params)
    _, _, found = small.gradients(trainer(c), params, tokens)
    wrong = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, right)
    assert max(jax.tree.leaves(wrong)) <= TOLERANCE, wrong


@pytest.mark.parametrize(
    "c",
    [
        pytest.param(config((4, 1, 1), 8, layers=2, group=2), marks=pytest.mark.once),
        pytest.param(config((2, 2, 2), 8, layers=2, schedule="1f1b"), marks=pytest.mark.slow),
        pytest.param(config((4, 2, 1, 2), 8, layers=2, schedule="1f1b", group=2), marks=pytest.mark.slow),
    ],
    ids=name,
)
def test_the_virtual_mesh_has_the_same_gradients(c):
    ref = reference(8, 0.0, 2)
    _, _, found = small.gradients(small.emulated(c), ref.params, np.asarray(ref.tokens))
    wrong = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, ref.grads)
    assert max(jax.tree.leaves(wrong)) <= TOLERANCE, wrong


@pytest.mark.once
def test_a_missing_scatter_shows(monkeypatch):
    """Negative control: each data rank adds up its own shard of its own gradient."""

    def own(self, made, errors):
        arrays, which, dims, structure = self._parted(made)
        for i, dim in zip(which, dims, strict=True):
            arrays[i] = jax.lax.slice_in_dim(arrays[i], 0, arrays[i].shape[dim] // 2, axis=dim)
        return Sums(jax.tree.unflatten(structure, arrays), errors)

    monkeypatch.setattr(DataShards, "scatter", own)
    found = errors(trainer(config((2, 1, 1), layers=2)), reference(8, 0.0, 2))
    wrong = {name for name, error in found.items() if error > 0.01}
    assert (
        found["loss"] <= TOLERANCE and {f"['layers']['{kernel}']['kernel']" for kernel in ("qkv", "out", "up")} < wrong
    )


@pytest.mark.once
def test_a_missing_sum_between_groups_shows(monkeypatch):
    """Negative control: each group keeps the sum of its own gradients."""
    mean = gradients.means

    def own(layout, tree, dims, axes):
        if axes != REPLICA:
            return mean(layout, tree, dims, axes)
        return jax.tree.map(lambda x, dim: own_part(x, axes, dim), tree, dims)

    monkeypatch.setattr(gradients, "means", own)
    found = errors(trainer(config((4, 1, 1), 8, layers=2, group=2)), reference(8, 0.0, 2))
    wrong = {name for name, error in found.items() if error > 0.01}
    assert found["loss"] <= TOLERANCE
    assert {f"['layers']['{kernel}']['kernel']" for kernel in ("qkv", "out", "up")} < wrong


@pytest.mark.once
def test_muon_changes_the_weights_as_without_groups():
    """Its matrices are dealt out over both axes of data."""
    ref, found = reference(8, 0.0, 2), []
    for group in (0, 2):
        c = config((4, 1, 1), 8, layers=2, group=group)
        made = trainer(dataclasses.replace(c, optimizer=dataclasses.replace(c.optimizer, name="muon", warmup_steps=0)))
        tokens = jax.device_put(np.asarray(ref.tokens), made.batch_sharding)
        state, _ = made.step(made.from_params(ref.params), tokens)
        found.append(jax.device_get(made.canonical(state)["params"]))
    changes = [jax.tree.map(lambda x, start: x - np.asarray(start), one, ref.params) for one in found]
    for one, other in zip(*map(jax.tree.leaves, changes), strict=True):
        assert np.abs(one).max() > 0
        np.testing.assert_allclose(other, one, atol=1e-3 * np.abs(one).max(), rtol=0)


# --- Bytes and memory -------------------------------------------------------------------------------------------------


def collectives(c: Config) -> dict[str, int]:
    """Return the bytes of a device's collectives in a step by their kind."""
    return counted.collective_bytes(trainer(c).compile_step().as_text())


@pytest.mark.once
def test_weights_are_gathered_in_f_and_in_b_of_each_micro_batch():
    """Operands of a device: with ZeRO-1 its shard of the weights once, then the shards of kernels and tables anew."""
    layers, m = 2, 2
    c = config((2, 1, 1), 2 * 2 * m, layers=layers, scan_layers="off")
    kernels = 4 * layers * 12 * HIDDEN**2  # qkv, out, up and down, float32
    table = 4 * 64 * HIDDEN
    before = collectives(dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, shard="optimizer")))
    after = collectives(c)
    # F and B of a layer; lookup and head share the tied table of a micro-batch.
    assert after["all-gather"] - before["all-gather"] == (2 * m - 1) * kernels // 2 + (m - 1) * table // 2
    assert after["all-to-all"] - before["all-to-all"] == (m - 1) * kernels + (2 * m - 1) * table


@pytest.mark.once
def test_layers_travel_inside_groups_and_once_a_step_between_them():
    """Operands of a device; the fourth of the groups' shards is a device's own, and norms travel over all ranks."""
    layers, m = 2, 2
    c = config((4, 1, 1), 4 * 2 * m, layers=layers, scan_layers="off", group=2)
    kernels, table = 4 * layers * 12 * HIDDEN**2, 4 * 64 * HIDDEN
    found = collections.Counter[tuple[str, tuple[tuple[int, ...], ...]]]()
    for op in hlo.collectives(trainer(c).compile_step().as_text()):
        found[op.kind, op.groups] += op.bytes * op.executions
    inside, between = ((0, 1), (2, 3)), ((0, 2), (1, 3))
    assert found["all-gather", inside] == (2 * m * kernels + m * table) // 2
    assert found["all-to-all", inside] == m * kernels + 2 * m * table
    assert found["all-gather", between] == (kernels + table) // 4
    assert found["all-to-all", between] == (kernels + table) // 2
    rest = {sent for (kind, groups), sent in found.items() if groups not in (inside, between)}
    assert max(rest) < min(found["all-gather", between], table)


def temporary(shard: str, layers: int = 8, **settings) -> int:
    """Return the temporary bytes of a step with four data ranks by XLA's analysis."""
    c = config((4, 1, 1), 32, shard=shard, layers=layers, scan_layers="off", save="layer_inputs", **settings)
    model = dataclasses.replace(c.model, hidden=128, heads=4, sequence=8)
    return trainer(dataclasses.replace(c, model=model)).compile_step().memory_analysis().temp_size_in_bytes


@pytest.mark.once
def test_sums_and_weights_in_shards_take_less_memory():
    """Eight layers of 12 H^2 float32 weights: a device keeps a quarter, and at most three layers are whole at once."""
    layer = 4 * 12 * 128**2
    once, sums, weights = (temporary(shard) for shard in ("optimizer", "gradients", "weights"))
    assert once - sums > (6 - 3) * layer  # three quarters of eight layers, less whole gradients of some
    assert sums - weights > (6 - 3) * layer


# --- Codecs -----------------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize(
    ("mesh", "group"),
    [((2, 1, 1), 0), ((4, 1, 1), 2), pytest.param((2, 2, 1), 0, marks=pytest.mark.slow)],
)
def test_kernels_are_gathered_through_a_codec(mesh, group):
    """What each layer gathers is what ZeRO-1 gathers once: the gradients are those of the same rounded kernels."""
    coded = {"compress": compression(weights_codec="int8", weights_options=OptionValues({"block": 32}))}
    grads = []
    for shard in ("optimizer", "weights"):
        c = config(mesh, layers=2, shard=shard, group=group if shard == "weights" else 0)
        c = dataclasses.replace(c, **coded)
        ref = reference(8, 0.0, 2)
        grads.append(small.gradients(trainer(c), ref.params, np.asarray(ref.tokens)))
        exact = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), grads[-1][2], ref.grads)
        assert max(jax.tree.leaves(exact)) > 100 * TOLERANCE  # the codec has rounded
    wrong = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), grads[1], grads[0])
    assert max(jax.tree.leaves(wrong)) <= TOLERANCE, wrong


# --- Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.once
@pytest.mark.parametrize(
    ("first", "then"),
    [
        (("weights", (4, 1, 1), 0), ("optimizer", (2, 2, 1), 0)),
        (("none", (2, 1, 1), 0), ("weights", (2, 2, 1), 0)),
        (("weights", (4, 1, 1), 2), ("weights", (2, 2, 1), 0)),
        (("weights", (2, 1, 1), 0), ("gradients", (4, 2, 1), 2)),
    ],
    ids=str,
)
def test_a_checkpoint_of_any_shards_and_mesh_is_the_same_state_on_another(first, then):
    """The canonical state, which a checkpoint holds, after a step: bit for bit there and back."""
    made = (config(mesh, 8, layers=4, shard=shard, group=group) for shard, mesh, group in (first, then))
    one, other = map(trainer, made)
    ref = reference(8, 0.0, 4)
    state, _ = one.step(one.from_params(ref.params), jax.device_put(np.asarray(ref.tokens), one.batch_sharding))
    canonical = one.canonical(state)
    kept = {name: jax.device_get(value) for name, value in canonical.items() if name != "codec"}
    moved = jax.device_put(kept, {name: other.canonical_shardings[name] for name in kept})
    back = other.canonical(other.from_canonical(moved))
    for mine, right in zip(*(jax.tree.leaves({k: x[k] for k in kept}) for x in (back, kept)), strict=True):
        np.testing.assert_array_equal(mine, right)
    assert np.any(np.asarray(jax.tree.leaves(canonical["optimizer"])[1]))
