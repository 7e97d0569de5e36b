"""The codec `Signs`: a bit for each number, and the mean size of each block."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from compress.codec import Like, Passes
from compress.codecs.rounding import Rounding, from_blocks, in_blocks, require_block, safe_scale

_BYTE = 8


class SignWire(NamedTuple):
    """Message on the wire, as blocks of n numbers.

    Attributes:
        bits: whether numbers are not negative, the first in the lowest bit, uint8 [blocks, n / 8].
        scale: mean of the block's absolute numbers, bfloat16 [blocks].
    """

    bits: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Signs(Rounding):
    """Codec that sends the signs of a block's numbers and the mean of their absolute values.

    Attributes:
        block: numbers of a block, a multiple of 8; the last block is filled with zeros.
        feedback: whether what is left out is added to the next message. Without it training does not converge in
            general.

    Raises:
        ValueError: the block is out of bounds, or no multiple of 8.

    References:
        Seide et al. 2014, 1-Bit Stochastic Gradient Descent. Karimireddy et al. 2019, Error Feedback Fixes SignSGD: the
        mean as scale makes it a contraction. Tang et al. 2021, 1-bit Adam.
    """

    block: int = 256
    feedback: bool = True

    def __post_init__(self) -> None:
        require_block(self.block, _BYTE)

    def rounded(self, x: jax.Array) -> SignWire:
        """Return the signs and scales of float32 numbers of any shape."""
        blocks = in_blocks(x, self.block)
        # Zeros that fill the last block are no part of its mean.
        count = np.clip(x.size - self.block * np.arange(len(blocks)), 1, self.block).astype(np.float32)
        scale = safe_scale(jnp.sum(jnp.abs(blocks), axis=1) / count, blocks)
        positive = (blocks >= 0).reshape(len(blocks), -1, _BYTE).astype(jnp.uint8)
        bits = (positive << jnp.arange(_BYTE, dtype=jnp.uint8)).sum(axis=-1, dtype=jnp.uint8)
        return SignWire(bits, scale)

    def decode(self, wire: SignWire, like: Like) -> jax.Array:
        """Return the scale with each number's sign, rounded to the dtype; see `Codec.decode`."""
        positive = (wire.bits[..., None] >> jnp.arange(_BYTE, dtype=jnp.uint8)) & 1
        scale = wire.scale.astype(jnp.float32)[:, None]
        return from_blocks(jnp.where(positive.reshape(len(wire.scale), -1) == 1, scale, -scale), like)

    def passes(self) -> Passes:
        """Return the reads for scales and for signs; with feedback of the error as well, and both again to write it."""
        return Passes(encode=7, decode=1, launches=4) if self.feedback else Passes(encode=2, decode=1, launches=3)
