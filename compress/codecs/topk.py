"""The codec `TopK`: the largest numbers of a message and their places; the others wait for the next message."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from compress.codec import Codec, Like, Passes


@dataclasses.dataclass(frozen=True)
class TopK(Codec):
    """Codec that sends a share of a message's numbers, the largest, with their places.

    Attributes:
        share: share of the numbers that travel, above 0 and at most 1.
        feedback: whether what is left out is added to the next message.

    Raises:
        ValueError: the share is out of bounds.

    References:
        Stich et al. 2018, Sparsified SGD with Memory.
    """

    share: float = 0.05
    feedback: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share:g}")

    def init(self, shape: tuple[int, ...], dtype: DTypeLike) -> jax.Array | tuple[()]:
        """Return zeros, what earlier messages left out, or () without feedback; see `Codec.init`."""
        return jnp.zeros(shape, dtype) if self.feedback else ()

    def encode(
        self, state: jax.Array | tuple[()], x: jax.Array, active: jax.Array | bool = True
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array | tuple[()]]:
        """Return the largest of x plus what was left, with their places, and what is left now; see `Codec.encode`."""
        whole = (x + state if isinstance(state, jax.Array) else x).reshape(-1)
        count = max(1, round(self.share * whole.size))
        # A number that is none is the largest of all to top_k, so it arrives.
        _, places = jax.lax.top_k(jnp.abs(whole), count)
        wire = whole[places], places.astype(jnp.int32)
        if not isinstance(state, jax.Array):
            return wire, state
        return wire, jnp.where(active, whole.at[places].set(0).reshape(x.shape), state)

    def decode(self, wire: tuple[jax.Array, jax.Array], like: Like) -> jax.Array:
        """Return the numbers at their places, and zeros elsewhere; see `Codec.decode`."""
        # Without the barrier XLA makes the zeros of all messages once, and copies them for each.
        zero, values, places = lax.optimization_barrier((jnp.zeros((), like.dtype), *wire))
        return jnp.full(math.prod(like.shape), zero).at[places].set(values).reshape(like.shape)

    def residual(self, state: jax.Array | tuple[()], like: Like) -> jax.Array:
        """Return what earlier messages left out; see `Codec.residual`."""
        return state if isinstance(state, jax.Array) else jnp.zeros(like.shape, like.dtype)

    def passes(self) -> Passes:
        """Return the passes of a sort of numbers and their places, counted as if it read and wrote them once."""
        return Passes(encode=12, decode=1.25, launches=5) if self.feedback else Passes(5.75, 1.25, 3)
