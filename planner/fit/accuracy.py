"""The accuracy of predictions of measured runs: splits into fitted and held-out rows, scores, a table and a figure."""

import dataclasses
import math
import pathlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator
from scipy import stats

from paxtrain.errors import UserError
from planner.runs.trials import Trial

Array = np.ndarray

HOLD_OUT = {"rows": (), "cells": ("hidden", "micro_batch", "tp"), "meshes": ("tp", "dp", "pp")}
_PARTS_HELD = 0.25  # share of the cells or meshes that is held out, without folds
_COLORS = ("#2f6f9f", "#d9622b", "#3c9d8f", "#8e5aa8", "#c0392b", "#8aa83a", "#5c6670")
_INK = "#22272e"


# --- Which rows are fitted --------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """A split of the measured rows.

    Attributes:
        fit: indices of the rows to fit.
        held: indices of the rows to predict and score.
    """

    fit: Array
    held: Array


def splits(trials: Sequence[Trial], fit: int | None, folds: int, hold_out: str, seed: int) -> list[Split]:
    """Split the measured rows at random.

    Args:
        trials: all rows.
        fit: number of rows to fit; all others are held out. None: 60, or half of the measured rows if that is fewer.
        folds: number of parts, each of which is held out once; 0: one split with `fit` rows.
        hold_out: unit of the draw: "rows", whole "cells" of equal (hidden, micro_batch, tp), or whole "meshes" of equal
            (tp, dp, pp). Of cells or meshes a quarter is held out (with folds, each once), and `fit` rows of the others
            are fitted.
        seed: seed of the draw.

    Returns:
        One split, or one per fold.

    Raises:
        UserError: there are not that many rows, cells or meshes.
    """
    random = np.random.default_rng(seed)
    measured = np.array([i for i, trial in enumerate(trials) if trial.seconds is not None])
    fields = HOLD_OUT[hold_out]
    part, count = np.arange(len(measured)), len(measured)
    if fields:
        keys = [tuple(getattr(trials[i], field) for field in fields) for i in measured]
        names = {key: i for i, key in enumerate(sorted(set(keys)))}
        part, count = np.array([names[key] for key in keys]), len(names)
    parts = random.permutation(count)
    if fields and count < 2:
        raise UserError(f"--hold_out={hold_out} needs two different ({', '.join(fields)}) or more; use --hold_out=rows")
    if folds:
        if folds > len(parts):
            raise UserError(
                f"--folds={folds} is more than the {len(parts)} measured {hold_out}; choose at most {len(parts)}"
            )
        folded = [np.isin(part, parts[k::folds]) for k in range(folds)]
        return [Split(measured[~held], measured[held]) for held in folded]
    if fit is None:
        fit = min(60, max(len(measured) // 2, 1))
    if not fields:
        _enough(fit, len(measured), "measured rows")
        return [Split(measured[parts[:fit]], measured[np.sort(parts[fit:])])]
    held = np.isin(part, parts[: math.ceil(_PARTS_HELD * len(parts))])
    _enough(fit, int((~held).sum()), f"measured rows outside the {hold_out} held out")
    return [Split(random.permutation(measured[~held])[:fit], measured[held])]


def _enough(fit: int, rows: int, of: str) -> None:
    if fit > rows:
        raise UserError(f"--fit={fit} is more than the {rows} {of}; choose at most {rows}")


# --- Scores -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Scores:
    """Errors as fractions of the measured time, and ranks from -1 to 1; NaN if there are too few rows.

    A group is the rows with equal (cluster, hidden, layers, devices, global_batch), among which a plan would be chosen.
    The regret of a group is the measured time of the row that would be chosen over that of the best row, less 1. That
    is the row of least expected time among those that are said to fit into memory.

    Attributes:
        n: number of rows scored.
        n_fit: number of rows fitted.
        mape: mean of |predicted - measured| / measured.
        median_ape: median of the same.
        spearman: rank correlation of all scored rows together.
        kendall: rank correlation of all scored rows together.
        regret_mean: mean regret over the groups.
        regret_max: largest regret of a group.
        groups: number of groups with two scored rows or more.
        spearman_in_groups: mean rank correlation over the groups.
        kendall_in_groups: mean rank correlation over the groups.
        coverage: share of the rows that lie in their interval of 80%.
    """

    n: float
    n_fit: float
    mape: float
    median_ape: float
    spearman: float
    kendall: float
    regret_mean: float
    regret_max: float
    groups: float
    spearman_in_groups: float
    kendall_in_groups: float
    coverage: float = math.nan

    def json(self) -> dict[str, float | int | None]:
        """Return the values of the last line of output; ranks are over all rows together, and NaN becomes null."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "kendall_in_groups"]
        values = {name: float(getattr(self, name)) for name in names}
        return {name: None if math.isnan(x) else int(x) if x == int(x) else round(x, 6) for name, x in values.items()}


def _ranks(predicted: Array, measured: Array) -> tuple[float, float]:
    """Return the rank correlations of Spearman and Kendall; NaN if all values are equal."""
    if np.unique(predicted).size < 2 or np.unique(measured).size < 2:
        return math.nan, math.nan
    return float(stats.spearmanr(predicted, measured)[0]), float(stats.kendalltau(predicted, measured)[0])


def _mean(values: Sequence[float]) -> float:
    kept = [value for value in values if not math.isnan(value)]
    return float(np.mean(kept)) if kept else math.nan


@dataclasses.dataclass(frozen=True, eq=False)
class Forecast:
    """Predictions of runs, each field an array over them.

    Attributes:
        seconds: predicted seconds of a step.
        chosen_by: what the best is chosen by: expected seconds, inf for runs that are said not to fit into memory.
        low: seconds below which one of ten runs stays.
        high: seconds above which one of ten runs is.
        memory: predicted peak of a device's memory, in bytes.
        fits: probability that the run fits into memory.
        half: probability that half of the memory would do.
        below: probability that it takes less than it took; NaN if it was not measured.
    """

    seconds: Array
    chosen_by: Array
    low: Array
    high: Array
    memory: Array
    fits: Array
    half: Array
    below: Array

    def take(self, rows: Sequence[int]) -> "Forecast":
        """Return the forecast of some of the runs."""
        return Forecast(*(getattr(self, field.name)[list(rows)] for field in dataclasses.fields(self)))

    def put(self, rows: Array, other: "Forecast") -> None:
        """Replace the forecast of some of the runs."""
        for field in dataclasses.fields(self):
            getattr(self, field.name)[rows] = getattr(other, field.name)


def groups(trials: Sequence[Trial]) -> list[Array]:
    """Return the indices of the runs of each group, in each of which a plan would be chosen."""
    found: dict[tuple, list[int]] = {}
    for i, trial in enumerate(trials):
        found.setdefault(trial.group, []).append(i)
    return [np.array(members) for members in found.values()]


def within(trials: Sequence[Trial], factor: float) -> list[int]:
    """Return the indices of the measured runs that took at most some times what the best of their group took."""
    measured = np.array([trial.seconds or math.inf for trial in trials])
    near = [i[measured[i] <= factor * measured[i].min()] for i in groups(trials)]
    return sorted(int(i) for some in near for i in some if math.isfinite(measured[i]))


def score(trials: Sequence[Trial], forecast: Forecast, n_fit: float) -> Scores:
    """Score predictions of measured runs.

    Args:
        trials: the runs, with measured seconds.
        forecast: predictions of them.
        n_fit: number of rows that were fitted.
    """
    if not trials:
        undefined = dict.fromkeys((field.name for field in dataclasses.fields(Scores)), math.nan)
        return Scores(**(undefined | {"n": 0, "n_fit": n_fit, "groups": 0}))
    measured, predicted = np.array([trial.seconds for trial in trials]), forecast.seconds
    errors = np.abs(predicted - measured) / measured
    several = [members for members in groups(trials) if len(members) > 1]
    regrets = [measured[i[np.argmin(forecast.chosen_by[i])]] / measured[i].min() - 1 for i in several]
    inside = [_ranks(predicted[i], measured[i]) for i in several]
    spearman, kendall = _ranks(predicted, measured)
    return Scores(
        n=len(trials),
        n_fit=n_fit,
        mape=float(errors.mean()),
        median_ape=float(np.median(errors)),
        spearman=spearman,
        kendall=kendall,
        regret_mean=_mean(regrets),
        regret_max=max(regrets, default=math.nan),
        groups=len(several),
        spearman_in_groups=_mean([s for s, _ in inside]),
        kendall_in_groups=_mean([k for _, k in inside]),
        coverage=float(np.mean((forecast.low <= measured) & (measured <= forecast.high))),
    )


@dataclasses.dataclass(frozen=True)
class MemoryScores:
    """Errors of predicted peaks of memory and of failures; NaN if there are no rows.

    Attributes:
        n: runs whose peak was measured.
        mape: mean of |predicted - measured| / measured.
        median_ape: median of the same.
        failed: runs that failed.
        recall: share of the failed runs that are said to fail.
        false_alarms: share of the runs that ran of which that is said.
        broken: failed runs that fail whatever their memory, by their trainer's code.
        elsewhere: further failed runs that need less than half of the memory: other faults, or wrong predictions.
        recall_of_memory: share of all other failed runs that are said to fail.
    """

    n: int
    mape: float
    median_ape: float
    failed: int
    recall: float
    false_alarms: float
    broken: int
    elsewhere: int
    recall_of_memory: float

    def text(self) -> str:
        """Return the scores as a line."""
        return (
            f"memory: {self.n} peaks, MAPE {self.mape:.1%}, median {self.median_ape:.1%}; of {self.failed} runs that "
            f"failed {self.recall:.1%} are said to, of those that ran {self.false_alarms:.1%}; {self.broken} failed by "
            f"their trainer's code, {self.elsewhere} need less than half of the memory, of all others "
            f"{self.recall_of_memory:.1%} are said to fail"
        )


def memory_scores(trials: Sequence[Trial], forecast: Forecast) -> MemoryScores | None:
    """Score predicted peaks and failures of runs; None if nothing was measured of them.

    Args:
        trials: the runs.
        forecast: predictions of them.
    """
    peaks = np.array([trial.memory or math.nan for trial in trials])
    failed = np.array([trial.failed for trial in trials])
    ran = np.array([trial.seconds is not None for trial in trials])
    measured = ~np.isnan(peaks)
    if not measured.any():
        return None
    errors = np.abs(forecast.memory[measured] / peaks[measured] - 1)
    too_large = forecast.fits < 0.5
    broken = failed & np.array([trial.broken for trial in trials])
    elsewhere = failed & ~broken & (forecast.half > 0.5)

    def share(of: Array) -> float:
        return float(too_large[of].mean()) if of.any() else math.nan

    return MemoryScores(
        n=int(measured.sum()),
        mape=float(errors.mean()),
        median_ape=float(np.median(errors)),
        failed=int(failed.sum()),
        recall=share(failed),
        false_alarms=share(ran),
        broken=int(broken.sum()),
        elsewhere=int(elsewhere.sum()),
        recall_of_memory=share(failed & ~broken & ~elsewhere),
    )


def mean(scores: Sequence[Scores]) -> Scores:
    """Return the mean of every figure over repetitions, without NaNs."""
    names = [field.name for field in dataclasses.fields(Scores)]
    return Scores(*(_mean([getattr(s, name) for s in scores]) for name in names))


_HEADINGS = (
    "rows",
    "fitted",
    "MAPE",
    "median",
    "Spearman",
    "Kendall",
    "in groups",
    "",
    "groups",
    "regret",
    "worst",
    "in 80%",
)


def table(rows: Sequence[tuple[str, Scores]]) -> Iterator[str]:
    """Yield the lines of a table, one per (name, scores); "in groups" are both rank correlations' means over groups."""
    width = max(len(name) for name, _ in rows)

    def percent(x: float) -> str:
        return "-" if math.isnan(x) else f"{100 * x:.2f}%"

    def rank(x: float) -> str:
        return "-" if math.isnan(x) else f"{x:.4f}"

    yield f"{'':<{width}}" + "".join(f"{heading:>10}" for heading in _HEADINGS)
    for name, s in rows:
        ranks = [rank(x) for x in (s.spearman, s.kendall, s.spearman_in_groups, s.kendall_in_groups)]
        cells = [f"{s.n:g}", f"{s.n_fit:g}", percent(s.mape), percent(s.median_ape), *ranks, f"{s.groups:g}"]
        cells += [percent(s.regret_mean), percent(s.regret_max), percent(s.coverage)]
        yield f"{name:<{width}}" + "".join(f"{cell:>10}" for cell in cells)


# --- The figure -------------------------------------------------------------------------------------------------------


def _draw(axes: Axes, trials: Sequence[Trial], predicted: Array, fitted: Array) -> None:
    measured = np.array([trial.seconds for trial in trials])
    both = np.concatenate([measured, predicted])
    line = np.array([both.min() / 1.25, both.max() * 1.25])
    axes.fill_between(line, line * 0.9, line * 1.1, color="#e9f2ea", zorder=0, label="within 10%")
    axes.plot(line, line, color=_INK, linewidth=0.9, zorder=1)
    clusters = np.array([trial.cluster for trial in trials])
    for i, name in enumerate(dict.fromkeys(clusters)):
        color = _COLORS[i % len(_COLORS)]
        held, fit = ~fitted & (clusters == name), fitted & (clusters == name)
        if held.any():
            label = f"{name}, held out ({held.sum()})"
            axes.scatter(measured[held], predicted[held], 14, color, linewidths=0, alpha=0.6, zorder=3, label=label)
        if fit.any():
            label = f"{name}, fitted ({fit.sum()})"
            axes.scatter(measured[fit], predicted[fit], 26, color, edgecolors=_INK, linewidths=1, zorder=4, label=label)
    axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_locator(NullLocator())
    axes.set_xlabel("measured seconds of an iteration")
    axes.set_ylabel("predicted seconds")


def _draw_calibration(axes: Axes, below: Array) -> None:
    """Draw the share of runs in their intervals of each width.

    Args:
        axes: where to draw.
        below: probability of each run to take less than it took.
    """
    levels = np.linspace(0, 1, 101)
    inside = np.array([np.mean(np.abs(2 * below - 1) <= level) for level in levels])
    axes.plot(levels, levels, color=_INK, linewidth=0.9)
    axes.plot(levels, inside, color=_COLORS[0], linewidth=1.8)
    at = 0.8
    share = np.mean(np.abs(2 * below - 1) <= at)
    axes.plot(at, share, "o", color=_COLORS[1])
    axes.annotate(f"{share:.0%} of {len(below)} runs", (at, share), (8, -14), textcoords="offset points", fontsize=9)
    axes.set(xlim=(0, 1), ylim=(0, 1), aspect="equal", xlabel="nominal share of an interval", ylabel="observed share")
    axes.set_title("runs in their intervals; above the line these are too wide", fontsize=10, loc="left")


def _panel(axes: Axes) -> Axes:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, which="major", color="#e6e8ea", linewidth=0.8)
    axes.set_axisbelow(True)
    return axes


def plot(path: str | pathlib.Path, trials: Sequence[Trial], forecast: Forecast, fitted: Array, title: str) -> None:
    """Draw predicted against measured seconds, and the shares of runs in their intervals, into a PNG.

    Args:
        path: the file to write.
        trials: the runs, with measured seconds.
        forecast: predictions of them.
        fitted: [trials] whether the row was fitted; intervals are of the others, if there are any.
        title: the figure's title.
    """
    figure = Figure(figsize=(12, 6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = map(_panel, figure.subplots(1, 2))
    _draw(left, trials, forecast.seconds, fitted)
    left.set_title(title, fontsize=10, loc="left")
    left.legend(frameon=False, loc="upper left", fontsize=9)
    _draw_calibration(right, forecast.below[~fitted] if not fitted.all() else forecast.below)
    figure.savefig(path)


def plot_regrets(path: str | pathlib.Path, regrets: Sequence[float]) -> None:
    """Draw the regret that is expected after each of some runs into a PNG.

    Args:
        path: the file to write.
        regrets: before the first run, and after each.
    """
    figure = Figure(figsize=(6, 3.5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = _panel(figure.subplots())
    axes.plot(range(len(regrets)), 100 * np.array(regrets), "o-", color=_COLORS[0])
    axes.set(xlabel="runs of those proposed", ylabel="expected loss against the true best, %", ylim=(0, None))
    axes.set_xticks(range(len(regrets)))
    figure.savefig(path)
