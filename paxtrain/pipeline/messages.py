"""Encodes and sends the messages that go through a codec; the executor decodes them.

These are all activations, with the codec `Identity` if they are not compressed, and compressed gradients. Gradients
that are not compressed go through no codec: the executor sends them itself (`Rows._gradients_travel`).
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from compress import lowrank
from compress.codec import Codec, Identity
from paxtrain.pipeline.collectives import permute
from paxtrain.schedule.table import Pair


class Link(NamedTuple):
    """Encoding of the messages of one direction, forward or backward, on the links between stages.

    Attributes:
        codec: codec of every link; each stage has a separate state.
        ranks: rank of each link by its sending stage, if the links differ in rank; the codec's wire is then that of a
            LowRank of the highest rank. Empty if all links carry the codec's wire as it is.
    """

    codec: Codec
    ranks: tuple[int, ...] = ()


PLAIN = Link(Identity())


def among(index: jax.Array, stages: tuple[int, ...]) -> jax.Array:
    """Return whether the stage `index` is one of `stages`, bool []."""
    return jnp.isin(index, jnp.array(stages))


def _joined(leaves: list[jax.Array]) -> jax.Array:
    """Return all arrays in one array [size]; if their dtypes differ, as for codes and scales, an array of bytes."""
    common = _common(leaves)
    return lax.concatenate([_cast(leaf, common).reshape(-1) for leaf in leaves], 0)


def _common(leaves: list[jax.Array]) -> DTypeLike:
    """Return the dtype in which the arrays are joined."""
    return leaves[0].dtype if len({leaf.dtype for leaf in leaves}) == 1 else jnp.dtype("uint8")


def _cast(leaf: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return the same bits as an array of another dtype."""
    if leaf.dtype == dtype:
        return leaf
    if jnp.bool_ in (leaf.dtype, dtype):
        return leaf.astype(dtype)  # a bool is a byte, 0 or 1, and the other dtype is uint8
    return lax.bitcast_convert_type(leaf, dtype)


def _parted(flat: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """Return the arrays that `_joined` has joined.

    Args:
        flat: the joined array [size].
        like: arrays whose shapes and dtypes the parts have.
    """
    shapes = [jax.eval_shape(lambda leaf: _cast(leaf, flat.dtype), leaf).shape for leaf in like]
    parts = jnp.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [_cast(part.reshape(shape), leaf.dtype) for part, shape, leaf in zip(parts, shapes, like)]


def _cross(wire: Any, axis: str, pairs: tuple[Pair, ...]) -> Any:
    """Permute a wire's arrays in one message, because each message waits for the link's latency.

    XLA for GPUs joins the permutes of several arrays; XLA for CPUs does not, so there the arrays are joined first.

    Args:
        wire: a pytree of arrays.
        axis: name of the pipe axis.
        pairs: (sender, receiver) stages.
    """
    leaves, structure = jax.tree.flatten(wire)
    if len(leaves) <= 1:
        return permute(wire, axis, pairs)

    def together(leaves: list[jax.Array]) -> list[jax.Array]:
        with jax.named_scope("compression"), jax.named_scope("encode"):
            flat = _joined(leaves)
        flat = permute(flat, axis, pairs)
        with jax.named_scope("compression"), jax.named_scope("decode"):
            return _parted(flat, leaves)

    def each(leaves: list[jax.Array]) -> list[jax.Array]:
        return permute(leaves, axis, pairs)

    return jax.tree.unflatten(structure, lax.platform_dependent(leaves, cpu=together, default=each))


def send(link: Link, state: Any, x: jax.Array, axis: str, index: jax.Array, pairs: tuple[Pair, ...]) -> tuple[Any, Any]:
    """Encode a message and send it over the links of `pairs`.

    Args:
        link: codec and ranks of the direction.
        state: the codec's state of this stage's link.
        x: message of this stage [B, S, H]; anything if the stage sends nothing.
        axis: name of the pipe axis.
        index: this stage's position on the pipe axis, int [].
        pairs: (sender, receiver) stages.

    Returns:
        The wire that arrives at this stage, still encoded, and the codec's next state, changed at senders only. The
        wire of a stage that receives nothing is meaningless.
    """
    with jax.named_scope("compression"), jax.named_scope("encode"):
        wire, state = link.codec.encode(state, x, among(index, tuple(sender for sender, _ in pairs)))
    if not link.ranks:
        return _cross(wire, axis, pairs), state
    # One permute for each rank, so that a link of a lower rank carries no padding.
    arrived = None
    for rank in sorted({link.ranks[sender] for sender, _ in pairs}):
        some = tuple(pair for pair in pairs if link.ranks[pair[0]] == rank)
        new = lowrank.widen(_cross(lowrank.narrow(wire, rank), axis, some), max(link.ranks))
        mine = among(index, tuple(receiver for _, receiver in some))
        arrived = new if arrived is None else jax.tree.map(lambda n, o, m=mine: jnp.where(m, n, o), new, arrived)
    return arrived, state
