"""Memory of runs that other trainers made: a sum of what a device holds, with the trainer's own number of copies.

XLA plans its memory, which planner.memory knows. An eager trainer keeps what autograd keeps, so its peak is the sum of
parameters, of arrays that each layer keeps for every micro-batch in flight, and of logits, times counts. They are facts
of a trainer's code, hardly of a model's size, so that their priors are narrow. What a tensor group gathers is kept as
long as there is room.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxtrain.model.parameters import of_mean_layer
from planner.cost import compute
from planner.fit.trial_steps import candidate, sheet
from planner.runs.trials import Trial

Array = np.ndarray

USABLE = 0.92  # share of a device's memory that an allocator's peak can reach
_OF_FIRST = ("nanotron",)  # trainers that log the peak of the first rank
_NOISE = 0.1  # standard deviation of the logarithm of a peak around its prediction, at least
_OUTLIER = 0.7  # times the noise


@dataclasses.dataclass(frozen=True)
class Count:
    """The bytes that a device holds.

    Attributes:
        name: its name.
        typical: value without measurements.
        spread: standard deviation of its logarithm around that.
        meaning: what it counts.
    """

    name: str
    typical: float
    spread: float
    meaning: str


COUNTS = (
    Count("weights", 8.0, 0.1, "bytes of a parameter: weight, its gradient and the sum of gradients"),
    Count("optimizer", 12.0, 0.1, "bytes of a parameter that ZeRO-1 shards: master weight and moments"),
    Count("hidden", 6.0, 0.15, "arrays of the hidden size that a layer keeps"),
    Count("heads", 5.0, 0.15, "arrays of the size of all heads that a layer keeps"),
    Count("ffn", 4.0, 0.1, "arrays of the size of the feed-forward part that a layer keeps"),
    Count("logits", 8.0, 0.25, "bytes of a logit"),
    Count("earlier", 6.0, 0.5, "bytes of a logit of the micro-batch before"),
    Count("fixed", 0.5, 0.35, "1e9 bytes besides"),
    Count("gathered", 1.0, 0.75, "whole arrays that a layer of an unsplit pipeline keeps, if there is room"),
)


def capacity(trial: Trial) -> float:
    """Return the bytes of the smallest device of a run; inf if they are not known."""
    return trial.device_bytes or min((sheet(kind).memory or np.inf for kind in trial.device_kinds), default=np.inf)


def _held(trial: Trial) -> Array:
    """Return what each stage holds of each of COUNTS [stages, counts], in bytes."""
    model, sizes = trial.model, candidate(trial, own=False).layer_sizes
    item, last = trial.element_bytes, trial.pp - 1
    layer, table = of_mean_layer(model, sizes), compute.embedding_parameters(model, sizes, trial.pp)
    tokens = trial.micro_batch * trial.seq // trial.context
    whole = tokens * trial.hidden * item
    part = whole / (trial.tp if trial.sequence_parallel else 1)
    heads = whole / trial.tp * (1 + 2 * (trial.kv_heads or trial.heads) / trial.heads) / 3
    ffn, logits = tokens * model.ffn * item / trial.tp, tokens * trial.vocab / trial.tp
    again = trial.recompute == "full"  # keeps a layer's input, and all of one layer

    def of(stage: int, layers: int) -> list[float]:
        parameters = layers * layer + table * (stage in (0, last))
        weights = parameters / trial.dp if trial.sharding == "zero3" else parameters
        sharded = parameters / trial.dp if trial.sharding != "none" else parameters
        flying = layers * min(trial.pp - stage, trial.micro_batches)
        inner = 1 if again else flying
        kept = [part * (flying / 6 + 1 if again else flying), heads * inner, ffn * inner]
        head = stage == last
        of_head = [logits * head, logits * (head and trial.micro_batches > 1)]
        return [weights, sharded, *kept, *of_head, 1e9, whole * flying * (last == 0 and trial.tp > 1)]

    return np.array([of(stage, layers) for stage, layers in enumerate(trial.stage_layers)])


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
        """Return the predicted peak of the allocated memory that the trainer logs [trials], in bytes."""
        logged = np.array([_held(t)[:1] if t.trainer in _OF_FIRST else _largest(_held(t), self.counts) for t in trials])
        return _peaks(logged.reshape(-1, len(COUNTS)), self.counts, _room(trials))

    def fits(self, trials: Sequence[Trial], share: float = USABLE) -> Array:
        """Return the probability that each run's peaks are below a share of its devices' memory, [trials]."""
        from scipy import stats  # here, since plans, which only read peaks, need none of it

        held = np.array([_largest(_held(trial), self.counts) for trial in trials]).reshape(-1, len(COUNTS))
        room = share * np.array([capacity(trial) for trial in trials])
        return stats.norm.cdf(np.log(room / (held[:, :-1] @ self.counts[:-1])) / self.noise)


def _largest(held: Array, counts: Array) -> Array:
    """Return the stage that needs most, [1, counts]."""
    return held[np.argmax(held[:, :-1] @ counts[:-1])][None]


def _room(trials: Sequence[Trial]) -> Array:
    return USABLE * np.array([capacity(trial) for trial in trials])


def _peaks(held: Array, counts: Array, room: Array) -> Array:
    """Return the peaks [trials] of devices that hold some of COUNTS [trials, counts], with what is gathered if it fits.

    Args:
        held: what they hold.
        counts: value of each count.
        room: [trials] bytes that they have.
    """
    least, whole = held[:, :-1] @ counts[:-1], held @ counts
    return np.where(whole > room, least, whole)


TYPICAL = MemoryModel(np.array([c.typical for c in COUNTS]), 0.3, 0)


def fit(trials: Sequence[Trial]) -> MemoryModel:
    """Return the counts that fit the peaks of some runs of one trainer.

    Args:
        trials: runs; those without a peak are not read.
    """
    from scipy import optimize

    some = [trial for trial in trials if trial.memory]
    if not some:
        return TYPICAL
    held, measured = [_held(trial) for trial in some], np.log([trial.memory or 1.0 for trial in some])
    logged = [x[:1] if trial.trainer in _OF_FIRST else _largest(x, TYPICAL.counts) for trial, x in zip(some, held)]
    rows, room = np.concatenate(logged), _room(some)
    start, spread = np.log(TYPICAL.counts), np.array([c.spread for c in COUNTS])

    def residuals(logs: Array) -> Array:
        errors = (np.log(_peaks(rows, np.exp(logs), room)) - measured) / _NOISE
        # A peak far off counts by its distance, a prior by its square.
        robust = np.sign(errors) * np.sqrt(2 * _OUTLIER**2 * (np.sqrt(1 + (errors / _OUTLIER) ** 2) - 1))
        return np.concatenate([robust, (logs - start) / spread])

    found = np.exp(optimize.least_squares(residuals, start).x)
    errors = np.log(_peaks(rows, found, room)) - measured
    return MemoryModel(found, max(float(np.sqrt(np.mean(np.minimum(errors**2, (3 * _NOISE) ** 2)))), _NOISE), len(some))
