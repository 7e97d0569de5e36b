"""A schedule as data: a table of rows x stages that the executor runs and simulators read.

A row has two phases. In the forward phase a stage may run the forward F of one micro-batch through one of its chunks of
layers. In the backward phase it may run the backward B of one. If a schedule splits the backward, B makes only the
gradient of the chunk's input, and W makes the weights' in the backward phase of a later row. A message travels once,
and waits in a slot until it is used. When it travels is a fact of the table, `Schedule.travel`:

    UNDER       row t:  gradients that B made in row t-1 travel     } in flight together
                        forward phase: F                            }
                        activations that F has just made travel     } likewise
                        backward phase: W, B
    ALONG       row t:  all messages made in row t-1 travel         } in flight together
                        F, W, B                                     }
    BETWEEN     row t:  all messages made in row t-1 travel
                        F, W, B

Gradients are awaited before B in UNDER, so that no F waits for one. A message made in row t can be used from row t+1
on, in ALONG from row t+2 on. BETWEEN is for devices that wait at a transfer's place in the program, where nothing can
lie over it: it is sent when sender and receiver have both done their ops. The last virtual stage makes its own
gradient, the loss's, in the forward phase of the row of its F.

With P stages and v chunks a stage, `Schedule.place` says which virtual stage a chunk is: in turn, chunk c of stage s is
virtual stage cP+s. Folded, a stage may get two messages of a kind in a row, one from each neighbor. At a fold a message
stays on its stage, and waits in a slot like others. Everything here is numpy; nothing knows of devices, bytes or
seconds.

`paxtrain.schedule.schedules` says which schedules there are, and builds their tables.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from compress.policy import epilogue_sends
from paxtrain.schedule.stage_map import StageMap, in_turn

IDLE = -1
UNDER, ALONG, BETWEEN = "under", "along", "between"
Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A table of the ops of every stage, row by row.

    Attributes:
        name: name of the schedule.
        stages: P.
        chunks: v, virtual stages per stage.
        micro_batches: m per data rank and step.
        forward: [rows, stages] micro-batch whose F a stage runs in that row, or IDLE.
        forward_chunk: [rows, stages] chunk whose F it runs; 0 if idle.
        backward: [rows, stages] micro-batch of B.
        backward_chunk: [rows, stages] chunk of B.
        weights: [rows, stages] micro-batch of W; all IDLE if B is whole.
        weights_chunk: [rows, stages] chunk of W.
        masked: idle stages compute on scrap, see paxtrain.schedule.schedules.ScheduleSpec.
        travel: UNDER, ALONG or BETWEEN, see above.
        first: micro-batches that have no op, the first ones: those that a data rank lacks, see `last_of`.
        place: (P, v) -> stages of all virtual stages.
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
    travel: str = UNDER
    first: int = 0
    place: Callable[[int, int], StageMap] = in_turn

    @property
    def stage_map(self) -> StageMap:
        """Stages of all virtual stages."""
        return self.place(self.stages, self.chunks)

    @property
    def activations_wait(self) -> int:
        """Return the rows from the F that makes an activation to its transfer."""
        return 0 if self.travel == UNDER else 1

    @property
    def rows(self) -> int:
        return len(self.forward)

    @property
    def virtual_stages(self) -> int:
        return self.stages * self.chunks

    @property
    def trains(self) -> bool:
        """There are backwards."""
        return bool((self.backward != IDLE).any())

    @property
    def splits(self) -> bool:
        """The backward is split into B and W."""
        return bool((self.weights != IDLE).any())

    def virtual_stage(self, stage: int, chunk: int) -> int:
        return int(self.stage_map.virtual_of[chunk, stage])

    def ops(self, phase: str) -> Iterable[tuple[int, int, int, int]]:
        """Yield (row, stage, micro-batch, chunk) of the ops of "forward", "backward" or "weights", in row order."""
        table, chunk = getattr(self, phase), getattr(self, phase + "_chunk")
        for row, stage in np.argwhere(table != IDLE):
            yield int(row), int(stage), int(table[row, stage]), int(chunk[row, stage])

    @functools.cached_property
    def row_of(self) -> dict[tuple[str, int, int], int]:
        """Row by (phase, virtual stage, micro-batch)."""
        return {
            (phase, self.virtual_stage(stage, chunk), mb): row
            for phase in ("forward", "backward", "weights")
            for row, stage, mb, chunk in self.ops(phase)
        }

    @functools.cached_property
    def last_rows(self) -> tuple[int, ...]:
        """Row of each stage's last op."""
        busy = (self.forward != IDLE) | (self.backward != IDLE) | (self.weights != IDLE)
        return tuple(int(np.flatnonzero(stage)[-1]) for stage in busy.T)

    @property
    def closing(self) -> tuple[int, ...]:
        """Stages whose gradients become final in the last row, if all of them run the same B or W; else ()."""
        last = {phase: np.flatnonzero(getattr(self, phase)[-1] != IDLE) for phase in ("forward", "backward", "weights")}
        ops = {(phase, chunk) for phase, s in last.items() for chunk in getattr(self, phase + "_chunk")[-1, s].tolist()}
        stages = {*last["backward"].tolist(), *last["weights"].tolist()}
        return tuple(sorted(stages)) if len(ops) == 1 else ()

    @functools.cached_property
    def activation_pairs(self) -> list[tuple[Pair, ...]]:
        """(Sender, receiver) stages, per row, of the activations that travel in it."""
        pairs: list[list[Pair]] = [[] for _ in range(self.rows)]
        for row, stage, _, chunk in self.ops("forward"):
            if (virtual := self.virtual_stage(stage, chunk)) < self.virtual_stages - 1:
                pairs[row + self.activations_wait].append((stage, self.stage_map.stage_of[virtual + 1]))
        return [tuple(p) for p in pairs]

    @functools.cached_property
    def gradient_pairs(self) -> list[tuple[Pair, ...]]:
        """(Sender, receiver) stages, per row, of the gradients that travel in it: the row after their B."""
        pairs: list[list[Pair]] = [[] for _ in range(self.rows)]
        for row, stage, _, chunk in self.ops("backward"):
            if (virtual := self.virtual_stage(stage, chunk)) > 0:
                pairs[row + 1].append((stage, self.stage_map.stage_of[virtual - 1]))
        return [tuple(p) for p in pairs]

    def last_of(self, count: int) -> "Schedule":
        """Return the rows with the ops of the last `count` micro-batches only.

        No op needs another micro-batch's, so what is left is a schedule, too.
        """
        first = self.micro_batches - count
        ops: dict[str, Any] = {}
        for phase in ("forward", "backward", "weights"):
            there, chunk = getattr(self, phase), getattr(self, phase + "_chunk")
            ops[phase], ops[phase + "_chunk"] = np.where(there < first, IDLE, there), np.where(there < first, 0, chunk)
        return dataclasses.replace(self, first=first, **ops)

    def epilogue(self) -> frozenset[tuple[int, int]]:
        """Return the gradients that epilogue-only compression compresses, as (sending virtual stage, micro-batch).

        They are those of the drain phase, whose transfer nothing hides: the last min(P-s, m) of stage s. With virtual
        stages they are those that a stage sends after its last F.

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
        """Return all gradients that travel between stages, as (sending virtual stage, micro-batch)."""
        return frozenset((q, mb) for q in range(1, self.virtual_stages) for mb in range(self.micro_batches))

    def gradients_on(self, gradients: frozenset[tuple[int, int]], links: Collection[int]) -> frozenset[tuple[int, int]]:
        """Return those of some gradients that cross some links.

        Args:
            gradients: (sending virtual stage, micro-batch) of each.
            links: numbers of links; s is between stages s and s + 1, and the last one, which only virtual stages use,
                between the last stage and the first.
        """
        return frozenset((q, mb) for q, mb in gradients if (q - 1) % self.stages in links)

    def messages(self) -> int:
        """Return how many messages cross a link per step: activations and gradients of all pairs of stages."""
        every = (*self.activation_pairs, *self.gradient_pairs)
        return sum(sender != receiver for pairs in every for sender, receiver in pairs)
