"""Parameters and bytes that a candidate keeps on a device and sends."""

import functools
import math
from collections.abc import Mapping

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES
from paxtrain.model.parameters import count, differ, kinds, of_mean_layer, table
from planner.cost import compute as costs
from planner.cost.candidate import Candidate
from planner.program.kinds import rooms

MASTER = 4  # bytes of a float32 gradient or master weight


def message_bytes(model: ModelConfig, micro_batch: int, parts: int = 1) -> int:
    """Return the bytes of one micro-batch's activations between two stages that a device of a tensor group sends.

    Args:
        model: model to train.
        micro_batch: sequences of a micro-batch.
        parts: parts of the sequence, of which a device sends one.
    """
    return micro_batch * model.sequence // parts * model.hidden * costs.ITEM[model.dtype]


class Sizes:
    """The sizes of one candidate of a model."""

    def __init__(self, model: ModelConfig, candidate: Candidate) -> None:
        self.model, self.candidate = model, candidate

    @functools.cached_property
    def message(self) -> int:
        """Bytes of a message between stages, as it is."""
        return message_bytes(self.model, self.candidate.micro_batch, self.candidate.parts)

    @property
    def _message_shape(self) -> tuple[int, int, int]:
        """Shape of a message between stages."""
        c = self.candidate
        return c.micro_batch, self.model.sequence // c.parts, self.model.hidden

    def _factors(self, rank: int) -> int:
        """Return the bytes of a message between stages as low-rank factors in the compute dtype."""
        rows, tokens, columns = self._message_shape
        return rank * (rows * tokens + columns) * costs.ITEM[self.model.dtype]

    @functools.cached_property
    def activation(self) -> int:
        """Bytes of a message with activations on the wire."""
        c = self.candidate
        if not c.compresses_forward:
            return self.message
        if c.coded.forward is not None:
            return c.coded.message_bytes(self._message_shape, self.model.dtype, "forward")
        return self._factors(c.coded.forward_rank)

    @functools.cached_property
    def packed(self) -> int:
        """Bytes of a compressed gradient between stages."""
        c, model = self.candidate, self.model
        if c.coded.backward is not None:
            # A codec may refuse the shape if it compresses none of them.
            compresses = c.backward != "none"
            return c.coded.message_bytes(self._message_shape, model.dtype) if compresses else self.message
        return self._factors(c.backward_rank)

    @functools.cached_property
    def rooms(self) -> Mapping[str, int]:
        """Layer slots of a stage by the kind of their layers, padding included."""
        c = self.candidate
        if not differ(self.model):
            return {kinds(self.model)[0]: c.slots}
        return {kind: n * c.chunks for kind, n in rooms(self.model, c.counts).items()}

    @property
    def slots(self) -> int:
        """Layer slots of a stage, padding included."""
        return sum(self.rooms.values())

    @functools.cached_property
    def layer_parameters(self) -> int:
        """Parameters of a stage's layer slots on one device."""
        mesh = self.candidate.layer_sizes
        return sum(n * count(self.model, mesh=mesh, kind=kind) for kind, n in self.rooms.items())

    @functools.cached_property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the matrices of a layer that may be compressed, on one device."""
        return costs.kernels(self.model, self.candidate.layer_sizes)

    @property
    def kernel_parameters(self) -> int:
        """Parameters of these matrices."""
        return sum(n * k for n, k in self.kernels)

    @property
    def rest(self) -> int:
        """Parameters of a layer that are never compressed, on one device."""
        return of_mean_layer(self.model, self.candidate.layer_sizes) - self.kernel_parameters

    @functools.cached_property
    def compressed_kernels(self) -> tuple[tuple[int, int], ...]:
        """Shapes of the kernels that are compressed over data: those that become small enough."""
        c = self.candidate
        if not c.data_rank or c.together == 1:
            return ()
        return tuple(x for x in self.kernels if c.coded.takes(x, c.together, c.zero1, c.min_ratio, c.data_rank))

    @property
    def compressed_parameters(self) -> int:
        """Parameters of these kernels."""
        return sum(n * k for n, k in self.compressed_kernels)

    @property
    def beside(self) -> int:
        """Parameters of a layer on one device that no compressed gradients travel with.

        What is in no kernel goes with low rank's factors, unless there are groups.
        """
        c = self.candidate
        alone = self.rest if c.inside > 1 or c.coded.data is not None else 0
        return self.kernel_parameters - self.compressed_parameters + alone

    @functools.cached_property
    def embedding_parameters(self) -> int:
        """Parameters of the embedding on one device of the first stage."""
        c = self.candidate
        return costs.embedding_parameters(self.model, c.layer_sizes, len(c.stage_map.ends))

    def summed(self, axis: str) -> tuple[int, int]:
        """Return the parameters of a stage's layer slots, and of the tables, whose gradients an axis sums."""
        c, sums = self.candidate, AXES[axis].sums
        some = [p for p in table(self.model) if p.split_by(axis) is None and sums(c, p.names, p.own)]
        of_layers = [p for p in some if p.lead == "layers"]
        held = [sum(n for kind, n in self.rooms.items() if p.of(kind)) for p in of_layers]
        layers = sum(n * math.prod(p.shape(self.model, c.layer_sizes)) for n, p in zip(held, of_layers))
        return layers, self.embedding_parameters * any(p.own[0] == "vocab" for p in some)

    @property
    def swaps(self) -> bool:
        """The first and the last stage exchange the gradients of the tied embedding."""
        return len(self.candidate.stage_map.ends) > 1 and self.model.tied_head

    @property
    def table_shape(self) -> tuple[int, int]:
        """Rows and columns of the vocabulary's tables on one device of the first stage."""
        return self.embedding_parameters // self.model.hidden, self.model.hidden

    @functools.cached_property
    def swapped(self) -> float:
        """Bytes that the first and the last stage send each other of the tied embedding's gradients."""
        c = self.candidate
        if c.compresses_embedding and self.swaps:
            return c.coded.table_bytes(self.table_shape, c.together)
        return self.embedding_parameters * MASTER / (c.together * c.shared)

    @functools.cached_property
    def factor_bytes(self) -> int:
        """Bytes of a stage's gradients over data, as factors or, for what is in no kernel, as they are.

        In groups of data ranks they are those between groups, where only factors travel.
        """
        c = self.candidate
        parts = [c.coded.part(shape, c.together, c.zero1) for shape in self.compressed_kernels]
        factors = sum(c.data_rank * int(n + k) for n, k in parts)
        rest = self.rest if c.inside == 1 else 0
        return c.slots * (factors * MASTER + rest * costs.ITEM[c.reduce_dtype])

    @functools.cached_property
    def layer_weights(self) -> int:
        """Bytes of a stage's layers as they are gathered, those of all ranks together, or of a group with shards."""
        c, dtype = self.candidate, self.model.dtype
        ranks = c.together // c.copies if c.shard == "weights" else c.together
        whole = self.layer_parameters * costs.ITEM[dtype]
        if c.coded.weights is None or ranks == 1:
            return whole
        sent = sum(ranks * c.coded.weight_bytes(shape, ranks, dtype) for shape in self.kernels)
        return whole - c.slots * (self.kernel_parameters * costs.ITEM[dtype] - sent)
