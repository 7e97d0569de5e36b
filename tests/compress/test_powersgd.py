"""PowerSGD over data ranks against numpy in float64, its invariants, and its collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compress.powersgd import PowerSGD, PowerState
from compress.reducer import Shard, mean
from paxtrain.xla import hlo
from tests.compress.ranks import mapped

RANK = 4
# Two of one shape, a wide one, one of less than RANK columns, one of zero gradients, one of gradients of rank 1.
SHAPES = ((24, 16), (24, 16), (16, 40), (7, 3), (24, 16), (16, 40))
ZERO, DEFICIENT = 4, 5
STEPS = 6


def reduce(matrices, states, rank=RANK, axis="data"):
    """Return the means, which all ranks need whole, the states and the statistics."""
    shards = [Shard(axis, jax.lax.axis_size(axis) if axis else 1, -1)] * len(matrices)
    return mean(PowerSGD(rank, highest=max(rank, RANK)), states, matrices, shards)


@functools.cache
def step(ranks, rank=RANK):
    return mapped(functools.partial(reduce, rank=rank), ranks)


def first(shapes, rank=RANK):
    return [PowerSGD(rank).init(shape, Shard(None, 1, -1)) for shape in shapes]


@functools.cache
def first_states(shapes):
    return jax.tree.map(np.asarray, first(shapes))


def start(ranks, shapes=SHAPES):
    return jax.tree.map(lambda x: np.broadcast_to(x, (ranks, *x.shape)), first_states(shapes))


@functools.cache
def gradients(ranks):
    """Return [steps][matrix] gradients [ranks, n, k], a part of which is the same on all ranks and in all steps."""
    rng = np.random.default_rng(ranks)
    common = [rng.normal(size=shape) for shape in SHAPES]
    steps = [[c + rng.normal(size=(ranks, *c.shape)) for c in common] for _ in range(STEPS)]
    for matrices in steps:
        matrices[ZERO][:] = 0
        matrices[DEFICIENT][:] = matrices[DEFICIENT][:, :, :1] * matrices[DEFICIENT][:, :1, :] * 1e-9
    return [[m.astype(np.float32) for m in matrices] for matrices in steps]


@functools.cache
def trajectory(ranks):
    """Return means, states and statistics of each step in numpy."""
    state, found = start(ranks), []
    for matrices in gradients(ranks):
        means, state, stats = step(ranks)(matrices, state)
        found.append(jax.tree.map(np.asarray, (means, state, stats)))
    return found


def power_sgd(matrices, errors, q):
    """Return the mean's approximation and the new errors of one step as published, in float64 on all ranks at once."""
    m = matrices.astype(np.float64) + errors
    p, _ = np.linalg.qr((m @ q.astype(np.float64)).mean(0))
    own = m.transpose(0, 2, 1) @ p
    return p @ own.mean(0).T, m - p @ own.transpose(0, 2, 1)


def norm(x):
    return float(np.linalg.norm(x))


@pytest.mark.parametrize("ranks", [1, 2, 4])
class TestMeanLowRank:
    def test_matches_float64_and_its_errors_follow(self, ranks):
        for i in set(range(len(SHAPES))) - {ZERO, DEFICIENT}:
            errors, before = np.zeros(()), start(ranks)[i].q[0]
            for matrices, (means, state, _) in zip(gradients(ranks), trajectory(ranks)):
                expected, errors = power_sgd(matrices[i], errors, before)
                before = state[i].q[0]
                scale = norm(matrices[i])
                assert norm(means[i][0] - expected) < 1e-5 * scale
                assert norm(state[i].error - errors) < 1e-5 * scale

    def test_results_and_right_factors_are_the_same_bits_on_all_ranks(self, ranks):
        for means, state, _ in trajectory(ranks):
            for x in [*means, *(one.q for one in state)]:
                assert np.array_equal(x, np.broadcast_to(x[:1], x.shape))

    def test_what_is_sent_and_what_is_kept_add_up(self, ranks):
        for i in range(len(SHAPES)):
            sent = sum(means[i][0].astype(np.float64) for means, _, _ in trajectory(ranks))
            kept = trajectory(ranks)[-1][1][i].error.astype(np.float64).mean(0)
            given = sum(matrices[i].astype(np.float64).mean(0) for matrices in gradients(ranks))
            assert norm(sent + kept - given) <= 2e-6 * norm(given)

    def test_zero_and_deficient_matrices(self, ranks):
        for means, state, _ in trajectory(ranks):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, state)))
            assert not means[ZERO].any() and not state[ZERO].error.any()
        if ranks == 1:  # several ranks' matrices of rank 1 are not of rank 1 together
            means, _, _ = trajectory(ranks)[0]
            given = gradients(ranks)[0][DEFICIENT]
            assert norm(means[DEFICIENT] - given) < 1e-5 * norm(given)

    def test_statistics(self, ranks):
        before = start(ranks)
        for matrices, (_, state, stats) in zip(gradients(ranks), trajectory(ranks)):
            total = [np.square(m + e).sum((1, 2), dtype=np.float64) for m, (e, _) in zip(matrices, before)]
            left = [np.square(e).sum((1, 2), dtype=np.float64) for e, _ in state]
            np.testing.assert_allclose(stats.total, sum(total), rtol=1e-5)
            np.testing.assert_allclose(stats.left, sum(left), rtol=1e-5)
            assert (stats.left < stats.total).all()
            before = state


def test_without_the_errors_what_is_sent_does_not_add_up():
    state, sent = start(2), 0
    for matrices in gradients(2):
        means, state, _ = step(2)(matrices, state)
        state = [one._replace(error=zero.error) for one, zero in zip(state, start(2))]
        sent = sent + means[0][0]
    given = sum(matrices[0].mean(0) for matrices in gradients(2))
    assert norm(sent - given) > 0.1 * norm(given)


def test_a_lower_rank_uses_and_changes_the_first_columns_only():
    before, given = trajectory(2)[0][1][0], gradients(2)[1][0]
    [found], [after], _ = step(2, rank=2)([given], [before])
    expected, error = power_sgd(given, before.error, before.q[0, :, :2])
    assert norm(found[0] - expected) < 1e-5 * norm(given)
    assert norm(after.error - error) < 1e-5 * norm(given)
    assert np.array_equal(after.q[:, :, 2:], before.q[:, :, 2:])
    assert not np.array_equal(after.q[:, :, :2], before.q[:, :, :2])


def test_one_rank_needs_no_axis():
    alone = jax.tree.map(lambda x: x[0], (gradients(1)[0][:1], start(1)[:1]))
    means, state, _ = jax.jit(functools.partial(reduce, axis=None))(*alone)
    expected, expected_state, _ = trajectory(1)[0]
    np.testing.assert_allclose(means[0], expected[0][0], atol=1e-5)
    np.testing.assert_allclose(state[0].error, expected_state[0].error[0], atol=1e-5)


def test_virtual_ranks_agree_with_real_ones():
    run = jax.jit(jax.vmap(reduce, axis_name="data"))
    means, state, _ = run(gradients(4)[0][:2], start(4)[:2])
    expected, expected_state, _ = trajectory(4)[0]
    for i in (0, 1):
        np.testing.assert_allclose(means[i], expected[i], atol=1e-5)
        np.testing.assert_allclose(state[i].error, expected_state[i].error, atol=1e-5)
        np.testing.assert_allclose(state[i].q, expected_state[i].q, atol=1e-4)


def test_a_constant_gradient_is_approximated_almost_as_well_as_can_be():
    rng = np.random.default_rng(5)
    u, v = (np.linalg.qr(rng.normal(size=(n, 32)))[0] for n in (64, 32))
    singular = 0.8 ** np.arange(32)
    m = (u * singular @ v.T).astype(np.float32)

    def iterate(state, _):
        means, [state], _ = reduce([m], state, 8, None)
        return [state._replace(error=jnp.zeros_like(m))], means[0]

    _, means = jax.jit(lambda s: lax.scan(iterate, s, length=20))(first([m.shape], 8))
    best = norm(singular[8:])
    assert norm(means[-1] - m) < 1.02 * best < norm(means[0] - m)


def test_after_zero_gradients_compression_recovers():
    rng = np.random.default_rng(6)
    m = (rng.normal(size=(64, 4)) @ rng.normal(size=(4, 32))).astype(np.float32)
    one = np.outer(m[:, 0], m[0])

    def iterate(state, m):
        means, state, _ = reduce([m], state, 8, None)
        return state, means[0]

    history = jnp.stack([*[0 * m] * 5, *[one] * 20, m])
    _, means = jax.jit(lambda s: lax.scan(iterate, s, history))(first([m.shape], 8))
    assert norm(means[-1] - m) < 1e-3 * norm(m)


@functools.cache
def norms_of_errors(local, steps):
    """Return norms [steps] of four ranks' errors: local residuals M_w - P W_w^T or aggregated ones, M_w - P W^T."""
    rng = np.random.default_rng(7)
    common = jnp.asarray(rng.normal(size=(32, 24)), jnp.float32)
    keys = jax.random.split(jax.random.key(7), steps)

    def rank(state, key):
        key = jax.random.fold_in(key, lax.axis_index("data"))
        g = common + jax.random.normal(key, common.shape)
        means, after, _ = reduce([g], state)
        error = after[0].error if local else g + state[0].error - means[0]
        return [PowerState(error, after[0].q)]

    def iterate(state, key):
        state = jax.vmap(rank, (0, None), axis_name="data")(state, key)
        return state, jnp.linalg.norm(state[0].error)

    return np.asarray(jax.jit(lambda s: lax.scan(iterate, s, keys))(start(4, (common.shape,)))[1])


def test_local_residuals_are_smaller_than_aggregated_ones():
    assert norms_of_errors(True, 2000)[:200].mean() < 0.7 * norms_of_errors(False, 200).mean()


def test_errors_stay_bounded():
    norms = norms_of_errors(True, 2000)
    assert norms[1000:].max() < 1.1 * norms[100:1000].max()


@pytest.mark.parametrize("count", [1, 6])
def test_two_all_reduces_of_the_factors_whatever_the_number_of_matrices(count):
    shapes = SHAPES[:count]
    shaped = [jax.ShapeDtypeStruct((4, *shape), jnp.float32) for shape in shapes]
    lowered = step(4).lower(shaped, start(4, shapes))
    # XLA's combiner merges collectives, so they are also counted before it.
    assert lowered.as_text().count("stablehlo.all_reduce") == 2
    found = hlo.collectives(lowered.compile().as_text())
    ranks = [min(RANK, *shape) for shape in shapes]
    sides = [sum(shape[side] * r * 4 for shape, r in zip(shapes, ranks)) for side in (0, 1)]
    assert [(c.kind, c.bytes) for c in found] == [("all-reduce", size) for size in sides]
