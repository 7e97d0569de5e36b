"""The pipelines of measured runs, as arrays of everything that does not depend on the fitted constants.

Ranks count tensor fastest, then data, then pipe, and fill host after host unless the run says where they are. Messages
of concurrent senders share a host's network. If the pipelines of one run differ in device kinds, links or
micro-batches, each of them is a row.

References:
    Operations and activations of a layer: Korthikanti et al. 2022, Reducing Activation Recomputation.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.devices.datasheets import UNKNOWN, UNKNOWN_HOST, datasheet
from planner.fit.trials import Trial
from planner.pipeline.rows import Table

Array = np.ndarray


class LayoutRates(NamedTuple):
    """Rates of a layout in bytes/s, per data rank; if its tensor ranks differ, of the slowest one.

    Attributes:
        host: [dp, pp, 2] first and last host of each tensor group.
        tensor: [dp, pp] rates inside tensor groups. Concurrent messages share a host's network, here and below.
        tensor_inter: [dp, pp] whether the group spans hosts.
        hop: [dp, pp - 1] rates of messages to the next stage.
        hop_inter: [dp, pp - 1] whether these cross hosts.
        embedding: [dp] rates between the first and the last stage.
        embedding_inter: [dp] whether these are on different hosts.
        ring_intra: [pp] rates of a stage's slowest data ring inside hosts; inf if it has no such link.
        ring_inter: [pp] the same between hosts.
    """

    host: Array
    tensor: Array
    tensor_inter: Array
    hop: Array
    hop_inter: Array
    embedding: Array
    embedding_inter: Array
    ring_intra: Array
    ring_inter: Array


@functools.lru_cache(maxsize=4096)
def _layout_rates(
    tp: int,
    dp: int,
    pp: int,
    per_host: int,
    placement: tuple[int, ...],
    host_rates: tuple[float, ...],
    intra_rates: tuple[float, ...],
) -> LayoutRates:
    host = np.arange(tp * dp * pp).reshape(pp, dp, tp) // per_host
    if placement:
        host = np.repeat(placement, tp).reshape(pp, dp, tp)
    net, inside = np.array(host_rates), np.array(intra_rates)

    def rates(a: Array, b: Array) -> Array:
        """Return the rates of concurrent messages from hosts a to hosts b, which share the networks of both ends."""
        between = a != b
        load = [np.maximum(np.bincount(end[between], minlength=len(net)), 1) for end in (a, b)]
        return np.where(between, np.minimum(net[a] / load[0][a], net[b] / load[1][b]), inside[a])

    after = np.roll(host, -1, axis=2)
    tensor, tensor_inter = rates(host, after).min(axis=2), (host != after).any(axis=2)
    hops = [rates(a, b).min(axis=1) for a, b in zip(host, host[1:])]
    hop_inter = [(a != b).any(axis=1) for a, b in zip(host, host[1:])]
    after = np.roll(host, -1, axis=1)
    ring, crosses = rates(host, after), host != after
    return LayoutRates(
        host=host[:, :, [0, -1]].transpose(1, 0, 2),
        tensor=tensor.T,
        tensor_inter=tensor_inter.T,
        hop=np.reshape(hops, (pp - 1, dp)).T,
        hop_inter=np.reshape(hop_inter, (pp - 1, dp)).astype(bool).T,
        embedding=rates(host[0], host[-1]).min(axis=1),
        embedding_inter=(host[0] != host[-1]).any(axis=1),
        ring_intra=np.where(crosses, np.inf, ring).min(axis=(1, 2)),
        ring_inter=np.where(crosses, ring, np.inf).min(axis=(1, 2)),
    )


class PipelineBatch(NamedTuple):
    """N pipelines that run one table on P stages; a trial has several if its pipelines differ.

    The rates tensor to ring_inter are those of LayoutRates, for each pipeline. Seconds are at the datasheet's rates.

    Attributes:
        trial: [N] index of the trial.
        slot: [N, P] index of the stage's device kind among the trial's kinds.
        operations: [N, P] seconds of the matrix products of one layer's forward.
        traffic: [N, P] seconds of the memory traffic of one layer's forward, without attention scores.
        scores: [N, P] seconds of one pass over the attention scores of one layer.
        head: [N, 2] seconds of the matrix products and of the memory traffic of the output layer and loss.
        optimizer: [N, P] seconds per byte of traffic for each parameter of the stage.
        layers: [N, P] layers of the stage.
        message: [N] bytes of a stage's activations.
        parameter_bytes: [N, P] bytes of a stage's gradients.
        embedding_bytes: [N] bytes of the embedding's gradients.
        recompute: [N] whether activations are recomputed.
        tp: [N] tensor ranks.
        dp: [N] data ranks.
    """

    trial: Array
    slot: Array
    operations: Array
    traffic: Array
    scores: Array
    head: Array
    optimizer: Array
    layers: Array
    message: Array
    parameter_bytes: Array
    embedding_bytes: Array
    recompute: Array
    tp: Array
    dp: Array
    tensor: Array
    tensor_inter: Array
    hop: Array
    hop_inter: Array
    embedding: Array
    embedding_inter: Array
    ring_intra: Array
    ring_inter: Array


def kinds(trial: Trial) -> list[str]:
    """Return the device kinds of a run, each once."""
    return sorted(set(trial.device_kinds))


def _slots(trial: Trial, host: Array) -> Array:
    """Return [dp, pp] the index of the slowest device kind of each tensor group; host [dp, pp, 2] as in LayoutRates.

    A tensor group waits for its slowest device, and hosts between its first and last one count as well.
    """
    names = kinds(trial)
    by_speed = sorted(range(len(names)), key=lambda slot: (datasheet(names[slot]) or UNKNOWN).half)
    rank = np.array([by_speed.index(names.index(kind)) for kind in trial.device_kinds])
    return np.array(by_speed)[np.array([[rank[a : b + 1].min() for a, b in row] for row in host])]


def _different(slots: Array, rates: LayoutRates, micro_batches: Array) -> Array:
    """Return the data ranks whose pipelines differ in device kinds, rates or micro-batches, one of each."""
    columns = (slots, rates.tensor, rates.tensor_inter, rates.hop, rates.hop_inter)
    ends = (rates.embedding[:, None], rates.embedding_inter[:, None], micro_batches[:, None])
    _, first = np.unique(np.concatenate((*columns, *ends), axis=1), axis=0, return_index=True)
    return first


def _table(trial: Trial, micro_batches: int) -> Table:
    """Return the table of a data rank: of one with fewer micro-batches than others the last rows of theirs."""
    first = trial.micro_batches - micro_batches
    skips = bool(trial.data_micro_batches)
    return Table(trial.schedule, trial.pp, trial.micro_batches, trial.virtual_stages, first=first, skips=skips)


def _rows(index: int, trial: Trial) -> list[tuple[Table, tuple]]:
    """Return the differing pipelines of one trial: each one's table, and a PipelineBatch's fields without its axis N.

    Args:
        index: index of the trial.
        trial: the run.
    """
    sheets = [datasheet(kind) or UNKNOWN for kind in trial.device_kinds]
    hosts = trial.host_bytes or (UNKNOWN_HOST,) * trial.hosts
    intra = trial.intra_bytes or tuple(sheet.intra for sheet in sheets)
    rates = _layout_rates(trial.tp, trial.dp, trial.pp, trial.devices_per_host, trial.placement, hosts, intra)
    slots = _slots(trial, rates.host)
    micro_batches = np.array(trial.data_micro_batches or (trial.micro_batches,) * trial.dp)

    h, t, e, tokens = trial.hidden, trial.tp, trial.element_bytes, trial.micro_batch * trial.seq
    of_kind = [datasheet(kind) or UNKNOWN for kind in kinds(trial)]
    rate = np.array([sheet.half if e == 2 else sheet.single for sheet in of_kind])
    memory = np.array([sheet.memory_bandwidth for sheet in of_kind])
    layers = np.array(trial.stage_layers)
    table = trial.vocab * h / t
    stage = np.arange(trial.pp)
    parameters = layers * 12 * h * h / t + table * ((stage == 0) | (stage == trial.pp - 1))
    logits = tokens * trial.vocab / t
    rows = []
    for d in _different(slots, rates, micro_batches):
        slot = slots[d]
        row = PipelineBatch(
            trial=np.array(index),
            slot=slot,
            operations=tokens * (24 * h * h + 4 * h * trial.seq) / t / rate[slot],
            traffic=e * (12 * h * h / t + tokens * h * (10 + 24 / t)) / memory[slot],
            scores=e * tokens * trial.seq * trial.heads / t / memory[slot],
            head=np.array((2 * tokens * table / rate[slot[-1]], 6 * 4 * logits / memory[slot[-1]])),
            optimizer=parameters / memory[slot],
            layers=layers,
            message=np.array(e * tokens * h),
            parameter_bytes=e * parameters,
            embedding_bytes=np.array(e * table),
            recompute=np.array(trial.recompute),
            tp=np.array(t),
            dp=np.array(trial.dp),
            tensor=rates.tensor[d],
            tensor_inter=rates.tensor_inter[d],
            hop=rates.hop[d],
            hop_inter=rates.hop_inter[d],
            embedding=rates.embedding[d],
            embedding_inter=rates.embedding_inter[d],
            ring_intra=rates.ring_intra,
            ring_inter=rates.ring_inter,
        )
        rows.append((_table(trial, int(micro_batches[d])), tuple(row)))
    return rows


def pipeline_batches(trials: Sequence[Trial]) -> dict[Table, PipelineBatch]:
    """Return the pipelines of all trials, batched by the tables that they run."""
    rows: dict[Table, list[tuple]] = {}
    for index, trial in enumerate(trials):
        for table, row in _rows(index, trial):
            rows.setdefault(table, []).append(row)
    return {table: PipelineBatch(*map(np.array, zip(*found))) for table, found in rows.items()}
