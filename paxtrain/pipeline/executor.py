"""The executor: runs a schedule's rows on every stage, inside shard_map.

All stages run one program. A row has the ops F, W and B, in this order, which are those of paxtrain.pipeline.stage.
`Schedule.travel` says when the messages of a row travel (see paxtrain.schedule.table). F puts what its backward
needs into a ring. So no autodiff crosses a transfer, and both transfers of a row can run under its compute.

A stage that is idle in a row does one of two things:
    masked schedules    It computes on scrap, with a zero cotangent. The time is bubble anyway, and rows need no branch.
                        In the last rows, when some stage is done and can reduce its gradients over data, it skips.
    others              It skips, by rings.only_if, a loop of zero or one trips. The loop updates its carry in place; a
                        conditional that returned rings or gradient accumulators would copy them whole.

Rows of equal kind are one scan. In the others each transfer names only the pairs that carry something. On a virtual
mesh rows are of one kind or two (`Buffers.emulated`), and skip the ops that no stage has. If data ranks have different
numbers of micro-batches, each reads its own table, and transfers name the pairs of every rank
(paxtrain.schedule.uneven).

The named scopes are the parts of paxtrain.profiling.breakdown, and others that docs/profiling.md lists. They change no
program.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from compress.codec import Codec, Identity
from paxtrain.model.spec import Scalars
from paxtrain.pipeline.closing import Reduction, close_layers, close_rest
from paxtrain.pipeline.collectives import permute, position
from paxtrain.pipeline.messages import Carry, Mail, StageRow, among, send
from paxtrain.pipeline.one_stage import one_stage
from paxtrain.pipeline.program import Close, Weights
from paxtrain.pipeline.rings import behind, only_if, read, write
from paxtrain.pipeline.stage import Stage
from paxtrain.schedule.buffers import ARRIVALS, GRADIENT_ARRIVALS, Buffers, RowKind
from paxtrain.schedule.table import ALONG, BETWEEN, Pair


class Links(NamedTuple):
    """Codecs of both directions between the stages: gradients go backward, activations forward."""

    backward: Codec = Identity()
    forward: Codec = Identity()


class Rows:
    """Runs rows of a schedule on a stage."""

    def __init__(
        self,
        stage: Stage,
        buffers: Buffers,
        links: Links,
        masked: bool,
        train: bool,
        reduction: Reduction | None = None,
    ):
        self.stage, self.buffers, self.links, self.train, self.reduction = stage, buffers, links, train, reduction
        self.masked = masked
        closing = buffers.kinds[-1].closing
        # Stages that reduce their gradients within the last row's op; the others do it behind the rows.
        self.closing = closing if reduction and reduction.closes(closing) else ()
        self.program = stage.program
        self.last = stage.index == self.program.stage_map.last
        self.table = jnp.asarray(buffers.table)
        self.position = stage.index  # on the axis of the rows' messages
        if self.program.data is not None:
            self.table = self.table[jnp.asarray(buffers.table_of_rank)[lax.axis_index(self.program.data)]]
            self.position = position(self.program.axis) if self.program.pipe else stage.index

    def start(self, grads: Any, link_states: dict[str, Any]) -> Carry:
        """Return the carry before the first row; `grads` are the accumulators, () if nothing is trained."""
        message = jnp.zeros(self.stage.message.shape, self.stage.message.dtype)

        def ring(depth: int) -> jax.Array:
            # Slots are written before they are read: no need to clear them.
            return lax.empty((depth + 1, *message.shape), message.dtype) if depth else message

        inbox = ring(self.buffers.activation_depth)
        nothing: Any = ()
        if not self.train:
            zero = jnp.float32(0)
            return Carry(nothing, nothing, nothing, inbox, link_states, zero, message, nothing, nothing, {}, nothing)
        return Carry(
            gradient_out=message,
            gradients=ring(self.buffers.gradient_depth),
            grads=grads,
            inbox=inbox,
            links=link_states,
            loss=jnp.float32(0),
            output=message,
            # Only idle stages that compute need the scrap slot.
            residuals=self.stage.residuals(self.buffers.residual_depth + self.masked),
            reduced=nothing,
            scalars=self.stage.no_scalars,
            scratch=self.stage.scratch() if self.masked else (),
        )

    def row(self, carry: Carry, cells: jax.Array, kind: RowKind) -> Carry:
        """Run one row.

        Args:
            carry: state after the row before.
            cells: this row's [stages, columns] of the table.
            kind: what happens in the row.
        """
        mine = cells[self.stage.index]
        cell = {name: mine[i] for i, name in enumerate(self.buffers.columns)}
        if self.buffers.joined:
            for op in ("forward", "backward"):
                cell[f"{op}_runs"] = cells[:, self.buffers.columns.index(f"{op}_valid")].any()
        if self.buffers.travel == BETWEEN:
            carry = self._row_behind_messages(carry, cell, kind)
        elif self.buffers.travel == ALONG:
            carry = self._row_along_messages(carry, cell, kind)
        elif not self.masked:
            carry = self._row_over_messages(carry, cell, kind)
        elif kind.receive_compressed:
            carry = self._compressed_row(carry, cell, kind)
        else:
            carry = self._plain_row(carry, cell, kind)
        # Without an order XLA runs parts of the next rows ahead, and keeps in memory what they make.
        return lax.optimization_barrier(carry) if self.masked else carry

    def _plain_row(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        """Run a row of a masked schedule whose gradients travel as they are."""
        mail = [Mail(plain, None) for plain in self._gradients_travel(carry, kind)]
        carry, received = self._gradients_arrive(carry, cell, kind, mail)
        carry = self._run_forward(carry, cell, kind)
        carry = self._activations_travel(carry, cell, kind)
        return self._run_backward(carry, cell, kind, received)

    def _compressed_row(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        """Run a row of a masked schedule in which some gradients travel compressed: they are decoded behind F."""
        [plain] = self._gradients_travel(carry, kind)
        carry, wire = self._send("backward", carry, cell, kind.receive_compressed)
        carry = self._run_forward(carry, cell, kind)
        # Behind F, so that the transfer lies under it: a message that small XLA would wait for at once.
        wire, output = lax.optimization_barrier((wire, carry.output))
        carry, received = self._gradients_arrive(carry._replace(output=output), cell, kind, [Mail(plain, wire)])
        carry = self._activations_travel(carry, cell, kind)
        return self._run_backward(carry, cell, kind, received)

    def _row_over_messages(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        """Run a row whose idle stages skip: gradients are awaited behind F and W, activations behind B."""
        carry, mail = self._all_gradients_travel(carry, cell, kind)
        carry = self._run_forward(carry, cell, kind)
        carry = self._activations_travel(carry, cell, kind)
        carry = self._run_weights(carry, cell, kind)
        received = None
        if mail:
            # Whatever stages do of F and W: else all would wait for the slowest of their neighbours.
            mail, (output, grads) = lax.optimization_barrier((mail, (carry.output, carry.grads)))
            carry, received = self._gradients_arrive(carry._replace(output=output, grads=grads), cell, kind, mail)
        return self._run_backward(carry, cell, kind, received)

    def _row_along_messages(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        """Run a row whose messages, made in the row before, travel under all of its ops."""
        carry, mail = self._all_gradients_travel(carry, cell, kind)
        carry, wires = self._activations_leave(carry, cell, kind)
        carry = self._run_forward(carry, cell, kind)
        carry = self._run_weights(carry, cell, kind)
        carry = self._run_backward(carry, cell, kind, None)
        # Behind the ops, so that the transfers lie under them.
        made = carry.output, carry.gradient_out
        mail, wires, (output, gradient_out) = lax.optimization_barrier((mail, wires, made))
        carry = carry._replace(output=output, gradient_out=gradient_out)
        if mail:
            carry, _ = self._gradients_arrive(carry, cell, kind, mail)
        return self._activations_arrive(carry, wires, cell, kind)

    def _row_behind_messages(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        """Run a row for devices that wait for transfers: the messages of the row before come first."""
        carry, mail = self._all_gradients_travel(carry, cell, kind)
        received = None
        if mail:
            carry, received = self._gradients_arrive(carry, cell, kind, mail)
        if kind.send:
            after = carry.gradient_out if received is None else received
            carry = carry._replace(output=behind(carry.output, after))
        carry = self._activations_travel(carry, cell, kind)
        carry = self._run_forward(carry, cell, kind)
        carry = self._run_weights(carry, cell, kind)
        return self._run_backward(carry, cell, kind, received)

    # --- The events of a row ------------------------------------------------------------------------------------------

    def _lanes(self, pairs: tuple[Pair, ...]) -> list[tuple[Pair, ...]]:
        """Return the pairs of each lane; no stage receives twice in one."""
        at, p = self.program.stage_map, self.program.stages
        return [tuple(pair for pair in pairs if at.lane(pair[0] % p, pair[1] % p) == n) for n in range(at.lanes)]

    def _gradients_travel(self, carry: Carry, kind: RowKind) -> list[jax.Array | None]:
        """Send the gradients that travel as they are, by lane; None if there are none."""
        with jax.named_scope("send_backward"):
            x, axis = carry.gradient_out, self.program.axis
            return [permute(x, axis, pairs) if pairs else None for pairs in self._lanes(kind.receive)]

    def _all_gradients_travel(self, carry: Carry, cell: StageRow, kind: RowKind) -> tuple[Carry, list[Mail]]:
        """Send all gradients, in both ways, by lane; [] if there are none."""
        pairs, wire = kind.receive_compressed, None
        if not (kind.receive or pairs):
            return carry, []
        plain = self._gradients_travel(carry, kind)
        if pairs:
            carry, wire = self._send("backward", carry, cell, pairs)
        return carry, [Mail(one, None if lane else wire) for lane, one in enumerate(plain)]

    def _gradients_arrive(self, carry: Carry, cell: StageRow, kind: RowKind, mail: list[Mail]) -> tuple[Carry, Any]:
        """Return the gradients that have come, decoded, and the carry with them in their slots if there is a ring."""
        received = None
        for arrival, (received, wire) in zip(GRADIENT_ARRIVALS, mail):
            if wire is not None:
                arrived = self._decode("backward", wire)
                if self.buffers.joined:
                    receives = cell["message_comes"] == 1
                else:
                    receives = among(self.position, tuple(receiver for _, receiver in kind.receive_compressed))
                received = arrived if received is None else jnp.where(receives, arrived, received)
            if self.buffers.gradient_depth and received is not None:
                carry = carry._replace(gradients=write(carry.gradients, (cell[arrival],), received))
        return carry, received

    def _run_forward(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        for chunk in kind.forward:
            carry = self._forward(carry, cell, chunk, kind)
        return carry

    def _run_weights(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        for chunk in kind.weights:
            carry = self._weights(carry, cell, chunk, kind)
        return carry

    def _activations_travel(self, carry: Carry, cell: StageRow, kind: RowKind) -> Carry:
        return self._activations_arrive(*self._activations_leave(carry, cell, kind), cell, kind)

    def _activations_leave(self, carry: Carry, cell: StageRow, kind: RowKind) -> tuple[Carry, list[Any]]:
        wires: list[Any] = []
        for pairs in self._lanes(kind.send):
            wire = None
            if pairs:
                carry, wire = self._send("forward", carry, cell, pairs)
            wires.append(wire)
        return carry, wires

    def _activations_arrive(self, carry: Carry, wires: list[Any], cell: StageRow, kind: RowKind) -> Carry:
        for arrival, wire, pairs in zip(ARRIVALS, wires, self._lanes(kind.send)):
            if pairs:
                arrived = self._decode("forward", wire)
                ringed = self.buffers.activation_depth
                carry = carry._replace(inbox=write(carry.inbox, (cell[arrival],), arrived) if ringed else arrived)
        return carry

    def _run_backward(self, carry: Carry, cell: StageRow, kind: RowKind, received: Any) -> Carry:
        if not kind.backward:
            return carry
        if self.buffers.gradient_depth:
            g = read(carry.gradients, (cell["gradient_slot"],))
        elif received is None:
            g = carry.gradients
        else:
            g = jnp.where(self.last, carry.gradients, received)
        for chunk in kind.backward:
            carry = self._backward(carry, cell, g, chunk, kind)
        return carry

    # --- Their parts --------------------------------------------------------------------------------------------------

    @jax.named_scope("forward")
    def _forward(self, carry: Carry, cell: StageRow, chunk: int, kind: RowKind) -> Carry:
        stage, train = self.stage, self.train
        active = (cell["forward_valid"] == 1) & (cell["forward_chunk"] == chunk)
        inbox = read(carry.inbox, (cell["input_slot"],)) if self.buffers.activation_depth else carry.inbox

        def body(part: tuple) -> tuple:
            x, (_, residuals, sums) = inbox, part
            if kind.first and chunk == 0:
                x = stage.first_input(cell["forward"], x)
            if not train:
                return stage.output(chunk, cell["forward"], x), residuals, sums
            y, scalars, residuals = stage.forward(chunk, cell["forward"], x, residuals, (cell["forward_slot"],))
            # An idle stage that computes on scrap adds nothing.
            return y, residuals, jax.tree.map(lambda total, new: total + jnp.where(active, new, 0), sums, scalars)

        with jax.named_scope(f"chunk_{chunk}"):
            part = (carry.output, carry.residuals, carry.scalars)
            output, residuals, sums = self._run("forward", cell, kind, active, body, part)
        carry = carry._replace(output=output, residuals=residuals, scalars=sums)
        if kind.head and chunk == self.program.chunks - 1:
            carry = self._head(carry, cell, active & self.last)
        return carry

    @jax.named_scope("head")
    def _head(self, carry: Carry, cell: StageRow, active: jax.Array) -> Carry:
        stage, y = self.stage, carry.output
        if not self.train:
            loss = only_if(active, lambda loss: loss + stage.loss(cell["forward"], y), carry.loss)
            return carry._replace(loss=loss)
        grads = carry.grads

        def body(part: tuple) -> tuple:
            loss, gradients, embedding, final_norm = part
            loss, g, embedding, final_norm = stage.head(cell["forward"], y, loss, embedding, final_norm)
            gradients = write(gradients, (cell["head_slot"],), g) if self.buffers.gradient_depth else g
            return loss, gradients, embedding, final_norm

        part = (carry.loss, carry.gradients, grads.embedding, grads.final_norm)
        loss, gradients, embedding, final_norm = only_if(active, body, part)
        grads = grads._replace(embedding=embedding, final_norm=final_norm)
        return carry._replace(loss=loss, gradients=gradients, grads=grads)

    @jax.named_scope("backward")
    def _backward(self, carry: Carry, cell: StageRow, g: jax.Array, chunk: int, kind: RowKind) -> Carry:
        stage, splits = self.stage, self.program.splits
        active = (cell["backward_valid"] == 1) & (cell["backward_chunk"] == chunk)
        ring, slot, cotangents = carry.residuals, (cell["backward_slot"],), stage.cotangents(g)

        def body(part: tuple) -> tuple:
            _, grads, rest, reduced = part
            if splits:
                out, grads, rest = stage.input_gradient(chunk, rest, slot, cotangents, grads)
            else:
                own, close = cotangents, self._close(kind, reduced)
                if self.masked:
                    own = jax.tree.map(lambda x: jnp.where(active, x, 0), own)
                out, grads, rest, reduced = stage.backward(chunk, cell["backward"], ring, slot, own, grads, rest, close)
            if kind.first_backward and chunk == 0:
                grads = stage.embed_gradient(cell["backward"], out, grads, active & (stage.index == 0))
            grads, reduced = self._closed(kind, chunk, grads, reduced)
            return out, grads, rest, reduced

        # B of a split backward changes the ring, in which it leaves what W needs; the whole B only reads it.
        changed = "residuals" if splits else "scratch"
        with jax.named_scope(f"chunk_{chunk}"):
            part = (carry.gradient_out, carry.grads, getattr(carry, changed), carry.reduced)
            out, grads, rest, reduced = self._run("backward", cell, kind, active, body, part)
        carry = carry._replace(**{"gradient_out": out, "grads": grads, changed: rest, "reduced": reduced})
        if not self.masked or self.program.scan_layers:
            # Says that the next F writes the ring after this B's loop has read it; without that XLA copies the ring.
            out, ring = lax.optimization_barrier((carry.gradient_out, carry.residuals))
            carry = carry._replace(gradient_out=out, residuals=ring)
        return carry

    @jax.named_scope("backward")
    def _weights(self, carry: Carry, cell: StageRow, chunk: int, kind: RowKind) -> Carry:
        active = (cell["weights_valid"] == 1) & (cell["weights_chunk"] == chunk)
        ring, slot = carry.residuals, (cell["weights_slot"],)

        def body(part: tuple) -> tuple:
            grads, reduced = part
            grads, reduced = self.stage.weight_gradients(chunk, ring, slot, grads, self._close(kind, reduced))
            return self._closed(kind, chunk, grads, reduced)

        with jax.named_scope(f"chunk_{chunk}"):
            grads, reduced = only_if(active, body, (carry.grads, carry.reduced))
        # As behind B.
        grads, ring = lax.optimization_barrier((grads, ring))
        return carry._replace(grads=grads, residuals=ring, reduced=reduced)

    def _run(
        self, op: str, cell: StageRow, kind: RowKind, active: jax.Array, body: Callable[[Any], Any], part: Any
    ) -> Any:
        """Return body(part), for F or B on this stage or also on idle ones.

        Args:
            op: "forward" or "backward".
            cell: this stage's columns.
            kind: what happens in the row.
            active: whether this stage has the op in the row, bool [].
            body: the op.
            part: what it changes of the carry.
        """
        if not self.masked or kind.tail:
            return only_if(active, body, part)
        # Under vmap a loop that some stages skip selects from its whole carry. One that all stages skip does not.
        return only_if(cell[f"{op}_runs"], body, part) if self.buffers.joined else body(part)

    def _close(self, kind: RowKind, states: Any) -> Close | None:
        """Return what an op does with the layers' gradients: nothing except in a last row that reduces them."""
        if not (kind.closing and self.closing):
            return None
        assert self.reduction
        return Close(close_layers, functools.partial(self.reduction.layer, self.closing), states)

    def _closed(self, kind: RowKind, chunk: int, grads: Weights, states: Any) -> tuple[Weights, Any]:
        """Return accumulators and states of the reduction behind an op."""
        close = self._close(kind, states)
        if not close:
            return grads, ()
        assert self.reduction
        return close_rest(chunk, grads, close, self.reduction.rest(self.closing, grads, states[-1]))

    def _send(self, direction: str, carry: Carry, cell: StageRow, pairs: tuple[Pair, ...]) -> tuple[Carry, Any]:
        """Send a message through a direction's codec, whose states are per chunk; return also the wire that arrives."""
        name, message = {"backward": ("message", carry.gradient_out), "forward": ("output", carry.output)}[direction]
        states, codec = carry.links, getattr(self.links, direction)
        slot = (cell[f"{name}_chunk"] if self.program.chunks > 1 else 0,)
        state = read(states[direction], slot)
        leaves = cell[f"{name}_leaves"] == 1 if self.buffers.joined else None
        with jax.named_scope(f"send_{direction}"):
            wire, state = send(codec, state, message, self.program.axis, self.position, pairs, leaves)
        return carry._replace(links=states | {direction: write(states[direction], slot, state)}), wire

    @jax.named_scope("compression")
    @jax.named_scope("decode")
    def _decode(self, direction: str, wire: Any) -> jax.Array:
        return getattr(self.links, direction).decode(wire, self.stage.message)

    def run_all(self, carry: Carry) -> Carry:
        """Run all rows; those of equal kind are one scan."""
        for start, period, repeats in self.buffers.runs():
            kinds = self.buffers.kinds[start : start + period]
            cells = self.table[start : start + period * repeats]
            if self.closing and start + period * repeats == len(self.table):
                assert self.reduction and period * repeats == 1, "the last row has a kind of its own"
                carry = carry._replace(reduced=self.reduction.states())

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


@jax.named_scope("backward")
def zeros_like(weights: Weights) -> Weights:
    """Return float32 gradient accumulators, each from a separate zero: XLA would copy a shared one into each."""
    leaves, structure = jax.tree.flatten(weights)
    own = lax.optimization_barrier([jnp.float32(0)] * len(leaves))
    return jax.tree.unflatten(structure, [jnp.broadcast_to(zero, w.shape) for zero, w in zip(own, leaves, strict=True)])


def loss_and_gradients(
    stage: Stage, buffers: Buffers, masked: bool, links: Links, states: Any, reduction: Reduction | None = None
) -> tuple[jax.Array, Weights, Any, Any, Scalars]:
    """Return loss and gradients of all micro-batches of this data rank.

    Args:
        stage: this device's stage; its tokens are [m, B, S+1].
        buffers: the schedule's rows, with slots.
        masked: idle stages compute on scrap, see Schedule.masked.
        links: codecs of the messages between the stages.
        states: {"backward", "forward"}: the states of this stage's codecs, with a leading dim of chunks.
        reduction: reduction of the gradients over data; None: they are returned as they are.

    Returns:
        The loss, zero except on the last stage; the gradients in float32, structured as the stage's weights; the new
        states of the codecs; the reduction's states; and this stage's sums of its layers' scalars, by name. If there
        is a reduction, reduced gradients lie at the front of the arrays.
    """
    grads = zeros_like(stage.held.sums(stage.weights))._replace(errors=stage.held.errors)
    if stage.program.stages == 1:
        loss, scalars, grads, reduced = one_stage(stage, grads, reduction)
        return loss, grads, states, reduced, scalars
    rows = Rows(stage, buffers, links, masked, train=True, reduction=reduction)
    carry = rows.run_all(rows.start(grads, states))
    reduced = carry.reduced
    if reduction:
        grads, reduced = _reduced(rows, carry, reduction)
    return carry.loss, grads if reduction else carry.grads, carry.links, reduced, carry.scalars


def _reduced(rows: Rows, carry: Carry, reduction: Reduction) -> tuple[Weights, list[Any]]:
    """Reduce the gradients of the stages that have reduced none in the last row, and return those of all stages."""
    others = tuple(s for s in range(rows.program.stages) if s not in rows.closing)
    if not rows.closing:
        return reduction.whole(others, carry.grads, reduction.states())

    def body(part: tuple[Weights, list[Any]]) -> tuple[Weights, list[Any]]:
        # The barrier binds the gradients to the loop. Without it XLA moves the reduction out, and all stages run it.
        return reduction.whole(others, *lax.optimization_barrier(part))

    part = (carry.grads, carry.reduced)
    return only_if(among(rows.stage.index, others), body, part) if others else part


def loss_only(stage: Stage, buffers: Buffers, masked: bool) -> jax.Array:
    """Return the loss of all micro-batches of this data rank, zero except on the last stage.

    Nothing is kept for a backward. Messages travel as they are: the model is evaluated, not its compression.

    Args:
        stage: this device's stage; its tokens are [m, B, S+1].
        buffers: the rows of `forward_only`, with slots.
        masked: idle stages compute on scrap, see Schedule.masked.
    """
    rows = Rows(stage, buffers, Links(), masked, train=False)
    return rows.run_all(rows.start((), {"backward": (), "forward": ()})).loss
