"""The codec OnLinks: another codec on some links, and messages as they are on the others."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from compress.codec import Codec, Crossing, Like, Pairs, Passes, State, Wire, array_bytes


class LinkState(NamedTuple):
    """State of one link.

    Attributes:
        coded: whether the link's messages go through the codec, bool [].
        state: the codec's state.
    """

    coded: jax.Array
    state: State


class LinkWire(NamedTuple):
    """A message in both forms, of which only one crosses its link.

    Attributes:
        plain: the message.
        wire: the codec's wire.
        coded: which of them counts, bool []. It is no part of the message, since the receiver knows its links.
    """

    plain: jax.Array
    wire: Wire
    coded: jax.Array


@dataclasses.dataclass(frozen=True)
class _Some:
    """Some of the links that an exchange crosses."""

    whole: Crossing
    pairs: Pairs

    def send(self, wire: Wire, pairs: Pairs) -> Wire:
        return self.whole.send(wire, pairs)

    def receives(self, pairs: Pairs) -> jax.Array:
        return self.whole.receives(pairs)


@dataclasses.dataclass(frozen=True)
class OnLinks(Codec):
    """A codec on some links only.

    All stages run one program, so those whose messages travel as they are encode them, too; the links do not carry it.

    Attributes:
        codec: codec of these links.
        senders: whether each stage's messages go through it, by the sending stage.
    """

    codec: Codec
    senders: tuple[bool, ...]

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> LinkState:
        """Return the state of a link with the codec."""
        return LinkState(jnp.bool_(True), self.codec.init(shape, dtype))

    def on_link(self, state: LinkState, sender: jax.Array | int) -> LinkState:
        """Return the state of the sender's link; see `Codec.on_link`."""
        return LinkState(jnp.asarray(self.senders)[sender], self.codec.on_link(state.state, sender))

    def encode(self, state: LinkState, x: jax.Array, active: jax.Array | bool = True) -> tuple[LinkWire, LinkState]:
        """Return the message in both forms, and the state, which only coded links change; see `Codec.encode`."""
        wire, after = self.codec.encode(state.state, x, state.coded & active)
        return LinkWire(x, wire, state.coded), LinkState(state.coded, after)

    def exchange(self, wire: LinkWire, crossing: Crossing) -> LinkWire:
        """Send over each link the form that it carries; see `Codec.exchange`."""
        coded = tuple(pair for pair in crossing.pairs if self.senders[pair[0]])
        others = tuple(pair for pair in crossing.pairs if not self.senders[pair[0]])
        return LinkWire(
            plain=crossing.send(wire.plain, others) if others else wire.plain,
            wire=self.codec.exchange(wire.wire, _Some(crossing, coded)) if coded else wire.wire,
            coded=crossing.receives(coded) if coded else jnp.bool_(False),
        )

    def decode(self, wire: LinkWire, like: Like) -> jax.Array:
        """Return the message that arrived in either form."""
        return jnp.where(wire.coded, self.codec.decode(wire.wire, like), wire.plain)

    def residual(self, state: LinkState, like: Like) -> jax.Array:
        """Return what the codec left out; nothing on the other links. See `Codec.residual`."""
        left = self.codec.residual(state.state, like)
        return jnp.where(state.coded, left, jnp.zeros_like(left))

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Return the bytes of a message as it is, unless all links have the codec; see `Codec.wire_bytes`."""
        coded = self.codec.wire_bytes(shape, dtype)
        return coded if all(self.senders) else max(coded, array_bytes(shape, dtype))

    def passes(self) -> Passes:
        """Return what the codec costs."""
        return self.codec.passes()

    def problem(self, shape: tuple[int, ...], dtype: DTypeLike, min_ratio: float) -> str:
        """Return why messages should not go through the codec; see `Codec.problem`."""
        return self.codec.problem(shape, dtype, min_ratio)

    def describe(self, shape: tuple[int, ...], dtype: DTypeLike) -> str:
        """Return what the codec does; see `Codec.describe`."""
        return self.codec.describe(shape, dtype)
