"""How good predicted times are, on measured runs: python -m planner.validate --trials=trials.csv --fit=60 --out=DIR.

Fits the constants of planner/fit/trial_model.py to some of the measured rows of a table (planner/fit/trials.py) and
predicts
the others. --fit=N draws N rows to fit; --folds=K holds each row out once instead; --seeds=S repeats either with the
seeds --seed, --seed + 1, ... and prints the means. --hold_out=cells holds out whole (hidden, micro_batch, tp) cells.
--method=pipette or amp puts their closed form in the simulator's place, everything else alike.

The last line of output is JSON about the rows not fitted, errors and regrets as fractions:
    {"n", "n_fit", "mape", "median_ape", "spearman", "kendall", "regret_mean", "regret_max", "groups"}
Its rank correlations are those of all these rows together, which flatters; the table above has the means over groups of
equal (cluster, hidden, layers, devices, global_batch) too, in each of which a plan would be chosen. Regret is over the
`groups` with two such rows or more.

Writes to --out, for the first seed:
    predictions.csv                  the table with predicted_seconds and role: fit, held, not_run, or left_out (in none
                                     of the two); with --folds every measured row is held, and predicted as such
    predicted_vs_measured.png
    constants.json                   the fitted constants, with units, ranges and whether they lie at an end of those;
                                     with --folds of a fit to all measured rows
"""

import json
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from absl import flags
from tqdm import tqdm

from paxtrain.errors import UserError, run
from planner.fit import accuracy, calibrate, trial_model, trials
from planner.fit.accuracy import Scores, Split
from planner.fit.trials import Trial

HINT = "name the table with --trials=trials.csv"


class Repetition(NamedTuple):
    """What came of one seed: predicted seconds and role [trials], constants, and scores by what they are of."""

    predicted: np.ndarray
    role: np.ndarray
    calibration: calibrate.Calibration
    scores: dict[str, Scores]


def repetition(rows: Sequence[Trial], splits: Sequence[Split], method: str) -> Repetition:
    """Fits and predicts; with several splits each predicts its own held rows."""
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


def _write(out: pathlib.Path, rows: Sequence[Trial], first: Repetition, title: str) -> None:
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


def _at_bounds(calibration: calibrate.Calibration) -> list[str]:
    found = calibration.describe()["clusters"].items()
    return [
        f"{name}: {constant} = {entry['value']:.3g} {entry['unit']}"
        for name, cluster in found
        for constant, entry in cluster["constants"].items()
        if entry["at_bound"]
    ]


def main(argv: Sequence[str]) -> None:
    """Fits, predicts, scores and writes."""
    f = flags.FLAGS
    if f.folds is not None and f.fit is not None:
        raise UserError(
            "--folds fits all rows but those of a fold, so it does not go with --fit; leave one of them out"
        )
    if f.trials is None:
        raise UserError("no trials were given; name a table of measured runs with --trials=trials.csv")
    rows = trials.read(f.trials)
    split = [accuracy.splits(rows, f.fit, f.folds or 0, f.hold_out, f.seed + i) for i in range(f.seeds)]
    results = [repetition(rows, one, f.method) for one in tqdm(split, "fit and predict", disable=None, leave=False)]
    scores = {name: accuracy.mean([result.scores[name] for result in results]) for name in results[0].scores}
    first, out = results[0], pathlib.Path(f.out)
    held = scores["all"]
    shown = first.scores["all"]
    said = f"{shown.n} rows not fitted: MAPE {shown.mape:.1%}" if shown.n else "all measured rows fitted"
    _write(out, rows, first, f"{f.method}, {said}")

    print(f"{f.method}: {sum(row.seconds is not None for row in rows)} measured rows of {len(rows)} in {f.trials}, "
          f"{f'{f.folds} folds' if f.folds else f'{held.n_fit:g} fitted'}, {f.hold_out} held out"
          f"{f', means of {f.seeds} seeds' if f.seeds > 1 else ''}")  # fmt: skip
    print("\n".join(accuracy.table(list(scores.items()))))
    factors = list(first.calibration.factors.values())
    print(f"layer-cost factors: {len(factors)}, from {min(factors):.3f} to {max(factors):.3f}")
    for text in _at_bounds(first.calibration):
        print(f"at the end of its range: {text}")
    print(f"wrote predictions.csv, predicted_vs_measured.png and constants.json to {out}")
    print(json.dumps(held.json()))


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_string("trials", None, "The table of measured runs, a CSV as planner/fit/trials.py describes it.")
    flags.DEFINE_integer(
        "fit", None, "Rows to fit; default 60, or half of the measured ones if those are few.", lower_bound=1
    )
    flags.DEFINE_integer("folds", None, "Instead of --fit: hold out each of so many parts once.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Of the draw of rows.", lower_bound=0)
    flags.DEFINE_integer("seeds", 1, "Repetitions, with --seed and the seeds after it.", lower_bound=1)
    flags.DEFINE_enum(
        "hold_out", "rows", accuracy.HOLD_OUT, "What is drawn: rows, or whole (hidden, micro_batch, tp) cells."
    )
    flags.DEFINE_enum("method", "simulate", trial_model.METHODS, "What composes stages to an iteration.")
    flags.DEFINE_string("out", "runs/validate", "The folder to write to.")


if __name__ == "__main__":
    define_flags()
    run(main, hint=HINT)
