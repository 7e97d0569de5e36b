"""The exchange of groups that train apart: its seconds, given where the groups lie.

A group's step is predicted as if the others were not there, so groups that share a host's NICs are predicted too quick.
"""

import numpy as np

from paxtrain.config import Config
from planner.cost import compute as costs
from planner.cost.link_seconds import Fabric, rings
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem

Array = np.ndarray


def part(shape: tuple[int, int], ranks: int, zero1: bool) -> tuple[int, int]:
    """Return a device's part of a matrix that ZeRO-1 splits over the data ranks of a group.

    Args:
        shape: rows and columns of the matrix.
        ranks: data ranks of a group.
        zero1: whether it is split.
    """
    rows, columns = shape
    if not zero1 or ranks == 1:
        return shape
    return (rows // ranks, columns) if rows % ranks == 0 else (rows, -(-columns // ranks))


def exchange_seconds(config: Config, problem: Problem, fabric: Fabric, hosts: Array) -> float:
    """Return the seconds of an exchange: all devices of all groups send at once, each its part of the weights.

    Args:
        config: configuration with groups.
        problem: one group.
        fabric: links of the cluster.
        hosts: int [groups, data ranks of a group, stages].
    """
    c, groups = problem.candidate, config.groups
    if groups == 1:
        return 0.0
    latency, per_byte = rings(fabric, hosts.reshape(1, groups, -1), c.tensor)
    held = (problem.layer_parameters + problem.embedding_parameters) / (c.data if c.zero1 else 1)
    turn = (groups - 1) / groups
    if c.coded.outer is None:
        return float((2 * (latency + held * MASTER * turn * per_byte)).max())
    seconds, ratio, taken = np.zeros_like(latency), config.compress.min_ratio, 0
    for shape in costs.kernels(problem.model, c.tensor):
        own = part(shape, c.data, c.zero1)
        if c.coded.outer_takes(own, groups, ratio):
            taken += own[0] * own[1]
            seconds += sum(x.bytes for x in c.coded.outer_exchanges(own, groups)) * c.slots * per_byte
    dense = 2 * (latency + (held - taken * c.slots) * MASTER * turn * per_byte)
    passes, _ = c.coded.passes_of(c.coded.outer)
    work = passes * taken * c.slots * MASTER * problem.pass_per_byte.max()
    return float((seconds + 2 * latency + dense).max() + work)
