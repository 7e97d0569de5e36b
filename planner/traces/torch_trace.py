"""Traces of torch.profiler: JSON of Chrome's format, as `export_chrome_trace` and `tensorboard_trace_handler` write it.

Events with "ph": "X" have a start `ts` and a duration `dur` in microseconds, and a category `cat`: "kernel" for kernels
of the GPU, "cuda_runtime" and "cuda_driver" for calls of the host, with the same `correlation` as the kernel that they
launch, "cpu_op" for operators, "user_annotation" for ranges, among them `ProfilerStep#3` and
`Optimizer.step#AdamW.step` (kineto, libkineto/src/output_json.cpp). Older versions write "Kernel", "Runtime" and
"Operator".
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paxtrain.errors import UserError
from planner.traces import phases
from planner.traces.kernels import GpuTrace
from planner.traces.phases import KernelLaunch, Operator

_KERNEL, _CALLS = ("kernel", "Kernel"), ("cuda_runtime", "cuda_driver", "Runtime")
_OPERATORS = ("cpu_op", "Operator", "user_annotation")
_STEP = re.compile(r"^ProfilerStep#\d+$")
_UPDATE = re.compile(r"^Optimizer\.step#")
_MICRO = 1e-6


def is_trace(values: object) -> bool:
    """Return whether JSON's values are a trace of torch.profiler with kernels."""
    return any(event.get("cat") in _KERNEL for event in events(values))


def events(values: object) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a trace in Chrome's format that have objects for arguments."""
    found = values.get("traceEvents") if isinstance(values, dict) else values
    for event in found if isinstance(found, list) else ():
        if isinstance(event, dict) and isinstance(event.get("args", {}), dict):
            yield event


def times(event: Mapping[str, Any]) -> tuple[float, float]:
    """Return start and end of an event, in seconds.

    Raises:
        UserError: they are no numbers.
    """
    start, took = event.get("ts"), event.get("dur")
    if not (
        isinstance(start, int | float) and isinstance(took, int | float) and abs(start) < 1e18 and 0 <= took < 1e12
    ):
        raise UserError(
            f"the event {str(event.get('name'))[:40]!r} has ts={start!r:.20} and dur={took!r:.20}, no times"
        )
    return start * _MICRO, (start + took) * _MICRO


def parse(path: str, values: object) -> GpuTrace:
    """Return the trace that JSON's values hold.

    Raises:
        UserError: it has no kernels with their launches, those of several GPUs, or no F and B.
    """
    kernels: dict[str, tuple[str, float, float]] = {}
    devices: set[str] = set()
    calls: dict[str, tuple[int, float]] = {}
    operators: list[Operator] = []
    threads: dict[object, int] = {}
    for event in events(values):
        category, arguments, name = event.get("cat"), event.get("args", {}), str(event.get("name"))
        thread = threads.setdefault((str(event.get("pid")), str(event.get("tid"))), len(threads))
        if event.get("ph") != "X" or category not in (*_KERNEL, *_CALLS, *_OPERATORS):
            continue
        start, end = times(event)
        key = str(arguments.get("correlation"))
        if category in _KERNEL:
            kernels[key] = name, start, end
            devices.add(str(arguments.get("device", event.get("pid"))))
        elif category in _CALLS:
            calls[key] = thread, start
        else:
            operators.append(Operator(name, thread, start, end))
    if len(devices) > 1:
        raise UserError(f"it has kernels of {len(devices)} GPUs ({', '.join(sorted(devices)[:4])}); give that of one")
    launches = [
        KernelLaunch(*calls[key], name, start, end) for key, (name, start, end) in kernels.items() if key in calls
    ]
    if not launches:
        raise UserError(
            f"it has {len(kernels)} kernels, of which no launch is there; profile with CPU and CUDA activities"
        )
    steps = sorted((o.start, o.end) for o in operators if _STEP.match(o.name))
    found = phases.label([o for o in operators if not _STEP.match(o.name)], launches, steps)
    updates = {round(o.start, 9) for o in operators if _UPDATE.match(o.name)}
    if steps:
        updates = {start for start in updates if any(a <= start <= b for a, b in steps)}
    return GpuTrace(
        path, _device(values, next(iter(devices))), *found[:2], len(updates), *found[2:], ranks=_ranks(values)
    )


def _device(values: object, number: object) -> str:
    """Return the GPU's name."""
    found = values.get("deviceProperties") if isinstance(values, dict) else None
    for one in found if isinstance(found, list) else ():
        if isinstance(one, dict) and str(one.get("id")) == str(number):
            return str(one.get("name", ""))
    return ""


def _ranks(values: object) -> int:
    found = values.get("distributedInfo") if isinstance(values, dict) else None
    ranks = found.get("world_size", 1) if isinstance(found, dict) else 1
    return ranks if type(ranks) is int and ranks > 0 else 1


def loads(text: str) -> object:
    """Return JSON's values.

    Raises:
        UserError: it is no whole JSON.
    """
    try:
        return json.loads(text, parse_constant=lambda _: math.nan)
    except (ValueError, RecursionError) as error:
        raise UserError(f"it is no whole JSON ({error}); give the trace as the profiler has written it") from error
