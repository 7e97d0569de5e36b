"""The ops of a schedule, laid out in rows from each stage's order of ops or from a closed form of row and stage."""

import collections
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paxtrain.schedule.stage_map import StageMap, in_turn
from paxtrain.schedule.table import IDLE

_PHASES = "FBW"
_IN_A_ROW = {"F": 0, "W": 1, "B": 2}  # the order of a row's phases
_NEVER = 2**31 - 1  # row of an op that was not run yet
Op = tuple[str, int, int]  # phase, micro-batch, chunk


class Ops(NamedTuple):
    """The arrays of a `Schedule`, each int32 [rows, stages]."""

    forward: np.ndarray
    forward_chunk: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    weights: np.ndarray
    weights_chunk: np.ndarray


def lay_out(
    orders: list[list[Op]],
    chunks: int,
    together: bool = False,
    lag: int = 1,
    place: Callable[[int, int], StageMap] = in_turn,
) -> Ops:
    """Lay out each stage's ops in its order, as early as messages allow.

    If all stages wait for one another (at a last group of interleaved micro-batches that is not full), those that can
    run a later forward ahead of the backward they wait for.

    Args:
        orders: ops of every stage.
        chunks: chunks of layers per stage.
        together: a stage may run an F, a W and a B, in this order, in one row. No message is then awaited in a row
            whose stages do not need it. False: one op a row.
        lag: rows from the op that makes a message to the first that may use it.
        place: (P, chunks) -> stages of all virtual stages.

    Raises:
        ValueError: the orders lead nowhere, because each stage waits for another one.
    """
    stages, last = len(orders), len(orders) * chunks - 1
    stage_map = place(stages, chunks)
    virtual_of = stage_map.virtual_of.tolist()
    queues, rows, waited = [collections.deque(order) for order in orders], 0, 0
    count = 1 + max((mb for order in orders for _, mb, _ in order), default=-1)
    # The row of each op, by phase, virtual stage and micro-batch.
    done = {phase: [[_NEVER] * count for _ in range(last + 1)] for phase in _PHASES}
    forward, backward = done["F"], done["B"]

    def ready(stage: int, op: Op) -> bool:
        phase, mb, chunk = op
        virtual = virtual_of[chunk][stage]
        if phase == "F":
            return virtual == 0 or forward[virtual - 1][mb] <= rows - lag
        if phase == "W":
            return backward[virtual][mb] <= rows
        if virtual == last:
            return forward[virtual][mb] <= rows
        return backward[virtual + 1][mb] <= rows - lag

    def run(stage: int, op: Op) -> None:
        phase, mb, chunk = op
        done[phase][virtual_of[chunk][stage]][mb] = rows

    while any(queues):
        moved = False
        for s, order in enumerate(queues):
            before = -1  # the place of the stage's last op in this row
            while order and before < _IN_A_ROW[order[0][0]] and ready(s, order[0]):
                op = order.popleft()
                before, moved = _IN_A_ROW[op[0]] if together else len(_IN_A_ROW), True
                run(s, op)
        if not moved and waited >= lag - 1:
            for s, order in enumerate(queues):
                ahead = next((op for op in order if op[0] == "F"), None)
                if ahead and ready(s, ahead):
                    moved = True
                    order.remove(ahead)
                    run(s, ahead)
            if not moved:
                waiting = ", ".join(f"stage {s} for {order[0]}" for s, order in enumerate(queues) if order)
                after = f"after row {rows}: {waiting} waits"
                raise ValueError(f"the orders of the {stages} stages lead nowhere {after}")
        waited = 0 if moved else waited + 1
        rows += 1
    return _ops(done, rows, stage_map)


def _ops(done: dict[str, list[list[int]]], rows: int, stage_map: StageMap) -> Ops:
    """Return the arrays of ops."""
    arrays = [np.full((rows, stage_map.stages), fill, np.int32) for fill in (IDLE, 0) * len(_PHASES)]
    for i, phase in enumerate(_PHASES):
        row = np.array(done[phase])[stage_map.virtual_of]  # [chunks, stages, micro-batches]
        chunk, stage, mb = np.nonzero(row < _NEVER)
        where = row[chunk, stage, mb], stage
        arrays[2 * i][where], arrays[2 * i + 1][where] = mb, chunk
    return Ops(*arrays)


def closed_form(
    stages: int,
    micro_batches: int,
    rows: int,
    forward: Callable[[np.ndarray, np.ndarray], np.ndarray],
    backward: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Ops:
    """Return rows of one chunk per stage whose micro-batches are functions of row and stage.

    Args:
        stages: P.
        micro_batches: m; a stage is idle when its function gives a number outside [0, m).
        rows: number of rows.
        forward: (row, stage), each int [rows, P], -> micro-batch of F.
        backward: the same for B.
    """
    t, s = np.mgrid[:rows, :stages]

    def table(micro_batch: np.ndarray) -> np.ndarray:
        return np.where((micro_batch >= 0) & (micro_batch < micro_batches), micro_batch, IDLE).astype(np.int32)

    zeros, never = np.zeros((rows, stages), np.int32), np.full((rows, stages), IDLE, np.int32)
    return Ops(table(forward(t, s)), zeros, table(backward(t, s)), zeros, never, zeros)


def warm_up_then_alternate(forwards: list[Op], backwards: list[Op], warm_up: int) -> list[Op]:
    """Return `warm_up` forwards, then a forward and a backward in turn, then the backwards that are left.

    Args:
        forwards: ops in their order.
        backwards: ops in their order, as many as forwards.
        warm_up: number of forwards before the first backward.
    """
    warm_up = min(warm_up, len(forwards))
    steady = [op for pair in zip(forwards[warm_up:], backwards) for op in pair]
    return forwards[:warm_up] + steady + backwards[len(forwards) - warm_up :]
