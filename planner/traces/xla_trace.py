"""Traces of jax.profiler on a GPU: the NAME.trace.json.gz beside the .xplane.pb, in Chrome's format.

Processes named /device:GPU:0 have threads named "Stream #...", whose events are kernels with the instruction of the
compiled program (`hlo_op`), and with the operation that it comes from (`name` or `tf_op`), such as
jit(step)/transpose(jvp(forward))/while/body/dot_general. Under jvp lies F, under transpose B. If layers are scanned,
what is a layer's lies in the body of one loop more than the head and the embedding do.

Kernels of a CUDA graph have no operation of their own. paxtrain's own runs are broken down by config.profile
(docs/profiling.md), and planner.profile measures layers by themselves.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from paxtrain.errors import UserError
from planner.traces import torch_trace
from planner.traces.kernels import BACKWARD, COLLECTIVE, FORWARD, HEAD, LAYERS, OTHER, GpuTrace, TracedKernel

_DEVICE = re.compile(r"/device:GPU:(\d+)")
_NAN = float("nan")


def is_trace(values: object) -> bool:
    """Return whether JSON's values are a trace of jax.profiler with kernels of a GPU."""
    return any("hlo_op" in event.get("args", {}) for event in torch_trace.events(values))


def parse(path: str, values: object) -> GpuTrace:
    """Return the trace that JSON's values hold; it does not say how many passes it has.

    Raises:
        UserError: it has no kernels of one GPU that are F's and B's.
    """
    events = list(torch_trace.events(values))
    devices, streams = _named(events, "process_name", _DEVICE), _named(events, "thread_name", re.compile(r"Stream"))
    of_gpu = {process for (process, _), _ in devices.items()}
    if len(of_gpu) > 1:
        raise UserError(f"it has {len(of_gpu)} GPUs; trace a run on one, or give the trace of a process with one")
    kernels: list[tuple[int, TracedKernel]] = []  # and how many loops each lies in
    for event in events:
        place = str(event.get("pid")), str(event.get("tid"))
        if event.get("ph") != "X" or place[0] not in of_gpu or place not in streams:
            continue
        operation = _operation(event.get("args", {}))
        phase = BACKWARD if "transpose(" in operation else FORWARD if "jvp(" in operation else OTHER
        start, end = torch_trace.times(event)
        link = re.search(COLLECTIVE, str(event.get("name"))) is not None
        kernels.append((operation.count("while/body"), TracedKernel(start, end, _NAN, phase, HEAD, -1, link)))
    if not any(kernel.phase == BACKWARD for _, kernel in kernels):
        raise UserError(
            f"of its {len(kernels)} kernels none says that it comes from transpose(jvp(...)), so F and B cannot be "
            "told apart; trace with XLA_FLAGS=--xla_gpu_enable_command_buffer= (no CUDA graphs)"
        )
    loops = {inside for inside, kernel in kernels if kernel.phase != OTHER}
    found = [dataclasses.replace(k, place=LAYERS) if inside > min(loops) else k for inside, k in kernels]
    if len(loops) == 1:  # nothing tells layers from the rest
        found = [dataclasses.replace(kernel, place=LAYERS) for kernel in found]
    return GpuTrace(path, "", tuple(found), 0, 0, len(loops) > 1, None)


def _named(events: list[Mapping[str, Any]], kind: str, pattern: re.Pattern) -> dict[tuple[str, str], str]:
    """Return the names of processes or threads that match."""
    found = {}
    for event in events:
        name = str(event.get("args", {}).get("name"))
        if event.get("ph") == "M" and event.get("name") == kind and pattern.match(name):
            found[str(event.get("pid")), str(event.get("tid"))] = name
    return found


def _operation(arguments: Mapping[str, Any]) -> str:
    """Return the operation that a kernel comes from; "" if it does not say."""
    texts = [str(arguments.get(key, "")) for key in ("name", "tf_op", "long_name", "hlo_op")]
    return next((text for text in texts if "jvp(" in text), next((text for text in texts if "/" in text), ""))
