"""Where the seconds of a training step go, from a profiler trace of a few steps and the compiled step's text.

The trace says when each instruction of the program ran on each local device; the text says from which named scope it
comes, and between which devices a collective goes. The parts:

    forward, backward   F and B of the layers and the embedding's lookup; recomputing is B's. On masked schedules (see
                        pipeline.py) idle stages compute on scrap, and that is in here: the bubble is no wait there.
    head                final norm, logits and loss, forward and backward
    pipeline            transfers between stages, and waiting there for the other end
    tensor              collectives over the tensor axis
    data                collectives over the data axis, but for the embedding's
    embedding           the tied table: its collectives over data, and the exchange between first and last stage
    compression         encoding and decoding
    optimizer           clipping and update
    sync                collectives for loss, gradient norm and metrics: the first place where all wait for the slowest
    other               all other instructions: casts of the weights, the rows' bookkeeping, copies that XLA added
    input               nothing ran, and the loop waited for a batch
    idle                nothing ran for another reason: dispatch, the host, a core that is busy with something else

Each instant of a device counts once. Work goes before collectives, so that a collective counts where nothing hides it;
how much is hidden is told apart. Parts that run at the same time share it.
"""

import collections
import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.profiler import ProfileData
from jax.sharding import Mesh

from paxtrain.profiling.trace import INPUT, OTHER, STEP, Part, Span, read
from paxtrain.xla import hlo

SCOPES = ("forward", "backward", "head", "embedding", "compression", "optimizer", "sync")
LINKS = ("pipeline", "tensor", "data", "embedding", "sync")
PARTS = (
    "forward", "backward", "head", "pipeline", "tensor", "data", "embedding", "compression", "optimizer", "sync",
    "other", "input", "idle",
)  # fmt: skip

# On CPUs these have events of their own, around those of what they run.
_CONTAINERS = ("while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step on this process's devices, means over the traced steps.

    Attributes:
        devices: of the mesh and this process, in the mesh's order.
        total: of a traced step, from its call until its results are there.
        seconds: of each of PARTS, float64 [devices]; on every device they add up to the total.
        hidden: of each of LINKS, float64 [devices]: seconds in which its collectives were in flight under work, and
            which count as that work.
        untraced: the total without the profiler, where it was measured.
    """

    devices: tuple[jax.Device, ...]
    total: float
    seconds: dict[str, np.ndarray]
    hidden: dict[str, np.ndarray]
    untraced: float = math.nan


@dataclasses.dataclass(frozen=True)
class Traced:
    """What a trace says of this process's devices of a mesh, in the mesh's order.

    Attributes:
        windows: (start, end) of what is to be shared out, in seconds of the trace's clock.
        spans: of each device.
    """

    devices: tuple[jax.Device, ...]
    windows: list[tuple[float, float]]
    spans: list[list[Span]]


def axes(groups: tuple[tuple[int, ...], ...], mesh: Mesh) -> frozenset[str]:
    """The mesh axes along which the partitions of a group differ; no groups: all partitions are one."""
    found = set()
    for group in groups or [range(mesh.size)]:
        places = np.unravel_index(list(group), mesh.devices.shape)
        found |= {axis for axis, place in zip(mesh.axis_names, places) if len(set(place.tolist())) > 1}
    return frozenset(found)


def part(instruction: hlo.Instruction, mesh: Mesh) -> Part:
    """What an instruction of the step counts as: a collective by its axis, all else by its innermost named scope."""
    words = re.split(r"[/()]", instruction.op_name)
    scope = next((word for word in reversed(words) if word in SCOPES), "other")
    if not instruction.kind:
        return Part(scope, link=False)
    if scope in ("embedding", "sync") or (scope == "optimizer" and "muon" not in words):
        return Part("embedding" if scope == "embedding" else "sync", link=True)
    over = axes(instruction.groups, mesh)
    if over == {"pipe"} and instruction.kind == "collective-permute":
        return Part("pipeline", link=True)
    if over == {"tensor"}:
        return Part("tensor", link=True)
    if over == {"data"}:
        return Part("data", link=True)
    return Part("sync", link=True)


def parts(text: str, mesh: Mesh) -> dict[str, Part | None]:
    """What each instruction of a compiled step's text counts as; None for those that only run others."""
    return {
        name: None if instruction.opcode in _CONTAINERS else part(instruction, mesh)
        for name, instruction in hlo.instructions(text).items()
    }


def attribute(spans: Iterable[Span], start: float, end: float) -> tuple[collections.Counter, collections.Counter]:
    """Seconds from start to end by part, idle included, and seconds of collectives under work by part."""
    edges = [(end, 0, OTHER)]
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if last > first:
            edges += [(first, 1, span.part), (last, -1, span.part)]
    seconds: collections.Counter[str] = collections.Counter()
    hidden: collections.Counter[str] = collections.Counter()
    flying: collections.Counter[Part] = collections.Counter()
    now = start
    for then, change, what in sorted(edges):
        work = {p: n for p, n in flying.items() if n and not p.link and p != INPUT}
        links = {p: n for p, n in flying.items() if n and p.link}
        counted = work or links or {INPUT if flying[INPUT] else Part("idle", link=False): 1}
        for p, n in counted.items():
            seconds[p.name] += (then - now) * n / sum(counted.values())
        if work:
            hidden.update({p.name: then - now for p in links})
        now = then
        flying[what] += change
    return seconds, hidden


def load(folder: pathlib.Path, text: str, mesh: Mesh) -> Traced:
    """The newest trace in a folder.

    Args:
        text: of the compiled step that ran, for all processes.
        mesh: its mesh.
    """
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    module = text.split(maxsplit=2)[1].rstrip(",")
    windows, spans = read(ProfileData.from_file(str(path)), module, parts(text, mesh))
    devices = tuple(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    numbers = [d.id if d.platform == "cpu" else d.local_hardware_id for d in devices]
    return Traced(devices, windows, [spans.get(number, []) for number in numbers])


def shares(traced: Traced, steps: int) -> Breakdown:
    """The breakdown of a step, of a trace of so many."""
    each = [[attribute(spans, *window) for window in traced.windows] for spans in traced.spans]

    def mean(which: int, name: str) -> np.ndarray:
        return np.array([sum(found[which][name] for found in device) / steps for device in each])

    return Breakdown(
        devices=traced.devices,
        total=sum(end - start for start, end in traced.windows) / steps,
        seconds={name: mean(0, name) for name in PARTS},
        hidden={name: mean(1, name) for name in LINKS},
    )


def breakdown(run: Callable[[], Any], compiled: jax.stages.Compiled, mesh: Mesh, steps: int = 3) -> Breakdown:
    """Traces a few steps of this process. All processes of the mesh call it together.

    Args:
        run: runs `compiled` once and returns (some of) its results. Called 2 * steps + 1 times.
        compiled: the train step, as Trainer.compile_step makes it.
        mesh: its mesh.
        steps: to trace.

    Raises:
        ValueError: nothing of the program is in the trace: run runs another one, or the backend tells nothing.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    jax.block_until_ready(run())
    began = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(run())
    untraced = (time.perf_counter() - began) / steps
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(STEP):
                    jax.block_until_ready(run())
        traced = load(pathlib.Path(folder), compiled.as_text(), mesh)
    for device, spans in zip(traced.devices, traced.spans):
        if all(span.part == OTHER for span in spans):
            raise ValueError(f"the trace has no instruction of the program on device {device.id}; does run execute it?")
    return dataclasses.replace(shares(traced, steps), untraced=untraced)


def by_stage(found: Breakdown, mesh: Mesh) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Seconds and hidden seconds of every part by stage, [P]: means over the devices of all processes."""
    stage = {device: place[1] for place, device in np.ndenumerate(mesh.devices)}
    mine = np.array([[*(found.seconds[p][i] for p in PARTS), *(found.hidden[p][i] for p in LINKS)]
                     for i in range(len(found.devices))])  # fmt: skip
    stages, values = multihost_utils.process_allgather((np.array([stage[d] for d in found.devices]), mine), tiled=True)
    means = np.stack([values[stages == s].mean(axis=0) for s in range(mesh.devices.shape[1])], axis=1)
    return dict(zip(PARTS, means)), dict(zip(LINKS, means[len(PARTS) :]))


def table(seconds: dict[str, np.ndarray], hidden: dict[str, np.ndarray]) -> str:
    """Parts by stage in seconds, and the share of each in the step, those that are nowhere left out."""
    total = sum(seconds.values())
    heads = [f"stage {s}" for s in range(len(total))]
    lines = [f"  {'seconds of a step':<18}" + "".join(f"{head:>10}" for head in heads) + f"{'share':>9}"]
    row = lambda name, values: f"  {name:<18}" + "".join(f"{value:>10.4f}" for value in values)  # noqa: E731
    for name, values in [*seconds.items(), ("together", total)]:
        if values.any():
            lines.append(row(name, values) + f"{values.mean() / total.mean():>9.1%}")
    under = [row(name, values) for name, values in hidden.items() if values.round(4).any()]
    return "\n".join([*lines, *(["  in flight under work, and counted as that:"] if under else []), *under])
