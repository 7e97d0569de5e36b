"""Validation of predicted times on measured runs: repetitions of fitting some rows and predicting the others."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from paxtrain.errors import UserError
from paxtrain.knobs import knob
from planner.fit import accuracy, calibrate, trials
from planner.fit.accuracy import Scores, Split
from planner.fit.trials import Trial


class Repetition(NamedTuple):
    """The result of one seed.

    Attributes:
        predicted: [trials] seconds.
        role: [trials] "fit", "held", "not_run" or "left_out".
        calibration: the fitted constants.
        scores: scores of each cluster, if there are several, and of "all".
    """

    predicted: np.ndarray
    role: np.ndarray
    calibration: calibrate.Calibration
    scores: dict[str, Scores]


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
        calibration = calibrate.fit([rows[i] for i in split.fit], rows, method)
        if split is splits[0]:
            predicted = calibration.predict(rows)
        elif len(split.held):
            predicted[split.held] = calibration.predict([rows[i] for i in split.held])
        role[split.held] = "held"
    if len(splits) == 1:
        role[splits[0].fit] = "fit"
    else:
        calibration = calibrate.fit([row for row in rows if row.seconds is not None], rows, method)
        predicted[~measured] = calibration.predict(rows)[~measured]

    def scores(names: set[str]) -> Scores:
        held = [i for i, row in enumerate(rows) if role[i] == "held" and row.cluster in names]
        fitted = [sum(rows[i].cluster in names for i in split.fit) for split in splits]
        return accuracy.score([rows[i] for i in held], predicted[held], float(np.mean(fitted)))

    clusters = list(dict.fromkeys(row.cluster for row in rows))
    by_name = {name: scores({name}) for name in clusters} if len(clusters) > 1 else {}
    return Repetition(predicted, role, calibration, {**by_name, "all": scores(set(clusters))})


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
    try:
        out.mkdir(parents=True, exist_ok=True)
        trials.write(
            out / "predictions.csv",
            [
                {**row.columns, "predicted_seconds": f"{seconds:.6g}", "role": role}
                for row, seconds, role in zip(rows, first.predicted, first.role)
            ],
        )
        (out / "constants.json").write_text(json.dumps(first.calibration.describe(), indent=2) + "\n")
        measured = np.array([row.seconds is not None for row in rows])
        accuracy.plot(
            out / "predicted_vs_measured.png",
            [row for row in rows if row.seconds is not None],
            first.predicted[measured],
            first.role[measured] == "fit",
            title,
        )
    except OSError as error:
        raise UserError(f"cannot write to --out={out} ({error.strerror}); name a folder that can be written") from error


def at_bounds(calibration: calibrate.Calibration) -> list[str]:
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

    Raises:
        UserError: `fit` and `folds` are both given.
    """

    fit: int | None = knob(None, least=1)
    folds: int = knob(0, least=2)
    seed: int = knob(0, least=0)
    seeds: int = knob(1, least=1, most=1000)
    hold_out: str = knob("rows", among=tuple(accuracy.HOLD_OUT))
    method: str = "simulate"

    def __post_init__(self) -> None:
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
    """

    rows: Sequence[Trial]
    options: ValidateOptions
    first: Repetition
    scores: dict[str, Scores]

    def text(self, name: str) -> str:
        """Return the table of scores and the constants that lie at an end of their range.

        Args:
            name: name of the table of measured runs.
        """
        options, measured = self.options, sum(row.seconds is not None for row in self.rows)
        fitted = f"{options.folds} folds" if options.folds else f"{self.scores['all'].n_fit:g} fitted"
        means = f", means of {options.seeds} seeds" if options.seeds > 1 else ""
        factors = list(self.first.calibration.factors.values())
        lines = [
            f"{options.method}: {measured} measured rows of {len(self.rows)} in {name}, {fitted}, "
            f"{options.hold_out} held out{means}",
            *accuracy.table(list(self.scores.items())),
            f"layer-cost factors: {len(factors)}, from {min(factors):.3f} to {max(factors):.3f}",
            *(f"at the end of its range: {line}" for line in at_bounds(self.first.calibration)),
        ]
        return "\n".join(lines)

    def save(self, out: pathlib.Path) -> None:
        """Write the first repetition's predictions.csv, constants.json and predicted_vs_measured.png.

        Raises:
            UserError: the folder cannot be written.
        """
        shown = self.first.scores["all"]
        said = f"{shown.n} rows not fitted: MAPE {shown.mape:.1%}" if shown.n else "all measured rows fitted"
        write(out, self.rows, self.first, f"{self.options.method}, {said}")


def validate(rows: Sequence[Trial], options: ValidateOptions) -> Validation:
    """Fit some of the measured rows and predict the others, once per seed.

    Args:
        rows: all rows of the table.
        options: how to fit and hold out rows.

    Raises:
        UserError: there are not that many rows, cells or meshes.
    """
    o = options
    drawn = [accuracy.splits(rows, o.fit, o.folds, o.hold_out, o.seed + i) for i in range(o.seeds)]
    results = [
        repetition(rows, splits, o.method) for splits in tqdm(drawn, "fit and predict", disable=None, leave=False)
    ]
    scores = {name: accuracy.mean([result.scores[name] for result in results]) for name in results[0].scores}
    return Validation(rows, options, results[0], scores)
