"""Subspace iteration on thin factors: the computations of low-rank compression between its passes over whole matrices.

A message M [n, k] travels as P W^T, by one step of subspace iteration per message (PowerSGD, Vogels et al. 2019):

    P = precondition(M Q)  or  orthonormal(M Q)         [n, r]
    W = solve(M^T P, P^T P)                             [k, r]
    Q = warm_start(W, first Q)                          [k, r], for the next message

W is the least-squares fit of M by the columns of P. P therefore need not be orthonormal, only well-conditioned, so that
neither quantised factors nor float32 sums lose more than they must. Every function batches over leading dims and
computes in float32. All except `orthonormal` factorise r x r matrices only.

A zero column stays exactly zero in every function, so zero columns make a rank below the number of columns.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FACTORS = ("float32", "bfloat16", "int8")

# Share of the first Q in every later one. Without it, messages that are zero or of low rank for a while would leave a Q
# from which later messages cannot recover. This share adds less than 0.3 % to the error of a constant message.
_MIX = 0.03
_RIDGE = 1e-6


class Factor(NamedTuple):
    """Thin factor as it crosses a link.

    Attributes:
        values: [*, n, r] in a dtype of FACTORS.
        scale: [*, r] float32 scales of int8 columns; None for other dtypes.
    """

    values: jax.Array
    scale: jax.Array | None = None


def _largest(x: jax.Array) -> jax.Array:
    """Return the largest magnitude of every column, [*, 1, r]; 1 for zero columns."""
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    return jnp.where(largest == 0, 1, largest)  # nan stays nan, so that the trainer finds it


def _unit(x: jax.Array) -> jax.Array:
    """Return x with columns of unit length; zero columns stay zero."""
    # x is scaled first, so that no square leaves float32's range, however small or large x is.
    x = x / _largest(x)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-2, keepdims=True), 1))


def _cholesky(g: jax.Array, ridge: float) -> jax.Array:
    """Return the lower Cholesky factor of g + ridge I."""
    return lax.linalg.cholesky(g + ridge * jnp.eye(g.shape[-1]), symmetrize_input=False)


def _divide(x: jax.Array, lower: jax.Array, transpose: bool) -> jax.Array:
    """Return x lower^-T if `transpose`, else x lower^-1."""
    return lax.linalg.triangular_solve(lower, x, left_side=False, lower=True, transpose_a=transpose)


def initial(k: int, rank: int, seed: int) -> jax.Array:
    """Return the first Q, random orthonormal columns [k, rank] in float32.

    Args:
        k: number of rows.
        rank: number of columns.
        seed: seed of the columns; equal seeds give equal columns.
    """
    return jax.random.orthogonal(jax.random.key(seed), k, m=rank, dtype=jnp.float32)


def precondition(p: jax.Array) -> jax.Array:
    """Return well-conditioned columns that span the same space as p's [*, n, r].

    One round of shifted Cholesky QR on unit columns makes them orthonormal if p has full rank. If a column depends on
    others, the rest of it is short and need not be orthogonal; `solve` accounts for that.

    References:
        Fukaya et al. 2020, Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices.
    """
    p = _unit(p)
    gram = jnp.matmul(p.mT, p, precision=lax.Precision.HIGHEST)
    # The rounding errors of the Gram matrix of r equal columns must not make it indefinite.
    return _divide(p, _cholesky(gram, 4 * p.shape[-1] * float(jnp.finfo(jnp.float32).eps)), transpose=True)


def orthonormal(p: jax.Array) -> jax.Array:
    """Return orthonormal columns whose span holds p's [*, n, r], by Householder QR.

    It is slower than `precondition` and serves to check it. Zero columns must be the last ones; they stay zero.
    """
    p = _unit(p)
    return jnp.where(jnp.any(p != 0, axis=-2, keepdims=True), jnp.linalg.qr(p)[0], 0)


def solve(s: jax.Array, g: jax.Array) -> jax.Array:
    """Return the W [*, k, r] for which P W^T is closest to M.

    W is s (g + ridge I)^-1, by Cholesky. The ridge is 1e-6 of the largest element of g's diagonal. If P could represent
    M exactly, the ridge leaves a relative error of 1e-6.

    Args:
        s: M^T P [*, k, r], float32.
        g: P^T P [*, r, r], float32, with the P of `precondition`.
    """
    largest = jnp.max(jnp.diagonal(g, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    largest = jnp.where(largest == 0, 1, largest)
    lower = _cholesky(g / largest, _RIDGE)
    return _divide(_divide(s / largest, lower, transpose=True), lower, transpose=False)


def warm_start(w: jax.Array, first: jax.Array) -> jax.Array:
    """Return the Q of the next message: this message's W with columns of unit length, plus a little of the first Q.

    Args:
        w: right factor [*, k, r] of this message, float32.
        first: right factor [*, k, r] of the first message, float32.
    """
    return _unit(w) + _MIX * first


def quantise(x: jax.Array, factors: str) -> Factor:
    """Return a factor as it crosses the link.

    Args:
        x: factor [*, n, r], float32.
        factors: dtype on the wire, one of FACTORS; int8 has a scale per column.
    """
    if factors != "int8":
        return Factor(x.astype(factors))
    scale = _largest(x) / 127
    return Factor(jnp.round(x / scale).astype(jnp.int8), scale[..., 0, :])


def thin_dtype(factors: str) -> jnp.dtype:
    """Return the dtype in which factors are multiplied; int8 factors are dequantised to bfloat16."""
    return jnp.dtype("float32" if factors == "float32" else "bfloat16")


def dequantise(factor: Factor) -> jax.Array:
    """Return the factor [*, n, r] as sender and receiver multiply it, in `thin_dtype`."""
    values, scale = factor
    # A flat array has only one layout, so products add up in the same order on the sender and on the receiver.
    values = lax.optimization_barrier(values.reshape(-1)).reshape(values.shape)
    if scale is None:
        return values
    # XLA may drop a conversion to bfloat16 and back; reduce_precision stays.
    product = lax.reduce_precision(values.astype(jnp.float32) * scale[..., None, :], exponent_bits=8, mantissa_bits=7)
    return product.astype(jnp.bfloat16)


FORMS: dict[str, Callable[[jax.Array], jax.Array]] = {"solve": precondition, "qr": orthonormal}
