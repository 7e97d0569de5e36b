"""The collectives over gradients: means over data, dense or compressed, sums over tensor, and the global norm.

reduction.py says which stage calls them when. All functions run inside `shard_map`.

With ZeRO-1 each data rank keeps a shard of every master weight, and gradients are reduced to float32 shards. Without it
each data rank keeps whole weights, and gradients are all-reduced. The tied embedding's exchange between first and last
stage, over pipe, is here, too.

References:
    Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054.
    Song et al. 2023, Optimus-CC: fused synchronisation of the tied embedding.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import State, Tree
from compress.collectives import Axis, all_gather, axis_size, narrowed, own_part, packed, packed_scatter, reduce_scatter
from compress.reducer import LeftOut, each, stored
from paxtrain.config.axes import AXES, PIPE, replica_axes, token_axes
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout, Params, names
from paxtrain.parallel.weights import on_edges
from paxtrain.pipeline.collectives import gather, permute
from paxtrain.pipeline.program import Weights, layers_of

T = TypeVar("T")  # a pytree of arrays


def _swap_edges(layout: Layout, x: jax.Array) -> jax.Array:
    """Return the sum of x over the first and the last stage, with the same bits on both."""
    if len(layout.ends) == 1:
        return x
    first, last = layout.ends
    return x + permute(x, PIPE, ((first, last), (last, first)))


def _mean(layout: Layout, x: jax.Array, dim: int, axes: Axis) -> jax.Array:
    """Return the mean of an array over axes: this rank's shard along dim, or all of it if dim is -1."""
    wire = _on_wire(layout, x)
    total = lax.psum(wire, axes) if dim < 0 else reduce_scatter(wire, axes, dim)
    return total.astype(x.dtype) / axis_size(axes)


def _on_wire(layout: Layout, x: jax.Array) -> jax.Array:
    """Return an array in the dtype in which gradients are summed over data."""
    return narrowed(x, layout.config.mesh.reduce_dtype)


def front(x: jax.Array, dim: int, parts: int) -> jax.Array:
    """Return the front of an accumulator, which has the size of a shard.

    Args:
        x: the accumulator.
        dim: dim that the reduction has split; -1: none, and the front is all of it.
        parts: number of parts.
    """
    return x if dim < 0 or parts == 1 else lax.slice_in_dim(x, 0, x.shape[dim] // parts, axis=dim)


def left_to_reduce(layout: Layout, *path: str) -> Axis | None:
    """Return the axes over which the sums of an array's gradients are reduced at a step's end; None if over none."""
    if layout.in_shards(*path) is not None:
        return layout.copies_axis
    return layout.replica_axes if layout.config.mesh.replicas > 1 else None


@jax.named_scope("embedding")
def reduce_tables(compression: Compression, grads: Params, state: State, edges: bool) -> tuple[Params, State]:
    """Return the gradients of a stage's embedding tables after the reduction over data, and their codec's next state.

    With a codec they are those of all arrays that it takes, `TableCodec.arrays`.

    The gradient of a tied table comes from two stages, see `exchange_tied`; this is its part over data.

    Args:
        compression: Compression of the run.
        grads: The device's gradients of the embedding: of a tied table [V/T, H], of the embedding's and an untied
            head's [1 or 2, V/T, H]; zeros on stages between the first and the last.
        state: State of the codec; () without one.
        edges: Whether only the first and the last stage call.
    """
    layout = compression.layout
    if compression.tables is not None:
        return compression.tables.reduce(grads, state, edges)
    x = grads["token"]
    axes, dim = left_to_reduce(layout, "embedding", "token"), layout.data_dims()["embedding"]["token"]
    if layout.config.model.tied_head:
        dim = layout.scatter_dim
    if axes is None:
        return {"token": x}, state

    def run(v: jax.Array) -> jax.Array:
        return _mean(layout, v, dim, axes)

    return {"token": run(x) if edges else on_edges(layout, run, x)}, state


@jax.named_scope("embedding")
def exchange_tied(compression: Compression, x: jax.Array, state: State) -> tuple[jax.Array, State]:
    """Return the gradient of the tied embedding, and its codec's next state.

    The gradient is the mean over data of the sum over the first and the last stage.

    With V bytes of table and D data ranks, the fused form moves V(2D-1)/D bytes. It adds the two stages' shards between
    reduce-scatter and (without ZeRO-1) all-gather. The unfused form, the baseline, runs two all-reduces one after the
    other and moves V(3D-2)/D bytes.

    Args:
        compression: Compression of the run.
        x: What `reduce_tables` returned.
        state: State of the codec, likewise; () without one.
    """
    layout = compression.layout
    if compression.tables is not None:
        return compression.tables.gather(*compression.tables.add_ends(x, state))
    dim, scattered = max(layout.data_dims()["embedding"]["token"] - 1, -1), layout.scatter_dim
    total = _swap_edges(layout, x)
    if layout.config.mesh.replicas == 1 or dim == scattered:
        return total, state
    if scattered < 0:
        return own_part(total, layout.replica_axes, dim), state
    run = functools.partial(all_gather, axis=layout.replica_axes, dim=scattered)
    return on_edges(layout, run, total), state


# Key of one array of the layers: slot of the layer, module and parameter, as in (3, "qkv", "kernel").
ArrayKey = tuple[int, str, str]


def _trees(layers: list[Params], arrays: dict[ArrayKey, jax.Array]) -> list[Params]:
    """Return arrays in the structure of the layers, given by slot, module and parameter."""
    return [
        {name: {leaf: arrays[i, name, leaf] for leaf in layer[name]} for name in layer}
        for i, layer in enumerate(layers)
    ]


def _packed_means(layout: Layout, arrays: list[jax.Array], dims: list[int], axes: Axis) -> list[jax.Array]:
    """Return `_mean` of each array, in one collective for the shards and one for whole arrays (dim -1)."""
    ranks, means = axis_size(axes), list(arrays)
    arrays = [_on_wire(layout, x) for x in arrays]
    shards, whole = ([i for i, dim in enumerate(dims) if (dim >= 0) == sharded] for sharded in (True, False))
    sums = packed_scatter([arrays[i] for i in shards], [dims[i] for i in shards], axes)
    for i, x in zip(shards, sums, strict=True):
        means[i] = x.astype(means[i].dtype) / ranks
    run = functools.partial(lax.psum, axis_name=axes)
    for i, x in zip(whole, packed(run, [arrays[i] for i in whole]), strict=True):
        means[i] = x.astype(means[i].dtype) / ranks
    return means


def means(layout: Layout, tree: T, dims: Tree, axes: Axis) -> T:
    """Return `_mean` of each array of a tree, packed if XLA does not bucket collectives (see weights.py).

    Args:
        layout: layout of the parameters.
        tree: gradients that are sums over the samples of this device, or of its group.
        dims: for each array the dim that is split, or -1.
        axes: axes over which the means are.
    """
    arrays, structure = jax.tree.flatten(tree)
    dims = jax.tree.leaves(dims)
    if axis_size(axes) == 1:
        return tree

    def each(arrays: list[jax.Array]) -> list[jax.Array]:
        # The shard of a single layer is contiguous. For stacked layers XLA would transpose all of it.
        return [_mean(layout, x, dim, axes) for x, dim in zip(arrays, dims, strict=True)]

    def together(arrays: list[jax.Array]) -> list[jax.Array]:
        return _packed_means(layout, arrays, dims, axes)

    return jax.tree.unflatten(structure, lax.platform_dependent(arrays, cpu=together, default=each))


@jax.named_scope("compression")
def _compressed_layers(
    compression: Compression, layers: list[Params], state: Tree, level: int
) -> tuple[list[Params], Tree, LeftOut]:
    """Return the layers' mean gradients over data by the reducer, with this device's statistics.

    Kernels that the reducer takes at this level are compressed. All other arrays are packed and reduced densely.
    """
    layout, chosen = compression.layout, compression.compressed_kernels(level)
    assert compression.reducer
    reducer = compression.reducer.at(level)
    gradients = {(i, *path): layer[path[0]][path[1]] for i, layer in enumerate(layers) for path in paths(layer)}
    places = [(i, *path) for i in range(len(layers)) for path in compression.data_kernels if (i, *path) in gradients]
    used = [n for n, (_, *path) in enumerate(places) if tuple(path) in chosen]
    states = each(state, compression.data_structure, len(places))
    for n in set(range(len(places))) - set(used):
        # This kernel was compressed at a lower level and is dense now, so its error is added to the gradient.
        place = places[n]
        gradients[place], states[n] = reducer.release(states[n], gradients[place], compression.over_data[place[1:]][1])

    compressed = [places[n] for n in used]
    shards = [compression.over_data[place[1:]][1] for place in compressed]
    decoded, left_out = list[jax.Array](), LeftOut(jnp.float32(0), jnp.float32(0))
    if used:  # layers of some kinds may have no kernel that is compressed
        wire, kept = reducer.encode([states[n] for n in used], [gradients[place] for place in compressed], shards)
        arrived = reducer.exchange(wire, kept, shards)
        some, left_out = reducer.update(arrived, kept, shards)
        for n, new in zip(used, some, strict=True):
            states[n] = new
        decoded = reducer.decode(arrived, kept, shards)

    rest = {place: x for place, x in gradients.items() if place not in compressed}
    reduced = _reduced(layout, rest, _packed_means)
    reduced |= dict(zip(compressed, decoded, strict=True))
    return _trees(layers, reduced), stored(states), left_out


def sum_over_axes(layout: Layout, tree: Params) -> Params:
    """Sum gradients over the axes whose devices have them of different tokens, in one collective for each axis.

    Over tensor these are the gradients of norms inside heads and, with sequence parallelism, of all norms and biases
    that it does not split.

    Args:
        layout: Layout of the parameters.
        tree: Gradients in mesh layout, reduced over data.
    """
    mesh = layout.config.mesh
    leaves, structure = jax.tree_util.tree_flatten_with_path(tree)
    rows, values = [layout.row(path) for path, _ in leaves], [x for _, x in leaves]
    for axis, size in mesh.sizes.items():
        spec = AXES[axis]
        apart = [row.split_by(axis) is None and spec.sums(mesh, row.names, row.own) for row in rows]
        parts = [i for i, sums in enumerate(apart) if sums and size > 1]
        run = functools.partial(lax.psum, axis_name=axis)
        for i, total in zip(parts, packed(run, [values[i] for i in parts]), strict=True):
            values[i] = total / size if axis in token_axes() else total
    return jax.tree.unflatten(structure, values)


def paths(layer: Params) -> list[tuple[str, str]]:
    """Return module and parameter of each array of a layer."""
    return [(name, leaf) for name in layer for leaf in layer[name]]


def layer_gradients(grads: Weights) -> list[Params]:
    """Return the layers of a device's gradients, slot after slot."""
    return [layer for chunk in grads.chunks for part in chunk for layer in layers_of(part)]


def reduce_layers(
    compression: Compression, level: int, layers: list[Params], state: Tree
) -> tuple[list[Params], Tree, LeftOut]:
    """Reduce the gradients of layers of one stage over data.

    Args:
        compression: Compression of the run.
        level: Level of the reducer on this stage, the rank of PowerSGD; 0 for a dense reduction.
        layers: Gradients of each layer, float32 sums over the micro-batches.
        state: State of the compression of these layers, see `compress.reducer.stored`; () without compression.

    Returns:
        Mean gradients, new state, and statistics of this device; they are zeros for a dense reduction.
    """
    if level:
        return _compressed_layers(compression, layers, state, level)
    layout, zero, arrays = compression.layout, jnp.float32(0), dict[ArrayKey, jax.Array]()
    for i, layer in enumerate(layers):
        arrays |= {(i, *path): layer[path[0]][path[1]] for path in paths(layer)}
    return _trees(layers, _reduced(layout, arrays, means)), state, LeftOut(zero, zero)


def _reduced(layout: Layout, arrays: dict[ArrayKey, jax.Array], mean: Callable) -> dict[ArrayKey, jax.Array]:
    """Return the means of arrays of the layers over the axes that are left to reduce.

    Args:
        layout: Layout of the parameters.
        arrays: Gradients of the layers.
        mean: `means` or `_packed_means`.
    """
    dims, found = layout.data_dims()["layers"], dict(arrays)
    left = {key: left_to_reduce(layout, "layers", *key[1:]) for key in arrays}
    for axes in dict.fromkeys(left.values()):
        if axes is not None:
            some = [key for key in arrays if left[key] == axes]
            along = [without_stage(dims[name][leaf]) for _, name, leaf in some]
            found |= dict(zip(some, mean(layout, [arrays[key] for key in some], along, axes), strict=True))
    return found


def without_stage(dim: int) -> int:
    """Return a dim of an array without the leading dim of stages, -1 for none."""
    return max(dim - 1, -1)


def global_norm(layout: Layout, grads: Params) -> jax.Array:
    """Return the norm of all gradients, with each parameter counted once.

    It takes one collective over the whole mesh, which gathers the devices' sums. Each device then adds them in the
    mesh's order. The order of an all-reduce differs between gloo, NCCL and the devices of one process, and with it the
    last bit of the norm.

    Args:
        layout: Layout of the parameters.
        grads: The device's gradients in mesh layout.
    """
    mesh, dims = layout.config.mesh, layout.data_dims()

    def squares(path: tuple, x: jax.Array, dim: int) -> jax.Array:
        split = {PIPE, *layout.axis_dims(path), *(replica_axes(mesh.sizes) if dim >= 0 else [])}
        copies = math.prod(size for axis, size in mesh.sizes.items() if axis not in split)
        own = jnp.square(x.astype(jnp.float32)).sum() / copies
        # The last stage has a second copy of the tied embedding.
        second = names(path)[-1] == "token" and layout.swaps
        return jnp.where(lax.axis_index(PIPE) == 0, own, 0) if second else own

    every = jax.tree.leaves(jax.tree_util.tree_map_with_path(squares, grads, dims))
    total = functools.reduce(jnp.add, every)
    return jnp.sqrt(gather(total, tuple(mesh.device_sizes)).sum())
