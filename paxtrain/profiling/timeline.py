"""Timelines of traced steps: for Perfetto, with a process per device and a track per part, and as a PNG."""

import gzip
import json
import pathlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from jax.sharding import Mesh
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from paxtrain.config.axes import PIPE, shown
from paxtrain.profiling import canvas
from paxtrain.profiling.breakdown import OVER_TENSOR, PARTS, Traced
from paxtrain.profiling.trace import Part, Span

# Colors of the parts, in the order in which they are drawn on top of each other.
COLORS = {
    "input": "#f2d64b",
    "other": "#c9ced2",
    "forward": "#2f6f9f",
    "backward": "#5b8c3a",
    "head": "#8a5a9e",
    "pipeline": "#d9622b",
    **dict.fromkeys(OVER_TENSOR, "#e0a030"),
    "gather": "#e0788a",
    "data": "#b3261e",
    "embedding": "#c77f9b",
    "compression": "#3aa6a0",
    "optimizer": "#5c6670",
    "sync": "#9aa3ab",
}
_PIECES = 240  # of the time in the PNG, each about as wide as can be seen
_IN_A_ROW = 7  # names of parts
_TALL = 0.42  # height of the lane of work, and of that of links


def joined(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of each time in which at least one of the spans runs, in order."""
    runs: list[tuple[float, float]] = []
    for span in sorted(spans):
        if runs and span.start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], span.end)
        else:
            runs.append((span.start, span.end))
    yield from runs


def _place(mesh: Mesh, place: tuple[int, ...]) -> str:
    """Return a device's place on the mesh in words, "stage 1, data 0, tensor 1", with other axes of several devices."""
    of = dict(zip(mesh.axis_names, place))
    words = [f"stage {of[PIPE]}", *(f"{axis} {of[axis]}" for axis in shown(dict(mesh.shape)) if axis != PIPE)]
    return ", ".join(words)


def events(traced: Traced, mesh: Mesh) -> list[dict]:
    """Return the timeline in the trace-event format, with times in microseconds from the first traced step on."""
    zero, places = traced.windows[0][0], {device: place for place, device in np.ndenumerate(mesh.devices)}
    found: list[dict] = []
    order = sorted(zip(traced.devices, traced.spans), key=lambda pair: (places[pair[0]][1], places[pair[0]]))
    for process, (device, spans) in enumerate(order):
        name = f"{_place(mesh, places[device])} (device {device.id})"
        found.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        found.append({"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}})
        for track, part in enumerate(PARTS):
            inside = [
                span._replace(start=max(span.start, first), end=min(span.end, last))
                for span in spans
                if span.part.name == part
                for first, last in traced.windows
                if span.end > first and span.start < last
            ]
            if inside:
                at = {"pid": process, "tid": track}
                found.append({"ph": "M", "name": "thread_name", "args": {"name": part}, **at})
                found.append({"ph": "M", "name": "thread_sort_index", "args": {"sort_index": track}, **at})
            for start, end in joined(inside):
                times = {"ts": (start - zero) * 1e6, "dur": (end - start) * 1e6}
                found.append({"ph": "X", "name": part, **at, **times})
    return found


def write(path: pathlib.Path, traced: Traced, mesh: Mesh) -> None:
    """Write the traced steps of this process's devices as gzipped JSON.

    Args:
        path: file to write.
        traced: trace of the steps.
        mesh: mesh of the step.
    """
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": events(traced, mesh)}, file)


def shares(spans: Iterable[Span], edges: np.ndarray) -> np.ndarray:
    """Return the share of each interval between edges [n + 1] in which at least one of the spans runs, [n]."""
    covered = np.zeros(len(edges) - 1)
    for start, end in joined(spans):
        covered += np.clip(np.minimum(end, edges[1:]) - np.maximum(start, edges[:-1]), 0, None)
    return covered / np.diff(edges)


def typical(windows: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return the window of median length."""
    return sorted(windows, key=lambda window: window[1] - window[0])[len(windows) // 2]


def _lane(axes: Axes, spans: list[Span], edges: np.ndarray, base: float, link: bool) -> set[str]:
    """Draw what a device does, the parts on top of each other, and return the parts that it draws.

    Args:
        axes: axes to draw in, whose y rises downwards.
        spans: spans of the device.
        edges: ends of the intervals, [n + 1].
        base: y of the lower end.
        link: whether to draw what crosses links, instead of work.
    """
    found = {part: shares([span for span in spans if span.part == Part(part, link)], edges) for part in COLORS}
    total = np.maximum(np.sum(list(found.values()), axis=0), 1.0)  # parts may run at the same time
    seen: set[str] = set()
    level = np.zeros(len(edges) - 1)
    for part, share in found.items():
        if share.any():
            top = level + _TALL * share / total
            axes.fill_between(
                edges - edges[0],
                base - np.append(level, level[-1]),
                base - np.append(top, top[-1]),
                step="post",
                color=COLORS[part],
                linewidth=0,
            )
            seen, level = seen | {part}, top
    return seen


def draw(traced: Traced, mesh: Mesh) -> Figure:
    """Draw traced steps of one of this process's devices for each stage.

    Work is above and what crosses links below. Ops are much shorter than a pixel is wide, so each piece of time shows
    how much of it each part takes.

    Args:
        traced: trace of the steps.
        mesh: mesh of the step.
    """
    places = {device: place for place, device in np.ndenumerate(mesh.devices)}
    chosen: dict[int, tuple[tuple[int, ...], list[Span]]] = {}
    for device, spans in zip(traced.devices, traced.spans):
        place = places[device]
        chosen.setdefault(place[mesh.axis_names.index(PIPE)], (place, spans))
    begin, end = typical(traced.windows)
    edges = np.linspace(begin, end, _PIECES + 1)
    page = canvas.figure(13, 1.8 + 1.0 * len(chosen))
    axes = page.subplots()
    seen: set[str] = set()
    for lane, (_, spans) in enumerate(chosen.values()):
        for link in (False, True):
            seen |= _lane(axes, spans, edges, lane + _TALL + (_TALL + 0.04) * link, link)
        axes.axhline(lane + 2 * _TALL + 0.04, color="#c9ced2", linewidth=0.8)
    lanes = [_place(mesh, place).replace(", ", "\n", 1) for place, _ in chosen.values()]
    axes.set_yticks([lane + _TALL for lane in range(len(lanes))], lanes)
    axes.invert_yaxis()
    canvas.style(axes)
    axes.set_xlim(0, end - begin)
    axes.set_xlabel(f"seconds; each {1e3 * (edges[1] - edges[0]):.2g} ms shows the shares of its parts")
    named = {COLORS[part]: part.partition("/")[0] for part in COLORS if part in seen}  # one name for each color
    page.legend(
        [Rectangle((0, 0), 1, 1, color=color) for color in named],
        list(named.values()),
        frameon=False,
        loc="outside upper center",
        ncols=_IN_A_ROW,
    )
    return page
