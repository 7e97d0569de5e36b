"""Data parallelism: the collectives before and after the pipeline, inside shard_map.

With ZeRO-1 each data rank keeps a shard of every master weight. A step gathers the weights once, in compute dtype, and
leaves the gradients as shards (reduce-scatter, float32); XLA's combiner buckets both. Without it weights are whole and
gradients are all-reduced.

References:
    Rajbhandari et al. 2020, ZeRO. Tied embedding: Optimus-CC (Song et al. 2023), fused embedding synchronisation.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress import kernels
from compress.collectives import PowerState, mean_lowrank, packed, packed_gather, packed_scatter
from paxtrain.model import transformer
from paxtrain.parallel.compression import Compression
from paxtrain.parallel.layout import Layout, Params, names, tensor_dim
from paxtrain.pipeline.rings import only_if
from paxtrain.pipeline.stage import Segment, Weights
from paxtrain.pipeline.virtual import gather, permute


def _on_edges(layout: Layout, run: Any, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """run(x) on the first and the last stage, the only ones with an embedding; zeros on those between.

    Where processes meet over gloo all stages run it, those between on their zeros: a collective inside of a loop may
    run before or beside those outside, in another order on each process, and gloo aborts where orders differ.
    """
    if layout.stages <= 2:
        return run(x)
    stage = lax.axis_index("pipe")
    edge = (stage == 0) | (stage == layout.stages - 1)
    skip = lambda x: only_if(edge, lambda _: run(x), jnp.zeros(shape, x.dtype))  # noqa: E731
    return skip(x) if jax.process_count() == 1 else lax.platform_dependent(x, cpu=run, default=skip)


def _gather(shards: list[jax.Array], dims: list[int]) -> list[jax.Array]:
    """All-gathers over data of all arrays but the embedding's table, each along its dim; -1: it is whole.

    XLA for GPUs buckets one collective per array; that for CPUs does not, and over gloo each takes milliseconds.
    """
    some = [i for i, dim in enumerate(dims) if dim >= 0]
    dtypes = dict.fromkeys(shards[i].dtype for i in some)  # in the same order on all processes
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
    if dim < 0:
        return shard
    run = functools.partial(lax.all_gather, axis_name="data", axis=dim, tiled=True)
    shape = tuple(n * (layout.config.mesh.data if i == dim else 1) for i, n in enumerate(shard.shape))
    return _on_edges(layout, run, shard, shape)


@jax.named_scope("gather_weights")
def gather_weights(layout: Layout, shards: Params) -> Weights:
    """A device's weights in compute dtype from its shards of the master weights.

    Layers are split here, once per step and outside any vjp, so that the vjps find each weight by identity.
    """

    def weights(tree: Params, take: Callable[[Params, int | slice], Params]) -> Weights:
        """A mesh-layout tree's rows, as `take` gives them: one row, or several where layers are scanned."""

        def segment(first: int, segment: Segment) -> Any:
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
    if layout.config.model.tied_head:  # else one stage holds both tables
        table, dim = table[0], max(dim - 1, -1)
    table = _gather_table(layout, table.astype(layout.config.model.dtype), dim)
    leaves, structure = jax.tree.flatten(found)
    gathered = structure.unflatten(_gather(leaves, jax.tree.leaves(dims)))
    return gathered._replace(embedding={**gathered.embedding, "token": table})


def _swap_edges(layout: Layout, x: jax.Array) -> jax.Array:
    """x plus what the other end of the pipeline holds: the sum over the two tied copies, the same bits on both."""
    if layout.stages == 1:
        return x
    last = layout.stages - 1
    return x + permute(x, "pipe", ((0, last), (last, 0)))


def _layers(segment: Any) -> list[Params]:
    """The layers of a segment, one tree each."""
    if isinstance(segment, list):
        return segment
    count = jax.tree.leaves(segment)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], segment) for i in range(count)]


def _mean(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """The mean over data of one array: this rank's shard along dim, or whole where dim is -1."""
    data = layout.config.mesh.data
    if data == 1:
        return x
    if dim < 0:
        return lax.pmean(x, "data")
    return lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True) / data


def _shard(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """This data rank's shard along dim of an array that every data rank has whole."""
    if dim < 0:
        return x
    size = x.shape[dim] // layout.config.mesh.data
    return lax.dynamic_slice_in_dim(x, lax.axis_index("data") * size, size, axis=dim)


@jax.named_scope("embedding")
def _tied_embedding(layout: Layout, x: jax.Array, dim: int) -> jax.Array:
    """The tied embedding's gradient [V/T, H]: the mean over data, summed over the first and the last stage.

    For V bytes of table and D data ranks, fused: the sum is made on shards between reduce-scatter and (without ZeRO-1)
    all-gather, V(2D-1)/D bytes. Unfused, the baseline: two all-reduces in a row, V(3D-2)/D.
    """
    data = layout.config.mesh.data
    if data == 1:
        return _swap_edges(layout, x)
    if layout.config.compress.embedding == "unfused":
        whole = _on_edges(layout, lambda v: lax.pmean(v, "data"), x, x.shape)
        return _shard(layout, _swap_edges(layout, whole), dim)
    # Without ZeRO-1 the table is scattered over its rows for the sum only; they are a multiple of vocab_multiple.
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
    """The gradients of an untied head's and of the embedding's table [1 or 2, V/T, H]: each its own mean over data."""
    data = layout.config.mesh.data
    shape = tuple(n // (data if i == dim else 1) for i, n in enumerate(x.shape))
    return _on_edges(layout, lambda v: _mean(layout, v, dim), x, shape)


# One array of the layers: the layer's slot, and its two keys.
ArrayKey = tuple[int, str, str]


class Reduced(NamedTuple):
    """What the reduction over data leaves on a device.

    Attributes:
        gradients: in mesh layout, as the device keeps them: ZeRO-1 shards, or whole.
        state: of the compression.
        left_out: norm of what the compression of this stage left out, over that of the gradient with the error before;
            float32 [], 0 where nothing was compressed, nan where all was zero.
    """

    gradients: Params
    state: Any
    left_out: jax.Array


def _trees(layers: list[Params], arrays: dict[ArrayKey, jax.Array]) -> list[Params]:
    """Arrays by their places, structured as the layers."""
    return [
        {name: {leaf: arrays[i, name, leaf] for leaf in layer[name]} for name in layer}
        for i, layer in enumerate(layers)
    ]


def _packed_means(layout: Layout, arrays: list[jax.Array], dims: list[int]) -> list[jax.Array]:
    """Means over data, each as this rank's shard along its dim, in one collective, or two where some (-1) are whole."""
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
    """Means over data of a tree's arrays, packed where XLA does not bucket collectives, see `_gather`."""
    arrays, structure = jax.tree.flatten(tree)
    dims = jax.tree.leaves(dims)
    if layout.config.mesh.data == 1:
        return tree

    def each(arrays: list[jax.Array]) -> list[jax.Array]:
        # Layer by layer a shard is contiguous; over the stack XLA would transpose everything that it meets.
        return [_mean(layout, x, dim) for x, dim in zip(arrays, dims, strict=True)]

    def together(arrays: list[jax.Array]) -> list[jax.Array]:
        return _packed_means(layout, arrays, dims)

    return structure.unflatten(lax.platform_dependent(arrays, cpu=together, default=each))


@jax.named_scope("compression")
def _low_rank_layers(
    compression: Compression, layers: list[Params], state: PowerState, rank: int
) -> tuple[list[Params], PowerState, jax.Array]:
    """PowerSGD on the kernels that this rank makes small enough; everything else is packed and reduced as it is."""
    layout, chosen, c = compression.layout, compression.compressed_kernels(rank), compression.config.compress
    dims = jax.tree.map(lambda dim: max(dim - 1, -1), layout.data_dims()["layers"])
    gradients = {(i, *path): layer[path[0]][path[1]] for i, layer in enumerate(layers) for path in _paths(layer)}
    places = [(i, *path) for i in range(len(layers)) for path in compression.power_kernels]
    used = [n for n, (_, *path) in enumerate(places) if tuple(path) in chosen]
    error, q = list(state.error), list(state.q)
    for n in set(range(len(places))) - set(used):
        # Compressed at a lower rank, and dense now: what was left out then goes along.
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
        if dim == 0:  # of the product only this rank's rows are formed
            p, shape = _shard(layout, p, 0), (shape[0] // layout.config.mesh.data, *shape[1:])
        whole = kernels.decode(p, w, jnp.float32, implementation=compression.implementation).reshape(shape)
        reduced[place] = whole if dim == 0 else _shard(layout, whole, dim)
    # A tensor group's devices have different parts of the matrices, a data group's different errors.
    left, total = lax.psum(jnp.stack(stats), ("data", "tensor"))
    return _trees(layers, reduced), PowerState(error, q), jnp.where(total > 0, jnp.sqrt(left / total), jnp.nan)


def _sum_over_sequence(grads: Weights) -> Weights:
    """The sum over tensor for norms and biases whose gradients have one device's part of the sequence, in one go."""
    leaves, structure = jax.tree_util.tree_flatten_with_path((grads.chunks, grads.final_norm))
    values = [x for _, x in leaves]
    keys = [tuple(k.key for k in path if isinstance(k, jax.tree_util.DictKey)) for path, _ in leaves]
    parts = [i for i, found in enumerate(keys) if tensor_dim(found) is None]
    for i, total in zip(parts, packed(lambda x: lax.psum(x, "tensor"), [values[i] for i in parts]), strict=True):
        values[i] = total
    chunks, final_norm = structure.unflatten(values)
    return grads._replace(chunks=chunks, final_norm=final_norm)


def _paths(layer: Params) -> list[tuple[str, str]]:
    return [(name, leaf) for name in layer for leaf in layer[name]]


def layer_gradients(grads: Weights) -> list[Params]:
    """The layers of a device's gradients, slot after slot."""
    return [layer for chunk in grads.chunks for part in chunk for layer in _layers(part)]


def reduce_layers(
    compression: Compression, rank: int, layers: list[Params], state: PowerState | tuple[()]
) -> tuple[list[Params], PowerState | tuple[()], jax.Array]:
    """The layers' part of `reduce_gradients` on a stage of that rank; see Reduced for what comes back."""
    if rank:
        return _low_rank_layers(compression, layers, state, rank)
    dims = jax.tree.map(lambda dim: max(dim - 1, -1), compression.layout.data_dims()["layers"])
    return _means(compression.layout, layers, [dims] * len(layers)), state, jnp.float32(0)


@jax.named_scope("reduce_gradients")
def reduce_gradients(
    compression: Compression, ranks: tuple[int, ...], grads: Weights, state: PowerState | tuple[()]
) -> Reduced:
    """Means over data of a device's gradients.

    Args:
        ranks: of every stage's factors, 0 for a stage that sends its gradients as they are.
        grads: float32 sums over the micro-batches.
        state: of the compression over data, () where there is none.
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
        # A data group is of one stage: all its ranks take the same branch, so its collectives match.
        mine = jnp.array([kinds.index(rank) for rank in ranks])[lax.axis_index("pipe")]
        reduced, state, left_out = lax.switch(mine, branches)
    one = lambda dim: max(dim - 1, -1)  # noqa: E731  # of an array without the leading dim of stages
    table, dim = grads.embedding["token"], dims["embedding"]["token"]
    tied = layout.config.model.tied_head
    table = _tied_embedding(layout, table, one(dim))[None] if tied else _tables(layout, table, dim)
    # All else that a stage has beside its layers: positions, where there are any, and the final norm.
    rest = [{k: x for k, x in part.items() if k != "token"} for part in (grads.embedding, grads.final_norm)]
    places = [{k: one(of[k]) for k in part} for part, of in zip(rest, (dims["embedding"], dims["final_norm"]))]
    positions, final_norm = jax.tree.map(lambda x: x[None], _means(layout, rest, places))
    tree = {
        "embedding": {"token": table, **positions},
        "layers": jax.tree.map(lambda *slots: jnp.stack(slots), *reduced),
        "final_norm": final_norm,
    }
    return Reduced(tree, state, left_out)


def global_norm(layout: Layout, grads: Params) -> jax.Array:
    """Norm of all gradients, each parameter once, from a device's part in mesh layout.

    One collective over the whole mesh. Every device adds the parts itself, in the mesh's order: the order of an
    all-reduce, and with it the norm's last bit, differs between gloo, NCCL and devices of one process.
    """
    mesh, dims = layout.config.mesh, layout.data_dims()

    def squares(path: tuple, x: jax.Array, dim: int) -> jax.Array:
        copies = (mesh.data if dim < 0 else 1) * (mesh.tensor if tensor_dim(names(path)) is None else 1)
        own = jnp.square(x.astype(jnp.float32)).sum() / copies
        # The last stage has the tied embedding a second time.
        second = names(path)[-1] == "token" and layout.stages > 1 and layout.config.model.tied_head
        return jnp.where(lax.axis_index("pipe") == 0, own, 0) if second else own

    every = jax.tree.leaves(jax.tree_util.tree_map_with_path(squares, grads, dims))
    return jnp.sqrt(gather(sum(every), ("data", "pipe", "tensor")).sum())
