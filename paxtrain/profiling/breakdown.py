"""The breakdown of a training step's seconds, from a profiler trace of a few steps and the compiled step's text.

The trace says when each instruction of the program ran on each local device. The text says which named scope an
instruction comes from, and which devices a collective connects. The parts:

    forward, backward   F and B of the layers, with the embedding's lookup; recomputation counts as B. Under masked
                        schedules (paxtrain/pipeline/executor.py) idle stages compute on scrap. That time counts here
                        too, so their bubble is no idle time.
    head                final norm, logits and loss, forward and backward
    pipeline            transfers between stages, with the wait for the other end
    tensor/forward, tensor/head, tensor/backward
                        collectives over the tensor axis by the work that needs them; all others of them count as B's
    gather              collectives over the data axis that gather the weights of layers
    data                all others over the data axis, except the embedding's: gradients, and what the optimizer moves
    embedding           the tied table: its collectives over data, and the exchange between first and last stage
    compression         encoding and decoding
    optimizer           clipping and update
    sync                collectives for loss, gradient norm and metrics: the first place where all wait for the slowest
    other               all other instructions: casts of the weights, the rows' bookkeeping, copies that XLA added
    input               time in which nothing ran and the loop waited for a batch
    idle                time in which nothing ran for another reason: dispatch, the host, a core busy with other work

Each instant of a device counts once. Work takes precedence over collectives, so a collective counts only while no work
hides it. Hidden seconds are listed separately. Parts that run at the same time share that time.
"""

import collections
import dataclasses
import math
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping

import jax
import numpy as np
from jax.profiler import ProfileData
from jax.sharding import Mesh

from paxtrain.config.axes import DATA, PIPE, REPLICA, TENSOR
from paxtrain.process import distributed
from paxtrain.profiling.trace import INPUT, OTHER, STEP, Part, Span, read
from paxtrain.xla import hlo

SCOPES = ("forward", "backward", "head", "embedding", "compression", "optimizer", "sync")
OVER_TENSOR = ("tensor/forward", "tensor/head", "tensor/backward")
LINKS = ("pipeline", *OVER_TENSOR, "gather", "data", "embedding", "sync")
PARTS = (
    "forward",
    "backward",
    "head",
    "pipeline",
    *OVER_TENSOR,
    "gather",
    "data",
    "embedding",
    "compression",
    "optimizer",
    "sync",
    "other",
    "input",
    "idle",
)

# On CPUs these instructions have events around those of the instructions that they run.
_CONTAINERS = ("while", "call", "conditional")


@dataclasses.dataclass(frozen=True)
class Breakdown:
    """Seconds of a step on this process's devices, means over the traced steps.

    Attributes:
        devices: this process's devices of the mesh, in the mesh's order.
        total: seconds of a traced step, from its call until its results are ready.
        seconds: seconds of each of PARTS, float64 [devices]; on every device they add up to the total.
        hidden: seconds in which collectives of each of LINKS were in flight under work, float64 [devices]; `seconds`
            counts them as that work.
        untraced: seconds of a step without the profiler, nan if not measured.
    """

    devices: tuple[jax.Device, ...]
    total: float
    seconds: dict[str, np.ndarray]
    hidden: dict[str, np.ndarray]
    untraced: float = math.nan


@dataclasses.dataclass(frozen=True)
class Traced:
    """Trace of this process's devices.

    Attributes:
        devices: this process's devices of the mesh, in the mesh's order.
        windows: (start, end) of each time to break down, in seconds of the trace's clock.
        spans: spans of each device.
    """

    devices: tuple[jax.Device, ...]
    windows: list[tuple[float, float]]
    spans: list[list[Span]]


def axes(groups: tuple[tuple[int, ...], ...], mesh: Mesh) -> frozenset[str]:
    """Return the mesh axes along which the partitions of a group differ; no groups stand for one group of all."""
    found = set()
    for group in groups or [range(mesh.size)]:
        places = np.unravel_index(list(group), mesh.devices.shape)
        found |= {axis for axis, place in zip(mesh.axis_names, places) if len(set(place.tolist())) > 1}
    return frozenset(found)


def part(instruction: hlo.Instruction, mesh: Mesh) -> Part:
    """Return what an instruction counts as: a collective by its axis, others by the innermost named scope."""
    words = re.split(r"[/()]", instruction.op_name)
    scope = next((word for word in reversed(words) if word in SCOPES), "other")
    if not instruction.kind:
        return Part(scope, link=False)
    if scope in ("embedding", "sync") or (scope == "optimizer" and "muon" not in words):
        return Part("embedding" if scope == "embedding" else "sync", link=True)
    over = axes(instruction.groups, mesh)
    if over == {PIPE} and instruction.kind == "collective-permute":
        return Part("pipeline", link=True)
    if over == {TENSOR}:
        return Part(f"tensor/{scope if scope in ('forward', 'head') else 'backward'}", link=True)
    if over and over <= {DATA, REPLICA}:
        return Part("gather" if "gather_weights" in words else "data", link=True)
    return Part("sync", link=True)


def parts(text: str, mesh: Mesh) -> dict[str, Part | None]:
    """Return what each instruction of a compiled step's text counts as; None if it only runs others."""
    return {
        name: None if instruction.opcode in _CONTAINERS else part(instruction, mesh)
        for name, instruction in hlo.instructions(text).items()
    }


def attribute(spans: Iterable[Span], start: float, end: float) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """Return the seconds of a window by part, with idle, and the seconds of collectives under work by part.

    Args:
        spans: spans of one device.
        start: start of the window, in seconds of the trace's clock.
        end: end of the window.
    """
    edges = [(end, 0, OTHER)]
    for span in spans:
        first, last = max(span.start, start), min(span.end, end)
        if last > first:
            edges += [(first, 1, span.part), (last, -1, span.part)]
    seconds: dict[str, float] = collections.defaultdict(float)
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
    """Return the newest trace in a folder.

    Args:
        folder: folder of the traces.
        text: text of the compiled step that ran.
        mesh: mesh of the step, of all processes.
    """
    path = max(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    module = text.split(maxsplit=2)[1].rstrip(",")
    windows, spans = read(ProfileData.from_file(str(path)), module, parts(text, mesh))
    devices = tuple(d for d in mesh.devices.flat if d.process_index == jax.process_index())
    numbers = [d.id if d.platform == "cpu" else d.local_hardware_id for d in devices]
    return Traced(devices, windows, [spans.get(number, []) for number in numbers])


def shares(traced: Traced, steps: int) -> Breakdown:
    """Return the breakdown of a step from a trace of `steps` steps."""
    each = [[attribute(spans, *window) for window in traced.windows] for spans in traced.spans]

    def mean(which: int, name: str) -> np.ndarray:
        return np.array([sum(found[which].get(name, 0.0) for found in device) / steps for device in each])

    return Breakdown(
        devices=traced.devices,
        total=sum(end - start for start, end in traced.windows) / steps,
        seconds={name: mean(0, name) for name in PARTS},
        hidden={name: mean(1, name) for name in LINKS},
    )


def breakdown(run: Callable[[], object], compiled: jax.stages.Compiled, mesh: Mesh, steps: int = 3) -> Breakdown:
    """Return the breakdown of a few steps, traced on this process; all processes of the mesh call it together.

    Args:
        run: function that runs `compiled` once and returns (some of) its results. It is called 2 * steps + 1 times.
        compiled: training step that Trainer.compile_step returned.
        mesh: mesh of the step.
        steps: number of steps to trace.

    Raises:
        ValueError: the trace has no event of the program: `run` runs another one, or the backend traces nothing.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level, options.enable_hlo_proto = 0, False
    jax.block_until_ready(run())
    began = time.perf_counter()
    for _ in range(steps):
        jax.block_until_ready(run())
    untraced = (time.perf_counter() - began) / steps
    text = compiled.as_text()
    assert text is not None
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for _ in range(steps):
                with jax.profiler.TraceAnnotation(STEP):
                    jax.block_until_ready(run())
        traced = load(pathlib.Path(folder), text, mesh)
    for device, spans in zip(traced.devices, traced.spans):
        if all(span.part == OTHER for span in spans):
            raise ValueError(f"the trace has no instruction of the program on device {device.id}; does run execute it?")
    return dataclasses.replace(shares(traced, steps), untraced=untraced)


def by_stage(found: Breakdown, mesh: Mesh) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the seconds and hidden seconds of every part by stage, [P], as means over the devices of all processes."""
    pipe = mesh.axis_names.index(PIPE)
    stage = {device: place[pipe] for place, device in np.ndenumerate(mesh.devices)}
    mine = np.stack([*(found.seconds[p] for p in PARTS), *(found.hidden[p] for p in LINKS)], axis=1)
    stages, values = distributed.allgather((np.array([stage[d] for d in found.devices]), mine), tiled=True)
    means = np.stack([values[stages == s].mean(axis=0) for s in range(mesh.devices.shape[pipe])], axis=1)
    return dict(zip(PARTS, means)), dict(zip(LINKS, means[len(PARTS) :]))


def table(seconds: dict[str, np.ndarray], hidden: dict[str, np.ndarray]) -> str:
    """Return a table of the parts' seconds by stage and their shares of the step, without parts that are zero."""
    total = np.sum(list(seconds.values()), axis=0)
    heads = [f"stage {s}" for s in range(len(total))]
    lines = [f"  {'seconds of a step':<18}" + "".join(f"{head:>10}" for head in heads) + f"{'share':>9}"]

    def row(name: str, values: np.ndarray) -> str:
        return f"  {name:<18}" + "".join(f"{value:>10.4f}" for value in values)

    for name, values in [*seconds.items(), ("together", total)]:
        if values.any():
            lines.append(row(name, values) + f"{values.mean() / total.mean():>9.1%}")
    under = [row(name, values) for name, values in hidden.items() if values.round(4).any()]
    return "\n".join([*lines, *(["  in flight under work, and counted as that:"] if under else []), *under])
