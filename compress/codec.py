"""Codecs: what stands between a value and the link that it crosses.

A codec is a triple of pure functions over explicit state, one state per directed link:

    init(shape, dtype) -> state
    encode(state, x) -> (wire, state)      wire: a pytree of arrays, all that crosses the link
    decode(wire) -> x

Sender and receiver see the same wire, so both can form the same decoded x.
"""

from typing import Any, NamedTuple, Protocol

import jax


class Codec(Protocol):
    """What the pipeline asks of a codec."""

    def init(self, shape: tuple[int, ...], dtype: Any) -> Any: ...

    def encode(self, state: Any, x: jax.Array) -> tuple[Any, Any]: ...

    def decode(self, wire: Any) -> jax.Array: ...


class Identity(NamedTuple):
    """Sends x as it is and keeps no state."""

    def init(self, shape: tuple[int, ...], dtype: Any) -> tuple[()]:
        return ()

    def encode(self, state: tuple[()], x: jax.Array) -> tuple[jax.Array, tuple[()]]:
        return x, state

    def decode(self, wire: jax.Array) -> jax.Array:
        return wire
