"""The virtual mesh on one device against jax.shard_map on eight: every collective, then the gradients of a step."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from paxtrain.config import MeshConfig
from paxtrain.config.axes import AXES
from paxtrain.model import tensor_parallel as tp
from paxtrain.pipeline import collectives, virtual
from paxtrain.pipeline.rings import only_if
from tests import small

PIPE = {"data": 2, "pipe": 4, "context": 1, "tensor": 1}
CUBE = {"data": 2, "pipe": 2, "context": 1, "tensor": 2}


def mesh(sizes: dict[str, int]) -> Mesh:
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def integers(*shape: int, seed: int = 0) -> jax.Array:
    """Return small integers as float32. Their sums are exact in any order, so results must be equal bit for bit."""
    return jax.random.randint(jax.random.key(seed), shape, -8, 8).astype(jnp.float32)


def check_same(f, sizes, in_specs, out_specs, *args):
    real = jax.shard_map(f, mesh=mesh(sizes), in_specs=in_specs, out_specs=out_specs, check_vma=False)
    emulated = virtual.shard_map(f, sizes, in_specs, out_specs)
    expected, found = jax.jit(real)(*args), jax.jit(emulated)(*args)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        assert value.size and np.asarray(value).any(), path  # something to compare
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    return found


@pytest.mark.parametrize("sizes", [CUBE, PIPE], ids=str)
def test_arrays_are_split_and_joined_as_specs_say(sizes):
    specs = {
        "whole": P(),
        "rows": P("data"),
        "all": P("pipe", "tensor", "data"),
        "major tensor": P("pipe", None, ("tensor", "data")),
        "major data": P(None, ("data", "tensor"), "pipe"),
        "three on one": P(None, None, ("tensor", "pipe", "data")),
    }
    where = {"data": 1, "pipe": 10, "tensor": 100}

    def mark(trees, none):
        assert none is None
        device = sum(lax.axis_index(axis) * n for axis, n in where.items())
        shards = {key: tree["x"] for key, tree in trees.items()}
        assert shards["three on one"].shape == (8, 8, 1)
        # The value differs between devices although the spec says that it does not; the first device's is taken.
        return {key: {"x": x * 1000 + device} for key, x in shards.items()}, jnp.float32(7)

    arrays = {key: {"x": integers(8, 8, 8, seed=i)} for i, key in enumerate(specs)}
    found, seven = check_same(mark, sizes, (specs, P()), (specs, P()), arrays, None)
    assert seven == 7
    first = arrays["major tensor"]["x"] * 1000
    np.testing.assert_array_equal(found["whole"]["x"], arrays["whole"]["x"] * 1000)
    np.testing.assert_array_equal(found["major tensor"]["x"][0, :, 0], first[0, :, 0])


def test_one_spec_may_stand_for_a_whole_tree():
    def f(tree, x):
        return {"sum": lax.psum(tree["a"], "data") + tree["b"], "x": x}, x

    args = {"a": integers(4, 2), "b": integers(4, 2, seed=1)}, integers(8, seed=2)
    check_same(f, CUBE, P("pipe"), P("pipe"), *args)
    check_same(f, CUBE, (P("data"), P()), (P("data"), P()), *args)


@pytest.mark.parametrize("sizes", [CUBE, PIPE], ids=str)
def test_collectives(sizes):
    def f(x, constant):
        out = {}
        for axis in AXES:
            i = lax.axis_index(axis)
            out[axis] = {
                "psum": lax.psum(x, axis),
                "pmean": lax.pmean(x, axis),
                "pmax": lax.pmax(x, axis),
                "gather": lax.all_gather(x, axis, axis=1, tiled=True),
                "scatter": lax.psum_scatter(x, axis, scatter_dimension=1, tiled=True),
                "scatter after gather": lax.psum_scatter(
                    lax.all_gather(x, axis, axis=0, tiled=True) * (i + 1), axis, scatter_dimension=0, tiled=True
                ),
                # A value that is the same on every device has no dim under vmap.
                "constants": [
                    lax.psum(constant, axis),
                    lax.all_gather(constant, axis, tiled=True)[:2],
                    lax.psum_scatter(jnp.tile(constant, 4), axis, tiled=True)[:2],
                ],
                "index": (i + 1) * x,
            }
        out["all"] = lax.psum(x, tuple(AXES))
        out["gathered"] = tuple(collectives.gather(part, tuple(AXES)) for part in (x, constant))
        return jax.tree.map(lambda v: v[(None,) * len(AXES)], out)

    everywhere = P(*AXES)
    x = integers(8 * 4, 8)
    check_same(f, sizes, (P(tuple(AXES)), P()), everywhere, x, jnp.arange(1.0, 3))


PAIRS = [
    ((1, 0),),
    ((0, 3), (3, 0)),
    ((1, 0), (2, 1), (3, 2)),
    ((0, 1), (3, 2)),
    ((0, 1), (1, 2), (2, 3), (3, 0)),
    ((2, 2), (0, 1)),
]


def test_permute_with_idle_positions():
    def f(x):
        tree = {"float": x, "int8": (x + 2).astype(jnp.int8), "same": jnp.ones(2)}
        return [collectives.permute(tree, "pipe", pairs) for pairs in PAIRS]

    x = integers(2 * 4, 3)
    found = check_same(f, PIPE, P(("data", "pipe")), P(("data", "pipe")), x)
    for pairs, tree in zip(PAIRS, found):
        expected = np.zeros((2, 4, 3), np.float32)
        for sender, receiver in pairs:
            expected[:, receiver] = np.asarray(x).reshape(2, 4, 3)[:, sender]
        np.testing.assert_array_equal(tree["float"], expected.reshape(8, 3))


def test_permute_on_a_real_mesh_is_the_plain_one():
    def text(permute):
        def f(x):
            return lax.scan(lambda c, _: (permute(c, "pipe", ((1, 0), (3, 2))), None), x, None, length=3)[0]

        run = jax.shard_map(f, mesh=mesh(PIPE), in_specs=P("pipe"), out_specs=P("pipe"), check_vma=False)
        return jax.jit(run).lower(integers(8)).as_text()

    assert text(collectives.permute) == text(lax.ppermute)
    assert re.search(
        r"source_target_pairs = dense<[^>]*> : tensor<4x2xi64>", text(collectives.permute)
    )  # 2 pairs x data


@pytest.mark.parametrize("sizes", [CUBE, PIPE], ids=str)
def test_control_flow_and_gradients(sizes):
    """One function has all parts of the executor: idle stages, rings that start uninitialised, hand-written vjps."""
    stages = sizes["pipe"]
    down = tuple((s + 1, s) for s in range(stages - 1))

    def loss(w, x):
        return (tp.reduce(tp.copy(x, "tensor") @ w, "tensor") ** 2).sum()

    def f(w, x):
        stage = lax.axis_index("pipe")

        def row(carry, t):
            ring, grads, g = carry
            delta, out = jax.grad(loss, argnums=(0, 1))(w, x + g % 5)
            # Some stages idle in a row, and the code that they skip has collectives.
            busy = (stage + t) % stages != 0
            grads = only_if(busy, lambda total: total + lax.psum(delta, "data"), grads)
            ring = lax.dynamic_update_slice(ring, out[None], ((stage + t) % 3, 0, 0))
            out, ring = lax.optimization_barrier((out, ring))
            g = collectives.permute(out, "pipe", down) % 7
            return (ring, grads, g), lax.dynamic_slice(ring, ((stage + t) % 3, 0, 0), (1, *out.shape))

        start = (lax.empty((3, *x.shape), x.dtype), jnp.zeros_like(w), jnp.zeros_like(x))
        (_, grads, g), outs = lax.scan(row, start, jnp.arange(3))
        kinds = [lambda v: lax.pmean(v, "data"), lambda v: 2 * lax.psum(v, "data"), lambda v: v]
        chosen = lax.switch(stage % 3, kinds, x)
        return grads, [y[None, None, None] for y in (g, outs, chosen)]

    w, x = integers(4 * stages, 4 * sizes["tensor"]), integers(2 * 4, 4 * stages, seed=1)
    specs = P("pipe", "tensor"), P("data", "pipe")
    check_same(f, sizes, specs, (P("pipe", "tensor"), P("data", "pipe", "tensor")), w, x)


# --- A whole step -----------------------------------------------------------------------------------------------------

# Both meshes with each schedule; each of them with and without ZeRO-1, which concerns neither rows nor messages.
CASES = [
    ((2, 2, 2), "eager_1f1b", True),
    ((2, 2, 2), "zb_h1", False),
    ((2, 4, 1), "eager_1f1b", False),
    ((2, 4, 1), "1f1b", True),
    ((2, 4, 1), "zb_h1", True),
]
STEPS = [pytest.param(*c, False, marks=pytest.mark.slow) for c in CASES]
STEPS += [pytest.param((2, 2, 2), "zb_v", True, False, marks=pytest.mark.slow)]
STEPS += [((2, 2, 2), "1f1b", False, True), pytest.param((2, 3, 1), "eager_1f1b", True, False, marks=pytest.mark.slow)]


def configuration(sizes, schedule, zero1, sequence):
    chunks = 2 if schedule == "zb_v" else 1
    return small.config(
        sizes,
        (4, 1),
        model={"layers": sizes[1] * chunks, "hidden": 16, "sequence": 8, "vocab_multiple": 64},
        mesh={"shard": MeshConfig.of_zero1(zero1), "sequence_parallel": sequence},
        pipeline={"schedule": schedule, "virtual_stages": chunks},
    )


@pytest.mark.once
@pytest.mark.parametrize("sizes, schedule, zero1, sequence", STEPS)
def test_a_step_is_that_of_the_real_mesh(sizes, schedule, zero1, sequence):
    c = configuration(sizes, schedule, zero1, sequence)
    params, tokens = small.canonical(c.model), small.tokens(c)
    expected = small.gradients(small.trainer(c), params, tokens)
    found = small.gradients(small.emulated(c), params, tokens)
    for path, value in jax.tree_util.tree_leaves_with_path(expected):
        assert np.abs(value).max() > 1e-3, path
    wrong = jax.tree.map(lambda a, b: np.abs(a - b).max() / np.abs(b).max(), found, expected)
    assert max(jax.tree.leaves(wrong)) < 1e-5, wrong
