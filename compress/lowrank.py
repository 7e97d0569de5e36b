"""The codecs `LowRank` and `RankByLink`: a message travels as two thin factors, and their error with the next one."""

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from compress import kernels, policy, subspace
from compress.codec import Codec, Crossing, Like, Passes, array_bytes, times_smaller


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
class LowRank(Codec):
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
    implementation: str = "xla"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"rank must be at least 1, got {self.rank}")
        known = {"error": ("none", "explicit", "lazy"), "factors": subspace.FACTORS}
        for name, values in known.items():
            if getattr(self, name) not in values:
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; known are {', '.join(values)}")

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> LowRankState:
        """Return the state before the first message; see `Codec.init`.

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
        """Return the factors of x plus the error of earlier messages, and the next state; see `Codec.encode`."""
        error, run = state.error, self.implementation
        old_p, old_w = (error.p, error.w) if isinstance(error, kernels.Lazy) else (None, None)
        matrix = x.reshape(-1, x.shape[-1])
        m, product = kernels.project(matrix, state.q, error, active, parts=True, implementation=run)
        method = subspace.Method(self.factors, run)
        p = subspace.left(product, method, old_p, active)
        s, g = kernels.backproject(m, p.thin, parts=True, implementation=run)
        w, q = subspace.right(s, g, state.q, state.first, method, old_w, active)
        if p.kept is not None and w.kept is not None:
            error = kernels.Lazy(m, p.kept, w.kept)
        elif isinstance(error, kernels.Explicit):
            error = kernels.Explicit(kernels.residual(m, p.thin, w.thin, active, implementation=run))
        return LowRankWire(p.wire, w.wire), LowRankState(q, state.first, error)

    def decode(self, wire: LowRankWire, like: Like) -> jax.Array:
        """Return p w^T, with the same bits on the sender and on the receiver; see `Codec.decode`."""
        p, w = subspace.dequantise(wire.p), subspace.dequantise(wire.w)
        return kernels.decode(p, w, like.dtype, implementation=self.implementation).reshape(like.shape)

    def residual(self, state: LowRankState, like: Like) -> jax.Array:
        """Return the error of earlier messages, which the next one brings, or zeros; see `Codec.residual`."""
        match state.error:
            case kernels.Lazy():
                return kernels.residual(*state.error, implementation=self.implementation).reshape(like.shape)
            case kernels.Explicit(e):
                return e.reshape(like.shape)
        return jnp.zeros(like.shape, like.dtype)

    def passes(self) -> Passes:
        """Return the passes of projection, back-projection and the error; see `policy.LOW_RANK_PASSES`."""
        return Passes(*policy.LOW_RANK_PASSES[self.error])

    def problem(self, shape: tuple[int, ...], dtype: DTypeLike, min_ratio: float) -> str:
        """Return that the rank saves too little, if it does; see `Codec.problem`."""
        return _too_large("rank", self, shape, dtype, min_ratio)

    def describe(self, shape: tuple[int, ...], dtype: DTypeLike) -> str:
        """Return the rank and what it saves; see `Codec.describe`."""
        return _in_words([self], shape, dtype)


def _too_large(name: str, codec: LowRank, shape: tuple[int, ...], dtype: DTypeLike, min_ratio: float) -> str:
    """Return a sentence about a rank that saves too little; "" if it saves enough."""
    n, k = math.prod(shape[:-1]), shape[-1]
    sizes = jnp.dtype(dtype).itemsize, jnp.dtype(codec.factors).itemsize
    largest = policy.largest_rank(n, k, min_ratio, *sizes)
    if codec.rank <= largest:
        return ""
    return policy.too_large(f"{name}={codec.rank}", f"messages are {n} x {k}", largest, min_ratio)


def _in_words(codecs: Sequence[LowRank], shape: tuple[int, ...], dtype: DTypeLike) -> str:
    """Return the ranks of codecs and what each saves: "rank 2 and 4 of 512 x 128, 51.2 and 25.6 times smaller"."""
    smaller = times_smaller(array_bytes(shape, dtype), [codec.wire_bytes(shape, dtype) for codec in codecs])
    ranks = " and ".join(str(codec.rank) for codec in codecs)
    return f"rank {ranks} of {math.prod(shape[:-1])} x {shape[-1]}, {smaller}"


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


@dataclasses.dataclass(frozen=True)
class RankByLink(Codec):
    """LowRank with another rank on each link.

    Attributes:
        codec: codec of the highest rank.
        ranks: rank of each link, by its sending stage.
    """

    codec: LowRank
    ranks: tuple[int, ...]

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> LowRankState:
        """Return the state of a link of the highest rank."""
        return self.codec.init(shape, dtype)

    def on_link(self, state: LowRankState, sender: jax.Array | int) -> LowRankState:
        """Return the state with the columns that the link's rank allows; see `Codec.on_link`."""
        return restrict(state, jnp.asarray(self.ranks)[sender])

    def encode(
        self, state: LowRankState, x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[LowRankWire, LowRankState]:
        """Return what LowRank returns; columns beyond the link's rank are zero; see `Codec.encode`."""
        return self.codec.encode(state, x, active)

    def exchange(self, wire: LowRankWire, crossing: Crossing) -> LowRankWire:
        """Send each link's columns alone, so that a link of a lower rank carries no padding; see `Codec.exchange`."""
        arrived = None
        for rank in sorted({self.ranks[sender] for sender, _ in crossing.pairs}):
            some = tuple(pair for pair in crossing.pairs if self.ranks[pair[0]] == rank)
            new = widen(crossing.send(narrow(wire, rank), some), self.codec.rank)
            mine = crossing.receives(some)
            arrived = new if arrived is None else jax.tree.map(lambda n, o, m=mine: jnp.where(m, n, o), new, arrived)
        return wire if arrived is None else arrived

    def decode(self, wire: LowRankWire, like: Like) -> jax.Array:
        """Return p w^T."""
        return self.codec.decode(wire, like)

    def residual(self, state: LowRankState, like: Like) -> jax.Array:
        """Return the error of earlier messages; see `Codec.residual`."""
        return self.codec.residual(state, like)

    def passes(self) -> Passes:
        """Return what LowRank costs."""
        return self.codec.passes()

    def problem(self, shape: tuple[int, ...], dtype: DTypeLike, min_ratio: float) -> str:
        """Return that the highest rank saves too little, if it does; see `Codec.problem`."""
        return _too_large("ranks", self.codec, shape, dtype, min_ratio)

    def describe(self, shape: tuple[int, ...], dtype: DTypeLike) -> str:
        """Return the ranks and what each saves; see `Codec.describe`."""
        ranks = sorted(set(self.ranks))
        return _in_words([dataclasses.replace(self.codec, rank=rank) for rank in ranks], shape, dtype)
