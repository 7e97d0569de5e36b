"""The codec `LowRankRemainder`: two thin factors, and what they leave out in few bits."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from compress.codec import Codec, Like, Passes, State
from compress.codecs.quantised import QuantisedBlocks, QuantisedWire
from compress.lowrank import LowRank, LowRankState, LowRankWire


class RemainderState(NamedTuple):
    """State of a link.

    Attributes:
        low: state of the factors.
        error: error of earlier messages; () without feedback.
    """

    low: LowRankState
    error: State


class RemainderWire(NamedTuple):
    """Message on the wire: the factors, and the codes of what they leave out."""

    low: LowRankWire
    rest: QuantisedWire


@dataclasses.dataclass(frozen=True)
class LowRankRemainder(Codec):
    """Codec that sends a message as factors of low rank, and what they leave out as blocks of 4 or 8 bits.

    The factors carry the few directions that are much larger than the others, which would take all codes of a block.

    Attributes:
        rank: columns of the factors.
        bits: bits of a number of the remainder, 4 or 8.
        block: numbers of a block of the remainder.
        feedback: whether the error is added to the next message. It costs the memory of a message, or of the gradients.
        factors: dtype of the factors on the wire: "float32", "bfloat16" or "int8".

    Raises:
        ValueError: an option is out of bounds.

    References:
        Kang et al. 2024, GEAR: low rank and few bits together, for the keys and values of attention.
    """

    rank: int = 4
    bits: int = 4
    block: int = 64
    feedback: bool = True
    factors: str = "bfloat16"

    def __post_init__(self) -> None:
        self._parts()

    def _parts(self) -> tuple[LowRank, QuantisedBlocks]:
        """Return the codecs of the factors and of the remainder, which keep no error."""
        low = LowRank(self.rank, error="none", factors=self.factors)
        return low, QuantisedBlocks(self.bits, self.block, feedback=False)

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> RemainderState:
        """Return the first factors, and zeros for the error of earlier messages; see `Codec.init`.

        Raises:
            ValueError: the rank is above the smaller side of a message.
        """
        low, _ = self._parts()
        return RemainderState(low.init(shape, dtype), jnp.zeros(shape, dtype) if self.feedback else ())

    def encode(
        self, state: RemainderState, x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[RemainderWire, RemainderState]:
        """Return factors and codes of x plus the error of earlier messages, and the next state; see `Codec.encode`."""
        low, rest = self._parts()
        whole = x + state.error if self.feedback else x
        factors, next_low = low.encode(state.low, whole, active)
        left = whole.astype(jnp.float32) - low.decode(factors, _wide(x)).astype(jnp.float32)
        codes, _ = rest.encode((), left)
        wire = RemainderWire(factors, codes)
        if not self.feedback:
            return wire, RemainderState(next_low, ())
        error = (whole.astype(jnp.float32) - self.decode(wire, x).astype(jnp.float32)).astype(x.dtype)
        return wire, RemainderState(next_low, jnp.where(active, error, state.error))

    def decode(self, wire: RemainderWire, like: Like) -> jax.Array:
        """Return the product of the factors plus the remainder, rounded to the dtype; see `Codec.decode`."""
        low, rest = self._parts()
        # The barrier keeps the sum apart from the products, so that sender and receiver form the same bits.
        parts = lax.optimization_barrier((low.decode(wire.low, _wide(like)), rest.decode(wire.rest, _wide(like))))
        total = parts[0] + parts[1]
        if like.dtype == jnp.bfloat16:
            total = lax.reduce_precision(total, exponent_bits=8, mantissa_bits=7)
        return total.astype(like.dtype)

    def residual(self, state: RemainderState, like: Like) -> jax.Array:
        """Return the error of earlier messages; see `Codec.residual`."""
        return state.error if self.feedback else jnp.zeros(like.shape, like.dtype)

    def passes(self) -> Passes:
        """Return the passes of both codecs, and of what they exchange as float32 arrays: remainder, and both parts."""
        low, rest = (part.passes() for part in self._parts())
        encode, decode = low.encode + rest.encode + 3.5, low.decode + rest.decode + 2.5
        if self.feedback:
            encode += decode + 4.5  # the sum with the error, which is kept; and the message decoded, for the next error
        return Passes(encode, decode, low.launches + rest.launches + 10)


def _wide(like: Like) -> jax.ShapeDtypeStruct:
    """Return the shape of a message in float32."""
    return jax.ShapeDtypeStruct(like.shape, jnp.float32)
