"""The passes over whole matrices that low-rank compression needs.

Everything else in compress/ works on thin factors. Shapes: a message x or matrix m [*, n, k], factors p [*, n, r] and
q, w [*, k, r], any leading dims. Products accumulate in float32. A thin factor's dtype decides the precision: float32
factors are multiplied in full float32, bfloat16 ones as the tensor cores do it (m is rounded to bfloat16 for that).

`implementation` is "xla" (plain jnp), "triton" (compress/triton.py's kernels for NVIDIA GPUs), or "interpret": the same
kernels run by Pallas's interpreter on any device, too slow for anything but a test of them. Sender and receiver of a
message, and a `Lazy` error, must use the same one: the last bits of p w^T depend on it.

Where `active` (a traced scalar) is False, the state that a pass updates comes back as it was, bit for bit: of an error
its first array, of `residual` its m. With "triton" that state is updated in place wherever XLA sees no later use of it,
and an inactive pass moves no matrix at all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import triton

LARGEST_RANK = triton.LARGEST_RANK  # of "triton" and "interpret"
IMPLEMENTATIONS = ("xla", "triton", "interpret")


class Explicit(NamedTuple):
    """The error that the previous message left: e [*, n, k]."""

    e: jax.Array


class Lazy(NamedTuple):
    """The same error as m - decode(p, w), not yet formed: m [*, n, k], p [*, n, r], w [*, k, r]."""

    m: jax.Array
    p: jax.Array
    w: jax.Array


Error = Explicit | Lazy | None


def _kernels(implementation: str) -> bool:
    """Whether it takes compress/triton.py's kernels."""
    if implementation not in IMPLEMENTATIONS:
        raise ValueError(f"unknown implementation {implementation!r}; known are {', '.join(IMPLEMENTATIONS)}")
    return implementation != "xla"


def _dot(a: jax.Array, b: jax.Array, contract: tuple[int, int]) -> jax.Array:
    """Batched product of a and b over one of their last two dims each (-1 or -2), in float32."""
    batch = tuple(range(a.ndim - 2))
    dims = ((a.ndim + contract[0],), (b.ndim + contract[1],)), (batch, batch)
    thin = b.dtype
    precision = lax.Precision.HIGHEST if thin == jnp.float32 else None
    return lax.dot_general(a.astype(thin), b, dims, precision=precision, preferred_element_type=jnp.float32)


def _add(a: jax.Array, b: jax.Array) -> jax.Array:
    """a + b, added in float32, in a's dtype."""
    return (a.astype(jnp.float32) + b.astype(jnp.float32)).astype(a.dtype)


def decode(p: jax.Array, w: jax.Array, dtype: jnp.dtype, *, implementation: str = "xla") -> jax.Array:
    """p w^T in `dtype`, really rounded to it: the sender's error and the receiver's value see the same bits."""
    if _kernels(implementation):
        return triton.decode(p, w, dtype, interpret=implementation == "interpret")
    product = _dot(p, w, (-1, -1))
    if dtype == jnp.bfloat16:
        # XLA may drop a conversion there and back; reduce_precision stays.
        product = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    return product.astype(dtype)


def residual(
    m: jax.Array, p: jax.Array, w: jax.Array, active: jax.Array | bool = True, *, implementation: str = "xla"
) -> jax.Array:
    """m - decode(p, w), in m's dtype: the error update; inactive, m."""
    if _kernels(implementation):
        return triton.residual(m, p, w, active, interpret=implementation == "interpret")
    e = _add(m, -decode(p, w, m.dtype))
    return e if active is True else jnp.where(active, e, m)


def project(
    x: jax.Array,
    q: jax.Array,
    error: Error = None,
    active: jax.Array | bool = True,
    *,
    keep: bool = False,
    implementation: str = "xla",
) -> tuple[jax.Array, jax.Array]:
    """First pass: m = x + error in x's dtype, and m q [*, n, r] in float32.

    `keep` says that the error's first array is needed later as well (not with `active`): m then takes another place,
    which spares a copy. Inactive, m is the error's first array (Explicit.e or Lazy.m; without an error it is x), and
    m q is scrap.
    """
    if _kernels(implementation):
        interpret = implementation == "interpret"
        return triton.project(x, q, *(error or ()), active=active, keep=keep, interpret=interpret)
    m = x
    if error is not None:
        m = _add(x, residual(*error) if isinstance(error, Lazy) else error.e)
        m = m if active is True else jnp.where(active, m, error[0])
    return m, _dot(m, q, (-1, -2))


def backproject(m: jax.Array, p: jax.Array, *, implementation: str = "xla") -> tuple[jax.Array, jax.Array]:
    """Second pass: m^T p [*, k, r] and p^T p [*, r, r], both in float32."""
    if _kernels(implementation):
        return triton.backproject(m, p, interpret=implementation == "interpret")
    # Kept apart: XLA would make one product of both, for which it copies all of m beside p.
    own = lax.optimization_barrier(p)
    return _dot(m, p, (-2, -2)), _dot(own, own, (-2, -2))
