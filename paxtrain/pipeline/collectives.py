"""Permutes and gathers over mesh axes that mean the same on a real mesh and on the virtual one.

Messages between stages leave through `permute`: uncompressed gradients from `executor.py`, all others from
`messages.py`.
"""

from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

T = TypeVar("T")  # a pytree of arrays


def permute(x: T, axis: str, pairs: tuple[tuple[int, int], ...]) -> T:
    """Permute a tree's leaves over an axis, as `lax.ppermute` does, on a real or a virtual mesh.

    Args:
        x: pytree of arrays.
        axis: name of the mesh axis.
        pairs: (sender, receiver) positions on the axis; positions that do not receive get zeros.
    """
    if axis in jax.sharding.get_abstract_mesh().manual_axes:  # inside jax.shard_map
        return lax.ppermute(x, axis, pairs)
    # vmap wants a complete permutation: idle senders feed idle receivers, which drop the values.
    senders, receivers = zip(*pairs)
    positions = range(lax.axis_size(axis))
    idle = zip([p for p in positions if p not in senders], [p for p in positions if p not in receivers])
    arrived = lax.ppermute(x, axis, (*pairs, *idle))
    receives = jnp.isin(lax.axis_index(axis), jnp.array(receivers))
    return jax.tree.map(lambda leaf: jnp.where(receives, leaf, jnp.zeros_like(leaf)), arrived)


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return x gathered over several axes, the major one first, on a real or a virtual mesh: [devices, *shape]."""
    if axes[0] in jax.sharding.get_abstract_mesh().manual_axes:  # inside jax.shard_map: one collective
        return lax.all_gather(x, axes)
    shape = x.shape
    for axis in reversed(axes):  # vmap takes one at a time
        x = lax.all_gather(x, axis)
    return x.reshape(-1, *shape)
