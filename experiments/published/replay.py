"""What a few runs teach, replayed on a record: python -m experiments.published.replay --trials=ultrascale_1b_8b.csv.

For each model and number of hosts of the record, planner.calibrate's way (planner/fit/design.py) chooses runs on at
most a quarter of the hosts, the record says what they take, and the constants that fit them choose among all layouts on
all hosts. Beside it are as many random runs of that size, and tuners without a model, which run on all hosts and take
the best they have seen: random draws, an even grid, and Bayesian optimisation (a Gaussian process over logarithms of
the layout's sizes, expected improvement). All of them see only runs that did not fail.

Twice: as if nothing were known of the trainer, and with its typical constants, which are rounded from this record.
"""

import collections
import dataclasses
import json
from collections.abc import Callable, Sequence
from unittest import mock

import numpy as np
from absl import flags
from scipy import stats

from paxtrain.command_line import run
from paxtrain.errors import UserError
from planner.fit import design, fitting
from planner.runs import published
from planner.runs.trainers import TRAINERS, TrainerFacts
from planner.runs.trials import Trial

Array = np.ndarray

HINT = "name a published record, or a table of measured runs, with --trials=ultrascale_1b_8b.csv"
NUMBERS = (0, 6, 12, 25)  # runs that were made
_SHARE = 4  # a run takes one of so many parts of the hosts at most
_FIRST = 3  # random runs before a Gaussian process is asked
_REPEATS = 20  # of tuners that draw


def layout(trial: Trial) -> Trial:
    """Return a run without what was measured of it."""
    return dataclasses.replace(trial, seconds=None, memory=None, failed=False)


def _seconds(trials: Sequence[Trial]) -> Array:
    return np.array([trial.seconds for trial in trials], float)


def by_model(plans: Sequence[Trial], runs: Sequence[Trial], choose: Callable[..., Sequence[int]]) -> list[float]:
    """Return the regret of the choice among plans after each of NUMBERS of runs.

    Args:
        plans: measured runs on all hosts, whose seconds only judge.
        runs: measured runs on fewer hosts.
        choose: returns which runs to make next, by the constants so far, the plans, the runs that are left, those that
            were made, and the number wanted.
    """
    unknown, seconds = [layout(trial) for trial in plans], _seconds(plans)
    done, left, regrets = list[Trial](), list(runs), []
    for number in NUMBERS:
        if left and number > len(done):
            found = fitting.fit(done, unknown)
            picked = choose(found, unknown, [layout(trial) for trial in left], done, number - len(done))
            done += [left[i] for i in picked]
            left = [trial for i, trial in enumerate(left) if i not in picked]
        best = fitting.fit(done, unknown).forecast(unknown).chosen_by.argmin()
        regrets.append(float(seconds[best] / seconds.min() - 1))
    return regrets


def designed(
    found: fitting.Calibration, plans: Sequence[Trial], runs: Sequence[Trial], done: Sequence[Trial], number: int
) -> list[int]:
    """Return the runs that planner.calibrate would propose next; fewer if more would not pay."""
    hosts = np.array([trial.hosts for trial in runs], float)
    return [one.run for one in design.propose(design.belief(found, plans, runs, done), hosts, number)]


def features(plans: Sequence[Trial]) -> Array:
    """Return logarithms of layouts' sizes, with mean 0 and deviation 1 [plans, features]."""
    found = np.array([[*np.log2([t.dp, t.tp, t.pp, t.micro_batch]), t.sharding != "none"] for t in plans], float)
    return (found - found.mean(axis=0)) / np.maximum(found.std(axis=0), 1e-9)


def improvement(known: Array, values: Array, others: Array) -> Array:
    """Return the improvement on the least value that a Gaussian process expects at other places.

    Args:
        known: [n, features] places with a value.
        values: [n] their values.
        others: [m, features] other places.
    """

    def kernel(a: Array, b: Array) -> Array:
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(axis=-1) / 2)

    scale = max(float(values.std()), 1e-9)
    seen, cross = (values - values.mean()) / scale, kernel(others, known)
    gain = np.linalg.solve(kernel(known, known) + 1e-3 * np.eye(len(known)), cross.T).T
    mean, deviation = gain @ seen, np.sqrt(np.maximum(1 - (gain * cross).sum(axis=1), 1e-12))
    z = (seen.min() - mean) / deviation
    return scale * deviation * (z * stats.norm.cdf(z) + stats.norm.pdf(z))


def tuned(plans: Sequence[Trial], tuner: str, random: np.random.Generator) -> list[float]:
    """Return the regret of the best run so far after each of NUMBERS of runs on all hosts; NaN without a run.

    Args:
        plans: measured runs on all hosts.
        tuner: "random", "grid" or "bayesian".
        random: source of chance.
    """
    seconds, regrets = _seconds(plans), []
    order = random.permutation(len(plans)).tolist()
    if tuner == "bayesian":
        places, logs, order = features(plans), np.log(seconds), order[:_FIRST]
        while len(order) < min(max(NUMBERS), len(plans)):
            left = np.setdiff1d(np.arange(len(plans)), order)
            order.append(int(left[improvement(places[order], logs[order], places[left]).argmax()]))
    sizes = [(t.tp, t.pp, t.micro_batch, t.sharding) for t in plans]
    in_order = sorted(range(len(plans)), key=sizes.__getitem__)
    for number in NUMBERS:
        made = order[:number]
        if tuner == "grid" and number:
            made = [in_order[int(i)] for i in np.linspace(0, len(plans) - 1, min(number, len(plans))).round()]
        regrets.append(float(seconds[made].min() / seconds.min() - 1) if made else float("nan"))
    return regrets


def main(argv: Sequence[str]) -> None:
    """Replay, and print the mean and worst regrets."""
    f = flags.FLAGS
    if not f.trials:
        raise UserError("no runs were given; name them with --trials=ultrascale_1b_8b.csv")
    trials = [trial for trial in published.read(f.trials) if trial.seconds is not None and not trial.beyond]
    groups = collections.defaultdict[tuple, list[Trial]](list)
    for trial in trials:
        groups[trial.group].append(trial)
    hosts = [int(count) for count in f.hosts]
    chosen = [plans for plans in groups.values() if plans[0].hosts in hosts]
    if not chosen:
        raise UserError(f"--hosts={','.join(f.hosts)}: no runs of {f.trials} have so many; name some that it has")
    random, found = np.random.default_rng(0), collections.defaultdict[str, list[list[float]]](list)

    def drawn(_: object, __: object, runs: Sequence[Trial], ___: object, number: int) -> list[int]:
        return random.permutation(len(runs))[:number].tolist()

    for plans in chosen:
        first, most = plans[0], plans[0].hosts // _SHARE
        runs = [t for t in trials if (t.hidden, t.layers) == (first.hidden, first.layers) and t.hosts <= most]
        plain = {name: TrainerFacts(x.flash, x.overlaps, x.float32, x.eager) for name, x in TRAINERS.items()}
        with mock.patch.dict(TRAINERS, plain):
            found["chosen, unknown trainer"].append(by_model(plans, runs, designed))
            found["drawn, unknown trainer"].append(by_model(plans, runs, drawn))
        found["chosen, known trainer"].append(by_model(plans, runs, designed))
        for tuner in ("random", "grid", "bayesian"):
            each = [tuned(plans, tuner, random) for _ in range(1 if tuner == "grid" else _REPEATS)]
            found[f"{tuner}, all hosts"].append(np.mean(each, axis=0).tolist())
        print(f"{first.hosts} hosts, {first.layers} layers:", {name: np.round(x[-1], 3) for name, x in found.items()})
    for name, each in found.items():
        means, worst = np.mean(each, axis=0), np.max(each, axis=0)
        said = ", ".join(f"{n} runs {a:.1%} (worst {b:.1%})" for n, a, b in zip(NUMBERS, means, worst) if a == a)
        print(f"{name}: {said}")
    print(json.dumps({name: np.nan_to_num(np.mean(each, axis=0), nan=-1).tolist() for name, each in found.items()}))


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("trials", None, "The measured runs: a published record, or a table of planner/runs/trials.py.")
    flags.DEFINE_list("hosts", ["8", "16", "32"], "Numbers of hosts for which a layout is chosen.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
