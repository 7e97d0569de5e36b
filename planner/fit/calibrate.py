"""Constants of clusters fitted to measured runs.

Least squares minimize the logarithm of predicted over measured seconds, for all clusters together. Every constant has a
value per cluster, with a prior at a value that all clusters share, which has a prior at a typical value. A cluster with
few fitted rows, or none, thus takes over the values of the others. Layer-cost factors, one per (device kind, hidden,
tensor, micro-batch), have a prior at 1, and a device kind's speed has one at its datasheet's. A prior's weight is the
ratio of the noise of the measurements to its spread. An outlier counts by its distance, not by its square.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import optimize

from planner.fit import constants, trial_steps
from planner.fit.constants import CONSTANTS
from planner.fit.trial_steps import TrialSteps
from planner.fit.trials import Trial

Array = np.ndarray
Cell = tuple[str, int, int, int]  # device kind, hidden, tensor, micro-batch

FACTOR_RANGE = (0.5, 2.0)
SPEED_RANGE = (0.2, 5.0)
_NOISE, _FACTOR_SPREAD, _SPEED_SPREAD = 0.03, 0.15, 0.4  # standard deviations of logarithms, at first
_BELIEF = 10  # rows, or factors, that the first two of them count for when they are estimated
_ROUNDS = 3
_BETWEEN = 0.5  # spread of a constant among the clusters of a file, over its spread among all clusters
_OUTLIER = 3.0  # times the noise
_STEP = 1e-5
_TOLERANCE = 1e-4
_AT_BOUND = 0.01  # of a range's logarithm


def cells(trial: Trial) -> list[Cell]:
    """Return the layer-cost factors that a run's time depends on, one per device kind."""
    return [(kind or trial.cluster, trial.hidden, trial.tp, trial.micro_batch) for kind in trial_steps.kinds(trial)]


def ranges(trials: Sequence[Trial]) -> Array:
    """Return [constants, 2] the physical range for one cluster's runs, wider if a device kind or rate is unknown."""
    unknown = {name for trial in trials for name, known in constants.known(trial).items() if not known}
    widths = [c.wide if c.name in unknown else 1.0 for c in CONSTANTS]
    return np.array([(c.low / wide, c.high * wide) for c, wide in zip(CONSTANTS, widths)])


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Fitted values.

    Attributes:
        clusters: constants of each cluster, in the order of CONSTANTS.
        ranges: physical ranges of each cluster's constants [constants, 2].
        shared: constants for a cluster without any known row.
        speeds: speed of each device kind over its datasheet's.
        factors: factors on a layer's cost.
        fitted: number of rows that each cluster's constants were fitted to.
        method: how stages compose an iteration, one of trial_steps.METHODS.
    """

    clusters: dict[str, Array]
    ranges: dict[str, Array]
    shared: Array
    speeds: dict[str, float]
    factors: dict[Cell, float]
    fitted: dict[str, int]
    method: str

    def predict(self, trials: Sequence[Trial]) -> Array:
        """Return the predicted seconds of an iteration [trials]."""
        model = TrialSteps(trials, self.method)
        values = np.array([self.clusters.get(trial.cluster, self.shared) for trial in trials])
        speed, factor = np.ones((2, len(trials), model.slots))
        for i, trial in enumerate(trials):
            for slot, (kind, cell) in enumerate(zip(trial_steps.kinds(trial), cells(trial))):
                speed[i, slot] = self.speeds.get(kind, 1.0)
                factor[i, slot] = self.factors.get(cell, 1.0)
        return model.seconds(values[None], speed[None], factor[None])[0]

    def describe(self) -> dict[str, Any]:
        """Return JSON values: every fitted value with its unit, its range and whether it lies at an end of it."""

        def entry(value: float, low: float, high: float, **more: Any) -> dict[str, Any]:
            place = np.log(value / low) / np.log(high / low)
            at = "low" if place < _AT_BOUND else "high" if place > 1 - _AT_BOUND else None
            return {"value": float(value), **more, "low": float(low), "high": float(high), "at_bound": at}

        return {
            "method": self.method,
            "clusters": {
                name: {
                    "rows_fitted": self.fitted.get(name, 0),
                    "constants": {
                        c.name: entry(value, low, high, unit=c.unit, typical=c.typical, meaning=c.meaning)
                        for c, value, (low, high) in zip(CONSTANTS, values, self.ranges[name])
                    },
                }
                for name, values in self.clusters.items()
            },
            "device_speeds": [
                {"device_kind": kind, **entry(value, *SPEED_RANGE, unit="of the datasheet's")}
                for kind, value in sorted(self.speeds.items())
            ],
            "layer_cost_factors": [
                {
                    **dict(zip(("device_kind", "hidden", "tp", "micro_batch"), cell)),
                    **entry(value, *FACTOR_RANGE, unit="of the model's"),
                }
                for cell, value in sorted(self.factors.items())
            ],
        }


class _LeastSquares:
    """The problem over logarithms of value / typical: shared constants, each cluster's, speeds and factors."""

    def __init__(self, fitted: Sequence[Trial], everything: Sequence[Trial], method: str) -> None:
        self.model = TrialSteps(fitted, method)
        self.measured = np.log(np.array([trial.seconds for trial in fitted], float))
        self.clusters = list(dict.fromkeys(trial.cluster for trial in everything))
        self.ranges = {name: ranges([trial for trial in everything if trial.cluster == name]) for name in self.clusters}
        self.noise, self.factor_spread = _NOISE, _FACTOR_SPREAD
        kinds = sorted({kind for trial in fitted for kind in trial_steps.kinds(trial) if kind})
        self.kinds = kinds if len(kinds) > 1 else []  # the speed of a single kind is the same as the efficiencies
        self.cells = sorted({cell for trial in fitted for cell in cells(trial)})
        k, slots = len(CONSTANTS), self.model.slots
        first_kind = k * (1 + len(self.clusters))
        first_cell = first_kind + len(self.kinds)
        self.size = first_cell + len(self.cells)
        kind_at = {kind: first_kind + i for i, kind in enumerate(self.kinds)}
        cell_at = {cell: first_cell + i for i, cell in enumerate(self.cells)}
        # For each row, the indices of its constants, speeds and factors; index `size` is a parameter that stays 0.
        self.index = np.full((len(fitted), k + 2 * slots), self.size)
        for row, trial in enumerate(fitted):
            self.index[row, :k] = k * (1 + self.clusters.index(trial.cluster)) + np.arange(k)
            for slot, (kind, cell) in enumerate(zip(trial_steps.kinds(trial), cells(trial))):
                self.index[row, k + slot] = kind_at.get(kind, self.size)
                self.index[row, k + slots + slot] = cell_at[cell]
        self.typical = np.array([c.typical for c in CONSTANTS])
        self.first_kind, self.first_cell = first_kind, first_cell
        self._at: Array | None = None
        self._set_priors()

    def _set_priors(self) -> None:
        k, first_kind = len(CONSTANTS), self.first_kind
        spread = np.array([c.spread for c in CONSTANTS])
        bounds = np.log(np.array(list(self.ranges.values())) / self.typical[:, None])  # [clusters, constants, 2]
        # Without a datasheet, a constant varies with its range and says little about other clusters.
        wide = np.array([c.wide for c in CONSTANTS])
        widened = np.ptp(bounds, axis=2) > np.log([c.high / c.low for c in CONSTANTS]) + 1e-9
        between = np.where(widened, spread + np.log(wide) / 3, _BETWEEN * spread)
        self.low, self.high = np.concatenate(
            [
                np.stack([bounds[..., 0].min(0), bounds[..., 1].max(0)]),
                *bounds.transpose(0, 2, 1),
                np.log(SPEED_RANGE)[:, None].repeat(len(self.kinds), 1),
                np.log(FACTOR_RANGE)[:, None].repeat(len(self.cells), 1),
            ],
            axis=1,
        )
        # One row per prior: 1 / spread at its parameter and, for a cluster's constant, - 1 / spread at the shared one.
        diagonal = np.concatenate(
            [
                spread,
                between.ravel(),
                np.full(len(self.kinds), _SPEED_SPREAD),
                np.full(len(self.cells), self.factor_spread),
            ]
        )
        self.prior = np.diag(1 / diagonal)
        own = np.arange(k, first_kind)
        self.prior[own, own % k] = -1 / diagonal[own]

    def _log_seconds(self, parameters: Array) -> Array:
        """Return [1 + constants + 2 slots, rows]: at the parameters, and a step away in each of a row's own.

        All are computed at once and kept, since replaying the schedule once takes hardly less time than for a batch.
        """
        if self._at is None or not np.array_equal(self._at, parameters):
            local = np.append(parameters, 0.0)[self.index]
            steps = np.concatenate([np.zeros((1, local.shape[1])), _STEP * np.eye(local.shape[1])])
            values = np.exp(local + steps[:, None])
            k, slots = len(CONSTANTS), self.model.slots
            shares, speed, factor = np.split(values, [k, k + slots], axis=2)
            self._at = parameters.copy()
            self._found = np.log(self.model.seconds(shares * self.typical, speed, factor))
        return self._found

    def residuals(self, parameters: Array) -> Array:
        """Return [rows + priors]: logarithms of predicted over measured and of the parameters, over their spreads."""
        error = self._log_seconds(parameters)[0] - self.measured
        return np.concatenate([error / self.noise, self.prior @ parameters])

    def jacobian(self, parameters: Array) -> Array:
        """Return the Jacobian of the residuals [rows + priors, parameters]."""
        found = self._log_seconds(parameters)
        slopes = (found[1:] - found[0]).T / _STEP
        result = np.zeros((len(self.measured), self.size + 1))
        np.add.at(result, (np.arange(len(result))[:, None], self.index), slopes / self.noise)
        return np.concatenate([result[:, :-1], self.prior])

    def estimate_spreads(self, parameters: Array) -> None:
        """Estimate the noise and the spread of the factors from the fit at `parameters` (a step of EM)."""
        jacobian, residuals = self.jacobian(parameters), self.residuals(parameters)
        rows = len(self.measured)
        squares = residuals[:rows] ** 2
        weights = 1 / np.sqrt(1 + squares / _OUTLIER**2)
        data = jacobian[:rows] * np.sqrt(weights)[:, None]
        covariance = np.linalg.inv(data.T @ data + self.prior.T @ self.prior)
        free = rows - np.einsum("ij,jk,ik->", data, covariance, data)
        noise = self.noise**2 * (weights * squares).sum()
        factors = slice(self.first_cell, self.size)
        spread = (parameters[factors] ** 2 + np.diag(covariance)[factors]).sum()
        count = self.size - self.first_cell
        self.noise = max(_NOISE, np.sqrt((_BELIEF * _NOISE**2 + noise) / (_BELIEF + free)))
        self.factor_spread = np.sqrt((_BELIEF * _FACTOR_SPREAD**2 + spread) / (_BELIEF + count))
        self._set_priors()

    def loss(self, squares: Array) -> Array:
        """Return the loss and its two derivatives for scipy: pseudo-Huber for measurements, squares for priors."""
        rows = np.arange(len(squares)) < len(self.measured)
        root = np.sqrt(1 + squares / _OUTLIER**2)
        return np.where(
            rows,
            [2 * _OUTLIER**2 * (root - 1), 1 / root, -1 / (2 * _OUTLIER**2 * root**3)],
            [squares, np.ones_like(squares), np.zeros_like(squares)],
        )


def fit(fitted: Sequence[Trial], everything: Sequence[Trial] = (), method: str = "simulate") -> Calibration:
    """Fit constants to measured runs.

    Args:
        fitted: runs with measured seconds.
        everything: further runs; their clusters get constants as well.
        method: how stages compose an iteration, one of trial_steps.METHODS.
    """
    problem = _LeastSquares(fitted, [*fitted, *everything], method)
    found = np.zeros(problem.size)
    for i in range(_ROUNDS):
        if i:
            problem.estimate_spreads(found)
        found = optimize.least_squares(
            problem.residuals,
            found,
            problem.jacobian,
            bounds=(problem.low, problem.high),
            loss=problem.loss,
            xtol=_TOLERANCE,
            ftol=_TOLERANCE,
            max_nfev=200,
        ).x
    k = len(CONSTANTS)
    values = np.exp(found[: k * (1 + len(problem.clusters))].reshape(-1, k)) * problem.typical
    rest = np.exp(found[values.size :])
    counts = [trial.cluster for trial in fitted]
    return Calibration(
        clusters=dict(zip(problem.clusters, values[1:])),
        ranges=problem.ranges,
        shared=values[0],
        speeds=dict(zip(problem.kinds, rest)),
        factors=dict(zip(problem.cells, rest[len(problem.kinds) :])),
        fitted={name: counts.count(name) for name in problem.clusters},
        method=method,
    )
