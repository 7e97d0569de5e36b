"""All candidates of a search as columns, for the page to filter and to compare, and their chart."""

import shlex
from typing import Any

import numpy as np

from paxtrain.config.axes import MAIN, more_axes
from paxtrain.config.plan import BACKWARD, COMPRESSION, FORWARD, GATHER, HEAD, HOST, OPTIMIZER, REDUCE, SYNC, TRANSFER
from planner.cost.step_time import Problem
from planner.cost.terms import terms
from planner.report.charts import ACCENT, INK, Spec, field, line, tooltips, wide
from planner.report.charts import MAIN as BLUE
from planner.report.contents import Report
from planner.report.text import compression, mesh, schedule, stage_layers
from planner.report.units import duration
from planner.search.space import COLUMNS
from planner.search.tried import Found

Array = np.ndarray

# How each term of a step is told, in the order of a step.
TERMS = {
    GATHER: "gather of weights",
    FORWARD: "forward",
    BACKWARD: "backward",
    HEAD: "loss",
    COMPRESSION: "compression",
    TRANSFER: "bubble and exposed transfers",
    REDUCE: "exposed reduction",
    SYNC: "waiting for the slowest stage",
    OPTIMIZER: "optimizer",
    HOST: "host",
}
# Labels of columns, and the flags of planner.plan that ask for their values; "" without one.
_LABELS = {
    "micro_batch": ("micro-batch", "micro_batch"),
    "schedule": ("schedule", "schedules"),
    "chunks": ("virtual stages", "virtual_stages"),
    "save": ("save", "saves"),
    "shard": ("shard", "shard"),
    "shard_group": ("shard group", ""),
    "sequence_parallel": ("sequence parallel", "sequence_parallel"),
    "backward": ("codec: gradients between stages", ""),
    "backward_rank": ("their rank", "backward_ranks"),
    "data_rank": ("codec: rank over data", "data_ranks"),
    "uneven_data": ("uneven data ranks", "uneven_data"),
    "context_form": ("context's exchange", ""),
}
_FURTHER = (
    *("--what_if=", "--hosts=", "--price=", "--tokens=", "--against_free"),
    *("--explain", "--json", "--png", "--out="),
)
STATES = ("lower bound", "simulated", "ranked", "chosen")
_SIZES = (("ranked", 150), ("chosen", 260))  # pixels of the points
_NEAR = 1.6  # times the chosen step that the chart shows at first


def table(report: Report) -> dict[str, Any]:
    """Return all candidates as JSON values: columns of codes, seconds, megabytes, states, and details of the best."""
    space, outcome = report.outcome.space, report.outcome
    seconds, size = np.array(outcome.bounds, float), np.array(outcome.bytes, float)
    state = np.zeros(len(seconds), int)
    if len(outcome.points):
        at = outcome.points[:, 0].astype(int)
        seconds[at], size[at], state[at] = outcome.points[:, 1], outcome.points[:, 2], 1
    for found in outcome.ranked:
        seconds[found.index], size[found.index] = found.seconds, found.memory
        state[found.index] = 3 if found is report.chosen else 2
    columns = []
    axes = [(name, name, name) for name in (*MAIN, *more_axes())]
    for name, label, flag in [*axes, *((name, *told) for name, told in _LABELS.items())]:
        values, codes = np.unique(space.column(name), return_inverse=True)
        if len(values) < 2 and name not in MAIN:
            continue
        meaning = COLUMNS[name].value if name in COLUMNS and name != "backward_rank" else int
        words = [_word(meaning(value)) for value in values.tolist()]
        columns.append({"name": name, "label": label, "flag": flag, "values": words, "codes": codes.ravel().tolist()})
    known = {found.index: found for found in (*outcome.leaders, *outcome.ranked)}
    return {
        "columns": columns,
        "seconds": [float(f"{x:.5g}") if x < np.inf else None for x in seconds.tolist()],
        "mb": (size / 1e6).round().astype(int).tolist(),
        "state": state.tolist(),
        "states": STATES,
        "limit": report.limit / 1e9,
        "details": {str(i): _details(report, found) for i, found in known.items() if found.candidate.pipe},
        "terms": list(TERMS.values()),
        "command": _command(report),
        "batch": report.global_batch * report.model.sequence,
    }


def _word(value: object) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _command(report: Report) -> str:
    """Return the command to which flags are added that ask for one plan, without those that ask further questions."""
    if "planner.plan" in report.command or "paxplan" in report.command:
        words = shlex.split(report.command)
        return shlex.join(word for word in words if not word.startswith(_FURTHER))
    return f"python -m planner.plan --cluster=CLUSTER --model=MODEL --global_batch={report.global_batch}"


def _details(report: Report, found: Found) -> dict[str, Any]:
    """Return a plan in words, its interval and the terms of its step, as means over the stages, which add up to it."""
    c, ranked = found.candidate, report.outcome.ranked
    rank = ranked.index(found) + 1 if found in ranked else 0
    words = f"{mesh(c)}, {schedule(c)}, layers {stage_layers(c.counts, 40)}, {compression(c)}"
    sure = report.outlook(found) if rank else None
    parts = terms(Problem(report.cluster, report.model, c), report.fabric, found.placement.hosts)
    seconds = [float(parts[name].mean()) for name in TERMS]
    told = {"rank": rank, "words": words, "seconds": found.seconds, "terms": seconds, "gb": found.memory / 1e9}
    return told | ({"low": sure.low, "high": sure.high, "fits": sure.fits} if sure else {})


def rows(values: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the chart's rows of a table, in short words and colored by what is known of a candidate."""
    found = []
    for i, (seconds, size, state) in enumerate(zip(values["seconds"], values["mb"], values["state"])):
        if seconds is not None:
            settings = [f"{one['label']} {one['values'][one['codes'][i]]}" for one in values["columns"]]
            told = {"plan": ", ".join(settings), "step": duration(seconds), "said": f"{size / 1e3:.3g} GB"}
            row = {"i": i, "seconds": seconds, "gb": size / 1e3, "state": STATES[state], "shown": STATES[state]}
            known = values["details"].get(str(i), {})
            found.append(row | told | {name: known.get(name) for name in ("low", "high") if state > 1})
    return found


def chart(report: Report, alone: bool = False) -> Spec:
    """Return step time against memory of all candidates.

    Args:
        report: report on a plan.
        alone: whether it has its rows; otherwise the page puts them in.
    """
    least, most = report.outcome.bound, max(report.limit * 1.15, float(report.chosen.memory)) / 1e9
    near = {"domain": [0.97 * least, _NEAR * report.chosen.seconds], "zero": False, "nice": False}
    x = field("seconds", "quantitative", "step time, s", scale=near)
    y = field("gb", "quantitative", "GB per device", scale={"domain": [0, most]})
    colors = {"range": ["#8aa4b8", BLUE, "#e69f00", ACCENT, "#3c9d8f", "#cc79a7", "#22272e", "#a6761d", "#7570b3"]}
    color = field("shown", "nominal", sort=None, scale=colors, legend={"orient": "top", "columns": 6})
    shapes = {"domain": list(STATES), "range": ["triangle-right", "circle", "diamond", "circle"]}
    shape = field("state", "nominal", scale=shapes, legend=None)
    size = {"condition": [{"test": f"datum.state === '{name}'", "value": n} for name, n in _SIZES], "value": 34}
    told = tooltips(plan="plan", step="step", said="memory")
    told += [] if alone else tooltips(why="terms", run="planned again by")  # which the page's script writes
    zoom = {"type": "interval", "zoom": "wheel![event.shiftKey]"}
    ends = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
    within = {"mark": {"type": "rule", "clip": True, "color": INK}, "encoding": ends}
    point = {"type": "point", "filled": True, "clip": True, "opacity": 0.75}
    layers = [
        *line("y", y, report.limit / 1e9, ACCENT, f"limit {report.limit / 1e9:.1f} GB"),
        {"transform": [{"filter": "isValid(datum.low)"}], **within},
        {
            "params": [{"name": "zoom", "select": zoom, "bind": "scales"}],
            "mark": point,
            "encoding": {"x": x, "y": y, "color": color, "shape": shape, "size": size, "tooltip": told},
        },
    ]
    values: Spec = {"name": "candidates", "values": rows(table(report)) if alone else []}
    return wide("Step time against memory of all candidates", data=values, height=380, layer=layers)
