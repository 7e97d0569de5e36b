"""Validation of predicted times on measured runs: repetitions of fitting some rows and predicting the others."""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from tqdm import tqdm

from paxtrain.errors import UserError
from paxtrain.knobs import knob
from planner.fit import accuracy, fitting
from planner.fit.accuracy import Forecast, MemoryScores, Scores, Split
from planner.runs import trials
from planner.runs.trials import Trial


class Repetition(NamedTuple):
    """The result of one seed.

    Attributes:
        forecast: predictions of all trials.
        role: [trials] "fit", "held", "not_run" or "left_out".
        calibration: the fitted constants.
        scores: scores of each cluster, if there are several, and of "all".
    """

    forecast: Forecast
    role: np.ndarray
    calibration: fitting.Calibration
    scores: dict[str, Scores]


NEAR_FACTOR = 3.0  # times the best of a group: runs that somebody could choose
NEAR = f"within {NEAR_FACTOR:g}x of the best"


def _scores(
    rows: Sequence[Trial], forecast: Forecast, held: Sequence[int], fitted: Callable[[str], float]
) -> dict[str, Scores]:
    """Return the scores of each cluster, if there are several, of rows near the best of their group, and of all.

    Args:
        rows: all rows of the table.
        forecast: predictions of them.
        held: rows that are judged.
        fitted: number of fitted rows of a cluster; "" stands for all.
    """

    def of(some: Sequence[int], cluster: str) -> Scores:
        return accuracy.score([rows[i] for i in some], forecast.take(some), fitted(cluster))

    clusters = list(dict.fromkeys(rows[i].cluster for i in held))
    found = (
        {name: of([i for i in held if rows[i].cluster == name], name) for name in clusters} if len(clusters) > 1 else {}
    )
    near = [held[i] for i in accuracy.within([rows[i] for i in held], NEAR_FACTOR)]
    return {**found, NEAR: of(near, ""), "all": of(held, "")}


def repetition(rows: Sequence[Trial], splits: Sequence[Split], method: str) -> Repetition:
    """Fit and predict once.

    Args:
        rows: all rows of the table.
        splits: one split, or several, each of which predicts its own held rows.
        method: how stages compose an iteration, one of trial_steps.METHODS.
    """
    measured = np.array([row.seconds is not None for row in rows])
    role = np.where(measured, "left_out", "not_run").astype("U8")
    for split in splits:
        calibration = fitting.fit([rows[i] for i in split.fit], rows, method)
        if split is splits[0]:
            forecast = calibration.forecast(rows)
        elif len(split.held):
            forecast.put(split.held, calibration.forecast([rows[i] for i in split.held]))
        role[split.held] = "held"
    if len(splits) == 1:
        role[splits[0].fit] = "fit"
    else:
        calibration = fitting.fit([row for row in rows if row.seconds is not None], rows, method)
        if not measured.all():
            missing = np.flatnonzero(~measured)
            forecast.put(missing, calibration.forecast([row for row in rows if row.seconds is None]))

    def fitted(cluster: str) -> float:
        return float(np.mean([sum(cluster in ("", rows[i].cluster) for i in split.fit) for split in splits]))

    held = [i for i in range(len(rows)) if role[i] == "held"]
    return Repetition(forecast, role, calibration, _scores(rows, forecast, held, fitted))


def judged(rows: Sequence[Trial], others: Sequence[Trial], method: str) -> Repetition:
    """Fit all measured rows of one table, and predict all rows of another one.

    Args:
        rows: the rows that are predicted.
        others: the rows that are fitted.
        method: how stages compose an iteration, one of trial_steps.METHODS.
    """
    calibration = fitting.fit([row for row in others if row.seconds is not None], rows, method)
    forecast, measured = calibration.forecast(rows), [i for i, row in enumerate(rows) if row.seconds is not None]
    role = np.full(len(rows), "not_run")
    role[measured] = "held"
    fitted = sum(row.seconds is not None for row in others)
    return Repetition(forecast, role, calibration, _scores(rows, forecast, measured, lambda _: float(fitted)))


def write(out: pathlib.Path, rows: Sequence[Trial], first: Repetition, title: str) -> None:
    """Write predictions.csv, constants.json and predicted_vs_measured.png.

    Args:
        out: the folder to write to.
        rows: all rows of the table.
        first: the repetition to write.
        title: the figure's title.

    Raises:
        UserError: the folder cannot be written.
    """
    found = first.forecast
    try:
        out.mkdir(parents=True, exist_ok=True)
        trials.write(
            out / "predictions.csv",
            [
                {
                    **row.columns,
                    "predicted_seconds": f"{found.seconds[i]:.6g}",
                    "seconds_p10": f"{found.low[i]:.6g}",
                    "seconds_p90": f"{found.high[i]:.6g}",
                    "predicted_memory_gb": f"{found.memory[i] / 1e9:.4g}",
                    "fits": f"{found.fits[i]:.3f}",
                    "role": first.role[i],
                }
                for i, row in enumerate(rows)
            ],
        )
        (out / "constants.json").write_text(json.dumps(first.calibration.describe(), indent=2) + "\n")
        measured = np.array([row.seconds is not None for row in rows])
        accuracy.plot(
            out / "predicted_vs_measured.png",
            [row for row in rows if row.seconds is not None],
            found.take(np.flatnonzero(measured).tolist()),
            first.role[measured] == "fit",
            title,
        )
    except OSError as error:
        raise UserError(f"cannot write to --out={out} ({error.strerror}); name a folder that can be written") from error


def at_bounds(calibration: fitting.Calibration) -> list[str]:
    """Return a line for each fitted constant that lies at an end of its range."""
    found = calibration.describe()["clusters"].items()
    return [
        f"{name}: {constant} = {entry['value']:.3g} {entry['unit']}"
        for name, cluster in found
        for constant, entry in cluster["constants"].items()
        if entry["at_bound"]
    ]


@dataclasses.dataclass(frozen=True)
class ValidateOptions:
    """Options of `validate`; the flags of planner.validate have the same names.

    Attributes:
        fit: rows to fit; default: 60, or half of the measured rows if that is fewer.
        folds: parts, each of which is held out once; replaces --fit.
        seed: seed of the draw of rows.
        seeds: repetitions, with --seed and the seeds after it.
        hold_out: what is held out: rows, whole cells or whole meshes.
        method: how stages compose an iteration.
        fit_on: table of other runs, all of which are fitted; then all rows are held out.

    Raises:
        UserError: `fit` and `folds` are both given, or one of them and `fit_on`.
    """

    fit: int | None = knob(None, least=1)
    folds: int = knob(0, least=2)
    seed: int = knob(0, least=0)
    seeds: int = knob(1, least=1, most=1000)
    hold_out: str = knob("rows", among=tuple(accuracy.HOLD_OUT))
    method: str = "simulate"
    fit_on: str | None = None

    def __post_init__(self) -> None:
        if self.fit_on and (self.folds or self.fit is not None):
            raise UserError("--fit_on fits all rows of its table, so it excludes --fit and --folds; leave these out")
        if self.folds and self.fit is not None:
            raise UserError("--folds fits all rows except those of a fold, so it excludes --fit; leave one of them out")


@dataclasses.dataclass(frozen=True, eq=False)
class Validation:
    """The predictions of measured runs, and how good they are.

    Attributes:
        rows: all rows of the table.
        options: how rows were fitted and held out.
        first: the repetition with the first seed.
        scores: mean scores over all seeds of each cluster, if there are several, and of "all".
        beyond: rows that no prediction knows, which are left out.
    """

    rows: Sequence[Trial]
    options: ValidateOptions
    first: Repetition
    scores: dict[str, Scores]
    beyond: Sequence[Trial] = ()

    def text(self, name: str) -> str:
        """Return the table of scores and the constants that lie at an end of their range.

        Args:
            name: name of the table of measured runs.
        """
        options, measured = self.options, sum(row.seconds is not None for row in self.rows)
        fitted = f"{options.folds} folds" if options.folds else f"{self.scores['all'].n_fit:g} fitted"
        fitted = f"all rows of {options.fit_on} fitted" if options.fit_on else fitted
        held = "all" if options.fit_on else options.hold_out
        means = f", means of {options.seeds} seeds" if options.seeds > 1 else ""
        factors = list(self.first.calibration.factors.values())
        lines = [
            f"{options.method}: {measured} measured rows of {len(self.rows)} in {name}, {fitted}, "
            f"{held} held out{means}",
            *accuracy.table(list(self.scores.items())),
            *([found.text()] if (found := self.memory) else []),
            *(
                [f"layer-cost factors: {len(factors)}, from {min(factors):.3f} to {max(factors):.3f}"]
                if factors
                else []
            ),
            *([f"left out: {len(self.beyond)} rows with {self.beyond[0].beyond} or the like"] if self.beyond else []),
            *(f"at the end of its range: {line}" for line in at_bounds(self.first.calibration)),
        ]
        return "\n".join(lines)

    @property
    def memory(self) -> MemoryScores | None:
        """Scores of the peaks of memory of rows that were not fitted; None if none were measured."""
        held = [i for i, role in enumerate(self.first.role) if role in ("held", "not_run")]
        return accuracy.memory_scores([self.rows[i] for i in held], self.first.forecast.take(held))

    def json(self) -> dict[str, Any]:
        """Return the last line of output: scores of all rows not fitted, of those near the best, and of memory."""
        found = self.memory
        return {
            **self.scores["all"].json(),
            "near": self.scores[NEAR].json(),
            "memory": None if found is None else dataclasses.asdict(found),
        }

    def save(self, out: pathlib.Path) -> None:
        """Write the first repetition's predictions.csv, constants.json and predicted_vs_measured.png.

        Raises:
            UserError: the folder cannot be written.
        """
        shown = self.first.scores["all"]
        said = f"{shown.n} rows not fitted: MAPE {shown.mape:.1%}" if shown.n else "all measured rows fitted"
        write(out, self.rows, self.first, f"{self.options.method}, {said}")


def validate(rows: Sequence[Trial], options: ValidateOptions, others: Sequence[Trial] = ()) -> Validation:
    """Fit some of the measured rows and predict the others, once per seed; or fit other rows, and predict all.

    Args:
        rows: all rows of the table.
        options: how to fit and hold out rows.
        others: rows of the table that is fitted instead, `options.fit_on`.

    Raises:
        UserError: there are not that many rows, cells or meshes.
    """
    o = options
    beyond, rows = [row for row in rows if row.beyond], [row for row in rows if not row.beyond]
    if not any(row.seconds for row in rows):
        raise UserError(f"no row can be predicted: all measured ones have {beyond[0].beyond} or the like")
    if o.fit_on:
        results = [judged(rows, [row for row in others if not row.beyond], o.method)]
    else:
        drawn = [accuracy.splits(rows, o.fit, o.folds, o.hold_out, o.seed + i) for i in range(o.seeds)]
        results = [
            repetition(rows, splits, o.method) for splits in tqdm(drawn, "fit and predict", disable=None, leave=False)
        ]
    scores = {name: accuracy.mean([result.scores[name] for result in results]) for name in results[0].scores}
    return Validation(rows, options, results[0], scores, beyond)
