"""The virtual mesh: all devices of a mesh on one, by nested vmap under the mesh's axis names.

A function of one device, as `jax.shard_map` takes it, computes the same values here: vmap turns every collective into
plain array operations. Use it to study on one device what a mesh of many devices computes. Count the bytes that a step
sends on the real mesh, since this program has no collectives. Such a function takes `permute` and `gather` from
`collectives.py`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import jax
from jax.sharding import PartitionSpec

from compress.codec import Tree

Specs: TypeAlias = Any  # a PartitionSpec, or a tree or tree prefix of them


def _axes(spec: PartitionSpec, ndim: int) -> list[tuple[str, ...]]:
    """Return the axes that split each dim of a global array, the major one first."""
    entries = [*spec, *[None] * (ndim - len(spec))]
    return [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in entries]


def _factors(axes: list[tuple[str, ...]]) -> list[str | int]:
    """Return the factors of the global dims, major first: a dim's axes, then its number for the shard's dim."""
    found: list[str | int] = []
    for dim, names in enumerate(axes):
        found += [*names, dim]
    return found


def _shards_first(factors: list[str | int], sizes: Mapping[str, int], ndim: int) -> list[str | int]:
    """Return the factors in the order of the vmaps: axes in mesh order, then the shard's dims."""
    return [axis for axis in sizes if axis in factors] + list(range(ndim))


def _split(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """Return the shards of a global array: [*sizes of the spec's axes, *shape of a shard]."""
    axes = _axes(spec, x.ndim)
    factors = _factors(axes)
    counts = [math.prod(sizes[name] for name in names) for names in axes]
    shape = [sizes[f] if isinstance(f, str) else x.shape[f] // counts[f] for f in factors]
    return x.reshape(shape).transpose([factors.index(f) for f in _shards_first(factors, sizes, x.ndim)])


def _join(x: jax.Array, spec: PartitionSpec, sizes: Mapping[str, int]) -> jax.Array:
    """Return the global array of shards [*sizes, *shape of a shard].

    Over axes that the spec does not name, all shards are equal and the first one is taken.
    """
    shard = x.shape[len(sizes) :]
    axes = _axes(spec, len(shard))
    factors = _factors(axes)
    x = x[tuple(slice(None) if axis in factors else 0 for axis in sizes)]
    order = _shards_first(factors, sizes, len(shard))
    counts = [math.prod(sizes[name] for name in names) for names in axes]
    return x.transpose([order.index(f) for f in factors]).reshape([n * k for n, k in zip(shard, counts)])


def shard_map(f: Callable, sizes: Mapping[str, int], in_specs: Specs, out_specs: Specs) -> Callable:
    """Return what `jax.shard_map(f, in_specs=..., out_specs=..., check_vma=False)` does, for one device.

    Args:
        f: function of one device's shards. It must call `permute` for `lax.ppermute`, because vmap accepts only
            complete permutations.
        sizes: size of each mesh axis by name, the major axis first.
        in_specs: PartitionSpecs of the arguments, or trees or tree prefixes of them.
        out_specs: PartitionSpecs of the results, likewise.
    """

    def run(*args: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args))

        def one(leaves: list[jax.Array]) -> Tree:
            return f(*jax.tree.unflatten(structure, leaves))

        # The major axis is the outermost vmap, which takes the first dim.
        for axis, size in reversed(list(sizes.items())):
            in_axes = [0 if any(axis in names for names in _axes(spec, len(spec))) else None for spec in specs]
            one = jax.vmap(one, in_axes=(in_axes,), axis_name=axis, axis_size=size)
        out = one([_split(x, spec, sizes) for x, spec in zip(leaves, specs, strict=True)])
        return jax.tree.map(lambda spec, x: _join(x, spec, sizes), jax.tree.broadcast(out_specs, out), out)

    return run
