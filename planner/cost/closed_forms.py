"""Seconds in closed form: of rings, late kernels and sizes between measured ones; steps as Pipette and AMP see them.

The steps are for comparison with the simulator only. In all of them F and B are the seconds of one micro-batch on one
stage, m counts micro-batches per pipeline, and D is the time of the gradients' all-reduce over the data axis. Inputs
are arrays [batch, stage]; candidates with fewer stages than others of the batch have zeros after their last one.

References:
    Pipette: Yim et al., DATE 2024, and its released code (yimjinkyu1/date2024_pipette).
    AMP: Li et al., NeurIPS 2022, and its released code (DachengLi1/AMP).
"""

from typing import Any

import numpy as np

from paxtrain.schedule.schedules import Numbers
from planner.cluster.cluster import HostSpan

Array = np.ndarray
_SHARPNESS = 4  # of `launched`
EAGER = 8  # the same if a host launches each kernel: it runs ahead, or all wait for it


def ring(size: Array | float, members: Array | int, bandwidth: Array | float) -> Array:
    """Return the seconds of an all-reduce over a ring: 2(k-1)/k times the bytes over the bandwidth.

    Args:
        size: bytes.
        members: k.
        bandwidth: bytes/s of the slowest link.
    """
    return 2 * (members - 1) / np.maximum(members, 1) * size / bandwidth


def all_reduce(members: int, size: Numbers, alpha: Numbers, bandwidth: Numbers) -> Any:
    """Return the seconds of an all-reduce of `size` bytes over a ring; all but its members may be arrays."""
    return 2 * (members - 1) * (alpha + size / (max(members, 1) * bandwidth))


def slowest_hop(inside: tuple[Any, Any], span: HostSpan | None, apart: int, members: int) -> tuple[Any, Any]:
    """Return latency and bandwidth of the slowest hop of rings over groups of devices that share layers.

    All devices of a seat are in one of these rings, so those of a host leave it at once by its NICs.

    Args:
        inside: latency and bytes/s inside a host.
        span: hosts over which the devices of a seat lie; None: they are on one.
        apart: by how many devices neighbours are apart, so many rings there are side by side.
        members: devices of a ring.
    """
    if span is None or apart * members <= span.devices:
        return inside
    crowd = max(min(apart, span.devices) / span.nics, 1.0)
    return np.maximum(inside[0], span.latency), np.minimum(inside[1], span.rate / crowd)


def all_to_all(inside: tuple[Any, Any], span: HostSpan | None, apart: int, members: int, size: Numbers) -> Any:
    """Return the seconds of all-to-alls of `size` bytes a device; see `slowest_hop` for the other arguments.

    Messages inside hosts travel beside those between them, which all devices of a host send at once.
    """
    near = members if span is None else min(max(span.devices // apart, 1), members)
    each = size / members
    within = (near - 1) * (inside[0] + each / inside[1])
    if span is None or near == members:
        return within
    crowd = max(span.devices / span.nics, 1.0)
    return np.maximum(within, (members - near) * (span.latency + each * crowd / span.rate))


def affine(micro_batch: int, at: Array, seconds: Array) -> float:
    """Return the seconds at a micro-batch: linear between measured sizes, and beyond them through the nearest two."""
    if len(at) == 1:
        return float(seconds[0] * micro_batch / at[0])
    i = int(np.clip(np.searchsorted(at, micro_batch) - 1, 0, len(at) - 2))
    slope = max((seconds[i + 1] - seconds[i]) / (at[i + 1] - at[i]), 0.0)
    return float(max(seconds[i] + slope * (micro_batch - at[i]), 0.5 * seconds[0] * min(1.0, micro_batch / at[0])))


def launched(seconds: Numbers, launches: Numbers, sharpness: int = _SHARPNESS) -> Any:
    """Return the seconds of kernels, some of which wait for their launch and others for memory.

    That is the p-norm of the two sums; the arguments are numbers or arrays.

    Args:
        seconds: seconds of all kernels if their launch takes no time.
        launches: seconds in which the host launches them.
        sharpness: p; the larger, the nearer to the larger of the two.
    """
    return (seconds**sharpness + launches**sharpness) ** (1 / sharpness)


def pipette(
    forward: Array,
    backward: Array,
    hops: Array,
    data_seconds: Array | float,
    m: Array | int,
    pp: Array | int,
    as_published: bool = False,
) -> Array:
    """Return Pipette's estimate of 1F1B, whose transfers are exposed once for every `pp` micro-batches.

        T = (m + pp - 1) * (F + B) + max(m // pp, 1) * P + D

    The published form counts (m // pp) * pp micro-batches instead of m if m >= pp: it drops the rest. Pipette times one
    stage for all; here that is the slowest one.

    Args:
        forward: [batch, stage] seconds of F.
        backward: [batch, stage] seconds of B.
        hops: [batch, stage - 1] seconds of a message there and one back, of the slowest pipeline; their sum is P.
        data_seconds: [batch] D, which Pipette takes from the first stage's ring alone.
        m: [batch] micro-batches.
        pp: [batch] stages.
        as_published: drop the micro-batches left over from m mod pp, as the released code does.

    Returns:
        [batch] seconds.
    """
    groups = m // pp
    counted = np.where(as_published & (groups >= 1), groups * pp, m)
    slowest = (forward + backward).max(axis=-1)
    return (counted + pp - 1) * slowest + np.maximum(groups, 1) * hops.sum(axis=-1) + data_seconds


def amp(forward: Array, backward: Array, hops: Array, data_seconds: Array | float, m: Array | int) -> Array:
    """Return AMP's estimate: all stages once, the slowest once more per further micro-batch, each hop once.

    Args:
        forward: [batch, stage] seconds of F.
        backward: [batch, stage] seconds of B.
        hops: [batch, stage - 1] seconds of a message there and one back.
        data_seconds: [batch] D, of the slowest stage.
        m: [batch] micro-batches.

    Returns:
        [batch] seconds.
    """
    stages = forward + backward
    return (m - 1) * stages.max(axis=-1) + stages.sum(axis=-1) + hops.sum(axis=-1) + data_seconds
