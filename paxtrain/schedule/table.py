"""Pipeline schedules as data: a table of rows x stages that the executor runs and a simulator can read.

A row has two phases. In the forward phase a stage may run the forward F of one micro-batch through one of its chunks of
layers, in the backward phase the backward B of one. Where a schedule splits the backward, B makes the gradient of the
chunk's input only, and W, in the backward phase of a later row, makes the weights'. Messages move with the rows:

    row t:  gradients that B made in row t-1 travel     } in flight together
            forward phase: F                            }
            activations that F has just made travel     } likewise
            backward phase: W, B

so an activation made in row t can be used from row t+1 on, and so can a gradient. The last virtual stage makes its own
gradient, the loss's, in the forward phase of the row of its F.

With P stages and v chunks a stage, stage s holds the virtual stages s, P+s, ..., (v-1)P+s: its chunk c is virtual stage
cP+s. Everything here is numpy; nothing knows of devices, bytes or seconds.

References:
    GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush, 2021). Interleaved: Narayanan et al. 2021
    (Megatron-LM). Eager 1F1B, with twice the warm-up so that transfers hide under compute: Zhuang et al. 2023. ZB-H1:
    Qi et al. 2023, Zero Bubble Pipeline Parallelism.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable

import numpy as np

from compress.policy import epilogue_sends

IDLE = -1
Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A table of the ops of every stage, row by row.

    Attributes:
        forward: [rows, stages] micro-batch whose F a stage runs in that row, or IDLE.
        forward_chunk: [rows, stages] the chunk it runs through (0 where idle).
        backward, backward_chunk: the same for B.
        weights, weights_chunk: the same for W; all IDLE where B is whole.
        masked: stages that have nothing to do compute on scrap while others compute, so that rows need no branch. True
            for schedules in which that costs no time because all busy stages of a phase do the same.
    """

    name: str
    stages: int
    chunks: int
    micro_batches: int
    forward: np.ndarray
    forward_chunk: np.ndarray
    backward: np.ndarray
    backward_chunk: np.ndarray
    weights: np.ndarray
    weights_chunk: np.ndarray
    masked: bool

    @property
    def rows(self) -> int:
        return len(self.forward)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def splits(self) -> bool:
        """The backward is split into B and W."""
        return bool((self.weights != IDLE).any())

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return chunk * self.stages + stage

    def ops(self, phase: str) -> Iterable[tuple[int, int, int, int]]:
        """The ops of a phase ("forward", "backward" or "weights") in row order, as (row, stage, micro-batch, chunk)."""
        table, chunk = getattr(self, phase), getattr(self, phase + "_chunk")
        for row, stage in np.argwhere(table != IDLE):
            yield int(row), int(stage), int(table[row, stage]), int(chunk[row, stage])

    @functools.cached_property
    def row_of(self) -> dict[tuple[str, int, int], int]:
        """(phase, virtual stage, micro-batch) -> row."""
        return {
            (phase, self.virtual_stage(stage, chunk), mb): row
            for phase in ("forward", "backward", "weights")
            for row, stage, mb, chunk in self.ops(phase)
        }

    @functools.cached_property
    def activation_pairs(self) -> list[tuple[Pair, ...]]:
        """Per row, the (sender, receiver) stages of the activations that travel after its forward phase."""
        pairs: list[list[Pair]] = [[] for _ in range(self.rows)]
        for row, stage, _, chunk in self.ops("forward"):
            if self.virtual_stage(stage, chunk) < self.virtual_stages - 1:
                pairs[row].append((stage, (stage + 1) % self.stages))
        return [tuple(p) for p in pairs]

    @functools.cached_property
    def gradient_pairs(self) -> list[tuple[Pair, ...]]:
        """Per row, the (sender, receiver) stages of the gradients that travel before its forward phase."""
        pairs: list[list[Pair]] = [[] for _ in range(self.rows)]
        for row, stage, _, chunk in self.ops("backward"):
            if self.virtual_stage(stage, chunk) > 0:
                pairs[row + 1].append((stage, (stage - 1) % self.stages))
        return [tuple(p) for p in pairs]

    def epilogue(self) -> frozenset[tuple[int, int]]:
        """The gradients that compressed backpropagation's epilogue compresses, as (sending virtual stage, micro-batch).

        Those of the drain phase, whose transfer nothing hides: of stage s the last min(P-s, m). With virtual stages:
        those that a stage sends after its last F.

        References:
            Optimus-CC (Song et al. 2023), epilogue-only compression.
        """
        if self.chunks == 1:
            m = self.micro_batches
            return frozenset(
                (s, mb) for s in range(self.stages) for mb in range(m - epilogue_sends(self.stages, s, m), m)
            )
        last_forward = {stage: row for row, stage, *_ in self.ops("forward")}
        return frozenset(
            (self.virtual_stage(stage, chunk), mb)
            for row, stage, mb, chunk in self.ops("backward")
            if row > last_forward[stage] and self.virtual_stage(stage, chunk) > 0
        )

    def gradient_messages(self) -> frozenset[tuple[int, int]]:
        """All gradients that travel between stages, as (sending virtual stage, micro-batch)."""
        return frozenset((q, mb) for q in range(1, self.virtual_stages) for mb in range(self.micro_batches))

    def messages(self) -> int:
        """Messages that cross a link per step: activations and gradients, over all pairs of stages."""
        return sum(map(len, self.activation_pairs)) + sum(map(len, self.gradient_pairs))


_PHASES = "FBW"
Op = tuple[str, int, int]  # phase, micro-batch, chunk


def _from_orders(name: str, stages: int, chunks: int, m: int, orders: list[list[Op]]) -> Schedule:
    """Lays out each stage's ops in its order, one a row, as early as messages allow.

    Where all stages wait for one another (a last group of interleaved micro-batches that is not full), those that can
    run a later forward ahead of the backward they wait for.
    """
    last = stages * chunks - 1
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
        assert any(row), f"{name} with {stages} stages, {chunks} chunks and {m} micro-batches is stuck"
        for s, op in enumerate(row):
            if op:
                phase, mb, chunk = op
                done[phase, chunk * stages + s, mb] = len(rows)
                orders[s].remove(op)
        rows.append(row)
    tables = [np.full((len(rows), stages), fill, np.int32) for fill in (IDLE, 0) * len(_PHASES)]
    for t, row in enumerate(rows):
        for s, op in enumerate(row):
            if op:
                phase, mb, chunk = op
                first = 2 * _PHASES.index(phase)
                tables[first][t, s], tables[first + 1][t, s] = mb, chunk
    return Schedule(name, stages, chunks, m, *tables, masked=False)


def _one_forward_one_backward(forwards: list, backwards: list, warmup: int) -> list:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    warmup = min(warmup, len(forwards))
    steady = [op for pair in zip(forwards[warmup:], backwards) for op in pair]
    return forwards[:warmup] + steady + backwards[len(forwards) - warmup :]


def _orders_1f1b(stages: int, m: int) -> list[list[Op]]:
    forwards, backwards = ([(phase, mb, 0) for mb in range(m)] for phase in "FB")
    return [_one_forward_one_backward(forwards, backwards, warmup=stages - 1 - s) for s in range(stages)]


def _1f1b(stages: int, chunks: int, m: int) -> Schedule:
    """In flight on stage s: P-s micro-batches. Time of equal stages: (m+P-1)(F+B), transfers exposed."""
    return _from_orders("1f1b", stages, 1, m, _orders_1f1b(stages, m))


def _interleaved_1f1b(stages: int, chunks: int, m: int) -> Schedule:
    """Micro-batches go in groups of P through chunk after chunk: the bubble shrinks by the number of chunks."""
    groups = [range(start, min(start + stages, m)) for start in range(0, m, stages)]
    forwards = [("F", mb, c) for group in groups for c in range(chunks) for mb in group]
    backwards = [("B", mb, c) for group in groups for c in reversed(range(chunks)) for mb in group]
    orders = [
        _one_forward_one_backward(forwards, backwards, warmup=2 * (stages - 1 - s) + (chunks - 1) * stages)
        for s in range(stages)
    ]
    return _from_orders("interleaved_1f1b", stages, chunks, m, orders)


def _zb_h1(stages: int, chunks: int, m: int) -> Schedule:
    """1f1b with W put off: that of a micro-batch comes s B later on stage s, and fills the wait for the last gradients.

    In flight from F to W: P micro-batches on every stage, as many as on the first one of 1f1b. Time of equal stages
    from P micro-batches on, where W is no longer than F and B: m(F+B+W) + (P-1)(F+B-W), transfers exposed.
    """
    orders = []
    for s, ops in enumerate(_orders_1f1b(stages, m)):
        order = []
        for phase, mb, chunk in ops:
            order.append((phase, mb, chunk))
            if phase == "B" and mb >= s:
                order.append(("W", mb - s, chunk))
        orders.append(order + [("W", mb, 0) for mb in range(max(m - s, 0), m)])
    return _from_orders("zb_h1", stages, 1, m, orders)


def _closed_form(name: str, stages: int, m: int, rows: int, forward: Callable, backward: Callable) -> Schedule:
    t, s = np.mgrid[:rows, :stages]

    def table(micro_batch: np.ndarray) -> np.ndarray:
        return np.where((micro_batch >= 0) & (micro_batch < m), micro_batch, IDLE).astype(np.int32)

    zeros, never = np.zeros((rows, stages), np.int32), np.full((rows, stages), IDLE, np.int32)
    phases = (table(forward(t, s)), zeros, table(backward(t, s)), zeros, never, zeros)
    return Schedule(name, stages, 1, m, *phases, masked=True)


def _eager_1f1b(stages: int, chunks: int, m: int) -> Schedule:
    """A row is F, then B. In flight on stage s: 2(P-1-s)+1 micro-batches. Time: (m+P-1)(F+B), transfers hidden."""
    return _closed_form(
        "eager_1f1b", stages, m, m + 2 * (stages - 1), lambda t, s: t - s, lambda t, s: t - 2 * (stages - 1) + s
    )


def _gpipe(stages: int, chunks: int, m: int) -> Schedule:
    """All forwards, then all backwards. In flight: m micro-batches."""
    half = m + stages - 1

    def backward(t: np.ndarray, s: np.ndarray) -> np.ndarray:
        return np.where(t < half, IDLE, t - half - (stages - 1 - s))

    return _closed_form("gpipe", stages, m, 2 * half, lambda t, s: t - s, backward)


_BUILDERS = {
    "eager_1f1b": _eager_1f1b,
    "gpipe": _gpipe,
    "1f1b": _1f1b,
    "interleaved_1f1b": _interleaved_1f1b,
    "zb_h1": _zb_h1,
}


@functools.lru_cache(maxsize=64)
def build(name: str, stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """Return the table of a training schedule.

    Args:
        name: "eager_1f1b", "gpipe", "1f1b", "interleaved_1f1b" or "zb_h1".
        stages: P, the size of the pipe axis.
        micro_batches: m per data rank and step, any number from 1 on.
        chunks: virtual stages per stage, v; above 1 with interleaved_1f1b only.

    Raises:
        ValueError: there is no schedule of that name.
    """
    if name not in _BUILDERS:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(_BUILDERS)}")
    return _BUILDERS[name](stages, chunks, micro_batches)


@functools.lru_cache(maxsize=64)
def forward_only(stages: int, micro_batches: int, chunks: int = 1) -> Schedule:
    """The schedule of evaluation: forwards alone."""
    if chunks == 1:
        rows = micro_batches + stages - 1
        return _closed_form("forward_only", stages, micro_batches, rows, lambda t, s: t - s, lambda t, s: t * 0 + IDLE)
    groups = [range(start, min(start + stages, micro_batches)) for start in range(0, micro_batches, stages)]
    forwards = [("F", mb, c) for group in groups for c in range(chunks) for mb in group]
    return _from_orders("forward_only", stages, chunks, micro_batches, [forwards] * stages)
