"""The kernels of the thin algebra, in Pallas's interpreter, against numpy in float64.

tests/compress/test_subspace.py holds their accuracy beside that of plain jnp.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from compress.gpu import thin

SHIFT = RIDGE = 1e-6


def well_conditioned(rng, *shape):
    """Return random columns [*, n, r] that are far from depending on one another."""
    *lead, _, r = shape
    return np.linalg.qr(rng.normal(size=shape))[0] @ (np.eye(r) + 0.3 * rng.normal(size=(*lead, r, r)) / r**0.5)


def in_parts(rng, x, parts):
    """Return float32 partial sums [*, parts, n, r] of x [*, n, r]."""
    rest = 0.1 * rng.normal(size=(*x.shape[:-2], parts - 1, *x.shape[-2:])) * np.abs(x).max()
    return jnp.float32(np.concatenate([rest, (x - rest.sum(-3))[..., None, :, :]], axis=-3))


def total(parts):
    return np.float64(parts).sum(-3)


def each_with_some_parts(*cases):
    """Return each case with one partial sum and with three; of the two, one is for the nightly run, in turn."""
    return [
        pytest.param(*case, parts, marks=pytest.mark.slow if (i + (parts == 1)) % 2 else ())
        for i, case in enumerate(cases)
        for parts in (1, 3)
    ]


@pytest.mark.parametrize(
    ("lead", "n", "r", "multiprocessors", "parts"),
    each_with_some_parts(
        ((), 64, 16, 0), ((2,), 300, 4, 0), ((), 200, 20, 0), ((2,), 200, 128, 8), ((2,), 200, 128, 7), ((), 100, 70, 0)
    ),
)
def test_left_is_cholesky_qr_of_unit_columns(monkeypatch, lead, n, r, multiprocessors, parts):
    monkeypatch.setattr(thin, "multiprocessors", lambda: multiprocessors)
    rng = np.random.default_rng(r)
    y = in_parts(rng, well_conditioned(rng, *lead, n, r), parts)
    p, kept = thin.left(y, SHIFT, jnp.float32, interpret=True)
    assert kept is None
    unit = total(y) / np.linalg.norm(total(y), axis=-2, keepdims=True)
    lower = np.linalg.cholesky(unit.mT @ unit + SHIFT * np.eye(r))
    np.testing.assert_allclose(p, np.linalg.solve(lower, unit.mT).mT, atol=2e-6)


@pytest.mark.parametrize(
    ("lead", "k", "r", "multiprocessors", "parts"),
    each_with_some_parts(
        ((), 64, 16, 0), ((2,), 300, 4, 0), ((), 200, 20, 0), ((2,), 130, 128, 6), ((2,), 130, 128, 5), ((), 100, 70, 0)
    ),
)
def test_fit_is_the_solution_and_right_follows_from_it(monkeypatch, lead, k, r, multiprocessors, parts):
    monkeypatch.setattr(thin, "multiprocessors", lambda: multiprocessors)
    rng = np.random.default_rng(r)
    p = well_conditioned(rng, *lead, 4 * r, r)
    s, g = in_parts(rng, rng.normal(size=(*lead, k, r)), parts), in_parts(rng, p.mT @ p, parts)
    fitted = thin.fit(s, g, RIDGE, interpret=True)
    w = fitted.w
    ridge = RIDGE * np.max(np.diagonal(total(g), axis1=-2, axis2=-1), axis=-1)[..., None, None] * np.eye(r)
    expected = np.linalg.solve(total(g) + ridge, total(s).mT).mT
    assert (np.abs(w - expected) <= 1e-5 * np.abs(expected).max()).all()

    one = w.reshape(-1, k, r)[-1]
    last = thin.Fitted(one, fitted.largest[-1:], fitted.squares[-1:])
    first = jnp.float32(rng.normal(size=(k, r)))
    q, sent, kept = thin.right(last, first, first, 0.5, dtype=jnp.bfloat16, interpret=True)
    np.testing.assert_allclose(q, one / np.linalg.norm(one, axis=0) + 0.5 * first, atol=1e-5)
    np.testing.assert_array_equal(sent, one.astype(jnp.bfloat16))
    assert kept is None


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_no_square_leaves_the_range_of_float32(scale):
    """Columns of one block may be far smaller than those of another, and columns far smaller than others."""
    rng = np.random.default_rng(0)
    y = well_conditioned(rng, 256, 16) * np.geomspace(1, 1e8, 16) * np.repeat([1, 1e-8, 1, 0], 64)[:, None]
    p, _ = thin.left(jnp.float32(y * scale)[None], SHIFT, jnp.float32, interpret=True)
    same, _ = thin.left(jnp.float32(y)[None], SHIFT, jnp.float32, interpret=True)
    np.testing.assert_allclose(p.T @ p, np.eye(16), atol=1e-4)
    np.testing.assert_allclose(p, same, atol=1e-5)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("r", [pytest.param(16, marks=pytest.mark.slow), 48])
def test_what_is_not_finite_leaves_nothing_finite(value, r):
    """The trainer skips such a step only if it finds it."""
    rng = np.random.default_rng(0)
    y = rng.normal(size=(2, 200, r)).astype(np.float32)
    y[1, 150, 3] = value
    p, _ = thin.left(y, SHIFT, jnp.bfloat16, interpret=True)
    assert not np.isfinite(np.float32(p)).all(axis=0)[3]
    fit = jax.jit(lambda s, g: thin.fit(s, g, RIDGE, interpret=True).w)
    for place, index in ((0, (0, 50, 3)), (1, (0, 3, 3))):
        bad = rng.normal(size=(1, 100, r)).astype(np.float32), np.eye(r, dtype=np.float32)[None]
        bad[place][index] = value
        assert not np.isfinite(fit(*bad)).all()


@pytest.mark.parametrize("active", [False, True])
def test_an_inactive_message_keeps_what_was(active):
    rng = np.random.default_rng(0)
    n, r = 100, 20
    y, s = rng.normal(size=(2, 2, n, r)).astype(np.float32)
    old = rng.normal(size=(n, r)).astype(jnp.bfloat16)
    old[3, 5], old[99, 19], old[70, 2] = -0.0, np.inf, np.nan

    def bits(x):
        return np.asarray(x).view(np.uint16)

    p, kept = thin.left(y, SHIFT, jnp.bfloat16, old, jnp.bool_(active), interpret=True)
    assert (bits(kept) == bits(p if active else old)).all()
    fitted = thin.fit(s, np.eye(r, dtype=np.float32)[None], RIDGE, interpret=True)
    flag = jnp.bool_(active)
    q, w, kept = thin.right(fitted, old, old, 0.03, dtype=jnp.bfloat16, old=old, active=flag, interpret=True)
    assert (bits(kept) == bits(w if active else old)).all()
    assert (bits(q) == bits(old)).all() != active
