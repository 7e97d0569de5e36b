"""Schedules beside each other on links of several rates: measured, and predicted with and without overlap."""

import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.findings.gains import measured
from experiments.lab.laboratory import summary
from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, Section, Target, factor, lab, percent, seconds, signed, span, table
from experiments.lab.records import Records
from paxtrain.profiling import canvas

TITLE, SOURCE = "Schedules at several link rates", "schedules.jsonl"
OVERLAPS, EXPOSES, SHARE = "eager_1f1b", "1f1b", 0.2
FASTER = Target(
    f"{OVERLAPS} over {EXPOSES} where transfers take {SHARE:.0%} of a stage's step or more, on a backend that overlaps",
    f"{OVERLAPS} is faster",
)


def _ratio(values: dict[str, float]) -> float:
    return values[EXPOSES] / values[OVERLAPS]


def _medians(line: dict) -> dict[str, float]:
    return {name: summary(times)["median"] for name, times in line["seconds"].items()}


def _judged(lines: list[dict]) -> Target:
    """Return the target. This backend waits for its transfers, so the prediction alone cannot meet it."""
    slow = [line for line in lines if line["transfer_share"] >= SHARE]
    if not slow:
        return FASTER.said(f"no rate at which transfers take {SHARE:.0%}", None)
    measured = [_ratio(_medians(line)) for line in slow]
    foretold = [_ratio(line["predicted_overlapping"]) for line in slow]
    seen = (
        f"not measurable on this backend, which waits for its transfers ({span(measured, factor)} here); "
        f"predicted with overlap {span(foretold, factor)}"
    )
    return FASTER.said(seen, None if min(foretold) > 1 else False)


def _shown(line: dict) -> Iterator[Iterable[float]]:
    yield _medians(line).values()
    yield line["predicted"].values()
    yield line["predicted_overlapping"].values()


def _draw(lines: list[dict]) -> Figure:
    figure = canvas.figure(12, 4.4)
    left, right = figure.subplots(1, 2, sharey=True)
    rates = [line["rate"] for line in lines]
    for color, name in zip(figures.COLORS, lines[0]["seconds"]):
        times = [summary(line["seconds"][name]) for line in lines]
        spread = [time["spread"] for time in times]
        left.errorbar(
            rates,
            [time["median"] for time in times],
            spread,
            color=color,
            marker="o",
            markersize=6,
            linestyle="none",
            capsize=3,
            elinewidth=1.1,
            label=name,
        )
        left.plot(rates, [line["predicted"][name] for line in lines], color=color, linewidth=1.3)
        right.plot(
            rates,
            [line["predicted_overlapping"][name] for line in lines],
            color=color,
            linewidth=1.3,
            linestyle=(0, (4, 2)),
            marker=".",
            label=name,
        )
    for axes in (left, right):
        canvas.style(axes)
        axes.set_xscale("log")
        figures.plain_log(axes.xaxis, rates)
        axes.set_xlabel("Mbit/s of every link")
    figures.from_zero(left, *(times for line in lines for times in _shown(line)))
    left.set_title("here: transfers block (dots: measured, lines: predicted)", **figures.TITLE)
    right.set_title("predicted where transfers run beside compute, as on GPUs", **figures.TITLE)
    left.set_ylabel("seconds of a step")
    left.legend(**figures.LEGEND)
    return figure


def _words(lines: list[dict]) -> str:
    ratios = [(_ratio(_medians(line)), line) for line in lines]
    said = ", ".join(f"{factor(ratio)} at {line['rate']:g} Mbit/s" for ratio, line in ratios)
    off = np.array([line["predicted"][name] / median - 1 for line in lines for name, median in _medians(line).items()])
    repeats = span(len(times) for line in lines for times in line["seconds"].values())
    return f"""Four hosts, one pipeline, {repeats} repeats. **On CPUs a transfer blocks the device**, so only the
    prediction with overlap shows the purpose of {OVERLAPS}, transfers under compute: it simulates the same profile as
    if devices computed while they send. A cell has the measured step with its spread, the error of its prediction, and
    the step that is predicted with overlap. Measured, {EXPOSES}'s time over {OVERLAPS}'s is {said}. The predictions'
    mean error is {percent(float(np.abs(off).mean()))}, the worst {signed(off[np.abs(off).argmax()])}."""


def _cell(line: dict, name: str) -> str:
    """Return a schedule's measured step, the error of its prediction, and its prediction with overlap."""
    off = line["predicted"][name] / summary(line["seconds"][name])["median"] - 1
    return f"{measured(line['seconds'][name])}, {signed(off)}, {seconds(line['predicted_overlapping'][name])}"


def section(folder: pathlib.Path) -> Section:
    """Return step times by schedule and rate."""
    records = Records(folder / SOURCE)
    lines = sorted((line for line in records if "predicted_overlapping" in line), key=lambda line: -line["rate"])
    if not lines:
        return Section(TITLE, lab("schedules"), (SOURCE,), (FASTER,))
    rows = [
        (f"{line['rate']:g}", percent(line["transfer_share"]), *(_cell(line, name) for name in lines[0]["seconds"]))
        for line in lines
    ]
    headings = ("Mbit/s", "transfers, of a stage's step", *lines[0]["seconds"])
    caption = "Step time against the links' rate, by schedule."
    blocks = (_words(lines), table(headings, rows), Drawing("schedules", caption, _draw(lines)))
    return Section(TITLE, lab("schedules"), (SOURCE,), (_judged(lines),), blocks)
