"""Ring slots that hold a schedule's values between rows, and the rows grouped into loops.

Each stage keeps three rings, as small as the schedule allows: residuals (from F to B, or to W if the backward is
split), activations received and not yet used, and gradients that were received or made by the loss and are not yet
used. A slot is an index into a ring. The ring's last index, `depth`, is a scrap slot that idle stages write.
"""

import dataclasses
import heapq
from collections.abc import Set
from typing import Any, NamedTuple

import numpy as np

from paxtrain.schedule.table import ALONG, BETWEEN, IDLE, Pair, Schedule


@dataclasses.dataclass(frozen=True)
class RowKind:
    """The static facts that a row's compiled code depends on; rows of one kind differ in numbers only.

    Attributes:
        receive: stage pairs of the gradients that travel as they are.
        receive_compressed: stage pairs of the gradients that travel compressed.
        forward: chunks whose F some stage runs.
        send: stage pairs of the activations that travel.
        backward: chunks whose B some stage runs.
        weights: chunks whose W some stage runs.
        first: some stage runs F of the first virtual stage.
        head: some stage runs F of the last virtual stage.
        first_backward: some stage runs B of the first virtual stage.
        tail: some stage has run its last op before this row. Idle stages skip in such rows, so that it can go on to its
            reduction over data.
        closing: stages whose gradients become final in this row, the last one, if they all run the same op; else ().
    """

    receive: tuple[Pair, ...]
    receive_compressed: tuple[Pair, ...]
    forward: tuple[int, ...]
    send: tuple[Pair, ...]
    backward: tuple[int, ...]
    weights: tuple[int, ...]
    first: bool
    head: bool
    first_backward: bool
    tail: bool
    closing: tuple[int, ...]


COLUMNS = (
    "forward",  # micro-batch of F, 0 where idle
    "forward_valid",
    "forward_chunk",
    "forward_slot",  # of the residual ring, written by F
    "input_slot",  # of the activation ring, read by F
    "arrival_slot",  # of the activation ring, written when an activation has come
    "arrival_slot_1",  # likewise, of the other lane (StageMap.lane)
    "backward",
    "backward_valid",
    "backward_chunk",
    "backward_slot",  # of the residual ring, read by B, which leaves there what W needs
    "gradient_slot",  # of the gradient ring, read by B
    "gradient_arrival_slot",  # of the gradient ring, written when a gradient has come
    "gradient_arrival_slot_1",  # likewise, of the other lane
    "head_slot",  # of the gradient ring, written by the head
    "message_chunk",  # that made the gradient that leaves
    "output_chunk",  # that made the activation that leaves
    "weights_valid",  # W, whose micro-batch is that of its slot
    "weights_chunk",
    "weights_slot",  # of the residual ring, read by W
)

ARRIVALS = ("arrival_slot", "arrival_slot_1")  # by lane
GRADIENT_ARRIVALS = ("gradient_arrival_slot", "gradient_arrival_slot_1")

# Further columns of joined rows, which tell a row's own messages from those of others.
OWN = (
    "message_leaves",  # the stage sends a compressed gradient
    "message_comes",  # the gradient that comes is compressed
    "output_leaves",  # the stage sends an activation
)


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """A schedule with slots assigned.

    Attributes:
        table: int32 [rows, stages, len(COLUMNS)], with OWN behind them if rows are joined; if data ranks differ,
            [tables, rows, stages, len(COLUMNS)].
        kinds: one per row.
        residual_depth: slots of the ring of residuals, without the scrap slot.
        activation_depth: slots of the ring of activations, without the scrap slot; 0 if each activation is used the
            moment it can be, so that one buffer is enough.
        gradient_depth: the same for gradients.
        travel: when messages travel, see `paxtrain.schedule.table`.
        joined: whether a row's kind has the ops and messages of other rows besides its own, as in `emulated`.
        table_of_rank: number of each data rank's table, if they differ (paxtrain.schedule.uneven); otherwise ().
    """

    table: np.ndarray
    kinds: list[RowKind]
    residual_depth: int
    activation_depth: int
    gradient_depth: int
    travel: str
    joined: bool = False
    table_of_rank: tuple[int, ...] = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the table's columns."""
        return COLUMNS + OWN if self.joined else COLUMNS

    def emulated(self) -> "Buffers":
        """Return the rows for one device that emulates all stages: they are of one kind, or of two.

        Nothing crosses a link there, and a stage that is done early gains nothing. So a row may have the ops and the
        messages of others besides its own, and a step is turns of one loop, which compiles sooner. Ops that no stage
        has in a row are skipped. A message that is not due arrives where idle stages write, and no op reads it. OWN
        tells codecs, which keep states, what is due. Rows whose gradients travel compressed are apart from those whose
        gradients travel as they are, which need no codec; a row without gradients goes on as the one before.
        """
        own = np.zeros((*self.table.shape[:2], len(OWN)), self.table.dtype)
        alike: dict[bool, set[RowKind]] = {True: set(), False: set()}
        compressed, through_codec = [], not any(kind.receive for kind in self.kinds)
        for row, kind in enumerate(self.kinds):
            senders, receivers = zip(*kind.receive_compressed) if kind.receive_compressed else ((), ())
            for column, stages in enumerate((senders, receivers, [sender for sender, _ in kind.send])):
                own[row, list(stages), column] = 1
            if kind.receive or kind.receive_compressed:
                through_codec = bool(kind.receive_compressed)
            compressed.append(through_codec)
            alike[through_codec].add(kind)
        joined = {key: _joined(kinds) for key, kinds in alike.items()}
        table = np.concatenate([self.table, own], axis=-1)
        return dataclasses.replace(self, table=table, kinds=[joined[key] for key in compressed], joined=True)

    def runs(self) -> list[tuple[int, int, int]]:
        """Return the rows as (start, period, repeats): `repeats` times `period` rows of the same kinds."""
        runs, t, rows = [], 0, len(self.kinds)
        while t < rows:
            best = (1, 1)
            for period in range(1, (rows - t) // 2 + 1):
                repeats = 1
                while self.kinds[t + repeats * period : t + (repeats + 1) * period] == self.kinds[t : t + period]:
                    repeats += 1
                if repeats > 1 and period * repeats > best[0] * best[1]:
                    best = (period, repeats)
            runs.append((t, *best))
            t += best[0] * best[1]
        return runs


def _joined(kinds: Set[RowKind]) -> RowKind:
    """Return the kind of a row that has the ops and messages of all kinds, and in which no stage ends."""

    def every(name: str) -> tuple[Any, ...]:
        return tuple(sorted({one for kind in kinds for one in getattr(kind, name)}))

    lists = ("receive", "receive_compressed", "forward", "send", "backward", "weights")
    ends = ("first", "head", "first_backward")
    found: dict[str, Any] = {name: every(name) for name in lists}
    found |= {name: any(getattr(kind, name) for kind in kinds) for name in ends}
    return RowKind(**found, tail=False, closing=())


_Key = tuple[int, int]  # (virtual stage, micro-batch)
_Lifetime = tuple[int, int, _Key]  # row that writes, last row that reads, key


def _color(intervals: list[_Lifetime], reuse_same_row: bool) -> tuple[dict[_Key, int], int]:
    """Return slots for (first row, last row, key) so that no two that overlap share one, and the fewest possible.

    Args:
        intervals: lifetimes of the values of one stage.
        reuse_same_row: a value whose first row is another's last row may take its slot.
    """
    slots: dict[_Key, int] = {}
    free: list[int] = []
    busy: list[tuple[int, int]] = []  # (last row, slot)
    depth = 0
    for first, last, key in sorted(intervals):
        while busy and (busy[0][0] < first or (reuse_same_row and busy[0][0] == first)):
            heapq.heappush(free, heapq.heappop(busy)[1])
        if free:
            slot = heapq.heappop(free)
        else:
            slot, depth = depth, depth + 1
        slots[key] = slot
        heapq.heappush(busy, (last, slot))
    return slots, depth


def row_kind(
    schedule: Schedule,
    row: int,
    forward: set[tuple[int, int]],
    backward: set[tuple[int, int]],
    weights: set[tuple[int, int]],
    receive: tuple[Pair, ...],
    receive_compressed: tuple[Pair, ...],
    send: tuple[Pair, ...],
) -> RowKind:
    """Return the kind of a row.

    Args:
        schedule: table of ops.
        row: number of the row.
        forward: (stage, chunk) that run F.
        backward: (stage, chunk) that run B.
        weights: (stage, chunk) that run W.
        receive: stage pairs of gradients that travel as they are.
        receive_compressed: stage pairs of gradients that travel compressed.
        send: stage pairs of activations.
    """
    return RowKind(
        receive=receive,
        receive_compressed=receive_compressed,
        forward=tuple(sorted({chunk for _, chunk in forward})),
        send=send,
        backward=tuple(sorted({chunk for _, chunk in backward})),
        weights=tuple(sorted({chunk for _, chunk in weights})),
        first=(0, 0) in forward,
        head=(schedule.stage_map.last, schedule.chunks - 1) in forward,
        first_backward=(0, 0) in backward,
        tail=schedule.masked and schedule.trains and row > min(schedule.last_rows),
        closing=schedule.closing if row == schedule.rows - 1 else (),
    )


class Slots(NamedTuple):
    """Slots of one kind of values on every stage.

    Attributes:
        of: per stage, (virtual stage, micro-batch) -> slot.
        depth: slots of the deepest stage; 0 if each value is used the moment it can be.
    """

    of: list[dict[_Key, int]]
    depth: int


def _slots(lifetimes: list[list[_Lifetime]], direct: int, reuse_same_row: bool) -> Slots:
    """Give each value a slot for its lifetime.

    Args:
        lifetimes: those of every stage.
        direct: rows from write to read of a value that is used the moment it can be; -1 if there is none such.
        reuse_same_row: see `_color`.
    """
    if all(used - made == direct for per_stage in lifetimes for made, used, _ in per_stage):
        return Slots([{key: 0 for *_, key in per_stage} for per_stage in lifetimes], 0)
    colored = [_color(per_stage, reuse_same_row) for per_stage in lifetimes]
    return Slots([slots for slots, _ in colored], max(depth for _, depth in colored))


Rings = tuple[Slots, Slots, Slots]  # of residuals, activations and gradients


def rings(schedule: Schedule) -> Rings:
    """Return the slots of residuals, activations and gradients."""
    row_of, trains, last = schedule.row_of, schedule.trains, schedule.virtual_stages - 1
    travel, wait = schedule.travel, schedule.activations_wait
    residuals: list[list[_Lifetime]] = [[] for _ in range(schedule.stages)]
    activations: list[list[_Lifetime]] = [[] for _ in range(schedule.stages)]
    gradients: list[list[_Lifetime]] = [[] for _ in range(schedule.stages)]
    for row, stage, mb, chunk in schedule.ops("forward"):
        virtual = schedule.virtual_stage(stage, chunk)
        if virtual:
            activations[stage].append((row_of["forward", virtual - 1, mb] + wait, row, (virtual, mb)))
        if trains:
            used = row_of["backward", virtual, mb]
            # What comes at the end of a row lies in its slot from the next one on.
            made = row_of["backward", virtual + 1, mb] + (2 if travel == ALONG else 1) if virtual < last else row
            residuals[stage].append((row, row_of.get(("weights", virtual, mb), used), (virtual, mb)))
            gradients[stage].append((made, used, (virtual, mb)))
    # Within a row F writes residuals before B reads. Gradients arrive before B reads, or ALONG the row. Activations
    # arrive after F reads, or BETWEEN rows.
    return (
        _slots(residuals, direct=-1, reuse_same_row=False),
        _slots(
            activations,
            direct=-1 if schedule.stage_map.folded else 0 if travel == BETWEEN else 1,
            reuse_same_row=travel != BETWEEN,
        ),
        _slots(gradients, direct=0 if travel != ALONG and schedule.chunks == 1 else -1, reuse_same_row=False),
    )


class _Columns:
    """The columns of the table while they are filled, each int32 [rows, stages]."""

    def __init__(self, schedule: Schedule, slots: Rings) -> None:
        self.schedule = schedule
        self.residuals, self.activations, self.gradients = slots
        self.column = {name: np.zeros((schedule.rows, schedule.stages), np.int32) for name in COLUMNS}
        # Values that no op reads go into the scrap slots.
        self.column["forward_slot"][:] = self.residuals.depth
        for name in ARRIVALS:
            self.column[name][:] = self.activations.depth
        for name in ("head_slot", *GRADIENT_ARRIVALS):
            self.column[name][:] = self.gradients.depth

    def fill_forward(self) -> None:
        """Fill what F reads and writes, and where the activations arrive that it sends."""
        schedule, column, last = self.schedule, self.column, self.schedule.virtual_stages - 1
        for row, stage, mb, chunk in schedule.ops("forward"):
            virtual = schedule.virtual_stage(stage, chunk)
            column["forward"][row, stage], column["forward_chunk"][row, stage] = mb, chunk
            column["forward_valid"][row, stage] = 1
            if schedule.trains:
                column["forward_slot"][row, stage] = self.residuals.of[stage][virtual, mb]
            if virtual:
                column["input_slot"][row, stage] = self.activations.of[stage][virtual, mb]
            if virtual < last:
                receiver, then = schedule.stage_map.stage_of[virtual + 1], row + schedule.activations_wait
                arrival = ARRIVALS[schedule.stage_map.lane(stage, receiver)]
                column[arrival][then, receiver] = self.activations.of[receiver][virtual + 1, mb]
                column["output_chunk"][then, stage] = chunk
            elif schedule.trains:
                column["head_slot"][row, stage] = self.gradients.of[stage][virtual, mb]

    def fill_backward(self) -> None:
        """Fill what B reads, and where the gradients arrive that it sends."""
        schedule, column = self.schedule, self.column
        # An idle B reads what its stage wrote last: real values, so that a zero cotangent gives zeros and not 0/0.
        written = np.zeros(schedule.stages, np.int32)
        for row in range(schedule.rows):
            if (schedule.forward[row] != IDLE).any():
                written = column["forward_slot"][row]
            column["backward_slot"][row] = written
        for row, stage, mb, chunk in schedule.ops("backward"):
            virtual = schedule.virtual_stage(stage, chunk)
            column["backward"][row, stage], column["backward_chunk"][row, stage] = mb, chunk
            column["backward_valid"][row, stage] = 1
            column["backward_slot"][row, stage] = self.residuals.of[stage][virtual, mb]
            column["gradient_slot"][row, stage] = self.gradients.of[stage][virtual, mb]
            if virtual:
                receiver = schedule.stage_map.stage_of[virtual - 1]
                arrival = GRADIENT_ARRIVALS[schedule.stage_map.lane(stage, receiver)]
                column[arrival][row + 1, receiver] = self.gradients.of[receiver][virtual - 1, mb]
                column["message_chunk"][row + 1, stage] = chunk

    def fill_weights(self) -> None:
        """Fill what W reads."""
        schedule, column = self.schedule, self.column
        for row, stage, mb, chunk in schedule.ops("weights"):
            column["weights_valid"][row, stage], column["weights_chunk"][row, stage] = 1, chunk
            column["weights_slot"][row, stage] = self.residuals.of[stage][schedule.virtual_stage(stage, chunk), mb]


def _kinds(schedule: Schedule, compressed: Set[tuple[int, int]]) -> list[RowKind]:
    packed: list[set[int]] = [set() for _ in range(schedule.rows)]  # stages that send a compressed gradient in that row
    for row, stage, mb, chunk in schedule.ops("backward"):
        if (schedule.virtual_stage(stage, chunk), mb) in compressed:
            packed[row + 1].add(stage)

    def active(phase: str, row: int) -> set[tuple[int, int]]:
        busy, chunk = getattr(schedule, phase)[row] != IDLE, getattr(schedule, phase + "_chunk")[row]
        return {(int(s), int(chunk[s])) for s in np.flatnonzero(busy)}

    def kind(row: int) -> RowKind:
        f, b, w = (active(phase, row) for phase in ("forward", "backward", "weights"))
        plain = tuple(pair for pair in schedule.gradient_pairs[row] if pair[0] not in packed[row])
        squeezed = tuple(pair for pair in schedule.gradient_pairs[row] if pair[0] in packed[row])
        return row_kind(schedule, row, f, b, w, plain, squeezed, schedule.activation_pairs[row])

    return [kind(row) for row in range(schedule.rows)]


def assign(schedule: Schedule, compressed: Set[tuple[int, int]] = frozenset(), slots: Rings | None = None) -> Buffers:
    """Assign the slots of all three rings, and name each row's kind.

    Args:
        schedule: table of ops.
        compressed: gradients that travel compressed, as (sending virtual stage, micro-batch).
        slots: slots to use, those of `rings` of a schedule with all of these ops or more; None: the schedule's.
    """
    columns = _Columns(schedule, slots or rings(schedule))
    columns.fill_forward()
    columns.fill_backward()
    columns.fill_weights()
    table = np.stack([columns.column[name] for name in COLUMNS], axis=-1)
    depths = columns.residuals.depth, columns.activations.depth, columns.gradients.depth
    return Buffers(table, _kinds(schedule, compressed), *depths, schedule.travel)
