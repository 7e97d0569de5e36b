"""A schedule's table as the rows that simulators replay, and where they repeat."""

import dataclasses
import functools

import numpy as np

from paxtrain.schedule.schedules import build, spec_of
from paxtrain.schedule.stage_map import StageMap
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

    @functools.cached_property
    def stage_map(self) -> StageMap:
        """Stages of all virtual stages."""
        return spec_of(self.schedule).place(self.stages, self.chunks)

    def plan(self, overlap: bool) -> Schedule:
        """Return the schedule's table; see `paxtrain.schedule.schedules.build` for the argument."""
        made = build(self.schedule, self.stages, self.micro_batches, self.chunks, overlap)
        made = dataclasses.replace(made, masked=made.masked and not self.skips)
        return made.last_of(self.micro_batches - self.first) if self.first else made


Where = slice | Array  # indices of stages or of virtual stages
Ends = tuple[Where, Where]  # senders and receivers of messages


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
        plain: (senders, receivers) of gradients that travel as they are, to the stage before.
        packed: (senders, receivers) of compressed gradients.
        activations: (senders, receivers) of activations, to the next stage.
        travel: when messages travel, see `paxtrain.schedule.table`.
        plain_on: of gradients to the next stage, which folded schedules have.
        activations_back: of activations to the stage before, likewise.
    """

    forward: tuple[Where, Where] | None
    backward: tuple[Where, Where] | None
    weights: tuple[Where, Where] | None
    head: bool
    plain: Ends | None
    packed: Ends | None
    activations: Ends | None
    travel: str
    plain_on: Ends | None = None
    activations_back: Ends | None = None


RepeatedRows = tuple[tuple[Row, ...], int]  # rows, and how often they repeat


def _rows(schedule: Schedule, compressed: str, links: tuple[int, ...]) -> list[Row]:
    """Return the table's rows; those that are alike are one object.

    Args:
        schedule: table of ops.
        compressed: gradient messages that travel compressed, "none", "epilogue" or "all".
        links: links on which they do; empty: all.
    """
    stages, last, stage_map = np.arange(schedule.stages), schedule.virtual_stages - 1, schedule.stage_map
    f, b, w = (x != IDLE for x in (schedule.forward, schedule.backward, schedule.weights))
    chunks = schedule.forward_chunk, schedule.backward_chunk, schedule.weights_chunk
    f_virtual, b_virtual, w_virtual = (stage_map.virtual_of[x, stages] for x in chunks)
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
    sends_on, leaves_back = np.zeros_like(b), np.zeros_like(f)
    if stage_map.folded:  # odd chunks run the other way, and at a fold nothing travels
        leaves_back, leaves = _ways(leaves, f_virtual, stage_map, schedule.activations_wait, 1)
        sends, sends_on = _ways(sends, b_virtual, stage_map, 1, -1)
    parts = [f, f * f_virtual, b, b * b_virtual, w, w * w_virtual, sends, packed, leaves, masked]
    parts += [sends_on, leaves_back] if stage_map.folded else []
    signatures = np.concatenate(parts, axis=1).astype(np.int32)

    keys = [signature.tobytes() for signature in signatures]
    first: dict[bytes, int] = {}
    for t, key in enumerate(keys):
        first.setdefault(key, t)
    alike = stage_map, schedule.travel
    kinds: dict[bytes, Row] = {}
    for key, t in first.items():
        # Tables with other numbers of micro-batches have the same rows.
        if (alike, key) not in _KNOWN:
            scrap = bool(masked[t, 0])
            _KNOWN[alike, key] = Row(
                forward=_phase(f[t].tolist(), f_virtual[t].tolist(), scrap),
                backward=_phase(b[t].tolist(), b_virtual[t].tolist(), scrap),
                weights=_phase(w[t].tolist(), w_virtual[t].tolist(), scrap),
                head=bool(f[t, stage_map.last] and f_virtual[t, stage_map.last] == last),
                plain=_ends((sends[t] & ~packed[t]).tolist(), -1),
                packed=_ends(packed[t].tolist(), -1),
                activations=_ends(leaves[t].tolist(), 1),
                travel=schedule.travel,
                plain_on=_ends(sends_on[t].tolist(), 1),
                activations_back=_ends(leaves_back[t].tolist(), -1),
            )
        kinds[key] = _KNOWN[alike, key]
    return [kinds[key] for key in keys]


_KNOWN: dict[tuple, Row] = {}  # rows by stage map, travel and signature


def _ways(sends: Array, virtual: Array, stage_map: StageMap, wait: int, step: int) -> tuple[Array, Array]:
    """Return which stages [rows, P] send to the stage before, and which to the next one.

    Args:
        sends: [rows, P], stages whose message leaves.
        virtual: [rows, P], virtual stage that a stage runs.
        stage_map: stages of all virtual stages.
        wait: rows from the op that makes a message to the one in which it leaves.
        step: 1 for activations, -1 for gradients.
    """
    stage_of = np.array(stage_map.stage_of)
    by = np.concatenate([virtual[:1]] * wait + [virtual[: len(virtual) - wait]])
    moves = stage_of[(by + step) % len(stage_of)] - stage_of[by]
    return sends & (moves < 0), sends & (moves > 0)


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

    Of folded schedules the first two are messages to the next stage and to the one before.

    Args:
        table: schedule.
        overlap: see `paxtrain.schedule.schedules.build`.
    """
    found = np.zeros((3, table.stages), int)
    for rows, times in runs(table, overlap):
        for row in rows:
            every = (row.activations, row.plain, row.packed, row.plain_on, row.activations_back)
            for kind, ends in enumerate(every):
                if ends is not None:
                    found[kind % 3, ends[0]] += times
    return found[0], found[1], found[2]
