"""The pipeline schedules: what each one is, in one place that everything else reads.

A new schedule is a function that makes its ops, a `ScheduleSpec` in `SPECS`, and its tests (see
`tests/test_new_schedule.py`). The planner tries it by default unless it splits the backward, and `make gpu` measures
it. A phase or an order beyond these needs changes in the table, the executor and the simulator. The configuration, the
executor, the planner's simulator, its memory model, its search and its bounds read their facts from here.

References:
    GPipe: Huang et al. 2019. 1F1B: Narayanan et al. 2019 (PipeDream-Flush, 2021). Interleaved: Narayanan et al. 2021
    (Megatron-LM). Eager 1F1B, with twice the warm-up so that transfers hide under compute: Zhuang et al. 2023. ZB-H1:
    Qi et al. 2023, Zero Bubble Pipeline Parallelism. ZB-V: Qi et al. 2024, Pipeline Parallelism with Controllable
    Memory; its order of ops is that of Zero Bubble's section 6, as PyTorch's ScheduleZBVZeroBubble has it. DualPipeV:
    DeepSeek-AI 2024, DeepSeek-V3, and https://github.com/deepseek-ai/DualPipe, cut in half as in PyTorch's
    ScheduleDualPipeV.
"""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from paxtrain.errors import whole
from paxtrain.schedule import buffers, proof, table_file
from paxtrain.schedule.row_layout import Op, Ops, closed_form, lay_out, warm_up_then_alternate
from paxtrain.schedule.stage_map import StageMap, folded, in_turn
from paxtrain.schedule.table import ALONG, BETWEEN, IDLE, UNDER, Schedule

Numbers: TypeAlias = float | np.ndarray  # a number, or an array of them

ORDERS = ("paired", "alternating", "forwards_first")


@dataclasses.dataclass(frozen=True)
class ScheduleSpec:
    """A schedule's facts. P stages, v chunks of layers per stage, m micro-batches; functions take numbers or arrays.

    Attributes:
        ops: (P, v, m, overlap) -> the ops of its table, for devices on which transfers run beside compute (overlap)
            or block it.
        order: what a stage does in the steady part, from which `travel` follows. "paired": an F and a B in each row,
            with transfers under them. "alternating": an F and a B in turn. "forwards_first": all F, then all B.
        in_flight: (stage, P, v, m) -> micro-batches, of all chunks, between F and the last op that needs what F kept.
        activation_slots: slots at most of the ring of activations that wait for F; 0 if each is used at once.
        gradient_slots: (P, m) -> slots at most of the ring of gradients that wait for B, without counting the scrap
            slot.
        masked: idle stages may compute on scrap while others compute, so that rows need no branch. That costs no time
            if all busy stages of a phase do the same and no message waits for a row; see `masks`.
        splits: the backward runs as B, for the chunk's input, and W, for the weights.
        interleaves: stages hold several chunks of layers; micro-batches come in groups of P.
        settles: multiples of P micro-batches from which on further ones only repeat rows.
        repeats: P -> micro-batches after which rows of an alternating schedule repeat, if transfers overlap.
        size: (P, v, m) of a schedule that a file has for these numbers only; otherwise None.
        in_flight_first: micro-batches in flight on the first stage, if that is a choice; otherwise 0.
        place: (P, v) -> stages of all virtual stages.
        most_chunks: chunks per stage at most, if the schedule interleaves; 0: any number.
        common: the trainers that plans are made for (planner/runs/trainers.py) run it, too.
    """

    ops: Callable[[int, int, int, bool], Ops]
    order: str
    in_flight: Callable[[Numbers, Numbers, Numbers, Numbers], Numbers]
    activation_slots: int
    gradient_slots: Callable[[Numbers, Numbers], Numbers]
    masked: bool = False
    common: bool = False
    splits: bool = False
    interleaves: bool = False
    settles: int = 2
    repeats: Callable[[int], int] = lambda p: p
    size: tuple[int, int, int] | None = None
    in_flight_first: int = 0
    place: Callable[[int, int], StageMap] = in_turn
    most_chunks: int = 0

    def __post_init__(self) -> None:
        assert self.order in ORDERS, f"order is one of {', '.join(ORDERS)}, got {self.order!r}"
        assert not (self.masked and self.splits), "an idle stage that computes on scrap leaves nothing for W"

    @property
    def least_chunks(self) -> int:
        """Smallest number of chunks per stage."""
        return 2 if self.interleaves else 1

    def chunk_counts(self, asked: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers of chunks per stage to try; `asked` are those of schedules that take any number."""
        if self.size:
            return (self.size[1],)
        return asked if self.interleaves and not self.most_chunks else (self.most_chunks or 1,)

    def folds(self, chunks: Numbers) -> Numbers:
        """Return whether the first of several stages also holds the last virtual stage."""
        return (self.place is folded) & (np.asarray(chunks) % 2 == 0)

    def travel(self, overlap: bool) -> str:
        """Return when messages travel, see `paxtrain.schedule.table`.

        Args:
            overlap: transfers run beside compute.
        """
        if self.order == "forwards_first" and overlap:
            return ALONG
        return BETWEEN if self.order == "alternating" and not overlap else UNDER

    def masks(self, overlap: ArrayLike) -> np.bool_ | NDArray[np.bool_]:
        """Return whether idle stages compute on scrap by default: not if transfers block devices, as on CPUs.

        There scrap would take cores from other stages.

        Args:
            overlap: transfers run beside compute; a bool, or an array of them.
        """
        return self.masked & np.asarray(overlap, bool)

    def residual_slots(self, stage: Numbers, stages: Numbers, chunks: Numbers, micro_batches: Numbers) -> Numbers:
        """Return the slots of residuals that a stage has in use at most, without the scrap slot.

        Args:
            stage: number of the stage, from 0 on.
            stages: P.
            chunks: v.
            micro_batches: m.
        """
        return np.minimum(self.in_flight(stage, stages, chunks, micro_batches), micro_batches * chunks)


def _eager_1f1b(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run F, then B, in each row. The time is (m+P-1)(F+B), with transfers hidden."""
    rows = m + 2 * (stages - 1)
    return closed_form(stages, m, rows, lambda t, s: t - s, lambda t, s: t - 2 * (stages - 1) + s)


def _gpipe(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run all forwards, then all backwards. With overlap a message travels beside the next micro-batch's op."""
    if overlap:
        return lay_out([[(phase, mb, 0) for phase in "FB" for mb in range(m)]] * stages, 1, lag=2)
    half = m + stages - 1

    def backward(t: np.ndarray, s: np.ndarray) -> np.ndarray:
        return np.where(t < half, IDLE, t - half - (stages - 1 - s))

    return closed_form(stages, m, 2 * half, lambda t, s: t - s, backward)


def _orders_1f1b(stages: int, m: int) -> list[list[Op]]:
    forwards, backwards = ([(phase, mb, 0) for mb in range(m)] for phase in "FB")
    return [warm_up_then_alternate(forwards, backwards, stages - 1 - s) for s in range(stages)]


def _1f1b(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run F and B in turn after P-1-s F. The time of equal stages is (m+P-1)(F+B), with transfers exposed."""
    return lay_out(_orders_1f1b(stages, m), 1, overlap)


def _interleaved_1f1b(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run groups of P micro-batches through chunk after chunk: the bubble shrinks by the number of chunks."""
    groups = [range(start, min(start + stages, m)) for start in range(0, m, stages)]
    forwards = [("F", mb, c) for group in groups for c in range(chunks) for mb in group]
    backwards = [("B", mb, c) for group in groups for c in reversed(range(chunks)) for mb in group]
    warm_ups = [2 * (stages - 1 - s) + (chunks - 1) * stages for s in range(stages)]
    return lay_out([warm_up_then_alternate(forwards, backwards, warm_up) for warm_up in warm_ups], chunks, overlap)


def _zb_h1(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run 1f1b with W put off: on stage s the W of a micro-batch comes s B later and fills the wait for gradients.

    The time of equal stages, from P micro-batches on and if W is no longer than F and B, is
    m(F+B+W) + (P-1)(F+B-W), with transfers exposed.
    """
    orders = []
    for s, ops in enumerate(_orders_1f1b(stages, m)):
        order = []
        for phase, mb, chunk in ops:
            order.append((phase, mb, chunk))
            if phase == "B" and mb >= s:
                order.append(("W", mb - s, chunk))
        orders.append(order + [("W", mb, 0) for mb in range(max(m - s, 0), m)])
    return lay_out(orders, 1, overlap)


def _counted(steps: str, m: int) -> list[Op]:
    """Return the ops of steps such as "F0B1", a phase and a chunk each, which take micro-batch after micro-batch."""
    done: collections.Counter[str] = collections.Counter()
    order = []
    for phase, chunk in zip(steps[::2], steps[1::2]):
        order.append((phase, done[phase + chunk], int(chunk)))
        done[phase + chunk] += 1
    return [op for op in order if op[1] < m]


def _zb_v(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run F, B and W in turn through two chunks, of which the second runs from the last stage to the first.

    If F, B and W are equally long, no stage idles between its first op and its last one, from 2P-1 micro-batches on:
    the time is m(F+B+W) of a stage, and P-1 times F of a chunk.
    """
    orders, most = [], max(m, 2 * stages - 1)  # fewer are the first ones of so many
    for s in range(stages):
        rest = stages - s
        steps = "F0" * (2 * rest - 1) + "F1F0" * s + "F1B1W1" * rest
        steps += "F0B0W0F1B1W1" * (most - stages - rest + 1) + "B0W0F1B1W1" * (rest - 1)
        orders.append(_counted(steps + "B0B1" * s + "B0W0" * rest + "W1" * s + "W0" * s, m))
    return lay_out(orders, chunks, overlap, place=folded)


def _dualpipe_v(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
    """Run the two directions of DualPipe as the two chunks of a V: in its middle part each F beside a B of the other.

    A B whose W follows at once is a whole backward, but its gradient leaves before W. So the bubble is (P-1)(F+B-W) of
    a chunk, where DeepSeek's is (P-1)(F&B+B-3W) with a whole B: there a gradient leaves after W.
    """
    orders, most = [], max(m, 2 * stages)
    for s in range(stages):
        behind = stages - s - 1
        steps = "F0" * (2 * behind) + "F0F1" * (s + 1) + "B1W1F1" * behind
        steps += "F0B1W1F1B0W0" * (most - stages - behind) + "B1W1F1B0W0" * behind
        last = "10" * (s + 1)
        steps += "".join(f"B{c}W{c}" for c in last[: s + 1]) + "".join(f"B{c}" for c in last[s + 1 :])
        late = last[s + 1 :] + "0" * behind
        steps += "".join(f"W{c}B0" for c in late[:behind]) + "".join(f"W{c}" for c in late[behind:])
        orders.append(_counted(steps, m))
    return lay_out(orders, chunks, overlap, place=folded)


def _between(most: int) -> ScheduleSpec:
    """Return the spec of a schedule between 1f1b and eager_1f1b: the first stage has `most` micro-batches in flight.

    Over each of the first most - P links transfers have a micro-batch's time to hide, as in eager_1f1b; the others
    expose theirs, as in 1f1b. With P it is 1f1b, with 2P-1 the order of eager_1f1b, whose idle stages skip here.
    """

    def in_flight(s: Numbers, p: Numbers, v: Numbers, m: Numbers) -> Numbers:
        return p - s + np.maximum(most - p - s, 0)

    def ops(stages: int, chunks: int, m: int, overlap: bool) -> Ops:
        forwards, backwards = ([(phase, mb, 0) for mb in range(m)] for phase in "FB")
        warm_ups = [int(in_flight(s, stages, 1, m)) - 1 for s in range(stages)]
        return lay_out([warm_up_then_alternate(forwards, backwards, warm_up) for warm_up in warm_ups], 1, overlap)

    return ScheduleSpec(
        ops=ops,
        order="alternating",
        in_flight=in_flight,
        activation_slots=2,
        gradient_slots=lambda p, m: 2,
        settles=8,
        repeats=lambda p: max(2 * p - most, 1),  # as many as the stages whose links are those of 1f1b
        in_flight_first=most,
    )


def _from_file(path: str) -> ScheduleSpec:
    """Return the spec of the schedule that a file has, see paxtrain.schedule.table_file."""
    found = table_file.load(path)
    stages, chunks, m = size = len(found.orders), found.chunks, found.micro_batches

    def ops(p: int, v: int, micro_batches: int, overlap: bool) -> Ops:
        if (p, v, micro_batches) != size:
            raise ValueError(f"{path} has {stages} stages of {chunks} chunks and {m} micro-batches")
        return lay_out(found.orders, chunks, overlap, place=found.place)

    spec = ScheduleSpec(
        ops=ops,
        order="alternating",
        in_flight=lambda s, p, v, m: found.in_flight[np.minimum(s, stages - 1)] + 0 * m,
        activation_slots=0,
        gradient_slots=lambda p, m: 0,
        splits=found.splits,
        interleaves=chunks > 1,
        settles=m,
        size=size,
        place=found.place,
    )
    tables = [
        Schedule(path, *size, *ops(*size, overlap), masked=False, travel=spec.travel(overlap), place=found.place)
        for overlap in (True, False)
    ]
    assigned = [buffers.assign(table) for table in tables]
    for table, slots in zip(tables, assigned):
        proof.validate(table, slots)
    waits = max(slots.gradient_depth for slots in assigned)
    return dataclasses.replace(
        spec,
        activation_slots=max(slots.activation_depth for slots in assigned),
        gradient_slots=lambda p, m: waits,
    )


FILE, FAMILY = ".csv", "1f1b:"


def names(which: Callable[[ScheduleSpec], object] = lambda spec: True) -> tuple[str, ...]:
    """Return the names of the schedules that are described here, of those for whose spec `which` holds."""
    return tuple(name for name, spec in SPECS.items() if which(spec))


_OUTSIDE: dict[str, ScheduleSpec] = {}  # of names that are `outside`, in the order in which `spec_of` made them


def spec_of(name: str) -> ScheduleSpec:
    """Return the spec of a schedule. A schedule's file is read and proved when it is first asked for.

    Args:
        name: a key of SPECS, or a name that is `outside`.

    Raises:
        ValueError: there is no schedule of that name, or the file's schedule is wrong.
    """
    if found := SPECS.get(name) or _OUTSIDE.get(name):
        return found
    if name.endswith(FILE):
        _OUTSIDE[name] = _from_file(name)
    elif name.startswith(FAMILY) and (most := whole(name.removeprefix(FAMILY))) is not None:
        _OUTSIDE[name] = _between(most)
    else:
        raise ValueError(f"there is no schedule {name!r}; there are {', '.join(names())}")
    return _OUTSIDE[name]


def parts(name: str) -> tuple[str, int]:
    """Return PipelineConfig.schedule and PipelineConfig.in_flight of a schedule's name."""
    most = spec_of(name).in_flight_first
    return (FAMILY.removesuffix(":"), most) if most else (name, 0)


def between_ends(most: int) -> str:
    """Return the name of the schedule between 1f1b and eager_1f1b with `most` micro-batches in flight."""
    return f"{FAMILY}{most}"


SPECS: dict[str, ScheduleSpec] = {
    "eager_1f1b": ScheduleSpec(
        ops=_eager_1f1b,
        order="paired",
        in_flight=lambda s, p, v, m: 2 * (p - 1 - s) + 1,
        activation_slots=0,
        gradient_slots=lambda p, m: 0,
        masked=True,
    ),
    "gpipe": ScheduleSpec(
        ops=_gpipe,
        order="forwards_first",
        in_flight=lambda s, p, v, m: m + 0 * s,
        activation_slots=0,
        gradient_slots=lambda p, m: m,
    ),
    "1f1b": ScheduleSpec(
        common=True,
        ops=_1f1b,
        order="alternating",
        in_flight=lambda s, p, v, m: p - s,
        activation_slots=1,
        gradient_slots=lambda p, m: 1,
        settles=4,
    ),
    # The message rings, which are small, are known to within a few slots.
    "interleaved_1f1b": ScheduleSpec(
        common=True,
        ops=_interleaved_1f1b,
        order="alternating",
        in_flight=lambda s, p, v, m: 2 * (p - 1 - s) + (v - 1) * p + 1,
        activation_slots=2,
        gradient_slots=lambda p, m: np.minimum(p // 2 + 1, m),
        interleaves=True,
        settles=4,
    ),
    # From F to W there are as many in flight on every stage as 1f1b has on the first one.
    "zb_h1": ScheduleSpec(
        ops=_zb_h1,
        order="alternating",
        in_flight=lambda s, p, v, m: p + 0 * s,
        activation_slots=1,
        gradient_slots=lambda p, m: 1,
        splits=True,
        settles=4,
    ),
    # Chunks of half a stage, as many on every stage as 1f1b has on the first one.
    "zb_v": ScheduleSpec(
        ops=_zb_v,
        order="alternating",
        in_flight=lambda s, p, v, m: 2 * p + 0 * s,
        activation_slots=2,
        gradient_slots=lambda p, m: 2,
        splits=True,
        interleaves=True,
        settles=4,
        place=folded,
        most_chunks=2,
    ),
    "dualpipe_v": ScheduleSpec(
        ops=_dualpipe_v,
        order="alternating",
        in_flight=lambda s, p, v, m: 2 * p + 1 + 0 * s,
        activation_slots=2,
        gradient_slots=lambda p, m: 2,
        splits=True,
        interleaves=True,
        settles=4,
        place=folded,
        most_chunks=2,
    ),
}


def code(name: str) -> int:
    """Return a schedule's number, first those of SPECS: columns of candidates hold numbers."""
    spec_of(name)  # gives a name from outside its number
    return [*SPECS, *_OUTSIDE].index(name)


def name_of(number: int) -> str:
    """Return the name of the schedule that has this number."""
    return [*SPECS, *_OUTSIDE][number]


def each(codes: ArrayLike, quantity: Callable[..., ArrayLike], *columns: ArrayLike) -> np.ndarray:
    """Return a quantity of the schedule that each code names, as an array over the codes.

    Args:
        codes: numbers of schedules, see `code`.
        quantity: function of a spec and of the columns' entries for it, to a number or an array of such entries.
        columns: numbers, or arrays that broadcast against the codes.
    """
    numbers, *entries = np.broadcast_arrays(codes, *columns)
    specs, found = [*SPECS.values(), *_OUTSIDE.values()], []
    for i in np.flatnonzero(np.bincount(numbers.ravel())).tolist():
        where = numbers == i
        found.append((where, np.asarray(quantity(specs[i], *(column[where] for column in entries)))))
    every = np.zeros(numbers.shape, np.result_type(*(value for _, value in found)) if found else bool)
    for where, value in found:
        every[where] = value
    return every


@functools.lru_cache(maxsize=64)
def build(name: str, stages: int, micro_batches: int, chunks: int = 1, overlap: bool = True) -> Schedule:
    """Return the table of a training schedule.

    Args:
        name: see `spec_of`.
        stages: P, the size of the pipe axis.
        micro_batches: m per data rank and step, any number from 1 on.
        chunks: virtual stages per stage, v; ignored unless the schedule interleaves.
        overlap: transfers run beside compute, as on GPUs; False: devices wait for them, as on CPUs.

    Raises:
        ValueError: see `spec_of`.
    """
    spec = spec_of(name)
    chunks = chunks if spec.interleaves else 1
    ops, masked = spec.ops(stages, chunks, micro_batches, overlap), bool(spec.masks(overlap))
    travel = spec.travel(overlap)
    return Schedule(name, stages, chunks, micro_batches, *ops, masked=masked, travel=travel, place=spec.place)


@functools.lru_cache(maxsize=64)
def forward_only(
    stages: int, micro_batches: int, chunks: int = 1, place: Callable[[int, int], StageMap] = in_turn
) -> Schedule:
    """Return the table of evaluation, which has forwards alone.

    Args:
        stages: P, the size of the pipe axis.
        micro_batches: m per data rank.
        chunks: virtual stages per stage, v.
        place: (P, v) -> stages of all virtual stages.
    """
    if chunks == 1:
        count = micro_batches + stages - 1
        ops = closed_form(stages, micro_batches, count, lambda t, s: t - s, lambda t, s: t * 0 + IDLE)
    else:
        groups = [range(start, min(start + stages, micro_batches)) for start in range(0, micro_batches, stages)]
        forwards = [("F", mb, c) for group in groups for c in range(chunks) for mb in group]
        ops = lay_out([forwards] * stages, chunks, place=place)
    return Schedule("forward_only", stages, chunks, micro_batches, *ops, masked=chunks == 1, place=place)
