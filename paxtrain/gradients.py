"""Data parallelism: the collectives before and after the pipeline, inside shard_map.

With ZeRO-1 each data rank keeps a shard of every master weight. A step gathers the weights once, in compute dtype, and
leaves the gradients as shards (reduce-scatter, float32); XLA's combiner buckets both. Without it weights are whole and
gradients are all-reduced.

References:
    Rajbhandari et al. 2020, ZeRO. Tied embedding: Optimus-CC (Song et al. 2023), fused embedding synchronisation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain import model
from paxtrain.layout import Layout, Params, names
from paxtrain.rings import only_if
from paxtrain.stage import Segment, Weights


def _on_edges(layout: Layout, run: Any, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """run(x) on the first and the last stage, the only ones with an embedding; zeros on those between."""
    if layout.stages <= 2:
        return run(x)
    stage = lax.axis_index("pipe")
    edge = (stage == 0) | (stage == layout.stages - 1)
    return only_if(edge, lambda _: run(x), jnp.zeros(shape, x.dtype))


def gather_weights(layout: Layout, shards: Params) -> Weights:
    """A device's weights in compute dtype from its shards of the master weights; one all-gather per matrix and layer.

    Layers are split here, once per step and outside any vjp, so that the vjps find each weight by identity.
    """
    dims, data = layout.data_dims(), layout.config.mesh.data

    def gather(path: tuple, x: jax.Array, dim: int) -> jax.Array:
        if dim < 0:
            return x
        run = functools.partial(lax.all_gather, axis_name="data", axis=dim, tiled=True)
        if names(path)[-1] != "token":
            return run(x)
        return _on_edges(layout, run, x, tuple(n * (data if i == dim else 1) for i, n in enumerate(x.shape)))

    def rows(key: str, take: int | slice) -> Params:
        """Some rows of shards[key], in compute dtype and whole; a single row loses its dim."""
        some = model.cast(jax.tree.map(lambda x: x[take], shards[key]), layout.config.model.dtype)
        lost = 1 if isinstance(take, int) else 0
        return jax.tree_util.tree_map_with_path(
            lambda path, x, dim: gather(path, x, max(dim - lost, -1)), some, dims[key]
        )

    def segment(first: int, segment: Segment) -> Any:
        if segment.scan:
            return rows("layers", slice(first, first + segment.count))
        return [rows("layers", first + i) for i in range(segment.count)]

    chunks = [
        [segment(chunk * layout.slots + s.start, s) for s in layout.program.segments] for chunk in range(layout.chunks)
    ]
    return Weights(rows("embedding", 0), chunks, rows("final_norm", 0))


def _swap_edges(layout: Layout, x: jax.Array) -> jax.Array:
    """x plus what the other end of the pipeline holds: the sum over the two tied copies, the same bits on both."""
    if layout.stages == 1:
        return x
    last = layout.stages - 1
    return x + lax.ppermute(x, "pipe", [(0, last), (last, 0)])


def _layers(segment: Any) -> list[Params]:
    """The layers of a segment, one tree each."""
    if isinstance(segment, list):
        return segment
    count = jax.tree.leaves(segment)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], segment) for i in range(count)]


def reduce_gradients(layout: Layout, grads: Weights) -> Params:
    """Means over data of a device's gradients in mesh layout, as it keeps them: ZeRO-1 shards, or whole.

    The tied embedding's two gradients are summed on their shards, between reduce-scatter and (without ZeRO-1)
    all-gather: V(2D-1)/D bytes for V bytes of table and D data ranks; two all-reduces in a row take V(3D-2)/D.
    """
    dims, data = layout.data_dims(), layout.config.mesh.data

    def embedding(x: jax.Array, dim: int) -> jax.Array:
        if data == 1:
            return _swap_edges(layout, x)
        # Without ZeRO-1 the table is scattered over its rows for the sum only; they are a multiple of vocab_multiple.
        scatter = dim if dim >= 0 else next((d for d in range(x.ndim) if x.shape[d] % data == 0), -1)
        if scatter < 0:
            return _swap_edges(layout, lax.pmean(x, "data"))
        shape = tuple(n // (data if i == scatter else 1) for i, n in enumerate(x.shape))
        reduce = lambda v: lax.psum_scatter(v, "data", scatter_dimension=scatter, tiled=True) / data  # noqa: E731
        shard = _swap_edges(layout, _on_edges(layout, reduce, x, shape))
        if dim >= 0:
            return shard
        return _on_edges(layout, lambda v: lax.all_gather(v, "data", axis=scatter, tiled=True), shard, x.shape)

    def mean(x: jax.Array, dim: int) -> jax.Array:
        if data == 1:
            return x
        if dim < 0:
            return lax.pmean(x, "data")
        return lax.psum_scatter(x, "data", scatter_dimension=dim, tiled=True) / data

    def edge(path: tuple, x: jax.Array, dim: int) -> jax.Array:
        dim = max(dim - 1, -1)  # x has no leading dim of stages
        return (embedding(x, dim) if names(path)[-1] == "token" else mean(x, dim))[None]

    rows = [layer for chunk in grads.chunks for part in chunk for layer in _layers(part)]
    # Layer by layer a shard is contiguous; over the stack XLA would transpose everything that it meets.
    reduced = [jax.tree.map(lambda x, dim: mean(x, max(dim - 1, -1)), row, dims["layers"]) for row in rows]
    return {
        "embedding": jax.tree_util.tree_map_with_path(edge, grads.embedding, dims["embedding"]),
        "layers": jax.tree.map(lambda *rows: jnp.stack(rows), *reduced),
        "final_norm": jax.tree_util.tree_map_with_path(edge, grads.final_norm, dims["final_norm"]),
    }
