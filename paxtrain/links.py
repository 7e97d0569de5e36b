"""How messages cross from stage to stage: encode, permute, decode."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from compress.codec import Codec, Identity
from paxtrain.schedule import Pair
from paxtrain.virtual import permute


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
        return permute(wire, axis, pairs), state
    # A permute for each rank: a link of a lower rank carries no padding.
    arrived = None
    for rank in sorted({link.ranks[sender] for sender, _ in pairs}):
        some = tuple(pair for pair in pairs if link.ranks[pair[0]] == rank)
        new = link.codec.widen(permute(link.codec.narrow(wire, rank), axis, some))
        mine = among(index, tuple(receiver for _, receiver in some))
        arrived = new if arrived is None else jax.tree.map(lambda n, o, m=mine: jnp.where(m, n, o), new, arrived)
    return arrived, state
