"""The times that a schedule allows: each op begins as soon as its stage is free and its message has arrived.

A message begins when it is made, holds no stage, and waits for no other message. Systems with separate transfer calls,
such as Megatron-LM, come close to this model, and this module models trials of them. The executor's rows let a stage
also wait for what it sends (planner.pipeline.simulator). This module shows that they cost nothing as long as a transfer
is no longer than the op that it lies under.
"""

import collections

import numpy as np

from planner.pipeline import simulator
from planner.pipeline.repetition import EQUAL
from planner.pipeline.rows import Row, Table, numbers, runs
from planner.pipeline.simulator import Arranged, Event, Seconds

Array = np.ndarray
Inbox = collections.deque[Array]  # arrival times [batch] of a virtual stage's messages


class _StageClocks:
    """Times at which stages are free, [P] arrays [batch], and messages on their way, by receiving virtual stage."""

    def __init__(self, table: Table, seconds: Arranged, events: list[Event] | None = None) -> None:
        self.events = events
        self.seconds, self.last = seconds, table.stages * table.chunks - 1
        self.stage_of = table.stage_map.stage_of
        self.now = list(self.seconds.start.copy())
        self.activations: list[Inbox] = [collections.deque() for _ in range(self.last + 1)]
        self.gradients: list[Inbox] = [collections.deque() for _ in range(self.last + 1)]

    def row(self, row: Row) -> None:
        """Run all ops of a row; messages are used from the next row on, except the gradient that the loss makes."""
        s, made = self.seconds, []
        for stage, virtual in zip(*map(numbers, row.forward)) if row.forward else ():
            begin = self.now[stage]
            if virtual:
                begin = np.maximum(begin, self.activations[virtual].popleft())
            end = self.now[stage] = begin + s.forward[virtual]
            self._record("F", stage, virtual, begin, end)
            if virtual < self.last:
                made.append((self.activations[virtual + 1], self._arrival(virtual, virtual + 1, s.activation)))
            else:
                self.now[stage] = end + s.head
                self._record("H", stage, virtual, end, self.now[stage])
                self.gradients[virtual].append(self.now[stage])
        for stage, virtual in zip(*map(numbers, row.backward)) if row.backward else ():
            begin = np.maximum(self.now[stage], self.gradients[virtual].popleft())
            self.now[stage] = begin + s.backward[virtual]
            self._record("B", stage, virtual, begin, self.now[stage])
            if virtual:
                made.append((self.gradients[virtual - 1], self._arrival(virtual, virtual - 1, s.gradient)))
        for stage, virtual in zip(*map(numbers, row.weights)) if row.weights else ():
            begin = self.now[stage]
            self.now[stage] = begin + s.weights[virtual]
            self._record("W", stage, virtual, begin, self.now[stage])
        for inbox, arrival in made:
            inbox.append(arrival)

    def _arrival(self, virtual: int, to: int, seconds: Array) -> Array:
        """Return when a message that leaves now reaches another virtual stage; at a fold that is on the same stage."""
        stage = self.stage_of[virtual]
        if self.stage_of[to] == stage:
            return self.now[stage]
        end = self.now[stage] + seconds[stage]
        self._record("activation" if to > virtual else "gradient", stage, -1, self.now[stage], end)
        return end

    def _record(self, what: str, stage: int, virtual: int, begin: Array, end: Array) -> None:
        """Record an op or a message of the first pipeline, if events are asked for."""
        if self.events is not None:
            self.events.append(Event(what, stage, virtual, float(begin[0]), float(end[0])))

    def waiting(self) -> list[Array]:
        """Return when each message arrives: what the next rows depend on besides the stages' times."""
        return [x for inbox in (*self.activations, *self.gradients) for x in inbox]

    def shift(self, moved: Array) -> None:
        """Move all of it in time."""
        self.now = [x + moved for x in self.now]
        for inbox in (*self.activations, *self.gradients):
            for i in range(len(inbox)):
                inbox[i] = inbox[i] + moved


def timeline(table: Table, seconds: Seconds) -> list[Event]:
    """Return all events of one candidate's pipeline.

    Args:
        table: schedule to replay.
        seconds: durations of one candidate.
    """
    events: list[Event] = []
    state = _StageClocks(table, simulator.spread(table, seconds), events)
    for rows, repeats in runs(table, overlap=False):
        for row in (*rows,) * repeats:
            state.row(row)
    return events


def pipeline(table: Table, seconds: Seconds, overlap: bool = True) -> Array:
    """Return the seconds [batch, P] at which each stage has done its last op.

    Compressed messages are not modeled: systems that are compared this way have none.

    Args:
        table: schedule to replay.
        seconds: durations of a batch of candidates.
        overlap: not read, since transfers hold no stage.
    """
    different, which = simulator.distinct(simulator.spread(table, seconds))  # data ranks are often alike
    state = _StageClocks(table, different)
    for rows, repeats in runs(table, overlap=False):
        for done in range(1, repeats + 1):
            now, messages = np.array(state.now), state.waiting()
            for row in rows:
                state.row(row)
            if done == repeats:
                break
            moved, close = np.array(state.now) - now, EQUAL * np.max(state.now, axis=0)
            if np.any(np.ptp(moved, axis=0) > close) or len(messages) != len(after := state.waiting()):
                continue
            if all(np.all(np.abs(b - a - moved[0]) <= close) for a, b in zip(messages, after)):
                state.shift((repeats - done) * moved[0])
                break
    return np.array(state.now).T[which]
