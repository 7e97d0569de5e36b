"""Time to loss on shaped links: when a compressed run reaches the loss at which dense training ends."""

import math
import pathlib

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.findings.losses import Curve
from experiments.lab.measuring import sooner as experiment
from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, Section, Target, lab, percent, seconds, table
from experiments.lab.records import Records
from paxtrain.profiling import canvas

TITLE, SOURCE = "Time to loss", "sooner.jsonl"
DENSE = "dense"
HALF = Target.at_most(
    f"Wall time to dense's final loss where communication takes {experiment.SHARE:.0%} of a dense step, of dense's, "
    "really trained on those links",
    0.5,
    percent,
)


def curve(run: dict) -> Curve:
    """Return the validation losses of a run by the seconds of training."""
    return Curve(np.array(run["seconds"], float), np.array([loss for _, loss in run["validation"]], float))


def shares(line: dict) -> tuple[float, float, float]:
    """Return dense's seconds, the other run's until it has dense's last loss, and the latter over the former.

    The other run's are linear between two evaluations, and NaN if it never comes there.
    """
    dense, other = (curve(line["runs"][kind]) for kind in (DENSE, line["kind"]))
    whole, there = float(dense.steps[-1]), other.reaches(dense.last)
    return whole, there, there / whole


def _draw(lines: list[dict]) -> Figure:
    figure = canvas.figure(9, 3.6)
    axes = figure.subplots()
    canvas.style(axes)
    for n, line in enumerate(lines):
        for kind, color in ((DENSE, figures.INK), (line["kind"], figures.COLORS[0])):
            found = curve(line["runs"][kind])
            label = kind if n == 0 else None
            axes.plot(found.steps, found.losses, color=color, marker=".", linewidth=1.2, label=label)
        axes.axhline(curve(line["runs"][DENSE]).last, color=figures.MUTED, linewidth=0.8, linestyle="--")
    axes.set_xlabel("seconds of training on these links")
    axes.set_ylabel("validation loss, nats per token")
    axes.legend(**figures.LEGEND)
    return figure


def section(folder: pathlib.Path) -> Section:
    """Return the time of both runs to dense's last loss, for each seed."""
    lines = sorted((line for line in Records(folder / SOURCE) if "runs" in line), key=lambda line: line["seed"])
    command = lab("sooner")
    if not lines:
        return Section(TITLE, command, (SOURCE,), (HALF,))
    kind, rows, ratios = lines[0]["kind"], [], []
    for line in lines:
        whole, there, ratio = shares(line)
        last = curve(line["runs"][DENSE]).last
        ratios.append(ratio)
        never = math.isnan(ratio)
        steps = line["runs"][kind]["validation"][-1][0]
        found = ("never", "", f"{steps}") if never else (seconds(there), percent(ratio), f"{steps}")
        rows.append((str(line["seed"]), f"{last:.4f}", seconds(whole), *found))
    note = f"{kind}; {len(ratios)} seed{'s' if len(ratios) > 1 else ''}"
    if any(map(math.isnan, ratios)):
        target = HALF.said(f"{kind} does not reach it with every seed", False)
    else:
        low_high = f", {percent(min(ratios))} to {percent(max(ratios))}" * (len(ratios) > 1)
        target = HALF.judged(float(np.mean(ratios)), f"{note}{low_high}")
    dense = lines[0]["runs"][DENSE]["validation"][-1][0]
    words = f"""Dense training and {kind}, from the same state and on the same batches, both on links of
    {lines[0]["rate"]:.0f} Mbit/s, where communication takes {lines[0]["share"]:.0%} of a dense step. The clock runs
    while they train, and stops for evaluations. Dense trains {dense} steps; {kind} trains until an evaluation, every
    {experiment.EVALUATED} steps, shows a loss as low; between two evaluations seconds are interpolated linearly. All
    else is as under Compression."""
    headings = ("seed", "dense's last loss", "dense's time", f"time of {kind}", "of dense's", "its steps")
    drawing = Drawing("sooner", "Validation loss by the clock; dashed: where dense ends.", _draw(lines))
    return Section(TITLE, command, (SOURCE,), (target,), (words, table(headings, rows), drawing))
