"""Many small reductions, reduce-scatters or all-gathers packed into one collective.

All functions run per device, inside shard_map or under vmap with the same axis names.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def packed(reduce: Callable[[jax.Array], jax.Array], arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Return [reduce(x) for x in arrays], with one call on all arrays flattened into one [size].

    Args:
        reduce: elementwise reduction, such as lax.pmean over an axis.
        arrays: arrays of one dtype, of any shapes.
    """
    if not arrays:
        return []
    flat = reduce(lax.concatenate([x.reshape(-1) for x in arrays], 0))
    return [part.reshape(x.shape) for part, x in zip(_split(flat, [x.size for x in arrays], 0), arrays)]


def packed_scatter(arrays: Sequence[jax.Array], dims: Sequence[int], axis: str) -> list[jax.Array]:
    """Return lax.psum_scatter (tiled) of each array over its dim, with one collective for all arrays.

    Args:
        arrays: arrays of one dtype, of any shapes.
        dims: dim of each array that is scattered; its size is a multiple of the axis's.
        axis: name of the mesh axis.
    """
    if not arrays:
        return []
    ranks = lax.axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = lax.concatenate([x.reshape(ranks, -1) for x in fronts], 1)
    shard = lax.psum_scatter(rows, axis, scatter_dimension=0, tiled=True)
    parts = _split(shard, [x.size // ranks for x in fronts], 1)
    return [
        jnp.moveaxis(part.reshape(x.shape[0] // ranks, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(parts, fronts, dims)
    ]


def packed_gather(arrays: Sequence[jax.Array], dims: Sequence[int], axis: str) -> list[jax.Array]:
    """Return lax.all_gather (tiled) of each array along its dim, with one collective for all arrays.

    Args:
        arrays: shards of one dtype, of any shapes.
        dims: dim of each array that is gathered.
        axis: name of the mesh axis.
    """
    if not arrays:
        return []
    ranks = lax.axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = lax.all_gather(lax.concatenate([x.reshape(-1) for x in fronts], 0), axis)
    return [
        jnp.moveaxis(part.reshape(ranks * x.shape[0], *x.shape[1:]), 0, dim)
        for part, x, dim in zip(_split(rows, [x.size for x in fronts], 1), fronts, dims)
    ]


def _split(x: jax.Array, sizes: list[int], dim: int) -> list[jax.Array]:
    """Return the parts of x along a dim, given their sizes."""
    return jnp.split(x, np.cumsum(sizes)[:-1], dim)
