"""The reduction over data: sums in a narrower dtype against float64, and who takes part in which collective."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from paxtrain.config import MeshConfig
from paxtrain.parallel import gradients
from paxtrain.parallel.layout import Layout
from paxtrain.parallel.reduction import DataReduction
from tests import small
from tests.paxtrain.parallel.test_gradients import config, errors, reference

DATA = 4
EPSILON = {"bfloat16": 2.0**-8, "float32": 2.0**-23}


def layout(reduce_dtype: str) -> Layout:
    return Layout(small.config((DATA,), model={"layers": 1}, mesh={"reduce_dtype": reduce_dtype}))


@functools.cache
def means(reduce_dtype: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return arrays of all data ranks, and their means: from shards along dim 0, and whole."""
    values = np.random.default_rng(0).normal(size=(DATA, 64, 32)).astype(np.float32)
    mesh = jax.make_mesh((DATA,), ("data",), devices=jax.devices()[:DATA], axis_types=(jax.sharding.AxisType.Auto,))
    spec = PartitionSpec("data")

    def run(x: jax.Array) -> list[jax.Array]:
        shard, whole = gradients.means(layout(reduce_dtype), [x[0], x[0]], [0, -1], "data")
        return [shard, whole[None]]

    sharded = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec)
    shards, whole = jax.device_get(jax.jit(sharded)(jnp.asarray(values)))
    return values, shards, whole


@pytest.mark.parametrize("reduce_dtype", list(EPSILON))
def test_means_are_those_of_float64_to_the_dtype_on_the_wire(reduce_dtype):
    """Each rank's value is rounded once, and so is each of at most DATA - 1 partial sums."""
    values, shards, whole = means(reduce_dtype)
    exact = values.astype(np.float64).mean(axis=0)
    bound = DATA * EPSILON[reduce_dtype] * np.abs(values.astype(np.float64)).sum(axis=0) / DATA
    for found in (shards, *whole):
        assert found.dtype == np.float32
        assert (np.abs(found - exact) <= bound).all()
    assert all((rank == whole[0]).all() for rank in whole)


def test_a_narrower_dtype_is_used():
    """Negative control: means through bfloat16 are not those to float32's precision."""
    values, shards, whole = means("bfloat16")
    exact = values.astype(np.float64).mean(axis=0)
    for found in (shards, whole[0]):
        assert np.abs(found - exact).max() > 2.0**-12


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_gradients_in_bfloat16_are_within_its_precision_on_all_stages(zero1):
    """The embedding's, which two stages add up in float32, and every layer's, reduced in the last op or behind it."""
    c = config((2, 2, 1), 4, shard=MeshConfig.of_zero1(zero1))
    c = dataclasses.replace(c, mesh=dataclasses.replace(c.mesh, reduce_dtype="bfloat16"))
    found = errors(small.trainer(c), reference(4, 0.0, 4))
    arrays = {name: error for name, error in found.items() if name not in ("loss", "norm")}
    assert found["loss"] < 1e-5
    assert max(arrays.values()) < 2 * EPSILON["bfloat16"]
    assert min(arrays.values()) > 1e-5


@pytest.mark.once
@pytest.mark.parametrize(
    ("zero1", "schedule"), [(True, "eager_1f1b"), pytest.param(False, "zb_h1", marks=pytest.mark.slow)]
)
def test_reducing_behind_the_rows_gives_the_same_gradients(monkeypatch, zero1, schedule):
    monkeypatch.setattr(DataReduction, "closes", lambda self, stages: False)
    c = config((2, 3, 1), 8, layers=3, shard=MeshConfig.of_zero1(zero1), schedule=schedule)
    found = errors(small.trainer(c), reference(8, 0.0, 3))
    assert max(found.values()) <= 1e-5
