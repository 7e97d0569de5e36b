"""Arguments of a stage's code: its weights by segment, its part of the batch, the pipeline's facts, a layer's place."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from compress.codec import State, Tree
from paxtrain.config import ModelConfig
from paxtrain.model.tensor_parallel import Group
from paxtrain.model.transformer import Params
from paxtrain.pipeline.collectives import MeshAxes
from paxtrain.pipeline.rings import RingIndex
from paxtrain.schedule.stage_map import StageMap

# A segment's weights, or their accumulators: a list of its layers' trees, or one stacked tree if it is scanned.
Layers: TypeAlias = list[Params] | Params


class Weights(NamedTuple):
    """A stage's weights in compute dtype, as one device holds them, split into segments once per step.

    A device may hold shards of some of them (paxtrain.pipeline.sharding).

    The gradient accumulators have the same structure, in float32. They are not stacked over layers, because XLA would
    copy a stacked array on every update: it reads one layer's row from the array as it was before another row's write.

    Attributes:
        embedding: token [V/T, H], or [1 or 2, V/T, H] if the head is untied; position [S, H] if any.
        chunks: segments of each chunk. A segment is a list of layers' trees, or one stacked tree [layers, ...] if it is
            scanned.
        final_norm: scale [H], and bias [H] if any.
        errors: of accumulators, what the codec of their gradients has left out so far, arranged like `chunks`; ()
            without one.
    """

    embedding: Params
    chunks: list[list[Layers]]
    final_norm: Params
    errors: list[list[Tree]] | tuple[()] = ()


class Sums(NamedTuple):
    """What a device sums of the gradients of a layer, or of a scanned segment.

    Attributes:
        total: accumulators.
        errors: what the codec of the gradients has left out so far; () without one.
    """

    total: Params
    errors: Tree = ()


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layer slots of a chunk that run as one piece.

    Attributes:
        kind: kind of its layers.
        start: first slot.
        count: number of slots.
        optional: whether some virtual stages have no layer here and skip the segment.
        scan: whether the layers run in a loop over one compiled layer.
    """

    kind: str
    start: int
    count: int
    optional: bool
    scan: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """The static facts that the compiled code depends on.

    Attributes:
        model: shape of the model.
        stage_map: which stage holds which virtual stage.
        layer_of: nested tuple [stages][chunks][slots] of layer numbers, -1 for none.
        slots: kinds of the layer slots of a chunk.
        save: values that a forward keeps for its backward, see PipelineConfig.save.
        scan_layers: whether the common layers run in a loop over one compiled layer.
        splits: whether the backward runs as B and W.
        group: split of a layer over tensor and sequence parallelism.
        pipe: mesh axis of the stages, or None if there is one stage.
        data: mesh axis of the data ranks if they differ in their micro-batches; None: all run the same rows.
    """

    model: ModelConfig
    stage_map: StageMap
    layer_of: tuple
    slots: tuple[str, ...]
    save: str
    scan_layers: bool
    splits: bool
    group: Group
    pipe: str | None
    data: str | None = None

    @property
    def stages(self) -> int:
        """Number of pipeline stages, P."""
        return self.stage_map.stages

    @property
    def chunks(self) -> int:
        """Number of chunks of each stage."""
        return self.stage_map.chunks

    @property
    def axis(self) -> MeshAxes:
        """Axis on which the rows name positions: of the stages, or of every data rank's stages."""
        assert self.pipe, "one stage has no rows with messages"
        return self.pipe if self.data is None else (self.data, self.pipe)

    @functools.cached_property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of a chunk: runs of slots of one kind that all virtual stages fill, other slots by themselves."""
        found = list[Segment]()
        for slot, kind in enumerate(self.slots):
            optional = any(chunk[slot] < 0 for stage in self.layer_of for chunk in stage)
            last = found[-1] if found else None
            if last and last.kind == kind and not (optional or last.optional):
                found[-1] = dataclasses.replace(last, count=last.count + 1)
            else:
                found.append(Segment(kind, slot, 1, optional, scan=self.scan_layers and not optional))
        return tuple(found)


class Share(NamedTuple):
    """A data rank's part of the batch.

    Attributes:
        first_sample: index in the global batch of the first sequence of micro-batch 0, int32 []; below zero if the
            data rank lacks it.
        first: number of the first micro-batch that the data rank has, int32 []; None: it has all.
        mean: mean number of micro-batches of the data ranks; None: all have all.
    """

    first_sample: jax.Array
    first: jax.Array | None = None
    mean: float | None = None


def share_of(rank: jax.Array, counts: Sequence[int], micro_batch: int) -> Share:
    """Return a data rank's part of the batch.

    Args:
        rank: position of the data rank, int32 [].
        counts: number of micro-batches of each data rank.
        micro_batch: sequences of a micro-batch.
    """
    if len(set(counts)) == 1:
        return Share(rank * (counts[0] * micro_batch))
    numbers = np.array(counts, np.int32)
    missing = numbers.max() - numbers
    # Micro-batches are numbered as those of the longest rank, so the sample of micro-batch 0 may be another's.
    samples = (np.cumsum(numbers) - numbers - missing) * np.int32(micro_batch)
    first_sample, first = (jnp.asarray(x, jnp.int32)[rank] for x in (samples, missing))
    return Share(first_sample, first, int(numbers.sum()) / len(numbers))


class LayerPlace(NamedTuple):
    """The place of a layer in its chunk, while its segment runs.

    Attributes:
        number: number of the layer in the model, int32 [].
        segment: number of its segment in the chunk.
        layer: number of the layer in the segment, an int or int32 [].
        at: (layer,) if the segment is scanned, and its layers share one stacked part; otherwise ().
    """

    number: jax.Array
    segment: int
    layer: int | jax.Array
    at: RingIndex

    def of(self, parts: list[Tree]) -> Tree:
        """Return the part that holds this layer.

        Args:
            parts: for each segment one stacked part if it is scanned, else a list with one part per layer.
        """
        return parts[self.segment] if self.at else parts[self.segment][self.layer]


# A step of one layer: (place, weights, x, part) -> (x, part).
LayerStep = Callable[[LayerPlace, Params, Tree, Tree], tuple[Tree, Tree]]


class Close(NamedTuple):
    """Treatment of the layers' gradients by the last op of a chunk, see paxtrain.pipeline.closing.

    Attributes:
        run: runs a step of each layer and reduces its gradient.
        reduce: (gradient of a layer, its state) -> (reduced gradient, new state).
        states: states of the stage's layer slots.
    """

    run: Callable[..., tuple[Tree, list[Layers], list[State]]]
    reduce: Callable[[Params, State], tuple[Params, State]]
    states: list[State]


def layers_of(part: Layers) -> list[Params]:
    """Return the layers of a segment's weights or accumulators, one tree for each."""
    if isinstance(part, list):
        return part
    count = jax.tree.leaves(part)[0].shape[0]
    return [jax.tree.map(lambda x, i=i: x[i], part) for i in range(count)]
