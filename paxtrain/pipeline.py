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


def _segment_function(program: Program, segment: Segment) -> Callable:
    """f(weights, x, layers, dropout) -> y, for one segment; `layers` are the numbers of its layers, int [count]."""

    def layer(weights: Params, x: jax.Array, index: jax.Array, dropout: Dropout | None) -> jax.Array:
        return model.layer(weights, x, program.model, program.axis, dropout, index)

    layer = _policy(program.save)(layer)

    def unrolled(weights: list[Params], x: jax.Array, layers: jax.Array, dropout: Dropout | None) -> jax.Array:
        for i, one in enumerate(weights):
            x = layer(one, x, layers[i], dropout)
        return x

    def scanned(weights: Params, x: jax.Array, layers: jax.Array, dropout: Dropout | None) -> jax.Array:
        return lax.scan(lambda x, args: (layer(args[0], x, args[1], dropout), None), x, (weights, layers))[0]

    return scanned if segment.scan else unrolled


class SplitVjp:
    """`jax.vjp` of a segment with its residuals split into weights, which stay where they are, and the rest.

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


def _add_layer_gradients(total: Params, segment: Segment, first_row: int, delta: Any) -> Params:
    """Adds a segment's gradients to the float32 accumulators [rows, ...] in place."""
    first_row += segment.start
    if segment.scan:
        return jax.tree.map(
            lambda t, d: t.at[first_row : first_row + segment.count].add(d.astype(t.dtype)), total, delta
        )
    for i, one in enumerate(delta):
        total = jax.tree.map(lambda t, d, row=first_row + i: t.at[row].add(d.astype(t.dtype)), total, one)
    return total


# --- One stage --------------------------------------------------------------------------------------------------------


class Stage:
    """The functions of a row for one micro-batch on one device, over a carry of rings and accumulators."""

    def __init__(self, program: Program, weights: Weights, tokens: jax.Array, dropout_key: jax.Array | None,
                 first_sample: jax.Array):  # fmt: skip
        self.program, self.weights, self.tokens = program, weights, tokens
        self.micro_batches, self.batch, length = tokens.shape
        self.message = jax.ShapeDtypeStruct((self.batch, length - 1, program.model.hidden), program.model.dtype)
        self._dropout_key, self._first_sample = dropout_key, first_sample
        self.index = lax.axis_index(program.pipe) if program.pipe else jnp.int32(0)
        self._layer_of = jnp.asarray(program.layer_of, jnp.int32)[self.index]
        self._slots = max(program.counts)
        x = jnp.zeros(self.message.shape, self.message.dtype)
        self.vjps = [
            SplitVjp(_segment_function(program, segment), w, x, self._layers(0, segment), self._dropout(jnp.int32(0)))
            for segment, w in zip(program.segments, weights.chunks[0])
        ]

    def _dropout(self, mb: jax.Array) -> Dropout | None:
        if self._dropout_key is None:
            return None
        return Dropout(self._dropout_key, self._first_sample + mb * self.batch + jnp.arange(self.batch))

    def _layers(self, chunk: int, segment: Segment) -> jax.Array:
        return self._layer_of[chunk, segment.start : segment.start + segment.count]

    def _present(self, chunk: int, segment: Segment) -> jax.Array:
        return self._layer_of[chunk, segment.start] >= 0

    def residual_shapes(self) -> list[list[jax.ShapeDtypeStruct]]:
        """Per segment, what F of one micro-batch leaves for B."""
        if self.program.save == "inputs":
            return [[self.message]]
        return [vjp.kept for vjp in self.vjps]

    def embed(self, mb: jax.Array) -> jax.Array:
        tokens = self.tokens[mb, :, :-1]
        return model.embed(self.weights.embedding, tokens, self.program.model, self.program.axis, self._dropout(mb))

    def forward(self, chunk: int, mb: jax.Array, x: jax.Array) -> tuple[jax.Array, list[list[jax.Array]]]:
        """All segments of a chunk; the output and, per segment, the residuals."""
        residuals = [[x]] if self.program.save == "inputs" else []
        for segment, vjp, weights in zip(self.program.segments, self.vjps, self.weights.chunks[chunk]):
            rest = (self._layers(chunk, segment), self._dropout(mb))

            def run(carry: tuple, vjp: SplitVjp = vjp, weights: Any = weights, rest: tuple = rest) -> tuple:
                return vjp.forward(weights, carry[0], *rest)

            if segment.optional:
                empty = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in vjp.kept]
                x, kept = only_if(self._present(chunk, segment), run, (x, empty))
            else:
                x, kept = run((x,))
            if self.program.save != "inputs":
                residuals.append(kept)
        return x, residuals

    def backward(
        self, chunk: int, mb: jax.Array, residuals: list[list[jax.Array]], g: jax.Array, grads: Params
    ) -> tuple[jax.Array, Params]:
        """The gradient of the chunk's input, and the accumulators with its layers' gradients added."""
        segments = list(zip(self.program.segments, self.vjps, self.weights.chunks[chunk]))
        if self.program.save == "inputs":
            [[x]], residuals = residuals, []
            for segment, vjp, weights in segments:
                # Each segment starts from its input; its own forward runs inside its branch below.
                residuals.append([x])
                if len(residuals) < len(segments):
                    rest = (self._layers(chunk, segment), self._dropout(mb))
                    step = lambda x, vjp=vjp, w=weights, rest=rest: vjp.forward(w, x, *rest)[0]  # noqa: E731
                    x = only_if(self._present(chunk, segment), step, x) if segment.optional else step(x)

        for (segment, vjp, weights), kept in reversed(list(zip(segments, residuals, strict=True))):

            def run(
                carry: tuple, segment: Segment = segment, vjp: SplitVjp = vjp, weights: Any = weights, kept: list = kept
            ) -> tuple:
                g, total = carry
                if self.program.save == "inputs":
                    _, kept = vjp.forward(weights, kept[0], self._layers(chunk, segment), self._dropout(mb))
                delta, g = vjp.backward(weights, kept, g)
                return g, _add_layer_gradients(total, segment, chunk * self._slots, delta)

            condition = self._present(chunk, segment)
            g, layers = (only_if if segment.optional else always)(condition, run, (g, grads["layers"]))
            grads = {**grads, "layers": layers}
        return g, grads

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


def _read(ring: Any, slot: jax.Array) -> Any:
    return jax.tree.map(lambda r: lax.dynamic_index_in_dim(r, slot, keepdims=False), ring)


def _write(ring: Any, slot: jax.Array, value: Any) -> Any:
    return jax.tree.map(lambda r, v: lax.dynamic_update_index_in_dim(r, v.astype(r.dtype), slot, 0), ring, value)


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
        # Slots are written before they are read: no need to clear gigabytes once a step.
        ring = lambda depth, x: lax.empty((depth + 1, *x.shape), x.dtype)  # noqa: E731
        carry = {"loss": jnp.float32(0), "output": message}
        carry["inbox"] = ring(self.buffers.activation_depth, message) if self.buffers.activation_depth else message
        if self.train:
            depth = self.buffers.gradient_depth
            carry["gradients"] = ring(depth, message) if depth else message
            carry["residuals"] = jax.tree.map(
                functools.partial(ring, self.buffers.residual_depth), self.stage.residual_shapes()
            )
            carry |= {"gradient_out": message, "grads": grads, "codec": codec_state}
        return carry

    def _forward(self, carry: Carry, cell: Cell, chunk: int, kind: RowKind) -> Carry:
        stage, train = self.stage, self.train
        active = (cell["forward_valid"] == 1) & (cell["forward_chunk"] == chunk)
        inbox = _read(carry["inbox"], cell["input_slot"]) if self.buffers.activation_depth else carry["inbox"]
        keys = ("output", "residuals") if train else ("output",)

        def body(part: Carry) -> Carry:
            x = inbox
            if kind.first and chunk == 0:
                x = jnp.where(stage.index == 0, stage.embed(cell["forward"]), x)
            y, residuals = stage.forward(chunk, cell["forward"], x)
            if not train:
                return {"output": y}
            return {"output": y, "residuals": _write(part["residuals"], cell["forward_slot"], residuals)}

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
            gradients = _write(part["gradients"], cell["head_slot"], g) if depth else g
            return {"loss": loss, "gradients": gradients, "grads": {k: grads[k] for k in edge}}

        part = {"loss": carry["loss"], "gradients": carry["gradients"], "grads": {k: carry["grads"][k] for k in edge}}
        part = only_if(active, body, part)
        return part | {"grads": carry["grads"] | part["grads"]}

    def _backward(self, carry: Carry, cell: Cell, g: jax.Array, chunk: int, kind: RowKind) -> Carry:
        stage = self.stage
        active = (cell["backward_valid"] == 1) & (cell["backward_chunk"] == chunk)
        ring = carry["residuals"]

        def body(part: Carry) -> Carry:
            residuals = _read(ring, cell["backward_slot"])
            cotangent = jnp.where(active, g, 0) if self.masked else g
            out, grads = stage.backward(chunk, cell["backward"], residuals, cotangent, part["grads"])
            if kind.first_backward and chunk == 0:
                grads = stage.embed_gradient(cell["backward"], out, grads, active & (stage.index == 0))
            return {"gradient_out": out, "grads": grads}

        carry = carry | self.run(active, body, {k: carry[k] for k in ("gradient_out", "grads")})
        if not self.masked:
            # Says that the next F writes the ring after this B has read it; without that order XLA copies the ring.
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
                carry = carry | {"gradients": _write(carry["gradients"], cell["gradient_arrival_slot"], received)}
        for chunk in kind.forward:
            carry = self._forward(carry, cell, chunk, kind)
        if kind.send:
            arrived = _permute(carry["output"], self.program.pipe, kind.send)
            slot = cell["arrival_slot"]
            inbox = _write(carry["inbox"], slot, arrived) if self.buffers.activation_depth else arrived
            carry = carry | {"inbox": inbox}
        if kind.backward:
            if depth:
                g = _read(carry["gradients"], cell["gradient_slot"])
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
        y, residuals = stage.forward(0, mb, stage.embed(mb))
        loss, g, grads = stage.head(mb, y, loss, grads)
        g, grads = stage.backward(0, mb, residuals, g, grads)
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
