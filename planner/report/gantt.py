"""The chosen plan's step as a Gantt chart: a row for each stage, transfers that compute does not hide marked."""

import dataclasses
import math
from typing import NamedTuple

import numpy as np

from paxtrain.schedule import table as schedules
from paxtrain.schedule.table import IDLE
from planner.cost import simulator
from planner.cost.links import paths
from planner.cost.rows import Table
from planner.report.svg import GRID, INK, SOFT, Svg, box, duration, ticks, unit
from planner.report.text import Report, share

Array = np.ndarray

COLORS = {
    "F": "#9cc3e0",
    "B": "#2f6f9f",
    "W": "#5aa28f",
    "H": "#f0c04a",
    "exposed": "#d55e00",
    "scrap": "#dfe4e8",
    "collective": "#8e6bab",
    "optimizer": "#5c6670",
}
NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "weights' gradients",
    "H": "loss",
    "exposed": "exposed transfer",
    "scrap": "idle, on scrap",
    "collective": "weights gathered, gradients reduced over data",
    "optimizer": "optimizer",
}
_IDLE = "#f1f3f5"
_COMPUTE = ("F", "B", "W", "H")
_MOST_OPS = 16_000  # that are simulated one by one
_MOST_ROWS = 32  # of stages drawn


class Span(NamedTuple):
    """What a stage does from `begin` to `end`, seconds: a key of NAMES; micro_batch: of F, B, W and H, else -1."""

    what: str
    stage: int
    begin: float
    end: float
    micro_batch: int = -1


@dataclasses.dataclass(frozen=True)
class Activity:
    """One pipeline's step.

    Attributes:
        spans: all that stages do; what lies between them is idle. total: seconds of the step.
        rank: data rank whose pipeline it is.
        left_out: seconds of the steady middle that are not among the spans: later ones come so much too early.
    """

    spans: list[Span]
    total: float
    rank: int
    left_out: float = 0.0


# --- What happens -----------------------------------------------------------------------------------------------------


def pipeline(table: Table, seconds: simulator.Seconds, overlap: bool) -> list[Span]:
    """F, B, W, loss, scrap and exposed transfers of one pipeline.

    A transfer is exposed while one of its ends computes nothing.
    """
    events = simulator.timeline(table, seconds, overlap)
    order = _micro_batches(table)
    spans: list[Span] = []
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
        spans.append(Span(what, event.stage, event.begin, event.end, micro_batch))
        busy[event.stage].append((event.begin, event.end))
    for stage in range(table.stages):
        spans += [Span("exposed", stage, *part) for part in outside(sent[stage], busy[stage])]
    return spans


def _micro_batches(table: Table) -> dict:
    """By phase and stage, micro-batches in the order in which the replay comes to them; IDLE: scrap."""
    plan = schedules.build(table.schedule, table.stages, table.micro_batches, table.chunks)
    order = {}
    for what, ops in (("F", plan.forward), ("B", plan.backward), ("W", plan.weights)):
        replayed = ops[(ops != IDLE).any(axis=1)]
        for stage in range(table.stages):
            own = replayed[:, stage]
            order[what, stage] = iter((own if plan.masked else own[own != IDLE]).tolist())
    loss = (plan.forward[:, -1] != IDLE) & (plan.forward_chunk[:, -1] == plan.chunks - 1)
    order["H", table.stages - 1] = iter(plan.forward[loss, -1].tolist())
    return order


def outside(parts: list[tuple[float, float]], busy: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """What of the intervals `parts` lies in none of `busy`, as intervals that do not overlap."""
    points = [(at, kind, change) for kind, some in enumerate((parts, busy)) for b, e in some if e > b
              for at, change in ((b, 1), (e, -1))]  # fmt: skip
    depth, found, last = [0, 0], [], -math.inf
    for at, kind, change in sorted(points):
        if depth[0] and not depth[1] and at > last:  # something is sent and nothing runs
            joins = found and found[-1][1] == last
            found[-1:] = [(found[-1][0], at)] if joins else [*found[-1:], (last, at)]
        depth[kind] += change
        last = at
    return found


def activity(report: Report) -> Activity:
    """The step of the slowest data rank's pipeline, collectives and the optimizer with it.

    Very many ops are not replayed one by one: the steady middle is left out, by as much as it takes.
    """
    problem, step, hosts = report.problem, report.step, report.chosen.placement.hosts[None]
    c, table = problem.candidate, problem.table
    seconds = problem.seconds(problem.links(paths(report.fabric, hosts, c.tensor)), problem.kind_of_host[hosts])
    ends = simulator.pipeline(table, seconds, problem.overlap)  # [data, P]
    rank = int(np.argmax(ends.max(axis=1)))
    arrays = {f.name: getattr(seconds, f.name) for f in dataclasses.fields(seconds)}
    one = simulator.Seconds(**{name: x[rank : rank + 1] if np.ndim(x) else x for name, x in arrays.items()})
    few = max(_MOST_OPS // (c.pipe * c.chunks), 6 * c.pipe)
    shorter, left_out = table, 0.0
    if table.micro_batches > few + c.pipe:
        shorter = dataclasses.replace(table, micro_batches=few + (table.micro_batches - few) % c.pipe)
        left_out = float(ends[rank].max() - simulator.pipeline(shorter, one, problem.overlap).max())
    spans = pipeline(shorter, one, problem.overlap)
    if left_out:
        skipped, half = table.micro_batches - shorter.micro_batches, shorter.micro_batches // 2
        spans = [s._replace(micro_batch=s.micro_batch + skipped * (s.micro_batch >= half)) for s in spans]
    total = float(step.total[0])
    for stage in range(c.pipe):
        gathered = float(step.gather[0, stage])
        reduced = float(step.finish[0, stage]), float(step.finish[0, stage] + step.reduce[0, stage])
        spans += [Span("collective", stage, 0.0, gathered)] * (gathered > 0)
        spans += [Span("collective", stage, *(x - left_out for x in reduced))] * (reduced[1] > reduced[0])
        spans.append(Span("optimizer", stage, total - float(step.optimizer[0]) - left_out, total - left_out))
    return Activity(spans, total, rank, left_out)


def window(activity: Activity, period: float) -> tuple[float, float]:
    """What of a long step is drawn: up to the first figure and from the second one on (seconds, nothing left out).

    The beginning holds the pipeline's filling and the end its draining, with a few micro-batches more of each; `period`
    is the seconds that a micro-batch takes in the steady middle. Where nothing is worth cutting both are the end.
    """
    end, last = activity.total - activity.left_out, max(s.stage for s in activity.spans)
    on = {stage: [s for s in activity.spans if s.stage == stage and s.what in ("F", "B")] for stage in (0, last)}
    begins = {key: min(s.begin for s in on[key[0]] if s.what == key[1]) for key in ((0, "F"), (last, "F"), (0, "B"))}
    ends = {key: max(s.end for s in on[key[0]] if s.what == key[1]) for key in ((0, "F"), (last, "B"), (0, "B"))}
    # GPipe's first backward comes after all forwards: then a few times the filling will do; likewise at the end.
    filling, draining = begins[last, "F"] - begins[0, "F"], ends[0, "B"] - ends[last, "B"]
    first = min(begins[0, "B"], begins[0, "F"] + 4 * filling) + 3 * period
    since = max(ends[0, "F"], ends[0, "B"] - 4 * draining) - 3 * period
    if since - first < 0.25 * (first + end - since) and not activity.left_out:
        return end, end
    return first, since


# --- The drawing ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Panel:
    """A stretch of time that is drawn without a break: seconds low to high, from x on; later: cut out before it."""

    low: float
    high: float
    x: float
    later: float
    scale: float

    def at(self, seconds: float) -> float:
        """The x of a time, nothing left out."""
        return self.x + (min(max(seconds, self.low), self.high) - self.low) * self.scale


def gantt(report: Report, width: float = 1080) -> tuple[str, str]:
    """The chart and its caption."""
    work, c, problem = activity(report), report.chosen.candidate, report.problem
    period = float(problem.work.max(axis=0).reshape(c.chunks, c.pipe).sum(axis=0).max())
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
    present = {span.what for span in work.spans}
    svg.legend(left, 14, [(COLORS[key], NAMES[key]) for key in NAMES if key in present] + [(_IDLE, "idle")])
    y = {stage: top + i * pitch for i, stage in enumerate(stages)}
    for stage in stages:
        svg.text(left - 8, y[stage] + row / 2 + 4, f"stage {stage}", 11, "end")
    factor, name = unit(work.total)
    for panel in panels:
        _axis(svg, panel, 95 / scale * factor, factor, top, bottom)
        _spans(svg, [s for s in work.spans if s.end > panel.low and s.begin < panel.high], panel, y, row)
    svg.text(width - right, bottom + 30, f"{name} since the step began", 11, "end")
    if since > first:
        _break(svg, left + first * scale, gap, top, bottom, since - first + work.left_out)
    return str(svg), _caption(report, work, len(stages), since > first)


def _axis(svg: Svg, panel: _Panel, apart: float, factor: float, top: float, bottom: float) -> None:
    """Times at the bottom, at least `apart` of the unit apart."""
    step = ticks(0, 10 * apart, 10)[1]
    low, high = ((x + panel.later) * factor for x in (panel.low, panel.high))
    for i in range(math.ceil(low / step), math.floor(high / step) + 1):
        x = panel.at(i * step / factor - panel.later)
        svg.line(x, top - 4, x, bottom, GRID)
        svg.text(x, bottom + 14, f"{i * step:.6g}", 11, "middle")


def _spans(svg: Svg, spans: list[Span], panel: _Panel, y: dict[int, float], row: float) -> None:
    """One shape per color; numbers of micro-batches where they fit."""
    shapes: dict[str, list[str]] = {}
    numbers: list[tuple[float, Span]] = []
    for stage in y:
        svg.rect(panel.x, y[stage], panel.at(panel.high) - panel.x, row, _IDLE)
    for span in spans:
        if span.stage not in y:
            continue
        begin, end = panel.at(span.begin), panel.at(span.end)
        # A hair between neighbours, as far as they are wide enough.
        hair = 0.7 if span.what in _COMPUTE and end - begin > 4 else 0.0
        shapes.setdefault(span.what, []).append(box(begin, y[span.stage], max(end - begin - hair, 0.3), row))
        if span.what in ("F", "B", "W") and end - begin > 4 + 6.2 * len(str(span.micro_batch)) and row >= 15:
            numbers.append(((begin + end) / 2, span))
    svg.shapes([(COLORS[what], "".join(shapes[what])) for what in NAMES if what in shapes])
    for x, span in numbers:
        color = INK if span.what == "F" else "#ffffff"
        svg.text(x, y[span.stage] + row / 2 + 3.5, str(span.micro_batch), 10, "middle", color)


def _break(svg: Svg, x: float, gap: float, top: float, bottom: float, seconds: float) -> None:
    """A torn strip for what is not drawn."""
    zig = [f"{4 if i % 2 else -4} 6" for i in range(int(bottom - top) // 6)]
    for at in (x + 5, x + gap - 1):
        svg.path(f"M{at:.1f} {top}" + "".join(f"l{z}" for z in zig), stroke=SOFT, fill="none")
    for line, words in enumerate((duration(seconds), "left out")):
        svg.text(x + gap / 2, (top + bottom) / 2 + 14 * line - 3, words, 11, "middle", INK)


def _caption(report: Report, work: Activity, rows: int, cut: bool) -> str:
    c = report.chosen.candidate
    parts = [
        f"The pipeline of data rank {work.rank}, which ends last: {c.micro_batches} micro-batches, by their numbers."
    ]
    if cut:
        parts.append("The steady middle, where all rows are alike, is cut out; the time axis goes on behind the break.")
    if rows < c.pipe:
        parts.append(f"{rows} of the {c.pipe} stages are drawn.")
    if c.pipe > 1 and not work.left_out:
        waits = np.zeros(c.pipe)
        for span in work.spans:
            if span.what == "exposed":
                waits[span.stage] += span.end - span.begin
        worst = int(np.argmax(waits))
        parts.append(
            f"Exposed transfers make stage {worst} wait longest, {duration(waits[worst])} "
            f"({share(waits[worst] / work.total)} of the step)."
            if waits[worst] > 0
            else "No transfer is exposed: all lie under compute."
        )
    return " ".join(parts)
