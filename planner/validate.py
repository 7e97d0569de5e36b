"""Validate predicted times on measured runs: python -m planner.validate --trials=trials.csv --fit=60 --out=DIR.

It fits the constants of planner/fit/constants.py to some of the measured rows of a table (planner/runs/trials.py) and
predicts the others. --fit=N draws N rows to fit; --folds=K holds each row out once instead. --seeds=S repeats either
with the seeds --seed, --seed + 1, ... and prints the means. --hold_out=cells holds out whole (hidden, micro_batch, tp)
cells, --hold_out=meshes whole (tp, dp, pp). --fit_on=other.csv fits another table's rows, and predicts all of --trials.
Either may be a published file that planner/runs/published.py reads. --method=pipette or amp uses their closed form in
place of the simulator, with everything else equal.
Predictions are those of planner.cost, by which plans are made (planner/fit/trial_steps.py). --executor says whose runs
these are: ideal, of systems whose transfers hold no stage, such as Megatron-LM, or paxtrain, of this trainer, whose
stages exchange messages row by row.

The last line of output is JSON about the rows not fitted, errors and regrets as fractions:
    {"n", "n_fit", "mape", "median_ape", "spearman", "kendall", "regret_mean", "regret_max", "groups",
     "spearman_in_groups", "coverage", "near", "memory"}
Its first rank correlations are over all these rows together, which flatters them. Groups have equal (cluster, hidden,
layers, devices, global_batch); a plan would be chosen among the rows of one. Regret is over the `groups` with two such
rows or more. `coverage` is the share of rows in their intervals of 80%, `near` has the scores of rows within 3 times
the best of their group, and `memory` those of predicted peaks and failures (planner/fit/accuracy.py, MemoryScores).

It writes to --out, for the first seed:
    predictions.csv                  the table with predicted_seconds, its interval, memory, and role: fit, held,
                                     not_run, or left_out (neither fitted nor held); with --folds every measured row is
                                     held
    predicted_vs_measured.png        beside it the share of rows in their intervals, for each nominal share
    constants.json                   the fitted constants, with units, ranges and whether they lie at an end of them;
                                     with --folds from a fit to all measured rows
"""

import json
import pathlib
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.errors import UserError
from paxtrain.knobs import define, given
from planner.fit import trial_steps
from planner.fit.validation import ValidateOptions, validate
from planner.runs import published

HINT = "name the table with --trials=trials.csv"


def main(argv: Sequence[str]) -> None:
    """Fit, predict, score and write."""
    f = flags.FLAGS
    options = given(ValidateOptions, folds=f.folds or 0, method=_method())
    if f.trials is None:
        raise UserError("no trials were given; name a table of measured runs with --trials=trials.csv")
    others = published.read(options.fit_on) if options.fit_on else []
    out, found = pathlib.Path(f.out), validate(published.read(f.trials), options, others)
    found.save(out)
    print(found.text(f.trials))
    print(f"wrote predictions.csv, predicted_vs_measured.png and constants.json to {out}")
    print(json.dumps(found.json()))


def _method() -> str:
    """Return how stages compose an iteration, as --method and --executor say.

    Raises:
        UserError: both were given, but a closed form has no executor.
    """
    f = flags.FLAGS
    if f.method == "simulate":
        return trial_steps.EXECUTORS[f.executor]
    if f["executor"].present:
        raise UserError(
            f"--executor={f.executor} says how to simulate, but --method={f.method} does not; leave one out"
        )
    return f.method


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_string("trials", None, "The table of measured runs, a CSV as planner/runs/trials.py describes it.")
    define(ValidateOptions, "fit", "folds", "seed", "seeds", "hold_out", folds=None)
    flags.DEFINE_string("fit_on", None, "Another table of measured runs, all of which are fitted; --trials judges.")
    methods = [method for method in trial_steps.METHODS if method not in trial_steps.EXECUTORS.values()]
    flags.DEFINE_enum("method", "simulate", ["simulate", *methods], "How stages compose an iteration.")
    flags.DEFINE_enum("executor", "ideal", list(trial_steps.EXECUTORS), "Whose runs are simulated.")
    flags.DEFINE_string("out", "runs/validate", "The folder to write to.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
