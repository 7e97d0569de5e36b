"""Runs that stall: a share of all runs waits, in every step, for something that is no part of the plan.

In the largest published record (docs/accuracy.md) a run either takes about what its like take, or about 0.3 s more for
each message that its busiest stage sends or receives. Which of the two it is goes with the number of hosts: if each
host is ill with a small probability, and one is enough, a run on N hosts stalls with probability 1 - exp(-rate N). The
rates differ between runs whose stages exchange messages and others. A pipeline whose devices are nearly full stalls,
too, because its allocator has to free memory for each message.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from planner.runs.trainers import TRAINERS
from planner.runs.trials import Trial

Array = np.ndarray

FULL = 0.85  # share of a device's memory from which on it is nearly full
NOISE = 0.2  # standard deviation of the logarithm of a stalled run's time around its prediction
_SPREAD = 2.5  # deviation of the logarithms of rates around what is typical of a trainer


def messages(stages: int, micro_batches: int) -> int:
    """Return the messages of the busiest stage in a step, there and back, of each neighbour; of one stage in a ring."""
    neighbours = min(stages - 1, 2) if stages > 1 else 2
    return 2 * neighbours * micro_batches


def exposure(trials: Sequence[Trial], full: Array) -> Array:
    """Return what each run is exposed to [trials, 3]: hosts without a pipeline, hosts with one, and full devices.

    Args:
        trials: the runs.
        full: [trials] probability that their devices are nearly full.
    """
    hosts, piped = np.array([t.hosts for t in trials], float), np.array([t.pp > 1 for t in trials], bool)
    return np.stack([hosts * ~piped, hosts * piped, full * piped], axis=1)


@dataclasses.dataclass(frozen=True)
class StallRates:
    """Rates at which runs stall.

    Attributes:
        alone: for each host of a run without a pipeline.
        piped: for each host of a run whose stages exchange messages.
        full: for a pipeline whose devices are nearly full.
    """

    alone: float
    piped: float
    full: float

    def probability(self, trials: Sequence[Trial], full: Array) -> Array:
        """Return the probability that each run stalls, [trials]; see `exposure`."""
        return -np.expm1(-exposure(trials, full) @ np.array(dataclasses.astuple(self)))


def typical(trainer: str) -> StallRates:
    """Return the rates of a trainer on a cluster of which nothing is known: medians of their priors."""
    return StallRates(*TRAINERS[trainer].stalls)


def fit(prior: StallRates, trials: Sequence[Trial], full: Array, stalled: Array) -> StallRates:
    """Return the most probable rates.

    Args:
        prior: medians of the rates' priors.
        trials: the runs.
        full: [trials] probability that their devices are nearly full.
        stalled: [trials] probability that each has stalled.
    """
    from scipy import optimize, special  # here, since plans, which only read rates, need none of it

    exposed, start = exposure(trials, full), np.log(dataclasses.astuple(prior))

    def loss(logs: Array) -> float:
        hazard = exposed @ np.exp(logs)
        prior = ((logs - start) ** 2).sum() / (2 * _SPREAD**2)
        return float(prior - (special.xlogy(stalled, -np.expm1(-hazard)) - (1 - stalled) * hazard).sum())

    found = optimize.minimize(loss, start, method="L-BFGS-B", bounds=[(-16.0, 3.0)] * len(start)).x
    return StallRates(*np.exp(found).tolist())
