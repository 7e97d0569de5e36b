"""A lower bound of the step time in closed form, for all candidates at once: what a search need not look at.

The parts, each below what planner.cost.step_time says of any placement and any split of the layers:

    pipeline    every stage runs its own work one op after another. Stages that compute while idle (masked schedules) do
                so for P-1 micro-batches more, until the first of them is done; then B goes down from stage to stage.
                In 1f1b stage s must wait for its first gradient, with at most P-s
                micro-batches forwarded: the best split of the work over the stages is then a linear program with a
                closed solution. If all F come before all B (gpipe), a micro-batch goes all the way beside the work of
                the slowest stage. If transfers block devices, stages wait for those that they receive.
    links       as fast as the fastest that a message or ring can get: inside a host only if several tensor groups share
                one and a ring's ranks find room in it; at least one tensor group's flows share the NIC.
    reduction   compressed if that is quicker; on GPUs under the last op, except for one layer's.
    groups      that train apart each count as if they were alone, and exchange nothing.
    layers      of several kinds count as the mean one where all of them are counted, and as the quickest kind, or as
                none, where it depends on the split which they are.
    devices     as quick as the quickest kind. If there are several kinds, D data ranks on n groups of the quickest ones
                leave at most n/D stages that lie on these alone; the layers are then split exactly.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from paxtrain.config import REDUCE_DTYPES, SAVE_MODES, SHARDS, ModelConfig
from paxtrain.model.parameters import count as parameters_of
from paxtrain.model.parameters import differ, of_mean_layer
from paxtrain.model.parameters import kinds as layer_kinds
from paxtrain.schedule.schedules import ScheduleSpec, each
from planner.cluster.cluster import Cluster, between
from planner.cost import compute as costs
from planner.cost.coded import LOW_RANK, POWER_PASSES, Coded
from planner.cost.link_seconds import IN_TURN
from planner.cost.sizes import MASTER
from planner.search.space import BACKWARD, Space

Array = np.ndarray


def item(model: ModelConfig) -> int:
    """Return the bytes of an element in compute dtype."""
    return costs.ITEM[model.dtype]


def parameters(model: ModelConfig, space: Space) -> Array:
    """Return the parameters [N] of a stage's layer slots on one device, if layers are spread evenly."""
    sizes, where = space.layer_sizes
    return np.array([of_mean_layer(model, one) for one in sizes])[where] * _slots(model, space) * space.chunks


def _slots(model: ModelConfig, space: Space) -> Array:
    """Return the layer slots [N] of a virtual stage; of layers of several kinds as many as mean ones there must be."""
    return model.layers / (space.pipe * space.chunks) if differ(model) else space.slots


def compute(cluster: Cluster, model: ModelConfig, space: Space, kinds: Sequence[str] = ()) -> dict[Any, Array]:
    """Return the columns of the mean layer's costs on the quickest kind of device.

    Under (name, "least") and (name, "most") are the factors by which kinds of layers may differ from the mean.

    Args:
        cluster: kinds of devices.
        model: model to train.
        space: N candidates.
        kinds: kinds to choose from; all that the cluster has if empty.
    """
    sizes, which = space.layer_sizes
    keys = np.stack([which, space.micro_batch, space.save, space.sequence_parallel])
    different, where = np.unique(keys, axis=1, return_inverse=True)
    kinds = kinds or sorted(set(cluster.kinds))
    rows, several = [], differ(model)
    for one, micro_batch, save, sequence in different.T.tolist():
        how = (sizes[one], micro_batch, SAVE_MODES[save], bool(sequence))
        found = [costs.layer(cluster, kind, model, *how) for kind in kinds]
        rows.append([min(getattr(x, name) for x in found) for name in (*costs.TIMES, *costs.PARTS)])
        own = [costs.of_layers(cluster, kind, model, *how) for kind in kinds] if several else []
        rows[-1] += [min((x[name].min() for x in own), default=1.0) for name in costs.OF_LAYERS]
        rows[-1] += [max((x[name].max() for x in own), default=1.0) for name in costs.OF_LAYERS]
    table = np.array(rows)[where.ravel()]
    extremes = [(name, end) for end in ("least", "most") for name in costs.OF_LAYERS]
    return dict(zip((*costs.TIMES, *costs.PARTS, *extremes), table.T))


def _fastest(cluster: Cluster, space: Space, ranks: Array) -> tuple[Array, Array, Array, Array]:
    """Return columns: latency and seconds per byte of the fastest hop, and of the fastest slowest link of a ring.

    Args:
        cluster: devices and links.
        space: N candidates.
        ranks: ranks [N] of a ring over data.
    """
    groups = cluster.devices_per_host // space.seat  # of a host
    size = len(cluster.hosts)
    inside = np.eye(size, dtype=bool)
    ease = cluster.execution.ease
    alpha_in, byte_in = cluster.alpha[inside].min(), ease / cluster.samples[:, inside].max()
    if size == 1:
        alpha_out, byte_out = alpha_in, byte_in
    else:
        apart = between(cluster)
        alpha_out, byte_out = cluster.alpha[apart].min(), ease / cluster.samples[:, apart].max()
    crowd = np.maximum(space.seat / cluster.nics, 1.0)

    def pick(within: Array, a: float, b: float, share: Array) -> Array:
        return np.where(within, min(a, b), b * share)

    hop_inside, ring_inside = groups > 1, groups >= ranks
    one = np.ones(len(space))
    return (
        pick(hop_inside, alpha_in, alpha_out, one),
        pick(hop_inside, byte_in, byte_out, crowd),
        pick(ring_inside, alpha_in, alpha_out, one),
        pick(ring_inside, byte_in, byte_out, crowd) / space.shared,
    )


def _one_f_one_b(
    p: Array, m: Array, work: Array, share: Array, path: Array, wait: Array, forwarded: Callable[[int], Array]
) -> Array:
    """Return the seconds [N] of a pipeline whose stages wait for their first gradient, whatever the split of the work.

    Before the first B of stage s one micro-batch goes all the way, and m-1 B and at least m-g_s F are still to come:

        T >= work + path + x_s d_s + e_s    d_s = (m-1)(1-f) + max(m-g_s, 0) f,  sum_s x_s = work

    with f the share of F in the work, the path's transfers, and e_s what stages that receive gradients wait for the
    others. The least T meets all of them with equality.

    Args:
        p: stages [N].
        m: micro-batches [N].
        work: seconds [N] of one micro-batch on all stages together.
        share: largest share [N] of F in a stage's work.
        path: seconds [N] of the transfers that one micro-batch needs all the way.
        wait: seconds [N] for which a gradient's transfer blocks the stage that receives it.
        forwarded: stage -> g_s [N], the most micro-batches that it forwards before its first B.
    """
    inverse, waiting = np.zeros(len(p)), np.zeros(len(p))
    for s in range(int(p.max())):
        here = s < p
        later = np.maximum(m - forwarded(s), 0)
        d = (m - 1) * (1 - share) + later * share
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse += np.where(here, 1 / d, 0.0)
            waiting += np.where(s < p - 1, (m - 1) * wait / d, 0.0)
    with np.errstate(invalid="ignore"):
        return np.where(m > 1, work + path + (work + waiting) / inverse, work + path)


def _masked(p: Array, m: Array, share: Array) -> tuple[Array, Array, Array]:
    """Return how a step of a masked schedule grows with its work, whatever the split of the layers.

    Stage s runs m+P-1 F, and m+P-1-s B, since in the last P-1 rows it skips what is not its own. Then the last B goes
    down from stage s-1 to 0. So for every stage

        T >= (m+P-1) F_s + (m+P-1-s) B_s + sum_{j<s} B_j

    and T is at least a mean of these with any weights l_s. They are chosen so that work counts equally on all stages.

    Args:
        p: stages [N].
        m: micro-batches [N].
        share: share [N] of F in the work of a layer.

    Returns:
        The seconds [N] for each second of a micro-batch's layers on all stages together, and the weights l_s [N] of the
        first and of the last stage.
    """
    rows, after, last = m + p - 1, np.zeros(len(p)), np.zeros(len(p))
    weight = np.zeros(len(p))
    for s in reversed(range(int(p.max()))):
        here = s < p
        each_second = np.where(here, rows * share + (1 - share) * (rows - s), 1.0)
        weight = np.where(here, (1 - (1 - share) * after) / each_second, 0.0)
        last = np.where(s == p - 1, weight, last)
        after = after + weight
    return 1 / after, weight / after, last / after


@dataclasses.dataclass(frozen=True, eq=False)
class _Facts:
    """Columns [N] over all candidates that several parts of the bound need.

    Attributes:
        costs: layer costs on the quickest kind of device, see `compute`.
        hop_latency, hop_byte: latency and seconds per byte of the fastest hop.
        ring_latency, ring_byte: those of the fastest slowest link of a ring over data.
        held: parameters of a stage's layer slots on one device.
        table: parameters of the embedding on one device.
        coded: codecs other than low rank.
    """

    costs: dict[Any, Array]
    hop_latency: Array
    hop_byte: Array
    ring_latency: Array
    ring_byte: Array
    held: Array
    table: Array
    coded: Coded = LOW_RANK


def _folds(space: Space) -> Array:
    """Return whether a stage of several holds the first and the last virtual stage, bool [N]."""
    return each(space.schedule, lambda spec, v: spec.folds(v), space.chunks) & (space.pipe > 1)


def _meets(space: Space) -> Array:
    """Return whether one stage holds the first and the last virtual stage, bool [N]."""
    return (space.pipe == 1) | _folds(space)


def _facts(cluster: Cluster, model: ModelConfig, space: Space) -> _Facts:
    sizes, where = space.layer_sizes
    of_stage = np.array([costs.embedding_parameters(model, one, 2) for one in sizes])[where]
    table = of_stage * np.where(_meets(space), model.tables, 1)
    fastest = _fastest(cluster, space, space.together)
    return _Facts(compute(cluster, model, space), *fastest, parameters(model, space), table)


def _pipeline(model: ModelConfig, space: Space, facts: _Facts, overlap: bool) -> tuple[Array, Array]:
    """Return the least seconds [N] until all stages, and until the first one, have run their rows.

    Args:
        model: model to train.
        space: N candidates.
        facts: columns over them.
        overlap: transfers run beside compute.
    """
    c, p, m = facts.costs, space.pipe, space.micro_batches
    several = p > 1
    splits = each(space.schedule, lambda spec: spec.splits) & several
    layer = c["forward"] + np.where(splits, c["backward_input"] + c["backward_weights"], c["backward"])
    several_kinds = differ(model)
    most = model.layers / p if several_kinds else -(-model.layers // p)
    fullest = m * most * layer
    least_b = np.where(splits, np.minimum(*(c[name, "least"] for name in costs.PARTS)), c["backward", "least"])
    quickest = c["forward"] * c["forward", "least"] + (layer - c["forward"]) * least_b

    tokens = space.micro_batch * model.sequence // space.parts
    message = facts.hop_latency + tokens * model.hidden * item(model) * facts.hop_byte
    factors = space.backward_rank * (facts.coded.backward is None)  # another codec's message has some bytes or none
    packed = facts.hop_latency + factors * (tokens + model.hidden) * item(model) * facts.hop_byte
    activation = message
    if facts.coded.compresses_forward:
        factors = facts.coded.forward_rank * (tokens + model.hidden)
        activation = np.minimum(message, facts.hop_latency + factors * item(model) * facts.hop_byte)
    gradient = np.where(space.backward == BACKWARD.index("none"), message, np.minimum(message, packed))
    bare = each(space.schedule, lambda spec: spec.order == "forwards_first" and not overlap) & several
    waits = np.where(bare, m * (activation + gradient) * (p - 1), 0.0)
    one = model.layers * layer + c["embedding"] + c["head"]
    first = (m * one + waits) / p
    # If all F come before all B, a micro-batch goes all the way there and back while the slowest stage runs the others.
    halves = each(space.schedule, lambda spec: spec.order == "forwards_first") & several
    through = one + (p - 1) * (activation + gradient) + (m - 1) / m * np.maximum(m * one / p, fullest)
    first = np.maximum(first, np.where(halves, through, 0.0))
    # Stage s idles until a micro-batch comes through a layer or more of each stage before it, and likewise at the end.
    groups = each(space.schedule, lambda spec: spec.interleaves and not spec.splits) & several
    ends = np.maximum(
        first + (p - 1) / 2 * (quickest + activation + gradient), one + (p * space.chunks - 1) * (activation + gradient)
    )
    first = np.maximum(first, np.where(groups, ends, 0.0))
    pipeline = np.maximum(first, fullest)
    # Folded, the first stage has the head, too, and may be done before others.
    own = m * (space.chunks * quickest + c["embedding"] + c["head"])
    pipeline, first = np.maximum(pipeline, own * _folds(space)), np.where(_folds(space), own, first)
    masked = np.flatnonzero(_computes_on_scrap(space, overlap) & (not several_kinds))
    if len(masked):
        f, b, rows = c["forward"][masked], c["backward"][masked], (m + p - 1)[masked]
        factor, on_first, on_last = _masked(p[masked], m[masked], f / (f + b))
        found = factor * model.layers * (f + b) + m[masked] * on_last * c["head"][masked]
        found += c["embedding"][masked] / 2 * (2 * on_first * rows + 1 - on_first)
        found += np.where(bare, m * activation, 0.0)[masked] * (1 - on_last)
        found += np.where(bare, m * gradient, 0.0)[masked] * (1 - on_first)
        most = -(-model.layers // p[masked])
        fullest = most * (rows * f + m[masked] * b) + (p[masked] - 1) * b
        pipeline[masked] = np.maximum(found, fullest)
        first[masked] = pipeline[masked]
    some = np.flatnonzero(each(space.schedule, _waits_for_its_first_gradient) & several)
    if len(some):
        # The share of F is that of a stage with one layer and the embedding, half of which is F. No stage has a larger
        # one except the last, for which it does not matter.
        f = c["forward"] * c["forward", "most"]
        whole = f + (layer - c["forward"]) * least_b
        share = np.maximum((f + c["embedding"] / 2) / (whole + c["embedding"]), f / whole)
        codes, path = space.schedule[some], ((p - 1) * (activation + gradient))[some]

        def forwarded(s: int) -> Array:
            return each(codes, lambda spec, p, m: spec.in_flight(s, p, 1, m), p[some], m[some])

        wait = gradient[some] * (not overlap)
        found = _one_f_one_b(p[some], m[some], one[some], share[some], path, wait, forwarded)
        # The first stage runs no further F before the first of those in flight is back.
        found = np.maximum(found, -(-m[some] // forwarded(0)) * (one[some] + path))
        pipeline[some], first[some] = np.maximum(pipeline[some], found), np.maximum(first[some], found)
    return pipeline, first


def _waits_for_its_first_gradient(spec: ScheduleSpec) -> bool:
    """Return whether a stage forwards what it may have in flight before its first B, which makes all its gradients."""
    return spec.order == "alternating" and not (spec.splits or spec.interleaves)


def _all_to_all(cluster: Cluster, space: Space, ranks: Array, ring_byte: Array) -> Array:
    """Return the least seconds per byte [N] of a rank's array that an all-to-all over data takes.

    Args:
        cluster: devices and links.
        space: N candidates.
        ranks: ranks [N] that exchange.
        ring_byte: seconds per byte [N] of the fastest slowest link of a ring over these.
    """
    groups = cluster.devices_per_host // space.seat
    flows = space.seat * np.maximum(ranks - groups, 1) / (cluster.nics * cluster.fan_out)
    alone = np.maximum(space.seat / cluster.nics, 1.0)  # what ring_byte has, if the ranks do not fit into a host
    return ring_byte * np.where(ranks > groups, np.maximum(flows / alone, IN_TURN), 1.0) / ranks


def _reduction(cluster: Cluster, model: ModelConfig, space: Space, facts: _Facts) -> tuple[Array, Array]:
    """Return the least seconds [N] of the layers' reduction and gather over data, and of the embedding's gradient."""
    d, held, table, slots_each = space.together, facts.held, facts.table, _slots(model, space)
    share = (d - 1) / d * facts.ring_byte
    latency = (d - 1) * facts.ring_latency
    size = np.array([costs.ITEM[dtype] for dtype in REDUCE_DTYPES])[space.reduce_dtype]

    def scattered(parameters: Array, ranks: Array, ring_latency: Array, ring_byte: Array) -> Array:
        if cluster.overlaps:
            return (ranks - 1) * ring_latency + parameters * size * (ranks - 1) / ranks * ring_byte
        return ring_latency + parameters * size * _all_to_all(cluster, space, ranks, ring_byte)

    def reduced(parameters: Array) -> Array:
        scatter = scattered(parameters, d, facts.ring_latency, facts.ring_byte)
        return np.where(space.zero1, scatter, 2 * (latency + parameters * size * share))

    # An uneven split has a stage with more slots. They take longer to reduce, and hide more of it. Both are linear in
    # the slots, so the least of their difference is at an end.
    widest = model.layers - space.pipe * space.chunks + 1
    sizes, where = space.layer_sizes
    kernels = [costs.kernels(model, one) for one in sizes]
    beside = [of_mean_layer(model, one) - sum(n * k for n, k in some) for one, some in zip(sizes, kernels)]
    rest = np.array(beside)[where]
    sides = np.array([sum(n + k for n, k in some) for some in kernels])[where]
    factors = space.chunks * (rest * size + space.data_rank * sides * MASTER)  # of a slot of each chunk
    passes = POWER_PASSES * held * MASTER * facts.costs["optimizer"] / cluster.shares.optimizer_bytes
    known = facts.coded.data is None and facts.coded.inside <= 1
    if not known:  # of another codec, or of groups, nothing is known here
        passes = np.zeros_like(passes)
    splits = each(space.schedule, lambda spec: spec.splits) & (space.pipe > 1)
    last = np.where(splits, facts.costs["backward_weights"], facts.costs["backward"])

    def dense(slots: Array) -> Array:
        return reduced(held / slots_each * slots)

    def small(slots: Array) -> Array:
        return known * (4 * latency + 2 * factors * slots * share)

    def exposed(seconds: Callable[[Array], Array]) -> Array:
        if differ(model):
            return seconds(slots_each) / (model.layers * space.chunks)
        behind = [
            seconds(slots) - cluster.overlaps * (slots - (space.chunks == 1)) * last for slots in (space.slots, widest)
        ]
        return np.maximum(seconds(widest) / (widest * space.chunks), np.minimum(*behind))

    reduce = np.where(space.data_rank > 0, np.minimum(exposed(dense), exposed(small) + passes), exposed(dense))
    gather = np.where(space.zero1, latency + held * item(model) * share, 0.0)
    if facts.coded.weights is not None:
        gather = np.zeros_like(gather)
    # Sums in shards are reduced with each micro-batch, see data_axis.shards; of a pipeline's nothing is known here.
    once, whole = space.shard < SHARDS.index("gradients"), space.shard < SHARDS.index("weights")
    one = held / slots_each
    if differ(model):
        some = [min(parameters_of(model, mesh=mesh, kind=kind) for kind in set(layer_kinds(model))) for mesh in sizes]
        one = np.array(some)[where]
    ranks = space.sharing
    _, _, first, each_byte = _fastest(cluster, space, ranks)
    taken = ~whole * (ranks - 1) * (first + one * item(model) / ranks * each_byte)
    coded = (space.data_rank > 0) & ~once  # of a codec nothing is known here
    if facts.coded.weights is not None:
        taken = np.zeros_like(taken)
    left = np.where((ranks > 1) & ~coded, scattered(one, ranks, first, each_byte), 0.0)
    under = [facts.costs[name] if cluster.overlaps else 0.0 for name in ("forward", "backward")]
    waits = taken + left * cluster.overlaps + (space.slots - 1) * np.maximum(taken - under[0], 0.0)
    waits = waits + space.slots * np.maximum(taken + left - under[1], 0.0)
    often = np.where((space.pipe == 1) & ~once, space.micro_batches * waits, 0.0)
    # Groups that share them add theirs to each other's once a step, and get their part of the weights anew.
    copies = d // ranks
    _, _, first, each_byte = _fastest(cluster, space, copies)
    even = held * model.layers / (slots_each * space.chunks * space.pipe)

    def between(parameters: Array) -> Array:
        return np.where((copies > 1) & ~once, scattered(parameters / ranks, copies, first, each_byte), 0.0)

    layers = np.where(coded, 0.0, between(even))

    anew = (copies - 1) * (first + even * item(model) / (ranks * copies) * each_byte) * ~whole
    over = np.where(d > 1, reduce * once + gather * whole + often + layers + anew, 0.0)
    edge = np.where(d > 1, np.where(once, reduced(table), between(table)), 0.0)
    tied = model.tied_head & ~_meets(space)
    if facts.coded.embedding is not None:
        return over, np.zeros_like(edge)  # of another codec nothing is known here
    edge += np.where(tied, facts.hop_latency + table * MASTER / d * facts.hop_byte, 0.0)
    return over, edge


def _kinds(cluster: Cluster, model: ModelConfig, space: Space) -> Array:
    """Return the least seconds [N] of the slowest stage's ops, if devices differ in kind; 0 if they do not.

    If all stages end within T, stage s has at most T/u_s layers, where u_s are the seconds that all ops on one layer
    take on the slowest kind under the stage. So T is the least time within which all layers find room.
    """
    kinds = sorted(set(cluster.kinds))
    if len(kinds) == 1 or differ(model):
        return np.zeros(len(space))
    masked = _computes_on_scrap(space, cluster.overlaps)
    splits = each(space.schedule, lambda spec: spec.splits) & (space.pipe > 1)
    rows = space.micro_batches + np.where(masked, space.pipe - 1, 0)
    seconds = []
    for kind in kinds:
        c = compute(cluster, model, space, (kind,))
        backward = np.where(splits, c["backward_input"] + c["backward_weights"], c["backward"])
        seconds.append(rows * c["forward"] + space.micro_batches * backward)
    hosts = np.array([cluster.kinds.count(kind) for kind in kinds])
    order = np.argsort(seconds, axis=0)  # [kinds, N], the quickest first
    unit = np.take_along_axis(np.array(seconds), order, 0)
    groups = np.cumsum(hosts[order], axis=0) * (cluster.devices_per_host // space.seat)
    alone = np.minimum(groups // space.data, space.pipe)  # stages that may lie on the quickest kinds alone
    stages = np.diff(alone, axis=0, prepend=0)
    least = np.full(len(space), np.inf)
    for quickest in unit:
        for count in range(1, model.layers + 1):
            limit = quickest * count
            room = sum(n * np.floor(limit / u * (1 + 1e-9)) for n, u in zip(stages, unit))
            least = np.where(room >= model.layers, np.minimum(least, limit), least)
    # Data ranks of which the faster have more micro-batches are done within T if all devices together are.
    together = space.data * model.layers / (np.diff(groups, axis=0, prepend=0) / unit).sum(axis=0)
    return np.where(space.uneven_data, together, least) * (1 - 1e-9)


def _computes_on_scrap(space: Space, overlap: bool) -> Array:
    """Return whether idle stages of each candidate compute, bool [N]; those of uneven data ranks skip."""
    return each(space.schedule, lambda spec: spec.masks(overlap)) & ~space.uneven_data.astype(bool)


def lower_bound(cluster: Cluster, model: ModelConfig, space: Space, coded: Coded = LOW_RANK) -> Array:
    """Return the seconds [N] below which no placement and no split of layers brings a candidate's predicted step.

    Args:
        cluster: devices and links.
        model: model to train.
        space: N candidates.
        coded: codecs other than low rank.
    """
    facts = dataclasses.replace(_facts(cluster, model, space), coded=coded)
    pipeline, first = _pipeline(model, space, facts, cluster.overlaps)
    slowest = _kinds(cluster, model, space)
    pipeline = np.maximum(pipeline, slowest)
    # Unless W are left, all other stages have run their ops before the last B of the first one.
    several = each(space.schedule, lambda spec: spec.splits)
    first = np.where(several, first, np.maximum(first, slowest))
    over, edge = _reduction(cluster, model, space, facts)
    optimizer = (
        (facts.held + facts.table) / np.where(space.zero1, space.together * space.shared, 1) * facts.costs["optimizer"]
    )
    # The first stage is the last to finish its own work, and it has the embedding's gradient to reduce and, if the
    # embedding is tied to the head, to exchange.
    return np.maximum(pipeline + over, first + over + edge) + optimizer + cluster.host_seconds
