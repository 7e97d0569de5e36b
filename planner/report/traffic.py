"""Bytes that a step sends, by where they go: inside hosts, between hosts of a site, between sites."""

import numpy as np

from planner.cost import compute as costs
from planner.cost.link_seconds import ring_order
from planner.cost.step_time import MASTER
from planner.report.contents import Report

Array = np.ndarray
LEVELS = ("inside hosts", "between hosts of a site", "between sites")


def traffic(report: Report) -> dict[str, Array]:
    """Return the bytes of a step of the chosen plan, [levels] by purpose, those of all devices together.

    Messages and reductions count as they are, also where the plan compresses them; sums inside tensor groups, which
    never leave a host, do not count.
    """
    problem, c = report.problem, report.chosen.candidate
    hosts = report.chosen.placement.hosts  # [D, P]
    sites = np.array(report.cluster.sites or np.zeros(len(report.cluster.hosts), int))

    def by_level(senders: Array, receivers: Array, size: Array | float) -> Array:
        """Return the bytes [levels] of flows from hosts to hosts, each of `size` bytes, on each tensor rank."""
        level = np.where(senders == receivers, 0, np.where(sites[senders] == sites[receivers], 1, 2))
        sizes = np.broadcast_to(c.tensor * np.asarray(size, float), level.shape)
        return np.bincount(level.ravel(), weights=sizes.ravel(), minlength=len(LEVELS))

    # Activations go on and gradients back over each hop: between neighbors once a chunk, around the ring once less.
    there = np.roll(hosts, -1, axis=1)
    times = np.full(c.pipe, c.chunks)
    times[-1] -= 1
    messages = by_level(hosts, there, 2 * c.micro_batches * problem.message * times * (c.pipe > 1))
    ring = ring_order(hosts.T)  # [P, D]
    layers, table = problem.layer_parameters, problem.embedding_parameters * problem.meets
    share = (c.data - 1) / c.data

    def around(size: Array) -> Array:
        """Return the bytes [levels] of turns of all rings, whose stages [P] have `size` bytes."""
        return by_level(ring, np.roll(ring, -1, axis=1), (share * size)[:, None])

    reduced = (layers + table) * costs.ITEM[c.reduce_dtype]
    if not c.zero1:
        reduced = 2 * reduced
    found = {"messages between stages": messages, "gradients over data": around(reduced)}
    if c.zero1:
        item = costs.ITEM[report.model.dtype]
        found["weights over data"] = around((layers + table) * item)
    if problem.swaps:
        ends = problem.embedding_parameters * MASTER / c.data
        found["tied embedding"] = 2 * by_level(hosts[:, 0], hosts[:, -1], ends)
    return {what: sizes for what, sizes in found.items() if sizes.any()}


def words(report: Report) -> str:
    """Return the bytes of a step by level, in words; empty if nothing is sent."""
    whole = sum(traffic(report).values(), np.zeros(len(LEVELS)))
    parts = [f"{size / 1e9:.3g} GB {level}" for size, level in zip(whole, LEVELS) if size > 0]
    return f"a step sends {', '.join(parts)}, all devices together" if parts else ""


def rows(report: Report) -> list[list[str]]:
    """Return heads and a row of cells for each purpose: GB a step by level; levels without a byte are left out."""
    found = traffic(report)
    whole = np.sum(list(found.values()), axis=0) if found else np.zeros(len(LEVELS))
    used = [n for n in range(len(LEVELS)) if whole[n] > 0]
    lines = [[what, *(f"{sizes[n] / 1e9:.3g}" for n in used)] for what, sizes in found.items()]
    return [["GB a step", *(LEVELS[n] for n in used)], *lines] if used else []
