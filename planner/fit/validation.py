"""Validation of predicted times on measured runs: repetitions of fitting some rows and predicting the others."""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from paxtrain.errors import UserError
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
        method: how stages compose an iteration, one of trial_model.METHODS.
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
