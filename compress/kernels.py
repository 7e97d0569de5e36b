"""The passes over whole matrices that low-rank compression needs: public ops and their jnp reference.

    project      m = x + error and m q      first pass of an encoder
    backproject  m^T p and p^T p            second pass of an encoder
    residual     m - p w^T                  the error of a message
    decode       p w^T                      the matrix that the receiver forms

Everything else in compress/ works on thin factors. A message x or matrix m is [*, n, k], a factor p is [*, n, r], and
factors q and w are [*, k, r], with any leading dims. Products accumulate in float32. A thin factor's dtype decides the
precision: float32 factors are multiplied in full float32, bfloat16 ones as tensor cores do it, with m rounded to
bfloat16.

`implementation` is one of these. "xla" is plain jnp. "triton" are compress/gpu/passes.py's kernels for NVIDIA GPUs, and
"interpret" the same kernels in Pallas's interpreter, for tests on any device. Sender and receiver of a message, and a
`Lazy` error, must use the same implementation: the last bits of p w^T depend on it. `make gpu` compares their speed.

If `active` (a traced scalar) is False, a pass returns the state that it updates as it was, bit for bit. The state is an
error's first array, or the m of `residual`. "triton" updates it in place if XLA sees no later use of it, and an
inactive pass moves no matrix at all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.gpu import passes

IMPLEMENTATIONS = ("xla", "triton", "interpret")


class Explicit(NamedTuple):
    """Error that the previous message left.

    Attributes:
        e: error [*, n, k].
    """

    e: jax.Array


class Lazy(NamedTuple):
    """The same error, not yet formed: m - decode(p, w).

    Attributes:
        m: matrix that was to be sent [*, n, k].
        p: left factor of the message [*, n, r].
        w: right factor of the message [*, k, r].
    """

    m: jax.Array
    p: jax.Array
    w: jax.Array


Error = Explicit | Lazy | None


def uses_kernels(implementation: str) -> bool:
    """Return whether an implementation uses the kernels of compress/gpu.

    Raises:
        ValueError: the implementation is unknown.
    """
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known are {', '.join(IMPLEMENTATIONS)}")
    return implementation != "xla"


def largest_kernel_rank(capability: float) -> int:
    """Return the largest rank that the kernels take on a GPU: an A100 has less shared memory than those after it."""
    return passes.LARGEST_RANK if capability >= 9 else 64


def on_gpu(capability: float) -> tuple[str, ...]:
    """Return the implementations that a GPU of a CUDA compute capability runs, the best first.

    The kernels are laid out for data-centre GPUs.
    """
    return ("triton", "xla") if 8 <= capability < 11 else ("xla",)


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Return the batched product of a and b over one of their last two dims each (-1 or -2), in float32."""
    batch = tuple(range(a.ndim - 2))
    dims = ((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)
    thin = b.dtype
    precision = lax.Precision.HIGHEST if thin == jnp.float32 else None
    return lax.dot_general(a.astype(thin), b, dims, precision=precision, preferred_element_type=jnp.float32)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a + b, added in float32, in a's dtype."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def decode(p: jax.Array, w: jax.Array, dtype: jnp.dtype, *, implementation: str = "xla") -> jax.Array:
    """Return p w^T [*, n, k], rounded to `dtype`, with the same bits in the sender's error and on the receiver.

    Args:
        p: left factor [*, n, r].
        w: right factor [*, k, r].
        dtype: dtype of the result.
        implementation: one of IMPLEMENTATIONS.
    """
    if uses_kernels(implementation):
        return passes.decode(p, w, dtype, interpret=implementation == "interpret")
    product = _dot(p, w, (-1, -1))
    if dtype == jnp.bfloat16:
        # XLA may drop a conversion there and back; reduce_precision stays.
        product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    return product.astype(dtype)


def residual(
    m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True, *, implementation: str = "xla"
) -> jax.Array:
    """Return the part of m that the factors lose: m - decode(p, w), in m's dtype.

    Args:
        m: matrix [*, n, k].
        p: left factor [*, n, r].
        w: right factor [*, k, r].
        active: if it is False, m is returned, bit for bit.
        implementation: one of IMPLEMENTATIONS.
    """
    if uses_kernels(implementation):
        return passes.residual(m, p, w, active, interpret=implementation == "interpret")
    e = _add(m, -decode(p, w, m.dtype))
    return e if active is True else jnp.where(active, e, m)


def project(
    x: jax.Array,
    q: jax.Array,
    error: Error = None,
    active: jax.Array | bool = True,
    *,
    keep: bool = False,
    parts: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """Return the matrix to send, m = x + error, and its product m q.

    Args:
        x: message [*, n, k].
        q: right factor [*, k, r].
        error: error of earlier messages, [*, n, k]; None without error feedback.
        active: if it is False, m is the error's first array (Explicit.e or Lazy.m, or x without an error), and m q is
            meaningless.
        keep: whether the error's first array is needed later as well (not together with `active`); m then takes other
            memory, which saves a copy.
        parts: whether to return the product as partial sums, which the next computation adds up.
        implementation: one of IMPLEMENTATIONS.

    Returns:
        m [*, n, k] in x's dtype, and m q in float32, [*, n, r] or partial sums [*, parts, n, r].
    """
    if uses_kernels(implementation):
        operands: tuple[jax.Array, ...] = error or ()
        interpret = implementation == "interpret"
        m, sums = passes.project(x, q, *operands, active=active, keep=keep, interpret=interpret)
        return m, sums if parts else sums.sum(-3)
    m = x
    if error is not None:
        m = _add(x, residual(*error) if isinstance(error, Lazy) else error.e)
        m = m if active is True else jnp.where(active, m, error[0])
    product = _dot(m, q, (-1, -2))
    return m, product[..., None, :, :] if parts else product


def backproject(
    m: jax.Array, p: jax.Array, *, parts: bool = False, implementation: str = "xla"
) -> tuple[jax.Array, jax.Array]:
    """Return the products of the least-squares fit: m^T p [*, k, r] and p^T p [*, r, r], both in float32.

    Args:
        m: matrix [*, n, k].
        p: left factor [*, n, r].
        parts: whether to return them as partial sums [*, parts, k, r] and [*, parts, r, r], which the next computation
            adds up; the second may have further rows, of zeros.
        implementation: one of IMPLEMENTATIONS.
    """
    if uses_kernels(implementation):
        s, g = passes.backproject(m, p, interpret=implementation == "interpret")
        return (s, g) if parts else (s.sum(-3), g.sum(-3)[..., : p.shape[-1], :])
    # The barrier keeps the products apart: XLA would join them, and copy all of m beside p for that.
    own = lax.optimization_barrier(p)
    s, g = _dot(m, p, (-2, -2)), _dot(own, own, (-2, -2))
    return (s[..., None, :, :], g[..., None, :, :]) if parts else (s, g)
