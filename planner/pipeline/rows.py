"""A schedule's table as the rows that simulators replay, and where they repeat."""

import dataclasses
import functools

import numpy as np

from paxtrain.schedule.schedules import build, spec_of
from paxtrain.schedule.table import IDLE, Schedule

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule's table to replay, and which of its gradient messages travel compressed.

    Attributes:
        schedule: its name, see `paxtrain.schedule.schedules.spec_of`.
        stages: P.
        micro_batches: m.
        chunks: v.
        compressed: "none", "epilogue" or "all".
        links: links on which they do; empty: all. See `paxtrain.schedule.table.Schedule.gradients_on`.
        first: micro-batches without ops, the first ones: those that a data rank lacks (paxtrain.schedule.uneven).
        skips: idle stages skip, although the schedule is masked.
    """

    schedule: str
    stages: int
    micro_batches: int
    chunks: int = 1
    compressed: str = "none"
    links: tuple[int, ...] = ()
    first: int = 0
    skips: bool = False

    def plan(self, overlap: bool) -> Schedule:
        """Return the schedule's table; see `paxtrain.schedule.schedules.build` for the argument."""
        made = build(self.schedule, self.stages, self.micro_batches, self.chunks, overlap)
        made = dataclasses.replace(made, masked=made.masked and not self.skips)
        return made.last_of(self.micro_batches - self.first) if self.first else made


Where = slice | Array  # indices of stages or of virtual stages


def _where(every: list[int]) -> Where:
    """Return indices, as a slice if they are evenly spaced: a slice of an array is a view, not a copy."""
    step = every[1] - every[0] if len(every) > 1 else 1
    if step < 1 or every != list(range(every[0], every[-1] + 1, step)):
        return np.array(every)
    return slice(every[0], every[-1] + 1, step)


def numbers(where: Where) -> list[int]:
    """Return the stages as numbers."""
    return list(range(where.start, where.stop, where.step)) if isinstance(where, slice) else where.tolist()


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """One kind of row; what does not happen in it is None.

    Attributes:
        forward: (stages, virtual stages) that run F, including idle ones that compute on scrap.
        backward: (stages, virtual stages) that run B.
        weights: (stages, virtual stages) that run W.
        head: the last virtual stage runs F.
        plain: (senders, receivers) of gradients that travel as they are.
        packed: (senders, receivers) of compressed gradients.
        activations: (senders, receivers) of activations.
        travel: when messages travel, see `paxtrain.schedule.table`.
    """

    forward: tuple[Where, Where] | None
    backward: tuple[Where, Where] | None
    weights: tuple[Where, Where] | None
    head: bool
    plain: tuple[Where, Where] | None
    packed: tuple[Where, Where] | None
    activations: tuple[Where, Where] | None
    travel: str


RepeatedRows = tuple[tuple[Row, ...], int]  # rows, and how often they repeat


def _rows(schedule: Schedule, compressed: str, links: tuple[int, ...]) -> list[Row]:
    """Return the table's rows; those that are alike are one object.

    Args:
        schedule: table of ops.
        compressed: gradient messages that travel compressed, "none", "epilogue" or "all".
        links: links on which they do; empty: all.
    """
    stages, last = np.arange(schedule.stages), schedule.virtual_stages - 1
    f, b, w = (x != IDLE for x in (schedule.forward, schedule.backward, schedule.weights))
    chunks = schedule.forward_chunk, schedule.backward_chunk, schedule.weights_chunk
    f_virtual, b_virtual, w_virtual = (x * schedule.stages + stages for x in chunks)
    # Before a row travels what the B of the row before has made.
    sends, packed = np.zeros_like(b), np.zeros_like(b)
    sends[1:] = (b & (b_virtual > 0))[:-1]
    leaves = f & (f_virtual < last)
    if schedule.activations_wait:
        leaves = np.concatenate([np.zeros_like(leaves[:1]), leaves[:-1]])
    if compressed != "none":
        chosen = {"epilogue": schedule.epilogue, "all": schedule.gradient_messages}[compressed]()
        chosen = schedule.gradients_on(chosen, links) if links else chosen
        among = np.zeros((last + 1, schedule.backward.max() + 1), bool)  # by virtual stage and micro-batch
        among[tuple(np.array(sorted(chosen), int).reshape(-1, 2).T)] = True
        packed[1:] = sends[1:] & among[b_virtual[:-1], schedule.backward[:-1]]
    # Once some stage is done, idle stages skip (RowKind.tail).
    masked = schedule.masked & (np.arange(schedule.rows) <= min(schedule.last_rows))[:, None]
    parts = [f, f * f_virtual, b, b * b_virtual, w, w * w_virtual, sends, packed, leaves, masked]
    signatures = np.concatenate(parts, axis=1).astype(np.int32)

    keys = [signature.tobytes() for signature in signatures]
    first: dict[bytes, int] = {}
    for t, key in enumerate(keys):
        first.setdefault(key, t)
    alike = schedule.stages, schedule.chunks, schedule.travel
    kinds: dict[bytes, Row] = {}
    for key, t in first.items():
        # Tables with other numbers of micro-batches have the same rows.
        if (alike, key) not in _KNOWN:
            scrap = bool(masked[t, 0])
            _KNOWN[alike, key] = Row(
                forward=_phase(f[t].tolist(), f_virtual[t].tolist(), scrap),
                backward=_phase(b[t].tolist(), b_virtual[t].tolist(), scrap),
                weights=_phase(w[t].tolist(), w_virtual[t].tolist(), scrap),
                head=bool(f[t, -1] and f_virtual[t, -1] == last),
                plain=_ends((sends[t] & ~packed[t]).tolist(), -1),
                packed=_ends(packed[t].tolist(), -1),
                activations=_ends(leaves[t].tolist(), 1),
                travel=schedule.travel,
            )
        kinds[key] = _KNOWN[alike, key]
    return [kinds[key] for key in keys]


_KNOWN: dict[tuple, Row] = {}  # rows by stages, chunks, travel and signature


def _phase(busy: list[bool], virtual: list[int], masked: bool) -> tuple[Where, Where] | None:
    """Return the stages and virtual stages that run a phase; None if none does.

    Args:
        busy: [P], stages with an op.
        virtual: [P], virtual stage of the op.
        masked: idle stages compute on scrap.
    """
    if True not in busy:
        return None
    stages = [stage for stage, works in enumerate(busy) if works or masked]
    return _where(stages), _where([virtual[stage] for stage in stages])


def _ends(senders: list[bool], step: int) -> tuple[Where, Where] | None:
    """Return senders and receivers of messages; None if there are none.

    Args:
        senders: [P].
        step: 1 for messages to the next stage, -1 to the previous one.
    """
    if True not in senders:
        return None
    where = [stage for stage, sends in enumerate(senders) if sends]
    return _where(where), _where([(stage + step) % len(senders) for stage in where])


def _runs(rows: list[Row], longest: int) -> list[RepeatedRows]:
    """Return stretches of rows that repeat, each as long as it gets from the end of the one before."""
    values, found, t = np.array([id(row) for row in rows]), [], 0
    while t < len(rows):
        best = (1, 1)
        most = min(longest, (len(rows) - t) // 2)
        for period in (np.flatnonzero(values[t + 1 : t + 1 + most] == values[t]) + 1).tolist():
            same = values[t + period :] == values[t:-period]
            repeats = 1 + (len(same) if same.all() else int(np.argmin(same))) // period
            if repeats > 1 and period * repeats > best[0] * best[1]:
                best = (period, repeats)
        found.append((tuple(rows[t : t + best[0]]), best[1]))
        t += best[0] * best[1]
    return found


@functools.lru_cache(maxsize=1024)
def _few(table: Table, overlap: bool) -> list[RepeatedRows]:
    schedule = table.plan(overlap)
    return _runs(_rows(schedule, table.compressed, table.links), longest=3 * schedule.virtual_stages)


@functools.lru_cache(maxsize=4096)
def runs(table: Table, overlap: bool = True) -> list[RepeatedRows]:
    """Return the table's rows as stretches that repeat.

    Many micro-batches only repeat the steady rows of few, so no larger table is built.

    Args:
        table: schedule.
        overlap: see `paxtrain.schedule.schedules.build`.
    """
    spec = spec_of(table.schedule)
    step = table.stages if spec.interleaves else 1
    if spec.order == "alternating" and overlap:
        step = spec.repeats(table.stages)
    # So many that some stage has rows in which everything steady happens, whatever is left over.
    settled = -(-spec.settles * table.stages // step) * step
    # Of the rows that a data rank skips none takes time: the others need only begin among steady ones.
    first = min(table.first, settled + table.first % step)
    own = table.micro_batches - table.first
    few = settled + own % step

    def make(m: int) -> list[RepeatedRows]:
        return _few(dataclasses.replace(table, micro_batches=first + m, first=first), overlap)

    if own <= few + step:
        return make(own)
    less, more = make(few), make(few + step)
    if len(less) != len(more):
        raise ValueError(f"{table.schedule} is not steady from {few} micro-batches on: its spec's settles is too small")
    times = (own - few) // step
    return [(rows, a + times * (b - a)) for (rows, a), (_, b) in zip(less, more, strict=True)]


def messages(table: Table, overlap: bool = True) -> tuple[Array, Array, Array]:
    """Return how many activations, gradients as they are and compressed gradients each stage sends, int [P] of each.

    Args:
        table: schedule.
        overlap: see `paxtrain.schedule.schedules.build`.
    """
    found = np.zeros((3, table.stages), int)
    for rows, times in runs(table, overlap):
        for row in rows:
            for kind, ends in enumerate((row.activations, row.plain, row.packed)):
                if ends is not None:
                    found[kind, ends[0]] += times
    return found[0], found[1], found[2]
