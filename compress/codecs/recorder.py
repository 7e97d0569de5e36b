"""A codec around another one that keeps a record of the last messages, for studies."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from compress.codec import Codec, Crossing, Like, Passes, State, Wire


class Record(NamedTuple):
    """State of a Recorder, which keeps call i at i % capacity.

    Attributes:
        inner: state of the recorded codec.
        calls: number of calls of `encode` so far, int32 [].
        active: whether each call in the record sent a message, bool [capacity].
        given: [capacity, *shape] messages as the sender had them; anything where a call sent none.
        decoded: [capacity, *shape] messages as the receiver decodes them, likewise.
        residual: [capacity, *shape] the inner codec's residual after each message, likewise.
    """

    inner: State
    calls: jax.Array
    active: jax.Array
    given: jax.Array
    decoded: jax.Array
    residual: jax.Array

    @property
    def slots(self) -> np.ndarray:
        """Slots of the messages in the record of one link, the oldest first."""
        active = np.asarray(self.active)
        every = (int(self.calls) + np.arange(len(active))) % len(active)
        return every[active[every]]


@dataclasses.dataclass(frozen=True)
class Recorder(Codec):
    """Codec that sends what another codec sends, and records the last messages in its state.

    Attributes:
        codec: codec whose messages are recorded.
        capacity: number of calls in the record.
        axes: axes of the mesh, all of whose devices call `encode` together; on those that vmap emulates, their slots
            are known to be the same.
    """

    codec: Codec
    capacity: int
    axes: tuple[str, ...] = ()

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> Record:
        """Return the inner codec's state and an empty record."""
        empty = jnp.zeros((self.capacity, *shape), dtype)
        inner = self.codec.init(shape, dtype)
        return Record(inner, jnp.int32(0), jnp.zeros(self.capacity, bool), empty, empty, empty)

    def encode(self, state: Record, x: jax.Array, active: jax.Array | bool = True) -> tuple[Wire, Record]:
        """Return the inner codec's wire, and the record with the message if it is active; see `Codec.encode`."""
        wire, inner = self.codec.encode(state.inner, x, active)
        slot = self._same(state.calls) % self.capacity

        def write(ring: jax.Array, value: jax.Array | bool) -> jax.Array:
            return lax.dynamic_update_index_in_dim(ring, jnp.asarray(value, ring.dtype), slot, 0)

        return wire, Record(
            inner,
            state.calls + 1,
            write(state.active, active),
            write(state.given, x),
            write(state.decoded, self.codec.decode(wire, x)),
            write(state.residual, self.codec.residual(inner, x)),
        )

    def _same(self, calls: jax.Array) -> jax.Array:
        """Return a number that all devices have, as one that vmap knows to be the same.

        It is the index of an update in place then. With an index for each device the update would be a loop over the
        devices, which copies the record.
        """
        real = jax.sharding.get_abstract_mesh().manual_axes
        return lax.pmax(calls, self.axes) if self.axes and self.axes[0] not in real else calls

    def decode(self, wire: Wire, like: Like) -> jax.Array:
        """Return the message that the inner codec decodes."""
        return self.codec.decode(wire, like)

    def residual(self, state: Record, like: Like) -> jax.Array:
        """Return the inner codec's residual."""
        return self.codec.residual(state.inner, like)

    def exchange(self, wire: Wire, crossing: Crossing) -> Wire:
        """Exchange the wire as the inner codec does; see `Codec.exchange`."""
        return self.codec.exchange(wire, crossing)

    def on_link(self, state: Record, sender: jax.Array | int) -> Record:
        """Return an empty record with the inner codec's state of one link; see `Codec.on_link`."""
        return state._replace(inner=self.codec.on_link(state.inner, sender))

    def passes(self) -> Passes:
        """Return what the inner codec costs."""
        return self.codec.passes()
