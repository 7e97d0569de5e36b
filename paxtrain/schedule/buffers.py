"""Ring slots that hold a schedule's values between rows, and the rows grouped into loops.

Each stage keeps three rings, as small as the schedule allows: residuals (from F to B, or to W where the backward is
split), activations received and not yet used, gradients received or made by the loss and not yet used. A slot is an
index into a ring; the ring's last index, `depth`, is a scrap slot that idle stages write.
"""

import dataclasses
import heapq
from collections.abc import Set

import numpy as np

from paxtrain.schedule.table import IDLE, Pair, Schedule


@dataclasses.dataclass(frozen=True)
class RowKind:
    """The static facts that a row's compiled code depends on; rows of one kind differ in numbers only.

    Attributes:
        receive: stage pairs of the gradients that travel before the forward phase as they are.
        receive_compressed: those of the gradients that travel compressed.
        forward, backward, weights: the chunks that some stage runs.
        send: stage pairs of the activations that travel after the forward phase.
        first, head, first_backward: some stage runs F of the first or the last, or B of the first virtual stage.
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


COLUMNS = (
    "forward",  # micro-batch of F, 0 where idle
    "forward_valid",
    "forward_chunk",
    "forward_slot",  # of the residual ring, written by F
    "input_slot",  # of the activation ring, read by F
    "arrival_slot",  # of the activation ring, written after the forward phase
    "backward",
    "backward_valid",
    "backward_chunk",
    "backward_slot",  # of the residual ring, read by B, which leaves there what W needs
    "gradient_slot",  # of the gradient ring, read by B
    "gradient_arrival_slot",  # of the gradient ring, written before the forward phase
    "head_slot",  # of the gradient ring, written by the head
    "message_chunk",  # that made the gradient that leaves before the forward phase
    "weights_valid",  # W, whose micro-batch is that of its slot
    "weights_chunk",
    "weights_slot",  # of the residual ring, read by W
)


@dataclasses.dataclass(frozen=True, eq=False)
class Buffers:
    """A schedule with slots assigned.

    Attributes:
        table: int32 [rows, stages, len(COLUMNS)].
        kinds: one per row.
        residual_depth, activation_depth, gradient_depth: ring sizes without the scrap slot. A depth of 0 for
            activations or gradients means that each is used the moment it can be, so that one buffer does.
    """

    table: np.ndarray
    kinds: list[RowKind]
    residual_depth: int
    activation_depth: int
    gradient_depth: int

    def runs(self) -> list[tuple[int, int, int]]:
        """The rows as (start, period, repeats): `repeats` times `period` rows of the same kinds."""
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


def _color(intervals: list[tuple[int, int, int]], reuse_same_row: bool) -> tuple[dict[int, int], int]:
    """Slots for (first row, last row, key) so that no two that overlap share one; the fewest there can be.

    Args:
        reuse_same_row: a value whose first row is another's last row may take its slot.
    """
    slots, free, busy, depth = {}, [], [], 0
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


def _kind(
    schedule: Schedule,
    forward: set[tuple[int, int]],
    backward: set[tuple[int, int]],
    weights: set[tuple[int, int]],
    receive: tuple[Pair, ...],
    receive_compressed: tuple[Pair, ...],
    send: tuple[Pair, ...],
) -> RowKind:
    """The kind of a row in which these (stage, chunk) run F, B and W."""
    return RowKind(
        receive=receive,
        receive_compressed=receive_compressed,
        forward=tuple(sorted({chunk for _, chunk in forward})),
        send=send,
        backward=tuple(sorted({chunk for _, chunk in backward})),
        weights=tuple(sorted({chunk for _, chunk in weights})),
        first=(0, 0) in forward,
        head=(schedule.stages - 1, schedule.chunks - 1) in forward,
        first_backward=(0, 0) in backward,
    )


def assign(schedule: Schedule, compressed: Set[tuple[int, int]] = frozenset()) -> Buffers:
    """Assigns the slots of all three rings and names each row's kind.

    Args:
        compressed: the gradients that travel compressed, as (sending virtual stage, micro-batch).
    """
    stages, rows, last = schedule.stages, schedule.rows, schedule.virtual_stages - 1
    row_of, trains = schedule.row_of, bool((schedule.backward != IDLE).any())
    residuals: list[list] = [[] for _ in range(stages)]
    activations: list[list] = [[] for _ in range(stages)]
    gradients: list[list] = [[] for _ in range(stages)]
    for row, stage, mb, chunk in schedule.ops("forward"):
        virtual = schedule.virtual_stage(stage, chunk)
        if virtual:
            activations[stage].append((row_of["forward", virtual - 1, mb], row, (virtual, mb)))
        if trains:
            used = row_of["backward", virtual, mb]
            made = row_of["backward", virtual + 1, mb] + 1 if virtual < last else row
            residuals[stage].append((row, row_of.get(("weights", virtual, mb), used), (virtual, mb)))
            gradients[stage].append((made, used, (virtual, mb)))

    def color(intervals: list[list], direct: int, reuse_same_row: bool) -> tuple[list[dict], int]:
        if all(used - made == direct for per_stage in intervals for made, used, _ in per_stage):
            return [{key: 0 for *_, key in per_stage} for per_stage in intervals], 0
        colored = [_color(per_stage, reuse_same_row) for per_stage in intervals]
        return [slots for slots, _ in colored], max(depth for _, depth in colored)

    # Within a row F writes residuals before B reads, gradients arrive before B reads, activations arrive after F reads.
    residual_slots, residual_depth = color(residuals, direct=-1, reuse_same_row=False)
    activation_slots, activation_depth = color(activations, direct=1, reuse_same_row=True)
    gradient_slots, gradient_depth = color(gradients, direct=0, reuse_same_row=False)

    column = {name: np.zeros((rows, stages), np.int32) for name in COLUMNS}
    column["forward_slot"][:] = residual_depth
    column["arrival_slot"][:] = activation_depth
    column["gradient_arrival_slot"][:] = column["head_slot"][:] = gradient_depth
    for row, stage, mb, chunk in schedule.ops("forward"):
        virtual = schedule.virtual_stage(stage, chunk)
        column["forward"][row, stage], column["forward_chunk"][row, stage] = mb, chunk
        column["forward_valid"][row, stage] = 1
        if trains:
            column["forward_slot"][row, stage] = residual_slots[stage][virtual, mb]
        if virtual:
            column["input_slot"][row, stage] = activation_slots[stage][virtual, mb]
        if virtual < last:
            receiver = (stage + 1) % stages
            column["arrival_slot"][row, receiver] = activation_slots[receiver][virtual + 1, mb]
        elif trains:
            column["head_slot"][row, stage] = gradient_slots[stage][virtual, mb]
    # An idle B reads what its stage wrote last: real values, so that a zero cotangent gives zeros and not 0/0.
    written = np.zeros(stages, np.int32)
    for row in range(rows):
        if (schedule.forward[row] != IDLE).any():
            written = column["forward_slot"][row]
        column["backward_slot"][row] = written
    packed: list[set[int]] = [set() for _ in range(rows)]  # who sends a compressed gradient in that row
    for row, stage, mb, chunk in schedule.ops("backward"):
        virtual = schedule.virtual_stage(stage, chunk)
        column["backward"][row, stage], column["backward_chunk"][row, stage] = mb, chunk
        column["backward_valid"][row, stage] = 1
        column["backward_slot"][row, stage] = residual_slots[stage][virtual, mb]
        column["gradient_slot"][row, stage] = gradient_slots[stage][virtual, mb]
        if virtual:
            receiver = (stage - 1) % stages
            column["gradient_arrival_slot"][row + 1, receiver] = gradient_slots[receiver][virtual - 1, mb]
            column["message_chunk"][row + 1, stage] = chunk
            if (virtual, mb) in compressed:
                packed[row + 1].add(stage)
    for row, stage, mb, chunk in schedule.ops("weights"):
        column["weights_valid"][row, stage], column["weights_chunk"][row, stage] = 1, chunk
        column["weights_slot"][row, stage] = residual_slots[stage][schedule.virtual_stage(stage, chunk), mb]

    def active(phase: str, row: int) -> set[tuple[int, int]]:
        busy, chunk = getattr(schedule, phase)[row] != IDLE, getattr(schedule, phase + "_chunk")[row]
        return {(int(s), int(chunk[s])) for s in np.flatnonzero(busy)}

    def kind(row: int) -> RowKind:
        f, b, w = (active(phase, row) for phase in ("forward", "backward", "weights"))
        plain = tuple(pair for pair in schedule.gradient_pairs[row] if pair[0] not in packed[row])
        compressed = tuple(pair for pair in schedule.gradient_pairs[row] if pair[0] in packed[row])
        return _kind(schedule, f, b, w, plain, compressed, schedule.activation_pairs[row])

    table = np.stack([column[name] for name in COLUMNS], axis=-1)
    kinds = [kind(row) for row in range(rows)]
    return Buffers(table, kinds, residual_depth, activation_depth, gradient_depth)


def validate(schedule: Schedule, buffers: Buffers) -> None:
    """Replays the table symbolically and proves that each op finds its own values.

    Every op runs once; every value it reads is there, in the slot it reads, and is its own; every message that is sent
    has a receiver that uses it, and no other; a slot that is written with nothing to keep is the scrap slot; a row's
    kind names what runs in it.

    Raises:
        AssertionError: with the row, stage and op at fault.
    """
    stages, last = schedule.stages, schedule.virtual_stages - 1
    trains = bool((schedule.backward != IDLE).any())
    residual = [{} for _ in range(stages)]
    inbox = [{} for _ in range(stages)]
    gradient_inbox = [{} for _ in range(stages)]
    seen, unread, sending = set(), set(), {}
    depths = {
        "forward_slot": buffers.residual_depth,
        "arrival_slot": buffers.activation_depth,
        "gradient_arrival_slot": buffers.gradient_depth,
        "head_slot": buffers.gradient_depth,
    }

    def check(condition: bool, row: int, stage: int, what: str) -> None:
        if not condition:
            raise AssertionError(f"{schedule.name}: row {row}, stage {stage}: {what}")

    for row in range(schedule.rows):
        cells = [dict(zip(COLUMNS, map(int, buffers.table[row, s]))) for s in range(stages)]
        kind, kept = buffers.kinds[row], set()
        pairs = kind.receive + kind.receive_compressed
        check(sorted(pairs) == sorted((s, to) for s, (to, _) in sending.items()), row, -1, "gradient pairs")
        for s, (_, (virtual, _)) in sending.items():
            made_by = (virtual + 1) // stages
            check(cells[s]["message_chunk"] == made_by, row, s, f"message of chunk {made_by}")
        for to, key in sending.values():
            kept.add((to, "gradient_arrival_slot"))
            gradient_inbox[to][cells[to]["gradient_arrival_slot"]] = key
            unread.add(("g", *key))
        sending, made = {}, {}
        for s, cell in enumerate(cells):
            if not cell["forward_valid"]:
                continue
            mb, virtual = cell["forward"], schedule.virtual_stage(s, cell["forward_chunk"])
            check(("F", virtual, mb) not in seen, row, s, f"F of micro-batch {mb} again")
            seen.add(("F", virtual, mb))
            if virtual:
                check(inbox[s].get(cell["input_slot"]) == (virtual, mb), row, s, f"no activation for {mb}")
                unread.discard(("a", virtual, mb))
            if trains:
                kept.add((s, "forward_slot"))
                residual[s][cell["forward_slot"]] = (virtual, mb)
            if virtual < last:
                made[s] = ((s + 1) % stages, (virtual + 1, mb))
            elif trains:
                kept.add((s, "head_slot"))
                gradient_inbox[s][cell["head_slot"]] = (virtual, mb)
        check(set(kind.send) == {(s, to) for s, (to, _) in made.items()}, row, -1, "activation pairs")
        for to, key in made.values():
            kept.add((to, "arrival_slot"))
            inbox[to][cells[to]["arrival_slot"]] = key
            unread.add(("a", *key))
        for s, cell in enumerate(cells):
            if not cell["weights_valid"]:
                continue
            virtual = schedule.virtual_stage(s, cell["weights_chunk"])
            done, *key = residual[s].pop(cell["weights_slot"], (None,))
            check(done == "B" and key[0] == virtual, row, s, "B has left nothing for W")
            seen.add(("W", *key))
        for s, cell in enumerate(cells):
            if not cell["backward_valid"]:
                continue
            mb, virtual = cell["backward"], schedule.virtual_stage(s, cell["backward_chunk"])
            check(("B", virtual, mb) not in seen, row, s, f"B of micro-batch {mb} again")
            seen.add(("B", virtual, mb))
            check(residual[s].pop(cell["backward_slot"], None) == (virtual, mb), row, s, f"no residuals for {mb}")
            found = gradient_inbox[s].pop(cell["gradient_slot"], None)
            check(found == (virtual, mb), row, s, f"no gradient for {mb}")
            unread.discard(("g", virtual, mb))
            if schedule.splits:
                residual[s][cell["backward_slot"]] = ("B", virtual, mb)
            if virtual:
                sending[s] = ((s - 1) % stages, (virtual - 1, mb))
        for s, cell in enumerate(cells):
            for name, depth in depths.items():
                fits = cell[name] < max(depth, 1) if (s, name) in kept else cell[name] == depth
                check(fits, row, s, f"{name} is {cell[name]}, and the scrap slot is {depth}")
        f, b, w = (
            {(s, cell[phase + "_chunk"]) for s, cell in enumerate(cells) if cell[phase + "_valid"]}
            for phase in ("forward", "backward", "weights")
        )
        found = _kind(schedule, f, b, w, kind.receive, kind.receive_compressed, kind.send)
        check(kind == found, row, -1, "the row's kind leaves out an op")
    phases = ("FBW" if schedule.splits else "FB") if trains else "F"
    expected = {(p, q, mb) for p in phases for q in range(last + 1) for mb in range(schedule.micro_batches)}
    check(seen == expected, schedule.rows, -1, "an op is missing")
    check(not unread and not sending, schedule.rows, -1, "a message nobody used")
