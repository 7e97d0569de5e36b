"""The work of each stage in the chosen plan's step, and the transfers that compute does not hide."""

import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from paxtrain.schedule import schedules
from paxtrain.schedule.table import IDLE
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table
from planner.report.contents import Report
from planner.report.text import share
from planner.report.units import duration

NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weight gradients",
    "H": "loss",
    "exposed": "exposed transfer",
    "scrap": "idle, computing scrap",
    "collective": "data-parallel collectives",
    "optimizer": "optimizer",
    "host": "host",
}
_COMPUTE = ("F", "B", "W", "H")
_MOST_OPS = 16_000  # most ops that are replayed one by one


class Bar(NamedTuple):
    """A stretch of time in which a stage does one thing.

    Attributes:
        what: the work, a key of NAMES.
        stage: index of the stage.
        begin: seconds since the step began.
        end: seconds since the step began.
        micro_batch: index of the micro-batch of F, B, W and H; -1 for anything else.
        virtual: virtual stage of F, B, W and H, in the order of the model; -1 for anything else.
    """

    what: str
    stage: int
    begin: float
    end: float
    micro_batch: int = -1
    virtual: int = -1


@dataclasses.dataclass(frozen=True)
class Activity:
    """One pipeline's step.

    Attributes:
        bars: the work of the stages; the time between bars is idle.
        total: seconds of the step.
        rank: data rank of the pipeline.
        left_out: seconds of the steady middle that have no bars. All later bars are moved forward by as much.
    """

    bars: list[Bar]
    total: float
    rank: int
    left_out: float = 0.0


# --- What happens -----------------------------------------------------------------------------------------------------


def pipeline(table: Table, seconds: simulator.Seconds, overlap: bool, by_row: bool = True) -> list[Bar]:
    """Return the bars of one pipeline: F, B, W, loss, scrap and exposed transfers.

    A transfer is exposed while one of its ends computes nothing.

    Args:
        table: the schedule.
        seconds: durations of its ops and hops for one data rank.
        overlap: whether transfers run beside compute.
        by_row: whether stages exchange messages row by row; otherwise ops begin as soon as their messages are there.
    """
    events = simulator.timeline(table, seconds, overlap) if by_row else ideal.timeline(table, seconds)
    order = _micro_batches(table, overlap and by_row)
    bars: list[Bar] = []
    busy: list[list[tuple[float, float]]] = [[] for _ in range(table.stages)]
    sent: list[list[tuple[float, float]]] = [[] for _ in range(table.stages)]
    for event in events:
        if event.what not in _COMPUTE:
            step = 1 if event.what == "activation" else -1
            for stage in (event.stage, (event.stage + step) % table.stages):
                sent[stage].append((event.begin, event.end))
            continue
        micro_batch = next(order[event.what, event.stage])
        what = "scrap" if micro_batch == IDLE else event.what
        bars.append(Bar(what, event.stage, event.begin, event.end, micro_batch, event.virtual_stage))
        busy[event.stage].append((event.begin, event.end))
    for stage in range(table.stages):
        bars += [Bar("exposed", stage, *part) for part in outside(sent[stage], busy[stage])]
    return bars


def _micro_batches(table: Table, overlap: bool) -> dict[tuple[str, int], Iterator[int]]:
    """Return the micro-batches of each phase and stage in the order of the replay; IDLE stands for scrap."""
    plan = table.plan(overlap)
    order: dict[tuple[str, int], Iterator[int]] = {}
    for what, ops in (("F", plan.forward), ("B", plan.backward), ("W", plan.weights)):
        # Idle stages compute, too, if the schedule is masked and no stage is done yet.
        scrap = plan.masked & (ops != IDLE).any(axis=1) & (np.arange(plan.rows) <= min(plan.last_rows))
        for stage in range(table.stages):
            own = ops[:, stage]
            numbers = np.where(own == IDLE, IDLE, own - table.first)
            order[what, stage] = iter(numbers[(own != IDLE) | scrap].tolist())
    last = table.stage_map.last
    loss = (plan.forward[:, last] != IDLE) & (plan.forward_chunk[:, last] == plan.chunks - 1)
    order["H", last] = iter((plan.forward[loss, last] - table.first).tolist())
    return order


def outside(parts: list[tuple[float, float]], busy: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the parts of the intervals `parts` that lie in none of `busy`, as disjoint intervals."""
    points = []  # time, index into depth, change of depth
    for kind, intervals in enumerate((parts, busy)):
        for begin, end in intervals:
            if end > begin:
                points += [(begin, kind, 1), (end, kind, -1)]
    depth, last = [0, 0], -math.inf
    found: list[tuple[float, float]] = []
    for at, kind, change in sorted(points):
        if depth[0] and not depth[1] and at > last:  # something is sent and nothing runs
            joins = found and found[-1][1] == last
            found[-1:] = [(found[-1][0], at)] if joins else [*found[-1:], (last, at)]
        depth[kind] += change
        last = at
    return found


def activity(report: Report) -> Activity:
    """Return the step of the slowest data rank's pipeline, with its collectives, the optimizer, and exchanges.

    If there are too many ops to replay one by one, part of the steady middle is left out.
    """
    problem, step, hosts = report.problem, report.step, report.chosen.placement.hosts[None]
    c = problem.candidate
    links, kinds = problem.links(problem.paths(report.fabric, hosts)), problem.kind_of_host[hosts]
    seconds = problem.seconds(links, kinds)
    ends = problem.pipelines(seconds)  # [data, P]
    first = c.together * int(np.argmax(problem.of_groups(links, kinds, ends).total))  # of the slowest group
    rank = first + int(np.argmax(ends[first : first + c.together].max(axis=1)))
    one, table = simulator.take(seconds, slice(rank, rank + 1)), problem.rank_table(rank)
    own = table.micro_batches - table.first
    few = max(_MOST_OPS // (c.pipe * c.chunks), 6 * c.pipe)
    shorter, left_out = table, 0.0
    if own > few + c.pipe and not schedules.spec_of(table.schedule).size:
        shorter = dataclasses.replace(table, micro_batches=table.first + few + (own - few) % c.pipe)
        left_out = float(ends[rank].max() - problem.replayed(shorter, one).max())
    bars = pipeline(shorter, one, problem.overlap, problem.cluster.execution.rows)
    if left_out:
        skipped, half = table.micro_batches - shorter.micro_batches, (shorter.micro_batches - table.first) // 2
        bars = [s._replace(micro_batch=s.micro_batch + skipped * (s.micro_batch >= half)) for s in bars]
    total = float(step.total[0])
    waits = 0.0 if step.outer is None else float(step.outer[0].sum()) / c.outer.every
    host = problem.cluster.host_seconds
    updated = total - host - waits
    for stage in range(c.pipe):
        gathered = float(step.gather[0, stage])
        reduced = float(step.finish[0, stage]), float(step.finish[0, stage] + step.reduce[0, stage])
        bars += [Bar("collective", stage, 0.0, gathered)] * (gathered > 0)
        bars += [Bar("collective", stage, reduced[0] - left_out, reduced[1] - left_out)] * (reduced[1] > reduced[0])
        bars.append(Bar("optimizer", stage, updated - float(step.optimizer[0]) - left_out, updated - left_out))
        if host:
            bars.append(Bar("host", stage, updated - left_out, total - waits - left_out))
        if waits:
            bars.append(Bar("collective", stage, total - waits - left_out, total - left_out))
    return Activity(bars, total, rank, left_out)


def waits(bars: list[Bar], stages: tuple[int, ...]) -> list[str]:
    """Return for each bar the op whose result it needs, and how long its stage was idle before; "" without.

    Args:
        bars: what `pipeline` returns.
        stages: stage of each virtual stage, in the order of the model.
    """
    last = len(stages) - 1
    ran = {(bar.what, bar.virtual, bar.micro_batch) for bar in bars if bar.micro_batch >= 0}
    free: dict[int, float] = {}
    found = [""] * len(bars)
    for n in sorted(range(len(bars)), key=lambda n: bars[n].begin):
        bar = bars[n]
        if bar.what not in _COMPUTE:
            continue
        needs = {"F": ("F", bar.virtual - 1), "B": ("B", bar.virtual + 1), "W": ("B", bar.virtual)}
        if bar.what == "B" and bar.virtual == last:
            needs["B"] = ("H", last)
        what, virtual = needs.get(bar.what, ("F", last))
        idle = bar.begin - free.get(bar.stage, 0.0)
        free[bar.stage] = bar.end
        if (what, virtual, bar.micro_batch) in ran:
            since = f", {duration(idle)} after the op before" if idle > 1e-9 else ""
            found[n] = f"{NAMES[what]} of micro-batch {bar.micro_batch} on stage {stages[virtual]}{since}"
    return found


def caption(report: Report, work: Activity) -> str:
    """Return in words whose step it is, and where transfers are exposed longest."""
    c = report.chosen.candidate
    parts = [
        f"The pipeline of data rank {work.rank}, which ends last; numbers are its {c.rank_micro_batches[work.rank]} "
        "micro-batches."
    ]
    if work.left_out:
        parts.append(f"{duration(work.left_out)} of the steady middle are left out, where the axis has a gap.")
    if c.pipe > 1 and not work.left_out:
        exposed = np.zeros(c.pipe)
        for bar in work.bars:
            if bar.what == "exposed":
                exposed[bar.stage] += bar.end - bar.begin
        worst = int(np.argmax(exposed))
        parts.append(
            f"Transfers are exposed longest on stage {worst}, for {duration(exposed[worst])} "
            f"({share(exposed[worst] / work.total)} of the step); white is waiting for other stages."
            if exposed[worst] > 0
            else "No transfer is exposed: compute hides them all."
        )
    return " ".join(parts)
