"""Reductions that are dense inside groups of ranks: exact means, the algorithm in float64, and what is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import compress
from compress import collectives
from compress.codecs.quantised import QuantisedBlocks
from compress.codecs.sign import Signs
from compress.codecs.topk import TopK
from compress.collectives import SubAxis
from compress.reducer import Shard, mean
from compress.testing import check
from tests.compress.ranks import mapped

pytestmark = pytest.mark.once
RANKS, SHAPES = 4, ((8, 12), (16, 4, 8))
INT8 = QuantisedBlocks(8, 16)


def gradients(steps=1):
    """Return the arrays of each step, each [RANKS, *shape]; half of a gradient is the same on all ranks."""
    rng = np.random.default_rng(0)
    return [
        [(rng.normal(size=s) + rng.normal(size=(RANKS, *s))).astype(np.float32) for s in SHAPES] for _ in range(steps)
    ]


def run(reducer, dims, steps, emulated=False):
    """Return each step's means [RANKS, *part], and the ranks' last residuals [RANKS, *shape], of both arrays."""
    shards = [Shard("data", RANKS, dim) for dim in dims]

    def every(*arrays):
        states = [reducer.init(shape, shard) for shape, shard in zip(SHAPES, shards, strict=True)]

        def step(states, given):
            found, states, _ = mean(reducer, states, given, shards)
            return states, found

        states, found = jax.lax.scan(step, states, list(arrays))
        return found, [reducer.residual(state, x[0], shard) for state, x, shard in zip(states, arrays, shards)]

    function = jax.jit(jax.vmap(every, axis_name="data")) if emulated else mapped(every, RANKS)
    means, residuals = function(*(np.stack(some, axis=1) for some in zip(*steps, strict=True)))
    means = [[np.asarray(x)[:, i] for x in means] for i in range(len(steps))]
    return means, [np.asarray(x) for x in residuals]


def parts(x, dim):
    return np.broadcast_to(x, (RANKS, *x.shape)) if dim < 0 else np.stack(np.split(x, RANKS, axis=dim))


@pytest.mark.parametrize("inside", [pytest.param(1, marks=pytest.mark.slow), 2, 4])
@pytest.mark.parametrize("dims", [(0, 2), pytest.param((1, 0), marks=pytest.mark.slow), (-1, 1), (-1, -1)])
def test_identity_gives_the_exact_mean_for_every_size_of_groups(dims, inside):
    reducer = compress.Hierarchical(compress.Scattered(compress.Identity()), inside)
    for emulated in (False, True):
        [means], residuals = run(reducer, dims, gradients(), emulated)
        for found, given, dim in zip(means, gradients()[0], dims, strict=True):
            exact = given.astype(np.float64).mean(0)
            np.testing.assert_allclose(found, parts(exact, dim), rtol=1e-6, atol=1e-6)
        assert not any(np.any(x) for x in residuals)


def in_blocks_of_int8(x, block=16):
    """Return float64 numbers in codes of 8 bits with a bfloat16 scale for each block, decoded."""
    rows = np.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)
    scale = (np.abs(rows).max(1, keepdims=True) / 127).astype(jnp.bfloat16).astype(np.float64)
    decoded = np.clip(np.round(rows / scale), -127, 127) * scale
    return decoded.reshape(-1)[: x.size].reshape(x.shape)


class Reference:
    """int8 with error feedback between two groups of two ranks, in float64, for one array and a shard's dim."""

    def __init__(self, shape, dim):
        self.dim = dim
        self.errors = np.zeros((RANKS, 2, *self.blocks(np.zeros(shape))[0].shape))  # of each rank's two messages
        self.owned = np.zeros((RANKS, *self.errors.shape[2:]))  # of the rank's part of the mean, if all need it

    def blocks(self, x):
        """Return an array as the blocks that ranks keep; without ZeRO-1 they are cut along the rows."""
        if self.dim >= 0:
            return np.split(x, RANKS, axis=self.dim)
        return [quarter for half in np.split(x, 2, axis=0) for quarter in np.split(half, 2, axis=0)]

    def sent(self, rank, to):
        """Return which block a rank sends to the group `to`: of those that its place in its group is given."""
        place = rank % 2
        return 2 * to + place if self.dim >= 0 else 2 * place + to

    def step(self, gradient):
        """Return the mean's blocks that ranks decode, of gradients float64 [RANKS, *shape]."""
        groups = [gradient[0:2].mean(0), gradient[2:4].mean(0)]
        arrived = {}
        for rank in range(RANKS):
            for to in range(2):
                asked = self.blocks(groups[rank // 2])[self.sent(rank, to)] + self.errors[rank, to]
                arrived[rank, to] = in_blocks_of_int8(asked)
                self.errors[rank, to] = asked - arrived[rank, to]
        means = {}
        for rank in range(RANKS):
            group, place = divmod(rank, 2)
            own = (arrived[place, group] + arrived[2 + place, group]) / 2
            if self.dim < 0:
                own = own + self.owned[rank]
                decoded = in_blocks_of_int8(own)
                self.owned[rank] = own - decoded
                own = decoded
            means[self.sent(rank, group)] = own
        return [means[i] for i in range(RANKS)]


@pytest.mark.parametrize("dims", [(0, 2), (1, 0), (-1, -1)])
def test_int8_between_groups_is_the_same_algorithm_in_float64(dims):
    """Errors are fed back over five steps. A mean without them, or of codes made on each rank, is far away."""
    steps = gradients(5)
    reducer = compress.Hierarchical(compress.Scattered(INT8), 2)
    means, _ = run(reducer, dims, steps)
    flat, _ = run(compress.Scattered(INT8), dims, steps)
    bare, _ = run(compress.Hierarchical(compress.Scattered(QuantisedBlocks(8, 16, feedback=False)), 2), dims, steps)
    for n, dim in enumerate(dims):
        reference = Reference(SHAPES[n], dim)
        for i, some in enumerate(steps):
            blocks = reference.step(some[n].astype(np.float64))
            if dim >= 0:
                np.testing.assert_allclose(means[i][n], np.stack(blocks), atol=2e-6)
            else:
                for found in means[i][n]:
                    np.testing.assert_allclose(found, np.concatenate(blocks), atol=2e-6)
        expected = np.stack(blocks) if dim >= 0 else np.concatenate(blocks)
        for other in (flat, bare):
            assert np.abs(other[-1][n] - expected).max() > 1e-3


def test_released_gradients_bring_all_that_was_left_out():
    reducer, shard = compress.Hierarchical(compress.Scattered(TopK(0.25)), 2), Shard("data", RANKS, 0)

    def step(x):
        means, [state], _ = mean(reducer, [reducer.init(x.shape, shard)], [x], [shard])
        whole, after = reducer.release(state, jnp.zeros_like(x), shard)
        return means[0], whole, after

    [[x, _]] = gradients()
    means, whole, after = jax.tree.map(np.asarray, mapped(step, RANKS)(x))
    np.testing.assert_allclose(whole.mean(0) + np.concatenate(means), x.mean(0), rtol=1e-5, atol=1e-6)
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(after))


def test_sums_inside_groups_are_of_the_dtype_that_is_asked_for():
    narrow, wide = (
        compress.Hierarchical(compress.Scattered(compress.Identity()), 2, dtype) for dtype in ("bfloat16", "float32")
    )
    shard = Shard("data", RANKS, 0)
    assert narrow.inside_traffic((8, 12), shard) == (("reduce-scatter", 0.5 * 96 * 2),)
    assert wide.inside_traffic((8, 12), shard) == (("reduce-scatter", 0.5 * 96 * 4),)
    exact = parts(gradients()[0][0].astype(np.float64).mean(0), 0)
    for reducer, least, most in ((narrow, 1e-4, 0.03), (wide, 0, 1e-6)):
        [[found, _]], _ = run(reducer, (0, 0), gradients())
        assert least <= np.abs(found - exact).max() <= most


def test_slow_links_carry_a_share_of_the_bytes():
    """Of three messages to other ranks one goes to the other group. Without ZeRO-1 it is gathered there as well."""
    codec = QuantisedBlocks(4)
    message = compress.wire_bytes(codec, (16, 96), "float32")
    flat, groups = compress.Scattered(codec), compress.Hierarchical(compress.Scattered(codec), 2)
    for dim, times in ((0, 1), (-1, 2)):
        shard = Shard("data", RANKS, dim)
        assert flat.wire_bytes((64, 96), shard) == 3 * times * message
        assert groups.wire_bytes((64, 96), shard) == times * message
    assert groups.inside_traffic((64, 96), Shard("data", RANKS, -1)) == (
        ("reduce-scatter", 0.5 * 4 * 64 * 96),
        ("all-gather", 0.5 * 4 * 64 * 96),
    )


def test_what_cannot_be_cut_or_does_not_shrink_is_left_alone():
    groups = compress.Hierarchical(compress.Scattered(INT8), 2)
    assert groups.takes((6, 8), Shard("data", RANKS, -1), 2)  # halves of three rows, which are cut by columns
    assert not groups.takes((7, 9), Shard("data", RANKS, -1), 0)
    assert not groups.takes((6, 9), Shard("data", RANKS, -1), 0)
    assert not groups.takes((6, 8), Shard("data", 3, -1), 0)  # no groups of two among three ranks
    assert not groups.takes((8, 64), Shard("data", RANKS, 0), 4)


REDUCERS = [
    pytest.param(compress.Scattered(compress.Identity()), marks=pytest.mark.slow),
    compress.Scattered(QuantisedBlocks(8)),
    pytest.param(compress.Scattered(QuantisedBlocks(4, 32, rotate=True)), marks=pytest.mark.slow),
    pytest.param(compress.Scattered(Signs(64)), marks=pytest.mark.slow),
    compress.Scattered(TopK(0.1)),
    compress.PowerSGD(4),
]


@pytest.mark.parametrize("reducer", REDUCERS, ids=repr)
def test_reducers_keep_their_properties_between_groups(reducer):
    found = check(compress.Hierarchical(reducer, 2))
    assert len(found) == 7
    assert not any("not checked" in name for name in found)


class CountsOnce(compress.Hierarchical):
    """Negative control: what a rank has left out counts as one rank's, not as its group's."""

    def residual(self, state, like, shard):
        return super().residual(state, like, shard) / self.inside


class WrongGroups(compress.Hierarchical):
    """Negative control: ranks of one place exchange where those of a group should, so each group keeps its own mean."""

    def between(self, shard):
        return Shard(SubAxis(shard.axis, shard.members, self.inside, between=False), self.inside, shard.dim)


class FewBytesInside(compress.Hierarchical):
    def inside_traffic(self, shape, shard):
        return super().inside_traffic(shape, shard)[:1]


@pytest.mark.parametrize(
    ("kind", "words"),
    [(CountsOnce, "add up: given, arrived"), (WrongGroups, "wire_bytes says"), (FewBytesInside, "inside_traffic says")],
)
def test_a_reducer_without_a_property_is_caught(kind, words):
    with pytest.raises(AssertionError) as error:
        check(kind(compress.Scattered(TopK(0.1)), 2))
    assert words in str(error.value)


def test_groups_are_of_neighbours_and_of_those_with_one_place():
    inside, between = (SubAxis("data", 6, 3, between) for between in (False, True))
    assert inside.groups == ((0, 1, 2), (3, 4, 5)) and inside.size == 3
    assert between.groups == ((0, 3), (1, 4), (2, 5)) and between.size == 2


@pytest.mark.parametrize("between", [False, True])
def test_collectives_of_groups_are_those_of_their_ranks_alone(between):
    axis, x = SubAxis("data", 6, 3, between), np.random.default_rng(0).normal(size=(6, 6, 4)).astype(np.float32)
    size = axis.size

    def every(x):
        rows = x[:size]
        return (
            collectives.all_to_all(rows, axis),
            collectives.all_gather(x, axis, 1),
            collectives.mean_of_ranks(x, axis),
            collectives.reduce_scatter(x, axis, 0),
            collectives.own_part(x, axis, 0),
            collectives.packed_gather([x, x[0]], [1, 0], axis)[0],
        )

    for found in (mapped(every, 6)(x), jax.jit(jax.vmap(every, axis_name="data"))(x)):
        exchanged, gathered, means, scattered, own, packed = map(np.asarray, found)
        for group in axis.groups:
            for place, rank in enumerate(group):
                some, rows = x[list(group)], 6 // size
                mine = slice(place * rows, (place + 1) * rows)
                np.testing.assert_array_equal(exchanged[rank], some[:, place])
                np.testing.assert_array_equal(gathered[rank], np.concatenate(list(some), axis=1))
                np.testing.assert_array_equal(packed[rank], gathered[rank])
                np.testing.assert_allclose(means[rank], some.mean(0), rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(scattered[rank], some.sum(0)[mine], rtol=1e-5, atol=1e-6)
                np.testing.assert_array_equal(own[rank], x[rank][mine])
