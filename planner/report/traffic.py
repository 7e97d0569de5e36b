"""Bytes that a step sends, by where they go: inside hosts, between hosts of a site, between sites, by trunk and NIC."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from planner.cost import compute as costs
from planner.cost import outer
from planner.cost.candidate import Candidate
from planner.cost.coded import CodecExchange
from planner.cost.link_seconds import ring_leads
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem
from planner.pipeline import rows as pipeline
from planner.report.contents import Report
from planner.report.units import duration

Array = np.ndarray
Add = Callable[[str, Array, Array | float], None]  # purpose, ranks [..., P, n], bytes that each of them sends
LEVELS = ("inside hosts", "between hosts of a site", "between sites")


class Flows(NamedTuple):
    """Flows between tensor groups in a step, all of one purpose and one direction.

    Attributes:
        what: purpose.
        senders: seat of each sender, see `planner.cost.link_seconds.Fabric.seats`.
        receivers: seat of each receiver, of the same shape.
        bytes: bytes from each sender, those of all its devices together.
    """

    what: str
    senders: Array
    receivers: Array
    bytes: Array


def flows(report: Report) -> list[Flows]:
    """Return what a step of the chosen plan sends, on links or inside hosts, compressed where the plan compresses it.

    What the devices of a seat send each other does not count; if they are on one host, it never leaves it.
    """
    problem, c, fabric = report.problem, report.chosen.candidate, report.fabric
    seats = fabric.seats(report.chosen.placement.hosts[None])[0]  # [D, P]
    found: list[Flows] = []

    def add(what: str, senders: Array, receivers: Array, size: Array | float) -> None:
        """Add flows of which each tensor rank sends `size` bytes."""
        found.append(Flows(what, senders, receivers, np.broadcast_to(c.seat * np.asarray(size, float), senders.shape)))

    def around(what: str, ranks: Array, size: Array | float) -> None:
        """Add a turn of rings over ranks [..., P, n], of which each sends `size` bytes of its stage."""
        ring = np.take_along_axis(ranks, ring_leads(fabric.hosts(ranks)), -1)
        add(what, ring, np.roll(ring, -1, axis=-1), np.broadcast_to(size, c.pipe)[:, None])

    def among(what: str, ranks: Array, size: Array | float) -> None:
        """Add flows among all ranks of sets [..., P, n], of which each sends the others `size` bytes of its stage."""
        others = ranks.shape[-1] - 1
        for distance in range(1, others + 1):
            add(what, ranks, np.roll(ranks, -distance, axis=-1), np.broadcast_to(size, c.pipe)[:, None] / others)

    forward, backward = _between_stages(problem)
    what = "messages between stages"
    add(what, seats, np.roll(seats, -1, axis=1), forward)
    add(what, seats, np.roll(seats, 1, axis=1), backward)
    groups = seats.reshape(c.apart, c.together, c.pipe)
    ranks = np.swapaxes(groups, 1, 2)  # [G, P, D / G]
    if c.together > 1:
        if c.shards_sums:
            _reduce_shards(report, ranks, around, among)
        else:
            _reduce(report, ranks, around, among)
        if c.zero1:
            _gather(report, ranks, around)
    if problem.swaps:
        add("tied embedding", seats[:, 0], seats[:, -1], problem.swapped)
        add("tied embedding", seats[:, -1], seats[:, 0], problem.swapped)
    if c.apart > 1:
        of_round = sum(size for size, _ in outer.sent(problem))
        around("differences between groups", np.moveaxis(groups, 0, 2), of_round / c.outer.every)
    return found


def _sets(c: Candidate, ranks: Array) -> tuple[Array, Array]:
    """Return the ranks that share weights and sums in shards, and those with the same shards, [..., P, n].

    Args:
        c: the plan.
        ranks: seats of the ranks that train together, [G, P, D / G].
    """
    sets = ranks.reshape(c.apart, c.pipe, c.copies, -1)
    return np.moveaxis(sets, 1, 2), np.moveaxis(sets, 3, 1)


def _gather(report: Report, ranks: Array, around: Add) -> None:
    """Add what the gathers of weights over data send; the arguments are those of `_reduce`."""
    problem, c, what = report.problem, report.chosen.candidate, "weights over data"
    item = costs.ITEM[report.model.dtype]
    table = problem.embedding_parameters * problem.meets * item

    def gathered(members: Array, size: Array, times: int) -> None:
        around(what, members, times * (members.shape[-1] - 1) / members.shape[-1] * size)

    if c.shard != "weights":
        gathered(ranks, problem.layer_weights + table, 1)
        return
    inside, between = _sets(c, ranks)
    gathered(inside, problem.layer_weights + table, 2 * c.micro_batches)  # in F and in B
    gathered(between, (problem.layer_parameters * item + table) / inside.shape[-1], 1)  # not through the codec


def _reduce_shards(report: Report, ranks: Array, around: Add, among: Add) -> None:
    """Add what the reduction of gradients sends whose sums are in shards; the arguments are those of `_reduce`."""
    problem, c, what = report.problem, report.chosen.candidate, "gradients over data"
    item, table = costs.ITEM[c.reduce_dtype], problem.embedding_parameters * problem.meets
    inside, between = _sets(c, ranks)
    as_is = c.slots * problem.beside if c.data_rank else problem.layer_parameters
    kernels = c.slots * problem.compressed_parameters

    def scatter(members: Array, parameters: Array) -> None:
        share = (members.shape[-1] - 1) / members.shape[-1]
        (around if report.fabric.rings else among)(what, members, share * item * parameters)

    in_each, once = problem.layer_parameters, as_is
    if c.data_rank and c.copies == 1:
        in_each = as_is
        sets = ranks.reshape(c.apart, c.pipe, -1, c.inside)
        scatter(np.moveaxis(sets, 1, 2), c.micro_batches * kernels * np.ones(c.pipe))
        coded, times = np.moveaxis(sets, 3, 1), c.micro_batches
    else:
        coded, times = between, 1
    scatter(inside, c.micro_batches * (in_each + table))
    scatter(between, (once + table) / inside.shape[-1])
    for shape in problem.compressed_kernels:
        for kind, size, _ in c.coded.exchanges(shape, c.together, c.zero1):
            (among if kind == "all-to-all" else around)(what, coded, times * c.slots * size)


def _between_stages(problem: Problem) -> tuple[Array, Array]:
    """Return the bytes [D, P] that stages send to the next one, and to the one before."""
    c = problem.candidate
    coded = np.isin(np.arange(c.pipe), c.forward_links) | (not c.forward_links)
    sizes = np.where(coded, problem.activation, problem.message)
    both = {}
    for micro_batches in set(c.rank_micro_batches):
        table = problem.rank_table(c.rank_micro_batches.index(micro_batches))
        activations, plain, packed = pipeline.messages(table, problem.overlap)
        both[micro_batches] = activations * sizes, plain * problem.message + packed * problem.packed
    forward, backward = zip(*(both[micro_batches] for micro_batches in c.rank_micro_batches))
    return np.array(forward), np.array(backward)


def _reduce(report: Report, ranks: Array, around: Add, among: Add) -> None:
    """Add what the reduction of gradients over data sends.

    Args:
        report: the report.
        ranks: seats of the ranks that reduce together, [G, P, D / G].
        around: adds a turn of rings.
        among: adds all-to-alls.
    """
    problem, c, what = report.problem, report.chosen.candidate, "gradients over data"
    item, compressed = costs.ITEM[c.reduce_dtype], report.step.compressed[0]

    def scatter(members: Array, parameters: Array) -> None:
        """Add the reduce-scatter of parameters [P] as they are; see `planner.cost.link_seconds.Fabric.rings`."""
        share = (members.shape[-1] - 1) / members.shape[-1]
        (around if report.fabric.rings else among)(what, members, share * parameters * item)

    def turn(members: Array, parameters: Array, size: int, times: int = 1) -> None:
        """Add turns of rings with parameters [P] of `size` bytes each."""
        around(what, members, times * (members.shape[-1] - 1) / members.shape[-1] * parameters * size)

    def coded(members: Array, exchanges: Iterable[CodecExchange], arrays: Array) -> None:
        """Add a codec's collectives for a number of arrays [P]."""
        for kind, size, _ in exchanges:
            (among if kind == "all-to-all" else around)(what, members, arrays * size)

    # What travels as it is: all on stages that compress nothing, else what no factors travel with.
    as_is = np.where(compressed, c.slots * problem.beside, problem.layer_parameters)
    table = problem.embedding_parameters * problem.meets
    as_is = as_is + (0 if c.compresses_embedding else table)
    if c.zero1:
        scatter(ranks, as_is)
    else:
        turn(ranks, as_is, item, times=2)  # an all-reduce
    if c.compresses_embedding:
        coded(ranks, c.coded.table_exchanges(problem.table_shape, c.together, c.zero1), problem.meets)
    if not compressed.any():
        return
    sets = ranks.reshape(c.apart, c.pipe, -1, c.inside)
    if c.inside > 1:
        inside, kernels = np.moveaxis(sets, 1, 2), compressed * c.slots * problem.compressed_parameters
        scatter(inside, kernels)
        if not c.zero1:
            turn(inside, kernels, MASTER)
    between = np.moveaxis(sets, 3, 1)
    if c.coded.data is None:  # two all-reduces, one for either factor
        turn(between, compressed * problem.factor_bytes, 1, times=2)
        return
    for shape in problem.compressed_kernels:
        coded(between, c.coded.exchanges(shape, c.together, c.zero1), compressed * c.slots)


def traffic(report: Report) -> dict[str, Array]:
    """Return the bytes of a step of the chosen plan, [levels] by purpose, those of all devices together."""
    sites = np.array(report.cluster.sites or np.zeros(len(report.cluster.hosts), int))
    found: dict[str, Array] = {}
    for what, *ends, size in flows(report):
        senders, receivers = map(report.fabric.hosts, ends)
        level = np.where(senders == receivers, 0, np.where(sites[senders] == sites[receivers], 1, 2))
        levels = np.bincount(level.ravel(), weights=size.ravel(), minlength=len(LEVELS))
        if levels.any():
            found[what] = found.get(what, 0) + levels
    return found


def between_hosts(report: Report, hosts: Array) -> dict[str, Array]:
    """Return the bytes [H, H] of a step from host to host, by purpose, on a placement int [D, P] of the chosen plan."""
    placement = dataclasses.replace(report.chosen.placement, hosts=hosts)
    placed = dataclasses.replace(report, chosen=dataclasses.replace(report.chosen, placement=placement))
    count, found = len(report.cluster.hosts), dict[str, Array]()
    for what, *ends, size in flows(placed):
        senders, receivers = map(report.fabric.hosts, ends)
        pairs = np.bincount((senders * count + receivers).ravel(), size.ravel(), count**2).reshape(count, count)
        np.fill_diagonal(pairs, 0)
        if pairs.any():
            found[what] = found.get(what, 0) + pairs
    return found


def through_trunks(report: Report) -> Array:
    """Return the bytes of a step that leave by each trunk of the cluster, and those that come in, [K, 2]."""
    if (trunks := report.cluster.trunks) is None:
        return np.zeros((0, 2))
    found = np.zeros((len(trunks), 2))
    for _, *ends, size in flows(report):
        senders, receivers = map(report.fabric.hosts, ends)
        inside, onward = trunks.behind[:, senders], trunks.behind[:, receivers]
        for way, crossing in enumerate((inside & ~onward, onward & ~inside)):
            found[:, way] += (crossing * size).reshape(len(found), -1).sum(axis=1)
    return found


def trunk_words(report: Report) -> str:
    """Return what the busiest trunk carries in a step, in words; empty without trunks."""
    if not (trunks := report.cluster.trunks):
        return ""
    sent = through_trunks(report)
    seconds = sent / trunks.bandwidth[:, None]
    busiest, way = np.unravel_index(np.argmax(seconds), seconds.shape)
    rate, many = trunks.bandwidth[busiest] * 8e-9, f"{len(trunks)} trunk{'s' * (len(trunks) > 1)}"
    behind = int(trunks.behind[busiest].sum())
    of = f"that of {behind} host{'s' * (behind > 1)} with {rate:.4g} Gbit/s"
    carried, taken = f"{sent[busiest, way] / 1e9:.3g} GB", duration(float(seconds[busiest, way]))
    return f"{many}; by the busiest, {of}, {carried} {('leave', 'come in')[way]} in a step, in {taken}"


def by_nics(report: Report) -> tuple[Array, float]:
    """Return the bytes of a step that leave by each NIC, [H, nics], and those that change rails; there are rails."""
    fabric, tensor, rails = report.fabric, report.chosen.candidate.seat, report.cluster.rails
    assert rails is not None
    found, changed = np.zeros((len(report.cluster.hosts), fabric.nics)), 0.0
    for _, senders, receivers, size in flows(report):
        hosts = fabric.hosts(senders)
        each = (size * (hosts != fabric.hosts(receivers)) / tensor)[..., None]
        leaving, entering = fabric.rail_of(senders, tensor), fabric.rail_of(receivers, tensor)
        np.add.at(found, (hosts[..., None], entering if rails.pxn else leaving), each)
        changed += float((each * (leaving != entering)).sum())
    return found, changed


def rail_words(report: Report) -> str:
    """Return what leaves by the busiest NIC in a step, and what changes rails, in words; empty without rails.

    If devices share layers over several hosts, what they send each other is not known by rail, so it is empty, too.
    """
    if not (rails := report.cluster.rails) or report.cluster.parts is not None:
        return ""
    sent, changed = by_nics(report)
    host, rail = np.unravel_index(np.argmax(sent), sent.shape)
    busiest = f"{sent[host, rail] / 1e9:.3g} GB leave in a step by the busiest NIC, rail {rail} of "
    busiest += f"{report.cluster.hosts[host]}; the mean is {sent.mean() / 1e9:.3g} GB"
    way = "after a move inside the sender's host" if rails.pxn else "over the spine"
    return f"{sent.shape[1]} rails; {busiest}; {changed / 1e9:.3g} GB change rails, {way}"


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
