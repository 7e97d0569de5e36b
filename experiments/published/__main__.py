"""Predict steps that others published: python -m experiments.published [--fit] [--open] [--page=docs/accuracy.md].

It prints predicted over published seconds of each run of runs.csv beside it, by the planner's own costs at the
same model, mesh and batch, and the errors by half and source. The constants are those that ship; --fit fits them anew
to every second run. --open says what these runs leave open of the constants, and how many are in their intervals.
--page writes the errors into a page.
"""

import dataclasses
from collections.abc import Sequence

from absl import flags

from experiments.published import comparison, halves, posterior, runs
from experiments.published.prediction import PublishedConstants
from paxtrain.command_line import run

HINT = "name a page with --page=docs/accuracy.md"


def main(argv: Sequence[str]) -> None:
    """Predict, print and write."""
    f = flags.FLAGS
    if f.page:
        comparison.around(f.page)  # what is wrong with it is told before anything is fitted
    found = runs.read()
    if f.open:
        print("\n".join(posterior.told(found)))
        return
    constants = PublishedConstants()
    if f.fit:
        constants = halves.fit([x for x, fitted in zip(found, halves.is_fitted(len(found))) if fitted])
    compared = comparison.compare(found, constants)
    if f.page:
        comparison.write_page(f.page, compared)
    said = ", ".join(f"{name} {value:.3f}" for name, value in dataclasses.asdict(constants).items())
    print("\n".join([*compared.table(), "", *compared.summary(), "", compared.checked(), f"constants: {said}"]))


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_bool("fit", False, "Fit the constants to every second run instead of taking those that ship.")
    flags.DEFINE_bool("open", False, "Say what the fitted half leaves open, and who is in intervals; takes minutes.")
    flags.DEFINE_string("page", None, "A page in Markdown whose table is written anew.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
