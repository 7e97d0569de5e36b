"""Micro-batches of data ranks by the speed of the devices that each lies on."""

import dataclasses

import numpy as np

from planner.cost.step_time import Problem

Array = np.ndarray

_HALVINGS = 60  # of the interval in which the least seconds lie


def shares(total: int, unit: Array, extra: Array) -> Array:
    """Return the numbers of micro-batches of data ranks, at least 1, with which the last rank ends soonest.

    Rank d with n micro-batches ends after n unit_d + extra_d.

    Args:
        total: micro-batches of all ranks together, at least as many as ranks.
        unit: [K, D] seconds of a further micro-batch.
        extra: [K, D] seconds besides.

    Returns:
        int [K, D]; each row adds up to total.
    """

    def within(limit: Array) -> Array:
        return np.maximum(np.floor((limit[:, None] - extra) / unit * (1 + 1e-9)), 1).astype(int)

    low, high = np.zeros(len(unit)), (total * unit + extra).max(axis=1)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        enough = within(middle).sum(axis=1) >= total
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    counts = within(high)
    rows = np.arange(len(counts))
    # Ranks that are alike get one more at the same limit, and not all of them need it.
    while (over := counts.sum(axis=1) > total).any():
        ends = np.where(counts > 1, counts * unit + extra, -np.inf)
        counts[rows[over], ends[over].argmax(axis=1)] -= 1
    return counts


def by_speed(problem: Problem, hosts: Array) -> list[tuple[Problem, Array]]:
    """Return a candidate with the numbers of micro-batches that suit each placement, if they differ between data ranks.

    Args:
        problem: the candidate with equal numbers.
        hosts: placements [K, D, P].

    Returns:
        For each set of numbers the problem, and on which of the placements it is worth a try: int [n].
    """
    c = problem.candidate
    work = c.stage_map.by_stage(problem.work).sum(axis=1)  # [kinds, P]
    work = work[problem.kind_of_host[hosts], np.arange(c.pipe)]  # [K, D, P]
    last = c.stage_map.last
    work[..., last] += problem.head[problem.kind_of_host[hosts[..., last]]]
    unit = work.max(axis=2)
    # The first micro-batch goes through all stages.
    counts = shares(c.micro_batches * c.data, unit, work.sum(axis=2) - unit)
    every, which = np.unique(counts, axis=0, return_inverse=True)
    found = []
    for n, row in enumerate(every.tolist()):
        if len(set(row)) > 1:
            candidate = dataclasses.replace(c, data_micro_batches=tuple(row), micro_batches=max(row))
            found.append((Problem(problem.cluster, problem.model, candidate), np.flatnonzero(which.ravel() == n)))
    return found
