"""Charts of a report as Vega-Lite specifications, which the page, notebooks and pictures share.

They are plain dicts and not objects of Altair's, whose import and checks would take half of a plan's time; `chart`
makes such an object of one.
"""

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np

from planner.cluster.cluster import between
from planner.cost.candidate import host_order
from planner.cost.link_seconds import ring_order
from planner.report import activity, traffic
from planner.report.contents import Report, slower
from planner.report.further_text import plan_words, tokens_short
from planner.report.text import percent, tokens
from planner.report.units import duration, unit

if TYPE_CHECKING:
    import altair

Array = np.ndarray
Spec = dict[str, Any]

INK, SOFT, GRID = "#22272e", "#5c6670", "#e3e7ea"
ACCENT, MAIN, PALE = "#b84a00", "#2f6f9f", "#9cc3e0"
# The colors follow Okabe and Ito; color-blind readers can tell them apart.
_KINDS = ("#2f6f9f", "#9cc3e0", "#5c6670", "#e69f00", "#3c9d8f", "#cc79a7", "#f0d35b", "#aab4bc")
_FAST_TO_SLOW = ("#f4f7fa", "#c3d8e8", "#7fb0d3", "#3b7fb0", "#1c4f7c", "#0d2c4c")
_WORK = {
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
_FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_CONFIG = {
    "font": _FONT,
    "view": {"stroke": None},
    "axis": {"labelColor": SOFT, "titleColor": SOFT, "titleFontWeight": "normal", "gridColor": GRID, "domain": False},
    "legend": {"labelColor": SOFT, "titleColor": SOFT, "titleFontWeight": "normal", "labelLimit": 240},
    "title": {"anchor": "start", "color": INK, "fontSize": 13, "subtitleColor": SOFT},
}
_MOST_CELLS = 128  # most cells per side of a heat map
_NAMED = 32  # largest number of hosts whose names are written


def wide(words: str, **parts: Any) -> Spec:
    """Return a chart as wide as what it stands in; screen readers say the words."""
    parts = {"width": "container", "autosize": {"type": "fit-x", "contains": "padding"}, **parts}
    schema = "https://vega.github.io/schema/vega-lite/v6.json"
    return {"$schema": schema, "description": words, "background": "#ffffff", "config": _CONFIG, **parts}


def _rows(columns: dict[str, Any]) -> Spec:
    """Return data and transform of rows that are given by columns, which take less space."""
    columns = {name: x.tolist() if isinstance(x, np.ndarray) else list(x) for name, x in columns.items()}
    return {"data": {"values": [columns]}, "transform": [{"flatten": list(columns)}]}


def field(name: str, kind: str, title: str | None = None, **more: Any) -> Spec:
    """Return an encoding by a field; its axis has the title."""
    return {"field": name, "type": kind, "title": title, **more}


def tooltips(**fields: str) -> list[Spec]:
    """Return tooltips, title by field."""
    return [{"field": name, "title": title} for name, title in fields.items()]


def _legend(columns: int) -> Spec:
    """Return a legend above a chart, which has two columns on a phone."""
    return {"orient": "top", "columns": {"expr": f"width < 420 ? 2 : {columns}"}, "symbolType": "square"}


def chart(spec: Spec, width: int = 1080) -> "altair.LayerChart":
    """Return a chart of Altair's, as wide as asked."""
    import altair  # here, since a plan is written without it

    return altair.LayerChart.from_dict({**spec, "width": width}, validate=False)


def png(spec: Spec, width: int = 1080) -> bytes:
    """Return a chart as a picture, in twice as many pixels."""
    import vl_convert  # here, since a plan is written without it

    return vl_convert.vegalite_to_png({**spec, "width": width}, scale=2)


# --- Gains ------------------------------------------------------------------------------------------------------------


def gains(report: Report) -> Spec:
    """Return how much longer a step takes with other ways to plan; the first has the noise of the links."""
    rows, noise = [], report.noise
    for n, other in enumerate(report.comparisons):
        more = slower(report, other)
        said = f"{percent(more)} · {duration(other.seconds)}"
        row = {"name": other.name, "what": other.what, "more": 100 * more, "said": said}
        if noise and not n:  # host order
            row |= {"low": 100 * (noise.gain - noise.std), "high": 100 * (noise.gain + noise.std)}
        rows.append(row)
    y = field("name", "ordinal", sort=None, axis=None, scale={"paddingInner": 0.0, "paddingOuter": 0.0})
    x = field("more", "quantitative", "longer step, %", axis={"tickCount": 6})
    color = {"condition": {"test": "datum.more < 0", "value": ACCENT}, "value": MAIN}

    def words(name: str, at: Any, dy: int, **mark: Any) -> Spec:
        shown = {"y": y, "x": {"value": at}, "text": {"field": name}}
        return {"mark": {"type": "text", "dy": dy, "fontSize": 12, "color": SOFT, **mark}, "encoding": shown}

    bar = {"type": "bar", "height": 12, "yOffset": 18, "cornerRadiusEnd": 2}
    layers = [
        {"mark": bar, "encoding": {"x": x, "y": y, "color": color, "tooltip": tooltips(name="rule", what="", said="")}},
        words("name", 0, -18, align="left", color=INK, fontWeight=600, fontSize=13),
        words("what", 0, -2, align="left", limit={"expr": "width"}),
        words("said", {"expr": "width"}, -18, align="right", color=INK),
    ]
    if noise and rows:
        ends = {"y": y, "x": {**x, "field": "low"}, "x2": {"field": "high"}}
        layers.append({"mark": {"type": "rule", "yOffset": 18, "strokeWidth": 3, "color": INK}, "encoding": ends})
    said = "Step time of other ways to plan, relative to the chosen plan"
    return wide(said, data={"values": rows}, height=60 * len(rows), layer=layers)


# --- Links ------------------------------------------------------------------------------------------------------------


def used_links(hosts: Array, wraps: bool) -> dict[str, Array]:
    """Return the links between different hosts that a placement uses.

    Args:
        hosts: int [D, P], the host of each data rank and stage.
        wraps: whether the last stage sends activations to the first, as interleaved schedules do.

    Returns:
        Ordered pairs of hosts [n, 2]: "hops" between stages, in both directions, and "rings" of the data ranks.
    """
    there = np.roll(hosts, -1, axis=1)
    last = hosts.shape[1] - (not wraps)
    forward = np.stack([hosts[:, :last].ravel(), there[:, :last].ravel()], axis=1)
    turns = ring_order(hosts.T)
    ring = np.stack([turns.ravel(), np.roll(turns, -1, axis=1).ravel()], axis=1)
    found = {"hops": np.concatenate([forward, forward[:, ::-1]]), "rings": ring}
    return {name: np.unique(pairs[pairs[:, 0] != pairs[:, 1]], axis=0) for name, pairs in found.items()}


def placed_order(hosts: Array) -> Array:
    """Return the hosts of a placement int [D, P], pipeline after pipeline, each at its first occurrence."""
    _, first = np.unique(hosts, return_index=True)
    return hosts.ravel()[np.sort(first)]


def _blocks(values: Array, block: int, total: bool = False) -> Array:
    """Return the means, or the sums, over blocks of a square matrix; NaNs do not count, a block of NaNs stays NaN."""
    size = -(-len(values) // block) * block
    padded = np.full((size, size), np.nan)
    padded[: len(values), : len(values)] = values
    blocks = padded.reshape(size // block, block, size // block, block)
    count = np.isfinite(blocks).sum(axis=(1, 3))
    sums = np.nansum(blocks, axis=(1, 3))
    return np.where(count, sums / (1 if total else np.maximum(count, 1)), np.nan)


def links(report: Report) -> tuple[list[Spec], str]:
    """Return the bandwidth between hosts in host order and in the placement's order with the links in use, and words.

    Args:
        report: report on a plan for at least two hosts.
    """
    cluster, c, count = report.cluster, report.chosen.candidate, len(report.cluster.hosts)
    apart, block = between(cluster), -(-count // _MOST_CELLS)
    rate = np.where(apart, 1 / report.fabric.per_byte, np.nan) / 1e9
    noise = np.where(apart, cluster.samples.std(axis=0) / cluster.samples.mean(axis=0), np.nan)
    found = []
    before, after = host_order(c, cluster.devices_per_host)[0], report.chosen.placement.hosts
    placed = "Placement, pipeline after pipeline"
    for title, order, hosts in (("Host order", np.arange(count), before), (placed, placed_order(after), after)):
        used, by = used_links(hosts, c.stage_map.links == c.pipe), np.ix_(order, order)
        marks = np.zeros((2, count, count))
        for n, pairs in enumerate((used["hops"], used["rings"])):
            marks[n, pairs[:, 0], pairs[:, 1]] = 1
        sent = {what: _blocks(x[by], block, True) for what, x in traffic.between_hosts(report, hosts).items()}
        cells = [_blocks(rate[by], block), _blocks(noise[by], block), *(_blocks(x[by], block, True) for x in marks)]
        cells.append(sum(sent.values(), np.zeros_like(cells[0])))
        names = [_block_name([cluster.hosts[i] for i in order[n : n + block]]) for n in range(0, count, block)]
        found.append(_matrix(title, names, cells, _users(sent), _slowest(used, rate)))
    words = (
        "Bandwidth from the host of each row to the host of each column; a frame is a hop between stages, a dot a ring "
    )
    words += "of data ranks."
    return found, words + (f" Each cell is the mean over {block} x {block} pairs of hosts." if block > 1 else "")


def _block_name(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"


def _users(sent: dict[str, Array]) -> list[str]:
    """Return who uses each cell, with GB a step, row by row."""
    found = [""] * (next(iter(sent.values())).size if sent else 0)
    for what, sizes in sent.items():
        for n in np.flatnonzero(sizes.ravel() > 0).tolist():
            found[n] += f"{'; ' * bool(found[n])}{what} {sizes.flat[n] / 1e9:.3g} GB"
    return found


def _slowest(used: dict[str, Array], rate: Array) -> str:
    """Return the bandwidth of the slowest link in use of each kind, in words."""
    parts = [f"{name} {rate[pairs[:, 0], pairs[:, 1]].min():.2f} GB/s" for name, pairs in used.items() if len(pairs)]
    return f"slowest in use: {', '.join(parts)}" if parts else "no link between hosts in use"


def _matrix(title: str, names: list[str], cells: list[Array], users: list[str], slowest: str) -> Spec:
    """Return a heat map.

    Args:
        title: its title.
        names: name of each row and column.
        cells: rate, noise, hops, rings and bytes, each [n, n].
        users: who uses each cell, in words; [] if nobody does.
        slowest: the slowest links in use, in words.
    """
    n = len(names)
    a, b = np.divmod(np.arange(n * n), n)
    speed, noise, hops, rings, size = (x.ravel() for x in cells)
    known = np.isfinite(speed)
    kept = known | (a == b)
    columns = {"from": a[kept], "to": b[kept], "rate": [round(x, 3) if x == x else None for x in speed[kept].tolist()]}
    columns |= {"noise": [round(100 * x, 1) if x == x else None for x in noise[kept].tolist()]}
    columns |= {"hops": np.nan_to_num(hops)[kept].astype(int), "rings": np.nan_to_num(rings)[kept].astype(int)}
    columns |= {"gb": [float(f"{x:.3g}") for x in (np.nan_to_num(size)[kept] / 1e9).tolist()]}
    columns |= {"who": [users[i] if users else "" for i in np.flatnonzero(kept).tolist()]}
    data = _rows(columns)
    look = [{"calculate": f"names[datum.{end}]", "as": f"{end}_name"} for end in ("from", "to")]
    axis: Spec | None = (
        {"labelExpr": "names[datum.value]", "ticks": False, "labelFontSize": 10, "labelLimit": 110}
        if n <= _NAMED
        else None
    )
    x = field("to", "ordinal", axis=axis and {**axis, "orient": "top", "labelAngle": -90})
    y = field("from", "ordinal", axis=axis)
    shade = {"range": list(reversed(_FAST_TO_SLOW)), "zero": False, "nice": False}
    color = field("rate", "quantitative", "GB/s", scale=shade, legend={"gradientLength": 160})
    told = tooltips(
        from_name="from", to_name="to", rate="GB/s", noise="noise of samples, %", gb="GB a step", who="who uses it"
    )
    small, known_only = n > 40, [{"filter": "isValid(datum.rate)"}]
    frame = {"type": "rect", "fill": None, "stroke": ACCENT, "strokeWidth": 0.8 if small else 2}
    dot = {"type": "point", "filled": True, "color": "#111111", "opacity": 1, "size": 3 if small else 30}
    layers = [
        {"mark": {"type": "rect", "color": "#e2ddd3"}, "encoding": {"x": x, "y": y}},
        {"transform": known_only, "mark": "rect", "encoding": {"x": x, "y": y, "color": color, "tooltip": told}},
        {"transform": [{"filter": "datum.hops > 0"}], "mark": frame, "encoding": {"x": x, "y": y, "tooltip": told}},
        {"transform": [{"filter": "datum.rings > 0"}], "mark": dot, "encoding": {"x": x, "y": y, "tooltip": told}},
    ]
    return wide(
        f"Bandwidth between hosts: {title}",
        title={"text": title, "subtitle": slowest},
        params=[{"name": "names", "value": names}],
        data=data["data"],
        transform=[*data["transform"], *look],
        height=430,
        layer=layers,
    )


# --- One step ---------------------------------------------------------------------------------------------------------


def step(report: Report, work: activity.Activity) -> Spec:
    """Return a Gantt chart of one pipeline's step; dragging and the wheel zoom it."""
    stages, factor = report.chosen.candidate.pipe, unit(work.total)
    needs = activity.waits(work.bars, report.chosen.candidate.stage_map.stage_of)
    half = _middle(work)

    def at(seconds: float, ends: bool) -> float:
        """Return the place on the axis; what comes after the part that is left out comes later by as much."""
        later = work.left_out if seconds > half or (seconds == half and not ends) else 0.0
        return float(f"{(seconds + later) * factor[0]:.6g}")

    kinds = [kind for kind in activity.NAMES if any(bar.what == kind for bar in work.bars)]
    columns = {
        "what": [kinds.index(bar.what) for bar in work.bars],
        "stage": [bar.stage for bar in work.bars],
        "begin": [at(bar.begin, False) for bar in work.bars],
        "end": [at(bar.end, True) for bar in work.bars],
        "mb": [bar.micro_batch for bar in work.bars],
        "needs": needs,
    }
    data, unit_name = _rows(columns), factor[1]
    told = tooltips(
        op="op", stage="stage", batch="micro-batch", took=f"takes, {unit_name}", begin=f"begins, {unit_name}"
    )
    told += tooltips(needs="waits for")
    look = [
        {"calculate": "kinds[datum.what]", "as": "op"},
        {"calculate": "datum.mb < 0 ? '' : '' + datum.mb", "as": "batch"},
        {"calculate": "format(datum.end - datum.begin, '.4~g')", "as": "took"},
    ]
    x = field("begin", "quantitative", f"{unit_name} since the step began", axis={"grid": True}, scale={"nice": False})
    y = field("stage", "ordinal", "stage", scale={"paddingInner": 0.2}, sort=None)
    names = [activity.NAMES[kind] for kind in kinds]
    scale = {"domain": names, "range": [_WORK[kind] for kind in kinds]}
    color = field("op", "nominal", scale=scale, legend=_legend(4))
    zoom = {"type": "interval", "encodings": ["x"], "zoom": "wheel![event.shiftKey]"}
    inner = "scale('x', datum.end) - scale('x', datum.begin)"
    number = {
        "type": "text",
        "fontSize": 10,
        "align": "center",
        "clip": True,
        "color": {"expr": "datum.what ? '#fff' : '#22272e'"},
    }
    fits = {"expr": f"datum.mb >= 0 && {inner} > 6 + 6 * length(datum.batch) ? 1 : 0"}
    layers: list[Spec] = [
        {
            "params": [{"name": "zoom", "select": zoom, "bind": "scales"}],
            "mark": {"type": "bar", "clip": True},
            "encoding": {"x": x, "x2": {"field": "end"}, "y": y, "color": color, "tooltip": told},
        }
    ]
    if stages <= 16:
        middle = [{"calculate": "(datum.begin + datum.end) / 2", "as": "middle"}]
        words = {"x": {**x, "field": "middle"}, "y": y, "text": {"field": "batch"}}
        layers.append({"transform": middle, "mark": {**number, "opacity": fits}, "encoding": words})
    return wide(
        "Schedule of one step: what each stage does over time",
        params=[{"name": "kinds", "value": names}],
        data=data["data"],
        transform=[*data["transform"], *look],
        height=max(90, min(stages * 30, 560)),
        layer=layers,
    )


def _middle(work: activity.Activity) -> float:
    """Return the seconds on the axis of the bars behind which a part of the steady middle is left out."""
    if not work.left_out:
        return float("inf")
    batches = sorted({bar.micro_batch for bar in work.bars if bar.what in ("F", "B")})
    jump = max(zip(batches, batches[1:]), key=lambda pair: pair[1] - pair[0])[1]
    return min(bar.begin for bar in work.bars if bar.micro_batch >= jump)


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory(report: Report) -> Spec:
    """Return the memory of a device of each stage, by purpose, and the limit."""
    kinds = {name: np.asarray(x, float) for name, x in report.memory.items() if np.any(np.asarray(x) > 0)}
    total, held = np.sum(list(kinds.values()), axis=0), report.chosen.memory
    rows = [
        {"stage": stage, "kind": name, "gb": round(float(sizes[stage]) / 1e9, 3), "order": n}
        for n, (name, sizes) in enumerate(kinds.items())
        for stage in range(len(sizes))
    ]
    x = field("stage", "ordinal", "stage", axis={"labelAngle": 0, "labelOverlap": True})
    y = field("gb", "quantitative", "GB", axis={"tickCount": 6}, stack="zero")
    colors = dict(zip(kinds, itertools.cycle(_KINDS)))
    color = field("kind", "nominal", scale={"domain": list(colors), "range": list(colors.values())})
    color["legend"] = _legend(3)
    told = tooltips(stage="stage", kind="what", gb="GB")
    shown = {"x": x, "y": y, "color": color, "order": {"field": "order"}, "tooltip": told}
    layers: list[Spec] = [{"mark": {"type": "bar"}, "encoding": shown}]
    if len(total) <= 16:
        sums = [{"stage": n, "total": float(x) / 1e9, "said": f"{x / 1e9:.1f}"} for n, x in enumerate(total.tolist())]
        at = {"x": x, "y": {**y, "field": "total", "stack": None}, "text": {"field": "said"}}
        layers.append({"data": {"values": sums}, "mark": {"type": "text", "dy": -7, "color": INK}, "encoding": at})
    lines = [(report.limit, ACCENT, f"limit {report.limit / 1e9:.1f} GB")]
    if held > 1.01 * total.max():
        lines.append((held, INK, f"allocated on every stage, {held / 1e9:.1f} GB"))
    for size, ink, words in lines:
        layers += line("y", y, size / 1e9, ink, words)
    return wide("Memory of each stage", data={"values": rows}, height=300, layer=layers)


def line(axis: str, along: Spec, value: float, color: str, words: str) -> list[Spec]:
    """Return a dashed line across a chart at a value, with words."""
    data, place = {"values": [{"at": value, "said": words}]}, {axis: {**along, "field": "at", "stack": None}}
    text = {"type": "text", "align": "right", "dy": -7, "color": color, "fontSize": 12}
    rule = {"type": "rule", "strokeDash": [6, 4], "strokeWidth": 1.5, "color": color}
    other = {"x": {"value": {"expr": "width"}}} if axis == "y" else {"y": {"value": 8}}
    return [
        {"data": data, "mark": rule, "encoding": place},
        {"data": data, "mark": text, "encoding": {**place, **other, "text": {"field": "said"}}},
    ]


# --- Answers ----------------------------------------------------------------------------------------------------------


def scaling(report: Report) -> list[Spec]:
    """Return tokens/s over devices, beside what they would be at the fewest hosts' rate, and the hours of devices."""
    found = report.scaling
    assert found is not None
    first, rows = found.sizes[0], []
    for size in found.sizes:
        row = {"devices": size.devices, "hosts": size.hosts, "speed": size.tokens_per_second}
        row |= {
            "knee": size is found.knee,
            "ideal": first.tokens_per_second / first.devices * size.devices,
            "hours": found.device_hours(size),
        }
        rows.append(row | {"said": tokens(size.tokens_per_second), "plan": plan_words(size.found)})
    told = tooltips(hosts="hosts", devices="devices", said="tokens/s", hours="device hours", plan="plan")
    devices = [size.devices for size in found.sizes]
    x = field(
        "devices", "quantitative", "devices", scale={"type": "log", "base": 2}, axis={"values": devices, "format": ","}
    )
    dot = {"type": "point", "filled": True, "size": 80, "opacity": 1}
    color = {"condition": {"test": "datum.knee", "value": ACCENT}, "value": MAIN}

    def panel(name: str, title: str, dashed: str = "") -> Spec:
        y = field(name, "quantitative", axis={"format": "~s"})
        layers: list[Spec] = [
            {"mark": {"type": "line", "color": MAIN}, "encoding": {"x": x, "y": y}},
            {"mark": dot, "encoding": {"x": x, "y": y, "color": color, "tooltip": told}},
        ]
        if dashed:
            dashes = {"type": "line", "strokeDash": [6, 4], "color": SOFT}
            layers.insert(0, {"mark": dashes, "encoding": {"x": x, "y": {**y, "field": dashed}}})
        return wide(title, title=title, data={"values": rows}, height=240, layer=layers)

    speed = panel("speed", "Tokens/s, and (dashed) at the fewest hosts' rate", "ideal")
    return [speed, panel("hours", f"Device hours for {tokens_short(found.tokens)} tokens; the knee in orange")]


def what_ifs(report: Report) -> Spec:
    """Return the step for each changed cluster: of the new plan, and of today's plan kept."""
    today, rows = report.chosen.seconds, []
    for changed in report.what_ifs:
        both: tuple[tuple[str, float | None], ...]
        both = ("new plan", changed.found.seconds), ("today's plan kept", changed.kept)
        for which, seconds in both:
            if seconds is not None:
                said = f"{duration(seconds)}, {percent(seconds / today - 1)}"
                rows.append({"change": changed.change, "which": which, "seconds": seconds, "said": said})
    y = field("change", "ordinal", sort=None, axis={"labelLimit": 160})
    x = field("seconds", "quantitative", "s a step", scale={"zero": False, "padding": 20})
    colors = {"domain": ["new plan", "today's plan kept"], "range": [MAIN, SOFT]}
    color = field("which", "nominal", scale=colors, legend={"orient": "top"})
    dot = {"type": "point", "filled": True, "size": 90, "opacity": 1}
    told = tooltips(change="if", which="", said="step")
    layers = [
        {"mark": {"type": "line", "color": GRID}, "encoding": {"x": x, "y": y, "detail": {"field": "change"}}},
        {"mark": dot, "encoding": {"x": x, "y": y, "color": color, "tooltip": told}},
        *line("x", x, today, ACCENT, "today"),
    ]
    return wide(
        "Step time if the cluster changes", data={"values": rows}, height=34 * len(report.what_ifs), layer=layers
    )
