"""Permutes and gathers over mesh axes that mean the same on a real mesh and on the virtual one.

Messages between stages leave through `permute`: uncompressed gradients from `executor.py`, all others from
`messages.py`.
"""

from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")  # a pytree of arrays
# The stages' axis, or (data, pipe) if messages of each data rank are named apart.
MeshAxes: TypeAlias = str | tuple[str, ...]
Pairs: TypeAlias = tuple[tuple[int, int], ...]  # (sender, receiver) positions on an axis


def position(axis: MeshAxes) -> jax.Array:
    """Return this device's position on an axis, int32 []; on several axes their index, row-major."""
    first, *others = (axis,) if isinstance(axis, str) else axis
    found = lax.axis_index(first)
    for name in others:
        found = found * lax.axis_size(name) + lax.axis_index(name)
    return found


def stage_pairs(axis: MeshAxes, pairs: Pairs) -> Pairs:
    """Return pairs of positions as pairs of stages, each once."""
    if isinstance(axis, str):
        return pairs
    stages = lax.axis_size(axis[-1])
    return tuple(dict.fromkeys((sender % stages, receiver % stages) for sender, receiver in pairs))


def permute(x: T, axis: MeshAxes, pairs: Pairs) -> T:
    """Permute a tree's leaves over an axis, as `lax.ppermute` does, on a real or a virtual mesh.

    Args:
        x: pytree of arrays.
        axis: name of the mesh axis, or names of data and pipe, between whose data ranks nothing travels.
        pairs: (sender, receiver) positions on the axis; positions that do not receive get zeros. What a position sends
            to itself takes no collective.
    """
    stages = axis if isinstance(axis, str) else axis[-1]
    if away := tuple((sender, receiver) for sender, receiver in pairs if sender != receiver):
        moved = _permute(x, axis, stages, away)
    else:
        moved = jax.tree.map(jnp.zeros_like, x)
    if away == pairs:
        return moved
    stays = jnp.isin(position(axis), jnp.array([sender for sender, receiver in pairs if sender == receiver]))
    return jax.tree.map(lambda own, other: jnp.where(stays, own, other), x, moved)


def _permute(x: T, axis: MeshAxes, stages: str, pairs: Pairs) -> T:
    if stages in jax.sharding.get_abstract_mesh().manual_axes:  # inside jax.shard_map
        return lax.ppermute(x, axis, pairs)
    # vmap wants a complete permutation: idle senders feed idle receivers, which drop the values.
    some = stage_pairs(axis, pairs)
    senders, receivers = zip(*some)
    positions = range(lax.axis_size(stages))
    idle = zip([p for p in positions if p not in senders], [p for p in positions if p not in receivers])
    arrived = lax.ppermute(x, stages, (*some, *idle))
    receives = jnp.isin(position(axis), jnp.array([receiver for _, receiver in pairs]))
    return jax.tree.map(lambda leaf: jnp.where(receives, leaf, jnp.zeros_like(leaf)), arrived)


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return x gathered over several axes, the major one first, on a real or a virtual mesh: [devices, *shape]."""
    if axes[0] in jax.sharding.get_abstract_mesh().manual_axes:  # inside jax.shard_map: one collective
        return lax.all_gather(x, axes)
    shape = x.shape
    for axis in reversed(axes):  # vmap takes one at a time
        x = lax.all_gather(x, axis)
    return x.reshape(-1, *shape)
