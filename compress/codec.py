"""The interface of a codec, and the codec that changes nothing.

A codec stands between a value and the link that it crosses. It is pure functions over explicit state, like an optimizer
of optax. Each directed link between two pipeline stages has its own state:

    state = codec.init(shape, dtype)                    before the first message
    wire, state = codec.encode(state, x, active)        on the sender
    wire = codec.exchange(wire, crossing)               over the link
    x = codec.decode(wire, like)                        on the receiver

The wire is a pytree of arrays, and is all that crosses the link. Sender and receiver see the same wire, so both can
form the same decoded bits. docs/codecs.md has a complete codec of 30 lines, top-k with error feedback.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

Like = jax.Array | jax.ShapeDtypeStruct
Pairs = tuple[tuple[int, int], ...]
Tree: TypeAlias = Any  # a pytree of arrays or of their shapes, for which jax has no type
State: TypeAlias = Tree  # what a codec or a reducer keeps from one call to the next: its own pytree, or () for nothing
Wire: TypeAlias = Tree  # all that crosses a link in one exchange: a codec's or a reducer's own pytree


class Crossing(Protocol):
    """The links that one exchange crosses, as a codec sees them."""

    @property
    def pairs(self) -> Pairs:
        """(sender, receiver) stages."""

    def send(self, wire: Wire, pairs: Pairs) -> Wire:
        """Return the wire that arrives over some of the pairs, in one message; other receivers get anything."""

    def receives(self, pairs: Pairs) -> jax.Array:
        """Return whether this stage is one of the receivers of some of the pairs, bool []."""


class Passes(NamedTuple):
    """Work of a codec on a device, for predictions.

    Attributes:
        encode: reads and writes of the whole message on the sender, in multiples of the message's bytes.
        decode: the same on the receiver.
        launches: kernels that either of the two launches.
    """

    encode: float
    decode: float
    launches: int = 8


@runtime_checkable
class Codec(Protocol):
    """Functions that encode, exchange and decode the messages of a link.

    Derive a codec from this class, and write `init`, `encode` and `decode`; a codec with error feedback also has
    `residual`. The functions are traced by jax.jit, so shapes and dtypes of the state and the wire must depend on the
    message's shape and dtype alone. Between stages a message is [B, S, H]: micro-batch, sequence (or a device's part of
    it) and hidden size, in the model's compute dtype. Over data it is part of a kernel's gradient, in float32. A codec
    must be hashable, as a frozen dataclass is. Its `repr` identifies it in logs and checkpoints, so it must show every
    setting.
    """

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> State:
        """Return the state before the first message.

        Args:
            shape: shape of every message of the link.
            dtype: dtype of every message of the link.

        Returns:
            A pytree of arrays; () if the codec keeps no state. Checkpoints contain it.
        """

    def encode(self, state: State, x: jax.Array, active: jax.Array | bool = True) -> tuple[Wire, State]:
        """Return the wire of a message, which is all that crosses the link, and the next state.

        Args:
            state: state that `init` or the previous `encode` returned.
            x: message of the link.
            active: whether this stage sends in this step, bool []. All stages run one program, so stages that send
                nothing call `encode` as well. If it is False, the returned state must equal `state` bit for bit, and
                nobody uses the wire.

        Returns:
            The wire, a pytree of arrays, and the next state, of the same structure, shapes and dtypes as `state`. If x
            is not finite, the decoded wire must not be finite either, because the trainer then skips the step.
        """

    def decode(self, wire: Wire, like: Like) -> jax.Array:
        """Return the message that a wire encodes.

        Args:
            wire: wire that `encode` returned, possibly on another device.
            like: array or shape whose shape and dtype the result has.
        """

    def residual(self, state: State, like: Like) -> jax.Array:
        """Return what earlier messages left out and the next one brings; zeros without error feedback.

        Args:
            state: state of the link.
            like: array or shape whose shape and dtype the result has.
        """
        return jnp.zeros(like.shape, like.dtype)

    def exchange(self, wire: Wire, crossing: Crossing) -> Wire:
        """Return the wire that arrives at this stage, given the one that it sends.

        Args:
            wire: wire that `encode` returned on this stage.
            crossing: links to cross.
        """
        return crossing.send(wire, crossing.pairs)

    def on_link(self, state: State, sender: jax.Array | int) -> State:
        """Return the first state of one link, given the one that `init` returns for all.

        Args:
            state: state that `init` returned.
            sender: stage that sends over the link, int []; it may be traced.
        """
        return state

    def wire_bytes(self, shape: tuple[int, ...], dtype: DTypeLike) -> int:
        """Return the bytes that one message puts on a link; of links that differ, on the widest.

        Args:
            shape: shape of the message.
            dtype: dtype of the message.
        """
        _, wire, _ = _first_message(self, jax.ShapeDtypeStruct(shape, dtype))
        return tree_bytes(wire)

    def passes(self) -> Passes:
        """Return what encoding and decoding cost a device."""
        return Passes(encode=2, decode=1)

    def problem(self, shape: tuple[int, ...], dtype: DTypeLike, min_ratio: float) -> str:
        """Return why messages should not go through the codec, as a sentence that begins with an option; "" if nothing.

        Args:
            shape: shape of the messages.
            dtype: dtype of the messages.
            min_ratio: factor by which the configuration asks messages to become smaller.
        """
        return ""

    def describe(self, shape: tuple[int, ...], dtype: DTypeLike) -> str:
        """Return what the codec does to messages, for tables: "TopK(k=64), 512 of 4096 bytes, 8.0 times smaller".

        Args:
            shape: shape of the messages.
            dtype: dtype of the messages.
        """
        sent, dense = self.wire_bytes(shape, dtype), array_bytes(shape, dtype)
        return f"{codec_name(self)}, {sent} of {dense} bytes, {times_smaller(dense, [sent])}"


@dataclasses.dataclass(frozen=True)
class Identity(Codec):
    """Codec that sends messages as they are and keeps no state."""

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> tuple[()]:
        """Return the empty state."""
        return ()

    def encode(self, state: tuple[()], x: jax.Array, active: jax.Array | bool = True) -> tuple[jax.Array, tuple[()]]:
        """Return the message itself and the empty state; see `Codec.encode`."""
        return x, state

    def decode(self, wire: jax.Array, like: Like) -> jax.Array:
        """Return the wire."""
        return wire

    def passes(self) -> Passes:
        """Return no pass."""
        return Passes(0, 0, 0)


def codec_name(codec: object) -> str:
    """Return the name of a codec in logs and checkpoints: its repr, or its class if the repr is an address."""
    kind = type(codec)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(codec)


def missing_methods(codec: object, protocol: type = Codec) -> str:
    """Return a sentence about the methods of a protocol that an object lacks; "" if it has all.

    Args:
        codec: object to look at.
        protocol: Protocol that it should have, one of this package's.
    """
    names = [name for name in vars(protocol) if not name.startswith("_")]
    lacking = sorted(name for name in names if not hasattr(codec, name))
    return f"it lacks {', '.join(lacking)}; derive its class from compress.{protocol.__name__}" if lacking else ""


def array_bytes(shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Return the bytes of an array of a shape and dtype."""
    return math.prod(shape) * jnp.dtype(dtype).itemsize


def tree_bytes(tree: Tree) -> int:
    """Return the bytes of all arrays of a tree of arrays or of their shapes."""
    return sum(array_bytes(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree))


def times_smaller(dense: int, sent: Sequence[int]) -> str:
    """Return how many times smaller a message becomes, as text: "7.9 and 3.9 times smaller".

    Args:
        dense: bytes of the message.
        sent: bytes on the wire, of one codec or of several.
    """
    times = (dense / size if size else math.inf for size in sent)
    return f"{' and '.join(f'{ratio:.1f}' for ratio in times)} times smaller"


def wire_bytes(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> int:
    """Return the bytes that one message puts on a link, as the codec declares them.

    Args:
        codec: codec of the link.
        shape: shape of the message.
        dtype: dtype of the message.
    """
    return codec.wire_bytes(shape, dtype)


def check_codec(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> None:
    """Check a codec's shapes and dtypes without computing anything.

    Args:
        codec: codec to check.
        shape: shape of the messages.
        dtype: dtype of the messages.

    Raises:
        ValueError: a method is missing, `encode` returns a state of other shapes than `init`, or `decode` another shape
            or dtype than the message's. An exception that the codec itself raises for this shape passes through.
    """
    if lacking := missing_methods(codec):
        raise ValueError(f"{codec_name(codec)} is no codec: {lacking}")
    message = jax.ShapeDtypeStruct(shape, dtype)
    before, wire, after = _first_message(codec, message)
    if (_shapes(before), jax.tree.structure(before)) != (_shapes(after), jax.tree.structure(after)):
        raise ValueError(
            f"{codec_name(codec)}.init returns a state of {_shapes(before)}, but encode returns one of "
            f"{_shapes(after)}; both must have the same structure, shapes and dtypes"
        )
    decoded = jax.eval_shape(lambda wire: codec.decode(wire, message), wire)
    if _shapes(decoded) != _shapes(message):
        raise ValueError(
            f"{codec_name(codec)}.decode returns {_shapes(decoded)} for a message of {_shapes(message)}; it must "
            "return the shape and dtype of `like`"
        )


def refusal(codec: Codec, shape: tuple[int, ...], dtype: DTypeLike) -> str:
    """Return a sentence about why a codec does not take messages of a shape; "" if it takes them.

    Args:
        codec: codec to check.
        shape: shape of the messages.
        dtype: dtype of the messages.
    """
    try:
        check_codec(codec, shape, dtype)
    except Exception as error:  # a codec may be a user's
        reason = " ".join(str(error).split())
        return f"the codec {codec_name(codec)} does not take messages of {list(shape)}: {reason}"
    return ""


def codec_error(codec: Codec, x: jax.Array, steps: int = 1) -> jax.Array:
    """Return the relative error that a codec makes, with its error feedback, when one array is sent again and again.

    After t messages the receiver has the sum of t decoded arrays, which should be t x. Without error feedback the
    error stays as it is. With error feedback it falls like 1/t, because each message brings what the last one left out.

    Args:
        codec: codec to measure.
        x: message of any shape that the codec takes, in a floating-point dtype.
        steps: number of messages.

    Returns:
        float32 [steps]: |t x - sum of the decoded messages| / |t x| in Frobenius norms, after message t = 1 to steps.
        It is 0 if x is zero and arrives as zero.

    References:
        Karimireddy et al. 2019, Error Feedback Fixes SignSGD and other Gradient Compression Schemes.
    """

    def send(carry: tuple[State, jax.Array], step: jax.Array) -> tuple[tuple[State, jax.Array], jax.Array]:
        state, missing = carry
        wire, state = codec.encode(state, x, True)
        missing = missing + x.astype(jnp.float32) - codec.decode(wire, x).astype(jnp.float32)
        return (state, missing), jnp.linalg.norm(missing.reshape(-1)) / step

    x = jnp.asarray(x)
    start = codec.init(x.shape, x.dtype), jnp.zeros(x.shape, jnp.float32)
    _, missing = jax.lax.scan(send, start, jnp.arange(1, steps + 1, dtype=jnp.float32))
    norm = jnp.linalg.norm(x.astype(jnp.float32).reshape(-1))
    return missing / jnp.where(norm == 0, 1, norm)


def _first_message(codec: Codec, message: jax.ShapeDtypeStruct) -> tuple[State, Wire, State]:
    """Return the shapes of the first state, of the first message's wire, and of the state after it."""
    before = jax.eval_shape(lambda: codec.init(message.shape, message.dtype))
    wire, after = jax.eval_shape(codec.encode, before, message, jax.ShapeDtypeStruct((), jnp.bool_))
    return before, wire, after


def _shapes(tree: Tree) -> str:
    """Return the shapes and dtypes of a tree of array shapes as text: "float32[2,3], int32[4]"."""
    leaves = jax.tree.leaves(tree)
    return ", ".join(f"{leaf.dtype.name}[{','.join(map(str, leaf.shape))}]" for leaf in leaves) or "nothing"
