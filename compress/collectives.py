"""Collectives over an axis or within groups of its ranks, a reduce-scatter that is right on CPUs, and many in one.

All functions run per device, inside shard_map or under vmap with the same axis names. They take a `SubAxis` in place of
an axis's name; then each group of ranks exchanges by itself. They also take the names of several axes, whose devices
are ranks in row-major order.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class SubAxis:
    """Groups of equally many ranks of a mesh axis; pass it in place of the axis's name.

    The ranks of the axis come in sets of neighbours. A group has the ranks of one set, or one rank of each set, those
    with the same place in it.

    Attributes:
        axis: name of the mesh axis.
        members: number of its ranks.
        inside: ranks of a set; a divisor of `members`.
        between: whether a group has one rank of each set.
    """

    axis: str
    members: int
    inside: int
    between: bool

    @property
    def size(self) -> int:
        """Ranks of a group."""
        return self.members // self.inside if self.between else self.inside

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each group, in the order of their places in it."""
        sets = np.arange(self.members).reshape(-1, self.inside)
        return tuple(map(tuple, (sets.T if self.between else sets).tolist()))


Axis = str | tuple[str, ...] | SubAxis  # ranks that exchange with each other


def axis_size(axis: Axis) -> int:
    """Return the number of ranks that exchange with each other."""
    return axis.size if isinstance(axis, SubAxis) else lax.axis_size(axis)


def axis_index(axis: Axis) -> jax.Array:
    """Return this rank's place among those that exchange with each other, int []."""
    if not isinstance(axis, SubAxis):
        return lax.axis_index(axis)
    rank = lax.axis_index(axis.axis)
    return rank // axis.inside if axis.between else rank % axis.inside


def _emulated(axis: Axis) -> bool:
    """Return whether vmap emulates these ranks and has no collectives for them: a group, or those of several axes."""
    if isinstance(axis, str):
        return False
    first = axis.axis if isinstance(axis, SubAxis) else axis[0]
    return first not in jax.sharding.get_abstract_mesh().manual_axes


def _from_group(x: jax.Array, axis: Axis) -> jax.Array:
    """Return the arrays of all ranks of this rank's group, [size, *shape], on ranks that vmap emulates."""
    if not isinstance(axis, SubAxis):
        shape = x.shape
        for name in reversed((axis,) if isinstance(axis, str) else axis):
            x = lax.all_gather(x, name)
        return x.reshape(-1, *shape)
    groups = np.array(axis.groups)
    own = np.argwhere(groups == np.arange(axis.members)[:, None, None])[:, 1]  # each rank's group
    return lax.all_gather(x, axis.axis)[jnp.asarray(groups[own])[lax.axis_index(axis.axis)]]


def all_to_all(x: jax.Array, axis: Axis) -> jax.Array:
    """Return the rows [ranks, ...] that all ranks have for this one.

    Args:
        x: array [ranks, ...] with a row for each rank.
        axis: name of the mesh axis, or groups of its ranks.
    """
    if _emulated(axis):
        return jnp.take(_from_group(x, axis), axis_index(axis), axis=1)
    if not isinstance(axis, SubAxis):
        return lax.all_to_all(x, axis, 0, 0)
    return lax.all_to_all(x, axis.axis, 0, 0, axis_index_groups=axis.groups)


def all_gather(x: jax.Array, axis: Axis, dim: int = 0) -> jax.Array:
    """Return the arrays of all ranks, joined along a dim.

    Args:
        x: array of any shape.
        axis: name of the mesh axis, or groups of its ranks.
        dim: dim of x along which arrays are joined.
    """
    if _emulated(axis):
        rows = jnp.moveaxis(_from_group(x, axis), 0, dim)
        return rows.reshape(*x.shape[:dim], axis_size(axis) * x.shape[dim], *x.shape[dim + 1 :])
    if not isinstance(axis, SubAxis):
        return lax.all_gather(x, axis, axis=dim, tiled=True)
    return lax.all_gather(x, axis.axis, axis_index_groups=axis.groups, axis=dim, tiled=True)


def mean_of_ranks(x: jax.Array, axis: Axis) -> jax.Array:
    """Return the mean of an array over ranks, with the same bits on each of them.

    Args:
        x: array of any shape.
        axis: name of the mesh axis, or groups of its ranks.
    """
    if not isinstance(axis, SubAxis):
        return lax.pmean(x, axis)
    if _emulated(axis):
        return _from_group(x, axis).mean(0)
    return lax.pmean(x, axis.axis, axis_index_groups=axis.groups)


def narrowed(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return an array in the dtype in which it is summed over ranks."""
    dtype = jnp.dtype(dtype)
    if dtype == x.dtype:
        return x
    # Rounded by itself: XLA for CPUs sends wider numbers, and drops a conversion there and back.
    return lax.reduce_precision(x, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant).astype(dtype)


def reduce_scatter(x: jax.Array, axis: Axis, dim: int) -> jax.Array:
    """Return this rank's part, along a dim, of the sum of x over an axis.

    On CPUs the parts travel by an all-to-all, and each rank adds its own in the ranks' order, in float32 or wider. That
    gives the same bits at any timing. gloo's reduce-scatter, which carries lax.psum_scatter there, returns wrong sums
    now and then, without an error: https://github.com/jax-ml/jax/issues/40830, and docs/compression.md, which has what
    was seen of the other collectives.

    Args:
        x: array of floating-point numbers, of any shape.
        axis: name of the mesh axis, or groups of its ranks.
        dim: dim of x that is scattered; its size is a multiple of the axis's.
    """

    def exchange(x: jax.Array) -> jax.Array:
        ranks, size = axis_size(axis), x.shape[dim] // axis_size(axis)
        parts = x.reshape(*x.shape[:dim], ranks, size, *x.shape[dim + 1 :])
        parts = all_to_all(jnp.moveaxis(parts, dim, 0), axis)
        wide = jnp.promote_types(x.dtype, jnp.float32)
        return functools.reduce(jnp.add, [part.astype(wide) for part in parts]).astype(x.dtype)

    if _emulated(axis):
        return exchange(x)
    name, groups = (axis.axis, axis.groups) if isinstance(axis, SubAxis) else (axis, None)
    scatter = functools.partial(
        lax.psum_scatter, axis_name=name, scatter_dimension=dim, axis_index_groups=groups, tiled=True
    )
    return lax.platform_dependent(x, cpu=exchange, default=scatter)


def own_part(x: jax.Array, axis: Axis | None, dim: int) -> jax.Array:
    """Return this rank's part, along a dim, of an array that is whole on every rank of an axis.

    Args:
        x: array of any shape.
        axis: name of the mesh axis, or groups of its ranks; None: there is one rank, which has all of it.
        dim: dim of x; its size is a multiple of the axis's.
    """
    if axis is None:
        return x
    size = x.shape[dim] // axis_size(axis)
    return lax.dynamic_slice_in_dim(x, axis_index(axis) * size, size, axis=dim)


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


def packed_scatter(arrays: Sequence[jax.Array], dims: Sequence[int], axis: Axis) -> list[jax.Array]:
    """Return `reduce_scatter` of each array over its dim, with one collective for all arrays.

    Args:
        arrays: arrays of one dtype, of any shapes.
        dims: dim of each array that is scattered; its size is a multiple of the axis's.
        axis: name of the mesh axis, or groups of its ranks.
    """
    if not arrays:
        return []
    ranks = axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = lax.concatenate([x.reshape(ranks, -1) for x in fronts], 1)
    shard = reduce_scatter(rows, axis, 0)
    parts = _split(shard, [x.size // ranks for x in fronts], 1)
    return [
        jnp.moveaxis(part.reshape(x.shape[0] // ranks, *x.shape[1:]), 0, dim)
        for part, x, dim in zip(parts, fronts, dims)
    ]


def packed_gather(arrays: Sequence[jax.Array], dims: Sequence[int], axis: Axis) -> list[jax.Array]:
    """Return lax.all_gather (tiled) of each array along its dim, with one collective for all arrays.

    Args:
        arrays: shards of one dtype, of any shapes.
        dims: dim of each array that is gathered.
        axis: name of the mesh axis, or groups of its ranks.
    """
    if not arrays:
        return []
    ranks = axis_size(axis)
    fronts = [jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    rows = all_gather(lax.expand_dims(lax.concatenate([x.reshape(-1) for x in fronts], 0), (0,)), axis)
    return [
        jnp.moveaxis(part.reshape(ranks * x.shape[0], *x.shape[1:]), 0, dim)
        for part, x, dim in zip(_split(rows, [x.size for x in fronts], 1), fronts, dims)
    ]


def _split(x: jax.Array, sizes: list[int], dim: int) -> list[jax.Array]:
    """Return the parts of x along a dim, given their sizes."""
    return jnp.split(x, np.cumsum(sizes)[:-1], dim)


def joined(leaves: list[jax.Array]) -> jax.Array:
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


def parted(flat: jax.Array, like: Sequence[jax.Array | jax.ShapeDtypeStruct]) -> list[jax.Array]:
    """Return the arrays that `joined` has joined.

    Args:
        flat: the joined array [size].
        like: arrays whose shapes and dtypes the parts have.
    """
    shapes = [jax.eval_shape(lambda leaf: _cast(leaf, flat.dtype), leaf).shape for leaf in like]
    parts = jnp.split(flat, np.cumsum([math.prod(shape) for shape in shapes])[:-1])
    return [_cast(part.reshape(shape), leaf.dtype) for part, shape, leaf in zip(parts, shapes, like)]
