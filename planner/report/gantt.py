"""A Gantt chart of the chosen plan's step: a row per stage, with the transfers that compute does not hide."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from paxtrain.schedule import schedules
from paxtrain.schedule.table import IDLE
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table
from planner.report.contents import Report
from planner.report.svg import GRID, INK, SOFT, Svg, box, duration, ticks, unit
from planner.report.text import share

COLORS = {
    "F": "#9cc3e0",
    "B": "#2f6f9f",
    "W": "#5aa28f",
    "H": "#f0c04a",
    "exposed": "#d55e00",
    "scrap": "#dfe4e8",
    "collective": "#8e6bab",
    "optimizer": "#5c6670",
    "host": "#b9a58c",
}
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
_IDLE = "#f1f3f5"
_COMPUTE = ("F", "B", "W", "H")
_MOST_OPS = 16_000  # most ops that are replayed one by one
_MOST_ROWS = 32  # most stages that are drawn


class Bar(NamedTuple):
    """A stretch of time in which a stage does one thing.

    Attributes:
        what: the work, a key of NAMES.
        stage: index of the stage.
        begin: seconds since the step began.
        end: seconds since the step began.
        micro_batch: index of the micro-batch of F, B, W and H; -1 for anything else.
    """

    what: str
    stage: int
    begin: float
    end: float
    micro_batch: int = -1


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
        bars.append(Bar(what, event.stage, event.begin, event.end, micro_batch))
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


def window(activity: Activity, period: float) -> tuple[float, float]:
    """Return the end of the first part of a long step that is drawn, and the start of the second.

    The first part shows the pipeline's filling and the second its draining, with a few more micro-batches each. If
    a cut would save too little, both times are the end of the step.

    Args:
        activity: the step.
        period: seconds that a micro-batch takes in the steady middle.

    Returns:
        Two times in seconds on the axis of the bars.
    """
    end, last = activity.total - activity.left_out, max(s.stage for s in activity.bars)
    on = {stage: [s for s in activity.bars if s.stage == stage and s.what in ("F", "B")] for stage in (0, last)}
    begins = {key: min(s.begin for s in on[key[0]] if s.what == key[1]) for key in ((0, "F"), (last, "F"), (0, "B"))}
    ends = {key: max(s.end for s in on[key[0]] if s.what == key[1]) for key in ((0, "F"), (last, "B"), (0, "B"))}
    # GPipe's first backward comes after all forwards. A few times the filling is then enough, and likewise at the end.
    filling, draining = begins[last, "F"] - begins[0, "F"], ends[0, "B"] - ends[last, "B"]
    first = min(begins[0, "B"], begins[0, "F"] + 4 * filling) + 3 * period
    since = max(ends[0, "F"], ends[0, "B"] - 4 * draining) - 3 * period
    if since - first < 0.25 * (first + end - since) and not activity.left_out:
        return end, end
    return first, since


# --- The drawing ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A stretch of time that is drawn without a break.

    Attributes:
        low: seconds at its left end.
        high: seconds at its right end.
        x: pixel of its left end.
        later: seconds that were left out before it.
        scale: pixels per second.
    """

    low: float
    high: float
    x: float
    later: float
    scale: float

    def at(self, seconds: float) -> float:
        """Return the x of a time on the axis of the bars."""
        return self.x + (min(max(seconds, self.low), self.high) - self.low) * self.scale


def gantt(report: Report, width: float = 1080) -> tuple[str, str]:
    """Draw the chart, `width` pixels wide, and return it with its caption."""
    work, c, problem = activity(report), report.chosen.candidate, report.problem
    period = float(c.stage_map.by_stage(problem.work.max(axis=0)).sum(axis=0).max())
    first, since = window(work, period)
    end = work.total - work.left_out
    stages = np.unique(np.linspace(0, c.pipe - 1, min(c.pipe, _MOST_ROWS)).round().astype(int)).tolist()
    row, pitch = (24, 30) if len(stages) <= 8 else (15, 19) if len(stages) <= 16 else (11, 13)
    left, right, top, gap = 64, 10, 34, 66 if since > first else 0
    bottom = top + pitch * len(stages)
    svg = Svg(width, bottom + 34, "Schedule of one step: what each stage does over time")
    scale = (width - left - right - gap) / (first + end - since)
    panels = [_Panel(0.0, first, left, 0.0, scale)]
    if since > first:
        panels.append(_Panel(since, end, left + first * scale + gap, work.left_out, scale))
    present = {bar.what for bar in work.bars}
    svg.legend(left, 14, [(COLORS[key], NAMES[key]) for key in NAMES if key in present] + [(_IDLE, "idle")])
    y = {stage: top + i * pitch for i, stage in enumerate(stages)}
    for stage in stages:
        svg.text(left - 8, y[stage] + row / 2 + 4, f"stage {stage}", 11, "end")
    factor, name = unit(work.total)
    for panel in panels:
        _axis(svg, panel, 95 / scale * factor, factor, top, bottom)
        _bars(svg, [s for s in work.bars if s.end > panel.low and s.begin < panel.high], panel, y, row)
    svg.text(width - right, bottom + 30, f"{name} since the step began", 11, "end")
    if since > first:
        _break(svg, left + first * scale, gap, top, bottom, since - first + work.left_out)
    return str(svg), _caption(report, work, len(stages), since > first)


def _axis(svg: Svg, panel: _Panel, apart: float, factor: float, top: float, bottom: float) -> None:
    """Draw the time axis, with ticks at least `apart` units apart."""
    step = ticks(0, 10 * apart, 10)[1]
    low, high = ((x + panel.later) * factor for x in (panel.low, panel.high))
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        x = panel.at(i * step / factor - panel.later)
        svg.line(x, top - 4, x, bottom, GRID)
        svg.text(x, bottom + 14, f"{i * step:.6g}", 11, "middle")


def _bars(svg: Svg, bars: list[Bar], panel: _Panel, y: Mapping[int, float], row: float) -> None:
    """Draw the bars, one shape per color, with micro-batch numbers if they fit."""
    shapes: dict[str, list[str]] = {}
    numbers: list[tuple[float, Bar]] = []
    for stage in y:
        svg.rect(panel.x, y[stage], panel.at(panel.high) - panel.x, row, _IDLE)
    for bar in bars:
        if bar.stage not in y:
            continue
        begin, end = panel.at(bar.begin), panel.at(bar.end)
        # A hairline separates neighbors that are wide enough.
        hair = 0.7 if bar.what in _COMPUTE and end - begin > 4 else 0.0
        shapes.setdefault(bar.what, []).append(box(begin, y[bar.stage], max(end - begin - hair, 0.3), row))
        if bar.what in ("F", "B", "W") and end - begin > 4 + 6.2 * len(str(bar.micro_batch)) and row >= 15:
            numbers.append(((begin + end) / 2, bar))
    svg.shapes([(COLORS[what], "".join(shapes[what])) for what in NAMES if what in shapes])
    for x, bar in numbers:
        color = INK if bar.what == "F" else "#ffffff"
        svg.text(x, y[bar.stage] + row / 2 + 3.5, str(bar.micro_batch), 10, "middle", color)


def _break(svg: Svg, x: float, gap: float, top: float, bottom: float, seconds: float) -> None:
    """Draw a torn strip in place of the time that is left out."""
    zig = [f"{4 if i % 2 else -4} 6" for i in range(int(bottom - top) // 6)]
    for at in (x + 5, x + gap - 1):
        svg.path(f"M{at:.1f} {top}" + "".join(f"l{z}" for z in zig), stroke=SOFT, fill="none")
    for line, words in enumerate((duration(seconds), "left out")):
        svg.text(x + gap / 2, (top + bottom) / 2 + 14 * line - 3, words, 11, "middle", INK)


def _caption(report: Report, work: Activity, rows: int, cut: bool) -> str:
    c = report.chosen.candidate
    parts = [
        f"The pipeline of data rank {work.rank}, which ends last; numbers are its {c.rank_micro_batches[work.rank]} "
        "micro-batches."
    ]
    if cut:
        parts.append("The steady middle is cut out; the time axis continues after the break.")
    if rows < c.pipe:
        parts.append(f"{rows} of the {c.pipe} stages are drawn.")
    if c.pipe > 1 and not work.left_out:
        waits = np.zeros(c.pipe)
        for bar in work.bars:
            if bar.what == "exposed":
                waits[bar.stage] += bar.end - bar.begin
        worst = int(np.argmax(waits))
        parts.append(
            f"Stage {worst} waits longest for exposed transfers: {duration(waits[worst])} "
            f"({share(waits[worst] / work.total)} of the step)."
            if waits[worst] > 0
            else "No transfer is exposed: compute hides them all."
        )
    return " ".join(parts)
