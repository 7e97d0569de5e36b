"""The mesh layout of the parameters, and its conversion from and to canonical parameters.

Canonical parameters are those of `model.transformer`: layers stacked in model order, every table once. The mesh layout
distributes them over the axes data, pipe and tensor, with P stages of R layer slots each. R is the number of chunks
times the most layers of a virtual stage; slots without a layer stay zero.

    layers             [P*R, ...] over pipe; stage s holds the rows of its chunks, chunk after chunk; of a parameter
                       that only some kinds of layers have, R counts the slots of these kinds
    embedding.token    [P, V, H] over pipe and tensor; rows 0 and P-1 are in use: the two copies of a tied table, or the
                       embedding's table and an untied head's; other rows are zero. If one stage holds the first and
                       the last virtual stage, a tied table is in row 0, and untied ones are the first of [2P, V, H].
    embedding.position [P, S, H] over pipe; row 0 is in use
    final_norm         [P, H] over pipe; the row of the last virtual stage's stage is in use: P-1, or 0 if folded

Thus no array is declared replicated over pipe while only one stage updates it. With ZeRO-1 one more dim of each array
is split over data (Rajbhandari et al. 2020, stage 1, with the master weights split too).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from compress.codec import Codec
from compress.collectives import Axis
from paxtrain.config import Config
from paxtrain.config.axes import AXES, DATA, PIPE, REPLICA, replica_axes
from paxtrain.model import parameters, transformer
from paxtrain.model.spec import Parameter, Params
from paxtrain.model.tensor_parallel import Group
from paxtrain.parallel.compression.named import named_codec
from paxtrain.pipeline.program import Program
from paxtrain.schedule.layer_slots import filled, shared_slots
from paxtrain.schedule.stage_map import StageMap


def is_spec(x: object) -> bool:
    """Return whether a node of a tree is a PartitionSpec, which jax may take for a tuple."""
    return isinstance(x, PartitionSpec)


def _named(axes: tuple[str, ...]) -> Axis:
    """Return several axes as a tuple, and a single one by its name."""
    return axes if len(axes) > 1 else axes[0]


def names(path: tuple) -> tuple[str, ...]:
    """Return the dictionary keys of a jax key path."""
    return tuple(entry.key for entry in path)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The placement of one model on one mesh; it depends on the configuration alone and is hashable.

    Attributes:
        config: Configuration with the model, the mesh and the pipeline.
    """

    config: Config

    @property
    def stages(self) -> int:
        """Number of pipeline stages, P."""
        return self.config.mesh.pipe

    @property
    def chunks(self) -> int:
        """Number of chunks of each stage."""
        return self.config.pipeline.virtual_stages

    @property
    def stage_map(self) -> StageMap:
        """Stages of all virtual stages."""
        return self.config.stage_map

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of layers of each virtual stage, in model order."""
        return self.config.stage_layers

    @functools.cached_property
    def slot_kinds(self) -> tuple[str, ...]:
        """Kinds of the layer slots of a chunk."""
        return shared_slots(self._kinds)

    @property
    def slots(self) -> int:
        """Number of layer slots of a chunk."""
        return len(self.slot_kinds)

    @functools.cached_property
    def _kinds(self) -> list[tuple[str, ...]]:
        """Kinds of the layers of each virtual stage."""
        kinds = iter(parameters.kinds(self.config.model))
        return [tuple(itertools.islice(kinds, count)) for count in self.counts]

    @functools.cached_property
    def layer_of(self) -> np.ndarray:
        """Index of the layer in each slot, or -1: int [P, chunks, slots]."""
        starts = np.cumsum((0, *self.counts))
        table = np.full((self.stages, self.chunks, self.slots), -1)
        for (chunk, stage), virtual in np.ndenumerate(self.stage_map.virtual_of):
            own = list(filled(self.slot_kinds, self._kinds[virtual]))
            table[stage, chunk, own] = np.arange(starts[virtual], starts[virtual + 1])
        return table

    def places(self, row: Parameter) -> list[int]:
        """Return the slots of a chunk that have a parameter of layers."""
        return [slot for slot, kind in enumerate(self.slot_kinds) if row.of(kind)]

    def _stacked(self, path: tuple) -> np.ndarray:
        """Return the row of the canonical stack in each row of a parameter of layers in mesh layout, or -1."""
        row = self.row(path)
        layers = self.layer_of[:, :, self.places(row)].reshape(-1)
        number = {layer: i for i, layer in enumerate(parameters.stack(self.config.model, row))} | {-1: -1}
        return np.array([number[layer] for layer in layers.tolist()])

    @functools.cached_property
    def keys_codec(self) -> Codec | None:
        """Codec of keys and values between devices of a context group; None: they travel as they are."""
        compress = self.config.compress
        return named_codec(compress, "context") if compress.context.codec else None

    @functools.cached_property
    def program(self) -> Program:
        """Program of the pipeline's stages."""
        config = self.config
        return Program(
            model=config.model,
            stage_map=self.stage_map,
            layer_of=tuple(tuple(tuple(map(int, slots)) for slots in stage) for stage in self.layer_of),
            slots=self.slot_kinds,
            save=config.pipeline.save,
            scan_layers=config.pipeline.scans(self.counts),
            splits=config.pipeline.spec.splits and self.stages > 1,
            group=Group.of(config.mesh.sizes, config.mesh.sequence_parallel, config.mesh.context_form, self.keys_codec),
            pipe=PIPE if self.stages > 1 else None,
            data=DATA if config.uneven else None,
        )

    @property
    def replica_axes(self) -> Axis:
        """Mesh axes over which gradients are reduced and states are sharded."""
        return _named(self._replica_axes)

    @property
    def _replica_axes(self) -> tuple[str, ...]:
        """The same as a tuple, the major axis first: a state's shard is a part of the one that a group's device has."""
        return (*replica_axes(self.config.mesh.sizes), *(REPLICA,) * (self.config.mesh.copies > 1))

    @property
    def group_axes(self) -> Axis:
        """Mesh axes over which a group of data ranks shares weights and sums in shards."""
        return _named(replica_axes(self.config.mesh.sizes))

    @property
    def copies_axis(self) -> Axis | None:
        """Mesh axis of the groups of data ranks; None if all ranks are one group."""
        return REPLICA if self.config.mesh.copies > 1 else None

    def padding(self) -> float:
        """Return the share of layer slots without a layer, which is the memory cost of uneven stages."""
        return 1 - self.config.model.layers / self.layer_of.size

    @functools.cached_property
    def shapes(self) -> Params:
        """Shapes of the parameters in mesh layout, as float32 jax.ShapeDtypeStruct."""
        canonical = transformer.shapes(self.config.model)
        return jax.eval_shape(self.from_canonical, canonical)

    @property
    def parameters_per_device(self) -> int:
        """Number of weights that one device holds during a step, padding included."""
        sizes, total = self.config.mesh.sizes, 0
        for x, spec in zip(jax.tree.leaves(self.shapes), jax.tree.leaves(self.specs(data=False)), strict=True):
            total += x.size // math.prod(sizes[axis] for axis in spec if axis)
        return total

    @property
    def rows(self) -> dict[tuple[str, ...], Parameter]:
        """The rows of the architecture's table by the names of their paths."""
        return parameters.by_names(self.config.model)

    def row(self, path: tuple) -> Parameter:
        """Return the row of a parameter by its key path."""
        return self.rows[names(path)]

    def axis_dims(self, path: tuple) -> dict[str, int]:
        """Return the dims after the first of a parameter in mesh layout that axes split, by its key path."""
        found = {axis: self.row(path).split_by(axis) for axis in AXES if axis != PIPE}
        return {axis: split + 1 for axis, split in found.items() if split is not None}

    def _spec(self, path: tuple, shape: tuple[int, ...], data: bool) -> PartitionSpec:
        spec: list[tuple[str, ...]] = [(PIPE,), *[()] * (len(shape) - 1)]
        for axis, dim in self.axis_dims(path).items():
            spec[dim] += (axis,)
        shard = self.data_dim(path, shape) if data else None
        if shard is not None:
            spec[shard] += self._replica_axes
        return PartitionSpec(*(axes[0] if len(axes) == 1 else axes or None for axes in spec))

    def data_dim(self, path: tuple, shape: tuple[int, ...]) -> int | None:
        """Return the dim of a parameter that ZeRO-1 splits over data, or None if it is replicated over data.

        It is the first dim (after dim 0) whose size divides, so that shards are contiguous in each layer. Without
        ZeRO-1, with one data rank, or if no size divides, the parameter is replicated.

        Args:
            path: Key path of the parameter.
            shape: Global shape of the parameter in mesh layout.
        """
        mesh, split = self.config.mesh, self.axis_dims(path)
        if not mesh.zero1 or mesh.replicas == 1:
            return None
        for dim in range(1, len(shape)):
            size = shape[dim] // math.prod(mesh.sizes[axis] for axis, place in split.items() if place == dim)
            if size % mesh.replicas == 0:
                return dim
        return None

    def specs(self, data: bool = True) -> Params:
        """Return the PartitionSpecs of the parameters in mesh layout.

        Args:
            data: Whether to include ZeRO-1's split over data, which the training state and reduced gradients have.
        """
        return jax.tree_util.tree_map_with_path(lambda path, x: self._spec(path, x.shape, data), self.shapes)

    def data_dims(self) -> Params:
        """Return `data_dim` of every parameter, with -1 for None."""

        def dim(path: tuple, x: jax.ShapeDtypeStruct) -> int:
            found = self.data_dim(path, x.shape)
            return -1 if found is None else found

        return jax.tree_util.tree_map_with_path(dim, self.shapes)

    def in_shards(self, *names: str) -> int | None:
        """Return the dim, counted from the end, of an array whose gradients are summed in shards; None for others.

        These are the kernels and the tables with mesh.shard=gradients or weights. Norms, biases and positions are
        small: their gradients are summed as they are, and reduced at the end of a step.

        Args:
            names: keys of the parameter's path.
        """
        return self._in_shards.get(names)

    @functools.cached_property
    def _in_shards(self) -> dict[tuple[str, ...], int]:
        """Dims of `in_shards` by the names of the parameters' paths."""
        found: dict[tuple[str, ...], int] = {}
        if self.config.mesh.shards_sums:
            for path, x in jax.tree_util.tree_leaves_with_path(self.shapes):
                dim = self.data_dim(path, x.shape)
                if dim is not None and (self.row(path).role == "kernel" or names(path)[-1] == "token"):
                    found[names(path)] = dim - x.ndim
        return found

    def _edges(self, path: tuple) -> tuple[int, ...]:
        """Return the rows in use of an array outside the layers."""
        return {"token": self.ends, "position": (0,)}.get(names(path)[-1], (self.stage_map.last,))

    @property
    def ends(self) -> tuple[int, ...]:
        """Stages that hold a table of the vocabulary: those of the first and of the last virtual stage."""
        return self.stage_map.ends

    @property
    def swaps(self) -> bool:
        """True if two stages hold a tied table, so that they exchange its gradients."""
        return len(self.ends) > 1 and self.config.model.tied_head

    @property
    def table_shape(self) -> tuple[int, int]:
        """Shape of a device's part of one vocabulary table, [V/T, H]."""
        rows, columns = self.rows["embedding", "token"].shape(self.config.model, self.config.mesh.sizes)
        return rows, columns

    @property
    def scatter_dim(self) -> int:
        """Dim along which the tied table's gradient is scattered over data, or -1 if it is all-reduced.

        Without ZeRO-1 the table is scattered for the sum only, over its rows, a multiple of vocab_multiple.
        """
        data, dim = self.config.mesh.replicas, max(self.data_dims()["embedding"]["token"] - 1, -1)
        if self.config.compress.embedding.sync == "unfused" or data == 1:
            return -1
        return dim if dim >= 0 else next((d for d, n in enumerate(self.table_shape) if n % data == 0), -1)

    @property
    def tables(self) -> int:
        """Number of tables of the vocabulary on a stage."""
        return self.config.model.tables if len(self.ends) == 1 else 1

    def holds_tables(self, path: tuple) -> bool:
        """Return whether an array holds the two tables of a model with an untied head."""
        return self.row(path).lead == "tables"

    def from_canonical(self, params: Params) -> Params:
        """Convert canonical parameters, or a tree shaped like them, to mesh layout."""

        def place(path: tuple, x: jax.Array) -> jax.Array:
            if names(path)[0] == "layers":
                rows = self._stacked(path)
                if (rows == np.arange(len(rows))).all():
                    return x
                used = jnp.asarray(rows >= 0).reshape(-1, *[1] * (x.ndim - 1))
                return jnp.where(used, x[np.maximum(rows, 0)], 0)
            if self.holds_tables(path):
                zeros = jnp.zeros((self.stages * self.tables - 2, *x.shape[1:]), x.dtype)
                parts = [x, zeros] if len(self.ends) == 1 else [x[:1], zeros, x[1:]]
                return jnp.concatenate(parts)
            live = np.isin(np.arange(self.stages), self._edges(path)).reshape(-1, *[1] * x.ndim)
            return jnp.where(jnp.asarray(live), x[None], 0)

        return jax.tree_util.tree_map_with_path(place, params)

    def to_canonical(self, params: Params) -> Params:
        """Convert mesh layout to canonical parameters, without padding and second copies."""

        def collect(path: tuple, x: jax.Array) -> jax.Array:
            if names(path)[0] == "layers":
                rows = self._stacked(path)
                order = np.argsort(rows, kind="stable")[(rows < 0).sum() :]
                return x if (rows == np.arange(len(rows))).all() else x[order]
            if self.holds_tables(path):
                return x[np.array([0, 1 if len(self.ends) == 1 else -1])]
            return x[self._edges(path)[0]]

        return jax.tree_util.tree_map_with_path(collect, params)

    def canonical_specs(self) -> Params:
        """Return the PartitionSpecs of the canonical parameters, which are those of the mesh layout wherever possible.

        Layers of uneven or interleaved stages cannot be split over pipe in model order. Pipe then splits another dim,
        so that all processes write a checkpoint together and none has to hold it whole.
        """

        def spec(path: tuple, x: jax.ShapeDtypeStruct) -> PartitionSpec:
            parts = list(self._spec(path, x.shape, data=True))
            if self.holds_tables(path):
                return PartitionSpec(None, *parts[1:])
            if names(path)[0] != "layers":
                return PartitionSpec(*parts[1:])
            rows = self._stacked(path)
            if (rows != np.arange(len(rows))).any():
                sizes = self.config.mesh.device_sizes
                parts[0] = None
                for dim in range(1, len(parts)):
                    axes = parts[dim] if isinstance(parts[dim], tuple) else (parts[dim],) if parts[dim] else ()
                    if x.shape[dim] % math.prod(sizes[a] for a in (*axes, PIPE)) == 0:
                        parts[dim] = (*axes, PIPE)
                        break
            return PartitionSpec(*parts)

        return jax.tree_util.tree_map_with_path(spec, self.shapes)

    def canonical_specs_of(self, specs: Params) -> Params:
        """Return the canonical PartitionSpecs of the parameters that a tree of specs has; Muon's state has some only.

        Args:
            specs: PartitionSpecs in mesh layout, which say no more here than which parameters there are.
        """
        known = dict(jax.tree_util.tree_leaves_with_path(self.canonical_specs(), is_leaf=is_spec))
        return jax.tree_util.tree_map_with_path(lambda path, _: known[path], specs, is_leaf=is_spec)

    def map_mirrors(self, function: Callable[[Params], Params], tree: Any) -> Any:
        """Return a tree of nested dicts whose subtrees that mirror the parameters have gone through a function.

        Args:
            function: the function of such a subtree.
            tree: the tree, such as an optimizer's state.
        """
        if not isinstance(tree, dict):
            return tree
        if set(tree) == set(self.shapes):
            return function(tree)
        return {key: self.map_mirrors(function, value) for key, value in tree.items()}
