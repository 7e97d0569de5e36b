"""Candidates as columns of numbers, as the closed form of the memory takes them."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.config.axes import TENSOR, sequence_parts
from paxtrain.model.parameters import table
from paxtrain.model.spec import Parameter
from paxtrain.schedule.schedules import each
from planner.cost.coded import LOW_RANK, Coded

PerCandidate = float | np.ndarray  # a number, or an array over candidates
ERRORS = ("none", "explicit", "lazy")
ACCUMULATOR = 4  # bytes of float32: master weights, moments, gradients


@dataclasses.dataclass(frozen=True)
class Shape:
    """Candidates as integer columns that broadcast against each other; one model for all.

    Attributes:
        model: model whose attention is settled, see parameters.with_attention.
        data: size of the data axis.
        pipe: size of the pipe axis.
        tensor: size of the tensor axis.
        virtual_stages: chunks of layers per stage.
        slots: layers of the largest virtual stage.
        common: layers of the smallest virtual stage.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per data rank and step.
        schedule: its number, see `paxtrain.schedule.schedules.code`.
        save: place in paxtrain.config.SAVE_MODES.
        shard: index of MeshConfig.shard in SHARDS.
        copies_of_shards: groups of data ranks that each have all weights and sums in shards.
        scan: layers run in a loop.
        backward_rank: rank of compressed gradients between stages, 0 if they are not compressed.
        forward_rank: rank of compressed activations between stages, or 0.
        data_rank: rank of compressed gradients over data, or 0.
        data_rank_min: lowest rank that a run chooses over data; 0: it keeps to data_rank.
        error: error feedback of messages, as a place in ("none", "explicit", "lazy").
        sequence_parallel: activations between the split matrices are sharded over tensor.
        overlap: transfers run beside compute, as on GPUs.
        coded: codecs other than low rank; with one, the rank of its place only says whether it compresses.
        copies: float32 copies of a device's weights that training in groups keeps: the shared ones, and the momentum.
        groups: number of groups that train apart; data is that of one.
        fragment_layers: layers that a device sends to other groups of each fragment; (): it sends none.
        overlaps: the largest fragment is exchanged under a step; otherwise groups wait.
        min_ratio: factor by which a matrix must shrink to be compressed over data or between groups.
        others: sizes of the axes besides data, pipe and tensor, by name.
        context_form: place of MeshConfig.context_form in CONTEXT_FORMS.
        rooms: layer slots of a virtual stage by the kind of their layers; empty if all layers are alike.
    """

    model: ModelConfig
    data: PerCandidate
    pipe: PerCandidate
    tensor: PerCandidate
    virtual_stages: PerCandidate
    slots: PerCandidate
    common: PerCandidate
    micro_batch: PerCandidate
    micro_batches: PerCandidate
    schedule: PerCandidate
    save: PerCandidate
    shard: PerCandidate
    scan: PerCandidate
    backward_rank: PerCandidate = 0
    forward_rank: PerCandidate = 0
    data_rank: PerCandidate = 0
    data_rank_min: PerCandidate = 0
    error: PerCandidate = 2
    sequence_parallel: PerCandidate = 0
    overlap: PerCandidate = 1
    coded: Coded = LOW_RANK
    copies: PerCandidate = 0
    groups: PerCandidate = 1
    fragment_layers: tuple[PerCandidate, ...] = ()
    overlaps: bool = False
    min_ratio: float = 2.0
    others: Mapping[str, PerCandidate] = dataclasses.field(default_factory=dict)
    copies_of_shards: PerCandidate = 1
    context_form: PerCandidate = 0
    rooms: Mapping[str, PerCandidate] = dataclasses.field(default_factory=dict)

    @property
    def mesh(self) -> dict[str, np.ndarray]:
        """Sizes of the axes that may split layers, by name."""
        return {name: np.asarray(size) for name, size in {TENSOR: self.tensor, **self.others}.items()}

    @property
    def parts(self) -> PerCandidate:
        """Parts of the sequence in what is sharded over tensor between the split matrices."""
        return np.where(np.asarray(self.sequence_parallel) == 1, self.tensor, 1)

    @property
    def zero1(self) -> PerCandidate:
        """1 if states are sharded over data, else 0."""
        return np.minimum(np.asarray(self.shard), 1)

    @property
    def tokens(self) -> PerCandidate:
        """Tokens of a micro-batch that a device has within layers."""
        return self.micro_batch * self.model.sequence // self.shared

    @property
    def shared(self) -> PerCandidate:
        """Devices that share each sequence through all layers."""
        return sequence_parts(self.mesh)

    @property
    def slots_of(self) -> dict[str | None, PerCandidate]:
        """Layer slots of a virtual stage by kind; None: of any, as all layers are alike."""
        found: dict[str | None, PerCandidate] = {} if self.rooms else {None: self.slots}
        found.update(self.rooms)
        return found

    def having(self, p: Parameter) -> PerCandidate:
        """Layer slots of a virtual stage that have a parameter of layers."""
        return sum(n for kind, n in self.slots_of.items() if kind is None or p.of(kind))

    @property
    def compute(self) -> int:
        """Bytes of the compute dtype."""
        return 2 if self.model.dtype == "bfloat16" else 4


def meets(shape: Shape) -> PerCandidate:
    """Return whether one stage holds the first and the last virtual stage, and with them all tables."""
    folds = each(shape.schedule, lambda spec, v: spec.folds(v), shape.virtual_stages)
    return (np.asarray(shape.pipe) == 1) | folds


def matrices(shape: Shape) -> list[tuple[PerCandidate, ...]]:
    """Return the dims of a layer's kernels on a device, without those that only some kinds of layers have."""
    return [p.shape(shape.model, shape.mesh) for p in table(shape.model) if p.role == "kernel" and not p.kinds]


def columns(*some: PerCandidate) -> tuple[np.ndarray, ...]:
    """Return columns of whole numbers, broadcast against each other."""
    return np.broadcast_arrays(*(np.asarray(x, int) for x in some))
