"""How messages cross from stage to stage: encode, permute, decode."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from compress.codec import Codec, Identity
from paxtrain.pipeline.virtual import permute
from paxtrain.schedule.table import Pair


class Link(NamedTuple):
    """What one direction's messages go through.

    Attributes:
        codec: one for all stages; states are each stage's own.
        ranks: by sending stage, where links differ in the rank of their factors; empty where they do not.
    """

    codec: Codec
    ranks: tuple[int, ...] = ()


PLAIN = Link(Identity())


def among(index: jax.Array, stages: tuple[int, ...]) -> jax.Array:
    """Whether this stage is one of `stages`, bool []."""
    return jnp.isin(index, jnp.array(stages))


def _joined(leaves: list[jax.Array]) -> jax.Array:
    """All of them in one array [size]; of several dtypes, such as codes and their scales, the bytes."""
    common = _common(leaves)
    return lax.concatenate([_cast(leaf, common).reshape(-1) for leaf in leaves], 0)


def _common(leaves: list[jax.Array]) -> Any:
    return leaves[0].dtype if len({leaf.dtype for leaf in leaves}) == 1 else jnp.dtype("uint8")


def _cast(leaf: jax.Array, dtype: Any) -> jax.Array:
    return leaf if leaf.dtype == dtype else lax.bitcast_convert_type(leaf, dtype)


def _parted(flat: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """What `_joined` has joined."""
    shapes = [jax.eval_shape(lambda leaf: _cast(leaf, flat.dtype), leaf).shape for leaf in like]
    parts = jnp.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [_cast(part.reshape(shape), leaf.dtype) for part, shape, leaf in zip(parts, shapes, like)]


def _cross(wire: Any, axis: str, pairs: tuple[Pair, ...]) -> Any:
    """A wire's arrays in one message, which XLA makes of them by itself on GPUs: each would wait for the latency."""
    leaves, structure = jax.tree.flatten(wire)
    if len(leaves) == 1:
        return permute(wire, axis, pairs)

    def together(leaves: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("compression"), jax.named_scope("encode"):
            flat = _joined(leaves)
        flat = permute(flat, axis, pairs)
        with jax.named_scope("compression"), jax.named_scope("decode"):
            return _parted(flat, leaves)

    def each(leaves: list[jax.Array]) -> list[jax.Array]:
        return permute(leaves, axis, pairs)

    return structure.unflatten(lax.platform_dependent(leaves, cpu=together, default=each))


def send(link: Link, state: Any, x: jax.Array, axis: str, index: jax.Array, pairs: tuple[Pair, ...]) -> tuple[Any, Any]:
    """The wire that arrives at this stage over `pairs`, still encoded, and the codec's state, changed at senders only.

    Args:
        state: of this stage's link.
        x: what this stage has to send; scrap where it sends nothing.
        axis, index: the pipe axis, and this stage on it.
        pairs: (sender, receiver) stages. What a stage gets that is no receiver means nothing.
    """
    with jax.named_scope("compression"), jax.named_scope("encode"):
        wire, state = link.codec.encode(state, x, among(index, tuple(sender for sender, _ in pairs)))
    if not link.ranks:
        return _cross(wire, axis, pairs), state
    # A permute for each rank: a link of a lower rank carries no padding.
    arrived = None
    for rank in sorted({link.ranks[sender] for sender, _ in pairs}):
        some = tuple(pair for pair in pairs if link.ranks[pair[0]] == rank)
        new = link.codec.widen(_cross(link.codec.narrow(wire, rank), axis, some))
        mine = among(index, tuple(receiver for _, receiver in some))
        arrived = new if arrived is None else jax.tree.map(lambda n, o, m=mine: jnp.where(m, n, o), new, arrived)
    return arrived, state
