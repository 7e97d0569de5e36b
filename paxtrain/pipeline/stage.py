"""One stage of the pipeline: F, B and W of one micro-batch on one device, in place over rings and accumulators."""

from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import State, Tree
from paxtrain.model import parameters, transformer
from paxtrain.model.spec import Scalars
from paxtrain.model.tensor_parallel import own_tokens
from paxtrain.model.transformer import Dropout, Params
from paxtrain.pipeline.program import (
    Close,
    LayerPlace,
    Layers,
    LayerStep,
    Program,
    Segment,
    Share,
    Sums,
    Weights,
    layers_of,
)
from paxtrain.pipeline.residuals import AddingBackward, SplitVjp, save_policy
from paxtrain.pipeline.rings import (
    RingIndex,
    add,
    add_some,
    always,
    numbered,
    only_if,
    read,
    some,
    write,
    write_some,
)
from paxtrain.pipeline.sharding import Whole
from paxtrain.pipeline.split_backward import SplitBackward, TracedLayer

# A segment's residuals: a list of its layers' leaves, or one list of stacked leaves if it is scanned.
Residuals: TypeAlias = list[jax.Array] | list[list[jax.Array]]
Ring: TypeAlias = jax.Array | list[Residuals]  # what F keeps of a chunk: its input (save="inputs"), or all residuals


class Stage:
    """The operations of one device on one micro-batch: F, B and W of a chunk, the embedding and the head.

    Residuals are stored by segment: a list of layers' leaves, each [slots, ...], or one list of leaves
    [slots, layers, ...] if the segment is scanned. A `slot` argument is an index of one element. It may also be empty:
    the leaves then have no dim of slots and belong to one micro-batch.

    Arguments of its functions:
        chunk, mb: number of the chunk, and of the micro-batch, int32 [].
        x: input of the chunk, or value that goes from layer to layer, [B, S or S/T, H].
        residuals, slot: ring of residuals, and index of this micro-batch in it.
        cotangents: see `cotangents`; zeros on an idle stage.
        grads: gradient accumulators.
        number, layer: number of the segment in the chunk, and of the layer in the segment.

    Attributes:
        program: static facts of the pipeline.
        weights: the stage's weights in compute dtype.
        tokens: the data rank's tokens, int32 [micro-batches, B, S + 1].
        micro_batches: number of micro-batches, of the data rank that has most.
        divisor: number by which the loss of a micro-batch is divided, so that the mean over data ranks of their sums is
            the mean over all sequences.
        share: the data rank's part of the batch.
        held: how the stage has its weights and the sums of their gradients: whole, or in shards over data.
        batch: sequences of a micro-batch, B.
        message: shape and dtype of a message between stages, [B, S or S/T, H].
        index: position of the stage on the pipe axis, int32 [].
        no_scalars: zeros for the scalars that layers return beside their outputs, by name.
    """

    def __init__(
        self,
        program: Program,
        weights: Weights,
        tokens: jax.Array,
        dropout_key: jax.Array | None,
        share: Share,
        held: Whole | None = None,
    ) -> None:
        """Trace a layer of each kind to find its residuals.

        Args:
            program: static facts of the pipeline.
            weights: the stage's weights in compute dtype.
            tokens: the data rank's tokens, int32 [micro-batches, B, S + 1].
            dropout_key: key of the step, uint32 [2]; None without dropout.
            share: the data rank's part of the batch.
            held: how the stage has its weights; None: whole.
        """
        self.program, self.weights, self.tokens, self.share = program, weights, tokens, share
        self.held = held or Whole()
        self.micro_batches, self.batch, length = tokens.shape
        self.divisor = self.micro_batches if share.mean is None else share.mean
        shape = (self.batch, (length - 1) // program.group.parts, program.model.hidden)
        self.message = jax.ShapeDtypeStruct(shape, program.model.dtype)
        self._dropout_key = dropout_key
        self._starts = transformer.document_starts(tokens[..., :-1], program.model)
        self.index = lax.axis_index(program.pipe) if program.pipe else jnp.int32(0)
        self._layer_of = jnp.asarray(program.layer_of, jnp.int32)[self.index]
        of_kind = {s.kind: part for s, part in zip(program.segments, weights.chunks[0], strict=True)}
        self._traced = {kind: self._trace(kind, part) for kind, part in of_kind.items()}
        aux = parameters.aux(program.model)
        self.no_scalars = {one.name: jnp.float32(0) for one in aux}
        self._weights_of_scalars = {one.name: jnp.float32(one.weight / self.divisor) for one in aux}

    def _trace(self, kind: str, part: Layers) -> TracedLayer:
        """Return a layer of a kind, traced with the weights of a segment."""
        program, first = self.program, jnp.int32(0)
        one = self.held.shapes(layers_of(part)[0])

        def layer(
            weights: Params, x: jax.Array, index: jax.Array, dropout: Dropout | None, starts: jax.Array | None
        ) -> tuple[jax.Array, Scalars]:
            return transformer.layer(weights, x, program.model, program.group, dropout, index, starts, kind)

        x = jnp.zeros(self.message.shape, self.message.dtype)
        rest = first, self._dropout(first), self._documents(first)
        vjp = SplitVjp(save_policy(program.save)(layer), one, x, *rest)
        split = SplitBackward(vjp, one) if program.splits else None
        return TracedLayer(vjp, split, AddingBackward(vjp, one), one)

    def _layer(self, place: LayerPlace) -> TracedLayer:
        """Return the traced layer of a place's kind."""
        return self._traced[self.program.segments[place.segment].kind]

    def _dropout(self, mb: jax.Array) -> Dropout | None:
        if self._dropout_key is None:
            return None
        return Dropout(self._dropout_key, self.share.first_sample + mb * self.batch + jnp.arange(self.batch))

    def _documents(self, mb: jax.Array) -> jax.Array | None:
        """Return the document starts of a micro-batch, see transformer.document_starts."""
        return None if self._starts is None else self._starts[mb]

    def _layer_residuals(self, lead: tuple[int, ...]) -> list[Residuals]:
        """Return uninitialized residuals of a chunk, with leading dims; every slot is written before it is read."""

        def empty(segment: Segment, *dims: int) -> list[jax.Array]:
            return [lax.empty((*dims, *leaf.shape), leaf.dtype) for leaf in self._traced[segment.kind].leaves]

        return [
            empty(s, *lead, s.count) if s.scan else [empty(s, *lead) for _ in range(s.count)]
            for s in self.program.segments
        ]

    def residuals(self, slots: int) -> Ring:
        """Return the ring of the values that F leaves for B, and B for W, with `slots` slots."""
        if self.program.save == "inputs":
            return lax.empty((slots, *self.message.shape), self.message.dtype)
        return self._layer_residuals((slots,))

    def scratch(self) -> list[Residuals] | tuple[()]:
        """Return a buffer for the residuals of scanned layers in B of save="inputs".

        Without it XLA makes one per row.
        """
        again = self.program.save == "inputs" and self.program.scan_layers
        return self._layer_residuals(()) if again else ()

    def embed(self, mb: jax.Array) -> jax.Array:
        """Return the embedding of a micro-batch, shaped like a message."""
        tokens, program, embedding = self.tokens[mb, :, :-1], self.program, self.weights.embedding
        table = self._table(0)
        embedding = {**embedding, "token": table if program.model.tied_head else table[None]}
        return transformer.embed(
            embedding, tokens, program.model, program.group, self._dropout(mb), self._documents(mb)
        )

    def first_input(self, mb: jax.Array, x: jax.Array) -> jax.Array:
        """Return the input of chunk 0: on the first stage the embedding of a micro-batch, on others x."""
        return self.held.on(self.index == 0, lambda _: self.embed(mb), x)

    def _each_layer(
        self, chunk: int, x: Tree, parts: list[Tree], step: LayerStep, backward: bool = False, since: Tree = None
    ) -> tuple[Tree, list[Tree]]:
        """Run a step of each layer of a chunk, and return x and the layers' parts after it.

        Args:
            parts: for each segment a list of the layers' parts, or one stacked part if it is scanned.
            step: function (place, weights, x, part) -> (x, part).
            backward: whether the last layer comes first.
            since: what is made before the first layer's weights are gathered; None: x.
        """
        parts, numbers = list(parts), range(len(parts))
        self.held.start(since)
        for number in reversed(numbers) if backward else numbers:
            x, parts[number] = self.run_segment(chunk, number, x, parts[number], step, backward)
        return x, parts

    def slot(self, chunk: int, number: int, layer: int | jax.Array) -> int | jax.Array:
        """Return the slot, in the stage, of a layer of a segment."""
        return chunk * len(self.program.slots) + self.program.segments[number].start + layer

    def at(self, chunk: int, number: int, layer: int | jax.Array) -> tuple[LayerPlace, Params]:
        """Return the place of a layer of a scanned segment, and what the device has of its weights."""
        weights = jax.tree.map(lambda w: w[layer], self.weights.chunks[chunk][number])
        own = self._layer_of[chunk, self.program.segments[number].start + layer]
        return LayerPlace(own, number, layer, (layer,)), weights

    def run_segment(
        self, chunk: int, number: int, x: Tree, part: Tree, step: LayerStep, backward: bool
    ) -> tuple[Tree, Tree]:
        """Run a step of each layer of one segment, and return x and the segment's part after it.

        Args:
            chunk: number of the chunk.
            number: number of the segment in the chunk.
            x: value that goes from layer to layer.
            part: list of the layers' parts, or one stacked part if the segment is scanned.
            step: function (place, weights, x, part) -> (x, part).
            backward: whether the last layer comes first.
        """
        segment, weights = self.program.segments[number], self.weights.chunks[chunk][number]
        layers = self._layer_of[chunk, segment.start : segment.start + segment.count]

        def turn(number_of_turn: int | jax.Array) -> tuple[LayerPlace, Params]:
            return self.at(chunk, number, segment.count - 1 - number_of_turn if backward else number_of_turn)

        def unrolled(carry: tuple) -> tuple:
            if apart:
                self.held.start()
            x, own, each = carry[0], list(carry[1]), layers_of(weights)
            for i in range(segment.count)[:: -1 if backward else 1]:
                x, whole = self.held.gathered(x, each[i])
                x, own[i] = step(LayerPlace(layers[i], number, i, ()), whole, x, own[i])
            return x, own

        apart = segment.scan or segment.optional  # a loop does not know what runs before
        if segment.scan:
            x, part = self.held.scan(segment.count, turn, step, x, part, backward)
        else:
            x, part = (only_if if segment.optional else always)(layers[0] >= 0, unrolled, (x, part))
        if apart:
            self.held.start()
        return x, part

    def _run_layers(
        self, chunk: int, mb: jax.Array, x: jax.Array, residuals: list[Residuals], slot: RingIndex
    ) -> tuple[jax.Array, Scalars, list[Residuals]]:
        rest = self._dropout(mb), self._documents(mb)

        def step(place: LayerPlace, weights: Params, carry: tuple, part: list) -> tuple[tuple, list]:
            x, sums = carry
            (y, scalars), kept = self._layer(place).vjp.forward(weights, x, place.number, *rest)
            return (y, add(sums, scalars)), write_some(part, (*slot, *place.at), dict(enumerate(kept)))

        (y, sums), residuals = self._each_layer(chunk, (x, self.no_scalars), residuals, step)
        return y, jax.tree.map(lambda x: x / self.divisor, sums), residuals

    def forward(
        self, chunk: int, mb: jax.Array, x: jax.Array, residuals: Ring, slot: RingIndex
    ) -> tuple[jax.Array, Scalars, Ring]:
        """Run F of a chunk.

        Returns:
            The output of the chunk, the sums of its layers' scalars over the divisor, and the ring with this
            micro-batch's residuals in their slot.
        """
        if not isinstance(residuals, jax.Array):
            return self._run_layers(chunk, mb, x, residuals, slot)
        y, scalars, _ = self._run_layers(chunk, mb, x, self._layer_residuals(()), ())
        return y, scalars, write(residuals, slot, x)

    def forward_once(self, chunk: int, mb: jax.Array, x: jax.Array) -> tuple[jax.Array, Scalars, Ring]:
        """Run F of a chunk whose B follows at once. Return what `forward` does, with residuals without a ring."""
        empty = x if self.program.save == "inputs" else self._layer_residuals(())
        return self.forward(chunk, mb, x, empty, ())

    def output(self, chunk: int, mb: jax.Array, x: jax.Array) -> jax.Array:
        """Return the output of F of a chunk that has no B; its residuals are dead code, which XLA drops."""
        return self._run_layers(chunk, mb, x, self._layer_residuals(()), ())[0]

    def cotangents(self, g: jax.Array) -> tuple[jax.Array, Scalars]:
        """Return what the backward of a layer is given: g, of its output, and constants, of its scalars.

        So no message carries what trains by the scalars.

        Args:
            g: gradient of the chunk's output, [B, S or S/T, H].
        """
        return g, self._weights_of_scalars

    def _accumulate(
        self,
        chunk: int,
        x: Tree,
        grads: Weights,
        step: LayerStep,
        backward: bool,
        close: Close | None,
        since: Tree = None,
    ) -> tuple[Tree, Weights, list[State]]:
        """Run a step of each layer over the accumulators; return also the states of `close`."""

        def closed(place: LayerPlace, weights: Params, x: Tree, total: Params) -> tuple[Tree, Params]:
            x, sums = step(place, weights, x, Sums(total))
            return x, sums.total

        totals = grads.chunks[chunk]
        if close:
            x, totals, states = close.run(self, chunk, x, totals, closed, close, backward)
            return x, _with_chunk(grads, chunk, totals), states
        errors = grads.errors[chunk] if grads.errors else [() if s.scan else [()] * s.count for s in self._segments]
        sums = [Sums(*b) if s.scan else list(map(Sums, *b)) for s, *b in zip(self._segments, totals, errors)]
        x, sums = self._each_layer(chunk, x, sums, step, backward, since)
        parts = [(own.total, own.errors) if isinstance(own, Sums) else tuple(map(list, zip(*own))) for own in sums]
        totals, errors = map(list, zip(*parts))
        return x, _with_chunk(grads, chunk, totals, errors), []

    @property
    def _segments(self) -> tuple[Segment, ...]:
        return self.program.segments

    def backward(
        self,
        chunk: int,
        mb: jax.Array,
        residuals: Ring,
        slot: RingIndex,
        cotangents: tuple[jax.Array, Scalars],
        grads: Weights,
        scratch: list[Residuals] | tuple[()],
        close: Close | None = None,
        since: Tree = None,
    ) -> tuple[jax.Array, Weights, list[Residuals] | tuple[()], list[State]]:
        """Run the whole backward of a chunk.

        Args:
            scratch: the buffer of `scratch`.
            close: reduction of the layers' gradients, if this is the stage's last op.
            since: see `_each_layer`.

        Returns:
            The gradient of the chunk's input, the accumulators with the layers' gradients added, the scratch, and the
            states of `close`.
        """
        g, scalars = cotangents
        if isinstance(residuals, jax.Array):
            x = read(residuals, slot)
            *_, again = self._run_layers(chunk, mb, x, scratch or self._layer_residuals(()), ())
            slot, scratch = (), again if scratch else ()
        else:
            again = residuals

        def step(place: LayerPlace, weights: Params, g: jax.Array, total: Sums) -> tuple[jax.Array, Sums]:
            kept, layer = read(place.of(again), (*slot, *place.at)), self._layer(place)
            own = read(total, place.at)
            first = self.held.first_sum(own.total, layer.weights)
            # A ring for the backward in two parts has places for more, behind those of F.
            added, g = layer.adding(weights, kept[: len(layer.vjp.kept)], (g, scalars), first)
            g, sums = self.held.summed(g, own, added)
            return g, write(total, place.at, sums)

        g, grads, states = self._accumulate(chunk, g, grads, step, True, close, since)
        return g, grads, scratch, states

    def input_gradient(
        self,
        chunk: int,
        residuals: list[Residuals],
        slot: RingIndex,
        cotangents: tuple[jax.Array, Scalars],
        grads: Weights,
    ) -> tuple[jax.Array, Weights, list[Residuals]]:
        """Run B of a chunk whose W comes later.

        Returns:
            The gradient of the chunk's input, the accumulators with the gradients of norms and biases added, and the
            ring with the values that W needs.
        """

        g, scalars = cotangents

        def step(place: LayerPlace, weights: Params, g: jax.Array, part: tuple) -> tuple[jax.Array, tuple]:
            (ring, total), at, split = part, (*slot, *place.at), self._layer(place).split
            assert split
            g, early, left = split.input_gradient(weights, read(ring, at), (g, scalars))
            g, parts = self.held.parts(g, some(total, early))
            early = numbered(parts, early)
            return g, (write_some(ring, at, left), add_some(total, place.at, early))

        segments, totals = self.program.segments, grads.chunks[chunk]
        both = [(r, t) if s.scan else list(zip(r, t)) for s, r, t in zip(segments, residuals, totals)]
        g, both = self._each_layer(chunk, g, both, step, backward=True)
        residuals, totals = zip(*(part if s.scan else map(list, zip(*part)) for s, part in zip(segments, both)))
        return g, _with_chunk(grads, chunk, list(totals)), list(residuals)

    def weight_gradients(
        self, chunk: int, residuals: list[Residuals], slot: RingIndex, grads: Weights, close: Close | None = None
    ) -> tuple[Weights, list[State]]:
        """Run W of a chunk. Return the accumulators with its matrices' gradients added, and the states of `close`.

        Args:
            chunk: number of the chunk.
            residuals: ring that `input_gradient` has changed.
            slot: index of the micro-batch in the ring.
            grads: gradient accumulators.
            close: reduction of the layers' gradients, if this is the stage's last op.
        """

        def step(place: LayerPlace, weights: Params, x: tuple, total: Sums) -> tuple[tuple, Sums]:
            leaves, layer = read(place.of(residuals), (*slot, *place.at)), self._layer(place)
            assert layer.split
            own, numbers = read(total, place.at), layer.split.late
            first = jax.tree.leaves(self.held.first_sum(own.total, layer.weights))
            added = layer.split.weight_gradients(weights, leaves, {n: first[n] for n in numbers})
            before = dict(enumerate(jax.tree.leaves(own.total)))
            late = own._replace(total=some(own.total, {n: before[n] for n in numbers}))
            x, sums = self.held.summed(x, late, some(own.total, added))
            written = write_some(total.total, place.at, numbered(sums.total, added))
            return x, Sums(written, write(total.errors, place.at, sums.errors))

        _, grads, states = self._accumulate(chunk, (), grads, step, False, close)
        return grads, states

    def embed_gradient(self, mb: jax.Array, g: jax.Array, grads: Weights, active: jax.Array) -> Weights:
        """Add the embedding's gradient to the accumulators.

        Args:
            g: gradient of the embedding's output, [B, S or S/T, H].
            active: whether this stage holds the first layer and runs its B now, bool []; if not, nothing is added.
        """
        tokens, program, rest = self.tokens[mb, :, :-1], self.program, (self._dropout(mb), active, self._documents(mb))

        def added(embedding: Params) -> Params:
            return transformer.embed_gradient(embedding, tokens, g, program.model, program.group, *rest)

        return grads._replace(embedding=self.held.embedding_summed(grads.embedding, added, self._table_shape, active))

    def loss(self, mb: jax.Array, y: jax.Array) -> jax.Array:
        """Return the mean loss of a micro-batch with last output y, over the divisor."""
        targets, weights = self._targets(mb), self.weights
        loss = transformer.head_loss(
            weights.final_norm, self._table(-1), y, targets, self.program.model, self.program.group
        )
        return loss / self.divisor

    def _targets(self, mb: jax.Array) -> jax.Array:
        """Return the tokens that this device's tokens of a micro-batch predict."""
        return own_tokens(self.tokens[mb, :, 1:], 1, self.program.group)

    def _own_table(self, row: int) -> jax.Array:
        """Return what the device has of a table of the vocabulary: 0 is the embedding's, -1 the head's."""
        token = self.weights.embedding["token"]
        return token if self.program.model.tied_head else token[row]

    def _table(self, row: int) -> jax.Array:
        """Return a table of the vocabulary, whole, see `_own_table`."""
        return self.held.table(self._own_table(row))

    @property
    def _table_shape(self) -> tuple[int, ...]:
        """Shape of a whole table of the vocabulary."""
        return jax.eval_shape(lambda: self._table(0)).shape

    def head(
        self, mb: jax.Array, y: jax.Array, loss: jax.Array, embedding: Params, final_norm: Params
    ) -> tuple[jax.Array, jax.Array, Params, Params]:
        """Run F and B of the head.

        Args:
            y: output of the last layer, [B, S or S/T, H].
            loss: loss of the micro-batches so far, float32 [].
            embedding: accumulators of the embedding's gradients.
            final_norm: accumulators of the final norm's gradients.

        Returns:
            The loss with this micro-batch's added, the gradient of y, and the accumulators with the head's gradients
            added.
        """
        token, model = embedding["token"], self.program.model
        own = token if model.tied_head else token[-1]
        value, norm, total, g = transformer.head_gradients(
            self.weights.final_norm,
            self._table(-1),
            y,
            self._targets(mb),
            model,
            self.program.group,
            self.divisor,
            self.held.first_table_sum(own, self._table_shape),
        )
        total = self.held.table_summed(own, total)
        token = total if model.tied_head else token.at[-1].set(total)
        return loss + value, g, {**embedding, "token": token}, add(final_norm, norm)


def _with_chunk(grads: Weights, chunk: int, totals: list[Layers], errors: list[Tree] | tuple[()] = ()) -> Weights:
    def chunks(all_before: list, new: list) -> list:
        return [new if c == chunk else old for c, old in enumerate(all_before)]

    kept = chunks(grads.errors, list(errors)) if grads.errors and errors else grads.errors
    return grads._replace(chunks=chunks(grads.chunks, totals), errors=kept)
