"""The codec `LowRank`: a message travels as two thin factors, and their error is added to the next message."""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from compress import kernels, subspace
from compress.codec import Like


class LowRankState(NamedTuple):
    """State of a LowRank codec on one link.

    Attributes:
        q: [k, r] right factor from which the next message starts.
        first: [k, r] right factor of the first message; `restrict` zeroes the columns beyond a link's rank.
        error: error of the previous message, as `kernels.project` takes it.
    """

    q: jax.Array
    first: jax.Array
    error: kernels.Error


class LowRankWire(NamedTuple):
    """Factors that cross the link for a message [n, k].

    Attributes:
        p: left factor [n, r].
        w: right factor [k, r]; the message is decoded as p w^T.
    """

    p: subspace.Factor
    w: subspace.Factor


@dataclasses.dataclass(frozen=True)
class LowRank:
    """Codec that sends a message [*, k] as two factors of low rank, by one step of subspace iteration per message.

    A message is seen as a matrix [n, k], with n the product of its leading dims. On the wire are r (n + k) numbers in
    place of n k. What a message loses is added to the next one.

    Attributes:
        rank: columns r of the factors.
        error: "none" forgets the error of a message; "explicit" forms it at once; "lazy" keeps the message and its
            factors, and forms the error when the next message is encoded, which moves fewer bytes. The last two decode
            alike.
        factors: dtype on the wire, one of subspace.FACTORS. "float32" is multiplied in full float32, the others as
            bfloat16.
        form: "solve" (r x r factorisations only) or "qr" (slower, to check the other).
        implementation: implementation of the passes over whole matrices, one of kernels.IMPLEMENTATIONS.
        seed: seed of the first right factor.

    Raises:
        ValueError: the rank is below 1, or a setting is unknown.

    References:
        Vogels et al. 2019, PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization: one step of
        subspace iteration with error feedback. Song et al. 2023, Optimus-CC: the same for messages between pipeline
        stages, with lazy error propagation.
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
        known = {"error": ("none", "explicit", "lazy"), "factors": subspace.FACTORS, "form": subspace.FORMS}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(values)}")

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> LowRankState:
        """Return the state before the first message.

        Args:
            shape: shape [*, k] of the messages.
            dtype: dtype of the messages.

        Raises:
            ValueError: the rank is above the smaller side of a message.
        """
        n, k = math.prod(shape[:-1]), shape[-1]
        if self.rank > min(n, k):
            raise ValueError(f"rank {self.rank} is above the full rank of a {n} x {k} message")
        thin = subspace.thin_dtype(self.factors)
        first = subspace.initial(k, self.rank, self.seed).astype(thin)
        m = jnp.zeros((n, k), dtype)
        error: kernels.Error = None
        if self.error == "explicit":
            error = kernels.Explicit(m)
        elif self.error == "lazy":
            error = kernels.Lazy(m, jnp.zeros((n, self.rank), thin), jnp.zeros((k, self.rank), thin))
        return LowRankState(first, first, error)

    def encode(
        self, state: LowRankState, x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[LowRankWire, LowRankState]:
        """Return the factors of x plus the error of earlier messages, and the next state.

        Args:
            state: state of the link.
            x: message [*, k].
            active: whether the message is sent, bool []. If it is False, the state returns unchanged, bit for bit.
        """
        error, run = state.error, self.implementation
        old_p, old_w = (error.p, error.w) if isinstance(error, kernels.Lazy) else (None, None)
        matrix = x.reshape(-1, x.shape[-1])
        m, product = kernels.project(matrix, state.q, error, active, parts=True, implementation=run)
        p = subspace.left(product, self.factors, old_p, active, form=self.form, implementation=run)
        s, g = kernels.backproject(m, p.thin, parts=True, implementation=run)
        w, q = subspace.right(
            s, g, state.q, state.first, self.factors, old_w, active, form=self.form, implementation=run
        )
        if p.kept is not None and w.kept is not None:
            error = kernels.Lazy(m, p.kept, w.kept)
        elif isinstance(error, kernels.Explicit):
            error = kernels.Explicit(kernels.residual(m, p.thin, w.thin, active, implementation=run))
        return LowRankWire(p.wire, w.wire), LowRankState(q, state.first, error)

    def decode(self, wire: LowRankWire, like: Like) -> jax.Array:
        """Return p w^T, with the same bits on the sender and on the receiver.

        Args:
            wire: factors of the message.
            like: array or shape whose shape [*, k] and dtype the result has.
        """
        p, w = subspace.dequantise(wire.p), subspace.dequantise(wire.w)
        return kernels.decode(p, w, like.dtype, implementation=self.implementation).reshape(like.shape)

    def residual(self, state: LowRankState, like: Like) -> jax.Array:
        """Return the error of earlier messages, which the next one will bring; zeros without error feedback.

        Args:
            state: state of the link.
            like: array or shape whose shape [*, k] and dtype the result has.
        """
        match state.error:
            case kernels.Lazy():
                return kernels.residual(*state.error, implementation=self.implementation).reshape(like.shape)
            case kernels.Explicit(e):
                return e.reshape(like.shape)
        return jnp.zeros(like.shape, like.dtype)


# Links of different ranks share one program, whose shapes are those of the highest rank r. A link of a lower rank has
# zero columns in its state. They stay exactly zero, so they need not travel.


def restrict(state: LowRankState, rank: jax.Array | int) -> LowRankState:
    """Return a new link's state with only the first `rank` columns.

    Args:
        state: state that `LowRank.init` returned.
        rank: rank of the link, at most the codec's, int []; it may be traced.
    """
    first = jnp.where(jnp.arange(state.first.shape[-1]) < rank, state.first, 0)
    return state._replace(q=first, first=first)


def narrow(wire: LowRankWire, rank: int) -> LowRankWire:
    """Return the first `rank` columns of the factors; a link of that rank need not carry more."""
    return jax.tree.map(lambda leaf: leaf[..., :rank], wire)


def widen(wire: LowRankWire, rank: int) -> LowRankWire:
    """Return a wire padded with zero columns up to `rank`; it decodes to the same bits as before `narrow`."""

    def pad(leaf: jax.Array) -> jax.Array:
        return jnp.pad(leaf, [(0, 0)] * (leaf.ndim - 1) + [(0, rank - leaf.shape[-1])])

    return jax.tree.map(pad, wire)
