"""The executor: runs a schedule's rows on every stage, inside shard_map.

All stages run one program. A row (see paxtrain.schedule.table) is, in this order: gradients travel, F, activations
travel, W, B. The ops F, B and W are those of paxtrain.pipeline.stage. F puts what its backward needs into a ring, so
no autodiff crosses a transfer, and both transfers of a row can run under its compute.

Two ways for a stage that is idle in a row:
    masked schedules    compute on scrap (it is bubble time anyway) with a zero cotangent: rows without a branch
    others              skip, by rings.only_if: a loop of zero or one trips. It updates its carry in place, where a
                        conditional that returned rings or gradient accumulators would copy them whole.

Rows of equal kind are one scan; in the rest each transfer names only the pairs that carry something.

The named scopes are the parts of paxtrain.profiling.breakdown, and besides what docs/profiling.md lists; they change
no program.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.pipeline.messages import PLAIN, Link, among, send
from paxtrain.pipeline.rings import always, only_if, read, write
from paxtrain.pipeline.stage import Stage, Weights
from paxtrain.pipeline.virtual import permute
from paxtrain.schedule.buffers import COLUMNS, Buffers, RowKind
from paxtrain.schedule.table import Pair

Carry = dict[str, Any]
Cell = dict[str, jax.Array]


class Links(NamedTuple):
    """Both directions between the stages: gradients go backward, activations forward."""

    backward: Link = PLAIN
    forward: Link = PLAIN


class Rows:
    """Runs rows of a schedule on a stage."""

    def __init__(self, stage: Stage, buffers: Buffers, links: Links, masked: bool, train: bool):
        self.stage, self.buffers, self.links, self.train = stage, buffers, links, train
        self.run = always if masked else only_if
        self.masked = masked
        self.program = stage.program
        self.last = stage.index == self.program.stages - 1
        self.table = jnp.asarray(buffers.table)

    def start(self, grads: Weights | None, link_states: Any) -> Carry:
        """The carry before the first row; `grads` are the accumulators, None where nothing is trained."""
        message = jnp.zeros(self.stage.message.shape, self.stage.message.dtype)
        # Slots are written before they are read: no need to clear them.
        ring = lambda depth, x: lax.empty((depth + 1, *x.shape), x.dtype)  # noqa: E731
        carry = {"loss": jnp.float32(0), "output": message, "links": link_states}
        carry["inbox"] = ring(self.buffers.activation_depth, message) if self.buffers.activation_depth else message
        if self.train:
            depth = self.buffers.gradient_depth
            carry["gradients"] = ring(depth, message) if depth else message
            # Only idle stages that compute need the scrap slot.
            carry["residuals"] = self.stage.residuals(self.buffers.residual_depth + self.masked)
            carry["scratch"] = self.stage.scratch() if self.masked else ()
            carry |= {"gradient_out": message, "grads": grads}
        return carry

    @jax.named_scope("forward")
    def _forward(self, carry: Carry, cell: Cell, chunk: int, kind: RowKind) -> Carry:
        stage, train = self.stage, self.train
        active = (cell["forward_valid"] == 1) & (cell["forward_chunk"] == chunk)
        inbox = read(carry["inbox"], (cell["input_slot"],)) if self.buffers.activation_depth else carry["inbox"]
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

        with jax.named_scope(f"chunk_{chunk}"):
            carry = carry | self.run(active, body, {k: carry[k] for k in keys})
        if kind.head and chunk == self.program.chunks - 1:
            carry = carry | self._head(carry, cell, active & self.last)
        return carry

    @jax.named_scope("head")
    def _head(self, carry: Carry, cell: Cell, active: jax.Array) -> Carry:
        stage, y = self.stage, carry["output"]
        if not self.train:
            return {"loss": only_if(active, lambda loss: loss + stage.loss(cell["forward"], y), carry["loss"])}
        grads = carry["grads"]

        def body(part: tuple) -> tuple:
            loss, gradients, embedding, final_norm = part
            loss, g, embedding, final_norm = stage.head(cell["forward"], y, loss, embedding, final_norm)
            gradients = write(gradients, (cell["head_slot"],), g) if self.buffers.gradient_depth else g
            return loss, gradients, embedding, final_norm

        part = (carry["loss"], carry["gradients"], grads.embedding, grads.final_norm)
        loss, gradients, embedding, final_norm = only_if(active, body, part)
        grads = grads._replace(embedding=embedding, final_norm=final_norm)
        return {"loss": loss, "gradients": gradients, "grads": grads}

    @jax.named_scope("backward")
    def _backward(self, carry: Carry, cell: Cell, g: jax.Array, chunk: int, kind: RowKind) -> Carry:
        stage, splits = self.stage, self.program.splits
        active = (cell["backward_valid"] == 1) & (cell["backward_chunk"] == chunk)
        ring, slot = carry["residuals"], (cell["backward_slot"],)
        keys = ("gradient_out", "grads", "residuals" if splits else "scratch")

        def body(part: Carry) -> Carry:
            if splits:
                out, grads, rest = stage.input_gradient(chunk, part["residuals"], slot, g, part["grads"])
            else:
                cotangent = jnp.where(active, g, 0) if self.masked else g
                out, grads, rest = stage.backward(
                    chunk, cell["backward"], ring, slot, cotangent, part["grads"], part["scratch"]
                )
            if kind.first_backward and chunk == 0:
                grads = stage.embed_gradient(cell["backward"], out, grads, active & (stage.index == 0))
            return dict(zip(keys, (out, grads, rest)))

        with jax.named_scope(f"chunk_{chunk}"):
            carry = carry | self.run(active, body, {k: carry[k] for k in keys})
        if not self.masked or self.program.scan_layers:
            # Says that the next F writes the ring after this B's loop has read it; without that XLA copies the ring.
            out, ring = lax.optimization_barrier((carry["gradient_out"], carry["residuals"]))
            carry = carry | {"gradient_out": out, "residuals": ring}
        return carry

    @jax.named_scope("backward")
    def _weights(self, carry: Carry, cell: Cell, chunk: int) -> Carry:
        active = (cell["weights_valid"] == 1) & (cell["weights_chunk"] == chunk)
        ring, slot = carry["residuals"], (cell["weights_slot"],)
        with jax.named_scope(f"chunk_{chunk}"):
            body = functools.partial(self.stage.weight_gradients, chunk, ring, slot)
            grads = self.run(active, body, carry["grads"])
        # As behind B.
        grads, ring = lax.optimization_barrier((grads, ring))
        return carry | {"grads": grads, "residuals": ring}

    def _send(
        self, direction: str, carry: Carry, what: str, chunk: jax.Array, pairs: tuple[Pair, ...]
    ) -> tuple[Carry, Any]:
        """Sends carry[what] through a direction's codec, whose states are per chunk; also the wire that arrives."""
        states = carry["links"]
        slot = (chunk if self.program.chunks > 1 else 0,)
        state = read(states[direction], slot)
        with jax.named_scope(f"send_{direction}"):
            wire, state = send(
                getattr(self.links, direction), state, carry[what], self.program.pipe, self.stage.index, pairs
            )
        return carry | {"links": states | {direction: write(states[direction], slot, state)}}, wire

    @jax.named_scope("compression")
    @jax.named_scope("decode")
    def _decode(self, direction: str, wire: Any) -> jax.Array:
        return getattr(self.links, direction).codec.decode(wire, self.stage.message)

    def _arrive(self, carry: Carry, cell: Cell, kind: RowKind, received: Any, wire: Any) -> tuple[Carry, Any]:
        """The gradients that have come, decoded, and in their slot where there is a ring."""
        if kind.receive_compressed:
            arrived = self._decode("backward", wire)
            receives = among(self.stage.index, tuple(receiver for _, receiver in kind.receive_compressed))
            received = arrived if received is None else jnp.where(receives, arrived, received)
        if self.buffers.gradient_depth and received is not None:
            carry = carry | {"gradients": write(carry["gradients"], (cell["gradient_arrival_slot"],), received)}
        return carry, received

    def row(self, carry: Carry, cells: jax.Array, kind: RowKind) -> Carry:
        """One row; cells is this row's [stages, columns] of the table."""
        mine = cells[self.stage.index]
        cell = {name: mine[i] for i, name in enumerate(COLUMNS)}
        received, wire, splits = None, None, self.program.splits
        if kind.receive:
            with jax.named_scope("send_backward"):
                received = permute(carry["gradient_out"], self.program.pipe, kind.receive)
        if kind.receive_compressed:
            carry, wire = self._send("backward", carry, "gradient_out", cell["message_chunk"], kind.receive_compressed)
        elif not splits:
            carry, received = self._arrive(carry, cell, kind, received, wire)
        for chunk in kind.forward:
            carry = self._forward(carry, cell, chunk, kind)
        if kind.receive_compressed and not splits:
            # Behind F, so that the transfer lies under it: a message that small XLA would wait for at once.
            wire, output = lax.optimization_barrier((wire, carry["output"]))
            carry, received = self._arrive(carry | {"output": output}, cell, kind, received, wire)
        if kind.send:
            carry, sent = self._send("forward", carry, "output", cell["forward_chunk"], kind.send)
            arrived = self._decode("forward", sent)
            slot = (cell["arrival_slot"],)
            inbox = write(carry["inbox"], slot, arrived) if self.buffers.activation_depth else arrived
            carry = carry | {"inbox": inbox}
        for chunk in kind.weights:
            carry = self._weights(carry, cell, chunk)
        if splits and (kind.receive or kind.receive_compressed):
            # Behind F and W, whatever stages do of them: else all would wait for the slowest of their neighbours.
            after = (carry["output"], carry["grads"])
            (received, wire), (output, grads) = lax.optimization_barrier(((received, wire), after))
            carry, received = self._arrive(carry | {"output": output, "grads": grads}, cell, kind, received, wire)
        if kind.backward:
            if self.buffers.gradient_depth:
                g = read(carry["gradients"], (cell["gradient_slot"],))
            elif received is None:
                g = carry["gradients"]
            else:
                g = jnp.where(self.last, carry["gradients"], received)
            for chunk in kind.backward:
                carry = self._backward(carry, cell, g, chunk, kind)
        # Without an order XLA runs parts of the next rows ahead, and keeps in memory what they make.
        return lax.optimization_barrier(carry) if self.masked else carry

    def run_all(self, carry: Carry) -> Carry:
        for start, period, repeats in self.buffers.runs():
            kinds = self.buffers.kinds[start : start + period]
            cells = self.table[start : start + period * repeats]

            def body(carry: Carry, cells: jax.Array, kinds: list[RowKind] = kinds) -> tuple[Carry, None]:
                for i, kind in enumerate(kinds):
                    carry = self.row(carry, cells[i], kind)
                return carry, None

            with jax.named_scope(f"rows_{start}_to_{start + period * repeats - 1}"):
                if repeats == 1:
                    carry, _ = body(carry, cells)
                else:
                    carry, _ = lax.scan(body, carry, cells.reshape(repeats, period, *cells.shape[1:]))
        return carry


def _one_stage(stage: Stage, grads: Weights) -> tuple[jax.Array, Weights]:
    """With one stage F and B share a row and residuals bypass the ring."""

    def body(carry: tuple[jax.Array, Weights], mb: jax.Array) -> tuple[tuple[jax.Array, Weights], None]:
        loss, grads = carry
        with jax.named_scope("forward"):
            y, residuals = stage.forward_once(0, mb, stage.embed(mb))
        with jax.named_scope("head"):
            loss, g, embedding, final_norm = stage.head(mb, y, loss, grads.embedding, grads.final_norm)
        grads = grads._replace(embedding=embedding, final_norm=final_norm)
        with jax.named_scope("backward"):
            g, grads, _ = stage.backward(0, mb, residuals, (), g, grads, ())
            return (loss, stage.embed_gradient(mb, g, grads, jnp.bool_(True))), None

    return lax.scan(body, (jnp.float32(0), grads), jnp.arange(stage.micro_batches))[0]


@jax.named_scope("backward")
def zeros_like(weights: Weights) -> Weights:
    """Return float32 gradient accumulators, each from a separate zero: XLA would copy a shared one into each."""
    leaves, structure = jax.tree.flatten(weights)
    own = lax.optimization_barrier([jnp.float32(0)] * len(leaves))
    return structure.unflatten([jnp.broadcast_to(zero, w.shape) for zero, w in zip(own, leaves, strict=True)])


def loss_and_gradients(
    stage: Stage, buffers: Buffers, masked: bool, links: Links, states: Any
) -> tuple[jax.Array, Weights, Any]:
    """Loss and gradients of all micro-batches of this data rank.

    Args:
        stage: this device's stage; its tokens are [m, B, S+1].
        buffers, masked: the schedule's.
        links: what messages between the stages go through.
        states: {"backward", "forward"}: the states of this stage's codecs, with a leading dim of chunks.

    Returns:
        The loss, zero but on the last stage; the gradients in float32, structured as the stage's weights; the codecs'
        new states.
    """
    grads = zeros_like(stage.weights)
    if stage.program.stages == 1:
        return *_one_stage(stage, grads), states
    rows = Rows(stage, buffers, links, masked, train=True)
    carry = rows.run_all(rows.start(grads, states))
    return carry["loss"], carry["grads"], carry["links"]


def loss_only(stage: Stage, buffers: Buffers, masked: bool) -> jax.Array:
    """Loss of all micro-batches of this data rank, zero but on the last stage; nothing is kept for a backward.

    Messages travel as they are: what is evaluated is the model and not its compression.
    """
    rows = Rows(stage, buffers, Links(), masked, train=False)
    return rows.run_all(rows.start(None, {"backward": (), "forward": ()}))["loss"]
