"""When a stage reduces which gradients over data: `DataReduction`, which the pipeline calls (pipeline/closing.py).

Stages that have an op in the last row, as a rule the first one, reduce layer by layer within that op. The others are
done before, and reduce all at once while earlier stages still compute. The collectives are those of gradients.py.
Functions run inside `shard_map`.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.tree_util import tree_leaves_with_path

from compress.codec import Codec, State, Tree
from compress.reducer import LeftOut, Shard, each, gather, mean, stored
from paxtrain.config.axes import AXES, PIPE
from paxtrain.model import parameters
from paxtrain.parallel import gradients
from paxtrain.parallel.compression.settled import Compression, LayerPath
from paxtrain.parallel.layout import Layout, Params, names
from paxtrain.parallel.weights import gather_each
from paxtrain.pipeline.closing import store
from paxtrain.pipeline.program import Layers, Sums, Weights, layers_of
from paxtrain.pipeline.rings import write_front
from paxtrain.pipeline.sharding import InShards, Whole


class Reduced(NamedTuple):
    """The gradients of a device after the reduction over data.

    Attributes:
        gradients: Mean gradients in mesh layout: the device's ZeRO-1 shards, or whole arrays.
        state: New state of the compression over data.
        left_out: Relative error of the stage's compression, float32 []: the norm of the new error over the norm of
            gradient plus previous error. It is 0 without compression and nan if all gradients are zero.
        tables: New state of the embedding's codec.
    """

    gradients: Params
    state: Tree
    left_out: jax.Array
    tables: State


class LayerState(NamedTuple):
    """The compression of one layer's gradients.

    Attributes:
        kernels: State of the layer's kernels, see `compress.reducer.stored`.
        stats: Statistics of its compression on this device.
    """

    kernels: Tree
    stats: LeftOut


@dataclasses.dataclass(frozen=True, eq=False)
class DataReduction:
    """The reduction of a device's gradients over data; it is a paxtrain.pipeline.closing.Reduction.

    The state of a layer is a LayerState, or () without compression over data.

    Attributes:
        compression: Compression of the run.
        ranks: Level of the reducer on each stage, the rank of PowerSGD; 0 for a stage with a dense reduction.
        state: State of the compression over data; () without compression.
        tables: State of the embedding's codec; () without one.
    """

    compression: Compression
    ranks: tuple[int, ...]
    state: Tree
    tables: State = ()

    @property
    def layout(self) -> Layout:
        """Layout of the parameters."""
        return self.compression.layout

    def states(self) -> list[State]:
        """Return the state of each layer slot before the step, and last that of the embedding's codec."""
        return [*self._states(self.state, _no_stats()), self.tables]

    def errors(self) -> list[list[Tree]] | tuple[()]:
        """Return what a codec in each micro-batch has left out before the step, as `Weights.errors`.

        Each layer has a LayerState, its kernels' states by path.
        """
        compression, slots = self.compression, self.compression.slot_kernels
        if not (compression.each_micro_batch and any(self.ranks) and any(slots)):
            return ()
        kernels = iter(each(self.state, compression.data_structure, sum(map(len, slots))))
        layers = iter([LayerState({path: next(kernels) for path in paths}, _no_stats()) for paths in slots])

        def segment(count: int, scan: bool) -> Tree:
            own = [next(layers) for _ in range(count)]
            return jax.tree.map(lambda *x: jnp.stack(x), *own) if scan else own

        segments = self.layout.program.segments
        return [[segment(s.count, s.scan) for s in segments] for _ in range(self.layout.chunks)]

    @property
    def _slots(self) -> tuple[tuple[tuple[str, str], ...], ...]:
        """Kernels of each layer slot that the reducer takes at a step's end."""
        slots = self.compression.slot_kernels
        return ((),) * len(slots) if self.compression.each_micro_batch else slots

    def _states(self, state: Tree, stats: LeftOut) -> list[State]:
        """Return the state of each layer slot, given that of all; the first one has all statistics."""
        slots = self._slots
        if not any(slots):
            return [()] * len(slots)
        kernels = iter(each(state, self.compression.data_structure, sum(map(len, slots))))
        own = [stored([next(kernels) for _ in paths]) for paths in slots]
        zero = LeftOut(*map(jnp.zeros_like, stats))
        return [LayerState(kernels, zero if i else stats) for i, kernels in enumerate(own)]

    def closes(self, stages: tuple[int, ...]) -> bool:
        """Return whether these stages reduce layer by layer, within their last op.

        They do if there is something to send, if all of them run the same program, and if sums are not in shards.
        """
        mesh = self.layout.config.mesh
        return mesh.replicas > 1 and len({self.ranks[s] for s in stages}) == 1 and not mesh.shards_sums

    @jax.named_scope("reduce_gradients")
    def layer(self, stages: tuple[int, ...], total: Params, state: State) -> tuple[Params, State]:
        """Return the mean gradient of one layer over data, and its new state.

        Args:
            stages: Stages that may make the call; all of them reduce at the same level.
            total: The layer's gradient, float32 sum over the micro-batches.
            state: Its state before the step.
        """
        before, level = state.kernels if state else (), self.ranks[stages[0]]
        [reduced], kernels, stats = gradients.reduce_layers(self.compression, level, [total], before)
        return reduced, LayerState(kernels, stats) if state else ()

    @jax.named_scope("reduce_gradients")
    def rest(self, stages: tuple[int, ...], grads: Weights, state: State) -> tuple[tuple[Params, Params], State]:
        """Return the mean gradients of embedding and final norm, and the new state; a tied table's is of one stage.

        Args:
            stages: Stages that may make the call.
            grads: The device's gradients, float32 sums over the micro-batches.
            state: State of the embedding's codec before the step.
        """
        layout, dims = self.layout, self.layout.data_dims()
        # Positions, if the model has any and their codec does not take them, and the final norm.
        coded = self.compression.tables.arrays.keys() if self.compression.tables else {"token"}
        rest = [{k: x for k, x in part.items() if k not in coded} for part in (grads.embedding, grads.final_norm)]
        groups = (dims["embedding"], dims["final_norm"])
        some = [{k: gradients.without_stage(group[k]) for k in part} for part, group in zip(rest, groups, strict=True)]
        positions, final_norm = gradients.means(layout, rest, some, layout.replica_axes)
        edges = set(stages) <= {*layout.ends}
        tables, state = gradients.reduce_tables(self.compression, grads.embedding, state, edges)
        return ({**tables, **positions}, final_norm), state

    @jax.named_scope("reduce_gradients")
    def whole(self, stages: tuple[int, ...], grads: Weights, states: list[State]) -> tuple[Weights, list[State]]:
        """Return the accumulators with all mean gradients at their front, and the new states.

        Args:
            stages: Stages that may make the call.
            grads: The device's gradients, float32 sums over the micro-batches.
            states: States before the step.
        """
        if self.layout.config.mesh.replicas == 1:
            return grads, states  # to write equal values to their place XLA would copy stacks of scanned layers
        ranks = (0,) * len(self.ranks) if self.compression.each_micro_batch else self.ranks
        layers, kinds = gradients.layer_gradients(grads), sorted({ranks[s] for s in stages})
        *states, tables = states
        state = self._joined(states)
        branches = [functools.partial(gradients.reduce_layers, self.compression, rank, layers, state) for rank in kinds]
        if len(kinds) == 1:
            reduced, state, stats = branches[0]()
        else:
            # All ranks of a data group belong to one stage and take the same branch, so their collectives match.
            numbers = [kinds.index(rank) if rank in kinds else 0 for rank in ranks]
            reduced, state, stats = lax.switch(jnp.array(numbers)[lax.axis_index(PIPE)], branches)
        rows = iter(reduced)
        chunks = [
            [self._store(total, [next(rows) for _ in layers_of(total)]) for total in segments]
            for segments in grads.chunks
        ]
        reduced_rest, tables = self.rest(stages, grads, tables)
        fronts = write_front((grads.embedding, grads.final_norm), (), reduced_rest)
        return Weights(fronts[0], chunks, fronts[1], grads.errors), [*self._states(state, stats), tables]

    def _store(self, total: Layers, reduced: list[Params]) -> Layers:
        """Return what `store` does; sums that are reduced already stay as they are."""
        mesh = self.layout.config.mesh
        if isinstance(total, list) or not mesh.shards_sums or mesh.copies > 1:
            return store(total, reduced)
        # To write equal values to their place XLA would copy the stack.
        stored = store(total, reduced)
        assert isinstance(stored, dict)
        kept = {path: self.layout.in_shards("layers", *path) is not None for path in gradients.paths(total)}
        return parameters.tree({path: (total if keep else stored)[path[0]][path[1]] for path, keep in kept.items()})

    def _joined(self, states: list[State]) -> Tree:
        """Return the state of all layers, given that of each."""
        slots = self._slots
        if not any(slots):
            return ()
        structure, both = self.compression.data_structure, zip(states, slots, strict=True)
        return stored([one for state, paths in both for one in each(state.kernels, structure, len(paths))])

    @jax.named_scope("reduce_gradients")
    def finish(self, grads: Weights, states: list[State]) -> Reduced:
        """Return the gradients in mesh layout, with the tied embedding's exchanged between first and last stage.

        Args:
            grads: Accumulators with all mean gradients at their front.
            states: States after the reduction.
        """
        layout, dims = self.layout, self.layout.data_dims()

        def front(x: jax.Array, dim: int, *names: str) -> jax.Array:
            mesh = layout.config.mesh
            return gradients.front(x, dim, mesh.replicas if layout.in_shards(*names) is None else mesh.copies)

        grads = lax.optimization_barrier(grads)
        *states, tables = states
        parts = [part for chunk in grads.chunks for segment in chunk for part in _rows(segment)]
        embedding = jax.tree.map(lambda x: x[None], {k: x for k, x in grads.embedding.items() if k != "token"})
        table = grads.embedding["token"]
        if layout.config.model.tied_head:
            own = front(table, layout.scatter_dim, "embedding", "token")
            table, tables = gradients.exchange_tied(self.compression, own, tables)
            table = table[None]
        else:
            table = front(table, dims["embedding"]["token"], "embedding", "token")
        rows: dict[tuple[str, str], list[jax.Array]] = {}
        for part in parts:
            for name, leaf in gradients.paths(part):
                own = front(part[name][leaf], dims["layers"][name][leaf], "layers", name, leaf)
                rows.setdefault((name, leaf), []).append(own)
        tree = {
            "embedding": {"token": table, **{k: front(x, dims["embedding"][k]) for k, x in embedding.items()}},
            "layers": parameters.tree({path: jnp.concatenate(slots) for path, slots in sorted(rows.items())}),
            "final_norm": {k: front(x[None], dims["final_norm"][k]) for k, x in grads.final_norm.items()},
        }
        tree = gradients.sum_over_axes(layout, tree)
        if self.compression.each_micro_batch:
            layers: list[Any] = [layer for chunk in grads.errors for part in chunk for layer in layers_of(part)]
            slots = zip(layers, self.compression.slot_kernels, strict=True) if layers else ()
            kept = stored([layer.kernels[path] for layer, paths in slots for path in paths]) if layers else self.state
            return Reduced(tree, kept, self._left_out(layers), tables)
        return Reduced(tree, self._joined(states), self._left_out(states), tables)

    def _left_out(self, states: list[State]) -> jax.Array:
        """Return the relative error of the stage's compression."""
        if not (any(self.ranks) and states):
            return jnp.float32(0)
        # Devices of a tensor group have different parts of the matrices, those of a data group different errors.
        sums = jnp.stack([sum(part) for part in zip(*(state.stats for state in states), strict=True)])
        with jax.named_scope("compression"):
            left, total = lax.psum(sums, self.layout.config.mesh.over(*(axis for axis in AXES if axis != PIPE)))
        error = jnp.where(total > 0, jnp.sqrt(left / total), jnp.nan)
        return jnp.where(jnp.array(self.ranks)[lax.axis_index(PIPE)] > 0, error, 0.0)


@dataclasses.dataclass(frozen=True)
class DataShards:
    """Shards over data of weights and of the sums of gradients; it is a paxtrain.pipeline.sharding.DataCollectives.

    The data ranks of a group share them (mesh.shard_group), and its collectives are inside the group.

    Attributes:
        layout: Layout of the parameters.
        codec: Codec of the kernels that are gathered; None: they travel as they are.
        compression: Compression of the run, whose reducer takes gradients that come with errors.
    """

    layout: Layout
    codec: Codec | None
    compression: Compression | None = None

    @property
    def _gathers(self) -> bool:
        return self.layout.config.mesh.shard == "weights"

    def _parted(self, layer: Params) -> tuple[list[jax.Array], list[int], list[int], jax.tree_util.PyTreeDef]:
        """Return a layer's arrays, which of them are in shards and along which dims, and the structure of the tree."""
        leaves, structure = jax.tree_util.tree_flatten_with_path(layer)
        dims = [self.layout.in_shards("layers", *names(path)) for path, _ in leaves]
        which = [i for i, dim in enumerate(dims) if dim is not None]
        arrays = [x for _, x in leaves]
        return arrays, which, [arrays[i].ndim + (dims[i] or 0) for i in which], structure

    def sums(self, weights: Weights) -> Weights:
        """Return the shapes of the gradients' sums on a device."""

        def shape(path: tuple, x: jax.Array) -> jax.ShapeDtypeStruct:
            keys = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
            dim = self.layout.in_shards(*(("layers", *keys) if len(keys) > 1 else ("embedding", *keys)))
            sizes = list(x.shape)
            if dim is not None:
                sizes[dim] //= self.layout.config.mesh.sharing
            return jax.ShapeDtypeStruct(tuple(sizes), x.dtype)

        return weights if self._gathers else jax.tree_util.tree_map_with_path(shape, weights)

    @jax.named_scope("gather_weights")
    def gather(self, layer: Params) -> Params:
        """Return the weights of a layer, whole."""
        if not self._gathers:
            return layer
        arrays, which, dims, structure = self._parted(layer)
        parts = [arrays[i] for i in which]
        if self.codec is None:
            whole = gather_each(self.layout.group_axes, parts, dims)
        else:
            where = [Shard(self.layout.group_axes, self.layout.config.mesh.sharing, dim) for dim in dims]
            with jax.named_scope("compression"):
                whole = gather(self.codec, parts, where)
        for i, x in zip(which, whole, strict=True):
            arrays[i] = x
        return jax.tree.unflatten(structure, arrays)

    @jax.named_scope("reduce_gradients")
    def scatter(self, made: Params, errors: LayerState | tuple[()]) -> Sums:
        """Return what a device sums of the gradients of a layer, or of some of its arrays, and errors; others are None.

        Args:
            made: Sums over one micro-batch, whole arrays in float32.
            errors: What the reducer has left out of earlier ones; (): gradients travel as they are.
        """
        arrays, which, dims, structure = self._parted(made)
        named = [(name, leaf) for name, leaf in (names(path) for path, _ in tree_leaves_with_path(made))]
        coded = {named[i]: i for i in which if errors and named[i] in errors.kernels}
        if coded and errors:
            some, errors = self._reduced({path: arrays[i] for path, i in coded.items()}, errors)
            for path, i in coded.items():
                arrays[i] = some[path]
        left = [n for n, i in enumerate(which) if named[i] not in coded]
        dense = [arrays[which[n]] for n in left]
        for n, x in zip(left, gradients.means(self.layout, dense, [dims[n] for n in left], self.layout.group_axes)):
            arrays[which[n]] = x
        return Sums(jax.tree.unflatten(structure, arrays), errors)

    @jax.named_scope("compression")
    def _reduced(
        self, made: dict[LayerPath, jax.Array], errors: LayerState
    ) -> tuple[dict[LayerPath, jax.Array], LayerState]:
        """Return the reducer's means of gradients, by path, and the errors after them."""
        assert self.compression and self.compression.reducer
        states, shards = [errors.kernels[path] for path in made], [self.compression.over_data[path][1] for path in made]
        found, states, left_out = mean(self.compression.reducer, states, list(made.values()), shards)
        kernels = errors.kernels | dict(zip(made, states, strict=True))
        return dict(zip(made, found, strict=True)), LayerState(kernels, LeftOut(*map(jnp.add, errors.stats, left_out)))

    @property
    def _table_dim(self) -> int | None:
        """Dim of a table [V/T, H] that is in shards; None if it is whole."""
        found = self.layout.in_shards("embedding", "token")
        return None if found is None else found + 2

    @jax.named_scope("gather_weights")
    def gather_table(self, table: jax.Array) -> jax.Array:
        """Return a table of the vocabulary, whole."""
        dim = self._table_dim
        return gather_each(self.layout.group_axes, [table], [dim])[0] if self._gathers and dim is not None else table

    @jax.named_scope("reduce_gradients")
    def scatter_table(self, gradient: jax.Array) -> jax.Array:
        """Return what a device sums of the gradient of a table of the vocabulary."""
        dim = self._table_dim
        return gradient if dim is None else gradients.means(self.layout, [gradient], [dim], self.layout.group_axes)[0]


def held_by(compression: Compression, codec: Codec | None, reduction: DataReduction | None) -> Whole:
    """Return how a stage has its weights and the sums of their gradients.

    Args:
        compression: Compression of the run.
        codec: Codec of the kernels that are gathered; None: they travel as they are.
        reduction: Reduction of the gradients; None: they travel as they are.
    """
    layout, mesh = compression.layout, compression.config.mesh
    if not (mesh.shards_sums and mesh.replicas > 1):
        return Whole()
    return InShards(DataShards(layout, codec, compression), reduction.errors() if reduction else ())


def _no_stats() -> LeftOut:
    """Return statistics before the first message."""
    return LeftOut(jnp.float32(0), jnp.float32(0))


def _rows(segment: Layers) -> list[Params]:
    """Return the accumulators of a segment with a leading dim of layers: one for each, or a scanned one's stack."""
    return [jax.tree.map(lambda x: x[None], own) for own in segment] if isinstance(segment, list) else [segment]
