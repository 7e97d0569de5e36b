"""Seconds of what crosses the data axis: the gather of the weights, and the reduction of the gradients."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.config.axes import AXES, DATA, stride, token_axes
from planner.cluster.cluster import Cluster, seat_links
from planner.cost import compute as costs
from planner.cost.closed_forms import all_reduce, slowest_hop
from planner.cost.coded import POWER_LAUNCHES, POWER_PASSES, CodecExchange
from planner.cost.link_seconds import DataLinks, LinkSeconds
from planner.cost.sizes import MASTER, Sizes

Array = np.ndarray


class Reductions(NamedTuple):
    """Seconds [batch, P] of the reduction of each stage's gradients.

    Attributes:
        dense: of its layers' gradients as they are.
        compressed: of the same in compressed form; inf if nothing compresses them.
        work: of making the compressed form, and of reading it.
        embedding: of the embedding's gradients, with the exchange of the tied one's; and what follows all of these.
    """

    dense: Array
    compressed: Array
    work: Array
    embedding: Array


def gather(sizes: Sizes, links: LinkSeconds, meets: Array) -> Array:
    """Return the seconds [batch, P] of a step's first all-gather of weights, with the embedding, in compute dtype.

    Args:
        sizes: the candidate's.
        links: seconds of the messages.
        meets: stages whose data ranks gather and reduce an embedding, bool [P].
    """
    c, over, item = sizes.candidate, links.every, costs.ITEM[sizes.model.dtype]
    ranks, parts, layers = c.together, 1, float(sizes.layer_weights)
    if c.shard == "weights":  # each device gets its shard of a group's, as it is
        over, ranks, parts, layers = links.between or over, c.copies, c.inside, sizes.layer_parameters * item
    if not c.zero1 or ranks == 1:
        return np.zeros(links.ring_latency.shape)
    weights = np.full(c.pipe, layers / parts)
    weights[meets] += sizes.embedding_parameters * item / parts
    return over.ring_latency + (ranks - 1) / ranks * weights * over.ring_per_byte


def reduction(sizes: Sizes, links: LinkSeconds, meets: Array, per_byte: Array, kinds: Array) -> Reductions:
    """Return the seconds of the reduction of each stage's gradients.

    Args:
        sizes: the candidate's.
        links: seconds of the messages.
        meets: stages whose data ranks gather and reduce an embedding, bool [P].
        per_byte: seconds [kinds] of a pass over a byte.
        kinds: device kinds [batch, D, P] (indices) of all groups.
    """
    c, shape = sizes.candidate, links.ring_latency.shape
    edge, none, never = np.zeros(shape), np.zeros(shape), np.full(shape, np.inf)
    if c.pipe > 1:
        edge[:, 0] = edge[:, -1] = links.swap
    slowest = per_byte[kinds].max(axis=1)
    if c.compresses_embedding:
        # The work is that of stages with a table; over gloo those between have zeros to encode.
        edge[:, meets] += _table_work(sizes, slowest)[:, meets]
    always = bool(c.shards_sums and c.data_rank)  # on all stages, so that `dense` is no choice
    if c.together == 1 or (c.shards_sums and c.copies == 1):  # reduced with each micro-batch, see `shards`
        return Reductions(never if always else none, none if always else never, none, edge)
    if c.shards_sums:
        edge = edge + meets * _between_copies(sizes, links, sizes.embedding_parameters)
        if not always:
            return Reductions(_between_copies(sizes, links, sizes.layer_parameters), never, none, edge)
        small, work = _coded(sizes, links, slowest, c.slots)
        return Reductions(never, small + _between_copies(sizes, links, c.slots * sizes.beside), work, edge)
    turn = (c.together - 1) / c.together * links.ring_per_byte
    size = costs.ITEM[c.reduce_dtype]

    def reduced(parameters: int) -> Array:
        if c.zero1:
            return links.scatter_latency + parameters * size * links.scatter_per_byte
        return 2 * (links.ring_latency + parameters * size * turn)  # an all-reduce

    dense = reduced(sizes.layer_parameters)
    if c.compresses_embedding:
        table = _seconds(c.coded.table_exchanges(sizes.table_shape, c.together, c.zero1), links.every, c.together)
    else:
        table = reduced(sizes.embedding_parameters)
    edge[:, meets] += table[:, meets]
    if not c.data_rank:
        return Reductions(dense, never, none, edge)
    coded = c.coded.data is not None
    small, work = _coded(sizes, links, slowest, c.slots) if coded else _low_rank(sizes, links, slowest)
    if links.inside is not None:
        small = small + _inside_groups(sizes, links.inside, c.slots)
    if sizes.beside:
        small = small + reduced(c.slots * sizes.beside)
    return Reductions(dense, small, work, edge)


def shards(
    sizes: Sizes,
    links: LinkSeconds,
    meets: Array,
    layers: Sequence[costs.LayerCosts],
    cluster: Cluster,
    overlap: bool,
    per_byte: Array,
    kinds: Array,
) -> tuple[Array, Array]:
    """Return the seconds [batch, P] that F and B of a stage wait for weights and gradients in shards.

    A layer's weights are gathered under the layer before, in F and again in B. Its gradients are scattered under the
    layer that follows. The first gather of F, the last scatter of B, and the vocabulary's tables are under nothing. If
    groups of data ranks share them, all of this is inside groups. Devices that share sequences each send a part of it,
    and then gather and sum the whole among them. Nothing hides the work of codecs.

    Args:
        sizes: the candidate's.
        links: seconds of the messages.
        meets: stages whose data ranks gather and reduce an embedding, bool [P].
        layers: costs of a layer on each kind of device.
        cluster: cluster, on whose links devices share sequences.
        overlap: whether collectives run beside compute.
        per_byte: seconds [kinds] of a pass over a byte.
        kinds: device kinds [batch * G, D / G, P] (indices) of all groups.
    """
    c, count = sizes.candidate, max(sizes.candidate.counts)
    over = (links.inside if c.copies > 1 else None) or links.every
    ranks = c.together // c.copies
    whole, turn, several = c.shard == "weights", (ranks - 1) / ranks, ranks > 1
    item, size = costs.ITEM[sizes.model.dtype], costs.ITEM[c.reduce_dtype]

    def both(parameters: float) -> tuple[Array, Array]:
        gathered = several * (over.ring_latency + turn * parameters * item * over.ring_per_byte)
        gathered = gathered + _over_sequences(sizes, cluster, parameters * item) / 2
        scattered = several * (over.scatter_latency + parameters * size * over.scatter_per_byte)
        return whole * gathered, scattered + _over_sequences(sizes, cluster, parameters * size) / 2

    one = sizes.layer_parameters / sizes.slots
    (gather, scatter), table = both(one), both(sizes.embedding_parameters)
    encoded = np.zeros_like(gather), np.zeros_like(gather)
    slowest = per_byte[kinds.reshape(len(gather), -1, c.pipe)].max(axis=1)
    if whole and several and c.coded.weights is not None:
        sent = sizes.layer_weights / sizes.slots
        gather = over.ring_latency + turn * sent * over.ring_per_byte
        encode, decode, launches = c.coded.weights.passes()
        work = (encode / ranks + decode) * sizes.kernel_parameters * item * slowest
        work = work + len(sizes.kernels) * 2 * launches * costs.LAUNCH
        encoded = work, work
    if c.data_rank and c.copies == 1 and several:
        scatter, work = _coded(sizes, links, slowest, 1)
        if links.inside is not None:
            scatter = scatter + _inside_groups(sizes, links.inside, 1)
        if sizes.beside:
            scatter = scatter + over.scatter_latency + sizes.beside * size * over.scatter_per_byte
        encoded = encoded[0], encoded[1] + work
    if overlap:
        quick = min(one.forward for one in layers), min(one.backward for one in layers)
        forward = gather + (count - 1) * np.maximum(gather - quick[0], 0)
        backward = scatter + count * np.maximum(gather + scatter - quick[1], 0)
    else:
        forward, backward = count * gather, count * (gather + scatter)
    forward, backward = forward + count * encoded[0], backward + count * encoded[1]
    return forward + meets * table[0], backward + meets * (table[0] + table[1])


def seat_sums(sizes: Sizes, cluster: Cluster, meets: Array) -> Array:
    """Return the seconds [P] of the sums of a stage's gradients over axes besides data whose devices have other tokens.

    They follow the reduction over data, which leaves a rank its shard. Each is an all-reduce inside a seat. Over axes
    that split sequences it is the part of the reduction there, unless that is in `shards`, and the gather of weights.

    Args:
        sizes: the candidate's.
        cluster: cluster, on whose links the devices of a seat are.
        meets: stages whose data ranks gather and reduce an embedding, bool [P].
    """
    c, seconds = sizes.candidate, np.zeros(sizes.candidate.pipe)
    item = costs.ITEM[sizes.model.dtype] if c.zero1 else costs.ITEM[c.reduce_dtype]
    each = (item if c.shard != "weights" else 0) + (0 if c.shards_sums else costs.ITEM[c.reduce_dtype])
    for axis, size in c.sizes.items():
        if axis in token_axes() and axis != DATA and size > 1 and not AXES[axis].sequence:
            layers, tables = sizes.summed(axis)
            sent = MASTER * (layers + meets * tables) / (c.together if c.zero1 else 1)
            seconds += _inside_seats(sizes, cluster, axis, sent)
    if each:
        whole = sizes.layer_parameters + meets * sizes.embedding_parameters
        seconds += _over_sequences(sizes, cluster, whole * each / 2)
    return seconds


def _inside_seats(sizes: Sizes, cluster: Cluster, axis: str, sent: Array | float) -> Array | float:
    """Return the seconds of an all-reduce of bytes over an axis whose devices share a seat, on the slowest kind."""
    members = sizes.candidate.sizes[axis]
    links = [seat_links(cluster, kind) for kind in set(cluster.kinds)]
    hops = [slowest_hop(*one, stride((axis,), sizes.candidate.sizes), members) for one in links]
    return np.maximum.reduce([all_reduce(members, sent, *hop) for hop in hops])


def _over_sequences(sizes: Sizes, cluster: Cluster, sent: Array | float) -> Array | float:
    """Return the seconds of an all-reduce of some bytes over the axes that split sequences; half of it is a gather."""
    some = [axis for axis, size in sizes.candidate.sizes.items() if AXES[axis].sequence and size > 1]
    return sum((_inside_seats(sizes, cluster, axis, sent) for axis in some), 0.0)


def _between_copies(sizes: Sizes, links: LinkSeconds, parameters: float) -> Array:
    """Return the seconds [batch, P] in which groups that share sums of some parameters add them to each other's."""
    c, over = sizes.candidate, links.between or links.every
    return over.scatter_latency + parameters / c.inside * costs.ITEM[c.reduce_dtype] * over.scatter_per_byte


def _inside_groups(sizes: Sizes, links: DataLinks, slots: int) -> Array:
    """Return the seconds [batch, P] of the reduction of some layers' kernels inside groups of data ranks.

    Args:
        sizes: the candidate's.
        links: seconds of collectives inside groups.
        slots: number of layers.
    """
    c = sizes.candidate
    numbers = slots * sizes.compressed_parameters
    seconds = links.scatter_latency + numbers * costs.ITEM[c.reduce_dtype] * links.scatter_per_byte
    if c.zero1:
        return seconds
    turn = (c.inside - 1) / c.inside * links.ring_per_byte
    return seconds + links.ring_latency + numbers * MASTER * turn  # the means are gathered


def _low_rank(sizes: Sizes, links: LinkSeconds, slowest: Array) -> tuple[Array, Array]:
    """Return the seconds [batch, P] of the all-reduces of a stage's factors, and of the work to make them.

    Args:
        sizes: the candidate's.
        links: seconds of the messages.
        slowest: seconds [batch, P] of a pass over a byte.
    """
    c, over = sizes.candidate, links.between or links.every
    # In groups the passes are over a rank's part. Two more cut gradients and one sums them, as Hierarchical says.
    passes = POWER_PASSES if c.inside == 1 else 3 + POWER_PASSES / c.inside
    work = _work(sizes, passes, POWER_LAUNCHES, slowest, c.slots)
    members = c.together // c.inside
    turn = (members - 1) / members * over.ring_per_byte
    return 2 * (2 * over.ring_latency + sizes.factor_bytes * turn), work  # two all-reduces, one for either factor


def _work(sizes: Sizes, passes: float, launches: int, slowest: Array, slots: int) -> Array:
    """Return the seconds [batch, P] of the work on some layers' compressed gradients.

    Args:
        sizes: the candidate's.
        passes: passes over the gradients, with those in no kernel.
        launches: kernels for each matrix.
        slowest: seconds [batch, P] of a pass over a byte.
        slots: number of layers.
    """
    numbers = sizes.compressed_parameters + sizes.rest
    matrices = len(sizes.compressed_kernels)
    return slots * (passes * numbers * MASTER * slowest + matrices * launches * costs.LAUNCH)


def _coded(sizes: Sizes, links: LinkSeconds, slowest: Array, slots: int) -> tuple[Array, Array]:
    """Return the seconds [batch, P] of some layers' exchanges by their codec, and of the codec's work.

    Args:
        sizes: the candidate's.
        links: seconds of the messages.
        slowest: seconds [batch, P] of a pass over a byte.
        slots: number of layers.
    """
    c, over = sizes.candidate, links.between or links.every
    sent: dict[str, CodecExchange] = {}
    for shape in sizes.compressed_kernels:
        for kind, size, number in c.coded.exchanges(shape, c.together, c.zero1):
            before = sent.get(kind, CodecExchange(kind, 0.0, 0))
            # Arrays share collectives.
            sent[kind] = CodecExchange(kind, before.bytes + size * slots, max(before.number, number))
    assert c.coded.data is not None
    passes, launches = c.coded.reduction_passes(c.together)
    if c.shard_group:  # which has summed already, and a device has its shard
        passes, launches = c.coded.passes_of(c.coded.data)
        passes = passes / c.inside
    work = _work(sizes, passes, launches, slowest, slots)
    return _seconds(sent.values(), over, c.together // c.inside), work


def _seconds(exchanges: Iterable[CodecExchange], over: DataLinks, members: int) -> Array:
    """Return the seconds [batch, P] of a codec's collectives.

    Args:
        exchanges: the collectives.
        over: seconds of collectives among the ranks.
        members: number of ranks that exchange.
    """
    seconds = np.zeros_like(over.ring_latency)
    for kind, size, count in exchanges:
        if kind == "all-to-all":
            whole = size * members / (members - 1)  # with the rank's part for itself
            seconds = seconds + count * over.scatter_latency + whole * over.scatter_per_byte
        else:
            turns = 2 if kind == "all-reduce" else 1
            seconds = seconds + count * turns * over.ring_latency + size * over.ring_per_byte
    return seconds


def _table_work(sizes: Sizes, slowest: Array) -> Array:
    """Return the seconds [batch, P] of the embedding's codec on a stage with a table.

    Args:
        sizes: the candidate's.
        slowest: seconds [batch, P] of a pass over a byte.
    """
    c = sizes.candidate
    passes, launches = c.coded.table_passes(c.together, c.zero1, sizes.swaps)
    return passes * sizes.embedding_parameters * MASTER * slowest + launches * costs.LAUNCH
