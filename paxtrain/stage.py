"""One stage of the pipeline: F and B of one micro-batch on one device, in place over rings and accumulators."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain import model
from paxtrain.config import ModelConfig
from paxtrain.model import Dropout, Params
from paxtrain.residuals import SplitVjp, save_policy
from paxtrain.rings import Index, add, always, only_if, read, write


class Weights(NamedTuple):
    """A stage's weights in compute dtype, as one device holds them, split into segments once per step.

    The gradient accumulators have the same structure, in float32. (Stacked over layers they would be copied on every
    update: XLA reads one layer's row from the array as it was before another row was written.)

    Attributes:
        embedding: token [V/T, H], or [1 or 2, V/T, H] where the head is untied; position [S, H] if any.
        chunks: per chunk its segments, each a list of layers' trees, or one stacked tree [layers, ...] to scan.
        final_norm: scale, bias if any [H].
    """

    embedding: Params
    chunks: list[list[Any]]
    final_norm: Params


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layer slots of a chunk that run as one piece.

    Attributes:
        start, count: the slots.
        optional: some virtual stages have no layer here and skip it (uneven stages).
        scan: one compiled layer in a loop.
    """

    start: int
    count: int
    optional: bool
    scan: bool


@dataclasses.dataclass(frozen=True)
class Program:
    """What the compiled code depends on: everything static.

    Attributes:
        axis: mesh axis of tensor parallelism, or None.
        pipe: mesh axis of the stages, or None where there is one stage.
        counts: layers of every virtual stage, in model order.
        layer_of: nested tuple [stages][chunks][slots] of layer numbers, -1 for none.
        save: see PipelineConfig.save.
    """

    model: ModelConfig
    stages: int
    chunks: int
    layer_of: tuple
    counts: tuple[int, ...]
    save: str
    scan_layers: bool
    axis: str | None
    pipe: str | None

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All stages' common layers unconditionally, then each further slot by itself."""
        common, slots = min(self.counts), max(self.counts)
        scan = self.scan_layers and common > 1
        return (
            Segment(0, common, optional=False, scan=scan),
            *(Segment(slot, 1, optional=True, scan=False) for slot in range(common, slots)),
        )


class Stage:
    """The functions of a row for one micro-batch on one device, over rings and accumulators.

    Residuals are kept per segment: a list of layers' leaves, each [slots, ...]; or one tree of leaves
    [slots, layers, ...] where layers are scanned. `slot` is an index of one element, or empty: then the leaves have no
    dim of slots, and are one micro-batch's own.
    """

    def __init__(self, program: Program, weights: Weights, tokens: jax.Array, dropout_key: jax.Array | None,
                 first_sample: jax.Array):  # fmt: skip
        self.program, self.weights, self.tokens = program, weights, tokens
        self.micro_batches, self.batch, length = tokens.shape
        self.message = jax.ShapeDtypeStruct((self.batch, length - 1, program.model.hidden), program.model.dtype)
        self._dropout_key, self._first_sample = dropout_key, first_sample
        self.index = lax.axis_index(program.pipe) if program.pipe else jnp.int32(0)
        self._layer_of = jnp.asarray(program.layer_of, jnp.int32)[self.index]
        one = weights.chunks[0][0]
        one = jax.tree.map(lambda w: w[0], one) if program.segments[0].scan else one[0]
        x = jnp.zeros(self.message.shape, self.message.dtype)

        def layer(weights: Params, x: jax.Array, index: jax.Array, dropout: Dropout | None) -> jax.Array:
            return model.layer(weights, x, program.model, program.axis, dropout, index)

        self._vjp = SplitVjp(save_policy(program.save)(layer), one, x, jnp.int32(0), self._dropout(jnp.int32(0)))

    def _dropout(self, mb: jax.Array) -> Dropout | None:
        if self._dropout_key is None:
            return None
        return Dropout(self._dropout_key, self._first_sample + mb * self.batch + jnp.arange(self.batch))

    def _layer_residuals(self, lead: tuple[int, ...]) -> list[Any]:
        """Uninitialized residuals of a chunk, with leading dims: every slot is written before it is read."""

        def empty(*dims: int) -> list[jax.Array]:
            return [lax.empty((*dims, *leaf.shape), leaf.dtype) for leaf in self._vjp.kept]

        return [
            empty(*lead, segment.count) if segment.scan else [empty(*lead) for _ in range(segment.count)]
            for segment in self.program.segments
        ]

    def residuals(self, slots: int) -> Any:
        """The ring of what F leaves for B."""
        if self.program.save == "inputs":
            return lax.empty((slots, *self.message.shape), self.message.dtype)
        return self._layer_residuals((slots,))

    def scratch(self) -> Any:
        """Where B of save="inputs" writes scanned layers' residuals: one for all rows, else XLA makes one for each."""
        again = self.program.save == "inputs" and self.program.scan_layers
        return self._layer_residuals(()) if again else ()

    def embed(self, mb: jax.Array) -> jax.Array:
        tokens = self.tokens[mb, :, :-1]
        return model.embed(self.weights.embedding, tokens, self.program.model, self.program.axis, self._dropout(mb))

    def _segments(self, chunk: int, parts: list[Any]) -> list[tuple[Segment, Any, jax.Array, jax.Array, Any]]:
        """Per segment: itself, its weights, its layers' numbers, whether this stage has it, its part of a list."""
        numbers = [self._layer_of[chunk, s.start : s.start + s.count] for s in self.program.segments]
        return [
            (segment, weights, layers, layers[0] >= 0, part)
            for segment, weights, layers, part in zip(
                self.program.segments, self.weights.chunks[chunk], numbers, parts, strict=True
            )
        ]

    def _run_layers(
        self, chunk: int, mb: jax.Array, x: jax.Array, residuals: list[Any], slot: Index
    ) -> tuple[jax.Array, list[Any]]:
        dropout, kept = self._dropout(mb), []
        for segment, weights, layers, present, part in self._segments(chunk, residuals):

            def one(i: Any, carry: tuple, weights: Any = weights, layers: jax.Array = layers) -> tuple:
                x, part = carry
                y, new = self._vjp.forward(jax.tree.map(lambda w: w[i], weights), x, layers[i], dropout)
                return y, write(part, (*slot, i), new)

            def unrolled(
                carry: tuple, segment: Segment = segment, weights: Any = weights, layers: Any = layers
            ) -> tuple:
                x, part = carry
                written = []
                for i in range(segment.count):
                    x, new = self._vjp.forward(weights[i], x, layers[i], dropout)
                    written.append(write(part[i], slot, new))
                return x, written

            if segment.scan:
                x, part = lax.fori_loop(0, segment.count, one, (x, part))
            else:
                x, part = (only_if if segment.optional else always)(present, unrolled, (x, part))
            kept.append(part)
        return x, kept

    def forward(self, chunk: int, mb: jax.Array, x: jax.Array, residuals: Any, slot: Index) -> tuple[jax.Array, Any]:
        """F of a chunk: its output, and the residuals with this micro-batch's written into their slot."""
        if self.program.save != "inputs":
            return self._run_layers(chunk, mb, x, residuals, slot)
        y, _ = self._run_layers(chunk, mb, x, self._layer_residuals(()), ())
        return y, write(residuals, slot, x)

    def forward_once(self, chunk: int, mb: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        """F of a chunk whose B follows at once: its output and this micro-batch's own residuals."""
        empty = x if self.program.save == "inputs" else self._layer_residuals(())
        return self.forward(chunk, mb, x, empty, ())

    def output(self, chunk: int, mb: jax.Array, x: jax.Array) -> jax.Array:
        """F of a chunk without B: what it keeps is dead, and XLA drops it."""
        return self._run_layers(chunk, mb, x, self._layer_residuals(()), ())[0]

    def backward(
        self, chunk: int, mb: jax.Array, residuals: Any, slot: Index, g: jax.Array, grads: Weights, scratch: Any
    ) -> tuple[jax.Array, Weights, Any]:
        """B of a chunk: the gradient of its input, the accumulators with its layers' gradients added, the scratch."""
        if self.program.save == "inputs":
            x = read(residuals, slot)
            _, residuals = self._run_layers(chunk, mb, x, scratch or self._layer_residuals(()), ())
            slot, scratch = (), residuals if scratch else ()
        totals = list(grads.chunks[chunk])
        for number, (segment, weights, _, present, part) in reversed(list(enumerate(self._segments(chunk, residuals)))):
            last = segment.count - 1

            def one(j: Any, carry: tuple, weights: Any = weights, part: Any = part, last: int = last) -> tuple:
                g, total = carry
                i = last - j
                delta, g = self._vjp.backward(jax.tree.map(lambda w: w[i], weights), read(part, (*slot, i)), g)
                return g, write(total, (i,), add(read(total, (i,)), delta))

            def unrolled(carry: tuple, weights: Any = weights, part: Any = part, last: int = last) -> tuple:
                g, total = carry[0], list(carry[1])
                for i in range(last, -1, -1):
                    delta, g = self._vjp.backward(weights[i], read(part[i], slot), g)
                    total[i] = add(total[i], delta)
                return g, total

            if segment.scan:
                g, totals[number] = lax.fori_loop(0, segment.count, one, (g, totals[number]))
            else:
                run = only_if if segment.optional else always
                g, totals[number] = run(present, unrolled, (g, totals[number]))
        chunks = [totals if c == chunk else old for c, old in enumerate(grads.chunks)]
        return g, grads._replace(chunks=chunks), scratch

    def embed_gradient(self, mb: jax.Array, g: jax.Array, grads: Weights, active: jax.Array) -> Weights:
        """Adds the embedding's gradient; on stages that do not hold the first layer nothing is added."""
        tokens, dropout = self.tokens[mb, :, :-1], self._dropout(mb)
        embedding = model.embed_gradient(
            grads.embedding, tokens, g, self.program.model, self.program.axis, dropout, active
        )
        return grads._replace(embedding=embedding)

    def loss(self, mb: jax.Array, y: jax.Array) -> jax.Array:
        """Mean loss of one micro-batch, over their number."""
        return self._loss(self.weights.final_norm, self._table, y, mb)

    @property
    def _table(self) -> jax.Array:
        return model.head_table(self.weights.embedding, self.program.model)

    def _loss(self, final_norm: Params, table: jax.Array, y: jax.Array, mb: jax.Array) -> jax.Array:
        targets = self.tokens[mb, :, 1:]
        loss = model.head_loss(final_norm, table, y, targets, self.program.model, self.program.axis)
        return loss / self.micro_batches

    def head(
        self, mb: jax.Array, y: jax.Array, loss: jax.Array, embedding: Params, final_norm: Params
    ) -> tuple[jax.Array, jax.Array, Params, Params]:
        """The loss so far, the gradient of y, and the embedding's and the norm's accumulators with theirs added."""
        value, (norm, table, g) = jax.value_and_grad(self._loss, argnums=(0, 1, 2))(
            self.weights.final_norm, self._table, y, mb
        )
        token = embedding["token"]
        token = add(token, table) if self.program.model.tied_head else token.at[-1].add(table.astype(token.dtype))
        return loss + value, g, {**embedding, "token": token}, add(final_norm, norm)
