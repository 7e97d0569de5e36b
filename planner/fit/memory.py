"""Memory of runs that other trainers made: a sum of what a device holds, with the trainer's own number of copies.

XLA plans its memory, which planner.memory knows. An eager trainer keeps what autograd keeps, so its peak is the sum of
parameters, of arrays that each layer keeps for every micro-batch in flight, and of logits, times counts that belong to
the trainer. They are fitted to measured peaks, and have priors at typical values.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

from planner.cost import compute
from planner.fit.trial_steps import candidate, sheet
from planner.runs.trials import Trial

Array = np.ndarray

USABLE = 0.95  # share of a device's memory that an allocator's peak can reach
_SPREAD = 1.5  # standard deviation of the logarithm of a count around the typical one
_NOISE = 0.1  # that of a peak around its prediction, at least
_OUTLIER = 1.5  # times the noise


@dataclasses.dataclass(frozen=True)
class Count:
    """What a device holds.

    Attributes:
        name: its name.
        typical: value without measurements.
        meaning: what it counts.
    """

    name: str
    typical: float
    meaning: str


COUNTS = (
    Count("weights", 6.0, "bytes of a parameter: weight and gradient"),
    Count("optimizer", 12.0, "bytes of a parameter that ZeRO-1 shards: master weight and moments"),
    Count("hidden", 6.0, "arrays of the hidden size that a layer keeps"),
    Count("heads", 5.0, "arrays of the size of all heads that a layer keeps"),
    Count("ffn", 4.0, "arrays of the size of the feed-forward part that a layer keeps"),
    Count("gathered", 0.3, "whole arrays that a layer of an unsplit pipeline keeps if a tensor group spans hosts"),
    Count("logits", 4.0, "bytes of a logit"),
    Count("earlier", 4.0, "bytes of a logit of the micro-batch before"),
    Count("inputs", 2.0, "arrays of the hidden size of each micro-batch in flight, besides those of layers"),
    Count("fixed", 0.4, "1e9 bytes besides"),
)


def capacity(trial: Trial) -> float:
    """Return the bytes of the smallest device of a run; inf if they are not known."""
    return min((sheet(kind).memory or np.inf for kind in trial.device_kinds), default=np.inf)


def _held(trial: Trial) -> Array:
    """Return what the first and the last stage hold of each of COUNTS [2, counts], in bytes."""
    model, sizes = trial.model, candidate(trial, own=False).layer_sizes
    stage, item = max(trial.stage_layers), trial.element_bytes
    tables = compute.embedding_parameters(model, sizes, trial.pp)
    parameters = stage * compute.layer_parameters(model, sizes) + tables
    sharded = parameters / trial.dp if trial.sharding != "none" else parameters
    weights = parameters / trial.dp if trial.sharding == "zero3" else parameters
    tokens = trial.micro_batch * trial.seq
    whole = tokens * trial.hidden * item
    part = whole / (trial.tp if trial.sequence_parallel else 1)
    heads = whole / trial.tp * (1 + 2 * (trial.kv_heads or trial.heads) / trial.heads) / 3
    ffn, logits = tokens * model.ffn * item / trial.tp, tokens * trial.vocab / trial.tp
    spans = trial.tp > trial.devices_per_host and trial.pp == 1
    again = trial.recompute == "full"  # keeps a layer's input, and all of one layer
    flight = min(trial.pp, trial.micro_batches)

    def of(in_flight: int, head: bool) -> list[float]:
        layers = stage * in_flight
        inner = 1 if again else layers
        kept = [part * (layers / 6 + 1 if again else layers), heads * inner, ffn * inner, whole * layers * spans]
        of_head = [logits * head, logits * (head and trial.micro_batches > 1), part * in_flight * (trial.pp > 1)]
        return [weights, sharded, *kept, *of_head, 1e9]

    return np.array([of(flight, trial.pp == 1), of(1, True)])


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryModel:
    """Peaks of runs of one trainer.

    Attributes:
        counts: value of each of COUNTS.
        noise: standard deviation of the logarithm of a peak around its prediction.
        fitted: number of runs that they were fitted to.
    """

    counts: Array
    noise: float
    fitted: int

    def peaks(self, trials: Sequence[Trial]) -> Array:
        """Return the predicted peak of a device's allocated memory [trials], in bytes."""
        return (np.array([_held(trial) for trial in trials]) @ self.counts).max(axis=1)

    def fits(self, trials: Sequence[Trial], share: float = USABLE) -> Array:
        """Return the probability that each run's peak is below a share of its devices' memory, [trials]."""
        room = share * np.array([capacity(trial) for trial in trials])
        return stats.norm.cdf(np.log(room / self.peaks(trials)) / self.noise)


TYPICAL = MemoryModel(np.array([c.typical for c in COUNTS]), 0.3, 0)


def fit(trials: Sequence[Trial]) -> MemoryModel:
    """Return the counts that fit the peaks of some runs of one trainer.

    Args:
        trials: runs; those without a peak are not read.
    """
    some = [trial for trial in trials if trial.memory]
    if not some:
        return TYPICAL
    held, measured = np.array([_held(trial) for trial in some]), np.log([trial.memory or 1.0 for trial in some])
    start = np.log(TYPICAL.counts)

    def residuals(logs: Array) -> Array:
        errors = np.log((held @ np.exp(logs)).max(axis=1)) - measured
        return np.concatenate([errors / _NOISE, (logs - start) / _SPREAD])

    found = optimize.least_squares(residuals, start, loss="soft_l1", f_scale=_OUTLIER).x
    errors = residuals(found)[: len(some)] * _NOISE
    return MemoryModel(np.exp(found), max(float(np.sqrt(np.mean(errors**2))), _NOISE), len(some))
