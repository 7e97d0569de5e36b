"""Data parallelism: the collectives of a step before and after the pipeline. All functions run inside `shard_map`.

With ZeRO-1 each data rank keeps a shard of every master weight. A step gathers the weights once, in compute dtype
(`gather_weights`), and reduces the gradients to float32 shards (`reduce_gradients`). XLA's combiner buckets both.
Without ZeRO-1 each data rank keeps whole weights, and gradients are all-reduced. The tied embedding's exchange between
first and last stage, over pipe, is here, too.

References:
    Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054.
    Song et al. 2023, Optimus-CC: fused synchronisation of the tied embedding.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import kernels
from compress.collectives import packed, packed_gather, packed_scatter, reduce_scatter
from compress.powersgd import PowerState, mean_lowrank
from paxtrain.model import transformer
from paxtrain.parallel.compression import Compression
from paxtrain.parallel.layout import Layout, Params, names, tensor_dim
from paxtrain.pipeline.rings import only_if
from paxtrain.pipeline.stage import Segment, Weights
from paxtrain.pipeline.virtual import gather, permute


def _on_edges(layout: Layout, run: Callable[[jax.Array], jax.Array], x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Return run(x) on the first and the last stage, which have the embedding, and zeros on the stages between.

    If processes communicate over gloo, all stages call `run`, those between with zeros. A collective inside a loop may
    run before or beside those outside, in another order on each process, and gloo aborts if orders differ.

    Args:
        layout: Layout of the parameters.
        run: Function with collectives over data.
        x: Its argument; zeros on stages between.
        shape: Shape of its result.
    """
    if layout.stages <= 2:
        return run(x)
    stage = lax.axis_index("pipe")
    edge = (stage == 0) | (stage == layout.stages - 1)

    def skip(x: jax.Array) -> jax.Array:
        return only_if(edge, lambda _: run(x), jnp.zeros(shape, x.dtype))

    return skip(x) if jax.process_count() == 1 else lax.platform_dependent(x, cpu=run, default=skip)


def _gather(shards: list[jax.Array], dims: list[int]) -> list[jax.Array]:
    """Return arrays gathered over data, each along its dim; an array whose dim is -1 is whole already.

    XLA for GPUs buckets collectives of single arrays. XLA for CPUs does not, and over gloo each collective takes
    milliseconds, so arrays are packed into one there.
    """
    some = [i for i, dim in enumerate(dims) if dim >= 0]
    dtypes = dict.fromkeys(shards[i].dtype for i in some)  # not a set: all processes need the same order
    kinds = [[i for i in some if shards[i].dtype == dtype] for dtype in dtypes]

    def each(shards: list[jax.Array]) -> list[jax.Array]:
        return [lax.all_gather(x, "data", axis=d, tiled=True) if d >= 0 else x for x, d in zip(shards, dims)]

    def together(shards: list[jax.Array]) -> list[jax.Array]:
        gathered = list(shards)
        for places in kinds:
            whole = packed_gather([shards[i] for i in places], [dims[i] for i in places], "data")
            for i, x in zip(places, whole, strict=True):
                gathered[i] = x
        return gathered

    return lax.platform_dependent(shards, cpu=together, default=each) if some else shards


@jax.named_scope("embedding")
def _gather_table(layout: Layout, shard: jax.Array, dim: int) -> jax.Array:
    """Return the embedding's table gathered over data along dim, on the first and the last stage."""
    if dim < 0:
        return shard
    run = functools.partial(lax.all_gather, axis_name="data", axis=dim, tiled=True)
    shape = tuple(n * (layout.config.mesh.data if i == dim else 1) for i, n in enumerate(shard.shape))
    return _on_edges(layout, run, shard, shape)


@jax.named_scope("gather_weights")
def gather_weights(layout: Layout, shards: Params) -> Weights:
    """Gather a device's weights, in compute dtype, from the shards of the master weights.

    Layers are separated here, once per step and outside of any vjp, so that the vjps recognise weights by identity.

    Args:
        layout: Layout of the parameters.
        shards: The device's shards of the parameters in mesh layout, float32.
    """

    def weights(tree: Params, take: Callable[[Params, int | slice], Params]) -> Weights:
        """Arrange a mesh-layout tree as Weights; `take` returns one row, or several if layers are scanned."""

        def segment(first: int, segment: Segment) -> Params | list[Params]:
            if segment.scan:
                return take(tree["layers"], slice(first, first + segment.count))
            return [take(tree["layers"], first + i) for i in range(segment.count)]

        firsts = [chunk * layout.slots for chunk in range(layout.chunks)]
        chunks = [[segment(first + s.start, s) for s in layout.program.segments] for first in firsts]
        rest = {name: x for name, x in tree["embedding"].items() if name != "token"}
        return Weights(take(rest, 0), chunks, take(tree["final_norm"], 0))

    def cast(tree: Params, rows: int | slice) -> Params:
        return transformer.cast(jax.tree.map(lambda x: x[rows], tree), layout.config.model.dtype)

    def shifted(dims: Params, rows: int | slice) -> Params:
        lost = 1 if isinstance(rows, int) else 0  # a single row has lost its dim
        return jax.tree.map(lambda dim: max(dim - lost, -1), dims)

    found, dims = weights(shards, cast), weights(layout.data_dims(), shifted)
    table, dim = shards["embedding"]["token"], layout.data_dims()["embedding"]["token"]
    if layout.config.model.tied_head:  # an untied table keeps dim 0: a single stage holds both tables
        table, dim = table[0], max(dim - 1, -1)
    table = _gather_table(layout, table.astype(layout.config.model.dtype), dim)
    leaves, structure = jax.tree.flatten(found)
    gathered = jax.tree.unflatten(structure, _gather(leaves, jax.tree.leaves(dims)))
    return gathered._replace(embedding={**gathered.embedding, "token": table})


def _swap_edges(layout: Layout, x: jax.Array) -> jax.Array:
    """Return the sum of x over the first and the last stage, with the same bits on both."""
    if layout.stages == 1:
        return x
    last = layout.stages - 1
    return x + permute(x, "pipe", ((0, last), (last, 0)))


def _layers(segment: Params | list[Params]) -> list[Params]:
    """Return the layers of a segment, one tree for each."""
    if isinstance(segment, list):
        return segment
    count = jax.tree.leaves(segment)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], segment) for i in range(count)]


def _mean(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """Return the mean of an array over data: this rank's shard along dim, or all of it if dim is -1."""
    data = layout.config.mesh.data
    if data == 1:
        return x
    if dim < 0:
        return lax.pmean(x, "data")
    return reduce_scatter(x, "data", dim) / data


def _shard(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """Return this data rank's shard, along dim, of an array that is whole on every data rank."""
    if dim < 0:
        return x
    size = x.shape[dim] // layout.config.mesh.data
    return lax.dynamic_slice_in_dim(x, lax.axis_index("data") * size, size, axis=dim)


@jax.named_scope("embedding")
def _tied_embedding(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """Return the gradient of the tied embedding: the mean over data of the sum over the first and the last stage.

    With V bytes of table and D data ranks, the fused form moves V(2D-1)/D bytes. It adds the two stages' shards between
    reduce-scatter and (without ZeRO-1) all-gather. The unfused form, the baseline, runs two all-reduces one after the
    other and moves V(3D-2)/D bytes.

    Args:
        layout: Layout of the parameters.
        x: The device's gradient of the table, [V/T, H]; zeros on stages between.
        dim: Dim that ZeRO-1 splits, or -1.
    """
    data = layout.config.mesh.data
    if data == 1:
        return _swap_edges(layout, x)
    if layout.config.compress.embedding == "unfused":
        whole = _on_edges(layout, lambda v: lax.pmean(v, "data"), x, x.shape)
        return _shard(layout, _swap_edges(layout, whole), dim)
    # Without ZeRO-1 the table is scattered for the sum only, over its rows, whose number is a multiple of
    # vocab_multiple.
    scatter = dim if dim >= 0 else next((d for d in range(x.ndim) if x.shape[d] % data == 0), -1)
    if scatter < 0:
        return _swap_edges(layout, lax.pmean(x, "data"))
    shape = tuple(n // (data if i == scatter else 1) for i, n in enumerate(x.shape))
    shard = _swap_edges(layout, _on_edges(layout, lambda v: _mean(layout, v, scatter), x, shape))
    if dim >= 0:
        return shard
    return _on_edges(layout, lambda v: lax.all_gather(v, "data", axis=scatter, tiled=True), shard, x.shape)


@jax.named_scope("embedding")
def _tables(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """Return the means over data of the gradients of the embedding's and an untied head's tables, [1 or 2, V/T, H]."""
    data = layout.config.mesh.data
    shape = tuple(n // (data if i == dim else 1) for i, n in enumerate(x.shape))
    return _on_edges(layout, lambda v: _mean(layout, v, dim), x, shape)


# Key of one array of the layers: slot of the layer, module and parameter, as in (3, "qkv", "kernel").
ArrayKey = tuple[int, str, str]


class Reduced(NamedTuple):
    """The gradients of a device after the reduction over data.

    Attributes:
        gradients: Mean gradients in mesh layout: the device's ZeRO-1 shards, or whole arrays.
        state: New state of the compression over data.
        left_out: Relative error of the stage's compression, float32 []: the norm of the new error over the norm of
            gradient plus previous error. It is 0 without compression and nan if all gradients are zero.
    """

    gradients: Params
    state: PowerState | tuple[()]
    left_out: jax.Array


def _trees(layers: list[Params], arrays: dict[ArrayKey, jax.Array]) -> list[Params]:
    """Return arrays in the structure of the layers, given by slot, module and parameter."""
    return [
        {name: {leaf: arrays[i, name, leaf] for leaf in layer[name]} for name in layer}
        for i, layer in enumerate(layers)
    ]


def _packed_means(layout: Layout, arrays: list[jax.Array], dims: list[int]) -> list[jax.Array]:
    """Return `_mean` of each array, in one collective for the shards and one for whole arrays (dim -1)."""
    data, means = layout.config.mesh.data, list(arrays)
    if data == 1:
        return means
    shards, whole = ([i for i, dim in enumerate(dims) if (dim >= 0) == sharded] for sharded in (True, False))
    sums = packed_scatter([arrays[i] for i in shards], [dims[i] for i in shards], "data")
    for i, x in zip(shards, sums, strict=True):
        means[i] = x / data
    for i, x in zip(whole, packed(lambda x: lax.pmean(x, "data"), [arrays[i] for i in whole]), strict=True):
        means[i] = x
    return means


def _means(layout: Layout, tree: Any, dims: Any) -> Any:
    """Return `_mean` of each array of a tree, packed if XLA does not bucket collectives (see `_gather`)."""
    arrays, structure = jax.tree.flatten(tree)
    dims = jax.tree.leaves(dims)
    if layout.config.mesh.data == 1:
        return tree

    def each(arrays: list[jax.Array]) -> list[jax.Array]:
        # The shard of a single layer is contiguous. For stacked layers XLA would transpose all of it.
        return [_mean(layout, x, dim) for x, dim in zip(arrays, dims, strict=True)]

    def together(arrays: list[jax.Array]) -> list[jax.Array]:
        return _packed_means(layout, arrays, dims)

    return jax.tree.unflatten(structure, lax.platform_dependent(arrays, cpu=together, default=each))


@jax.named_scope("compression")
def _low_rank_layers(
    compression: Compression, layers: list[Params], state: PowerState, rank: int
) -> tuple[list[Params], PowerState, jax.Array]:
    """Return the layers' mean gradients over data by PowerSGD.

    Kernels that the rank makes small enough are compressed. All other arrays are packed and reduced densely.
    """
    layout, chosen, c = compression.layout, compression.compressed_kernels(rank), compression.config.compress
    dims = jax.tree.map(lambda dim: max(dim - 1, -1), layout.data_dims()["layers"])
    gradients = {(i, *path): layer[path[0]][path[1]] for i, layer in enumerate(layers) for path in _paths(layer)}
    places = [(i, *path) for i in range(len(layers)) for path in compression.power_kernels]
    used = [n for n, (_, *path) in enumerate(places) if tuple(path) in chosen]
    error, q = list(state.error), list(state.q)
    for n in set(range(len(places))) - set(used):
        # This kernel was compressed at a lower rank and is dense now, so its error is added to the gradient.
        gradients[places[n]] += error[n].reshape(gradients[places[n]].shape)
        error[n] = jnp.zeros_like(error[n])

    matrices = [gradients[places[n]].reshape(compression.matrices[places[n][1:]]) for n in used]
    some = PowerState([error[n] for n in used], [q[n] for n in used])
    factors, some, stats = mean_lowrank(matrices, some, rank, "data", compression.implementation, c.form, keep=True)
    for n, new_error, new_q in zip(used, *some, strict=True):
        error[n], q[n] = new_error, new_q

    compressed = [places[n] for n in used]
    rest = [place for place in gradients if place not in compressed]
    dense = _packed_means(layout, [gradients[p] for p in rest], [dims[name][leaf] for _, name, leaf in rest])
    reduced = dict(zip(rest, dense, strict=True))
    for place, (p, w) in zip(compressed, factors, strict=True):
        dim, shape = dims[place[1]][place[2]], gradients[place].shape
        if dim == 0:  # only this rank's rows of the product are computed
            p, shape = _shard(layout, p, 0), (shape[0] // layout.config.mesh.data, *shape[1:])
        whole = kernels.decode(p, w, jnp.float32, implementation=compression.implementation).reshape(shape)
        reduced[place] = whole if dim == 0 else _shard(layout, whole, dim)
    # Devices of a tensor group have different parts of the matrices, those of a data group different errors.
    left, total = lax.psum(jnp.stack(stats), ("data", "tensor"))
    return _trees(layers, reduced), PowerState(error, q), jnp.where(total > 0, jnp.sqrt(left / total), jnp.nan)


def _sum_over_sequence(grads: Weights) -> Weights:
    """Sum the gradients of norms and biases over tensor, in one collective.

    With sequence parallelism each device has these gradients of its part of the sequence only.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path((grads.chunks, grads.final_norm))
    values = [x for _, x in leaves]
    keys = [tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey)) for path, _ in leaves]
    parts = [i for i, found in enumerate(keys) if tensor_dim(found) is None]
    for i, total in zip(parts, packed(lambda x: lax.psum(x, "tensor"), [values[i] for i in parts]), strict=True):
        values[i] = total
    chunks, final_norm = jax.tree.unflatten(structure, values)
    return grads._replace(chunks=chunks, final_norm=final_norm)


def _paths(layer: Params) -> list[tuple[str, str]]:
    return [(name, leaf) for name in layer for leaf in layer[name]]


def layer_gradients(grads: Weights) -> list[Params]:
    """Return the layers of a device's gradients, slot after slot."""
    return [layer for chunk in grads.chunks for part in chunk for layer in _layers(part)]


def reduce_layers(
    compression: Compression, rank: int, layers: list[Params], state: PowerState | tuple[()]
) -> tuple[list[Params], PowerState | tuple[()], jax.Array]:
    """Reduce the gradients of a stage's layers over data.

    Args:
        compression: Compression of the run.
        rank: Rank of this stage's factors; 0 for a dense reduction.
        layers: Gradients of each layer, float32 sums over the micro-batches.
        state: State of the compression over data; () without compression.

    Returns:
        Gradients, state and relative error, as in `Reduced`.
    """
    if rank:
        assert isinstance(state, PowerState)
        return _low_rank_layers(compression, layers, state, rank)
    dims = jax.tree.map(lambda dim: max(dim - 1, -1), compression.layout.data_dims()["layers"])
    return _means(compression.layout, layers, [dims] * len(layers)), state, jnp.float32(0)


@jax.named_scope("reduce_gradients")
def reduce_gradients(
    compression: Compression, ranks: tuple[int, ...], grads: Weights, state: PowerState | tuple[()]
) -> Reduced:
    """Reduce a device's gradients over data to their means.

    Args:
        compression: Compression of the run.
        ranks: Rank of each stage's factors; 0 for a stage with a dense reduction.
        grads: The device's gradients, float32 sums over the micro-batches.
        state: State of the compression over data; () without compression.
    """
    layout = compression.layout
    dims = layout.data_dims()
    if layout.program.group.sequence:
        grads = _sum_over_sequence(grads)

    layers, kinds = layer_gradients(grads), sorted(set(ranks))
    branches = [functools.partial(reduce_layers, compression, rank, layers, state) for rank in kinds]
    if len(kinds) == 1:
        reduced, state, left_out = branches[0]()
    else:
        # All ranks of a data group belong to one stage and take the same branch, so their collectives match.
        mine = jnp.array([kinds.index(rank) for rank in ranks])[lax.axis_index("pipe")]
        reduced, state, left_out = lax.switch(mine, branches)

    def without_stage(dim: int) -> int:  # the dim in an array without the leading dim of stages
        return max(dim - 1, -1)

    table, dim = grads.embedding["token"], dims["embedding"]["token"]
    tied = layout.config.model.tied_head
    table = _tied_embedding(layout, table, without_stage(dim))[None] if tied else _tables(layout, table, dim)
    # Other parameters outside the layers: positions, if the model has any, and the final norm.
    rest = [{k: x for k, x in part.items() if k != "token"} for part in (grads.embedding, grads.final_norm)]
    groups = (dims["embedding"], dims["final_norm"])
    rest_dims = [{k: without_stage(group[k]) for k in part} for part, group in zip(rest, groups, strict=True)]
    positions, final_norm = jax.tree.map(lambda x: x[None], _means(layout, rest, rest_dims))
    tree = {
        "embedding": {"token": table, **positions},
        "layers": jax.tree.map(lambda *slots: jnp.stack(slots), *reduced),
        "final_norm": final_norm,
    }
    return Reduced(tree, state, left_out)


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
        copies = (mesh.data if dim < 0 else 1) * (mesh.tensor if tensor_dim(names(path)) is None else 1)
        own = jnp.square(x.astype(jnp.float32)).sum() / copies
        # The last stage has a second copy of the tied embedding.
        second = names(path)[-1] == "token" and layout.stages > 1 and layout.config.model.tied_head
        return jnp.where(lax.axis_index("pipe") == 0, own, 0) if second else own

    every = jax.tree.leaves(jax.tree_util.tree_map_with_path(squares, grads, dims))
    total = functools.reduce(jnp.add, every)
    return jnp.sqrt(gather(total, ("data", "pipe", "tensor")).sum())
