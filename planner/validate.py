"""Validate predicted times on measured runs: python -m planner.validate --trials=trials.csv --fit=60 --out=DIR.

Fits the constants of planner/fit/constants.py to some of the measured rows of a table (planner/fit/trials.py) and
predicts the others. --fit=N draws N rows to fit; --folds=K holds each row out once instead; --seeds=S repeats either
with the seeds --seed, --seed + 1, ... and prints the means. --hold_out=cells holds out whole (hidden, micro_batch, tp)
cells. --method=pipette or amp uses their closed form in place of the simulator, with everything else equal.

The last line of output is JSON about the rows not fitted, errors and regrets as fractions:
    {"n", "n_fit", "mape", "median_ape", "spearman", "kendall", "regret_mean", "regret_max", "groups"}
Its rank correlations are over all these rows together, which flatters them. The table above also has their means over
groups of equal (cluster, hidden, layers, devices, global_batch), among which a plan would be chosen. Regret is over the
`groups` with two such rows or more.

Writes to --out, for the first seed:
    predictions.csv                  the table with predicted_seconds and role: fit, held, not_run, or left_out (neither
                                     fitted nor held); with --folds every measured row is held
    predicted_vs_measured.png
    constants.json                   the fitted constants, with units, ranges and whether they lie at an end of them;
                                     with --folds from a fit to all measured rows
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags
from tqdm import tqdm

from paxtrain.errors import UserError, run
from planner.fit import accuracy, trial_model, trials, validation

HINT = "name the table with --trials=trials.csv"


def main(argv: Sequence[str]) -> None:
    """Fit, predict, score and write."""
    f = flags.FLAGS
    if f.folds is not None and f.fit is not None:
        raise UserError("--folds fits all rows except those of a fold, so it excludes --fit; leave one of them out")
    if f.trials is None:
        raise UserError("no trials were given; name a table of measured runs with --trials=trials.csv")
    rows = trials.read(f.trials)
    split = [accuracy.splits(rows, f.fit, f.folds or 0, f.hold_out, f.seed + i) for i in range(f.seeds)]
    results = [
        validation.repetition(rows, one, f.method) for one in tqdm(split, "fit and predict", disable=None, leave=False)
    ]
    scores = {name: accuracy.mean([result.scores[name] for result in results]) for name in results[0].scores}
    first, out = results[0], pathlib.Path(f.out)
    held = scores["all"]
    shown = first.scores["all"]
    said = f"{shown.n} rows not fitted: MAPE {shown.mape:.1%}" if shown.n else "all measured rows fitted"
    validation.write(out, rows, first, f"{f.method}, {said}")

    print(f"{f.method}: {sum(row.seconds is not None for row in rows)} measured rows of {len(rows)} in {f.trials}, "
          f"{f'{f.folds} folds' if f.folds else f'{held.n_fit:g} fitted'}, {f.hold_out} held out"
          f"{f', means of {f.seeds} seeds' if f.seeds > 1 else ''}")  # fmt: skip
    print("\n".join(accuracy.table(list(scores.items()))))
    factors = list(first.calibration.factors.values())
    print(f"layer-cost factors: {len(factors)}, from {min(factors):.3f} to {max(factors):.3f}")
    for text in validation.at_bounds(first.calibration):
        print(f"at the end of its range: {text}")
    print(f"wrote predictions.csv, predicted_vs_measured.png and constants.json to {out}")
    print(json.dumps(held.json()))


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("trials", None, "The table of measured runs, a CSV as planner/fit/trials.py describes it.")
    flags.DEFINE_integer(
        "fit", None, "Rows to fit; default: 60, or half of the measured rows if that is fewer.", lower_bound=1
    )
    flags.DEFINE_integer("folds", None, "Parts, each of which is held out once; replaces --fit.", lower_bound=2)
    flags.DEFINE_integer("seed", 0, "Seed of the draw of rows.", lower_bound=0)
    flags.DEFINE_integer("seeds", 1, "Repetitions, with --seed and the seeds after it.", lower_bound=1)
    flags.DEFINE_enum(
        "hold_out", "rows", accuracy.HOLD_OUT, "What is held out: rows, or whole (hidden, micro_batch, tp) cells."
    )
    flags.DEFINE_enum("method", "simulate", trial_model.METHODS, "How stages compose an iteration.")
    flags.DEFINE_string("out", "runs/validate", "The folder to write to.")


if __name__ == "__main__":
    define_flags()
    run(main, hint=HINT)
