"""The event simulator: the executor's time for a schedule's table, for a batch of candidates at once.

It replays, row by row, what `paxtrain.pipeline.executor.Rows` does on every stage, with messages that travel as the
table says (`Schedule.travel`). A transfer starts when both of its ends have reached it: a GPU's send waits until its
receive is posted, and so does gloo's on CPUs. The backends differ in what waits for the end of a transfer:

    overlap (GPU)     Gradients lie under F and W, and both ends await them before B. Activations lie under W and B, and
                      both ends await them at the end of the row. In rows ALONG which messages travel (gpipe), both ends
                      await all of them at the end. The gradient and the activation that a stage sends in a row share
                      its NIC, as do those that it gets, and the row lasts until the bytes of both are through.
    blocking (CPU)    The receiver waits for a transfer at its place in the compiled program. The sender waits only for
                      its start, because the socket takes the message at once. Messages that travel BETWEEN rows come
                      before the ops: gradients, then activations. In other rows plain gradients come before F,
                      activations behind it, and compressed gradients behind the loss, which follows F.

All of this is maxima and sums, so the result is monotone in every duration, and what is added to the state of all
stages is added to the result. So the steady part costs a few repetitions of its rows, whatever the number of
micro-batches (planner.pipeline.repetition).

References:
    Pipette (Yim et al., DATE 2024) for the transfers that 1F1B exposes. Max-plus linear systems: Baccelli et al.,
    Synchronization and Linearity (1992).
"""

import copy
import dataclasses
import hashlib
from collections.abc import Callable

import numpy as np

from paxtrain.schedule.table import ALONG, BETWEEN
from planner.pipeline.repetition import repeat
from planner.pipeline.rows import RepeatedRows, Row, Table, Where, numbers, runs

Array = np.ndarray

_FEW = 3  # repetitions of rows that are simply replayed


@dataclasses.dataclass(frozen=True, eq=False)
class Seconds:
    """Durations of a batch of candidates that run the same table; arrays [batch, ...] or without the batch dim.

    Attributes:
        forward: [batch, virtual stages] of F of one micro-batch, in the order of the model.
        backward: [batch, virtual stages] of B.
        activation: [batch, P] of the message with which stage s sends activations, to (s+1) mod P.
        gradient: [batch, P] of the message with which stage s sends gradients, to (s-1) mod P. Folded schedules, whose
            messages are as large both ways, send gradients like activations where these go to the next stage, too.
        head: [batch] of the loss and its gradient, in the forward phase of the last virtual stage.
        start: [batch, P] time at which each stage comes to its first row.
        packed: [batch, P] of a gradient message that travels compressed.
        encode: [batch, P] of a stage's compute to send a compressed message.
        decode: [batch, P] of a stage's compute to receive one.
        weights: [batch, virtual stages] of W, if the schedule has W.
    """

    forward: Array
    backward: Array
    activation: Array | float = 0.0
    gradient: Array | float = 0.0
    head: Array | float = 0.0
    start: Array | float = 0.0
    packed: Array | float = 0.0
    encode: Array | float = 0.0
    decode: Array | float = 0.0
    weights: Array | float = 0.0


@dataclasses.dataclass(frozen=True, eq=False)
class Arranged(Seconds):
    """Durations as `spread` arranges them: every one is an array, batch last."""

    activation: Array
    gradient: Array
    head: Array
    start: Array
    packed: Array
    encode: Array
    decode: Array
    weights: Array


def take(seconds: Seconds, where: Array | slice) -> Seconds:
    """Return the durations of some candidates of a batch."""
    given = {field.name: getattr(seconds, field.name) for field in dataclasses.fields(seconds)}
    return Seconds(**{name: x[where] if np.ndim(x) else x for name, x in given.items()})


def concatenate(parts: list[Seconds]) -> Seconds:
    """Return one batch of several, whose forward and backward are [batch, virtual stages]."""

    def spread(name: str, part: Seconds) -> Array:
        value, batch = np.asarray(getattr(part, name), float), len(part.forward)
        if value.ndim and len(value) == batch:
            return value
        inner = max((np.shape(getattr(other, name))[1:] for other in parts), key=len)
        return np.broadcast_to(value, (batch, *inner))

    names = [field.name for field in dataclasses.fields(Seconds)]
    constant = {name: getattr(parts[0], name) for name in names if all(np.ndim(getattr(p, name)) == 0 for p in parts)}
    arrays = {name: np.concatenate([spread(name, p) for p in parts]) for name in names if name not in constant}
    return Seconds(**constant, **arrays)


def spread(table: Table, seconds: Seconds) -> Arranged:
    """Return the durations as contiguous arrays, batch last: [virtual stages, batch], [P, batch], head [batch]."""
    virtual = table.stages * table.chunks
    sizes = {"forward": virtual, "backward": virtual, "weights": virtual, "head": None}
    given = {field.name: np.asarray(getattr(seconds, field.name), float) for field in dataclasses.fields(seconds)}
    batch = max(len(x) if x.ndim == 1 + (name != "head") else 1 for name, x in given.items())

    def arranged(name: str, x: Array) -> Array:
        size = sizes.get(name, table.stages)
        shape = (batch,) if size is None else (batch, size)
        return np.ascontiguousarray(np.broadcast_to(x, shape).T)

    return Arranged(**{name: arranged(name, x) for name, x in given.items()})


Times = tuple[Array, Array]  # of the senders and of the receivers
Free = tuple[Array, Array]  # when stages can send and receive, [P, batch]
OpRecorder = Callable[[str, Where, Array, Array], None]  # what, stages, their begin and end [stages, batch]


class _Replay:
    """State of all stages of all candidates: `now` [P, batch]."""

    def __init__(self, seconds: Arranged, table: Table, overlap: bool, record: OpRecorder | None) -> None:
        self.seconds = seconds  # batch last
        self.last = table.stage_map.last  # stage of the loss
        self.now = self.seconds.start.copy()
        self.overlap, self.record = overlap, record

    def narrow(self, where: Array) -> "_Replay":
        """Return the stages of some candidates of the batch, bool [batch]."""
        other = copy.copy(self)
        parts = {
            f.name: np.compress(where, getattr(self.seconds, f.name), axis=-1) for f in dataclasses.fields(Seconds)
        }
        other.seconds, other.now = Arranged(**parts), np.compress(where, self.now, axis=-1)
        return other

    def _message(self, ends: tuple[Where, Where], seconds: Array, what: str, free: Free | None = None) -> Times:
        """Return the time until which each end of messages that begin now waits, per pair.

        Args:
            ends: senders and receivers.
            seconds: [P, batch] of the messages.
            what: name of the messages for the recorder.
            free: when each stage can send, and when it can receive; None: at once.
        """
        senders, receivers = ends
        begin = np.maximum(self.now[senders], self.now[receivers])
        if free is not None:
            begin = np.maximum(begin, np.maximum(free[0][senders], free[1][receivers]))
        done = begin + seconds[senders]
        if self.record:
            self.record(what, senders, begin, done)
        return (done if self.overlap else begin), done

    def _wait(self, ends: tuple[Where, Where], until: Times) -> None:
        for end, time in zip(ends, until):  # a stage may be at both ends, of two messages
            if isinstance(end, slice):
                state = self.now[end]
                np.maximum(state, time, out=state)
            else:
                self.now[end] = np.maximum(self.now[end], time)

    def _compute(self, what: str, where: tuple[Where, Where], seconds: Array) -> None:
        stages, virtual = where
        if not self.record:
            self._add(stages, seconds[virtual])
            return
        begin = self.now[stages].copy()
        self._add(stages, seconds[virtual])
        self.record(what, virtual, begin, self.now[stages].copy())

    def _add(self, stages: Where, seconds: Array) -> None:
        if isinstance(stages, slice):
            state = self.now[stages]
            np.add(state, seconds, out=state)
        else:
            self.now[stages] += seconds

    def _forward(self, row: Row) -> None:
        if row.forward:
            self._compute("F", row.forward, self.seconds.forward)

    def _head(self, row: Row) -> None:
        if row.head:
            begin = self.now[self.last].copy()
            self.now[self.last] += self.seconds.head
            if self.record:
                self.record(
                    "H",
                    slice(len(self.seconds.forward) - 1, len(self.seconds.forward), 1),
                    begin[None],
                    self.now[self.last][None].copy(),
                )

    def _backward(self, row: Row) -> None:
        if row.backward:
            self._compute("B", row.backward, self.seconds.backward)

    def _weights(self, row: Row) -> None:
        if row.weights:
            self._compute("W", row.weights, self.seconds.weights)

    def _encode(self, row: Row) -> None:
        if row.packed:
            self._add(row.packed[0], self.seconds.encode[row.packed[0]])

    def _decode(self, row: Row) -> None:
        if row.packed:
            self._add(row.packed[1], self.seconds.decode[row.packed[1]])

    def _gradients(self, row: Row) -> list[tuple[tuple[Where, Where], Times]]:
        """Return the gradient messages as (ends, times until which they wait)."""
        found = []
        if row.plain:
            found.append((row.plain, self._message(row.plain, self.seconds.gradient, "gradient")))
        if row.packed:
            found.append((row.packed, self._message(row.packed, self.seconds.packed, "gradient")))
        if row.plain_on:
            found.append((row.plain_on, self._message(row.plain_on, self.seconds.activation, "activation")))
        return found

    def _activations(self, row: Row, free: Free | None = None) -> list[tuple[tuple[Where, Where], Times]]:
        """Return the messages with activations, likewise."""
        found = []
        if row.activations:
            found.append((row.activations, self._message(row.activations, self.seconds.activation, "activation", free)))
        if row.activations_back:
            ends = row.activations_back
            found.append((ends, self._message(ends, self.seconds.gradient, "gradient", free)))
        return found

    def _free(self, row: Row) -> Free | None:
        """Return when the gradients of a row that begins now will have left each stage's NIC, and come in by it.

        None if no activations follow. What a stage waits for at the other end leaves its NIC free.
        """
        s = self.seconds
        if not (row.activations or row.activations_back) or not (row.plain or row.packed or row.plain_on):
            return None
        sends, gets = self.now.copy(), self.now.copy()
        for ends, seconds in ((row.plain, s.gradient), (row.packed, s.packed), (row.plain_on, s.activation)):
            if ends:
                sends[ends[0]] += seconds[ends[0]]
                gets[ends[1]] += seconds[ends[0]]
        return sends, gets

    def _overlapped(self, rows: tuple[Row, ...]) -> None:
        for row in rows:
            self._encode(row)
            free, later, along = self._free(row), self._gradients(row), row.travel == ALONG
            sent = self._activations(row, free) if along else []
            self._forward(row)
            self._head(row)
            if not along:
                sent = self._activations(row, free)
            self._weights(row)
            if along:
                self._backward(row)
            for ends, until in later:
                self._wait(ends, until)
            self._decode(row)
            if not along:
                self._backward(row)
            for ends, until in sent:
                self._wait(ends, until)

    def _receive(self, ends: tuple[Where, Where] | None, seconds: Array, what: str) -> None:
        if ends:
            self._wait(ends, self._message(ends, seconds, what))

    def _blocking(self, rows: tuple[Row, ...]) -> None:
        """Run rows in the order that the module's docstring tells."""
        s = self.seconds
        for row in rows:
            first = row.travel == BETWEEN
            self._encode(row)
            self._receive(row.plain, s.gradient, "gradient")
            self._receive(row.plain_on, s.activation, "activation")
            if first:
                self._receive(row.packed, s.packed, "gradient")
                self._decode(row)
                self._receive(row.activations, s.activation, "activation")
                self._receive(row.activations_back, s.gradient, "gradient")
            self._forward(row)
            if not first:
                self._receive(row.activations, s.activation, "activation")
                self._receive(row.activations_back, s.gradient, "gradient")
            self._head(row)
            if not first:
                self._receive(row.packed, s.packed, "gradient")
                self._decode(row)
            self._weights(row)
            self._backward(row)

    def replay(self, rows: tuple[Row, ...]) -> None:
        """Run rows once."""
        (self._overlapped if self.overlap else self._blocking)(rows)

    def run(self, stretches: list[RepeatedRows], rough: bool = False) -> Array:
        for rows, repeats in stretches:
            if self.record or repeats <= _FEW:
                for _ in range(repeats):
                    self.replay(rows)
            else:
                self.now = repeat(self, rows, repeats, rough)
        return self.now.T


def pipeline(table: Table, seconds: Seconds, overlap: bool = True, rough: bool = False) -> Array:
    """Return the seconds [batch, P] at which each stage leaves its last row.

    Args:
        table: schedule to replay.
        seconds: durations of a batch of candidates.
        overlap: transfers run beside compute, as on GPUs; False: receivers wait for them, as on the CPU backend.
        rough: take stages that are not in step after a few repetitions to go on at the pace of the slowest of them.
    """
    arranged, which = distinct(spread(table, seconds))
    names = tuple(f.name for f in dataclasses.fields(Seconds) if getattr(arranged, f.name).any())
    keys = _keys([getattr(arranged, name) for name in names])
    known = _KNOWN.setdefault((table, overlap, rough, names), {})
    new: dict[bytes, int] = {}
    for i, key in enumerate(keys):
        if key not in known and key not in new:
            new[key] = i
    if new:
        if len(new) < len(keys):
            arranged = _some(arranged, list(new.values()))
        times = _Replay(arranged, table, overlap, None).run(runs(table, overlap=overlap), rough)
        known |= zip(new, times)
    found = np.array([known[key] for key in keys])[which]
    if sum(map(len, _KNOWN.values())) * table.stages > _REMEMBERED:
        _KNOWN.clear()
    return found


def _some(arranged: Arranged, which: list[int]) -> Arranged:
    return Arranged(**{f.name: getattr(arranged, f.name).take(which, axis=-1) for f in dataclasses.fields(Seconds)})


def distinct(arranged: Arranged) -> tuple[Arranged, Array]:
    """Return those candidates of a batch whose durations differ, and for each candidate of the batch which it is."""
    durations = np.concatenate([np.atleast_2d(getattr(arranged, f.name)) for f in dataclasses.fields(Seconds)])
    # A fingerprint is a sum of each column's numbers, whose bits are mixed (as MurmurHash3 does), by random weights.
    bits = np.ascontiguousarray(durations, float).view(np.uint64)
    for shift, times in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(times)
    weights = np.random.default_rng(0).integers(0, 2**64, len(bits), np.uint64) | np.uint64(1)
    _, first, which = np.unique(weights @ bits, return_index=True, return_inverse=True)
    return _some(arranged, first.tolist()), which


# Times [P] of pipelines that were replayed, by table, by the names of the durations that are not 0, and by these.
# Placements differ in few links, data ranks on the same hosts in none, and plans that compress gradients over data not
# before the reduction.
_KNOWN: dict[tuple[Table, bool, bool, tuple[str, ...]], dict[bytes, Array]] = {}
_REMEMBERED = 4_000_000  # times, at most


def _keys(durations: list[Array]) -> list[bytes]:
    """Return a fingerprint of each candidate's durations, which are [..., batch]; equal ones have equal durations."""
    columns = np.concatenate([np.atleast_2d(x) for x in durations]).T
    data, size = memoryview(columns.tobytes()), columns.shape[1] * columns.itemsize
    return [hashlib.blake2b(data[at : at + size], digest_size=16).digest() for at in range(0, len(data), size)]


@dataclasses.dataclass(frozen=True)
class Event:
    """One operation of one stage, from `begin` to `end` in seconds.

    Attributes:
        what: "F", "B", "W", "H" (loss), "activation" or "gradient" (sent by that stage to the next one or to the one
            before; folded schedules send both kinds both ways, and the way names them).
        stage: stage of the pipeline.
        virtual_stage: virtual stage of an F, B, W or H, else -1.
        begin: seconds.
        end: seconds.
    """

    what: str
    stage: int
    virtual_stage: int
    begin: float
    end: float


def timeline(table: Table, seconds: Seconds, overlap: bool = True) -> list[Event]:
    """Return all events of one candidate's pipeline in program order, including scrap that idle stages compute.

    Args:
        table: schedule to replay.
        seconds: durations of one candidate.
        overlap: see `pipeline`.
    """
    events: list[Event] = []

    def record(what: str, where: Where, begin: Array, end: Array) -> None:
        for place, b, e in zip(numbers(where), begin[:, 0].tolist(), end[:, 0].tolist()):
            computes = what in ("F", "B", "W", "H")
            stage = table.stage_map.stage_of[place] if computes else place
            events.append(Event(what, stage, place if computes else -1, b, e))

    _Replay(spread(table, seconds), table, overlap, record).run(runs(table, overlap=overlap))
    return events
