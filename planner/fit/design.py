"""The few runs that teach most: Bayesian experimental design over the constants.

What is not known of a cluster and a trainer matters as far as it can make a wrong plan look best. The expected regret
of a choice is the mean, over what the constants may be, of what the chosen plan takes beyond the best one. A run is
worth what it lowers that by: its result is drawn from what is believed, the belief is updated by it (linear in the
logarithms, as an extended Kalman filter does), and the choice is made anew. The next run is the one whose mean over
such results is least, for its cost.

The model is wrong as well, alike for layouts that have sizes in common. Otherwise runs would be chosen that tell most
by the model and are least like a good plan.

References:
    Preposterior analysis: Raiffa and Schlaifer 1961. Knowledge gradient: Frazier et al. 2009.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from planner.fit.calibration import Calibration, Sensitivity
from planner.runs.trials import Trial

Array = np.ndarray

_SAMPLES = 1024
# What the model errs by alike: what layouts have in common, and the standard deviation of their logarithm. No such part
# is of the hosts, since runs are made on few of them; and what a run differs by besides.
_ALIKE: tuple[tuple[Callable[[Trial], object], float], ...] = (
    (lambda t: (t.tp, t.micro_batch), 0.06),
    (lambda t: (t.pp, t.micro_batch), 0.04),
    (lambda t: (t.tp, t.pp), 0.04),
)
_LEAST_NOISE = 0.05
_JITTER = 1e-12  # added to variances, which keeps rounding from making one negative
ENOUGH = 0.01  # expected regret below which no further run pays


@dataclasses.dataclass(frozen=True, eq=False)
class Belief:
    """The belief about plans and possible runs: logarithms of their seconds, jointly normal.

    Attributes:
        plans: [plans] mean of the logarithm of each plan's seconds.
        factor: [values, values] a square root of the covariance of all values.
        of_plans: [plans, values] slopes of these logarithms.
        of_runs: [runs, values] slopes of those of possible runs.
        noise: [runs] standard deviation of the logarithm of a run's error.
    """

    plans: Array
    factor: Array
    of_plans: Array
    of_runs: Array
    noise: Array

    def after(self, run: int) -> "Belief":
        """Return what is believed once a run has been made, whatever it says: its mean stays, and it is less wide."""
        slope = self.factor.T @ self.of_runs[run]
        variance = slope @ slope + self.noise[run] ** 2
        # Potter's form of the update, which keeps the covariance positive.
        shrink = 1 / (1 + self.noise[run] / np.sqrt(variance))
        factor = self.factor - shrink / variance * np.outer(self.factor @ slope, slope)
        return dataclasses.replace(self, factor=factor)

    def regrets(self, seed: int = 0) -> tuple[float, Array]:
        """Return the expected regret now, and after each possible run [runs].

        Args:
            seed: seed of the samples.
        """
        random = np.random.default_rng(seed)
        draws = random.normal(size=(self.factor.shape[1], _SAMPLES))
        plans, runs = self.of_plans @ self.factor, self.of_runs @ self.factor
        truth = self.plans[:, None] + plans @ draws  # [plans, samples]
        best = truth.min(axis=0)
        # One error's draws for all runs, so that they differ by what they say.
        seen = runs @ draws + self.noise[:, None] * random.normal(size=_SAMPLES)  # [runs, samples], less the mean
        variance = (runs**2).sum(axis=1) + self.noise**2
        gain = plans @ runs.T / variance  # [plans, runs]

        def regret(means: Array) -> float:
            chosen = means.argmin(axis=0)
            return float(np.mean(np.exp(truth[chosen, np.arange(_SAMPLES)] - best) - 1))

        now = regret(np.broadcast_to(self.plans[:, None], truth.shape))
        return now, np.array([regret(self.plans[:, None] + np.outer(gain[:, i], seen[i])) for i in range(len(runs))])


def _alike(trials: Sequence[Trial]) -> Array:
    """Return the deviations of the errors that runs have in common with others [trials, errors]."""
    parts = []
    for of, deviation in _ALIKE:
        keys = [of(trial) for trial in trials]
        parts.append(deviation * np.array([[key == one for one in dict.fromkeys(keys)] for key in keys], float))
    return np.concatenate(parts, axis=1)


def belief(
    calibration: Calibration, plans: Sequence[Trial], runs: Sequence[Trial], measured: Sequence[Trial] = ()
) -> Belief:
    """Return what constants say of plans and of possible runs.

    Args:
        calibration: the constants.
        plans: what is chosen among.
        runs: runs that could be made.
        measured: runs that constants were fitted to, which have told errors of layouts like theirs.
    """
    both = Sensitivity([*plans, *runs], calibration.method, calibration.parameters)
    seconds, slopes = both(calibration.values)
    found = calibration.predictions(plans)
    # A stall is no constant: plans count with the time that they take in the mean.
    means = np.log(seconds[: len(plans)]) + np.log(found.expected / found.plain)
    known = np.array([calibration.noise.get(t.cluster, calibration.noise[""]) for t in [*runs, *measured]])
    noise, n, size = np.maximum(known, _LEAST_NOISE), len(plans) + len(runs), len(calibration.covariance)
    alike = _alike([*plans, *runs, *measured])
    errors = Belief(means, np.eye(alike.shape[1]), alike[: len(plans)], alike[n:], noise[len(runs) :])
    for i in range(len(measured)):
        errors = errors.after(i)
    factor = np.zeros((size + alike.shape[1],) * 2)
    factor[:size, :size] = np.linalg.cholesky(calibration.covariance + _JITTER * np.eye(size))
    factor[size:, size:] = errors.factor
    slopes = np.concatenate([slopes, alike[:n]], axis=1)
    return Belief(means, factor, slopes[: len(plans)], slopes[len(plans) :], noise[: len(runs)])


@dataclasses.dataclass(frozen=True)
class Proposal:
    """A run to make next.

    Attributes:
        run: its place among the possible ones.
        before: expected regret of the choice before it.
        after: the same after it.
    """

    run: int
    before: float
    after: float


def propose(found: Belief, costs: Array, number: int) -> list[Proposal]:
    """Return the runs to make next, best first; fewer than asked for if more would not pay.

    Args:
        found: what is believed.
        costs: [runs] cost of each, such as its hosts.
        number: number of runs at most.
    """
    chosen: list[Proposal] = []
    left = np.ones(len(costs), bool)
    while len(chosen) < number and left.any():
        now, after = found.regrets(seed=len(chosen))
        if now < ENOUGH:
            break
        worth = np.where(left, (now - after) / np.sqrt(costs), -np.inf)
        run = int(worth.argmax())
        if now - after[run] <= 0:
            # No single run changes the choice; one that tells most about all plans may, together with others.
            spread = ((found.of_plans @ found.factor) @ (found.of_runs @ found.factor).T) ** 2
            worth = spread.sum(axis=0) / (((found.of_runs @ found.factor) ** 2).sum(axis=1) + found.noise**2)
            run = int(np.where(left, worth / np.sqrt(costs), -np.inf).argmax())
        chosen.append(Proposal(run, now, float(after[run])))
        left[run] = False
        found = found.after(run)
    return chosen
