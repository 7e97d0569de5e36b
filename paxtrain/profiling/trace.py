"""The reader of profiler traces: it finds when the instructions of a compiled program ran on each local CPU or GPU.

On a GPU every kernel is an event with its instruction's name. On CPUs an event is the time that one thread spends on
an instruction. The instruction leaves work to the thread pool as tasks without a name. Such a task belongs to the
instruction that put it into the queue, so a thread's time goes to the innermost instruction or task on it. A task in
the queue does not run: with few cores it often waits for a thread that is in a collective.
"""

import bisect
import collections
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from jax.profiler import ProfileData

# Name of the annotation around each time to break down: a traced step, or several steps together.
STEP = "paxtrain.profiling.trace step"
# Name of the annotation around the loop's wait for a batch.
READ = "paxtrain.profiling.trace read"

_GPU = re.compile(r"/device:GPU:(\d+)")
_SCHEDULE, _START, _STOP = (f"ThreadpoolListener::{name}" for name in ("Record", "StartRegion", "StopRegion"))


class Part(NamedTuple):
    """Part of a step that an instruction counts as.

    Attributes:
        name: name of the part, one of breakdown.PARTS.
        link: whether the instruction is a collective.
    """

    name: str
    link: bool


OTHER = Part("other", link=False)
# Part of a step in which the host waits for its data.
INPUT = Part("input", link=False)


class Span(NamedTuple):
    """Time in which an instruction ran or a collective was in flight, in seconds of the trace's clock."""

    start: float
    end: float
    part: Part


class _Execution(NamedTuple):
    """Execution of an instruction on a device; part is None if the instruction only runs others."""

    device: int
    part: Part | None


class _Time(NamedTuple):
    """Time that a thread spends on an instruction or, if `doing` is a number, on the task of that number."""

    start: float
    end: float
    doing: _Execution | int | None


class _Thread:
    """Events of one thread of the host."""

    def __init__(self) -> None:
        self.times: list[_Time] = []
        self.scheduled: list[tuple[float, int]] = []
        self._running: list[tuple[float, int]] = []

    def task(self, event: str, time: float, stats: dict[str, Any]) -> None:
        """Record that a task was put into the queue, started or stopped.

        Args:
            event: _SCHEDULE, _START or _STOP.
            time: time of the event, in seconds of the trace's clock.
            stats: statistics of the event.
        """
        if event == _SCHEDULE:
            self.scheduled.append((time, stats["_p"]))
        elif event == _START:
            self._running.append((time, stats["_c"]))
        elif self._running:
            began, number = self._running.pop()
            self.times.append(_Time(began, time, number))

    def innermost(self) -> Iterator[_Time]:
        """Yield the thread's times in order and without overlap: an inner time is taken from the one around it."""
        around: list[_Time] = []
        now = 0.0
        for time in [*sorted(self.times, key=lambda t: (t.start, -t.end)), _Time(math.inf, math.inf, None)]:
            while around and around[-1].end <= time.start:
                yield _Time(now, around[-1].end, around[-1].doing)
                now = around.pop().end
            if around:
                yield _Time(now, time.start, around[-1].doing)
            now = time.start
            around.append(time)


def _work(threads: Iterable[_Thread]) -> Iterator[tuple[int, Span]]:
    """Yield (device, time in which a thread worked for an instruction) for all instructions except collectives."""
    pieces: list[_Time] = []
    owner: dict[int, _Execution | int | None] = {}
    for thread in threads:
        mine = list(thread.innermost())
        pieces += mine
        for time, number in thread.scheduled:
            at = bisect.bisect_right(mine, time, key=lambda piece: piece.start) - 1
            owner[number] = mine[at].doing if at >= 0 and time <= mine[at].end else None
    for start, end, doing in pieces:
        while isinstance(doing, int):
            doing = owner.get(doing)
        if doing and doing.part and not doing.part.link and end > start:
            yield doing.device, Span(start, end, doing.part)


def read(
    trace: ProfileData, module: str, parts: Mapping[str, Part | None]
) -> tuple[list[tuple[float, float]], dict[int, list[Span]]]:
    """Return the times at which the steps and the instructions of a program ran.

    Args:
        trace: trace of the profiler.
        module: name of the program, as its text begins with it.
        parts: part that each instruction counts as; None if it only runs others. Instructions of other programs count
            as OTHER.

    Returns:
        The (start, end) of every annotation STEP, and the spans of each device in no order. Spans of READ are listed
        with every device. A device's number is its `local_hardware_id` on GPUs and its `id` on CPUs.
    """
    steps: list[tuple[float, float]] = []
    spans: dict[int, list[Span]] = collections.defaultdict(list)
    threads: list[_Thread] = []
    links: list[tuple[int, int, Span]] = []
    ended: dict[int, float] = {}
    reads: list[Span] = []

    def what(stats: dict[str, Any]) -> Part | None:
        return parts.get(stats.get("hlo_op", ""), OTHER) if stats.get("hlo_module") == module else OTHER

    with warnings.catch_warnings():
        # Python 3.12 warns about how jaxlib makes the type of stats. Where warnings are errors, that ends the process.
        warnings.simplefilter("ignore", DeprecationWarning)
        for plane, line in [(p.name, line) for p in trace.planes for line in p.lines]:
            gpu = _GPU.fullmatch(plane)
            if gpu and not line.name.startswith("Stream"):
                continue  # the same events, summed up
            thread = _Thread()
            threads.append(thread)
            for event in line.events:
                start, end, stats = event.start_ns * 1e-9, event.end_ns * 1e-9, dict(event.stats)
                if event.name == STEP:
                    steps.append((start, end))
                elif event.name == READ:
                    reads.append(Span(start, end, INPUT))
                elif gpu:
                    # Kernels of a CUDA graph may have the graph's name only.
                    spans[int(gpu[1])].append(Span(start, end, what(stats) or OTHER))
                elif event.name in (_SCHEDULE, _START, _STOP):
                    thread.task(event.name, start, stats)
                elif event.name.startswith("end: "):
                    ended[stats.get("_c", -1)] = end
                elif "hlo_op" in stats and "device_ordinal" in stats:
                    run = _Execution(stats["device_ordinal"], what(stats))
                    thread.times.append(_Time(start, end, run))
                    if run.part and run.part.link:
                        links.append((run.device, stats["_p"], Span(start, end, run.part)))
    for device, number, span in links:
        # The event of an asynchronous collective ends once it is on its way; another event has its end.
        spans[device].append(span._replace(end=max(span.end, ended.get(number, span.end))))
    for device, span in _work(threads):
        spans[device].append(span)
    for found in spans.values():
        found += reads
    return sorted(steps), dict(spans)
