"""Step times in closed form, as Pipette and AMP estimate them, for comparison with the simulator only.

In all of them F and B are the seconds of one micro-batch on one stage, m counts micro-batches per pipeline, and D is
the time of the gradients' all-reduce over the data axis. Inputs are arrays [batch, stage]; candidates with fewer stages
than others of the batch have zeros after their last one.

References:
    Pipette: Yim et al., DATE 2024, and its released code (yimjinkyu1/date2024_pipette).
    AMP: Li et al., NeurIPS 2022, and its released code (DachengLi1/AMP).
"""

import numpy as np

Array = np.ndarray


def ring(size: Array | float, members: Array | int, bandwidth: Array | float) -> Array:
    """Return the seconds of an all-reduce over a ring: 2(k-1)/k times the bytes over the bandwidth.

    Args:
        size: bytes.
        members: k.
        bandwidth: bytes/s of the slowest link.
    """
    return 2 * (members - 1) / np.maximum(members, 1) * size / bandwidth


def all_reduce(members: int, size: float, alpha: float, bandwidth: float) -> float:
    """Return the seconds of an all-reduce of `size` bytes over a ring whose messages take `alpha` seconds besides."""
    return 2 * (members - 1) * alpha + float(ring(size, members, bandwidth))


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
