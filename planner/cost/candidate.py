"""A plan without its placement: mesh, schedule, layers of the stages, and compression."""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from paxtrain.config import OuterConfig, scans
from paxtrain.config.axes import (
    AXES,
    DATA,
    PIPE,
    TENSOR,
    AxisSizes,
    inside_axes,
    layer_sizes,
    more_axes,
    sequence_parts,
)
from paxtrain.schedule.schedules import spec_of
from paxtrain.schedule.stage_map import StageMap
from planner.cost.coded import LOW_RANK, Coded

Array = np.ndarray
NO_GROUPS = OuterConfig()  # all data ranks train together


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan without its placement.

    Attributes:
        data: size of the data axis, that of all groups.
        pipe: size of the pipe axis.
        tensor: size of the tensor axis.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per step of the data rank that has most; all have as many unless there are
            `data_micro_batches`.
        schedule: PipelineConfig.schedule.
        counts: layers of each virtual stage.
        chunks: PipelineConfig.virtual_stages.
        save: PipelineConfig.save.
        scan_layers: PipelineConfig.scan_layers.
        shard: MeshConfig.shard.
        shard_group: MeshConfig.shard_group.
        context_form: MeshConfig.context_form.
        sequence_parallel: MeshConfig.sequence_parallel.
        backward: compressed gradients between stages, "none", "epilogue" or "all".
        backward_rank: rank of their factors.
        backward_links: links between stages on which these gradients are compressed; (): all.
        forward_links: links on which activations are, if they are compressed at all; (): all.
        reduce_dtype: MeshConfig.reduce_dtype.
        data_rank: rank of the factors over data of the stages whose reduction ends the step; 0: none is compressed.
        coded: codecs other than low rank; with one, the rank of its place only says whether it compresses. What
            activations between stages go through is here, too.
        uneven_data: the search gives faster data ranks more micro-batches.
        data_micro_batches: micro-batches of each data rank, if they differ; otherwise ().
        outer: groups of data ranks that train apart.
        min_ratio: factor by which a matrix must shrink to be compressed over data or between groups.
        others: sizes of the axes besides data, pipe and tensor, in the order of the mesh.
    """

    data: int
    pipe: int
    tensor: int
    micro_batch: int
    micro_batches: int
    schedule: str
    counts: tuple[int, ...]
    chunks: int = 1
    save: str = "dots"
    scan_layers: str = "auto"
    shard: str = "optimizer"
    sequence_parallel: bool = False
    backward: str = "none"
    backward_rank: int = 16
    backward_links: tuple[int, ...] = ()
    forward_links: tuple[int, ...] = ()
    data_rank: int = 0
    reduce_dtype: str = "float32"
    coded: Coded = LOW_RANK
    uneven_data: bool = False
    data_micro_batches: tuple[int, ...] = ()
    outer: OuterConfig = NO_GROUPS
    min_ratio: float = 2.0
    shard_group: int = 0
    context_form: str = "ring"
    others: tuple[int, ...] = ()

    @property
    def zero1(self) -> bool:
        """True if each data rank keeps a part of the states and of the reduced gradients only."""
        return self.shard != "none"

    @property
    def shards_sums(self) -> bool:
        """True if gradients are reduced to parts after each micro-batch."""
        return self.shard in ("gradients", "weights")

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes by name, in the order of the mesh."""
        named = {DATA: self.data, PIPE: self.pipe, TENSOR: self.tensor}
        return dict.fromkeys(AXES, 1) | named | dict(zip(more_axes(), self.others))

    @functools.cached_property
    def layer_sizes(self) -> AxisSizes:
        """Sizes of the axes that split a layer or for which it waits, without those of one device."""
        return layer_sizes(self.sizes, self.context_form, self.coded.context)

    @functools.cached_property
    def seat(self) -> int:
        """Devices that share a seat: those of a tensor group, and of other axes inside a host."""
        return math.prod(self.sizes[name] for name in inside_axes())

    @functools.cached_property
    def apart(self) -> int:
        """Number of groups of data ranks that train apart; 1 if all train together."""
        return (self.outer.groups or self.data) if self.outer.every else 1

    @functools.cached_property
    def together(self) -> int:
        """Data ranks that train together: those of a group."""
        return self.data // self.apart

    def figures(self) -> dict[str, Any]:
        """Return the fields as JSON values; some only if they are not the default."""
        usual = ("scan_layers", "min_ratio", "shard_group", "context_form")
        unused = {name for name in usual if getattr(self, name) == getattr(Candidate, name)}
        unused |= {"others"} if self.outer.every else {"others", "outer"}
        keys = {"data_micro_batches": "ranks"}  # the key that plan.json has for them
        values = {name: value for name, value in dataclasses.asdict(self).items() if name not in unused}
        return self.sizes | {keys.get(name, name): value for name, value in values.items()}

    @functools.cached_property
    def rank_micro_batches(self) -> tuple[int, ...]:
        """Micro-batches of each data rank."""
        return self.data_micro_batches or (self.micro_batches,) * self.data

    @functools.cached_property
    def stage_map(self) -> StageMap:
        """Stages of all virtual stages."""
        return spec_of(self.schedule).place(self.pipe, self.chunks)

    @property
    def groups(self) -> int:
        """Number of tensor groups, each of which lies on one host."""
        return self.data * self.pipe

    @property
    def inside(self) -> int:
        """Neighbouring data ranks that exchange with each other first; 1: all exchange at once.

        They share weights and sums in shards, or sum gradients as they are before the sums are compressed.
        """
        return self.shard_group or (self.coded.grouped(self.together) if self.data_rank else 1)

    @property
    def copies(self) -> int:
        """Number of groups of data ranks that have the same weights or sums in shards."""
        return self.together // self.shard_group if self.shard_group else 1

    @property
    def parts(self) -> int:
        """Number of parts of the sequence; a device keeps and sends one."""
        return self.shared * (self.tensor if self.sequence_parallel else 1)

    @property
    def shared(self) -> int:
        """Devices that share each sequence through all layers."""
        return sequence_parts(self.sizes)

    @functools.cached_property
    def compresses_forward(self) -> bool:
        """Return whether activations between stages are compressed."""
        return self.pipe > 1 and self.coded.compresses_forward

    @property
    def compresses_weights(self) -> bool:
        """Return whether layers' kernels are compressed as they are gathered over data."""
        return self.coded.weights is not None and self.zero1 and self.together > 1

    @property
    def compresses_keys(self) -> bool:
        """Return whether keys and values that devices of a context group send each other are compressed."""
        return self.layer_sizes.codec is not None

    @property
    def compresses_embedding(self) -> bool:
        """Return whether the embedding's gradients are compressed."""
        travel = self.together > 1 or (self.coded.tied and len(self.stage_map.ends) > 1)
        return self.coded.embedding is not None and travel

    @property
    def compresses_outer(self) -> bool:
        """Return whether the differences that groups exchange are compressed."""
        return self.coded.outer is not None and self.apart > 1

    @property
    def scans(self) -> bool:
        """Return whether a stage's layers run in a loop."""
        return scans(self.scan_layers, min(self.counts), len(self.counts))

    @property
    def slots(self) -> int:
        """Layer slots of a stage, padding included."""
        return max(self.counts) * self.chunks


def host_order(candidate: Candidate, per_host: int) -> Array:
    """Return the placement of a mesh over devices in order, int [1, D, P], as a run without a plan has it."""
    groups = np.arange(candidate.groups).reshape(1, candidate.data, candidate.pipe)
    return groups // (per_host // candidate.seat)
