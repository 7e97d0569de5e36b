"""Inverses of Cholesky factors of small matrices, within a program of a Triton kernel.

A program holds the whole matrix in registers. For matrices of more than QUARTER columns they are too few, so those are
factorised in quarters.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from compress.gpu.tiles import Ref, dot, store, zero_index

QUARTER = 64  # rows and columns of a quarter of the largest matrix that is factorised
_BLOCK = 16  # columns that are eliminated one by one, before products update the rest


def eye(r: int) -> jax.Array:
    """Return the mask of the diagonal, bool [r, r]."""
    return jnp.arange(r)[:, None] == jnp.arange(r)[None, :]


def diagonal(a: jax.Array, dim: int) -> jax.Array:
    """Return the diagonal of a [r, r] as a column [r, 1] if `dim` is 0, or as a row [1, r] if it is 1."""
    return jnp.sum(jnp.where(eye(len(a)), a, 0), axis=1 - dim, keepdims=True)


def _eliminate(a: jax.Array) -> jax.Array:
    """Return the inverse of the Cholesky factor of a small matrix, by Gauss's elimination in place."""
    index = jnp.arange(len(a))

    def step(j: jax.Array, a: jax.Array) -> jax.Array:
        column = jnp.sum(jnp.where(index[None, :] == j, a, 0), axis=1)
        row = jnp.sum(jnp.where(index[:, None] == j, a, 0), axis=0)
        factor = jnp.where(index > j, column / jnp.sum(jnp.where(index == j, row, 0)), 0)
        # Below the pivot, the zeros of the eliminated column make room for a column of the inverse.
        row = jnp.where(index == j, 1, row)
        cleared = jnp.where((index[:, None] > j) & (index[None, :] == j), 0, a)
        return cleared - factor[:, None] * row[None, :]

    a = lax.fori_loop(0, len(a), step, a)
    inverse = jnp.where(index[:, None] > index[None, :], a, jnp.where(eye(len(a)), 1.0, 0.0))
    return lax.rsqrt(diagonal(a, 0)) * inverse


def inverse_cholesky(a: jax.Array, interpret: bool) -> jax.Array:
    """Return the inverse of the lower Cholesky factor of a [r, r], block column by block column in place.

    After step j the first j block rows hold rows of the inverse up to the diagonal, and of the factor's transpose
    beyond it. Further rows hold what is left of a, and to its left what will become rows of the inverse.

    Args:
        a: symmetric positive definite matrix [r, r]; nan results if it is not positive.
        interpret: whether Pallas's interpreter runs the kernel.
    """
    r, number = len(a), len(a) // _BLOCK
    if number == 1:
        return _eliminate(a)
    rows, inner, block = jnp.arange(r), jnp.arange(_BLOCK), jnp.arange(number)

    def step(j: jax.Array, a: jax.Array) -> jax.Array:
        here, after = rows // _BLOCK == j, rows // _BLOCK > j
        panel = jnp.sum(jnp.where((block == j)[None, :, None], a.reshape(r, number, _BLOCK), 0), axis=1)
        row = jnp.sum(jnp.where((block == j)[:, None, None], a.reshape(number, _BLOCK, r), 0), axis=0)
        pivot = jnp.sum(jnp.where((block == j)[:, None, None], panel.reshape(number, _BLOCK, _BLOCK), 0), axis=0)
        inverse = _eliminate(pivot)
        lower = jnp.where(after[:, None], dot(panel, inverse, interpret, trans_b=True), 0)
        row = jnp.where(here[None, :], (rows[None, :] == inner[:, None] + j * _BLOCK).astype(a.dtype), row)
        row = dot(inverse, row, interpret)
        cleared = jnp.where((here | after)[:, None] & here[None, :] | here[:, None], 0, a)
        place = (rows[:, None] == inner[None, :] + j * _BLOCK).astype(a.dtype)
        return cleared + dot(place - lower, row, interpret)

    return jnp.where(rows[:, None] >= rows[None, :], lax.fori_loop(0, number, step, a), 0)


def write_inverse_cholesky(quarter: Callable[[int, int], jax.Array], inverse: Ref, interpret: bool) -> None:
    """Write the inverse of the lower Cholesky factor of a matrix that is given in quarters.

    With the factors L and M of the diagonal's quarters it is [[L^-1, 0], [-M^-1 B L^-1, M^-1]], where B is the quarter
    below L, times L^-T, and M that of what B leaves.

    Args:
        quarter: function (row, column) -> quarter of the matrix, [QUARTER, QUARTER].
        inverse: result [r, r].
        interpret: whether Pallas's interpreter runs the kernel.
    """
    zero = zero_index()
    first = inverse_cholesky(quarter(0, 0), interpret)
    below = dot(quarter(1, 0), first, interpret, trans_b=True)
    last = inverse_cholesky(quarter(1, 1) - dot(below, below, interpret, trans_b=True), interpret)
    store(inverse, (zero, zero), first)
    store(inverse, (zero, zero + QUARTER), jnp.zeros_like(first))
    store(inverse, (zero + QUARTER, zero), -dot(last, dot(below, first, interpret), interpret))
    store(inverse, (zero + QUARTER, zero + QUARTER), last)
