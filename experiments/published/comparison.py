"""Tables of predicted over published seconds of a step: of each run as text, of their errors as part of a page."""

import dataclasses
import pathlib
from collections.abc import Sequence

import numpy as np

from experiments.published.halves import is_fitted
from experiments.published.prediction import PublishedConstants, predicted
from experiments.published.runs import PublishedRun
from paxtrain import files
from paxtrain.errors import UserError

Array = np.ndarray

BEGIN, END = "<!-- published runs: python -m experiments.published --page writes this part -->", "<!-- end -->"
_SHORT = ("SC'21", "Korthikanti", "MegaScale", "BLOOM", "Llama 3", "torchtitan")


@dataclasses.dataclass(frozen=True, eq=False)
class PublishedComparison:
    """Predictions of runs.

    Attributes:
        runs: the runs.
        constants: constants that they were predicted with.
        seconds: [runs] predicted seconds of a step.
    """

    runs: Sequence[PublishedRun]
    constants: PublishedConstants
    seconds: Array

    @property
    def ratio(self) -> Array:
        """Predicted over published seconds, [runs]."""
        return self.seconds / np.array([run.seconds for run in self.runs])

    def summary(self) -> list[str]:
        """Return the lines of a table of errors by half and by source."""
        fitted, ratio = is_fitted(len(self.runs)), self.ratio
        lines = ["| runs | number | predicted / published | mean error | worst |", "|---|---|---|---|---|"]
        parts = {"fitted": fitted, "judged": ~fitted}
        for short in _SHORT:
            parts[f"judged, {short}"] = ~fitted & np.array([run.name.startswith(short) for run in self.runs])
        for name, chosen in parts.items():
            some = ratio[chosen]
            error = np.abs(some - 1)
            lines.append(
                f"| {name} | {chosen.sum()} | {some.min():.2f} to {some.max():.2f} | {error.mean():.1%} "
                f"| {error.max():.1%} |"
            )
        return lines

    def checked(self) -> str:
        """Return when the rows were last held against their sources, as a sentence."""
        days = sorted({run.columns["checked"] for run in self.runs})
        when = f"on {days[0]}" if len(days) == 1 else f"between {days[0]} and {days[-1]}"
        return f"Each of the {len(self.runs)} rows was last held against its source {when}."

    def table(self) -> list[str]:
        """Return the lines of a table with all runs."""
        heads = "run, devices, data x pipe x tensor, micro-batch, recomputed, published, s, predicted, ratio, half"
        names = heads.split(", ")
        lines = [f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
        fitted = is_fitted(len(self.runs))
        for run, seconds, ratio, fit in zip(self.runs, self.seconds, self.ratio, fitted):
            row = run.columns
            link = f"[{row['place']}]({row['url']})"
            mesh = f"{run.data} x {run.pipe} x {run.tensor}" + (f", {run.chunks} chunks" if run.chunks > 1 else "")
            cells = (
                run.name,
                f"{run.devices} {run.device}",
                mesh,
                f"{run.micro_batch}",
                run.recompute,
                f"{float(row['published']):g} {row['unit']}, {link}",
                f"{run.seconds:.4g}",
                f"{seconds:.4g}",
                f"{ratio:.2f}",
                "fitted" if fit else "judged",
            )
            lines.append(f"| {' | '.join(cells)} |")
        return lines


def compare(runs: Sequence[PublishedRun], constants: PublishedConstants) -> PublishedComparison:
    """Predict runs.

    Args:
        runs: published runs.
        constants: shares of data sheets.
    """
    return PublishedComparison(runs, constants, np.array([predicted(run, constants) for run in runs]))


def around(path: str | pathlib.Path) -> tuple[str, str]:
    """Return what stands before and after the table of a page, which is between two comments.

    Args:
        path: page in Markdown.

    Raises:
        UserError: the page cannot be read or lacks the comments.
    """
    try:
        before, begin, rest = pathlib.Path(path).read_text().partition(BEGIN)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the page {path} ({error}); name a page such as docs/accuracy.md") from error
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{path} lacks the comments between which the table goes: {BEGIN} and {END}")
    return before, after


def write_page(path: str | pathlib.Path, found: PublishedComparison) -> None:
    """Replace the table of a page.

    Args:
        path: page in Markdown.
        found: predictions.

    Raises:
        UserError: the page cannot be read, lacks the comments or cannot be written.
    """
    before, after = around(path)
    lines = [BEGIN, "", *found.summary(), "", found.checked(), "", END]
    try:
        files.write(path, before + "\n".join(lines) + after)
    except OSError as error:
        raise UserError(f"cannot write the table of {path} ({error}); name a page that can be written") from error
