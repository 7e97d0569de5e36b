"""What the fitted half of the published runs leaves open of the constants, and how wide intervals of the judged are.

Linear in the logarithms: a run's error is the sum of the slopes of its seconds times the constants' errors, and noise.
The constants have the priors of plans for a trainer of which nothing is known; a device's reach and a trainer's own are
of each device and each trainer. The noise is what makes the fitted runs of each source most likely, once the constants
are conditioned on those of all other sources: plans are for machines that no source has. The judged half is only
counted.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from scipy import stats

from experiments.published.halves import is_fitted
from experiments.published.prediction import PublishedConstants, cluster_of, predicted, trainer_of
from experiments.published.runs import PublishedRun
from planner.fit.constants import CONSTANTS
from planner.planning.intervals import correlations, deviations, own_error

Array = np.ndarray
Constant = tuple[str, str]  # its name and its owner: a device, a trainer or "" if all runs share it

_STEP = 1e-3  # of a logarithm, for differences
_NOISES = np.exp(np.linspace(-4.5, -2, 101))
_SPREAD = {c.name: c.spread for c in CONSTANTS if c.owner == "trainer"}
_DEVICES = {"matmul": 0.15, "memory": 0.15}  # deviations without published runs
TOLD = 0.25  # least correlation that is told


@dataclasses.dataclass(frozen=True, eq=False)
class Open:
    """What is open of the constants.

    Attributes:
        constants: the constants.
        slopes: [runs, constants] change of the logarithm of a run's seconds with that of a constant.
        errors: [runs] logarithm of published over predicted seconds.
        prior: [constants] deviations of their logarithms.
        sources: source of each run.
        fitted: which runs are fitted, bool [runs].
    """

    constants: Sequence[Constant]
    slopes: Array
    errors: Array
    prior: Array
    sources: Array
    fitted: Array

    def posterior(self, which: Array, noise: float) -> tuple[Array, Array]:
        """Return mean and covariance of the logarithms' errors, given some runs.

        Args:
            which: the runs, bool [runs].
            noise: standard deviation of the logarithm of a run's seconds.
        """
        slopes = self.slopes[which] / noise
        covariance = np.linalg.inv(slopes.T @ slopes + np.diag(1 / self.prior**2))
        return covariance @ slopes.T @ (self.errors[which] / noise), covariance

    def noise(self) -> float:
        """Return the noise by which fitted runs are most likely, each source by the constants of all others."""

        def likelihood(noise: float) -> float:
            total = 0.0
            for source in np.unique(self.sources):
                here = self.fitted & (self.sources == source)
                mean, covariance = self.posterior(self.fitted & ~here, noise)
                slopes = self.slopes[here]
                wide = np.sqrt(np.einsum("ij,jk,ik->i", slopes, covariance, slopes) + noise**2)
                total += stats.norm.logpdf(self.errors[here] - slopes @ mean, scale=wide).sum()
            return total

        return float(max(_NOISES, key=likelihood))


def open_constants(runs: Sequence[PublishedRun], fitted: Array) -> tuple[Open, Array]:
    """Return what is open of the constants, and the deviation [runs] of each run's logarithm as plans state it.

    Args:
        runs: published runs.
        fitted: which of them are fitted.
    """
    rows, stated, errors = list[dict[Constant, float]](), [], []
    for run in runs:
        cluster = dataclasses.replace(cluster_of(run, PublishedConstants()), reached=("inside", "between"))
        known, seconds = deviations(cluster), predicted(run)
        slopes = {name: np.log(predicted(run, None, {name: np.exp(_STEP)}) / seconds) / _STEP for name in known}
        moved = np.array([slopes[name] * known[name] for name in known])
        stated.append(np.sqrt(moved @ correlations(cluster, list(known)) @ moved + own_error() ** 2))
        errors.append(np.log(run.seconds / seconds))
        owners = {"matmul": run.device} | dict.fromkeys(_SPREAD, trainer_of(run))
        rows.append({(name, owners.get(name, "")): float(slope) for name, slope in slopes.items()})
        links = {name: known[name] for name in known if name not in _SPREAD}
    constants = sorted({constant for row in rows for constant in row})
    prior = {**links, **_SPREAD, **_DEVICES}
    return Open(
        constants,
        np.array([[row.get(constant, 0.0) for constant in constants] for row in rows]),
        np.array(errors),
        np.array([prior[name] for name, _ in constants]),
        np.array([run.name.split()[0] for run in runs]),
        fitted,
    ), np.array(stated)


def _within(errors: Array, deviations: Array, which: Array) -> str:
    inside = np.abs(errors) < stats.norm.ppf(0.9) * deviations
    return f"{inside[which].sum()} of {which.sum()} ({inside[which].mean():.0%})"


def told(runs: Sequence[PublishedRun]) -> list[str]:
    """Return deviations, correlations and noise, and how many runs are in their intervals of 80%, as lines.

    Args:
        runs: published runs.
    """
    fitted = is_fitted(len(runs))
    found, stated = open_constants(runs, fitted)
    noise = found.noise()
    _, covariance = found.posterior(fitted, noise)
    deviation = np.sqrt(np.diag(covariance))
    lines = [f"noise of a source that is left out: {noise:.4f}"]
    for (name, owner), x, before in zip(found.constants, deviation, found.prior):
        if x < 0.9 * before:
            lines.append(f"{name} {owner or 'of all'}: deviation {x:.3f}, {before:.2f} before")
    related = covariance / np.outer(deviation, deviation)
    for i, j in zip(*np.nonzero(np.triu(np.abs(related) >= TOLD, 1))):
        lines.append(f"{' '.join(found.constants[i])} with {' '.join(found.constants[j])}: {related[i, j]:.2f}")
    spread = np.einsum("ij,jk,ik->i", found.slopes, covariance, found.slopes)
    trainers = np.array([trainer_of(run) for run in runs])
    parts = {"all": fitted | ~fitted, "fitted": fitted, "judged": ~fitted}
    parts |= {
        f"{name or 'unknown'}, {how}": (trainers == name) & which
        for name in np.unique(trainers)
        for how, which in (("all", fitted | ~fitted), ("judged", ~fitted))
    }
    for name, which in parts.items():
        lines.append(
            f"in 80%, {name}: {_within(found.errors, stated, which)} as plans state it, "
            f"{_within(found.errors, np.sqrt(spread + noise**2), which)} by the posterior"
        )
    return lines
