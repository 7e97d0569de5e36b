"""Weights and sums of gradients in shards over data: gradients against one device, bytes, memory, resuming."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from paxtrain.config import SPLIT_SAVES, Config
from paxtrain.model import transformer
from paxtrain.parallel.reduction import DataShards
from paxtrain.parallel.step import Trainer
from paxtrain.schedule.schedules import SPECS, names
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.parallel import test_gradients
from tests.paxtrain.parallel.test_gradients import HIDDEN, SEQUENCE, TOLERANCE, check, errors, reference
from tests.small import trainer

MIXED = "tests.paxtrain.model.mixed:Mixed"


def config(mesh, global_batch=8, shard="weights", **settings) -> Config:
    return test_gradients.config(mesh, global_batch, shard=shard, **settings)


def name(c: Config) -> str:
    return f"{c.mesh.shard} {test_gradients.name(c)}"


QUICK = [
    config((4, 1, 1), 16, layers=2, scan_layers="off", dropout=0.2),
    config((2, 2, 1), layers=2, shape="llama untied", schedule="1f1b", save="inputs"),
    config((2, 2, 2), layers=2, schedule="zb_h1", sequence=True, dropout=0.2, separator=5, scan_layers="off"),
    config((2, 2, 1), shard="gradients", save="layer_inputs", shape="llama"),
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


@pytest.mark.slow
def test_the_virtual_mesh_has_the_same_gradients():
    c = config((2, 2, 2), 8, layers=2, schedule="1f1b")
    ref = reference(8, 0.0, 2)
    _, _, found = small.gradients(small.emulated(c), ref.params, np.asarray(ref.tokens))
    wrong = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, ref.grads)
    assert max(jax.tree.leaves(wrong)) <= TOLERANCE, wrong


@pytest.mark.once
def test_a_missing_scatter_shows(monkeypatch):
    """Negative control: each data rank adds up its own shard of its own gradient."""

    def own(self, made):
        arrays, which, dims, structure = self._parted(made)
        for i, dim in zip(which, dims, strict=True):
            arrays[i] = jax.lax.slice_in_dim(arrays[i], 0, arrays[i].shape[dim] // 2, axis=dim)
        return jax.tree.unflatten(structure, arrays)

    monkeypatch.setattr(DataShards, "scatter", own)
    found = errors(trainer(config((2, 1, 1), layers=2)), reference(8, 0.0, 2))
    wrong = {name for name, error in found.items() if error > 0.01}
    assert (
        found["loss"] <= TOLERANCE and {f"['layers']['{kernel}']['kernel']" for kernel in ("qkv", "out", "up")} < wrong
    )
