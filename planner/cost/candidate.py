"""A plan without its placement: mesh, schedule, layers of the stages, and compression."""

import dataclasses

import numpy as np

from planner.cost.coded import LOW_RANK, Coded

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A plan without its placement.

    Attributes:
        data: size of the data axis.
        pipe: size of the pipe axis.
        tensor: size of the tensor axis.
        micro_batch: sequences of a micro-batch.
        micro_batches: micro-batches per step of the data rank that has most; all have as many unless there are `ranks`.
        schedule: PipelineConfig.schedule.
        counts: layers of each virtual stage.
        chunks: PipelineConfig.virtual_stages.
        save: PipelineConfig.save.
        zero1: MeshConfig.zero1.
        sequence_parallel: MeshConfig.sequence_parallel.
        backward: compressed gradients between stages, "none", "epilogue" or "all".
        backward_rank: rank of their factors.
        reduce_dtype: MeshConfig.reduce_dtype.
        data_rank: rank of the factors over data of the stages whose reduction ends the step; 0: none is compressed.
        coded: codecs other than low rank; with one, the rank of its place only says whether it compresses. What
            activations between stages go through is here, too.
        uneven_data: the search gives data ranks numbers of micro-batches by their speed.
        ranks: micro-batches of each data rank, if they differ; otherwise ().
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
    zero1: bool = True
    sequence_parallel: bool = False
    backward: str = "none"
    backward_rank: int = 16
    data_rank: int = 0
    reduce_dtype: str = "float32"
    coded: Coded = LOW_RANK
    uneven_data: bool = False
    ranks: tuple[int, ...] = ()

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """Micro-batches of each data rank."""
        return self.ranks or (self.micro_batches,) * self.data

    @property
    def groups(self) -> int:
        """Number of tensor groups, each of which lies on one host."""
        return self.data * self.pipe

    @property
    def inside(self) -> int:
        """Data ranks of a group, inside which gradients are summed as they are; 1 without groups."""
        return self.coded.grouped(self.data) if self.data_rank else 1

    @property
    def parts(self) -> int:
        """Number of parts of the sequence; a device keeps and sends one."""
        return self.tensor if self.sequence_parallel else 1

    @property
    def compresses_forward(self) -> bool:
        """Return whether activations between stages are compressed."""
        return self.pipe > 1 and self.coded.compresses_forward

    @property
    def slots(self) -> int:
        """Layer slots of a stage, padding included."""
        return max(self.counts) * self.chunks


def host_order(candidate: Candidate, per_host: int) -> Array:
    """Return the placement of a mesh over devices in order, int [1, D, P], as a run without a plan has it."""
    groups = np.arange(candidate.groups).reshape(1, candidate.data, candidate.pipe)
    return groups // (per_host // candidate.tensor)
