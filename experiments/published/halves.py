"""Constants fitted to half of the published runs, which the other half judges.

The halves are every second run of runs.csv: the first, the third and so on are fitted. Neighbours there are of the same
paper, so every source is in both halves, and the judged half says nothing about sources that are in neither.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import optimize

from experiments.published.prediction import PublishedConstants, predicted
from experiments.published.runs import PublishedRun

Array = np.ndarray

# Standard deviation of the logarithm of a constant around the one that ships: of shares, and of what is hardly known.
_SPREAD, _UNKNOWN = 0.15, {"waiting": 0.5}
_NOISE = 0.06  # that of a run's time around its prediction
_LARGEST = 1.0  # no share is above that


def is_fitted(count: int) -> Array:
    """Return which of `count` runs are fitted, bool [count]."""
    return np.arange(count) % 2 == 0


def fit(runs: Sequence[PublishedRun]) -> PublishedConstants:
    """Return the constants that fit some runs.

    The fit is of logarithms, by least squares in which outliers count by their distance, not by its square. The
    constants that ship are its prior.

    Args:
        runs: published runs.
    """
    fields = [field.name for field in dataclasses.fields(PublishedConstants)]
    start = np.log([getattr(PublishedConstants(), name) for name in fields])
    spread = np.array([_UNKNOWN.get(name, _SPREAD) for name in fields])
    measured = np.log([run.seconds for run in runs])

    def residuals(logs: Array) -> Array:
        constants = PublishedConstants(**dict(zip(fields, np.exp(logs).tolist())))
        found = np.log([predicted(run, constants) for run in runs])
        return np.concatenate([(found - measured) / _NOISE, (logs - start) / spread])

    bounds = np.full(len(start), -np.inf), np.full(len(start), np.log(_LARGEST))
    found = optimize.least_squares(
        residuals, start, bounds=bounds, loss="soft_l1", diff_step=1e-3, xtol=1e-4, ftol=1e-4, max_nfev=20
    ).x
    return PublishedConstants(**dict(zip(fields, np.exp(found).tolist())))
