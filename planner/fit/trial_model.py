"""The time of a measured run, from a few constants of its cluster: what planner.fit.calibrate fits.

Ranks count tensor fastest, then data, then pipe, and fill host after host. Of one micro-batch of `tokens` = micro_batch
x seq tokens, a layer of hidden size h on t tensor ranks takes

    operations  tokens (24 h^2 + 4 h seq) / t
    traffic     weights 12 h^2 / t, activations tokens h (10 + 24 / t), attention scores tokens heads seq / t x passes
    compute     both, each at its share of the datasheet's rate, or the time to launch its kernels, where that is more
    F           compute + 2 all-reduces over t
    B           backward_ratio x compute + 2 all-reduces, and F again where activations are recomputed

the last stage adds the head, and every stage a constant per micro-batch. The simulator composes these to the time at
which each stage has done its last micro-batch; then come the gradients' rings over their real hosts, the tied
embedding's exchange between first and last stage, and the optimizer.

Messages of concurrent senders share a host's network. Where pipelines of one run differ (other device kinds, other
links), each is simulated and the slowest counts.

References:
    Operations and activations of a layer: Korthikanti et al. 2022, Reducing Activation Recomputation. Rings and
    exchange: Narayanan et al. 2021 (Megatron-LM).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.devices.datasheets import UNKNOWN, UNKNOWN_HOST, datasheet
from planner.cost import closed_forms, ideal, simulator
from planner.cost.rows import Table
from planner.fit.trials import Trial

Array = np.ndarray
METHODS = ("simulate", "pipette", "amp")


# --- Constants --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Constant:
    """A property of a cluster that is fitted.

    Attributes:
        unit: of its values.
        low, high: the range that a value must be in to be physical.
        typical: what it is taken to be until measurements say otherwise.
        spread: standard deviation of its logarithm among clusters.
        wide: what low and high are divided and multiplied by where a device kind or a link rate is not known.
    """

    name: str
    unit: str
    low: float
    high: float
    typical: float
    spread: float
    meaning: str
    wide: float = 1.0


CONSTANTS = (
    Constant("compute_efficiency", "of the peak", 0.03, 1.0, 0.45, 0.4, "dense matrix products", wide=300),
    Constant("memory_efficiency", "of the peak", 0.05, 1.0, 0.6, 0.4, "traffic to device memory", wide=100),
    Constant("layer_launch", "s", 1e-6, 2e-2, 3e-4, 1.0, "host time to launch a layer's forward"),
    Constant("score_passes", "passes", 0.05, 30.0, 6.0, 0.7, "reads and writes of attention scores; few if fused"),
    Constant("backward_ratio", "of F", 1.2, 3.5, 2.0, 0.15, "backward over forward, without recomputation"),
    Constant("head_ratio", "of the model", 0.2, 5.0, 1.0, 0.4, "output layer and loss"),
    Constant("micro_batch_seconds", "s", 1e-6, 0.1, 5e-4, 1.2, "constant part of F and of B of a stage"),
    Constant("intra_latency", "s", 1e-7, 5e-3, 2e-5, 1.0, "a message inside a host"),
    Constant("intra_efficiency", "of the rate", 0.02, 1.0, 0.6, 0.4, "rate inside a host", wide=100),
    Constant("inter_latency", "s", 1e-6, 2e-2, 5e-5, 1.0, "a message between hosts"),
    Constant("inter_efficiency", "of the rate", 0.02, 1.0, 0.6, 0.4, "rate between hosts", wide=100),
    Constant("hop_ratio", "of the model", 0.2, 10.0, 1.0, 0.4, "bytes and overhead of pipeline messages"),
    Constant("data_ratio", "of the model", 0.1, 8.0, 1.0, 0.4, "bytes and overhead of gradient rings"),
    Constant(
        "tied_ratio", "of the model", 0.01, 5.0, 1.0, 0.7, "exchange of the embedding's gradients; little if untied"
    ),
    Constant("optimizer_bytes", "bytes", 2.0, 500.0, 40.0, 0.6, "traffic of the optimizer per parameter"),
    Constant("step_seconds", "s", 1e-6, 2.0, 5e-3, 1.2, "constant part of an iteration"),
)
NAMES = tuple(constant.name for constant in CONSTANTS)
_INDEX = {name: i for i, name in enumerate(NAMES)}


def known(trial: Trial) -> dict[str, bool]:
    """Which of the constants with a `wide` range are in terms of a rate that is known for this run."""
    kinds = all(datasheet(kind) is not None for kind in trial.device_kinds)
    intra = trial.intra_bytes is not None or kinds
    inter = trial.host_bytes is not None
    return {
        "compute_efficiency": kinds,
        "memory_efficiency": kinds,
        "intra_efficiency": intra,
        "inter_efficiency": inter,
    }


# --- What of a run does not depend on the constants -------------------------------------------------------------------


class _Links(NamedTuple):
    """Rates of a layout in bytes/s, per data rank and, where they differ, of the slowest tensor rank.

    Attributes:
        host: [dp, pp, 2] first and last host of each tensor group.
        tensor, hop, embedding: [dp, pp], [dp, pp - 1] and [dp] rates of tensor groups, messages to the next stage, and
            between first and last stage, after sharing.
        tensor_inter, hop_inter, embedding_inter: likewise, whether hosts differ.
        ring_intra, ring_inter: [pp] rates of a stage's slowest data ring inside and between hosts; inf where it has no
            such link.
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
def _links(tp: int, dp: int, pp: int, per_host: int, host_rates: tuple, intra_rates: tuple) -> _Links:
    host = np.arange(tp * dp * pp).reshape(pp, dp, tp) // per_host
    net, inside = np.array(host_rates), np.array(intra_rates)

    def rates(a: Array, b: Array) -> Array:
        """Of concurrent messages from hosts a to hosts b, which share what both ends have."""
        between = a != b
        load = [np.maximum(np.bincount(end[between], minlength=len(net)), 1) for end in (a, b)]
        return np.where(between, np.minimum(net[a] / load[0][a], net[b] / load[1][b]), inside[a])

    after = np.roll(host, -1, axis=2)
    tensor, tensor_inter = rates(host, after).min(axis=2), (host != after).any(axis=2)
    hops = [rates(a, b).min(axis=1) for a, b in zip(host, host[1:])]
    hop_inter = [(a != b).any(axis=1) for a, b in zip(host, host[1:])]
    after = np.roll(host, -1, axis=1)
    ring, crosses = rates(host, after), host != after
    return _Links(
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


class _Runs(NamedTuple):
    """Pipelines of one shape (P, m), several of one trial where they differ; arrays [N], [N, P] or [N, P - 1].

    Attributes:
        trial: index of the trial.
        slot: [N, P] which of the trial's device kinds a stage is on.
        operations, traffic, scores: [N, P] of one layer's forward, in seconds at the datasheet's rates (scores: of one
            pass); head, optimizer: likewise, of the stage; optimizer per byte.
        layers: [N, P].
        message: [N] bytes of a stage's activations. parameter_bytes: [N, P] of gradients. embedding_bytes: [N].
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
    """The device kinds of a run, each once."""
    return sorted(set(trial.device_kinds))


def _pipelines(index: int, trial: Trial) -> list[tuple]:
    """The differing pipelines of one trial, as rows of _Runs."""
    sheets = [datasheet(kind) or UNKNOWN for kind in trial.device_kinds]
    intra = trial.intra_bytes or tuple(sheet.intra for sheet in sheets)
    links = _links(
        trial.tp, trial.dp, trial.pp, trial.devices_per_host, trial.host_bytes or (UNKNOWN_HOST,) * trial.hosts, intra
    )
    names = kinds(trial)
    # A tensor group waits for its slowest device; what lies between its first and last host counts as well.
    by_speed = sorted(range(len(names)), key=lambda slot: (datasheet(names[slot]) or UNKNOWN).half)
    place = np.array([by_speed.index(names.index(kind)) for kind in trial.device_kinds])
    slots = np.array(by_speed)[np.array([[place[a : b + 1].min() for a, b in row] for row in links.host])]
    per_pipeline = (slots, links.tensor, links.tensor_inter, links.hop, links.hop_inter,
                    links.embedding[:, None], links.embedding_inter[:, None])  # fmt: skip
    _, first = np.unique(np.concatenate(per_pipeline, axis=1), axis=0, return_index=True)

    h, t, e, tokens = trial.hidden, trial.tp, trial.element_bytes, trial.micro_batch * trial.seq
    rate = np.array([s.half if e == 2 else s.single for s in (datasheet(k) or UNKNOWN for k in names)])
    memory = np.array([(datasheet(kind) or UNKNOWN).memory for kind in names])
    layers = np.array(trial.stage_layers)
    table = trial.vocab * h / t
    parameters = layers * 12 * h * h / t + table * ((np.arange(trial.pp) == 0) | (np.arange(trial.pp) == trial.pp - 1))
    logits = tokens * trial.vocab / t
    rows = []
    for d in first:
        slot = slots[d]
        head = 2 * tokens * table / rate[slot[-1]], 6 * 4 * logits / memory[slot[-1]]
        rows.append((
            index, slot,
            tokens * (24 * h * h + 4 * h * trial.seq) / t / rate[slot],
            e * (12 * h * h / t + tokens * h * (10 + 24 / t)) / memory[slot],
            e * tokens * trial.seq * trial.heads / t / memory[slot],
            np.array(head), parameters / memory[slot], layers,
            e * tokens * h, e * parameters, e * table, trial.recompute, t, trial.dp,
            links.tensor[d], links.tensor_inter[d], links.hop[d], links.hop_inter[d],
            links.embedding[d], links.embedding_inter[d], links.ring_intra, links.ring_inter,
        ))  # fmt: skip
    return rows


# --- The time ---------------------------------------------------------------------------------------------------------

# The kernels of a layer differ, so that some wait for their launch and others for memory: the p-norm of the two sums.
_SHARPNESS = 4


def _all_reduce(size: Array, ranks: Array, latency: Array, rate: Array) -> Array:
    """Seconds; the latency is that of a tree's levels, there and back, as NCCL has it for small messages."""
    return np.where(
        ranks > 1, 2 * np.ceil(np.log2(np.maximum(ranks, 2))) * latency + closed_forms.ring(size, ranks, rate), 0
    )


class Model:
    """Times of a list of trials, for many settings of their constants at once."""

    def __init__(self, trials: Sequence[Trial], method: str = "simulate") -> None:
        """Prepares what does not depend on constants.

        Args:
            method: what composes stages to an iteration: "simulate", or the closed form "pipette" or "amp".
        """
        self.trials, self.method = trials, method
        self.slots = max(len(kinds(trial)) for trial in trials)
        rows: dict[tuple[int, int], list[tuple]] = {}
        for index, trial in enumerate(trials):
            rows.setdefault((trial.pp, trial.micro_batches), []).extend(_pipelines(index, trial))
        self._runs = {shape: _Runs(*map(np.array, zip(*found))) for shape, found in rows.items()}

    def seconds(self, constants: Array, speed: Array, factor: Array) -> Array:
        """Predicted seconds of an iteration [B, trials].

        Args:
            constants: [B, trials, constants] in the order of CONSTANTS.
            speed: [B, trials, slots] how much faster each device kind of a trial is than its datasheet says.
            factor: [B, trials, slots] of a layer's cost on each device kind of a trial.
        """
        batch = len(constants)
        result = np.zeros((batch, len(self.trials)))
        for (stages, micro_batches), runs in self._runs.items():
            c = constants[:, runs.trial]
            pick = lambda x, runs=runs: np.take_along_axis(x[:, runs.trial], runs.slot[None], axis=2)  # noqa: E731
            times = self._compose(runs, c, pick(speed), pick(factor), stages, micro_batches)
            np.maximum.at(result, (slice(None), runs.trial), times)
        return result

    def _compose(self, runs: _Runs, c: Array, speed: Array, factor: Array, stages: int, m: int) -> Array:
        """[B, N] seconds of pipelines of one shape; constants [B, N, constants], speed and factor [B, N, P]."""
        g = {name: c[:, :, i, None] for name, i in _INDEX.items()}

        def latency(inter: Array) -> Array:
            return np.where(inter, g["inter_latency"], g["intra_latency"])

        def rate(bytes_per_second: Array, inter: Array) -> Array:
            return bytes_per_second * np.where(inter, g["inter_efficiency"], g["intra_efficiency"])

        tp, dp, message = runs.tp[:, None], runs.dp[:, None], runs.message[:, None]
        compute, memory = g["compute_efficiency"] * speed, g["memory_efficiency"] * speed
        kernels = runs.operations / compute + (runs.traffic + g["score_passes"] * runs.scores) / memory
        layer = (kernels**_SHARPNESS + g["layer_launch"] ** _SHARPNESS) ** (1 / _SHARPNESS)
        reduce = 2 * _all_reduce(message, tp, latency(runs.tensor_inter), rate(runs.tensor, runs.tensor_inter))
        ratio = g["backward_ratio"]
        forward = runs.layers * factor * (layer + reduce)
        again = ((ratio * kernels) ** _SHARPNESS + g["layer_launch"] ** _SHARPNESS) ** (1 / _SHARPNESS)
        backward = runs.layers * factor * (again + reduce) + np.where(runs.recompute[:, None], forward, 0)
        head = g["head_ratio"] * (runs.head[:, :1] / compute[..., -1:] + runs.head[:, 1:] / memory[..., -1:])
        forward, backward = forward + g["micro_batch_seconds"], backward + g["micro_batch_seconds"]
        forward[..., -1:] += head
        backward[..., -1:] += ratio * head
        hop = latency(runs.hop_inter) + g["hop_ratio"] * message / rate(runs.hop, runs.hop_inter)

        size = g["data_ratio"] * runs.parameter_bytes
        slowest = np.minimum(rate(runs.ring_intra, False), rate(runs.ring_inter, True))
        data = _all_reduce(size, dp, latency(np.isfinite(runs.ring_inter)), slowest)
        done = self._pipeline(forward, backward, hop, data, stages, m)
        if stages > 1:
            inter = runs.embedding_inter[:, None]
            size = g["tied_ratio"] * runs.embedding_bytes[:, None]
            exchange = latency(inter) + size / rate(runs.embedding[:, None], inter)
            tied = np.maximum(done[..., :1], done[..., -1:]) + exchange
            done[..., :1] = done[..., -1:] = tied
        done = done + g["optimizer_bytes"] * runs.optimizer / memory
        return done.max(axis=2) + g["step_seconds"][..., 0]

    def _pipeline(self, forward: Array, backward: Array, hop: Array, data: Array, stages: int, m: int) -> Array:
        """[B, N, P] when each stage's gradients are reduced; hop [B, N, P - 1] seconds of one message."""
        if self.method != "simulate":
            both = 2 * hop
            if self.method == "pipette":
                seconds = closed_forms.pipette(forward, backward, both, data.max(axis=2), m, stages)
            else:
                seconds = closed_forms.amp(forward, backward, both, data.max(axis=2), m)
            return np.repeat(seconds[..., None], stages, axis=2)
        flat = lambda x: x.reshape(-1, x.shape[-1])  # noqa: E731
        none = np.zeros_like(forward[..., :1])
        durations = simulator.Seconds(
            forward=flat(forward),
            backward=flat(backward),
            activation=flat(np.concatenate([hop, none], axis=2)),
            gradient=flat(np.concatenate([none, hop], axis=2)),
        )
        finish = ideal.pipeline(Table("1f1b", stages, m), durations)
        return finish.reshape(forward.shape) + data
