"""Timelines of traced steps: for Perfetto, with a process per device and a track per part, and as a PNG."""

import gzip
import json
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
from jax.sharding import Mesh

from paxtrain.profiling.breakdown import PARTS, Traced
from paxtrain.profiling.trace import Part, Span
from paxtrain.run import plots

# Colors of the parts, in the order in which they are drawn over each other.
COLORS = {
    "input": "#f2d64b",
    "other": "#c9ced2",
    "forward": "#2f6f9f",
    "backward": "#5b8c3a",
    "head": "#8a5a9e",
    "pipeline": "#d9622b",
    "tensor": "#e0a030",
    "data": "#b3261e",
    "embedding": "#c77f9b",
    "compression": "#3aa6a0",
    "optimizer": "#5c6670",
    "sync": "#9aa3ab",
}


def joined(spans: Iterable[Span]) -> Iterator[tuple[float, float]]:
    """Yield (start, end) of each time in which at least one of the spans runs, in order."""
    runs: list[tuple[float, float]] = []
    for span in sorted(spans):
        if runs and span.start <= runs[-1][1]:
            runs[-1] = runs[-1][0], max(runs[-1][1], span.end)
        else:
            runs.append((span.start, span.end))
    yield from runs


def events(traced: Traced, mesh: Mesh) -> list[dict]:
    """Return the timeline in the trace-event format, with times in microseconds from the first traced step on."""
    zero, places = traced.windows[0][0], {device: place for place, device in np.ndenumerate(mesh.devices)}
    found: list[dict] = []
    order = sorted(zip(traced.devices, traced.spans), key=lambda pair: (places[pair[0]][1], places[pair[0]]))
    for process, (device, spans) in enumerate(order):
        data, stage, tensor = places[device]
        name = f"stage {stage}, data {data}, tensor {tensor} (device {device.id})"
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


def draw(path: pathlib.Path, traced: Traced, mesh: Mesh) -> None:
    """Draw one of this process's devices for each stage into a PNG, with work above and collectives below.

    Args:
        path: file to write.
        traced: trace of the steps.
        mesh: mesh of the step.
    """
    places = {device: place for place, device in np.ndenumerate(mesh.devices)}
    chosen: dict[int, tuple[tuple[int, ...], list[Span]]] = {}
    for device, spans in zip(traced.devices, traced.spans):
        data, stage, tensor = places[device]
        chosen.setdefault(stage, ((data, stage, tensor), spans))
    zero, end = traced.windows[0][0], traced.windows[-1][1]
    page = plots.figure(13, 1.2 + 0.9 * len(chosen))
    axes = page.subplots()
    seen = set()
    for lane, (_, spans) in enumerate(chosen.values()):
        for part, color in COLORS.items():
            for link in (False, True):
                some = [
                    span for span in spans if span.part == Part(part, link) and zero < span.end and span.start < end
                ]
                bars = [(start - zero, stop - start) for start, stop in joined(some)]
                label = part if bars and part not in seen else None
                seen |= {part} if bars else set()
                axes.broken_barh(bars, (lane + 0.42 * link, 0.36), color=color, linewidth=0, label=label)
    named = [f"stage {stage}\n(data {data}, tensor {tensor})" for (data, stage, tensor), _ in chosen.values()]
    axes.set_yticks([lane + 0.39 for lane in range(len(named))], named)
    axes.invert_yaxis()
    plots.style(axes)
    axes.set_xlim(0, end - zero)
    axes.set_xlabel("seconds")
    page.legend(frameon=False, loc="outside upper center", ncols=len(COLORS))
    page.savefig(path)
