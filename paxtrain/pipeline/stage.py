"""One stage of the pipeline: F and B of one micro-batch on one device, in place over rings and accumulators."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.config import ModelConfig
from paxtrain.model import transformer
from paxtrain.model.tensor_parallel import Group
from paxtrain.model.transformer import Dropout, Params
from paxtrain.pipeline.residuals import SplitVjp, save_policy
from paxtrain.pipeline.rings import Index, add, add_some, always, only_if, read, write, write_some
from paxtrain.pipeline.split_backward import SplitBackward


class Weights(NamedTuple):
    """A stage's weights in compute dtype, as one device holds them, split into segments once per step.

    The gradient accumulators have the same structure, in float32. (Stacked over layers they would be copied on every
    update: XLA reads one layer's row from the array as it was before another row was written.)

    Attributes:
        embedding: token [V/T, H], or [1 or 2, V/T, H] if the head is untied; position [S, H] if any.
        chunks: segments of each chunk: each is a list of layers' trees, or one stacked tree [layers, ...] to scan.
        final_norm: scale and bias, if any, [H].
    """

    embedding: Params
    chunks: list[list[Any]]
    final_norm: Params


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layer slots of a chunk that run as one piece.

    Attributes:
        start: first slot.
        count: number of slots.
        optional: some virtual stages have no layer here and skip it (uneven stages).
        scan: one compiled layer in a loop.
    """

    start: int
    count: int
    optional: bool
    scan: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """The static facts that the compiled code depends on.

    Attributes:
        model: model whose layers run.
        stages: P.
        chunks: virtual stages per stage.
        layer_of: nested tuple [stages][chunks][slots] of layer numbers, -1 for none.
        counts: layers of every virtual stage, in model order.
        save: see PipelineConfig.save.
        scan_layers: common layers run in a loop.
        splits: the backward runs as B and W.
        group: group of tensor and sequence parallelism.
        pipe: mesh axis of the stages, or None if there is one stage.
    """

    model: ModelConfig
    stages: int
    chunks: int
    layer_of: tuple
    counts: tuple[int, ...]
    save: str
    scan_layers: bool
    splits: bool
    group: Group
    pipe: str | None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Segments of a chunk: the layers that all stages have, then each further slot by itself."""
        common, slots = min(self.counts), max(self.counts)
        return (
            Segment(0, common, optional=False, scan=self.scan_layers),
            *(Segment(slot, 1, optional=True, scan=False) for slot in range(common, slots)),
        )


class Place(NamedTuple):
    """A layer of a chunk, while its segment runs.

    Attributes:
        number: number of the layer in the model, int32 [].
        segment: number of its segment in the chunk.
        layer: number of the layer in the segment.
        at: (layer,) if layers are scanned and have one stacked part together; else ().
    """

    number: jax.Array
    segment: int
    layer: Any
    at: Index

    def of(self, parts: list[Any]) -> Any:
        """Return the part that holds this layer: its segment's, or one of the segment's list."""
        return parts[self.segment] if self.at else parts[self.segment][self.layer]


Step = Callable[[Place, Params, Any, Any], tuple[Any, Any]]


class Stage:
    """The functions of a row for one micro-batch on one device, over rings and accumulators.

    Residuals are kept per segment: as a list of layers' leaves, each [slots, ...], or as one tree of leaves
    [slots, layers, ...] if layers are scanned. `slot` is an index of one element, or empty: then the leaves have no
    dim of slots, and belong to one micro-batch.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        tokens: jax.Array,
        dropout_key: jax.Array | None,
        first_sample: jax.Array,
    ):
        self.program, self.weights, self.tokens = program, weights, tokens
        self.micro_batches, self.batch, length = tokens.shape
        shape = (self.batch, (length - 1) // program.group.parts, program.model.hidden)
        self.message = jax.ShapeDtypeStruct(shape, program.model.dtype)
        self._dropout_key, self._first_sample = dropout_key, first_sample
        self._starts = transformer.document_starts(tokens[..., :-1], program.model)
        self.index = lax.axis_index(program.pipe) if program.pipe else jnp.int32(0)
        self._layer_of = jnp.asarray(program.layer_of, jnp.int32)[self.index]
        one = weights.chunks[0][0]
        one = jax.tree.map(lambda w: w[0], one) if program.segments[0].scan else one[0]
        x = jnp.zeros(self.message.shape, self.message.dtype)

        def layer(
            weights: Params, x: jax.Array, index: jax.Array, dropout: Dropout | None, starts: jax.Array | None
        ) -> jax.Array:
            return transformer.layer(weights, x, program.model, program.group, dropout, index, starts)

        first = jnp.int32(0)
        self._vjp = SplitVjp(
            save_policy(program.save)(layer), one, x, first, self._dropout(first), self._documents(first)
        )
        self._split = SplitBackward(self._vjp, one, x) if program.splits else None

    def _dropout(self, mb: jax.Array) -> Dropout | None:
        if self._dropout_key is None:
            return None
        return Dropout(self._dropout_key, self._first_sample + mb * self.batch + jnp.arange(self.batch))

    def _documents(self, mb: jax.Array) -> jax.Array | None:
        """Return the document starts of a micro-batch, see model.document_starts."""
        return None if self._starts is None else self._starts[mb]

    def _layer_residuals(self, lead: tuple[int, ...]) -> list[Any]:
        """Return uninitialized residuals of a chunk, with leading dims: every slot is written before it is read."""
        leaves = self._split.leaves if self._split else self._vjp.kept

        def empty(*dims: int) -> list[jax.Array]:
            return [lax.empty((*dims, *leaf.shape), leaf.dtype) for leaf in leaves]

        return [
            empty(*lead, segment.count) if segment.scan else [empty(*lead) for _ in range(segment.count)]
            for segment in self.program.segments
        ]

    def residuals(self, slots: int) -> Any:
        """Return the ring of what F leaves for B, and B for W."""
        if self.program.save == "inputs":
            return lax.empty((slots, *self.message.shape), self.message.dtype)
        return self._layer_residuals((slots,))

    def scratch(self) -> Any:
        """Return a buffer for scanned layers' residuals in B of save="inputs"; without it XLA makes one per row."""
        again = self.program.save == "inputs" and self.program.scan_layers
        return self._layer_residuals(()) if again else ()

    def embed(self, mb: jax.Array) -> jax.Array:
        tokens, program = self.tokens[mb, :, :-1], self.program
        return transformer.embed(
            self.weights.embedding, tokens, program.model, program.group, self._dropout(mb), self._documents(mb)
        )

    def _each_layer(
        self, chunk: int, x: Any, parts: list[Any], step: Step, backward: bool = False
    ) -> tuple[Any, list[Any]]:
        """Return x and the layers' parts after a step of every layer of a chunk.

        Args:
            chunk: number of the chunk.
            x: what goes from layer to layer.
            parts: for each segment a list of the layers' parts, or one part if layers are scanned.
            step: (place, weights, x, part) -> (x, part).
            backward: begin with the last layer.
        """
        parts, numbers = list(parts), range(len(parts))
        for number in reversed(numbers) if backward else numbers:
            x, parts[number] = self._segment(chunk, number, x, parts[number], step, backward)
        return x, parts

    def _segment(self, chunk: int, number: int, x: Any, part: Any, step: Step, backward: bool) -> tuple[Any, Any]:
        segment, weights = self.program.segments[number], self.weights.chunks[chunk][number]
        layers = self._layer_of[chunk, segment.start : segment.start + segment.count]

        def one(turn: Any, carry: tuple) -> tuple:
            i = segment.count - 1 - turn if backward else turn
            return step(Place(layers[i], number, i, (i,)), jax.tree.map(lambda w: w[i], weights), *carry)

        def unrolled(carry: tuple) -> tuple:
            x, own = carry[0], list(carry[1])
            for i in range(segment.count)[:: -1 if backward else 1]:
                x, own[i] = step(Place(layers[i], number, i, ()), weights[i], x, own[i])
            return x, own

        if segment.scan:
            return lax.fori_loop(0, segment.count, one, (x, part))
        return (only_if if segment.optional else always)(layers[0] >= 0, unrolled, (x, part))

    def _run_layers(
        self, chunk: int, mb: jax.Array, x: jax.Array, residuals: list[Any], slot: Index
    ) -> tuple[jax.Array, list[Any]]:
        rest = self._dropout(mb), self._documents(mb)

        def step(place: Place, weights: Params, x: jax.Array, part: list) -> tuple[jax.Array, list]:
            y, kept = self._vjp.forward(weights, x, place.number, *rest)
            return y, write_some(part, (*slot, *place.at), dict(enumerate(kept)))

        return self._each_layer(chunk, x, residuals, step)

    def forward(self, chunk: int, mb: jax.Array, x: jax.Array, residuals: Any, slot: Index) -> tuple[jax.Array, Any]:
        """Run F of a chunk: return its output, and the residuals with this micro-batch's in their slot.

        Args:
            chunk: number of the chunk.
            mb: number of the micro-batch, int [].
            x: input [B, S, H].
            residuals: the ring, see `residuals`.
            slot: index of the micro-batch's slot.
        """
        if self.program.save != "inputs":
            return self._run_layers(chunk, mb, x, residuals, slot)
        y, _ = self._run_layers(chunk, mb, x, self._layer_residuals(()), ())
        return y, write(residuals, slot, x)

    def forward_once(self, chunk: int, mb: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        """Run F of a chunk whose B follows at once: return its output and this micro-batch's residuals.

        Args:
            chunk: number of the chunk.
            mb: number of the micro-batch, int [].
            x: input [B, S, H].
        """
        empty = x if self.program.save == "inputs" else self._layer_residuals(())
        return self.forward(chunk, mb, x, empty, ())

    def output(self, chunk: int, mb: jax.Array, x: jax.Array) -> jax.Array:
        """Run F of a chunk without B: what it keeps is dead, and XLA drops it.

        Args:
            chunk: number of the chunk.
            mb: number of the micro-batch, int [].
            x: input [B, S, H].
        """
        return self._run_layers(chunk, mb, x, self._layer_residuals(()), ())[0]

    def backward(
        self, chunk: int, mb: jax.Array, residuals: Any, slot: Index, g: jax.Array, grads: Weights, scratch: Any
    ) -> tuple[jax.Array, Weights, Any]:
        """Run B of a chunk: return its input's gradient, the accumulators with B's gradients added, and the scratch.

        Args:
            chunk: number of the chunk.
            mb: number of the micro-batch, int [].
            residuals: the ring, or one micro-batch's residuals if `slot` is empty.
            slot: index of the micro-batch's slot.
            g: gradient of the chunk's output [B, S, H].
            grads: accumulators of the weights' gradients.
            scratch: see `scratch`.
        """
        if self.program.save == "inputs":
            x = read(residuals, slot)
            _, residuals = self._run_layers(chunk, mb, x, scratch or self._layer_residuals(()), ())
            slot, scratch = (), residuals if scratch else ()

        def step(place: Place, weights: Params, g: jax.Array, total: Params) -> tuple[jax.Array, Params]:
            kept = read(place.of(residuals), (*slot, *place.at))
            delta, g = self._vjp.backward(weights, kept, g)
            return g, write(total, place.at, add(read(total, place.at), delta))

        g, totals = self._each_layer(chunk, g, grads.chunks[chunk], step, backward=True)
        return g, _with_chunk(grads, chunk, totals), scratch

    def input_gradient(
        self, chunk: int, residuals: Any, slot: Index, g: jax.Array, grads: Weights
    ) -> tuple[jax.Array, Weights, Any]:
        """Run B of a chunk as `backward` does, without the matrices' gradients.

        Args:
            chunk: number of the chunk.
            residuals: the ring.
            slot: index of the micro-batch's slot.
            g: gradient of the chunk's output [B, S, H].
            grads: accumulators of the weights' gradients.

        Returns:
            The gradient of the chunk's input; the accumulators; the ring with what W needs.
        """

        def step(place: Place, weights: Params, g: jax.Array, part: tuple) -> tuple[jax.Array, tuple]:
            (ring, total), at = part, (*slot, *place.at)
            g, early, left = self._split.input_gradient(weights, read(ring, at), g)
            return g, (write_some(ring, at, left), add_some(total, place.at, early))

        segments, totals = self.program.segments, grads.chunks[chunk]
        both = [(r, t) if s.scan else list(zip(r, t)) for s, r, t in zip(segments, residuals, totals)]
        g, both = self._each_layer(chunk, g, both, step, backward=True)
        residuals, totals = zip(*(part if s.scan else map(list, zip(*part)) for s, part in zip(segments, both)))
        return g, _with_chunk(grads, chunk, list(totals)), list(residuals)

    def weight_gradients(self, chunk: int, residuals: Any, slot: Index, grads: Weights) -> Weights:
        """Run W of a chunk: return the accumulators with its matrices' gradients added.

        Args:
            chunk: number of the chunk.
            residuals: the ring as B has left it.
            slot: index of the micro-batch's slot.
            grads: accumulators of the weights' gradients.
        """

        def step(place: Place, weights: Params, x: tuple, total: Params) -> tuple[tuple, Params]:
            leaves = read(place.of(residuals), (*slot, *place.at))
            return x, add_some(total, place.at, self._split.weight_gradients(weights, leaves))

        _, totals = self._each_layer(chunk, (), grads.chunks[chunk], step)
        return _with_chunk(grads, chunk, totals)

    def embed_gradient(self, mb: jax.Array, g: jax.Array, grads: Weights, active: jax.Array) -> Weights:
        """Add the embedding's gradient; stages without the first layer add nothing.

        Args:
            mb: number of the micro-batch, int [].
            g: gradient of the first layer's input [B, S, H].
            grads: accumulators of the weights' gradients.
            active: this stage has the first layer and runs its B now, bool [].
        """
        tokens, dropout = self.tokens[mb, :, :-1], self._dropout(mb)
        embedding = transformer.embed_gradient(
            grads.embedding, tokens, g, self.program.model, self.program.group, dropout, active, self._documents(mb)
        )
        return grads._replace(embedding=embedding)

    def loss(self, mb: jax.Array, y: jax.Array) -> jax.Array:
        """Return a micro-batch's mean loss, divided by the number of micro-batches."""
        return self._loss(self.weights.final_norm, self._table, y, mb)

    @property
    def _table(self) -> jax.Array:
        return transformer.head_table(self.weights.embedding, self.program.model)

    def _loss(self, final_norm: Params, table: jax.Array, y: jax.Array, mb: jax.Array) -> jax.Array:
        targets = self.tokens[mb, :, 1:]
        loss = transformer.head_loss(final_norm, table, y, targets, self.program.model, self.program.group)
        return loss / self.micro_batches

    def head(
        self, mb: jax.Array, y: jax.Array, loss: jax.Array, embedding: Params, final_norm: Params
    ) -> tuple[jax.Array, jax.Array, Params, Params]:
        """Run the head: return the loss so far, the gradient of y, and the accumulators with their gradients added.

        Args:
            mb: number of the micro-batch, int [].
            y: output of the last layer [B, S, H].
            loss: sum so far, float32 [].
            embedding: accumulators of the embedding's gradients.
            final_norm: accumulators of the norm's gradients.
        """
        value, (norm, table, g) = jax.value_and_grad(self._loss, argnums=(0, 1, 2))(
            self.weights.final_norm, self._table, y, mb
        )
        token = embedding["token"]
        token = add(token, table) if self.program.model.tied_head else token.at[-1].add(table.astype(token.dtype))
        return loss + value, g, {**embedding, "token": token}, add(final_norm, norm)


def _with_chunk(grads: Weights, chunk: int, totals: list[Any]) -> Weights:
    return grads._replace(chunks=[totals if c == chunk else old for c, old in enumerate(grads.chunks)])
