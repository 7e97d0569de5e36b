"""Bytes of the states that codecs keep on a device, of links, of gradients over data, and of exchanges of groups."""

import functools

import numpy as np

from paxtrain.config import SHARDS
from paxtrain.config.axes import parts
from paxtrain.model.parameters import by_names
from planner.cost.outer import part
from planner.memory.shape import ACCUMULATOR, ERRORS, PerCandidate, Shape, columns, matrices, meets


def codec_states(shape: Shape) -> PerCandidate:
    """Return the bytes of one device's codec states, see compress.lowrank.LowRankState and powersgd.PowerState."""
    model, c, chunks = shape.model, shape.compute, shape.virtual_stages
    n, k = shape.tokens // shape.parts, model.hidden
    total: PerCandidate = _outer_states(shape) if shape.coded.outer is not None and shape.fragment_layers else 0
    if shape.coded.embedding is not None:
        total = total + _table_states(shape)
    for place in ("backward", "forward"):
        rank = np.asarray(getattr(shape, f"{place}_rank"))
        if getattr(shape.coded, place) is not None:
            total = total + chunks * _link_states(shape, place)
            continue
        held = 2 * k * rank + (shape.error > 0) * n * k + (shape.error == ERRORS.index("lazy")) * (n + k) * rank
        total = total + np.where(rank > 0, chunks * c * held, 0)
    rank = np.asarray(shape.data_rank)
    if shape.coded.data is not None:
        # Micro-batches that change them leave those of before, which a step that is lost keeps, and stacks of a loop's.
        each = (np.asarray(shape.shard) >= SHARDS.index("gradients")) & (np.asarray(shape.copies_of_shards) == 1)
        held = 1 + each * (1 + np.asarray(shape.scan))
        return total + held * shape.slots * chunks * _reducer_states(shape)
    for dims in matrices(shape):
        whole = np.asarray(dims[0]), np.asarray(functools.reduce(np.multiply, dims[1:]))
        rows, cols = shape.coded.part(whole, np.asarray(shape.data), np.asarray(shape.zero1) == 1)
        # As compress.powersgd.largest_rank has it.
        smaller = rows * cols / (rows + cols) / max(shape.min_ratio, 1e-9)
        # A kernel has a state if it shrinks enough at the lowest rank.
        lowest = np.where(np.asarray(shape.data_rank_min) > 0, shape.data_rank_min, rank)
        useful = (rank > 0) & (lowest <= np.minimum(np.minimum(rows, cols), smaller))
        total = total + useful * shape.slots * chunks * ACCUMULATOR * (rows * cols + cols * rank)
    return total


def _table_states(shape: Shape) -> PerCandidate:
    """Return the bytes of a device's states of the embedding's codec; all stages hold them, as they hold the table."""
    model, coded = shape.model, shape.coded

    def one(rows: int, data: int, meets: bool, zero1: int) -> float:
        swaps = model.tied_head and not meets
        if data == 1 and not swaps:
            return 0.0
        positions = ("embedding", "position") in by_names(model) and data > 1
        found = coded.table_state((int(rows), model.hidden), int(data), bool(zero1), swaps)
        whole = (model.sequence, model.hidden), int(data), bool(zero1)
        takes = positions and coded.table_takes(*whole, shape.min_ratio)
        return found + (coded.table_state(*whole, False) if takes else 0)

    ends = meets(shape)
    rows = np.where(ends, model.tables, 1) * (model.padded_vocab // parts("vocab", shape.mesh))
    return np.vectorize(one, otypes=[float])(*columns(rows, shape.data, ends, shape.zero1))


def _outer_states(shape: Shape) -> PerCandidate:
    """Return the bytes of a device's states of the reducer between groups."""

    def one(n: int, k: int, data: int, zero1: int, groups: int) -> float:
        own = part((int(n), int(k)), int(data), bool(zero1))
        taken = shape.coded.outer_takes(own, int(groups), shape.min_ratio)
        return shape.coded.outer_bytes(own, int(groups)) if taken else 0.0

    total: PerCandidate = 0
    for dims in matrices(shape):
        sizes = columns(dims[0], functools.reduce(np.multiply, dims[1:]), shape.data, shape.zero1, shape.groups)
        total = total + np.vectorize(one, otypes=[float])(*sizes)
    return total * sum(shape.fragment_layers)


def _link_states(shape: Shape, place: str) -> PerCandidate:
    """Return the bytes of the state of a link whose codec is not low rank; 0 if it compresses nothing."""
    sequence, hidden, dtype = shape.model.sequence, shape.model.hidden, shape.model.dtype

    def one(batch: int, parts: int, rank: int) -> float:
        # A codec may refuse the messages of candidates that do not compress them.
        return shape.coded.state_bytes((int(batch), sequence // int(parts), hidden), dtype, place) if rank else 0.0

    sizes = columns(shape.micro_batch, shape.parts * shape.shared, getattr(shape, f"{place}_rank"))
    return np.vectorize(one, otypes=[float])(*sizes)


def _reducer_states(shape: Shape) -> PerCandidate:
    """Return the bytes of the states of a layer's matrices, whose reducer is not PowerSGD; 0 without compression."""

    def one(n: int, k: int, data: int, zero1: int, rank: int) -> float:
        matrix = (int(n), int(k)), int(data), bool(zero1)
        takes = rank and shape.coded.takes(*matrix, shape.min_ratio)
        return shape.coded.reducer_bytes(*matrix) if takes else 0.0

    total: PerCandidate = 0
    for dims in matrices(shape):
        sizes = columns(dims[0], functools.reduce(np.multiply, dims[1:]), shape.data, shape.zero1, shape.data_rank)
        total = total + np.vectorize(one, otypes=[float])(*sizes)
    return total
