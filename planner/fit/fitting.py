"""Constants of clusters and of trainers fitted to measured runs.

Least squares minimize the logarithm of predicted over measured seconds, for all clusters together. Every constant has a
value for each of its owners, clusters or trainers, with a prior at a value that all owners share, which has a prior at
a typical value. A cluster with few fitted rows, or none, thus takes over the values of the others. Layer-cost factors,
one per (device kind, hidden, tensor, micro-batch), have a prior at 1, and a device kind's speed has one at its
datasheet's. A prior's weight is the
ratio of the noise of the measurements to its spread. An outlier counts by its distance, not by its square.

Some runs stall (planner.fit.stalls). Which do is not known: expectation maximization gives each row the probability
that it has stalled, and fits what it takes both ways, weighted by that.
"""

import collections
from collections.abc import Sequence

import numpy as np
from scipy import optimize, stats

from planner.fit import constants, memory, stalls, trial_steps
from planner.fit.calibration import (
    FACTOR_RANGE,
    FREEDOM,
    SPEED_RANGE,
    Calibration,
    Parameters,
    Sensitivity,
    cells,
    nearly_full,
    owner,
)
from planner.fit.constants import CONSTANTS, NAMES
from planner.runs.trainers import TRAINERS
from planner.runs.trials import Trial

Array = np.ndarray

_NOISE, _FACTOR_SPREAD, _SPEED_SPREAD = 0.03, 0.15, 0.4  # standard deviations of logarithms, at first
_BELIEF = 10  # rows, or factors, that the first two of them count for when they are estimated
_ROUNDS, _MORE_ROUNDS = 4, 2  # from scratch, and from the values of few rows
_FEW = 120  # rows that many rows begin with
# Standard deviation of what the errors of all runs of one model have in common, if no run of it was fitted: what is
# assumed of a table of one model, and what counts as one model in the estimate of others.
_OTHER_MODEL = 0.04
_LEFT_OUT, _FEWEST = 3, 10  # models that are left out in turn at most, and runs that such a model has at least
_BETWEEN = 0.5  # spread of a constant among the owners of a file, over its spread among all
_KNOWN = 0.3  # the same of a constant that its trainer is known for
_OUTLIER = 3.0  # times the noise
_TOLERANCE = 1e-4
_EVALUATIONS = 60  # of a round
_MOST = 600  # rows that constants are fitted to; more say little more, and take their time
_WAITS = NAMES.index("stall_seconds")


def ranges(trials: Sequence[Trial]) -> Array:
    """Return [constants, 2] the physical range for one owner's runs, wider if a device kind or rate is unknown."""
    unknown = {name for trial in trials for name, known in constants.known(trial).items() if not known}
    widths = [c.wide if c.name in unknown else 1.0 for c in CONSTANTS]
    found = np.array([(c.low / wide, c.high * wide) for c, wide in zip(CONSTANTS, widths)])
    # What launches of an unknown trainer take of a collective passes for latency, since no prior tells them apart.
    if trials and all(trial.trainer and constants.over_nvlink(trial) for trial in trials):
        found[NAMES.index("intra_latency"), 1] = constants.NVLINK_LATENCY
    return found


class _LeastSquares:
    """The problem over logarithms of value / typical: shared constants, their owners', speeds and factors.

    Each row has two residuals: as a run that has not stalled, and as one that has.
    """

    def __init__(self, fitted: Sequence[Trial], everything: Sequence[Trial], method: str, full: Array) -> None:
        self.full = full
        self.fitted = list(fitted)
        self.measured = np.log(np.array([trial.seconds for trial in fitted], float))
        clusters = list(dict.fromkeys(trial.cluster for trial in everything))
        self.trainers = {name: next(t.trainer for t in everything if t.cluster == name) for name in clusters}
        owned: dict[tuple[str, str], list[Trial]] = {("cluster", name): [] for name in clusters}
        owned |= {("trainer", trial.trainer): [] for trial in everything if trial.trainer}
        for trial in everything:
            for key in {owner(trial, "cluster"), owner(trial, "trainer")}:
                owned[key].append(trial)
        self.ranges = {key: ranges(some) for key, some in owned.items()}
        kinds = sorted({kind for trial in fitted for kind in trial_steps.kinds(trial) if kind})
        # The speed of a single kind is the same as the efficiencies.
        found = sorted({cell for trial in fitted for cell in cells(trial)})
        self.parameters = Parameters(owned, kinds if len(kinds) > 1 else [], found)
        self.size = self.parameters.size
        self.model = Sensitivity(fitted, method, self.parameters)
        self.stalls = np.array([run.stalls for run in self.model.steps.runs], float)
        self.cluster = np.array([clusters.index(trial.cluster) for trial in fitted], int)
        self.clusters = clusters
        self.noise, self.factor_spread = np.full(len(clusters), _NOISE), _FACTOR_SPREAD
        self.prior_rates = [stalls.typical(self.trainers[name]) for name in clusters]
        self.rates = list(self.prior_rates)
        self.stalled = np.zeros(len(fitted))  # probability that each has
        self._set_priors()

    def _set_priors(self) -> None:
        k, p = len(CONSTANTS), self.parameters
        typical, spread = np.array([c.typical for c in CONSTANTS]), np.array([c.spread for c in CONSTANTS])
        bounds = np.log(np.array(list(self.ranges.values())) / typical[:, None])  # [owners, constants, 2]
        # Without a datasheet, a constant varies with its range and says little about other clusters.
        wide = np.array([c.wide for c in CONSTANTS])
        widened = np.ptp(bounds, axis=2) > np.log([c.high / c.low for c in CONSTANTS]) + 1e-9
        between = np.where(widened, spread + np.log(wide) / 3, _BETWEEN * spread)
        self.low, self.high = np.concatenate(
            [
                np.stack([bounds[..., 0].min(0), bounds[..., 1].max(0)]),
                *bounds.transpose(0, 2, 1),
                np.log(SPEED_RANGE)[:, None].repeat(len(p.kinds), 1),
                np.log(FACTOR_RANGE)[:, None].repeat(len(p.cells), 1),
            ],
            axis=1,
        )
        # One row per prior: 1 / spread at its parameter and, for an owner's constant, - 1 / spread at the shared one.
        diagonal = np.concatenate(
            [
                spread,
                between.ravel(),
                np.full(len(p.kinds), _SPEED_SPREAD),
                np.full(len(p.cells), self.factor_spread),
            ]
        )
        self.prior, self.center = np.diag(1 / diagonal), np.zeros(len(diagonal))
        own = np.arange(k, p.first_kind)
        self.prior[own, own % k] = -1 / diagonal[own]
        for (of, name), at in p.at.items():
            trainer = TRAINERS[name if of == "trainer" else self.trainers[name]]
            for constant, value in trainer.typical.items():
                i = NAMES.index(constant)
                self.prior[at + i, [at + i, i]] = 1 / (_KNOWN * spread[i]), 0.0
                self.center[at + i] = np.log(value / typical[i]) / (_KNOWN * spread[i])

    def _both(self, values: Array) -> tuple[Array, Array, Array, Array]:
        """Return logarithms of the seconds of plain and of stalled runs [rows], and their slopes [rows, values]."""
        seconds, slopes = self.model(values)
        at = self.model.index[:, _WAITS]
        waits = self.stalls * np.exp(values[at]) * CONSTANTS[_WAITS].typical
        stalled = seconds + waits
        stalled_slopes = slopes * (seconds / stalled)[:, None]
        stalled_slopes[np.arange(len(at)), at] += waits / stalled
        return np.log(seconds), np.log(stalled), slopes, stalled_slopes

    @property
    def _weights(self) -> tuple[Array, Array]:
        """Square roots of the weights of both residuals, over their noise."""
        noise = self.noise[self.cluster]
        return np.sqrt(1 - self.stalled) / noise, np.sqrt(self.stalled) / np.hypot(noise, stalls.NOISE)

    def residuals(self, values: Array) -> Array:
        """Return [2 rows + priors]: logarithms of predicted over measured and of the values, over their spreads."""
        plain, stalled, *_ = self._both(values)
        of_plain, of_stalled = self._weights
        errors = of_plain * (plain - self.measured), of_stalled * (stalled - self.measured)
        return np.concatenate([*errors, self.prior @ values - self.center])

    def jacobian(self, values: Array) -> Array:
        """Return the Jacobian of the residuals [2 rows + priors, values]."""
        *_, slopes, stalled_slopes = self._both(values)
        of_plain, of_stalled = self._weights
        return np.concatenate([of_plain[:, None] * slopes, of_stalled[:, None] * stalled_slopes, self.prior])

    def estimate_stalls(self, values: Array) -> None:
        """Estimate which rows have stalled, and how often each cluster's do (a step of expectation maximization)."""
        plain, stalled, *_ = self._both(values)
        noise = self.noise[self.cluster]
        wide = np.hypot(noise, stalls.NOISE)
        as_plain = stats.t.pdf((self.measured - plain) / noise, FREEDOM) / noise
        as_stalled = stats.t.pdf((self.measured - stalled) / wide, FREEDOM) / wide
        chance = np.empty(len(plain))
        for i in range(len(self.clusters)):
            here = np.flatnonzero(self.cluster == i)
            chance[here] = self.rates[i].probability([self.fitted[n] for n in here], self.full[here])
        self.stalled = chance * as_stalled / (chance * as_stalled + (1 - chance) * as_plain)
        for i in range(len(self.clusters)):
            here = np.flatnonzero(self.cluster == i)
            self.rates[i] = stalls.fit(
                self.prior_rates[i], [self.fitted[n] for n in here], self.full[here], self.stalled[here]
            )

    def covariance(self, values: Array) -> Array:
        """Return the covariance of the values [size, size]."""
        jacobian, residuals = self.jacobian(values), self.residuals(values)
        rows = 2 * len(self.measured)
        data = jacobian[:rows] * (1 + residuals[:rows] ** 2 / _OUTLIER**2)[:, None] ** -0.25
        return np.linalg.inv(data.T @ data + self.prior.T @ self.prior)

    def estimate_spreads(self, values: Array) -> None:
        """Estimate each cluster's noise and the spread of the factors from the fit (a step of EM)."""
        covariance = self.covariance(values)
        plain, _, slopes, _ = self._both(values)
        squares = (plain - self.measured) ** 2
        noise = self.noise[self.cluster]
        weights = (1 - self.stalled) * (FREEDOM + 1) / (FREEDOM + squares / noise**2)  # of the t distribution
        known = np.einsum("ij,jk,ik->i", slopes, covariance, slopes) / noise**2
        free = 1 - self.stalled - weights * known
        for i in range(len(self.clusters)):
            here = self.cluster == i
            total = _BELIEF * _NOISE**2 + (weights * squares)[here].sum()
            self.noise[i] = max(_NOISE, np.sqrt(total / (_BELIEF + max(free[here].sum(), 0.0))))
        factors = slice(self.parameters.first_cell, self.size)
        spread = (values[factors] ** 2 + np.diag(covariance)[factors]).sum()
        count = self.size - self.parameters.first_cell
        self.factor_spread = np.sqrt((_BELIEF * _FACTOR_SPREAD**2 + spread) / (_BELIEF + count))
        self._set_priors()

    def solve(self, values: Array, rounds: int) -> Array:
        """Return the most probable values, with what is estimated of rows between rounds of least squares.

        Args:
            values: where to begin.
            rounds: number of rounds.
        """
        values = np.clip(values, self.low, self.high)
        for i in range(rounds):
            if i:
                self.estimate_stalls(values)
                self.estimate_spreads(values)
            values = optimize.least_squares(
                self.residuals,
                values,
                self.jacobian,
                bounds=(self.low, self.high),
                loss=self.loss,
                xtol=_TOLERANCE,
                ftol=_TOLERANCE,
                max_nfev=_EVALUATIONS,
            ).x
        return values

    def loss(self, squares: Array) -> Array:
        """Return the loss and its two derivatives for scipy: pseudo-Huber for measurements, squares for priors."""
        rows = np.arange(len(squares)) < 2 * len(self.measured)
        root = np.sqrt(1 + squares / _OUTLIER**2)
        return np.where(
            rows,
            [2 * _OUTLIER**2 * (root - 1), 1 / root, -1 / (2 * _OUTLIER**2 * root**3)],
            [squares, np.ones_like(squares), np.zeros_like(squares)],
        )


def _other_model(problem: _LeastSquares, known: Sequence[Trial], method: str, values: Array) -> float:
    """Return the deviation of errors, beyond the noise, of a model without fitted runs: by leaving models out in turn.

    Args:
        problem: the fitted rows.
        known: runs of which constants are wanted.
        method: how stages compose an iteration.
        values: the values that fit all rows.
    """
    rows, at, squares = problem.fitted, problem.parameters.first_kind, [_OTHER_MODEL**2]
    models = [(trial.hidden, trial.layers) for trial in rows]
    often = [model for model, n in collections.Counter(models).most_common(_LEFT_OUT) if n >= _FEWEST]
    if problem.parameters.cells or len(often) < 2:  # a layer-cost factor says nothing of other models
        return _OTHER_MODEL
    random = np.random.default_rng(0)
    for model in often:
        of = np.array([one == model for one in models])
        others, left = (random.permutation(np.flatnonzero(where))[:_FEW] for where in (~of, of))
        if len(others) < _FEWEST:
            continue
        without = _LeastSquares([rows[i] for i in others], known, method, problem.full[others])
        without.noise, without.rates, without.stalled = problem.noise, problem.rates, problem.stalled[others]
        begin = np.zeros(without.size)
        begin[:at] = values[:at]
        seconds, _ = Sensitivity([rows[i] for i in left], method, without.parameters)(without.solve(begin, 1))
        plain = problem.stalled[left] < 0.5
        if plain.any():
            errors = np.abs(np.log(seconds) - problem.measured[left])[plain]
            deviation = np.median(errors) / stats.t.ppf(0.75, FREEDOM)  # which few wild runs do not change
            noise = problem.noise[problem.cluster[left]][plain]
            squares.append(max(float(deviation**2 - np.mean(noise**2)), 0.0))
    return float(np.sqrt(np.mean(squares)))


def fit(fitted: Sequence[Trial], everything: Sequence[Trial] = (), method: str = "simulate") -> Calibration:
    """Fit constants to measured runs.

    Args:
        fitted: runs with measured seconds; without any, constants are what is believed before.
        everything: further runs; their clusters get constants as well.
        method: how stages compose an iteration, one of trial_steps.METHODS.
    """
    peaks = {name: memory.fit([t for t in fitted if t.trainer == name]) for name in {t.trainer for t in fitted}}
    some, known = list(fitted), [*fitted, *everything]
    if len(some) > _MOST:
        some = [fitted[i] for i in np.sort(np.random.default_rng(0).permutation(len(fitted))[:_MOST])]
    full = nearly_full(some, peaks)
    problem = _LeastSquares(some, known, method, full)
    found, rounds = np.zeros(problem.size), _ROUNDS
    if len(some) > 2 * _FEW:  # few rows, whose seconds are quickly found, say where to begin
        drawn = np.random.default_rng(0).permutation(len(some))[:_FEW]
        few = _LeastSquares([some[i] for i in drawn], known, method, full[drawn])
        begin, at = few.solve(np.zeros(few.size), rounds), problem.parameters.first_kind
        found[:at], rounds = begin[:at], _MORE_ROUNDS
        problem.noise, problem.factor_spread, problem.rates = few.noise, few.factor_spread, few.rates
        problem.estimate_stalls(found)
    found = problem.solve(found, rounds)
    counts = [trial.cluster for trial in fitted]
    noise = dict(zip(problem.clusters, problem.noise.tolist()))
    return Calibration(
        values=found,
        covariance=problem.covariance(found),
        parameters=problem.parameters,
        ranges={name: problem.ranges["cluster", name] for name in problem.clusters},
        fitted={name: counts.count(name) for name in problem.clusters},
        trainers=problem.trainers,
        method=method,
        noise=noise | {"": float(np.mean(list(noise.values())))},
        factor_spread=problem.factor_spread,
        rates=dict(zip(problem.clusters, problem.rates)) | {"": stalls.typical("")},
        memory=peaks,
        models=frozenset((trial.hidden, trial.layers) for trial in fitted),
        other_model=_other_model(problem, known, method, found),
    )
