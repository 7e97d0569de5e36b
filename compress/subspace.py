"""Thin-factor mathematics of low-rank compression: what happens between the passes over whole matrices.

A message M [n, k] travels as P W^T, by one step of subspace iteration per message (PowerSGD, Vogels et al. 2019):

    P = precondition(M Q)  or  orthonormal(M Q)
    W = solve(M^T P, P^T P)
    Q = warm_start(W, first Q)      for the next message

W is the least-squares fit of M by the columns of P, which therefore need not be orthonormal, only well-conditioned:
then neither quantising the factors nor float32 sums lose more than they must. Everything here batches over leading
dims, computes in float32 and takes r x r factorisations only, besides `orthonormal`.

A column that is zero stays exactly zero everywhere, so a rank below the number of columns is made by zero columns.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

FACTORS = ("float32", "bfloat16", "int8")

# Of the first Q in every later one. With none, messages that are zero or of low rank for a while would leave a Q from
# which no later message recovers; this much adds less than 0.3 % to the error of a constant message.
_MIX = 0.03
_RIDGE = 1e-6


class Factor(NamedTuple):
    """A thin factor as it crosses a link: values [*, n, r]; of int8 values also the columns' scales [*, r], float32."""

    values: jax.Array
    scale: jax.Array | None = None


def _largest(x: jax.Array) -> jax.Array:
    """Largest magnitude of every column, [*, 1, r]; 1 for zero columns."""
    largest = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    return jnp.where(largest == 0, 1, largest)  # nan stays: what is not finite must not look like a number


def _unit(x: jax.Array) -> jax.Array:
    """x with columns of unit length; zero ones stay. No square leaves float32's range, however small or large x is."""
    x = x / _largest(x)
    return x * lax.rsqrt(jnp.maximum(jnp.sum(x * x, axis=-2, keepdims=True), 1))


def _cholesky(g: jax.Array, ridge: float) -> jax.Array:
    """Lower Cholesky factor of g + ridge I."""
    return lax.linalg.cholesky(g + ridge * jnp.eye(g.shape[-1]), symmetrize_input=False)


def _divide(x: jax.Array, lower: jax.Array, transpose: bool) -> jax.Array:
    """x lower^-T (transpose) or x lower^-1."""
    return lax.linalg.triangular_solve(lower, x, left_side=False, lower=True, transpose_a=transpose)


def initial(k: int, rank: int, seed: int) -> jax.Array:
    """The first Q: `rank` random orthonormal columns, [k, rank] float32, the same for the same seed."""
    return jax.random.orthogonal(jax.random.key(seed), k, m=rank, dtype=jnp.float32)


def precondition(p: jax.Array) -> jax.Array:
    """Columns spanning the same space as p's [*, n, r], orthonormal as far as p's have full rank.

    One round of shifted Cholesky QR on unit columns. Where columns depend on others, what is left of them is short, not
    of unit length, and need not be orthogonal: `solve` accounts for it.

    References:
        Fukaya et al. 2020, Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices.
    """
    p = _unit(p)
    gram = jnp.matmul(p.mT, p, precision=lax.Precision.HIGHEST)
    # The rounding errors of the Gram matrix of r equal columns must not make it indefinite.
    return _divide(p, _cholesky(gram, 4 * p.shape[-1] * jnp.finfo(jnp.float32).eps), transpose=True)


def orthonormal(p: jax.Array) -> jax.Array:
    """Orthonormal columns whose span holds p's [*, n, r], by Householder QR: slower, to check `precondition` against.

    Zero columns, which have to be the last ones, stay zero.
    """
    p = _unit(p)
    return jnp.where(jnp.any(p != 0, axis=-2, keepdims=True), jnp.linalg.qr(p)[0], 0)


def solve(s: jax.Array, g: jax.Array) -> jax.Array:
    """W [*, k, r] that brings P W^T closest to M, from s = M^T P and g = P^T P for the P of `precondition`.

    W = s (g + ridge I)^-1, by Cholesky. The ridge is 1e-6 of the largest element of g's diagonal; so is the relative
    error that it leaves where P could represent M exactly.
    """
    largest = jnp.max(jnp.diagonal(g, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    largest = jnp.where(largest == 0, 1, largest)
    lower = _cholesky(g / largest, _RIDGE)
    return _divide(_divide(s / largest, lower, transpose=True), lower, transpose=False)


def warm_start(w: jax.Array, first: jax.Array) -> jax.Array:
    """Q of the next message: this message's W [*, k, r] with columns of unit length, and a little of the first Q."""
    return _unit(w) + _MIX * first


def quantise(x: jax.Array, factors: str) -> Factor:
    """x [*, n, r] in float32 as what crosses the link: one of FACTORS, int8 with a scale per column."""
    if factors != "int8":
        return Factor(x.astype(factors))
    scale = _largest(x) / 127
    return Factor(jnp.round(x / scale).astype(jnp.int8), scale[..., 0, :])


def thin_dtype(factors: str) -> jnp.dtype:
    """The dtype in which factors are multiplied: bfloat16 also holds dequantised int8."""
    return jnp.dtype("float32" if factors == "float32" else "bfloat16")


def dequantise(factor: Factor) -> jax.Array:
    """The factor as sender and receiver multiply it, in `thin_dtype`."""
    values, scale = factor
    # A flat array has one layout only: whatever made or received the values, products of them add up in the same order.
    values = lax.optimization_barrier(values.reshape(-1)).reshape(values.shape)
    if scale is None:
        return values
    # XLA may drop a conversion to bfloat16 and back; reduce_precision stays.
    product = lax.reduce_precision(values.astype(jnp.float32) * scale[..., None, :], exponent_bits=8, mantissa_bits=7)
    return product.astype(jnp.bfloat16)
