"""The kernels of a trace of one GPU, each with its part of the training step, and the seconds of a layer from them."""

import dataclasses
import statistics
from collections.abc import Iterable, Sequence

import numpy as np

FORWARD, BACKWARD, OPTIMIZER, OTHER = "forward", "backward", "optimizer", "other"
LAYERS, HEAD, EMBEDDING = "layers", "head", "embedding"
NOTHING, WHOLE_LAYERS, SOME = "nothing", "whole layers", "attention or norms"  # that B runs again
COLLECTIVE = r"(?i)\b(?:nccl|rccl)"  # in the names of kernels


@dataclasses.dataclass(frozen=True)
class TracedKernel:
    """A kernel.

    Attributes:
        start: when it began, in seconds of the trace's clock.
        end: when it ended.
        launched: when the host launched it; NaN: not known.
        phase: FORWARD, BACKWARD, OPTIMIZER or OTHER.
        place: LAYERS, HEAD or EMBEDDING.
        run: number of the pass (F and B of one micro-batch) that it belongs to; -1: not known, or none.
        link: whether it is a collective.
    """

    start: float
    end: float
    launched: float
    phase: str
    place: str = LAYERS
    run: int = -1
    link: bool = False


@dataclasses.dataclass(frozen=True)
class GpuTrace:
    """The facts that a trace of one GPU has.

    Attributes:
        path: its file.
        device: name of the GPU, as its driver reports it; "": not said.
        kernels: its kernels.
        passes: micro-batches whose F and B it has; 0: it does not say.
        steps: optimizer steps that it has; 0: none, or it does not say.
        head: whether it tells the head and the embedding from the layers.
        recomputes: what of F the trace's B runs again: NOTHING, WHOLE_LAYERS or SOME; None: it does not say.
        ranks: processes of the run; 1: one, or not said.
    """

    path: str
    device: str
    kernels: tuple[TracedKernel, ...]
    passes: int
    steps: int
    head: bool
    recomputes: str | None
    ranks: int = 1


def busy(kernels: Iterable[TracedKernel]) -> float:
    """Return the seconds in which at least one of the kernels ran."""
    total, until = 0.0, -np.inf
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        total += max(kernel.end - max(kernel.start, until), 0.0)
        until = max(until, kernel.end)
    return total


@dataclasses.dataclass(frozen=True)
class PartSeconds:
    """Seconds of one micro-batch's parts of a step, in which kernels ran; 0: the trace has none.

    Attributes:
        forward: F of one layer.
        backward: B of one layer.
        head: head and loss, with their gradients.
        embedding: look-up and its gradient.
        optimizer: the update, of one step.
        idle: share of F's time in which no kernel ran.
        every: median seconds from one launch to the next in F; 0: not known.
    """

    forward: float
    backward: float
    head: float
    embedding: float
    optimizer: float
    idle: float
    every: float


def part_seconds(trace: GpuTrace, layers: int, passes: int, collectives: bool) -> PartSeconds:
    """Return the seconds of the parts.

    Args:
        trace: a trace.
        layers: layers of the device.
        passes: micro-batches whose F and B the trace has.
        collectives: whether they count, as those of tensor parallelism do, which lie between the kernels of a layer.
    """
    counted = [kernel for kernel in trace.kernels if collectives or not kernel.link]

    def of(place: str, *phases: str) -> float:
        return busy(k for k in counted if k.phase in phases and k.place == place) / passes

    forward = [kernel for kernel in trace.kernels if kernel.phase == FORWARD]
    return PartSeconds(
        of(LAYERS, FORWARD) / layers,
        of(LAYERS, BACKWARD) / layers,
        of(HEAD, FORWARD, BACKWARD),
        of(EMBEDDING, FORWARD, BACKWARD),
        busy(k for k in counted if k.phase == OPTIMIZER) / max(trace.steps, 1),
        _idle(forward),
        _every(forward),
    )


def _by_run(kernels: Sequence[TracedKernel]) -> dict[int, list[TracedKernel]]:
    found: dict[int, list[TracedKernel]] = {}
    for kernel in kernels:
        found.setdefault(kernel.run, []).append(kernel)
    return found


def _idle(forward: Sequence[TracedKernel]) -> float:
    """Return the share of the passes' time in which no kernel of F ran."""
    runs = list(_by_run(forward).values())
    span = sum(max(k.end for k in run) - min(k.start for k in run) for run in runs)
    return 1 - sum(map(busy, runs)) / span if span > 0 else 0.0


def _every(forward: Sequence[TracedKernel]) -> float:
    """Return the median seconds between launches of a pass."""
    gaps: list[float] = []
    for run in _by_run([kernel for kernel in forward if not np.isnan(kernel.launched)]).values():
        times = sorted(kernel.launched for kernel in run)
        gaps += [after - before for before, after in zip(times, times[1:])]
    return statistics.median(gaps) if gaps else 0.0
