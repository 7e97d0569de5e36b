"""The base of codecs that round a message, block by block, and may add the error to the next one."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from compress.codec import Codec, Like, Wire

LARGEST_BLOCK = 65536


class Rounding(Codec):
    """Codec whose wire is a rounding of the message plus the error of earlier ones.

    A codec derived from it is a dataclass with the field `feedback`, and has `rounded` and `decode`.

    Attributes:
        feedback: whether the rounding error is added to the next message. It costs the memory of a message, or of the
            gradients.
    """

    feedback: bool

    def rounded(self, x: jax.Array) -> Wire:
        """Return the wire of float32 numbers of any shape."""
        raise NotImplementedError

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array | tuple[()]:
        """Return zeros, the error of earlier messages, or () without feedback; see `Codec.init`."""
        return jnp.zeros(shape, dtype) if self.feedback else ()

    def encode(
        self, state: jax.Array | tuple[()], x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[Wire, jax.Array | tuple[()]]:
        """Return the rounding of x plus the error of earlier messages, and the next error; see `Codec.encode`."""
        whole = x.astype(jnp.float32)
        if isinstance(state, jax.Array):
            whole = whole + state.astype(jnp.float32)
        wire = self.rounded(whole)
        if not isinstance(state, jax.Array):
            return wire, state
        left = (whole - self.decode(wire, x).astype(jnp.float32)).astype(x.dtype)
        return wire, jnp.where(active, left, state)

    def residual(self, state: jax.Array | tuple[()], like: Like) -> jax.Array:
        """Return the error of earlier messages; see `Codec.residual`."""
        return state if isinstance(state, jax.Array) else jnp.zeros(like.shape, like.dtype)


def require_block(block: int, least: int) -> None:
    """Require that a block has a multiple of some numbers, and not too many.

    Args:
        block: numbers of a block.
        least: number of which it must be a multiple.

    Raises:
        ValueError: it has not.
    """
    if not least <= block <= LARGEST_BLOCK or block % least:
        even = "even" if least == 2 else f"a multiple of {least}"
        raise ValueError(f"block must be {even}, at least {least} and at most {LARGEST_BLOCK}, got {block}")


def in_blocks(x: jax.Array, block: int) -> jax.Array:
    """Return numbers as blocks [blocks, block], the last one filled with zeros."""
    return jnp.pad(x.reshape(-1), (0, -x.size % block)).reshape(-1, block)


def from_blocks(blocks: jax.Array, like: Like) -> jax.Array:
    """Return float32 numbers [blocks, block] in the shape of `like`, rounded to its dtype."""
    flat = blocks.reshape(-1)[: math.prod(like.shape)]
    if like.dtype == jnp.bfloat16:
        # XLA may drop a conversion there and back; reduce_precision stays.
        flat = lax.reduce_precision(flat, exponent_bits=8, mantissa_bits=7)
    return flat.astype(like.dtype).reshape(like.shape)


def safe_scale(scale: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return scales [blocks] in bfloat16, nan for blocks with a number that is not finite.

    The product of a bfloat16 and a code of few bits is exact in float32, so that all programs decode to the same bits.
    """
    # On CPUs the largest of some numbers and nan may be a number, and a code is one in any case.
    return jnp.where(jnp.isfinite(blocks).all(axis=1), scale.astype(jnp.bfloat16), jnp.nan)
