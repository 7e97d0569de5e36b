"""PowerSGD over data ranks against numpy in float64, its invariants, and its collectives."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from compress.powersgd import PowerState, init_power, mean_lowrank
from paxtrain.xla import hlo
from tests.compress.ranks import mapped

RANK = 4
# Two of one shape, a wide one, one of less than RANK columns, one of zero gradients, one of gradients of rank 1.
SHAPES = ((24, 16), (24, 16), (16, 40), (7, 3), (24, 16), (16, 40))
ZERO, DEFICIENT = 4, 5
STEPS = 6


def reduce(matrices, state, rank=RANK, axis="data", form="solve"):
    """Return the means that the factors of mean_lowrank stand for, the state and the statistics."""
    factors, state, stats = mean_lowrank(matrices, state, rank, axis, form=form)
    return [p @ w.T for p, w in factors], state, stats


@functools.cache
def step(ranks, rank=RANK, form="solve"):
    return mapped(functools.partial(reduce, rank=rank, form=form), ranks)


@functools.cache
def first_state(shapes):
    return jax.tree.map(np.asarray, init_power(shapes, RANK, seed=3))


def start(ranks, shapes=SHAPES):
    return jax.tree.map(lambda x: np.broadcast_to(x, (ranks, *x.shape)), first_state(shapes))


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
    """Return means, state and statistics of each step in numpy; the state before the first step comes first."""
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


def some(tree, matrices):
    """Return only these matrices' arrays of a list or a state."""
    return jax.tree.map(lambda xs: [xs[i] for i in matrices], tree, is_leaf=lambda x: isinstance(x, list))


def norm(x):
    return float(np.linalg.norm(x))


@pytest.mark.parametrize("ranks", [1, 2, 4])
class TestMeanLowRank:
    def test_matches_float64_and_its_errors_follow(self, ranks):
        q = [x[0] for x in start(ranks).q]
        for i in set(range(len(SHAPES))) - {ZERO, DEFICIENT}:
            errors, before = np.zeros(()), q[i]
            for matrices, (means, state, _) in zip(gradients(ranks), trajectory(ranks)):
                expected, errors = power_sgd(matrices[i], errors, before)
                before = state.q[i][0]
                scale = norm(matrices[i])
                assert norm(means[i][0] - expected) < 1e-5 * scale
                assert norm(state.error[i] - errors) < 1e-5 * scale

    def test_results_and_right_factors_are_the_same_bits_on_all_ranks(self, ranks):
        for means, state, _ in trajectory(ranks):
            for x in [*means, *state.q]:
                assert np.array_equal(x, np.broadcast_to(x[:1], x.shape))

    def test_what_is_sent_and_what_is_kept_add_up(self, ranks):
        for i in range(len(SHAPES)):
            sent = sum(means[i][0].astype(np.float64) for means, _, _ in trajectory(ranks))
            kept = trajectory(ranks)[-1][1].error[i].astype(np.float64).mean(0)
            given = sum(matrices[i].astype(np.float64).mean(0) for matrices in gradients(ranks))
            assert norm(sent + kept - given) <= 2e-6 * norm(given)

    def test_zero_and_deficient_matrices(self, ranks):
        for means, state, _ in trajectory(ranks):
            assert all(np.isfinite(x).all() for x in jax.tree.leaves((means, state)))
            assert not means[ZERO].any() and not state.error[ZERO].any()
        if ranks == 1:  # several ranks' matrices of rank 1 are not of rank 1 together
            means, _, _ = trajectory(ranks)[0]
            given = gradients(ranks)[0][DEFICIENT]
            assert norm(means[DEFICIENT] - given) < 1e-5 * norm(given)

    def test_statistics(self, ranks):
        before = start(ranks)
        for matrices, (_, state, stats) in zip(gradients(ranks), trajectory(ranks)):
            total = [np.square(m + e).sum((1, 2), dtype=np.float64) for m, e in zip(matrices, before.error)]
            left = [np.square(e).sum((1, 2), dtype=np.float64) for e in state.error]
            np.testing.assert_allclose(stats.total, sum(total), rtol=1e-5)
            np.testing.assert_allclose(stats.left, sum(left), rtol=1e-5)
            assert (stats.left < stats.total).all()
            before = state


def test_without_the_errors_what_is_sent_does_not_add_up():
    state, sent = start(2), 0
    for matrices in gradients(2):
        means, state, _ = step(2)(matrices, state)
        state = state._replace(error=start(2).error)
        sent = sent + means[0][0]
    given = sum(matrices[0].mean(0) for matrices in gradients(2))
    assert norm(sent - given) > 0.1 * norm(given)


def test_a_state_from_a_checkpoint_continues_bit_exactly():
    middle = trajectory(2)[STEPS // 2 - 1][1]  # numpy
    for matrices, expected in zip(gradients(2)[STEPS // 2 :], trajectory(2)[STEPS // 2 :]):
        found = step(2)(matrices, middle)
        assert all(map(np.array_equal, *map(jax.tree.leaves, (found, expected))))
        middle = found[1]


def test_forms_agree_in_every_step():
    state = some(start(2), [0, 2])
    for matrices, (expected, _, _) in zip(gradients(2), trajectory(2)):
        given = [matrices[0], matrices[2]]
        means, state, _ = step(2, form="qr")(given, state)
        for mean, other, m in zip(means, (expected[0], expected[2]), given):
            assert norm(mean - other) <= 2e-5 * norm(m)


def test_a_lower_rank_uses_and_changes_the_first_columns_only():
    before = some(trajectory(2)[0][1], [0])
    given = gradients(2)[1][0]
    (mean,), after, _ = step(2, rank=2)([given], before)
    expected, error = power_sgd(given, before.error[0], before.q[0][0, :, :2])
    assert norm(mean[0] - expected) < 1e-5 * norm(given)
    assert norm(after.error[0] - error) < 1e-5 * norm(given)
    assert np.array_equal(after.q[0][:, :, 2:], before.q[0][:, :, 2:])
    assert not np.array_equal(after.q[0][:, :, :2], before.q[0][:, :, :2])


def test_one_rank_needs_no_axis():
    alone = jax.tree.map(lambda x: x[0], (gradients(1)[0][:1], some(start(1), [0])))
    means, state, _ = jax.jit(functools.partial(reduce, axis=None))(*alone)
    expected, expected_state, _ = trajectory(1)[0]
    np.testing.assert_allclose(means[0], expected[0][0], atol=1e-5)
    np.testing.assert_allclose(state.error[0], expected_state.error[0][0], atol=1e-5)


def test_virtual_ranks_agree_with_real_ones():
    run = jax.jit(jax.vmap(reduce, axis_name="data"))
    means, state, _ = run(gradients(4)[0][:2], some(start(4), [0, 1]))
    expected, expected_state, _ = trajectory(4)[0]
    for i in (0, 1):
        np.testing.assert_allclose(means[i], expected[i], atol=1e-5)
        np.testing.assert_allclose(state.error[i], expected_state.error[i], atol=1e-5)
        np.testing.assert_allclose(state.q[i], expected_state.q[i], atol=1e-4)


def test_a_constant_gradient_is_approximated_almost_as_well_as_can_be():
    rng = np.random.default_rng(5)
    u, v = (np.linalg.qr(rng.normal(size=(n, 32)))[0] for n in (64, 32))
    singular = 0.8 ** np.arange(32)
    m = (u * singular @ v.T).astype(np.float32)

    def iterate(state, _):
        means, state, _ = reduce([m], state, 8, None)
        return state._replace(error=[jnp.zeros_like(m)]), means[0]

    _, means = jax.jit(lambda s: lax.scan(iterate, s, length=20))(init_power([m.shape], 8, 0))
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
    _, means = jax.jit(lambda s: lax.scan(iterate, s, history))(init_power([m.shape], 8, 0))
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
        error = after.error if local else [g + state.error[0] - means[0]]
        return PowerState(error, after.q)

    def iterate(state, key):
        state = jax.vmap(rank, (0, None), axis_name="data")(state, key)
        return state, jnp.linalg.norm(state.error[0])

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
