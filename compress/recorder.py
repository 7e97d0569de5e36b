"""A codec around another one that keeps a record of the last messages, for studies."""

import dataclasses
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from compress.codec import Codec, Like


@runtime_checkable
class RecordableCodec(Codec, Protocol):
    """Codec that can also return the error that it still has to send."""

    def residual(self, state: Any, like: Like) -> jax.Array:
        """Return the error of earlier messages, which the next one will bring, in like's shape and dtype."""


class Record(NamedTuple):
    """State of a Recorder, which keeps message i at i % capacity.

    Attributes:
        inner: state of the recorded codec.
        seen: number of active messages so far, int32 [].
        given: [capacity, *shape] messages as the sender had them.
        decoded: [capacity, *shape] messages as the receiver decodes them.
        residual: [capacity, *shape] the inner codec's residual after each message.
    """

    inner: Any
    seen: jax.Array
    given: jax.Array
    decoded: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Codec that sends what another codec sends, and records the last messages in its state.

    Attributes:
        codec: codec whose messages are recorded.
        capacity: number of messages in the record.
    """

    codec: RecordableCodec
    capacity: int

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> Record:
        """Return the inner codec's state and an empty record."""
        empty = jnp.zeros((self.capacity, *shape), dtype)
        return Record(self.codec.init(shape, dtype), jnp.int32(0), empty, empty, empty)

    def encode(self, state: Record, x: jax.Array, active: jax.Array | bool = True) -> tuple[Any, Record]:
        """Return the inner codec's wire, and the record with the message if it is active.

        Args:
            state: record of the link.
            x: message of the link.
            active: whether the message is sent, bool [].
        """
        wire, inner = self.codec.encode(state.inner, x, active)
        slot = state.seen % self.capacity

        def write(ring: jax.Array, value: jax.Array) -> jax.Array:
            return ring.at[slot].set(jnp.where(active, value, ring[slot]))

        return wire, Record(
            inner,
            state.seen + jnp.asarray(active, jnp.int32),
            write(state.given, x),
            write(state.decoded, self.codec.decode(wire, x)),
            write(state.residual, self.codec.residual(inner, x)),
        )

    def decode(self, wire: Any, like: Like) -> jax.Array:
        """Return the message that the inner codec decodes."""
        return self.codec.decode(wire, like)

    def residual(self, state: Record, like: Like) -> jax.Array:
        """Return the inner codec's residual."""
        return self.codec.residual(state.inner, like)
