"""The codec `QuantisedBlocks`: blocks of numbers as 8 or 4 bits each, with one scale for a block."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from compress.codec import Like, Passes
from compress.codecs.rounding import Rounding, from_blocks, in_blocks, require_block, safe_scale

BITS = (4, 8)


class QuantisedWire(NamedTuple):
    """Message on the wire, as blocks of n numbers.

    Attributes:
        codes: int8 [blocks, n]; or two numbers of 4 bits in a byte, uint8 [blocks, n / 2].
        scale: bfloat16 [blocks].
    """

    codes: jax.Array
    scale: jax.Array


def _hadamard(n: int) -> np.ndarray:
    """Return the orthonormal and symmetric Hadamard matrix [n, n] of a power of two."""
    h = np.ones((1, 1), np.float32)
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return (h / np.sqrt(n)).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class QuantisedBlocks(Rounding):
    """Codec that rounds numbers to 4 or 8 bits, with a scale for each block: its largest number over 7 or 127.

    Attributes:
        bits: 4 or 8.
        block: numbers of a block; the last block is filled with zeros.
        feedback: whether the rounding error is added to the next message. It costs the memory of a message, or of the
            gradients.
        rotate: whether a block is multiplied with a Hadamard matrix before it is rounded, and again after. That spreads
            a number that is much larger than the others over its block.

    Raises:
        ValueError: the bits are neither, the block is odd or out of bounds, or it is rotated and no power of two.

    References:
        Dettmers et al. 2022, 8-bit Optimizers via Block-wise Quantization. Wang et al. 2023, ZeRO++. Jia et al. 2024,
        SDP4Bit: Hadamard rotation of 4-bit gradients. He et al. 2025, TAH-Quant: activations between stages.
    """

    bits: int = 8
    block: int = 64
    feedback: bool = True
    rotate: bool = False

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"bits must be 4 or 8, got {self.bits}")
        require_block(self.block, 2)
        if self.rotate and self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two to be rotated, got {self.block}")

    @property
    def _largest(self) -> int:
        """Largest code."""
        return 2 ** (self.bits - 1) - 1

    def rounded(self, x: jax.Array) -> QuantisedWire:
        """Return the codes and scales of float32 numbers of any shape."""
        blocks = in_blocks(x, self.block)
        if self.rotate:
            blocks = jnp.matmul(blocks, _hadamard(self.block), precision=lax.Precision.HIGHEST)
        scale = safe_scale(jnp.max(jnp.abs(blocks), axis=1) / self._largest, blocks)
        divisor = scale.astype(jnp.float32)[:, None]
        codes = jnp.round(blocks / jnp.where(divisor == 0, 1, divisor))
        codes = jnp.clip(codes, -self._largest, self._largest).astype(jnp.int8)
        return QuantisedWire(codes if self.bits == 8 else _packed(codes), scale)

    def decode(self, wire: QuantisedWire, like: Like) -> jax.Array:
        """Return codes times scales, rounded to the dtype; see `Codec.decode`."""
        codes = wire.codes if self.bits == 8 else _unpacked(wire.codes)
        blocks = codes.astype(jnp.float32) * wire.scale.astype(jnp.float32)[:, None]
        if self.rotate:
            # The barrier keeps the product by itself, so that sender and receiver add up in the same order.
            blocks = lax.optimization_barrier(blocks)
            blocks = jnp.matmul(blocks, _hadamard(self.block), precision=lax.Precision.HIGHEST)
            blocks = lax.optimization_barrier(blocks)
        return from_blocks(blocks, like)

    def passes(self) -> Passes:
        """Return the reads for scales and for codes, of the error as well, its write, and the codes' own bytes.

        XLA packs codes of 4 bits in a kernel by itself, which reads message and error once more. It keeps a rotated
        message, before and after the product, as float32 arrays.
        """
        encode, decode, launches = (2.5, 1.5, 3) if self.bits == 8 else (2.25, 1.25, 3)
        if self.feedback:
            encode, launches = (5.5, 3) if self.bits == 8 else (7.5, 4)
        if self.rotate:
            encode, decode, launches = encode + (8 if self.feedback else 3), decode + 2, launches + 5
        return Passes(encode, decode, launches)


def _packed(codes: jax.Array) -> jax.Array:
    """Return int8 codes [blocks, n] of 4 bits as bytes [blocks, n / 2]: the first half of a block in the low bits."""
    low, high = jnp.split(lax.bitcast_convert_type(codes, jnp.uint8), 2, axis=1)
    return (low & 15) | (high << 4)


def _unpacked(packed: jax.Array) -> jax.Array:
    """Return the int8 codes [blocks, n] that `_packed` has put into bytes."""
    both = jnp.concatenate([packed << 4, packed & 0xF0], axis=1)
    return lax.bitcast_convert_type(both, jnp.int8) >> 4  # which repeats the sign bit
