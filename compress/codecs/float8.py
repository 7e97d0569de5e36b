"""The codec `Float8Blocks`: numbers as 8-bit floats, with a scale for each block."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Like, Passes
from compress.codecs.rounding import Rounding, from_blocks, in_blocks, require_block, safe_scale

# Largest numbers are those of the formats: 448 and 57344.
FORMATS = {"e4m3": jnp.float8_e4m3fn, "e5m2": jnp.float8_e5m2}


class Float8Wire(NamedTuple):
    """Message on the wire, as blocks of n numbers.

    Attributes:
        codes: bits of the 8-bit floats, uint8 [blocks, n].
        scale: bfloat16 [blocks].
    """

    codes: jax.Array
    scale: jax.Array


@dataclasses.dataclass(frozen=True)
class Float8Blocks(Rounding):
    """Codec that rounds numbers to 8-bit floats, after each block is scaled to the largest number of the format.

    Attributes:
        format: "e4m3" (4 bits of exponent and 3 of mantissa; for activations) or "e5m2" (for gradients, whose numbers
            differ more).
        block: numbers of a block; the last block is filled with zeros.
        feedback: whether the rounding error is added to the next message. It costs the memory of a message, or of the
            gradients.

    Raises:
        ValueError: the format is unknown, or the block is out of bounds.

    References:
        Micikevicius et al. 2022, FP8 Formats for Deep Learning. Peng et al. 2023, FP8-LM: gradients and their reduction
        in 8-bit floats.
    """

    format: str = "e4m3"
    block: int = 64
    feedback: bool = True

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format must be {' or '.join(FORMATS)}, got {self.format!r}")
        require_block(self.block, 1)

    def rounded(self, x: jax.Array) -> Float8Wire:
        """Return the codes and scales of float32 numbers of any shape."""
        blocks, kind = in_blocks(x, self.block), FORMATS[self.format]
        largest = float(jnp.finfo(kind).max)
        scale = safe_scale(jnp.max(jnp.abs(blocks), axis=1) / largest, blocks)
        divisor = scale.astype(jnp.float32)[:, None]
        # The scale is rounded, so a number may be a little above the largest, which these formats turn into nan or inf.
        codes = jnp.clip(blocks / jnp.where(divisor == 0, 1, divisor), -largest, largest).astype(kind)
        return Float8Wire(lax.bitcast_convert_type(codes, jnp.uint8), scale)

    def decode(self, wire: Float8Wire, like: Like) -> jax.Array:
        """Return codes times scales, rounded to the dtype; see `Codec.decode`."""
        codes = lax.bitcast_convert_type(wire.codes, FORMATS[self.format])
        return from_blocks(codes.astype(jnp.float32) * wire.scale.astype(jnp.float32)[:, None], like)

    def passes(self) -> Passes:
        """Return the reads for scales and for codes, of the error as well, its write, and the codes' own bytes."""
        return Passes(encode=5.5 if self.feedback else 2.5, decode=1.5, launches=3)
