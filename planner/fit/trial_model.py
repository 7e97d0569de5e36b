"""The time of a measured run from a few constants of its cluster, which planner.fit.calibrate fits.

For one micro-batch of `tokens` = micro_batch x seq tokens, a layer of hidden size h on t tensor ranks takes

    operations  tokens (24 h^2 + 4 h seq) / t
    traffic     weights 12 h^2 / t, activations tokens h (10 + 24 / t), attention scores tokens heads seq / t x passes
    compute     both, each at its share of the datasheet's rate, or the time to launch its kernels if that is longer
    F           compute + 2 all-reduces over t
    B           backward_ratio x compute + 2 all-reduces, and F again if activations are recomputed

The last stage adds the head, and every stage adds a constant per micro-batch. The simulator composes these, by the
run's schedule, to the time at which each stage has done its last micro-batch. The closed forms are of 1f1b and stand
for any schedule. Chunks of a stage are taken as equal, and W as half of a backward without recomputation. The gradient
rings over the real hosts follow, then the exchange of the tied embedding between the first and the last stage, then the
optimizer. If the pipelines of one run differ, each is simulated and the slowest counts.

References:
    Operations and activations of a layer: Korthikanti et al. 2022, Reducing Activation Recomputation. Rings and
    exchange: Narayanan et al. 2021 (Megatron-LM).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.schedule.schedules import SPECS
from planner.cost import closed_forms
from planner.cost.compute import launched
from planner.fit.constants import NAMES
from planner.fit.pipelines import PipelineBatch, kinds, pipeline_batches
from planner.fit.trials import Trial
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table

Array = np.ndarray
METHODS = ("simulate", "rows", "pipette", "amp")
EXECUTORS = {"ideal": "simulate", "paxtrain": "rows"}  # the method that simulates each
_CLOSED_FORMS = ("pipette", "amp")


def _all_reduce(size: Array, ranks: Array, latency: Array, rate: Array) -> Array:
    """Return the seconds of an all-reduce; its latency is that of NCCL's tree for small messages, up and down."""
    return np.where(
        ranks > 1, 2 * np.ceil(np.log2(np.maximum(ranks, 2))) * latency + closed_forms.ring(size, ranks, rate), 0
    )


class _Work(NamedTuple):
    """The seconds of a micro-batch on each stage, arrays [B, N, P].

    Attributes:
        forward: F of the layers.
        backward: B of the layers, with W.
        weights: the part of it that is W.
        head: [B, N, 1] F of the head.
        head_backward: [B, N, 1] B of the head.
        constant: [B, N, 1] constant part of F and of B of a chunk.
        hops: [B, N, P - 1] messages to the next stage.
        back: [B, N, 1] messages between the last stage and the first, which chunks need.
    """

    forward: Array
    backward: Array
    weights: Array
    head: Array
    head_backward: Array
    constant: Array
    hops: Array
    back: Array

    def of_chunks(self, chunks: int, splits: bool) -> tuple[Array, Array, Array]:
        """Return F, B and W [B, N, virtual stages], in the order of the model.

        Args:
            chunks: chunks of each stage.
            splits: W is an op of its own.
        """
        weights = self.weights if splits else np.zeros_like(self.weights)
        parts = self.forward, self.backward - weights, weights
        forward, backward, weights = (np.tile(part / chunks, (1, 1, chunks)) for part in parts)
        forward, backward = forward + self.constant, backward + self.constant
        forward[..., -1:] += self.head
        backward[..., -1:] += self.head_backward
        return forward, backward, weights


class TrialModel:
    """Times of a list of trials, for many settings of their constants at once."""

    def __init__(self, trials: Sequence[Trial], method: str = "simulate") -> None:
        """Prepare everything that does not depend on the constants.

        Args:
            trials: the runs.
            method: how stages compose an iteration: "simulate" with ops that begin as soon as their messages are
                there, "rows" in this trainer's rows, or the closed form "pipette" or "amp".
        """
        self.trials, self.method = trials, method
        self.slots = max(len(kinds(trial)) for trial in trials)
        self._batches = pipeline_batches(trials)

    def seconds(self, constants: Array, speed: Array, factor: Array) -> Array:
        """Return the predicted seconds of an iteration [B, trials].

        Args:
            constants: [B, trials, constants] in the order of CONSTANTS.
            speed: [B, trials, slots] speed of each device kind of a trial over its datasheet's.
            factor: [B, trials, slots] factor on a layer's cost on each device kind of a trial.
        """
        batch = len(constants)
        result = np.zeros((batch, len(self.trials)))
        for table, runs in self._batches.items():
            of_stage = [np.take_along_axis(x[:, runs.trial], runs.slot[None], axis=2) for x in (speed, factor)]
            own = constants[:, runs.trial]
            times = self._compose(runs, own, of_stage[0], of_stage[1], table)
            np.maximum.at(result.T, runs.trial, times.T)
        return result

    def _compose(self, runs: PipelineBatch, c: Array, speed: Array, factor: Array, table: Table) -> Array:
        """Return [B, N] seconds of pipelines of one shape; c [B, N, constants], speed and factor [B, N, P]."""
        g = {name: c[:, :, i, None] for i, name in enumerate(NAMES)}

        def latency(inter: Array | bool) -> Array:
            return np.where(inter, g["inter_latency"], g["intra_latency"])

        def rate(bytes_per_second: Array, inter: Array | bool) -> Array:
            return bytes_per_second * np.where(inter, g["inter_efficiency"], g["intra_efficiency"])

        tp, dp, message = runs.tp[:, None], runs.dp[:, None], runs.message[:, None]
        compute, memory = g["compute_efficiency"] * speed, g["memory_efficiency"] * speed
        kernels = runs.operations / compute + (runs.traffic + g["score_passes"] * runs.scores) / memory
        layer = launched(kernels, g["layer_launch"])
        reduce = 2 * _all_reduce(message, tp, latency(runs.tensor_inter), rate(runs.tensor, runs.tensor_inter))
        ratio = g["backward_ratio"]
        forward = runs.layers * factor * (layer + reduce)
        again = launched(ratio * kernels, g["layer_launch"])
        backward = runs.layers * factor * (again + reduce) + np.where(runs.recompute[:, None], forward, 0)
        weights = runs.layers * factor * again / 2
        head = g["head_ratio"] * (runs.head[:, :1] / compute[..., -1:] + runs.head[:, 1:] / memory[..., -1:])

        def hop(bytes_per_second: Array, inter: Array) -> Array:
            return latency(inter) + g["hop_ratio"] * message / rate(bytes_per_second, inter)

        hops = hop(runs.hop, runs.hop_inter)
        back = hop(runs.embedding[:, None], runs.embedding_inter[:, None])  # from the last stage to the first
        size = g["data_ratio"] * runs.parameter_bytes
        slowest = np.minimum(rate(runs.ring_intra, False), rate(runs.ring_inter, True))
        data = _all_reduce(size, dp, latency(np.isfinite(runs.ring_inter)), slowest)
        work = _Work(forward, backward, weights, head, ratio * head, g["micro_batch_seconds"], hops, back)
        done = self._pipeline(work, data, table)
        if table.stages > 1:
            inter = runs.embedding_inter[:, None]
            size = g["tied_ratio"] * runs.embedding_bytes[:, None]
            exchange = latency(inter) + size / rate(runs.embedding[:, None], inter)
            tied = np.maximum(done[..., :1], done[..., -1:]) + exchange
            done[..., :1] = done[..., -1:] = tied
        done = done + g["optimizer_bytes"] * runs.optimizer / memory
        return done.max(axis=2) + g["step_seconds"][..., 0]

    def _pipeline(self, work: _Work, data: Array, table: Table) -> Array:
        """Return [B, N, P] the times when each stage's gradients are reduced, which takes data [B, N, P] seconds."""
        if self.method in _CLOSED_FORMS:
            forward, backward, _ = work.of_chunks(1, splits=False)
            stages, m = table.stages, table.micro_batches - table.first
            if self.method == "pipette":
                seconds = closed_forms.pipette(forward, backward, 2 * work.hops, data.max(axis=2), m, stages)
            else:
                seconds = closed_forms.amp(forward, backward, 2 * work.hops, data.max(axis=2), m)
            return np.repeat(seconds[..., None], stages, axis=2)

        def flat(x: Array) -> Array:
            return x.reshape(-1, x.shape[-1])

        forward, backward, weights = work.of_chunks(table.chunks, SPECS[table.schedule].splits)
        durations = simulator.Seconds(
            forward=flat(forward),
            backward=flat(backward),
            activation=flat(np.concatenate([work.hops, work.back], axis=2)),
            gradient=flat(np.concatenate([work.back, work.hops], axis=2)),
            weights=flat(weights),
        )
        simulated = simulator.pipeline if self.method == "rows" else ideal.pipeline
        return simulated(table, durations).reshape(data.shape) + data
