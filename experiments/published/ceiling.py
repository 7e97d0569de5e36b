"""How well runs could be ordered at best: python -m experiments.published.ceiling --trials=ultrascale_1b_8b.csv.

Which runs stall is luck, and two runs of one plan don't take the same time. So no model orders measured runs without
mistakes. This main fits all runs of a table, takes the fitted model for the truth, draws what they would have taken,
and scores the model's own predictions of that, as planner.validate scores those of what was measured: the mean rank
correlation over groups, of rows within 3 times the best of their group, and the regret of the least expected time.

The record has no run twice, but many with ZeRO-1 and without it that are equal otherwise. What the errors of two such
runs differ by is noise, and what the model says wrongly of ZeRO-1. So it is at most that noise: deviation of one run =
median of |difference| / 0.674 / sqrt(2), of pairs neither of which is likely to have stalled.
"""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from absl import flags
from scipy import stats

from paxtrain.command_line import run
from paxtrain.errors import UserError
from planner.fit import accuracy, fitting
from planner.fit.calibration import FREEDOM, Predictions
from planner.fit.stalls import NOISE
from planner.fit.validation import NEAR_FACTOR
from planner.runs import published
from planner.runs.trials import Trial

Array = np.ndarray

HINT = "name a published record, or a table of measured runs, with --trials=ultrascale_1b_8b.csv"


def noise_of_twins(trials: Sequence[Trial], found: Predictions) -> tuple[float, int]:
    """Return the deviation of a run's logarithm by pairs that differ only in sharding, and the number of pairs.

    Args:
        trials: measured runs.
        found: predictions of them.
    """
    pairs: dict[Trial, list[int]] = {}
    for i, trial in enumerate(trials):
        key = dataclasses.replace(trial, seconds=None, memory=None, sharding="none")
        pairs.setdefault(key, []).append(i)
    measured = np.log([trial.seconds or np.nan for trial in trials])
    errors, late = measured - np.log(found.plain), np.log(found.stalled) - measured
    plain = np.abs(errors) < np.abs(late)
    differences = [errors[i] - errors[j] for i, j in (p for p in pairs.values() if len(p) == 2) if plain[i] & plain[j]]
    if not differences:
        raise UserError("no two runs that took their time differ only in sharding, so their noise is not known")
    return float(np.median(np.abs(differences)) / stats.norm.ppf(0.75) / np.sqrt(2)), len(differences)


def drawn(found: Predictions, noise: float, random: np.random.Generator) -> Array:
    """Return seconds that runs could have taken, if the model were true.

    Args:
        found: predictions of the runs.
        noise: deviation of a run's logarithm.
        random: source of chance.
    """
    stalled = random.random(len(found.plain)) < found.probability
    errors = random.standard_t(FREEDOM, len(found.plain)) * np.where(stalled, np.hypot(noise, NOISE), noise)
    return np.where(stalled, found.stalled, found.plain) * np.exp(errors)


def in_groups(trials: Sequence[Trial], predicted: Array, seconds: Array) -> float:
    """Return the mean rank correlation over groups, of runs near the best of their group.

    Args:
        trials: the runs.
        predicted: [trials] what is said of them.
        seconds: [trials] what they take.
    """
    found = []
    for members in accuracy.groups(trials):
        near = members[seconds[members] <= NEAR_FACTOR * seconds[members].min()]
        if len(near) > 1 and np.unique(predicted[near]).size > 1:
            found.append(stats.spearmanr(predicted[near], seconds[near])[0])
    return float(np.mean(found))


def regrets(trials: Sequence[Trial], expected: Array, seconds: Array) -> dict[int, float]:
    """Return the mean regret of the runs that are expected to be quickest of their group, by number of hosts.

    Args:
        trials: the runs.
        expected: [trials] seconds that they are expected to take.
        seconds: [trials] what they take.
    """
    found: dict[int, list[float]] = {}
    for members in accuracy.groups(trials):
        best = members[expected[members].argmin()]
        found.setdefault(trials[best].hosts, []).append(float(seconds[best] / seconds[members].min() - 1))
    return {hosts: float(np.mean(found[hosts])) for hosts in sorted(found)}


def main(argv: Sequence[str]) -> None:
    """Fit, draw and score."""
    f = flags.FLAGS
    if not f.trials:
        raise UserError("no runs were given; name them with --trials=ultrascale_1b_8b.csv")
    trials = [trial for trial in published.read(f.trials) if trial.seconds is not None and not trial.beyond]
    calibration = fitting.fit(trials)
    found = calibration.predictions(trials)
    noise, pairs = noise_of_twins(trials, found)
    expected = calibration.forecast(trials).chosen_by
    random, scores = np.random.default_rng(0), dict[str, dict[str, Any]]()
    fitted = float(np.mean([calibration.noise[trial.cluster] for trial in trials]))
    for name, deviation in {"stalls alone": 0.0, "noise of twins": noise, "noise of the fit": fitted}.items():
        draws = [drawn(found, deviation, random) for _ in range(f.draws)]
        each, lost = [in_groups(trials, found.likely, x) for x in draws], [regrets(trials, expected, x) for x in draws]
        by_hosts = {hosts: float(np.mean([x[hosts] for x in lost])) for hosts in lost[0]}
        scores[name] = {"noise": deviation, "mean": np.mean(each), "deviation": np.std(each), "regrets": by_hosts}
        print(f"{name}, {deviation:.1%}: Spearman in groups {np.mean(each):.3f}, {np.std(each):.3f} from draw to draw")
        print("  regret on " + ", ".join(f"{hosts} hosts {lost:.1%}" for hosts, lost in by_hosts.items()))
    measured = np.array([trial.seconds for trial in trials], float)
    seen = in_groups(trials, found.likely, measured)
    print(f"of {len(trials)} measured runs {seen:.3f}; {pairs} pairs of twins")
    print("  regret on " + ", ".join(f"{n} hosts {x:.1%}" for n, x in regrets(trials, expected, measured).items()))
    print(json.dumps({"measured": seen, "pairs": pairs, **scores}))


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("trials", None, "The measured runs: a published record, or a table of planner/runs/trials.py.")
    flags.DEFINE_integer("draws", 200, "Number of draws.", 2)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
