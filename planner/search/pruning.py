"""A lower bound of the step time in closed form, for all candidates at once: what a search need not look at.

The parts, each below what planner.cost.step_time says of any placement and any split of the layers:

    pipeline    every stage runs its own work one after another. Stages that compute while idle (eager_1f1b, gpipe) do
                so for P-1 micro-batches more. In 1f1b stage s must wait for its first gradient, with at most P-s
                micro-batches forwarded: the best split of the work over the stages is then a linear program with a
                closed solution. Where a transfer has nothing to lie under (all but eager_1f1b), stages wait for it.
    links       as fast as the fastest that a message or ring can get: inside a host only where several tensor groups
                share one and a ring's ranks find room in it; the NIC is shared by one tensor group's flows at least.
    reduction   the compressed one where that is quicker.
"""

import numpy as np

from paxtrain.config import SAVE_MODES, SCHEDULES, SPLIT, ModelConfig
from planner.cluster.cluster import Cluster, between
from planner.cost import compute as costs
from planner.cost.step_time import MASTER, POWER_PASSES
from planner.search.space import BACKWARD, MASKED, Space

Array = np.ndarray


def item(model: ModelConfig) -> int:
    """Bytes of an element in compute dtype."""
    return costs.ITEM[model.dtype]


def parameters(model: ModelConfig, space: Space) -> Array:
    """Parameters [N] of a stage's layer slots on one device, if layers are spread evenly."""
    per_layer = {t: costs.layer_parameters(model, t) for t in set(space.tensor.tolist())}
    return np.array([per_layer[t] for t in space.tensor.tolist()]) * space.slots * space.chunks


def compute(cluster: Cluster, model: ModelConfig, space: Space) -> dict[str, Array]:
    """Columns of the layer costs on the quickest kind of device."""
    keys = np.stack([space.tensor, space.micro_batch, space.save, space.sequence_parallel])
    different, where = np.unique(keys, axis=1, return_inverse=True)
    kinds = sorted(set(cluster.kinds))
    rows = []
    for tensor, micro_batch, save, sequence in different.T.tolist():
        how = (tensor, micro_batch, SAVE_MODES[save], bool(sequence))
        found = [costs.layer(cluster, kind, model, *how) for kind in kinds]
        rows.append([min(getattr(x, name) for x in found) for name in (*costs.TIMES, *costs.PARTS)])
    table = np.array(rows)[where.ravel()]
    return dict(zip((*costs.TIMES, *costs.PARTS), table.T))


def _fastest(cluster: Cluster, space: Space) -> tuple[Array, Array, Array, Array]:
    """Columns: latency and seconds per byte of the fastest hop and of the fastest slowest link of a ring."""
    groups = cluster.devices_per_host // space.tensor  # of a host
    size = len(cluster.hosts)
    inside = np.eye(size, dtype=bool)
    alpha_in, byte_in = cluster.alpha[inside].min(), 1 / cluster.samples[:, inside].max()
    if size == 1:
        alpha_out, byte_out = alpha_in, byte_in
    else:
        apart = between(cluster)
        alpha_out, byte_out = cluster.alpha[apart].min(), 1 / cluster.samples[:, apart].max()
    crowd = np.maximum(space.tensor / cluster.nics, 1.0)

    def pick(within: Array, a: float, b: float, share: Array) -> Array:
        return np.where(within, min(a, b), b * share)

    hop_inside, ring_inside = groups > 1, groups >= space.data
    one = np.ones(len(space))
    return (
        pick(hop_inside, alpha_in, alpha_out, one),
        pick(hop_inside, byte_in, byte_out, crowd),
        pick(ring_inside, alpha_in, alpha_out, one),
        pick(ring_inside, byte_in, byte_out, crowd),
    )


def _one_f_one_b(p: Array, m: Array, work: Array, share: Array, wait: Array) -> Array:
    """The pipeline of 1f1b, whatever the split of `work` seconds a micro-batch over the stages.

    Before the first B of stage s one micro-batch goes all the way, and m-1 B and m-(P-s) F of it are still to come:

        T >= work + x_s d_s + e_s    d_s = (m-1)(1-f) + max(m-P+s, 0) f,  sum_s x_s = work

    with f the share of F in the work, and e_s what stages that receive gradients wait for transfers. The least T meets
    all of them with equality.
    """
    inverse, waiting = np.zeros(len(p)), np.zeros(len(p))
    for s in range(int(p.max())):
        here = s < p
        later = np.maximum(m - p + s, 0)
        d = (m - 1) * (1 - share) + later * share
        with np.errstate(divide="ignore", invalid="ignore"):
            inverse += np.where(here, 1 / d, 0.0)
            waiting += np.where(s < p - 1, (m - 1 + later) * wait / d, 0.0)
    with np.errstate(invalid="ignore"):
        return np.where(m > 1, work + (work + waiting) / inverse, work)


def lower_bound(cluster: Cluster, model: ModelConfig, space: Space) -> Array:
    """Seconds [N] below which no placement and no split of layers brings a candidate's predicted step."""
    c = compute(cluster, model, space)
    p, m, d = space.pipe, space.micro_batches, space.data
    splits = np.isin(space.schedule, [SCHEDULES.index(name) for name in SPLIT]) & (p > 1)
    layer = c["forward"] + np.where(splits, c["backward_input"] + c["backward_weights"], c["backward"])
    masked = np.isin(space.schedule, MASKED)
    rows = m + np.where(masked, p - 1, 0)
    whole = rows * (model.layers * layer + c["embedding"]) + m * c["head"]
    fullest = rows * -(-model.layers // p) * layer
    hop_alpha, hop_byte, ring_alpha, ring_byte = _fastest(cluster, space)

    size = item(model)
    tokens = space.micro_batch * model.sequence // space.parts
    message = hop_alpha + tokens * model.hidden * size * hop_byte
    packed = hop_alpha + space.backward_rank * (tokens + model.hidden) * size * hop_byte
    gradient = np.where(space.backward == BACKWARD.index("none"), message, np.minimum(message, packed))
    alone = p == 1
    gpipe, plain = (space.schedule == SCHEDULES.index(name) for name in ("gpipe", "1f1b"))
    waits = np.where(gpipe & ~alone, m * (message + gradient) * (p - 1), 0.0)
    pipeline = np.maximum((whole + waits) / p, fullest)
    first = (m * (model.layers * layer + c["embedding"] + c["head"]) + waits) / p
    some = np.flatnonzero(plain & ~alone)
    if len(some):
        # Of a stage with one layer and the embedding, half of which is F: no stage has a larger share but the last,
        # for which it does not matter.
        share = (c["forward"] + c["embedding"] / 2) / (layer + c["embedding"])
        share = np.maximum(share, c["forward"] / layer)
        one = model.layers * layer + c["embedding"] + c["head"]
        found = _one_f_one_b(p[some], m[some], one[some], share[some], np.minimum(message, gradient)[some])
        pipeline[some], first[some] = np.maximum(pipeline[some], found), np.maximum(first[some], found)

    tensors = {t: i for i, t in enumerate(sorted(set(space.tensor.tolist())))}
    index = np.array([tensors[t] for t in space.tensor.tolist()])
    held = parameters(model, space)
    table = np.array([costs.embedding_parameters(model, t, 2) for t in tensors])[index] * np.where(
        alone, model.tables, 1
    )
    share = (d - 1) / d * ring_byte
    latency = (d - 1) * ring_alpha
    turns = np.where(space.zero1, 1, 2)
    dense = turns * (latency + held * MASTER * share)
    rest = np.array(
        [costs.layer_parameters(model, t) - sum(n * k for n, k in costs.kernels(model, t)) for t in tensors]
    )
    sides = np.array([sum(n + k for n, k in costs.kernels(model, t)) for t in tensors])
    factors = space.slots * space.chunks * (rest[index] + space.data_rank * sides[index]) * MASTER
    small = (
        4 * latency
        + 2 * factors * share
        + POWER_PASSES * held * MASTER * c["optimizer"] / cluster.shares.optimizer_bytes
    )
    reduce = np.where(space.data_rank > 0, np.minimum(dense, small), dense)
    gather = np.where(space.zero1, latency + held * size * share, 0.0)
    over = np.where(d > 1, reduce + gather, 0.0)
    # The first stage is the last to finish its own work, and it has the embedding's gradient to reduce and, where it is
    # tied, to exchange.
    edge = np.where(d > 1, turns * (latency + table * MASTER * share), 0.0)
    edge += np.where(alone | (not model.tied_head), 0.0, hop_alpha + table * MASTER / d * hop_byte)
    optimizer = (held + table) / np.where(space.zero1, d, 1) * c["optimizer"]
    return np.maximum(pipeline + over, first + over + edge) + optimizer
