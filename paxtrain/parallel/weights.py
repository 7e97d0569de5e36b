"""The weights of a step, gathered over data before the pipeline. All functions run inside `shard_map`.

With ZeRO-1 each data rank keeps a shard of every master weight. A step gathers the weights once, in compute dtype. With
mesh.shard=weights it gathers norms, biases and positions only; a stage gathers kernels and tables when it needs them.
If groups of data ranks share these, the step makes each device's shard of them from those of the groups.

References:
    Rajbhandari et al. 2020, ZeRO, https://arxiv.org/abs/1910.02054.
"""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Codec
from compress.collectives import Axis, all_gather, packed_gather
from compress.reducer import Shard, gather
from paxtrain.config.axes import PIPE
from paxtrain.model import parameters, transformer
from paxtrain.parallel.layout import Layout, Params
from paxtrain.pipeline.program import Segment, Weights
from paxtrain.pipeline.rings import only_if

T = TypeVar("T")  # a pytree of arrays


def on_edges(layout: Layout, run: Callable[[T], T], x: T) -> T:
    """Return run(x) on the first and the last stage, which have the embedding, and zeros on the stages between.

    If processes communicate over gloo, all stages call `run`, those between with zeros. In a program that was loaded
    and not compiled, a collective inside a loop may run beside those outside (paxtrain.process.compilation_cache):
    in another order on each process, which gloo answers by an abort. Trainers compile; the lab's processes load.

    Args:
        layout: Layout of the parameters.
        run: Function with collectives over data.
        x: Its argument, a pytree of arrays; zeros on stages between.
    """
    if len(layout.ends) == layout.stages:
        return run(x)
    stage = lax.axis_index(PIPE)
    edge = (stage == 0) | (stage == layout.ends[-1])

    def skip(x: T) -> T:
        nothing = jax.tree.map(lambda one: jnp.zeros(one.shape, one.dtype), jax.eval_shape(run, x))
        return only_if(edge, lambda _: run(x), nothing)

    return skip(x) if jax.process_count() == 1 else lax.platform_dependent(x, cpu=run, default=skip)


def gather_each(axis: Axis, shards: list[jax.Array], dims: list[int]) -> list[jax.Array]:
    """Return arrays gathered over axes, each along its dim; an array whose dim is -1 is whole already.

    XLA for GPUs buckets collectives of single arrays. XLA for CPUs does not, and over gloo each collective takes
    milliseconds, so arrays are packed into one there.
    """
    some = [i for i, dim in enumerate(dims) if dim >= 0]
    dtypes = dict.fromkeys(shards[i].dtype for i in some)  # not a set: all processes need the same order
    kinds = [[i for i in some if shards[i].dtype == dtype] for dtype in dtypes]

    def each(shards: list[jax.Array]) -> list[jax.Array]:
        return [all_gather(x, axis, d) if d >= 0 else x for x, d in zip(shards, dims)]

    def together(shards: list[jax.Array]) -> list[jax.Array]:
        gathered = list(shards)
        for places in kinds:
            whole = packed_gather([shards[i] for i in places], [dims[i] for i in places], axis)
            for i, x in zip(places, whole, strict=True):
                gathered[i] = x
        return gathered

    return lax.platform_dependent(shards, cpu=together, default=each) if some else shards


@jax.named_scope("embedding")
def _gather_table(layout: Layout, axes: Axis | None, shard: jax.Array, dim: int) -> jax.Array:
    """Return the embedding's table gathered over axes along dim, on the first and the last stage."""
    if dim < 0 or axes is None:
        return shard
    run = functools.partial(all_gather, axis=axes, dim=dim)
    return on_edges(layout, run, shard)


def _in_shards(layout: Layout, path: tuple) -> bool:
    """Return whether an array of the layers in Weights, given by jax's path, stays in shards."""
    return layout.in_shards("layers", *(getattr(key, "key", "") for key in path[-2:])) is not None


def _is_kernel(layout: Layout, path: tuple) -> bool:
    """Return whether an array of Weights, given by jax's path, is a layer's kernel."""
    row = layout.rows.get(("layers", *(getattr(key, "key", "") for key in path[-2:])))
    return row is not None and row.role == "kernel"


def _gather_coded(layout: Layout, codec: Codec, shards: Weights, dims: Weights) -> Weights:
    """Return the shards with the layers' kernels gathered over data through a codec; other arrays stay as they are."""
    named, structure = jax.tree_util.tree_flatten_with_path(shards)
    leaves, places = [x for _, x in named], jax.tree.leaves(dims)
    some = [i for i, (path, _) in enumerate(named) if _is_kernel(layout, path) and places[i] >= 0]
    where = [Shard(layout.replica_axes, layout.config.mesh.replicas, places[i]) for i in some]
    with jax.named_scope("compression"):
        for i, x in zip(some, gather(codec, [leaves[i] for i in some], where), strict=True):
            leaves[i] = x
    return jax.tree.unflatten(structure, leaves)


def _dims_of(layout: Layout, dims: Weights, shards: bool) -> Weights:
    """Return dims with -1 for all arrays except those that stay in shards, or except the others."""
    return jax.tree_util.tree_map_with_path(lambda path, dim: dim if _in_shards(layout, path) == shards else -1, dims)


def _gather_all(axis: Axis, tree: T, dims: T) -> T:
    """Return `gather_each` of the arrays of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, gather_each(axis, leaves, jax.tree.leaves(dims)))


def _without_kernels(layout: Layout, dims: Weights) -> Weights:
    """Return dims with -1 for the layers' kernels, which are gathered."""
    return jax.tree_util.tree_map_with_path(lambda path, dim: -1 if _is_kernel(layout, path) else dim, dims)


@jax.named_scope("gather_weights")
def gather_weights(layout: Layout, shards: Params, codec: Codec | None = None) -> Weights:
    """Gather a device's weights, in compute dtype, from the shards of the master weights.

    Layers are separated here, once per step and outside of any vjp, so that the vjps recognise weights by identity.

    Args:
        layout: Layout of the parameters.
        shards: The device's shards of the parameters in mesh layout, float32.
        codec: Codec of the layers' kernels; None: they are gathered as they are.
    """

    def weights(tree: Params, take: Callable[[str, Params, Params], Params]) -> Weights:
        """Arrange a mesh-layout tree as Weights; `take` returns a row of each array, or several for scanned layers."""

        def layers(chunk: int, segment: Segment, start: int, count: int) -> Params:
            """Return one layer of a segment, or `count` stacked ones."""
            own, rows = {}, {}
            for p in parameters.of_kind(layout.config.model, segment.kind):
                places = layout.places(p)
                row = chunk * len(places) + places.index(start)
                own[p.names[1:]] = tree["layers"][p.names[1]][p.names[2]]
                rows[p.names[1:]] = slice(row, row + count) if count else row
            return take("layers", parameters.tree(own), parameters.tree(rows))

        def segment(chunk: int, segment: Segment) -> Params | list[Params]:
            if segment.scan:
                return layers(chunk, segment, segment.start, segment.count)
            return [layers(chunk, segment, segment.start + i, 0) for i in range(segment.count)]

        chunks = [[segment(chunk, s) for s in layout.program.segments] for chunk in range(layout.chunks)]
        rest = {name: x for name, x in tree["embedding"].items() if name != "token"}
        ends = [("embedding", rest), ("final_norm", tree["final_norm"])]
        embedding, final_norm = (take(entry, part, dict.fromkeys(part, 0)) for entry, part in ends)
        return Weights(embedding, chunks, final_norm)

    def cast(entry: str, tree: Params, rows: Params) -> Params:
        return transformer.cast(jax.tree.map(lambda x, row: x[row], tree, rows), layout.config.model, entry)

    def shifted(_: str, dims: Params, rows: Params) -> Params:
        # A single row has lost its dim.
        return jax.tree.map(lambda dim, row: max(dim - isinstance(row, int), -1), dims, rows)

    found, dims = weights(shards, cast), weights(layout.data_dims(), shifted)
    table, dim = shards["embedding"]["token"], layout.data_dims()["embedding"]["token"]
    if layout.config.model.tied_head:  # an untied table keeps dim 0: a single stage holds both tables
        table, dim = table[0], max(dim - 1, -1)
    table = table.astype(layout.config.model.dtype)
    axes: Axis | None = layout.replica_axes
    if layout.config.mesh.shard == "weights":
        if layout.copies_axis:
            found = _gather_all(layout.copies_axis, found, _dims_of(layout, dims, shards=True))
        dims = _dims_of(layout, dims, shards=False)
        axes = axes if layout.in_shards("embedding", "token") is None else layout.copies_axis
        codec = None  # which is of kernels
    table = _gather_table(layout, axes, table, dim)
    if codec is not None:
        found = _gather_coded(layout, codec, found, dims)
        dims = _without_kernels(layout, dims)
    gathered = _gather_all(layout.replica_axes, found, dims)
    return gathered._replace(embedding={**gathered.embedding, "token": table})
