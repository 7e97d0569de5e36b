"""Subspace iteration on thin factors: the computations of low-rank compression between its passes over whole matrices.

A message M [n, k] travels as P W^T, by one step of subspace iteration per message (PowerSGD, Vogels et al. 2019):

    P = precondition(M Q)                               [n, r]
    W = solve(M^T P, P^T P)                             [k, r]
    Q = warm_start(W, fixed random Q)                   [k, r], for the next message

W is the least-squares fit of M by the columns of P. P therefore need not be orthonormal, only well-conditioned, so that
neither quantised factors nor float32 sums lose more than they must. Every function batches over leading dims, computes
in float32 and factorises r x r matrices only.

A zero column stays exactly zero in every function, so zero columns make a rank below the number of columns.

`left` and `right` are an encoder's two halves of this. With the kernels of compress/gpu/thin.py they take two launches
each; in plain jnp, XLA makes about 20 of them, and calls cuSOLVER and cuBLAS for the factorisations and solves.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.gpu import thin
from compress.kernels import uses_kernels

FACTORS = ("float32", "bfloat16", "int8")

# Share of a fixed random Q in every later one. Without it, messages that are zero or of low rank for a while would
# leave a Q from which later messages cannot recover. It adds less than 0.3 % to the error of a constant message.
_MIX = 0.03
_RIDGE = 1e-6
# Multiplications of a batch, n r^2 each, above which CPUs take one matrix after another, see `_one_by_one`; and the
# devices that vmap may add to a batch without its showing.
_LARGE, _EMULATED = 2**17, 8


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


def _one_by_one(function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Return a function of every matrix of a batch; on CPUs large ones are taken one after another.

    LAPACK's kernels of jaxlib 0.10 hand a large batch to XLA's threads, and one of these waits until the others are
    done. If as many kernels as there are threads begin at once, none of them ends: two processors with two devices have
    hung so in factorisations of four matrices of 512 x 48 (jax-v0.10.2, jaxlib/cpu/lapack_kernels.cc). A matrix alone
    is not handed on.

    Args:
        function: function of matrices, one of each array.
        arrays: batches of matrices [*, n, r], with equal leading dims.
    """
    batch, (n, r) = arrays[-1].shape[:-2], arrays[-1].shape[-2:]
    number = math.prod(batch)
    if max(number, _EMULATED) * n * r * r <= _LARGE:
        return function(*arrays)
    alone = jax.custom_batching.sequential_vmap(function)

    def in_turn(*arrays: jax.Array) -> jax.Array:
        flat = [x.reshape(-1, *x.shape[-2:]) for x in arrays]
        found = lax.map(lambda matrices: alone(*matrices), flat)
        return found.reshape(*batch, *found.shape[-2:])

    return lax.platform_dependent(*arrays, cpu=in_turn, default=function)


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


def _shift(r: int) -> float:
    """Return what makes a Gram matrix of r unit columns definite, although rounding errors might not leave it so."""
    return 4 * r * float(jnp.finfo(jnp.float32).eps)


def precondition(p: jax.Array, implementation: str = "xla") -> jax.Array:
    """Return well-conditioned columns that span the same space as p's [*, n, r].

    One round of shifted Cholesky QR on unit columns makes them orthonormal if p has full rank. If a column depends on
    others, the rest of it is short and need not be orthogonal; `solve` accounts for that.

    Args:
        p: columns, float32.
        implementation: one of kernels.IMPLEMENTATIONS.

    References:
        Fukaya et al. 2020, Shifted Cholesky QR for computing the QR factorization of ill-conditioned matrices.
    """
    if uses_kernels(implementation):
        parts = p[..., None, :, :]
        return thin.left(parts, _shift(p.shape[-1]), p.dtype, interpret=implementation == "interpret")[0]
    p = _unit(p)
    gram = jnp.matmul(p.mT, p, precision=lax.Precision.HIGHEST)

    def divided(gram: jax.Array, p: jax.Array) -> jax.Array:
        return _divide(p, _cholesky(gram, _shift(p.shape[-1])), transpose=True)

    return _one_by_one(divided, gram, p)


def solve(s: jax.Array, g: jax.Array, implementation: str = "xla") -> jax.Array:
    """Return the W [*, k, r] for which P W^T is closest to M.

    W is s (g + ridge I)^-1, by Cholesky. The ridge is 1e-6 of the largest element of g's diagonal. If P could represent
    M exactly, the ridge leaves a relative error of 1e-6.

    Args:
        s: M^T P [*, k, r], float32.
        g: P^T P [*, r, r], float32, with the P of `precondition`.
        implementation: one of kernels.IMPLEMENTATIONS.
    """
    if uses_kernels(implementation):
        parts = s[..., None, :, :], g[..., None, :, :]
        return thin.fit(*parts, _RIDGE, interpret=implementation == "interpret")[0]
    largest = jnp.max(jnp.diagonal(g, axis1=-2, axis2=-1), axis=-1)[..., None, None]
    largest = jnp.where(largest == 0, 1, largest)

    def divided(g: jax.Array, s: jax.Array) -> jax.Array:
        lower = _cholesky(g, _RIDGE)
        return _divide(_divide(s, lower, transpose=True), lower, transpose=False)

    return _one_by_one(divided, g / largest, s / largest)


def warm_start(w: jax.Array, fixed: jax.Array) -> jax.Array:
    """Return the Q of the next message: this message's W with columns of unit length, plus a little of a fixed one.

    Args:
        w: right factor [*, k, r] of this message, float32.
        fixed: random right factor [*, k, r], the same for all messages, float32.
    """
    return _unit(w) + _MIX * fixed


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


class Method(NamedTuple):
    """The computation of a message's factors, and their dtype on the wire.

    Attributes:
        factors: dtype on the wire, one of FACTORS.
        implementation: one of kernels.IMPLEMENTATIONS.
    """

    factors: str
    implementation: str = "xla"


class Half(NamedTuple):
    """One of a message's factors.

    Attributes:
        wire: factor as it crosses the link.
        thin: factor [n, r] as sender and receiver multiply it.
        kept: factor that a lazy error keeps, which an inactive message leaves as it was; None without a lazy error.
    """

    wire: Factor
    thin: jax.Array
    kept: jax.Array | None


def _half(x: jax.Array, factors: str, old: jax.Array | None, active: jax.Array | bool) -> Half:
    """Return a factor x [n, r] as a half; the other arguments are those of `left`."""
    wire = quantise(x, factors)
    values = dequantise(wire)
    return Half(wire, values, None if old is None else jnp.where(active, values, old))


def left(parts: jax.Array, method: Method, old: jax.Array | None = None, active: jax.Array | bool = True) -> Half:
    """Return the left factor of a message.

    Args:
        parts: partial sums [parts, n, r] of M Q, as `kernels.project` returns them.
        method: how the factors are computed and sent.
        old: left factor [n, r] that a lazy error kept of the previous message.
        active: if it is False, `old` is kept, bit for bit.
    """
    factors, implementation = method
    if not uses_kernels(implementation):
        return _half(precondition(parts.sum(-3)), factors, old, active)
    shift, interpret = _shift(parts.shape[-1]), implementation == "interpret"
    if factors == "int8":  # whose scales are known only after all columns are
        return _half(thin.left(parts, shift, jnp.float32, interpret=interpret)[0], factors, old, active)
    p, kept = thin.left(parts, shift, jnp.dtype(factors), old, active, interpret=interpret)
    wire = Factor(p)
    return Half(wire, dequantise(wire), kept)


def right(
    s: jax.Array,
    g: jax.Array,
    q: jax.Array,
    first: jax.Array,
    method: Method,
    old: jax.Array | None = None,
    active: jax.Array | bool = True,
) -> tuple[Half, jax.Array]:
    """Return the right factor of a message, and the Q [k, r] of the next one.

    Args:
        s: partial sums [parts, k, r] of M^T P, as `kernels.backproject` returns them.
        g: partial sums [parts, r, r] of P^T P; further rows are ignored.
        q: right factor [k, r] from which this message started.
        first: right factor [k, r] of the first message.
        method: how the factors are computed and sent.
        old: right factor [k, r] that a lazy error kept of the previous message.
        active: if it is False, `old` and `q` are kept, bit for bit.
    """
    factors, implementation = method
    if not uses_kernels(implementation):
        fitted = solve(s.sum(-3), g.sum(-3))
        following = warm_start(fitted, first.astype(jnp.float32)).astype(q.dtype)
        return _half(fitted, factors, old, active), jnp.where(active, following, q)
    interpret = implementation == "interpret"
    fit = thin.fit(s, g, _RIDGE, interpret=interpret)
    if factors == "int8":
        half = _half(fit.w, factors, old, active)
        return half, thin.right(fit, first, q, _MIX, active=active, interpret=interpret)[0]
    dtype = jnp.dtype(factors)
    q, sent, kept = thin.right(fit, first, q, _MIX, dtype=dtype, old=old, active=active, interpret=interpret)
    assert sent is not None, "a dtype sends w"
    wire = Factor(sent)
    return Half(wire, dequantise(wire), kept), q
