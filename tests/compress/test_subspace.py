"""Thin-factor mathematics against numpy in float64, and against algorithms that are known to fail."""

import functools
import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from compress import kernels, subspace

N, K = 176, 144


FORMS = {"solve": subspace.Method("float32", "xla"), "kernels": subspace.Method("float32", "interpret")}


@functools.partial(jax.jit, static_argnames="form")
def compress(m, q, first, form="solve"):
    """Return P, W and the next Q of a message, or of a batch of messages."""
    if m.ndim > 2:
        return jax.vmap(functools.partial(compress, form=form))(m, q, first)
    p = subspace.left(kernels.project(m, q, parts=True)[1], FORMS[form]).thin
    s, g = kernels.backproject(m, p, parts=True)
    w, following = subspace.right(s, g, q, first, FORMS[form])
    return p, w.thin, following


def textbook(m, q, first):
    """Return P, W and the next Q of messages by Householder QR in float64, with Cholesky's signs."""
    m, q = np.float64(m), np.float64(q)
    p, upper = np.linalg.qr(m @ q)
    p *= np.sign(np.diagonal(upper, axis1=-2, axis2=-1))[..., None, :]
    w = m.swapaxes(-1, -2) @ p
    return p, w, w / np.linalg.norm(w, axis=-2, keepdims=True) + 0.03 * first


def product(p, w):
    return np.float64(p) @ np.float64(w).swapaxes(-1, -2)


def norm(x):
    return np.linalg.norm(np.float64(x), axis=(-2, -1))


def relative_error(m, p, w):
    return norm(m - product(p, w)) / np.maximum(norm(m), 1e-300)


def best_error(m, r):
    """Return the relative error of the best approximation of rank r (Eckart-Young)."""
    values = np.linalg.svd(np.float64(m), compute_uv=False)
    return np.linalg.norm(values[r:]) / np.linalg.norm(values)


def orthonormal(rng, n, k):
    return np.linalg.qr(rng.normal(size=(n, k)))[0]


def with_spectrum(values, n=N, k=K, seed=0):
    rng = np.random.default_rng(seed)
    return (orthonormal(rng, n, len(values)) * values @ orthonormal(rng, k, len(values)).T).astype(np.float32)


def of_rank(r):
    """Return messages of rank r or less, by name."""
    # The seed gives a draw that suits the first Q. float32 costs every algorithm 1e-7 times the condition of M Q, which
    # exceeds 200 for one draw in four at rank 16.
    rng = np.random.default_rng(r + 9)
    a, b = rng.normal(size=(N, r)), rng.normal(size=(K, r))
    half = r // 2
    return {
        "full": a @ b.T,
        "half": a[:, :half] @ b[:, :half].T,
        "one": a[:, :1] @ b[:, :1].T,
        "equal columns": np.tile(a[:, :1], (1, K)),
        "decaying": orthonormal(rng, N, r) * np.geomspace(1, 1e-2, r) @ b.T,
        "1e-9": 1e-9 * a @ b.T,
        "1e-25": 1e-25 * a @ b.T,
        "1e+25": 1e25 * a @ b.T,
        "zero": np.zeros((N, K)),
    }


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("r", [4, pytest.param(16, marks=pytest.mark.slow), 128])
def test_what_has_the_rank_is_exact(r, form):
    messages = of_rank(r)
    m = np.stack(list(messages.values())).astype(np.float32)
    first = jnp.broadcast_to(subspace.initial(K, r, 0), (len(m), K, r))
    p, w, q = compress(m, first, first, form)
    assert dict(zip(messages, relative_error(m, p, w))) == pytest.approx(dict.fromkeys(messages, 0), abs=1e-5)
    assert np.isfinite(q).all()


def gram_schmidt(p):
    """Return orthonormal columns by modified Gram-Schmidt, column by column, as PowerSGD's code and Optimus-CC do."""
    p = p.copy()
    for i in range(p.shape[1]):
        p[:, i] /= np.linalg.norm(p[:, i]) + np.float32(1e-8)
        p[:, i + 1 :] -= np.outer(p[:, i], p[:, i] @ p[:, i + 1 :])
    return p


def shifted_cholesky_qr2(p):
    """Return columns after two rounds of Cholesky QR, shifted by r^2 eps trace(G) (Fukaya et al. 2020), not scaled."""
    for _ in range(2):
        gram = p.T @ p
        shift = np.float32(1e-7) * np.trace(gram)
        try:
            lower = np.linalg.cholesky(gram + shift * np.eye(len(gram), dtype=np.float32))
        except np.linalg.LinAlgError:
            return np.full_like(p, np.nan)
        p = np.linalg.solve(lower, p.T).T
    return p


@pytest.mark.parametrize(
    "basis, r, names", [(gram_schmidt, 16, ["half", "one"]), (shifted_cholesky_qr2, 128, ["zero"])]
)
def test_other_orthogonalisations_fail_there(basis, r, names):
    q = np.asarray(subspace.initial(K, r, 0))
    for name in names:
        m = of_rank(r)[name].astype(np.float32)
        p = basis(m @ q)
        error = relative_error(m, p, m.T @ p)
        assert not error <= 0.1 or not np.isfinite(p).all(), (name, error)


@pytest.fixture(scope="module")
def decaying():
    """Return messages of full rank with known spectra."""
    index = np.arange(1, K + 1.0)
    return np.stack([with_spectrum(index**-power, seed=i) for i, power in enumerate((0.3, 1, 2))])


def test_messages_are_those_of_the_textbook_and_never_lose_more_than_the_message(decaying):
    first = jnp.broadcast_to(subspace.initial(K, 16, 0), (len(decaying), K, 16))
    for form in FORMS:
        q = other = first
        for _ in range(3):
            *checked, other = textbook(decaying, other, first)
            *solved, q = compress(decaying, q, first, form)
            assert (norm(product(*solved) - product(*checked)) < 1e-4 * norm(decaying)).all()
            assert (relative_error(decaying, *solved) <= 1).all()


@pytest.mark.parametrize("form", FORMS)
def test_constant_message_converges_to_the_best_rank(decaying, form):
    first = q = jnp.broadcast_to(subspace.initial(K, 16, 0), (len(decaying), K, 16))
    start = relative_error(decaying, *compress(decaying, first, first)[:2])
    for _ in range(25):
        p, w, q = compress(decaying, q, first, form)
    best = [best_error(m, 16) for m in decaying]
    assert (relative_error(decaying, p, w) < np.multiply(best, 1.003)).all()
    assert (start > np.multiply(best, [1.05, 1.3, 1.5])).all()


@pytest.mark.parametrize("rank", [0, 1, 4])
def test_warm_start_recovers_from_low_rank(decaying, rank):
    """After messages in another subspace of low rank, the second message is as good as after a fresh start.

    In the first one the columns that held the other subspace are of no use.
    """
    m = decaying[1:2]
    u, _, v = np.linalg.svd(m[0])
    low = (u[:, K - rank : K] @ v[K - rank :])[None].astype(np.float32)
    fresh = jnp.broadcast_to(subspace.initial(K, 16, 0), (1, K, 16))

    def errors(first):
        q = fresh
        for _ in range(20):
            *_, q = compress(low, q, first)
        p, w, q = compress(m, q, first)
        return relative_error(m, p, w)[0], relative_error(m, *compress(m, q, first)[:2])[0]

    p, w, q = compress(m, fresh, fresh)
    start, second = relative_error(m, p, w)[0], relative_error(m, *compress(m, q, fresh)[:2])[0]
    found = errors(fresh)
    assert found[0] < (1 + 0.1 * rank) * start * 1.0001
    assert found[1] < 1.05 * second
    assert rank or errors(jnp.zeros_like(fresh)) == (1, 1)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_precondition_keeps_the_span_and_orthonormalises(implementation):
    rng = np.random.default_rng(0)
    p = (rng.normal(size=(N, 16)) @ np.triu(rng.normal(size=(16, 16)) + 4 * np.eye(16))).astype(np.float32)
    p *= np.geomspace(1e-20, 1e20, 16, dtype=np.float32)
    found = np.float64(jax.jit(subspace.precondition, static_argnums=1)(p, implementation))
    np.testing.assert_allclose(found.T @ found, np.eye(16), atol=1e-4)
    span = np.linalg.qr(np.float64(p) / np.linalg.norm(np.float64(p), axis=0))[0]
    np.testing.assert_allclose(span @ (span.T @ found), found, atol=1e-5)


@pytest.mark.parametrize("implementation", ["xla", "interpret"])
def test_solve_is_the_least_squares_fit(implementation):
    rng = np.random.default_rng(0)
    m, p = rng.normal(size=(3, N, K)), np.stack([orthonormal(rng, N, 8) * 10.0**power for power in (-9, 0, 9)])
    p = p @ (np.eye(8) + 0.1 * rng.normal(size=(8, 8)))
    expected = np.stack([np.linalg.lstsq(one, other, rcond=None)[0].T for one, other in zip(p, m)])
    found = jax.jit(lambda m, p: subspace.solve(*kernels.backproject(m, p), implementation))(*map(np.float32, (m, p)))
    assert (norm(found - expected) < 1e-5 * norm(expected)).all()


def test_zero_columns_stay_zero(decaying):
    """Columns beyond a link's rank are zero, and the others compress as well as alone."""
    rank = 5
    first = np.where(np.arange(16) < rank, subspace.initial(K, 16, 0), 0)
    first = np.broadcast_to(first, (len(decaying), *first.shape))
    for form in FORMS:
        q = first
        for m in (decaying, np.zeros_like(decaying), decaying[[1, 2, 1]]):
            before = q
            p, w, q = compress(m, q, first, form)
            for x in (p, w, q):
                assert not np.asarray(x)[..., rank:].any()
        alone = compress(m, before[..., :rank], first[..., :rank], form)
        assert (norm(product(p, w) - product(*alone[:2])) < 1e-5 * norm(m)).all()
        assert (relative_error(m, p, w) < 0.9).all()


def test_quantised_factors():
    x = np.random.default_rng(0).normal(size=(2, 64, 8)).astype(np.float32) * np.geomspace(1e-12, 1e12, 8, dtype="f")
    x[0, :, 3] = 0
    largest = np.abs(x).max(axis=1, keepdims=True)
    worst = {"float32": 0 * largest, "bfloat16": largest / 256, "int8": largest / 127 * (0.5 + 127 / 256)}
    for factors in subspace.FACTORS:
        wire = subspace.quantise(x, factors)
        assert wire.values.dtype == factors
        assert (wire.scale is None) == (factors != "int8")
        found = subspace.dequantise(wire)
        assert found.dtype == subspace.thin_dtype(factors)
        assert (np.abs(np.float64(found) - x) <= worst[factors]).all()
    np.testing.assert_array_equal(subspace.quantise(x, "bfloat16").values, x.astype(jnp.bfloat16))
    assert (np.abs(wire.values).max(axis=1) == np.where(largest[:, 0] > 0, 127, 0)).all()


def test_first_q_is_orthonormal_and_its_seeds():
    q = subspace.initial(K, 16, 3)
    np.testing.assert_allclose(q.T @ q, np.eye(16), atol=1e-6)
    np.testing.assert_array_equal(q, subspace.initial(K, 16, 3))
    assert not np.allclose(q, subspace.initial(K, 16, 4), atol=0.1)


@hypothesis.settings(deadline=None, derandomize=True, max_examples=60)
@hypothesis.given(
    seed=st.integers(0, 999), rank=st.integers(0, 60), decades=st.floats(0, 6), exponent=st.integers(-30, 30)
)
def test_any_message(seed, rank, decades, exponent):
    """Results are finite, never farther from the message than zero is, and exact if the rank suffices."""
    m = with_spectrum(np.geomspace(1, 10**-decades, rank) * 10.0**exponent, 70, 60, seed)
    first = subspace.initial(60, 12, 0)
    for form in FORMS:
        p, w, q = compress(m, first, first, form)
        assert all(np.isfinite(x).all() for x in (p, w, q))
        assert relative_error(m, p, w) <= (1 + 1e-5 if rank > 12 else 1e-4)


# --- Large batches on CPUs --------------------------------------------------------------------------------------------

_BATCHED = {
    "precondition": lambda p, g: subspace.precondition(p),
    "solve": subspace.solve,
}


def lapack_batches(compiled):
    """Return the number of matrices in each call of LAPACK."""
    found = []
    for line in compiled.as_text().splitlines():
        if "custom-call" in line and "lapack" in line:
            shape = re.search(r"f32\[([\d,]+)\]", line).group(1)
            found.append(int(np.prod([int(size) for size in shape.split(",")[:-2]], dtype=int)))
    return found


@pytest.mark.parametrize("name", _BATCHED)
@pytest.mark.parametrize("emulated", [pytest.param(False, marks=pytest.mark.slow), True])
def test_large_matrices_come_alone_to_lapack_and_with_the_same_bits(name, emulated, monkeypatch):
    """LAPACK's kernels of a batch may wait for each other for ever; the control has the whole batch in one call."""
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(2, 3, 320, 24)), jnp.float32)
    g = jnp.asarray(p.mT @ p)

    def compiled():
        function = jax.vmap(_BATCHED[name]) if emulated else _BATCHED[name]
        return jax.jit(lambda p, g: function(p, g)).lower(p, g).compile()

    alone = compiled()
    assert set(lapack_batches(alone)) == {1}
    monkeypatch.setattr(subspace, "_LARGE", 2**40)
    together = compiled()
    assert set(lapack_batches(together)) == {6}
    np.testing.assert_array_equal(alone(p, g), together(p, g))
