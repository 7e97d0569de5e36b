"""The ops of a schedule, laid out in rows from each stage's order of ops or from a closed form of row and stage."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from paxtrain.schedule.table import IDLE

_PHASES = "FBW"
Op = tuple[str, int, int]  # phase, micro-batch, chunk


class Ops(NamedTuple):
    """The arrays of a `Schedule`, each int32 [rows, stages]."""

    forward: np.ndarray
    forward_chunk: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    weights: np.ndarray
    weights_chunk: np.ndarray


def lay_out(orders: list[list[Op]], chunks: int) -> Ops:
    """Lay out each stage's ops in its order, one a row, as early as messages allow.

    If all stages wait for one another (at a last group of interleaved micro-batches that is not full), those that can
    run a later forward ahead of the backward they wait for.

    Args:
        orders: ops of every stage.
        chunks: chunks of layers per stage.

    Raises:
        ValueError: the orders lead nowhere, because each stage waits for another one.
    """
    stages, last = len(orders), len(orders) * chunks - 1
    orders, done, rows = [list(order) for order in orders], {}, []

    def ready(stage: int, op: Op) -> bool:
        phase, mb, chunk = op
        virtual = chunk * stages + stage
        if phase == "F":
            return virtual == 0 or ("F", virtual - 1, mb) in done
        if phase == "W":
            return ("B", virtual, mb) in done
        return (("B", virtual + 1, mb) if virtual < last else ("F", virtual, mb)) in done

    while any(orders):
        row = [order[0] if order and ready(s, order[0]) else None for s, order in enumerate(orders)]
        if not any(row):
            ahead = [next((op for op in order if op[0] == "F"), None) for order in orders]
            row = [op if op and ready(s, op) else None for s, op in enumerate(ahead)]
        if not any(row):
            waiting = ", ".join(f"stage {s} for {order[0]}" for s, order in enumerate(orders) if order)
            raise ValueError(f"the orders of the {stages} stages lead nowhere after row {len(rows)}: {waiting} waits")
        for s, op in enumerate(row):
            if op:
                phase, mb, chunk = op
                done[phase, chunk * stages + s, mb] = len(rows)
                orders[s].remove(op)
        rows.append(row)
    arrays = [np.full((len(rows), stages), fill, np.int32) for fill in (IDLE, 0) * len(_PHASES)]
    for t, row in enumerate(rows):
        for s, op in enumerate(row):
            if op:
                phase, mb, chunk = op
                first = 2 * _PHASES.index(phase)
                arrays[first][t, s], arrays[first + 1][t, s] = mb, chunk
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
