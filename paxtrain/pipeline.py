"""The executor: runs a schedule's rows on every stage, inside shard_map.

One program for all stages. Per row (see schedule.py): gradients travel, F, activations travel, B. F is `jax.vjp` of a
segment of layers; what its backward needs is taken out of the vjp and put into a ring, what is a weight is not (it is
found by identity and put back by B). So no autodiff crosses a transfer, and both transfers of a row can run under its
compute.

Two ways for a stage that is idle in a row:
    masked schedules    compute on scrap (it is bubble time anyway) with a zero cotangent: rows without a branch
    others              skip: a loop of zero or one trips. Unlike a conditional, a loop updates its carry in place;
                        a branch that returned rings or gradient accumulators would copy them whole.

Rows of equal kind are one scan; in the rest each transfer names only the pairs that carry something.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Codec
from paxtrain import model
from paxtrain.buffers import COLUMNS, Buffers, RowKind
from paxtrain.config import ModelConfig
from paxtrain.model import Dropout, Params
from paxtrain.schedule import Pair

Carry = dict[str, Any]
Cell = dict[str, jax.Array]


class Weights(NamedTuple):
    """A stage's weights in compute dtype, as one device holds them, split into segments once per step.

    Attributes:
        embedding: token [V/T, H], position [S, H].
        chunks: per chunk its segments, each a list of layers' trees, or one stacked tree [layers, ...] to scan.
        final_norm: scale, bias [H].
    """

    embedding: Params
    chunks: list[list[Any]]
    final_norm: Params


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive layer slots of a chunk that run as one vjp.

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


def only_if(condition: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """body(carry) where the condition holds, else carry: a loop of 0 or 1 trips, which copies nothing."""
    return lax.fori_loop(0, condition.astype(jnp.int32), lambda _, c: body(c), carry)


def always(condition: jax.Array, body: Callable[[Any], Any], carry: Any) -> Any:
    """body(carry), whatever the condition: for rows in which idle stages compute on scrap."""
    return body(carry)


def _permute(x: Any, axis: str, pairs: tuple[Pair, ...]) -> Any:
    return jax.tree.map(lambda leaf: lax.ppermute(leaf, axis, pairs), x)


# --- Layers and their residuals ---------------------------------------------------------------------------------------


def _policy(save: str) -> Callable[[Callable], Callable]:
    """The wrapper around one layer that makes its vjp keep what the save mode says."""
    if save in ("residuals", "inputs"):
        return lambda layer: layer
    if save == "layer_inputs":
        return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    names = jax.checkpoint_policies.save_only_these_names(*model.SAVED_NAMES)

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        # Flash attention's own outputs (context and softmax sums) spare its forward a second run.
        return primitive.name.startswith("dot_product_attention_fwd") or names(primitive, *args, **params)

    return functools.partial(jax.checkpoint, policy=keep)


class SplitVjp:
    """`jax.vjp` of function(weights, x, *rest) with its residuals split into weights, which stay where they are, and
    the rest, which is to be kept from F to B.

    Raises:
        AssertionError: a copy of a weight would be kept.
    """

    def __init__(self, function: Callable, weights: Any, x: jax.Array, *rest: Any):
        self._function = function
        where: list[int] = []

        def probe(weights: Any, x: jax.Array, *rest: Any) -> Any:
            _, vjp = jax.vjp(lambda w, x: function(w, x, *rest), weights, x)
            ids = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
            where.extend(ids.get(id(residual), -1) for residual in jax.tree.leaves(vjp))
            return vjp

        leaves, self._treedef = jax.tree.flatten(jax.eval_shape(probe, weights, x, *rest))
        self._where = where
        self.kept = [leaf for leaf, w in zip(leaves, where) if w < 0]
        kernels = {w.shape for w in jax.tree.leaves(weights) if w.ndim >= 2}
        assert not kernels & {leaf.shape for leaf in self.kept}, "a weight is kept as a residual"

    def forward(self, weights: Any, x: jax.Array, *rest: Any) -> tuple[jax.Array, list[jax.Array]]:
        """The output, and the residuals that are not weights."""
        y, vjp = jax.vjp(lambda w, x: self._function(w, x, *rest), weights, x)
        return y, [leaf for leaf, w in zip(jax.tree.leaves(vjp), self._where) if w < 0]

    def backward(self, weights: Any, kept: list[jax.Array], g: jax.Array) -> tuple[Any, jax.Array]:
        """Gradients with respect to the weights and to x."""
        flat, rest = jax.tree.leaves(weights), iter(kept)
        leaves = [flat[w] if w >= 0 else next(rest) for w in self._where]
        return jax.tree.unflatten(self._treedef, leaves)(g)


Index = tuple[jax.Array | int, ...]


def _read(ring: Any, index: Index) -> Any:
    """ring[index] of every leaf; an empty index is the whole."""

    def read(r: jax.Array) -> jax.Array:
        starts = (*index, *[0] * (r.ndim - len(index)))
        return lax.dynamic_slice(r, starts, (*[1] * len(index), *r.shape[len(index) :])).reshape(r.shape[len(index) :])

    return jax.tree.map(read, ring) if index else ring


def _write(ring: Any, index: Index, value: Any) -> Any:
    """ring with ring[index] = value, in place where XLA can; an empty index is the whole."""

    def write(r: jax.Array, v: jax.Array) -> jax.Array:
        starts = (*index, *[0] * v.ndim)
        return lax.dynamic_update_slice(r, v.astype(r.dtype).reshape(*[1] * len(index), *v.shape), starts)

    return jax.tree.map(write, ring, value) if index else value


def _add(total: Any, row: jax.Array | int, delta: Any) -> Any:
    """total with total[row] += delta, summed in total's dtype."""
    return _write(total, (row,), jax.tree.map(lambda t, d: t + d.astype(t.dtype), _read(total, (row,)), delta))


# --- One stage --------------------------------------------------------------------------------------------------------


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

        self._vjp = SplitVjp(_policy(program.save)(layer), one, x, jnp.int32(0), self._dropout(jnp.int32(0)))

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
                return y, _write(part, (*slot, i), new)

            def unrolled(
                carry: tuple, segment: Segment = segment, weights: Any = weights, layers: Any = layers
            ) -> tuple:
                x, part = carry
                written = []
                for i in range(segment.count):
                    x, new = self._vjp.forward(weights[i], x, layers[i], dropout)
                    written.append(_write(part[i], slot, new))
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
        return y, _write(residuals, slot, x)

    def forward_once(self, chunk: int, mb: jax.Array, x: jax.Array) -> tuple[jax.Array, Any]:
        """F of a chunk whose B follows at once: its output and this micro-batch's own residuals."""
        empty = x if self.program.save == "inputs" else self._layer_residuals(())
        return self.forward(chunk, mb, x, empty, ())

    def output(self, chunk: int, mb: jax.Array, x: jax.Array) -> jax.Array:
        """F of a chunk without B: what it keeps is dead, and XLA drops it."""
        return self._run_layers(chunk, mb, x, self._layer_residuals(()), ())[0]

    def backward(
        self, chunk: int, mb: jax.Array, residuals: Any, slot: Index, g: jax.Array, grads: Params
    ) -> tuple[jax.Array, Params]:
        """B of a chunk: the gradient of its input, and the accumulators with its layers' gradients added."""
        if self.program.save == "inputs":
            x = _read(residuals, slot)
            _, residuals = self._run_layers(chunk, mb, x, self._layer_residuals(()), ())
            slot = ()
        total, first_row = grads["layers"], chunk * max(self.program.counts)
        for segment, weights, _, present, part in reversed(self._segments(chunk, residuals)):
            row, last = first_row + segment.start, segment.count - 1

            def one(j: Any, carry: tuple, weights: Any = weights, part: Any = part, row: int = row, last: int = last):
                g, total = carry
                i = last - j
                delta, g = self._vjp.backward(jax.tree.map(lambda w: w[i], weights), _read(part, (*slot, i)), g)
                return g, _add(total, row + i, delta)

            def unrolled(carry: tuple, weights: Any = weights, part: Any = part, row: int = row, last: int = last):
                g, total = carry
                for i in range(last, -1, -1):
                    delta, g = self._vjp.backward(weights[i], _read(part[i], slot), g)
                    total = _add(total, row + i, delta)
                return g, total

            if segment.scan:
                g, total = lax.fori_loop(0, segment.count, one, (g, total))
            else:
                g, total = (only_if if segment.optional else always)(present, unrolled, (g, total))
        return g, {**grads, "layers": total}

    def embed_gradient(self, mb: jax.Array, g: jax.Array, grads: Params, active: jax.Array) -> Params:
        """Adds the embedding's gradient; on stages that do not hold the first layer nothing is added."""
        tokens, dropout = self.tokens[mb, :, :-1], self._dropout(mb)
        embedding = model.embed_gradient(
            grads["embedding"], tokens, g, self.program.model, self.program.axis, dropout, active
        )
        return {**grads, "embedding": embedding}

    def loss(self, mb: jax.Array, y: jax.Array) -> jax.Array:
        """Mean loss of one micro-batch, over their number."""
        return self._loss(self.weights.final_norm, self.weights.embedding["token"], y, mb)

    def _loss(self, final_norm: Params, table: jax.Array, y: jax.Array, mb: jax.Array) -> jax.Array:
        targets = self.tokens[mb, :, 1:]
        loss = model.head_loss(final_norm, table, y, targets, self.program.model, self.program.axis)
        return loss / self.micro_batches

    def head(self, mb: jax.Array, y: jax.Array, loss: jax.Array, grads: Params) -> tuple[jax.Array, jax.Array, Params]:
        """The loss so far, the gradient of y, and the accumulators with the head's gradients added."""
        value, (norm, table, g) = jax.value_and_grad(self._loss, argnums=(0, 1, 2))(
            self.weights.final_norm, self.weights.embedding["token"], y, mb
        )
        add = lambda total, delta: jax.tree.map(lambda t, d: t + d.astype(t.dtype), total, delta)  # noqa: E731
        embedding = {**grads["embedding"], "token": add(grads["embedding"]["token"], table)}
        return loss + value, g, {**grads, "embedding": embedding, "final_norm": add(grads["final_norm"], norm)}


# --- Rows -------------------------------------------------------------------------------------------------------------


class Rows:
    """Runs rows of a schedule on a stage."""

    def __init__(self, stage: Stage, buffers: Buffers, codec: Codec, masked: bool, train: bool):
        self.stage, self.buffers, self.codec, self.train = stage, buffers, codec, train
        self.run = always if masked else only_if
        self.masked = masked
        self.program = stage.program
        self.last = stage.index == self.program.stages - 1
        self.table = jnp.asarray(buffers.table)

    def start(self, grads: Params, codec_state: Any) -> Carry:
        """The carry before the first row; `grads` are the accumulators."""
        message = jnp.zeros(self.stage.message.shape, self.stage.message.dtype)
        # Slots are written before they are read: no need to clear them.
        ring = lambda depth, x: lax.empty((depth + 1, *x.shape), x.dtype)  # noqa: E731
        carry = {"loss": jnp.float32(0), "output": message}
        carry["inbox"] = ring(self.buffers.activation_depth, message) if self.buffers.activation_depth else message
        if self.train:
            depth = self.buffers.gradient_depth
            carry["gradients"] = ring(depth, message) if depth else message
            carry["residuals"] = self.stage.residuals(self.buffers.residual_depth + 1)
            carry |= {"gradient_out": message, "grads": grads, "codec": codec_state}
        return carry

    def _forward(self, carry: Carry, cell: Cell, chunk: int, kind: RowKind) -> Carry:
        stage, train = self.stage, self.train
        active = (cell["forward_valid"] == 1) & (cell["forward_chunk"] == chunk)
        inbox = _read(carry["inbox"], (cell["input_slot"],)) if self.buffers.activation_depth else carry["inbox"]
        keys = ("output", "residuals") if train else ("output",)

        def body(part: Carry) -> Carry:
            x = inbox
            if kind.first and chunk == 0:
                x = jnp.where(stage.index == 0, stage.embed(cell["forward"]), x)
            if not train:
                return {"output": stage.output(chunk, cell["forward"], x)}
            slot = (cell["forward_slot"],)
            y, residuals = stage.forward(chunk, cell["forward"], x, part["residuals"], slot)
            return {"output": y, "residuals": residuals}

        carry = carry | self.run(active, body, {k: carry[k] for k in keys})
        if kind.head and chunk == self.program.chunks - 1:
            carry = carry | self._head(carry, cell, active & self.last)
        return carry

    def _head(self, carry: Carry, cell: Cell, active: jax.Array) -> Carry:
        stage, y = self.stage, carry["output"]
        if not self.train:
            return {"loss": only_if(active, lambda loss: loss + stage.loss(cell["forward"], y), carry["loss"])}
        edge = ("embedding", "final_norm")

        def body(part: Carry) -> Carry:
            loss, g, grads = stage.head(cell["forward"], y, part["loss"], part["grads"])
            depth = self.buffers.gradient_depth
            gradients = _write(part["gradients"], (cell["head_slot"],), g) if depth else g
            return {"loss": loss, "gradients": gradients, "grads": {k: grads[k] for k in edge}}

        part = {"loss": carry["loss"], "gradients": carry["gradients"], "grads": {k: carry["grads"][k] for k in edge}}
        part = only_if(active, body, part)
        return part | {"grads": carry["grads"] | part["grads"]}

    def _backward(self, carry: Carry, cell: Cell, g: jax.Array, chunk: int, kind: RowKind) -> Carry:
        stage = self.stage
        active = (cell["backward_valid"] == 1) & (cell["backward_chunk"] == chunk)
        ring = carry["residuals"]

        def body(part: Carry) -> Carry:
            cotangent, slot = jnp.where(active, g, 0) if self.masked else g, (cell["backward_slot"],)
            out, grads = stage.backward(chunk, cell["backward"], ring, slot, cotangent, part["grads"])
            if kind.first_backward and chunk == 0:
                grads = stage.embed_gradient(cell["backward"], out, grads, active & (stage.index == 0))
            return {"gradient_out": out, "grads": grads}

        carry = carry | self.run(active, body, {k: carry[k] for k in ("gradient_out", "grads")})
        if not self.masked or self.program.scan_layers:
            # Says that the next F writes the ring after this B's loop has read it; without that XLA copies the ring.
            out, ring = lax.optimization_barrier((carry["gradient_out"], ring))
            carry = carry | {"gradient_out": out, "residuals": ring}
        return carry

    def row(self, carry: Carry, cells: jax.Array, kind: RowKind) -> Carry:
        """One row; cells is this row's [stages, columns] of the table."""
        mine = cells[self.stage.index]
        cell = {name: mine[i] for i, name in enumerate(COLUMNS)}
        depth, received = self.buffers.gradient_depth, None
        if kind.receive:
            # The one place where a gradient leaves a stage: encode, send, decode.
            wire, state = self.codec.encode(carry["codec"], carry["gradient_out"])
            received = self.codec.decode(_permute(wire, self.program.pipe, kind.receive))
            carry = carry | {"codec": state}
            if depth:
                carry = carry | {"gradients": _write(carry["gradients"], (cell["gradient_arrival_slot"],), received)}
        for chunk in kind.forward:
            carry = self._forward(carry, cell, chunk, kind)
        if kind.send:
            arrived = _permute(carry["output"], self.program.pipe, kind.send)
            slot = (cell["arrival_slot"],)
            inbox = _write(carry["inbox"], slot, arrived) if self.buffers.activation_depth else arrived
            carry = carry | {"inbox": inbox}
        if kind.backward:
            if depth:
                g = _read(carry["gradients"], (cell["gradient_slot"],))
            elif received is None:
                g = carry["gradients"]
            else:
                g = jnp.where(self.last, carry["gradients"], received)
            for chunk in kind.backward:
                carry = self._backward(carry, cell, g, chunk, kind)
        return carry

    def run_all(self, carry: Carry) -> Carry:
        for start, period, repeats in self.buffers.runs():
            kinds = self.buffers.kinds[start : start + period]
            cells = self.table[start : start + period * repeats]

            def body(carry: Carry, cells: jax.Array, kinds: list[RowKind] = kinds) -> tuple[Carry, None]:
                for i, kind in enumerate(kinds):
                    carry = self.row(carry, cells[i], kind)
                return carry, None

            if repeats == 1:
                carry, _ = body(carry, cells)
            else:
                carry, _ = lax.scan(body, carry, cells.reshape(repeats, period, *cells.shape[1:]))
        return carry


def _one_stage(stage: Stage, grads: Params) -> tuple[jax.Array, Params]:
    """With one stage F and B share a row and residuals bypass the ring."""

    def body(carry: tuple[jax.Array, Params], mb: jax.Array) -> tuple[tuple[jax.Array, Params], None]:
        loss, grads = carry
        y, residuals = stage.forward_once(0, mb, stage.embed(mb))
        loss, g, grads = stage.head(mb, y, loss, grads)
        g, grads = stage.backward(0, mb, residuals, (), g, grads)
        return (loss, stage.embed_gradient(mb, g, grads, jnp.bool_(True))), None

    return lax.scan(body, (jnp.float32(0), grads), jnp.arange(stage.micro_batches))[0]


def loss_and_gradients(
    stage: Stage, buffers: Buffers, masked: bool, grads: Params, codec: Codec, codec_state: Any
) -> tuple[jax.Array, Params, Any]:
    """Loss and gradients of all micro-batches of this data rank.

    Args:
        stage: this device's stage; its tokens are [m, B, S+1].
        buffers, masked: the schedule's.
        grads: float32 zeros shaped like a device's parameters: layers [rows, ...], embedding, final_norm.
        codec, codec_state: for the gradients that this stage sends.

    Returns:
        The loss, zero but on the last stage; the gradients; the codec's new state.
    """
    if stage.program.stages == 1:
        return *_one_stage(stage, grads), codec_state
    rows = Rows(stage, buffers, codec, masked, train=True)
    carry = rows.run_all(rows.start(grads, codec_state))
    return carry["loss"], carry["grads"], carry["codec"]


def loss_only(stage: Stage, buffers: Buffers, masked: bool, codec: Codec) -> jax.Array:
    """Loss of all micro-batches of this data rank, zero but on the last stage; nothing is kept for a backward."""
    rows = Rows(stage, buffers, codec, masked, train=False)
    return rows.run_all(rows.start({}, ()))["loss"]
