"""Data ranks with different numbers of micro-batches, in one program.

All ranks run the rows of the most micro-batches. A rank with n of m has the ops of the last n, and skips the rows
before, in which it waits for nothing. So all ranks end in the same rows: their reduction over data lies under the same
last op, and the drain, whose gradients may be compressed, is the same.

Ranks read the table of their number. Its slots are those of the whole table, so all ranks have the same rings. The rows
name the messages of every rank apart, because a message that one rank sends, another one may lack.
"""

import dataclasses
from collections.abc import Sequence, Set

import numpy as np

from paxtrain.schedule.buffers import Buffers, RowKind, assign, rings
from paxtrain.schedule.proof import validate
from paxtrain.schedule.table import Pair, Schedule


def assign_ranks(schedule: Schedule, compressed: Set[tuple[int, int]], counts: Sequence[int]) -> Buffers:
    """Return the rows and slots of data ranks with different numbers of micro-batches, each proved for itself.

    Args:
        schedule: table of as many micro-batches as the rank with most has; its idle stages skip.
        compressed: gradients that travel compressed, as (sending virtual stage, micro-batch).
        counts: micro-batches of each data rank, at least 1.

    Returns:
        The buffers. The pairs of their kinds are positions on the axes (data, pipe): stage s of rank r is at r * P + s.

    Raises:
        AssertionError: the table of some rank is wrong, see `paxtrain.schedule.proof`.
    """
    assert max(counts) == schedule.micro_batches and not schedule.masked, "ranks skip rows of the longest one's table"
    numbers, slots = sorted(set(counts)), rings(schedule)
    parts = []
    for number in numbers:
        own = schedule.last_of(number)
        parts.append(assign(own, compressed, slots))
        validate(own, parts[-1])
    ranks = tuple(map(numbers.index, counts))
    kinds = [_joined(every, ranks, schedule.stages) for every in zip(*(part.kinds for part in parts), strict=True)]
    table = np.stack([part.table for part in parts])
    return dataclasses.replace(parts[-1], table=table, kinds=kinds, table_of_rank=ranks)


def _joined(kinds: Sequence[RowKind], ranks: Sequence[int], stages: int) -> RowKind:
    """Return the kind of a row that every data rank runs by a kind of its own.

    Args:
        kinds: kinds of the row in each table; the last one has every op.
        ranks: number of each data rank's table.
        stages: P.
    """

    def everywhere(name: str) -> tuple[Pair, ...]:
        return tuple(
            (rank * stages + sender, rank * stages + receiver)
            for rank, number in enumerate(ranks)
            for sender, receiver in getattr(kinds[number], name)
        )

    # In a last op that reduces over data all ranks must take part.
    alike = all(kind.closing == kinds[-1].closing for kind in kinds)
    return dataclasses.replace(
        kinds[-1],
        receive=everywhere("receive"),
        receive_compressed=everywhere("receive_compressed"),
        send=everywhere("send"),
        closing=kinds[-1].closing if alike else (),
    )
