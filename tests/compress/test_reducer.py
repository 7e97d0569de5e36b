"""Reductions by any codec over data ranks, against exact means."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress import collectives
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.topk import TopK
from compress.reducer import Shard, each, mean, stored
from tests.compress.ranks import mapped

SHAPES = ((8, 12), (16, 4, 6))
pytestmark = pytest.mark.once


def gradients(ranks):
    rng = np.random.default_rng(ranks)
    return [rng.normal(size=(ranks, *shape)).astype(np.float32) for shape in SHAPES]


def reduced(codec, ranks, dims):
    """Return what each rank has of the means, [ranks, *part] for each array."""
    shards = [Shard("data", ranks, dim) for dim in dims]

    def step(*arrays):
        reducer = compress.Scattered(codec)
        states = [reducer.init(x.shape, shard) for x, shard in zip(arrays, shards)]
        return mean(reducer, states, list(arrays), shards)[0]

    return [np.asarray(x) for x in mapped(step, ranks)(*gradients(ranks))]


def parts(x, dim, ranks):
    return np.broadcast_to(x, (ranks, *x.shape)) if dim < 0 else np.stack(np.split(x, ranks, axis=dim))


@pytest.mark.parametrize("dims", [(0, 2), (1, 0), (-1, 1), (-1, -1)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_identity_gives_the_exact_mean(ranks, dims):
    for found, given, dim in zip(reduced(compress.Identity(), ranks, dims), gradients(ranks), dims):
        exact = given.astype(np.float64).mean(0)
        np.testing.assert_allclose(found, parts(exact, dim, ranks), rtol=1e-6, atol=1e-7)


def test_identity_gives_the_bits_of_the_reduce_scatter():
    dims = (0, 2)
    found = reduced(compress.Identity(), 2, dims)

    def dense(*arrays):
        return [collectives.reduce_scatter(x, "data", dim) / 2 for x, dim in zip(arrays, dims)]

    for mine, right in zip(found, mapped(dense, 2)(*gradients(2))):
        np.testing.assert_array_equal(mine, right)


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_blocks_are_off_by_half_a_code_of_each_message(dim):
    """Each rank's message is off by half a code; without shards the mean's own message is off by another half."""
    ranks, block = 4, 24
    found, _ = reduced(QuantisedBlocks(8, block), ranks, (dim, 0))
    given = gradients(ranks)[0].astype(np.float64)
    exact = parts(given.mean(0), dim, ranks)
    bound = (1 if dim >= 0 else 2) * 0.51 * np.abs(given).max() / 127
    assert np.abs(found - exact).max() <= bound
    assert np.abs(found - exact).max() > 0


def test_an_array_that_cannot_be_cut_is_left_alone():
    reducer = compress.Scattered(TopK(0.1))
    assert reducer.takes((7, 12), Shard("data", 4, -1), 2)
    assert not reducer.takes((7, 9), Shard("data", 4, -1), 2)
    assert not compress.Scattered(QuantisedBlocks(8)).takes((8, 64), Shard("data", 4, 0), 4)  # 3.9 times smaller
    assert compress.Scattered(QuantisedBlocks(8)).takes((8, 64), Shard("data", 4, 0), 3.8)


def test_states_are_stored_as_lists_and_come_back():
    reducer = compress.PowerSGD(2)
    states = [reducer.init((n, 6), Shard("data", 2, 0)) for n in (4, 5)]
    together = stored(states)
    assert isinstance(together.error, list)
    assert [e.shape for e in together.error] == [(4, 6), (5, 6)]
    again = each(together, jax.tree.structure(states[0]), 2)
    for old, new in zip(states, again, strict=True):
        assert jax.tree.structure(old) == jax.tree.structure(new)
        np.testing.assert_array_equal(old.q, new.q)
    nothing = [compress.Scattered(compress.Identity()).init((4, 6), Shard("data", 2, 0))] * 2
    assert jax.tree.leaves(stored(nothing)) == []
    assert each(stored(nothing), jax.tree.structure(nothing[0]), 2) == nothing


def test_release_brings_all_that_was_left_out():
    reducer, shard = compress.Scattered(TopK(0.25)), Shard(None, 1, 0)
    x = jnp.asarray(gradients(1)[0][0])
    means, [state], _ = mean(reducer, [reducer.init(x.shape, shard)], [x], [shard])
    whole, state = reducer.release(state, jnp.zeros_like(x), shard)
    np.testing.assert_allclose(whole + means[0], x, rtol=1e-6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state))
