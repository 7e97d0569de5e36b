"""A codec around another one that keeps a record of the last messages, for studies."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from compress.codec import Codec, Crossing, Like, Passes, State, Wire


class Record(NamedTuple):
    """State of a Recorder, which keeps message i at i % capacity.

    Attributes:
        inner: state of the recorded codec.
        seen: number of active messages so far, int32 [].
        given: [capacity, *shape] messages as the sender had them.
        decoded: [capacity, *shape] messages as the receiver decodes them.
        residual: [capacity, *shape] the inner codec's residual after each message.
    """

    inner: State
    seen: jax.Array
    given: jax.Array
    decoded: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Recorder(Codec):
    """Codec that sends what another codec sends, and records the last messages in its state.

    Attributes:
        codec: codec whose messages are recorded.
        capacity: number of messages in the record.
    """

    codec: Codec
    capacity: int

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> Record:
        """Return the inner codec's state and an empty record."""
        empty = jnp.zeros((self.capacity, *shape), dtype)
        return Record(self.codec.init(shape, dtype), jnp.int32(0), empty, empty, empty)

    def encode(self, state: Record, x: jax.Array, active: jax.Array | bool = True) -> tuple[Wire, Record]:
        """Return the inner codec's wire, and the record with the message if it is active.

        Args:
            state: record of the link.
            x: message of the link.
            active: whether the message is sent, bool [].
        """
        wire, inner = self.codec.encode(state.inner, x, active)
        here = active & (jnp.arange(self.capacity) == state.seen % self.capacity)

        def write(ring: jax.Array, value: jax.Array) -> jax.Array:
            # Slots differ between devices. On an emulated mesh an update would be a scatter, which copies the ring.
            return jnp.where(here.reshape(-1, *[1] * value.ndim), value, ring)

        return wire, Record(
            inner,
            state.seen + jnp.asarray(active, jnp.int32),
            write(state.given, x),
            write(state.decoded, self.codec.decode(wire, x)),
            write(state.residual, self.codec.residual(inner, x)),
        )

    def decode(self, wire: Wire, like: Like) -> jax.Array:
        """Return the message that the inner codec decodes."""
        return self.codec.decode(wire, like)

    def residual(self, state: Record, like: Like) -> jax.Array:
        """Return the inner codec's residual."""
        return self.codec.residual(state.inner, like)

    def exchange(self, wire: Wire, crossing: Crossing) -> Wire:
        """Exchange the wire as the inner codec does.

        Args:
            wire: wire that `encode` returned on this stage.
            crossing: links to cross.
        """
        return self.codec.exchange(wire, crossing)

    def on_link(self, state: Record, sender: jax.Array | int) -> Record:
        """Return an empty record with the inner codec's state of one link; see `Codec.on_link`."""
        return state._replace(inner=self.codec.on_link(state.inner, sender))

    def passes(self) -> Passes:
        """Return what the inner codec costs."""
        return self.codec.passes()
