"""The exchange of groups that train apart, of all weights or of one fragment after another: its bytes and seconds."""

from typing import NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.model import parameters
from paxtrain.model.fragments import fragment_layers
from paxtrain.model.parameters import of_mean_layer
from paxtrain.schedule.schedules import spec_of
from planner.cost import compute as costs
from planner.cost.candidate import Candidate
from planner.cost.sizes import MASTER, Sizes

Array = np.ndarray


class FragmentExchange(NamedTuple):
    """The exchange of one fragment; a single one is all weights.

    Attributes:
        bytes: bytes that a device sends around a ring over groups.
        seconds: seconds in which all groups exchange it, if they wait for it.
    """

    bytes: float
    seconds: float


def part(shape: tuple[int, int], members: int, zero1: bool) -> tuple[int, int]:
    """Return a device's part of a matrix that ZeRO-1 splits over the data ranks of a group.

    Args:
        shape: rows and columns of the matrix.
        members: data ranks of a group.
        zero1: whether it is split.
    """
    rows, columns = shape
    if not zero1 or members == 1:
        return shape
    return (rows // members, columns) if rows % members == 0 else (rows, -(-columns // members))


def layers(model: ModelConfig, candidate: Candidate) -> tuple[int, ...]:
    """Return the layers that a stage sends of each fragment; () if all data ranks train together."""
    c = candidate
    return fragment_layers(model, c.outer.fragments, c.counts, c.stage_map.stage_of) if c.apart > 1 else ()


def sent(sizes: Sizes) -> list[tuple[float, int]]:
    """Return for each fragment the bytes that a device sends in its exchange, and the number of weights it reduces.

    Args:
        sizes: the candidate's.
    """
    c, model, found = sizes.candidate, sizes.model, []
    for fragment, count in enumerate(layers(model, c)):
        held = count * of_mean_layer(model, c.layer_sizes)
        if fragment == 0:
            tables = model.tables if len(c.stage_map.ends) == 1 else 1
            held += parameters.count(model, "embedding", mesh=c.layer_sizes, tables=tables)
            held += parameters.count(model, "final_norm")
        through, taken = 0.0, 0
        for shape in costs.kernels(model, c.layer_sizes) if c.coded.outer is not None else ():
            own = part(shape, c.together, c.zero1)
            if c.coded.outer_takes(own, c.apart, c.min_ratio):
                taken += count * own[0] * own[1]
                through += count * sum(x.bytes for x in c.coded.outer_exchanges(own, c.apart))
        dense = held / (c.together if c.zero1 else 1) - taken
        found.append((2 * (c.apart - 1) / c.apart * dense * MASTER + through, taken))
    return found


def seconds(sizes: Sizes, pass_per_byte: float, latency: Array, per_byte: Array) -> Array:
    """Return the seconds [batch, fragments] of each fragment's exchange, in which all devices of all groups send.

    Args:
        sizes: the candidate's.
        pass_per_byte: seconds of a pass over a byte on the slowest device.
        latency: seconds [batch, rings] of a turn of each ring over groups.
        per_byte: seconds per byte [batch, rings] of that turn.
    """
    c, found = sizes.candidate, []
    passes = 0.0 if c.coded.outer is None else c.coded.passes_of(c.coded.outer)[0]
    for size, taken in sent(sizes):
        turns = 4 if taken else 2  # of the ring: what is coded and what is not are reduced and gathered by themselves
        coding = passes * taken * MASTER * pass_per_byte
        found.append((turns * latency + size * per_byte).max(axis=1) + coding)
    return np.stack(found, axis=1)


def exchanges(sizes: Sizes, of_fragments: Array | None) -> tuple[FragmentExchange, ...]:
    """Return the exchange of each fragment on one placement; a group alone exchanges nothing.

    Args:
        sizes: the candidate's.
        of_fragments: seconds [fragments] of each; None: all data ranks train together.
    """
    if of_fragments is None:
        return (FragmentExchange(0.0, 0.0),) * sizes.candidate.outer.fragments
    return tuple(FragmentExchange(size, float(each)) for (size, _), each in zip(sent(sizes), of_fragments))


def hides(candidate: Candidate, overlap: bool) -> bool:
    """Return whether the next step's compute hides an exchange (outer.overlap).

    XLA puts matrix products over it on GPUs, but not if all of them are in loops with transfers of their own, as in the
    schedules whose stages skip idle ops (docs/outer.md). On CPUs collectives wait for each other.

    Args:
        candidate: candidate with groups.
        overlap: transfers run beside compute.
    """
    c = candidate
    return overlap and c.outer.overlap > 0 and (c.pipe == 1 or bool(spec_of(c.schedule).masks(True)))


def exposed(candidate: Candidate, exchanges: Array, under: Array, overlap: bool) -> Array:
    """Return the seconds [batch, fragments] that groups wait for the exchange of each fragment.

    Args:
        candidate: candidate with groups.
        exchanges: seconds [batch, fragments] of the exchange of each fragment.
        under: seconds [batch] of a step's rows, which may hide a fragment.
        overlap: transfers run beside compute.
    """
    return np.maximum(exchanges - under[:, None], 0.0) if hides(candidate, overlap) else exchanges
