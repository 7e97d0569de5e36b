"""Figures of a report as inline SVG: gains, links, memory, and step time against memory."""

import itertools
import math

import numpy as np

from planner.cluster.cluster import between
from planner.cost.candidate import host_order
from planner.cost.link_seconds import ring_order
from planner.report.contents import Report, slower
from planner.report.svg import GRID, HALO, INK, SOFT, Svg, box, duration, png, ramp, ticks, unit, width_of
from planner.report.text import percent

Array = np.ndarray

_ACCENT, _MAIN, _PALE = "#d55e00", "#2f6f9f", "#9cc3e0"
# The colors follow Okabe and Ito; color-blind readers can tell them apart.
_KINDS = ("#2f6f9f", "#9cc3e0", "#5c6670", "#e69f00", "#3c9d8f", "#cc79a7", "#f0d35b", "#aab4bc")
_FAST_TO_SLOW = ["#f4f7fa", "#c3d8e8", "#7fb0d3", "#3b7fb0", "#1c4f7c", "#0d2c4c"]
_MOST_CELLS = 256  # most cells per side of a heat map
_NAMED = 32  # largest number of hosts whose names are written


# --- Gains ------------------------------------------------------------------------------------------------------------


def gains(report: Report, width: float = 1080, narrow: bool = False) -> str:
    """Draw how much longer a step takes with other ways to plan.

    Args:
        report: report on a plan.
        width: width in pixels.
        narrow: whether to write names above their bars and not beside them.
    """
    others, noise = report.comparisons, report.noise
    pitch, left = (66, 8) if narrow else (40, 400)
    words = [f"{percent(slower(report, other))}  ·  {duration(other.seconds)}" for other in others]
    if noise and not narrow:
        many = f"{1 + noise.gain:.2f} ± {noise.std:.2f} times"
        percent_more = f"{100 * noise.gain:.2f} ± {100 * noise.std:.2f}%"
        words[0] += f"  ·  {many if noise.gain > 1 else percent_more} by sample"
    right = 24 if narrow else max(width_of(x, 12) for x in words) + 24
    svg = Svg(width, pitch * len(others) + 34, "Step time of other ways to plan, relative to the chosen plan")
    values = [100 * slower(report, other) for other in others]
    # Of the first one, host order.
    spread = [100 * (noise.gain - noise.std), 100 * (noise.gain + noise.std)] if noise else []
    low, high = min(0.0, *values, *spread), max(0.0, *values, *spread, 0.1)

    def at(value: float) -> float:
        return left + (value - low) / (high - low) * (width - left - right)

    bottom = pitch * len(others) + 4
    for tick in ticks(low, high, 3 if narrow else 6):
        svg.line(at(tick), 0, at(tick), bottom, GRID if tick else SOFT)
        mark = f"{tick:+g}%" if tick else "chosen plan"
        svg.text(max(at(tick), 34), bottom + 15, mark, 11, "middle")
    for i, (other, value, said) in enumerate(zip(others, values, words)):
        y, end = i * pitch + 6, at(value)
        if narrow:
            svg.text(left, y + 10, other.name, 14, "start", INK, font_weight=600, **HALO)
            svg.text(width, y + 10, said, 13, "end", INK, **HALO)
            svg.text(left, y + 26, other.what, 12, **HALO)
            y += 32
        else:
            svg.text(left - 14, y + 13, other.name, 13, "end", INK, font_weight=600)
            svg.text(left - 14, y + 28, other.what, 11, "end")
        tall = 20 if narrow else 26
        svg.rect(min(end, at(0)), y, abs(end - at(0)), tall, _PALE if value >= 0 else _ACCENT, rx=2)
        if noise and i == 0:
            _whisker(svg, at(spread[0]), at(spread[1]), y + tall / 2)
            end = max(end, at(spread[1]))
        if not narrow:
            svg.text(max(end, at(0)) + 9, y + 18, said, 12, fill=INK)
    return str(svg)


def _whisker(svg: Svg, low: float, high: float, y: float) -> None:
    """Draw an error bar from x=`low` to x=`high`."""
    path = f"M{low:.1f} {y:g}H{high:.1f}M{high:.1f} {y - 5:g}v10M{low:.1f} {y - 5:g}v10"
    svg.path(path, stroke=INK, stroke_width="1.4", fill="none")


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


def _cells(values: Array, block: int) -> Array:
    """Return the means over blocks of a square matrix; NaNs do not count, and a block of NaNs stays NaN."""
    size = -(-len(values) // block) * block
    padded = np.full((size, size), np.nan)
    padded[: len(values), : len(values)] = values
    blocks = padded.reshape(size // block, block, size // block, block)
    known = np.isfinite(blocks)
    count = known.sum(axis=(1, 3))
    return np.where(count, np.where(known, blocks, 0).sum(axis=(1, 3)) / np.maximum(count, 1), np.nan)


def links(report: Report, width: float = 1080) -> tuple[str, str]:
    """Draw the bandwidth between hosts in host order and in the placement's order, with the links in use.

    Args:
        report: report on a plan for at least two hosts.
        width: width in pixels.

    Returns:
        The drawing and its caption.
    """
    cluster, c = report.cluster, report.chosen.candidate
    bandwidth, count = 1 / report.fabric.per_byte, len(cluster.hosts)
    apart = between(cluster)
    low, high = (float(f(bandwidth[apart])) for f in (np.min, np.max))
    block = -(-count // _MOST_CELLS)
    named = count <= _NAMED
    margin = max(width_of(name, 10) for name in cluster.hosts) + 8 if named else 12
    margin = min(margin, 110)
    side = (width - 2 * margin - 110) / 2
    top = 42 + (margin if named else 0)
    svg = Svg(width, top + side + 30, "Bandwidth between hosts before and after placement")
    palette = np.concatenate([ramp(_FAST_TO_SLOW, 255), [[226, 221, 211]]]).astype(np.uint8)
    before, after = host_order(c, cluster.devices_per_host)[0], report.chosen.placement.hosts
    panels = (
        ("Host order", np.arange(count), before, margin),
        ("Placement, pipeline after pipeline", placed_order(after), after, 2 * margin + side + 26),
    )
    for title, order, hosts, x in panels:
        used = used_links(hosts, c.stage_map.links == c.pipe)
        values = np.where(apart, bandwidth, np.nan)[np.ix_(order, order)]
        cells = _cells(values, block)
        shade = (high - cells) / (high - low) * 254 if high > low else 0 * cells
        indices = np.where(np.isfinite(cells), np.nan_to_num(shade), 255).round().astype(np.uint8)
        svg.text(x, 14, title, 14, fill=INK, font_weight=600)
        svg.text(x, 31, _slowest(used, bandwidth), 12)
        svg.image(x, top, side, side, png(indices, palette))
        _mark(svg, used, order, (x, top, side / len(cells)), block)
        if named:
            _names(svg, [cluster.hosts[host] for host in order], x, top, side, margin)
    _scale(svg, width - 58, top, side, palette[:255], low, high)
    _links_legend(svg, margin, top + side + 22)
    words = "Bandwidth from the host of each row to the host of each column."
    if block > 1:
        words += f" Each cell is the mean over {block} x {block} pairs of hosts."
    return str(svg), words


def _names(svg: Svg, names: list[str], x: float, y: float, side: float, margin: float) -> None:
    """Write the host names to the left of the matrix and above it."""
    cell = side / len(names)
    for i, name in enumerate(names):
        while width_of(name, 10) > margin - 6:
            name = "…" + name.lstrip("…")[1:]
        middle = (i + 0.5) * cell + 3.5
        svg.text(x - 5, y + middle, name, 10, "end")
        svg.text(x + middle, y - 5, name, 10, transform=f"rotate(-90 {x + middle:.1f} {y - 5:.1f})")


def _links_legend(svg: Svg, x: float, y: float) -> None:
    for words in ("hop between stages", "in a data-parallel ring", "inside a host"):
        if words.startswith("hop"):
            svg.rect(x, y - 10, 10, 10, "none", stroke=_ACCENT, stroke_width="2")
        elif words.startswith("in a "):
            svg.path(_dot(x + 5, y - 4.5, 3.2), fill="#111111")
        else:
            svg.rect(x, y - 10, 11, 11, "#e2ddd3")
        svg.text(x + 17, y, words, 12)
        x += 17 + width_of(words, 12) + 22


def _slowest(used: dict[str, Array], bandwidth: Array) -> str:
    """Return the bandwidth of the slowest link in use of each kind, in words."""
    parts = [
        f"{name} {bandwidth[pairs[:, 0], pairs[:, 1]].min() / 1e9:.2f} GB/s"
        for name, pairs in used.items()
        if len(pairs)
    ]
    return f"slowest in use: {', '.join(parts)}" if parts else "no link between hosts in use"


def _dot(x: float, y: float, r: float) -> str:
    r = round(r, 1)  # so that the diameter below is exactly twice the written radius
    return f"M{x - r:.1f} {y:.1f}a{r:.1f} {r:.1f} 0 1 0 {2 * r:.1f} 0a{r:.1f} {r:.1f} 0 1 0 {-2 * r:.1f} 0"


def _mark(svg: Svg, used: dict[str, Array], order: Array, grid: tuple[float, float, float], block: int) -> None:
    """Mark hops with squares and rings with dots, on a grid (x, y, pixels per cell)."""
    x, y, cell = grid
    place = np.argsort(order)
    at = {name: np.unique(place[pairs] // block, axis=0) for name, pairs in used.items()}
    hop = 2.0 if cell > 12 else 1.2 if cell > 5 else 0.8
    squares = (box(x + b * cell + hop / 2, y + a * cell + hop / 2, cell - hop, cell - hop) for a, b in at["hops"])
    svg.path("".join(squares), fill="none", stroke=_ACCENT, stroke_width=f"{hop}")
    dots = (_dot(x + (b + 0.5) * cell, y + (a + 0.5) * cell, max(0.16 * cell, 0.7)) for a, b in at["rings"])
    svg.path("".join(dots), fill="#111111", stroke="#ffffff", stroke_width="0.8" if cell > 5 else "0")


def _scale(svg: Svg, x: float, y: float, height: float, palette: Array, low: float, high: float) -> None:
    if high <= low:
        svg.rect(x, y, 14, 14, "#f4f7fa", stroke=GRID)
        svg.text(x + 19, y + 11, f"{high / 1e9:.3g}", 11)
        svg.text(x, y - 8, "GB/s", 11)
        return
    svg.image(x, y, 14, height, png(np.arange(len(palette))[:, None], palette))
    svg.text(x, y - 8, "GB/s", 11)
    for tick in ticks(low / 1e9, high / 1e9, 8):
        at = y + (high / 1e9 - tick) / (high - low) * 1e9 * height
        svg.line(x + 14, at, x + 17, at)
        svg.text(x + 20, at + 4, f"{tick:.4g}", 11)


# --- Memory -----------------------------------------------------------------------------------------------------------


def memory(report: Report, width: float = 1080) -> str:
    """Draw the memory of a device of each stage, by purpose, and the limit."""
    kinds = {name: np.asarray(x, float) for name, x in report.memory.items() if np.any(np.asarray(x) > 0)}
    total, held = np.sum(list(kinds.values()), axis=0), report.chosen.memory
    stages, left, right, top, height = len(total), 44, 232, 26, 240
    high = max(float(total.max()), held, report.limit) * 1.04
    svg = Svg(width, top + height + 36, "Memory of each stage")

    def y(size: float) -> float:
        return top + height - size / high * height

    for tick in ticks(0, high / 1e9, 6):
        svg.line(left, y(tick * 1e9), width - right, y(tick * 1e9), GRID)
        svg.text(left - 8, y(tick * 1e9) + 4, f"{tick:g}", 11, "end")
    svg.text(left - 8, top - 12, "GB", 11, "end")
    pitch = min((width - left - right) / stages, 150)
    bar = pitch * (0.72 if stages <= 40 else 0.9)
    for stage in range(stages):
        base, x = 0.0, left + stage * pitch + (pitch - bar) / 2
        for color, (name, sizes) in zip(itertools.cycle(_KINDS), kinds.items()):
            size = float(sizes[stage])
            tall = max(y(base) - y(base + size) - (0.6 if bar > 8 else 0), 0)
            svg.rect(x, y(base + size), bar, tall, color, title=f"stage {stage}, {name}: {size / 1e9:.2f} GB")
            base += size
        if pitch > 34:
            svg.text(x + bar / 2, y(base) - 5, f"{base / 1e9:.1f}", 11, "middle", INK)
        if stage % math.ceil(16 / pitch) == 0:
            svg.text(x + bar / 2, top + height + 15, str(stage), 11, "middle")
    svg.text(width - right, top + height + 31, "stage", 11, "end")
    worst = int(np.argmax(total))
    svg.text(width - right + 28, top + 10, f"GB on stage {worst}", 11)
    for i, (color, (name, sizes)) in enumerate(reversed(list(zip(itertools.cycle(_KINDS), kinds.items()))), 1):
        svg.legend(width - right + 28, top + 12 + 21 * i, [(color, name)])
        svg.text(width - 8, top + 12 + 21 * i, f"{sizes[worst] / 1e9:.2f}", 12, "end", INK)
    lines = [(report.limit, _ACCENT, f"limit {report.limit / 1e9:.1f} GB")]
    if held > 1.01 * total.max():
        lines.append((held, INK, f"allocated on every stage, {held / 1e9:.1f} GB"))
    for size, color, words in lines:
        svg.line(left, y(size), width - right, y(size), color, stroke_width="1.5", stroke_dasharray="6 4")
        svg.text(width - right, y(size) - 6, words, 12, "end", color, **HALO)
    return str(svg)


# --- Time against memory ----------------------------------------------------------------------------------------------


def pareto(points: Array) -> Array:
    """Return the Pareto front of points [n, 2], by rising column 0; smaller is better in both columns."""
    order = points[np.lexsort((points[:, 1], points[:, 0]))]
    least = np.minimum.accumulate(order[:, 1])
    return order[np.concatenate([[True], order[1:, 1] < least[:-1]])]


_ZOOM = 1.3  # times the chosen step that the picture goes to, at least


def shown(report: Report) -> tuple[Array, int, bool]:
    """Return the points of `trade`, [n, 2], how many slower ones are left out, and whether seconds need a log axis.

    Plans that differ little are what one chooses from; those that take much longer would push them into a corner.
    """
    ranked = np.array([(f.seconds, f.memory) for f in report.outcome.ranked])
    simulated = report.outcome.points.reshape(-1, 2)
    # Some slower plans save memory: as much of the front belongs into the picture as twice the chosen step's time has.
    front = pareto(np.concatenate([simulated, ranked]))[:, 0]
    chosen = report.chosen.seconds
    last = max(_ZOOM * chosen, float(ranked[:, 0].max()), float(front[front <= 2 * chosen].max(initial=0.0)))
    kept = simulated[simulated[:, 0] <= last * (1 + 1e-9)]
    points = np.concatenate([kept, ranked])
    return points, len(simulated) - len(kept), bool(points[:, 0].max() > 5 * points[:, 0].min())


def trade(report: Report, width: float = 1080) -> str:
    """Draw step time against memory of all simulated candidates, their Pareto front, and the ranked plans."""
    points, slower, logarithmic = shown(report)
    left, right, top, height = 56, 16, 34, 330
    seconds = points[:, 0]
    low, high = float(seconds.min()), float(seconds.max())
    scaled = np.log if logarithmic else np.asarray
    margin = 0.06 * low if logarithmic else max(0.04 * (high - low), 0.01 * low)
    low, high = low - margin, high + margin
    most = max(report.limit, float(points[:, 1].max())) * 1.08

    def x(s: Array | float) -> Array:
        return left + (scaled(s) - scaled(low)) / (scaled(high) - scaled(low)) * (width - left - right)

    def y(m: Array | float) -> Array:
        return np.asarray(top + height - m / most * height)

    svg = Svg(width, top + height + 40, "Step time against memory of the simulated candidates")
    for tick in ticks(0, most / 1e9, 7):
        at = float(y(tick * 1e9))
        svg.line(left, at, width - right, at, GRID)
        svg.text(left - 8, at + 4, f"{tick:g}", 11, "end")
    svg.text(left - 8, top - 10, "GB", 11, "end")
    factor, name = unit(low)
    for tick in _log_ticks(low * factor, high * factor) if logarithmic else ticks(low * factor, high * factor, 9):
        at = float(x(tick / factor))
        svg.line(at, top, at, top + height, GRID)
        svg.text(at, top + height + 16, f"{tick:.6g}", 11, "middle")
    svg.text(width - right, top + height + 34, f"step time, {name}", 11, "end")
    at = float(y(report.limit))
    svg.line(left, at, width - right, at, _ACCENT, stroke_width="1.5", stroke_dasharray="6 4")
    svg.text(width - right, at - 6, f"limit {report.limit / 1e9:.1f} GB", 12, "end", _ACCENT)
    # Points within half a pixel of each other are drawn once.
    drawn = np.unique(np.round(2 * np.stack([x(points[:, 0]), y(points[:, 1])], 1)).astype(int), axis=0) / 2
    dots = "".join(f"M{a:g} {b:g}h0" for a, b in drawn.tolist())
    svg.path(
        dots, stroke=_MAIN, stroke_width="4.4", stroke_linecap="round", stroke_opacity=0.7 if len(drawn) < 300 else 0.4
    )
    front = pareto(points)
    fx, fy = x(front[:, 0]), y(front[:, 1])
    steps = f"M{fx[0]:.1f} {top}V{fy[0]:.1f}" + "".join(f"H{a:.1f}V{b:.1f}" for a, b in zip(fx[1:], fy[1:]))
    svg.path(steps + f"H{width - right}", stroke=INK, stroke_width="1.3", fill="none")
    mine = float(x(report.chosen.seconds)), float(y(report.chosen.memory))
    for found in report.outcome.ranked:
        if found is not report.chosen:
            d = _dot(float(x(found.seconds)), float(y(found.memory)), 4.5)
            svg.path(d, fill="#ffffff", stroke=_MAIN, stroke_width="1.8")
    svg.path(_dot(*mine, 7), fill=_ACCENT, stroke="#ffffff", stroke_width="2")
    # Below the front there are no points to cover, if there is room above the axis.
    down = 20 if mine[1] + 24 < top + height else -11
    svg.text(mine[0] + 9, mine[1] + down, "chosen", 13, fill=_ACCENT, font_weight=700, **HALO)
    _trade_legend(svg, left, len(points) - len(report.outcome.ranked))
    if slower:
        svg.text(width - right, top - 10, f"{slower:,} slower ones are to the right of the picture", 11, "end")
    return str(svg)


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    return [n * 10.0**p for p in powers for n in (1, 2, 5) if low <= n * 10.0**p <= high]


def _trade_legend(svg: Svg, x: float, count: int) -> None:
    items = (
        (f"{count:,} simulated candidates", {"stroke": _MAIN, "stroke_opacity": "0.45", "d": "M{x} 10h0"}, "5"),
        ("ranked plans", {"stroke": _MAIN, "fill": "#fff", "d": _dot(5, 10, 4.5)}, "1.8"),
        ("Pareto front", {"stroke": INK, "d": "M{x} 6v5h14v4"}, "1.3"),
    )
    for words, attributes, wide in items:
        d = str(attributes.pop("d"))
        d = _dot(x + 5, 10, 4.5) if "a" in d else d.format(x=f"{x:g}")
        svg.path(d, **{"fill": "none", **attributes}, stroke_width=wide, stroke_linecap="round")
        svg.text(x + 19, 14, words, 12)
        x += 19 + width_of(words, 12) + 20
