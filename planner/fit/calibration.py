"""Fitted constants, and what they predict of runs."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from planner.fit import memory, stalls, trial_steps
from planner.fit.accuracy import Forecast
from planner.fit.constants import CONSTANTS, NAMES
from planner.fit.memory import MemoryModel
from planner.fit.stalls import StallRates
from planner.fit.trial_steps import TrialSteps
from planner.runs.trials import Trial

Array = np.ndarray
Cell = tuple[str, int, int, int]  # device kind, hidden, tensor, micro-batch
Owner = tuple[str, str]  # "cluster" or "trainer", and its name

FACTOR_RANGE = (0.5, 2.0)
SPEED_RANGE = (0.2, 5.0)
FREEDOM = 5.0  # degrees of freedom of the t distribution of a row's error
_AT_BOUND = 0.01  # of a range's logarithm
_HALVINGS = 40


def cells(trial: Trial) -> list[Cell]:
    """Return the layer-cost factors that a run's time depends on, one per device kind; none if its trainer is known.

    A factor says nothing of other models, so constants that are to predict them must do without.
    """
    if trial.trainer:
        return []
    return [(kind or trial.cluster, trial.hidden, trial.tp, trial.micro_batch) for kind in trial_steps.kinds(trial)]


def owner(trial: Trial, of: str) -> Owner:
    """Return who owns a run's constants: those of an unknown trainer are its cluster's."""
    return ("trainer", trial.trainer) if of == "trainer" and trial.trainer else ("cluster", trial.cluster)


class Parameters:
    """The places of all fitted values in one vector: shared constants, their owners', speeds and factors."""

    def __init__(self, owners: Iterable[Owner], kinds: Sequence[str], found: Sequence[Cell]) -> None:
        """Number the values.

        Args:
            owners: owners of constants, each once.
            kinds: device kinds that have a speed.
            found: layer-cost factors.
        """
        self.owners, self.kinds, self.cells = list(owners), list(kinds), list(found)
        k = len(CONSTANTS)
        self.at = {key: k * (1 + i) for i, key in enumerate(self.owners)}
        self.first_kind = k * (1 + len(self.owners))
        self.first_cell = self.first_kind + len(self.kinds)
        self.size = self.first_cell + len(self.cells)
        self.kind_at = {kind: self.first_kind + i for i, kind in enumerate(self.kinds)}
        self.cell_at = {cell: self.first_cell + i for i, cell in enumerate(self.cells)}

    def index(self, trials: Sequence[Trial], slots: int) -> Array:
        """Return the places of each row's constants, speeds and factors [trials, constants + 2 slots].

        Constants of an unknown owner are the shared ones; other unknown values are at place `size`, which is always 0.

        Args:
            trials: the runs.
            slots: most device kinds of a run.
        """
        k = len(CONSTANTS)
        found = np.full((len(trials), k + 2 * slots), self.size)
        for row, trial in enumerate(trials):
            found[row, :k] = [self.at.get(owner(trial, c.owner), 0) + i for i, c in enumerate(CONSTANTS)]
            for slot, kind in enumerate(trial_steps.kinds(trial)):
                found[row, k + slot] = self.kind_at.get(kind, self.size)
            for slot, cell in enumerate(cells(trial)):
                found[row, k + slots + slot] = self.cell_at.get(cell, self.size)
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Predictions:
    """Seconds of runs, which are uncertain: each may stall, and its time has an error.

    Attributes:
        plain: [trials] seconds of a step if it does not stall.
        stalled: [trials] seconds if it does.
        probability: [trials] probability that it stalls.
        noise: [trials] standard deviation of the logarithm of the plain seconds, with that of the constants.
    """

    plain: Array
    stalled: Array
    probability: Array
    noise: Array

    def below(self, seconds: Array) -> Array:
        """Return the probability that each run takes less than some seconds."""
        logs = np.log(seconds)
        plain = stats.t.cdf((logs - np.log(self.plain)) / self.noise, FREEDOM)
        stalled = stats.t.cdf((logs - np.log(self.stalled)) / np.hypot(self.noise, stalls.NOISE), FREEDOM)
        return (1 - self.probability) * plain + self.probability * stalled

    @property
    def likely(self) -> Array:
        """Seconds whose error, as a fraction of what a run takes, is least in the mean.

        That is the median of the distribution weighted by 1 / seconds: a stall that is as likely as not is no reason to
        predict many times of what the run takes otherwise.
        """
        return np.where(self.probability / self.stalled > (1 - self.probability) / self.plain, self.stalled, self.plain)

    def quantile(self, q: float) -> Array:
        """Return the seconds below which each run stays with probability q."""
        low, high = np.log(self.plain) - 30 * self.noise - 1, np.log(self.stalled) + 30 * (self.noise + stalls.NOISE)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            under = self.below(np.exp(middle)) < q
            low, high = np.where(under, middle, low), np.where(under, high, middle)
        return np.exp((low + high) / 2)

    @property
    def expected(self) -> Array:
        """Seconds that each run takes in the mean, without the error."""
        return self.plain + self.probability * (self.stalled - self.plain)


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """Fitted values.

    Attributes:
        values: logarithms of constants over their typical values, speeds and factors.
        covariance: their covariance.
        parameters: where each stands in them.
        ranges: physical ranges of each cluster's constants [constants, 2].
        fitted: number of rows that each cluster's constants were fitted to.
        trainers: trainer of each cluster's rows.
        method: how stages compose an iteration, one of trial_steps.METHODS.
        noise: standard deviation of the logarithm of a row's error, by cluster; "" for others.
        factor_spread: the same of factors that were not fitted.
        rates: how often runs stall, by cluster; "" for others.
        memory: peaks of the runs of each trainer.
        models: hidden size and layers of the models whose runs were fitted.
        other_model: standard deviation of what the errors of another model's runs have in common.
    """

    values: Array
    covariance: Array
    parameters: Parameters
    ranges: dict[str, Array]
    fitted: dict[str, int]
    trainers: dict[str, str]
    method: str
    noise: Mapping[str, float]
    factor_spread: float
    rates: Mapping[str, StallRates]
    memory: Mapping[str, MemoryModel]
    models: frozenset[tuple[int, int]]
    other_model: float

    def _of_owners(self, cluster: str, trainer: str) -> Array:
        """Return all constants of a cluster's runs by a trainer."""
        return np.exp(self.values[self._places(cluster, trainer)]) * np.array([c.typical for c in CONSTANTS])

    def _places(self, cluster: str, trainer: str) -> list[int]:
        """Return the places of the constants of a cluster's runs by a trainer."""
        keys = [("trainer", trainer) if c.owner == "trainer" and trainer else ("cluster", cluster) for c in CONSTANTS]
        return [self.parameters.at.get(key, 0) + i for i, key in enumerate(keys)]

    @property
    def clusters(self) -> dict[str, Array]:
        """Constants of each cluster, in the order of CONSTANTS."""
        return {name: self._of_owners(name, trainer) for name, trainer in self.trainers.items()}

    @property
    def shared(self) -> Array:
        """Constants of a cluster without any known row."""
        return np.exp(self.values[: len(CONSTANTS)]) * np.array([c.typical for c in CONSTANTS])

    @property
    def speeds(self) -> dict[str, float]:
        """Speed of each device kind over its datasheet's."""
        return {kind: float(np.exp(self.values[at])) for kind, at in self.parameters.kind_at.items()}

    @property
    def factors(self) -> dict[Cell, float]:
        """Factors on a layer's cost."""
        return {cell: float(np.exp(self.values[at])) for cell, at in self.parameters.cell_at.items()}

    def predictions(self, trials: Sequence[Trial]) -> Predictions:
        """Return the predicted seconds of an iteration of each run, and how certain they are."""
        model = Sensitivity(trials, self.method, self.parameters)
        plain, slopes = model(self.values)
        unknown = [any(cell not in self.parameters.cell_at for cell in cells(trial)) for trial in trials]
        spread = np.einsum("ij,jk,ik->i", slopes, self.covariance, slopes) + self.factor_spread**2 * np.array(unknown)
        noise = np.array([self.noise.get(t.cluster, self.noise[""]) for t in trials])
        strange = np.array([(t.hidden, t.layers) not in self.models for t in trials], bool)
        noise = np.hypot(noise, self.other_model * strange)
        at = NAMES.index("stall_seconds")
        waits = np.exp(self.values[model.index[:, at]]) * CONSTANTS[at].typical  # of each message, if a run stalls
        full = nearly_full(trials, self.memory)
        known = [self.rates.get(trial.cluster, self.rates[""]) for trial in trials]
        chance = np.array([rate.probability([t], full[i : i + 1])[0] for i, (rate, t) in enumerate(zip(known, trials))])
        stalled = plain + waits * [run.stalls for run in model.steps.runs]
        return Predictions(plain, stalled, chance, np.sqrt(noise**2 + spread))

    def forecast(self, trials: Sequence[Trial]) -> Forecast:
        """Return all that is predicted of some runs."""
        found, fits = self.predictions(trials), self.fits(trials)
        known = np.array([t.trainer in self.memory and self.memory[t.trainer].fitted > 0 for t in trials], bool)
        expected = np.where(known & (fits < 0.5), np.inf, found.expected)
        below = found.below(np.array([trial.seconds or np.nan for trial in trials]))
        return Forecast(
            seconds=found.likely,
            chosen_by=expected,
            low=found.quantile(0.1),
            high=found.quantile(0.9),
            memory=self.peaks(trials),
            fits=fits,
            half=_of_trainers(trials, self.memory, lambda model, some: model.fits(some, memory.USABLE / 2)),
            below=below,
        )

    def predict(self, trials: Sequence[Trial]) -> Array:
        """Return the predicted seconds of an iteration [trials], see `Predictions.likely`."""
        return self.predictions(trials).likely

    def peaks(self, trials: Sequence[Trial]) -> Array:
        """Return the predicted peak of a device's memory [trials], in bytes."""
        return _of_trainers(trials, self.memory, lambda model, some: model.peaks(some))

    def fits(self, trials: Sequence[Trial]) -> Array:
        """Return the probability that each run fits into its devices' memory, [trials]; 0 if it fails anyway."""
        whole = ~np.array([trial.broken for trial in trials], bool)
        return whole * _of_trainers(trials, self.memory, lambda model, some: model.fits(some))

    def describe(self) -> dict[str, Any]:
        """Return JSON values: every fitted value with its unit, its range and whether it lies at an end of it.

        A constant's deviation is the standard deviation of its logarithm.
        """

        def entry(value: float, low: float, high: float, **more: Any) -> dict[str, Any]:
            place = np.log(value / low) / np.log(high / low)
            at = "low" if place < _AT_BOUND else "high" if place > 1 - _AT_BOUND else None
            return {"value": float(value), **more, "low": float(low), "high": float(high), "at_bound": at}

        return {
            "method": self.method,
            "clusters": {
                name: {
                    "rows_fitted": self.fitted.get(name, 0),
                    "trainer": self.trainers[name],
                    "noise": self.noise.get(name, self.noise[""]),
                    "noise_of_other_models": self.other_model,
                    "stalls_per_host": dataclasses.asdict(self.rates.get(name, self.rates[""])),
                    "constants": {
                        c.name: entry(value, low, high, deviation=x, unit=c.unit, typical=c.typical, meaning=c.meaning)
                        for c, value, x, (low, high) in zip(
                            CONSTANTS,
                            values,
                            np.sqrt(np.diag(self.covariance)[self._places(name, self.trainers[name])]).tolist(),
                            self.ranges[name],
                        )
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


def _of_trainers(
    trials: Sequence[Trial], models: Mapping[str, MemoryModel], what: Callable[[MemoryModel, Sequence[Trial]], Array]
) -> Array:
    """Return what the memory models of runs' trainers say of them [trials]."""
    found = np.zeros(len(trials))
    for trainer in {trial.trainer for trial in trials}:
        here = [i for i, trial in enumerate(trials) if trial.trainer == trainer]
        found[here] = what(models.get(trainer, memory.TYPICAL), [trials[i] for i in here])
    return found


def nearly_full(trials: Sequence[Trial], models: Mapping[str, MemoryModel]) -> Array:
    """Return the probability that devices of each run are nearly full [trials]; 0 if no peaks were measured."""

    def of(model: MemoryModel, some: Sequence[Trial]) -> Array:
        return 1 - model.fits(some, stalls.FULL) if model.fitted else np.zeros(len(some))

    return _of_trainers(trials, models, of)


class Sensitivity:
    """Plain seconds of runs, and how their logarithms change with the logarithms of all values."""

    step = 1e-5  # of a logarithm, for differences

    def __init__(self, trials: Sequence[Trial], method: str, parameters: Parameters) -> None:
        """Prepare everything that does not depend on the values.

        Args:
            trials: the runs.
            method: one of trial_steps.METHODS.
            parameters: where their values stand.
        """
        self.steps = TrialSteps(trials, method)
        self.slots, self.size = self.steps.slots, parameters.size
        self.index = parameters.index(trials, self.slots)
        self.typical = np.array([c.typical for c in CONSTANTS])
        # Constants that only a stalled run knows change nothing here, nor do speeds and factors that no run has.
        used = (self.index < self.size).any(axis=0)
        self.moved = np.array([i for i in np.flatnonzero(used) if i != NAMES.index("stall_seconds")], int)
        self._at: Array | None = None

    def __call__(self, values: Array) -> tuple[Array, Array]:
        """Return the seconds [trials], and the slopes [trials, size] of their logarithms.

        All are computed at once and kept, since replaying the schedule once takes hardly less time than for a batch.
        """
        if self._at is None or not np.array_equal(self._at, values):
            local = np.append(values, 0.0)[self.index]
            moves = np.concatenate([np.zeros((1, local.shape[1])), self.step * np.eye(local.shape[1])[self.moved]])
            constants, speed, factor = np.split(
                np.exp(local + moves[:, None]), [len(CONSTANTS), len(CONSTANTS) + self.slots], axis=2
            )
            logs = np.log(self.steps.seconds(constants * self.typical, speed, factor))
            slopes = np.zeros((len(local), self.size + 1))
            places = self.index[:, self.moved]
            np.add.at(slopes, (np.arange(len(local))[:, None], places), (logs[1:] - logs[0]).T / self.step)
            self._at, self._found = values.copy(), (np.exp(logs[0]), slopes[:, :-1])
        return self._found
