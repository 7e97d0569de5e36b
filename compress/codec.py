"""Codecs: what stands between a value and the link that it crosses.

A codec is a triple of pure functions over explicit state, one state per directed link:

    init(shape, dtype) -> state
    encode(state, x, active) -> (wire, state)      wire: a pytree of arrays, all that crosses the link
    decode(wire, like) -> x

Sender and receiver see the same wire, so both can form the same decoded x. All stages run one program, so who has
nothing to send encodes too: `active` False leaves the state as it was, bit for bit, and makes the wire scrap.
"""

import dataclasses
import math
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from compress import kernels, subspace

Like = jax.Array | jax.ShapeDtypeStruct
FORMS = {"solve": subspace.precondition, "qr": subspace.orthonormal}


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a message seen as a matrix."""
    return math.prod(shape[:-1]), shape[-1]


class Codec(Protocol):
    """What the pipeline asks of a codec."""

    def init(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """The state before the first message of this shape and dtype."""

    def encode(self, state: Any, x: jax.Array, active: jax.Array | bool = True) -> tuple[Any, Any]:
        """What crosses the link for x, and the next state."""

    def decode(self, wire: Any, like: Like) -> jax.Array:
        """What the receiver makes of it, of like's shape and dtype."""

    def residual(self, state: Any, like: Like) -> jax.Array:
        """What the messages so far lost and the next one will bring, of like's shape and dtype."""

    def wire_bytes(self, shape: tuple[int, ...], dtype: Any) -> int:
        """Bytes that one message puts on the link."""


class Identity(NamedTuple):
    """Sends x as it is and keeps no state."""

    def init(self, shape: tuple[int, ...], dtype: Any) -> tuple[()]:
        return ()

    def encode(self, state: tuple[()], x: jax.Array, active: jax.Array | bool = True) -> tuple[jax.Array, tuple[()]]:
        return x, state

    def decode(self, wire: jax.Array, like: Like) -> jax.Array:
        return wire

    def residual(self, state: tuple[()], like: Like) -> jax.Array:
        return jnp.zeros(like.shape, like.dtype)

    def wire_bytes(self, shape: tuple[int, ...], dtype: Any) -> int:
        return math.prod(shape) * jnp.dtype(dtype).itemsize


class LowRankState(NamedTuple):
    """State of a LowRank codec.

    Attributes:
        q: [k, r] for the next message.
        first: [k, r] the first q; what rank a link has is in its zero columns.
        error: what the previous message lost, as the kernels take it.
    """

    q: jax.Array
    first: jax.Array
    error: kernels.Error


class LowRankWire(NamedTuple):
    """The factors p [n, r] and w [k, r] of a message."""

    p: subspace.Factor
    w: subspace.Factor


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Sends x [*, k], seen as a matrix [n, k], as two factors, and adds what that lost to the next message.

    Attributes:
        rank: columns of the factors.
        error: "none" forgets what a message lost; "explicit" forms it at once; "lazy" keeps the message and its factors
            and forms it when the next message is encoded, which moves fewer bytes. The last two decode alike.
        factors: dtype on the wire, one of lowrank.FACTORS. "float32" is multiplied in full float32, the others as
            bfloat16.
        form: "solve" (r x r factorisations only) or "qr" (to check it against).
        implementation: of the passes over whole matrices, see kernels.py.
        seed: of the first q.

    References:
        Vogels et al. 2019, PowerSGD: one step of subspace iteration with error feedback. Song et al. 2023, Optimus-CC:
        the same for messages between pipeline stages.
    """

    rank: int
    error: str = "lazy"
    factors: str = "bfloat16"
    form: str = "solve"
    implementation: str = "xla"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        for name, known in (("error", ("none", "explicit", "lazy")), ("factors", subspace.FACTORS), ("form", FORMS)):
            if getattr(self, name) not in known:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(known)}")

    def init(self, shape: tuple[int, ...], dtype: Any, rank: jax.Array | int | None = None) -> LowRankState:
        """The state before the first message.

        Args:
            shape, dtype: of the messages.
            rank: of this link, at most self.rank, may be traced.

        Raises:
            ValueError: self.rank is above the smaller side of a message.
        """
        n, k = _matrix(shape)
        if self.rank > min(n, k):
            raise ValueError(f"rank {self.rank} is above the full rank of a {n} x {k} message")
        thin = subspace.thin_dtype(self.factors)
        first = subspace.initial(k, self.rank, self.seed).astype(thin)
        if rank is not None:
            first = jnp.where(jnp.arange(self.rank) < rank, first, 0)
        m = jnp.zeros((n, k), dtype)
        error = None
        if self.error == "explicit":
            error = kernels.Explicit(m)
        elif self.error == "lazy":
            error = kernels.Lazy(m, jnp.zeros((n, self.rank), thin), jnp.zeros((k, self.rank), thin))
        return LowRankState(first, first, error)

    def encode(
        self, state: LowRankState, x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[LowRankWire, LowRankState]:
        """The factors of x plus what earlier messages lost, and the next state."""
        keep = lambda new, old: jnp.where(active, new, old)  # noqa: E731
        passes = {"implementation": self.implementation}
        m, product = kernels.project(x.reshape(-1, x.shape[-1]), state.q, state.error, active, **passes)
        wire_p = subspace.quantise(FORMS[self.form](product), self.factors)
        p = subspace.dequantise(wire_p)
        s, g = kernels.backproject(m, p, **passes)
        fitted = subspace.solve(s, g) if self.form == "solve" else s
        wire_w = subspace.quantise(fitted, self.factors)
        w = subspace.dequantise(wire_w)
        error = state.error
        if isinstance(error, kernels.Lazy):
            error = kernels.Lazy(m, keep(p, error.p), keep(w, error.w))
        elif isinstance(error, kernels.Explicit):
            error = kernels.Explicit(kernels.residual(m, p, w, active, **passes))
        q = subspace.warm_start(fitted, state.first.astype(jnp.float32)).astype(state.q.dtype)
        return LowRankWire(wire_p, wire_w), LowRankState(keep(q, state.q), state.first, error)

    def decode(self, wire: LowRankWire, like: Like) -> jax.Array:
        """p w^T: the same bits at the sender and at the receiver."""
        p, w = map(subspace.dequantise, wire)
        return kernels.decode(p, w, like.dtype, implementation=self.implementation).reshape(like.shape)

    def residual(self, state: LowRankState, like: Like) -> jax.Array:
        """What the messages so far lost and the next one will bring; zeros without error feedback."""
        match state.error:
            case kernels.Lazy():
                return kernels.residual(*state.error, implementation=self.implementation).reshape(like.shape)
            case kernels.Explicit(e):
                return e.reshape(like.shape)
        return jnp.zeros(like.shape, like.dtype)

    def narrow(self, wire: LowRankWire, rank: int) -> LowRankWire:
        """The first `rank` columns of the factors: all that a link of that rank has to carry."""
        return jax.tree.map(lambda leaf: leaf[..., :rank], wire)

    def widen(self, wire: LowRankWire) -> LowRankWire:
        """A narrow wire with zero columns up to self.rank: decodes to the same bits as before `narrow`."""
        return jax.tree.map(
            lambda leaf: jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, self.rank - leaf.shape[-1])]), wire
        )

    def wire_bytes(self, shape: tuple[int, ...], dtype: Any, rank: int | None = None) -> int:
        """Bytes of a message's factors and scales on a link of `rank` (default: self.rank)."""
        column = sum(_matrix(shape)) * jnp.dtype(self.factors).itemsize + (8 if self.factors == "int8" else 0)
        return column * (self.rank if rank is None else rank)


class Record(NamedTuple):
    """State of a Recorder: message i is at i % capacity.

    Attributes:
        inner: state of the recorded codec.
        count: active messages so far, int32 [].
        given, decoded: [capacity, ...] messages as the sender gave them and as the receiver decodes them.
        residual: [capacity, ...] the inner codec's residual after each.
    """

    inner: Any
    count: jax.Array
    given: jax.Array
    decoded: jax.Array
    residual: jax.Array


@dataclasses.dataclass(frozen=True)
class Recorder:
    """Another codec, and a record of its last `capacity` messages, for studies."""

    codec: Any
    capacity: int

    def init(self, shape: tuple[int, ...], dtype: Any, *rank: jax.Array | int) -> Record:
        """The inner codec's state (which takes `rank` where it is given) and an empty record."""
        empty = jnp.zeros((self.capacity, *shape), dtype)
        return Record(self.codec.init(shape, dtype, *rank), jnp.int32(0), empty, empty, empty)

    def encode(self, state: Record, x: jax.Array, active: jax.Array | bool = True) -> tuple[Any, Record]:
        """The inner codec's wire; active messages enter the record."""
        wire, inner = self.codec.encode(state.inner, x, active)
        slot = state.count % self.capacity
        write = lambda ring, value: ring.at[slot].set(jnp.where(active, value, ring[slot]))  # noqa: E731
        return wire, Record(
            inner,
            state.count + jnp.asarray(active, jnp.int32),
            write(state.given, x),
            write(state.decoded, self.codec.decode(wire, x)),
            write(state.residual, self.codec.residual(inner, x)),
        )

    def decode(self, wire: Any, like: Like) -> jax.Array:
        return self.codec.decode(wire, like)

    def residual(self, state: Record, like: Like) -> jax.Array:
        return self.codec.residual(state.inner, like)

    def narrow(self, wire: Any, rank: int) -> Any:
        return self.codec.narrow(wire, rank)

    def widen(self, wire: Any) -> Any:
        return self.codec.widen(wire)

    def wire_bytes(self, shape: tuple[int, ...], dtype: Any, *rank: int) -> int:
        return self.codec.wire_bytes(shape, dtype, *rank)
