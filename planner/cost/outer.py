"""The exchange of groups that train apart, of all weights or of one fragment after another: its bytes and seconds.

A group's step is predicted as if the others were not there, so groups that share a host's NICs are predicted too quick.
Seconds are those of groups that wait. What of an overlapped exchange the next step hides is not predicted.
"""

from typing import NamedTuple

import numpy as np

from paxtrain.config import Config
from planner.cost import compute as costs
from planner.cost.link_seconds import Fabric, rings
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem

Array = np.ndarray


class FragmentExchange(NamedTuple):
    """The exchange of one fragment; a single one is all weights.

    Attributes:
        bytes: bytes that a device sends around a ring over groups.
        seconds: seconds in which all groups exchange it, if they wait for it.
    """

    bytes: float
    seconds: float


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


def exchanges(config: Config, problem: Problem, fabric: Fabric, hosts: Array) -> tuple[FragmentExchange, ...]:
    """Return the exchange of each fragment: all devices of all groups send at once, each its part of the weights.

    Args:
        config: configuration with groups.
        problem: one group.
        fabric: links of the cluster.
        hosts: int [groups, data ranks of a group, stages].
    """
    c, groups, fragments = problem.candidate, config.groups, config.outer.fragments
    if groups == 1:
        return (FragmentExchange(0.0, 0.0),) * fragments
    latency, per_byte = rings(fabric, hosts.reshape(1, groups, -1), c.tensor)
    passes = 0 if c.coded.outer is None else c.coded.passes_of(c.coded.outer)[0]
    found = []
    for fragment in range(fragments):
        size, taken = _sent(config, problem, fragment)
        turns = 4 if taken else 2  # of the ring: what is coded and what is not are reduced and gathered by themselves
        coding = passes * taken * MASTER * problem.pass_per_byte.max()
        found.append(FragmentExchange(size, float((turns * latency + size * per_byte).max() + coding)))
    return tuple(found)


def _sent(config: Config, problem: Problem, fragment: int) -> tuple[float, float]:
    """Return the bytes that a device sends in the exchange of a fragment, and its weights that the reducer takes.

    Args:
        config: configuration with groups.
        problem: one group.
        fragment: number of the fragment.
    """
    c, model, groups = problem.candidate, problem.model, config.groups
    layers = config.of_group().fragment_layers[fragment]
    held = layers * costs.layer_parameters(model, c.tensor)
    if fragment == 0:
        norm = model.hidden if model.family == "llama" else 2 * model.hidden
        held += problem.embedding_parameters + model.positions * model.hidden + norm
    through, taken = 0.0, 0
    for shape in costs.kernels(model, c.tensor) if c.coded.outer is not None else ():
        own = part(shape, c.data, c.zero1)
        if c.coded.outer_takes(own, groups, config.compress.min_ratio):
            taken += layers * own[0] * own[1]
            through += layers * sum(x.bytes for x in c.coded.outer_exchanges(own, groups))
    dense = held / (c.data if c.zero1 else 1) - taken
    return 2 * (groups - 1) / groups * dense * MASTER + through, taken
