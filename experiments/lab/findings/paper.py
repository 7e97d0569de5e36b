"""CB, FE and SC one after the other in the papers' setting: what each gains, and why."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.findings.gains import bound, captured, measured, speedup
from experiments.lab.laboratory import summary
from experiments.lab.measuring import paper as experiment
from experiments.lab.measuring.compression import paper_speedups
from experiments.lab.page import figures
from experiments.lab.page.section import (
    Drawing,
    Section,
    Target,
    factor,
    lab,
    listed,
    percent,
    seconds,
    signed,
    span,
    table,
)
from experiments.lab.records import Records
from paxtrain.run import plots

TITLE, SOURCE = "The papers' setting", "paper.jsonl"
DENSE = experiment.DENSE
STEPS = {"CB": DENSE, "CB+FE": "CB", experiment.SELECTIVE: "CB+FE"}  # each kind beside the one before it
_PARTS = dict(zip(STEPS, ("CB", "FE", "SC"), strict=True))
ADDS = Target(
    "In the papers' setting each of CB, FE and SC makes a step of 1F1B quicker, one after the other",
    "each by more than its spread, and than half a percent of a step",
)
_LEAST = 0.005  # share of a step below which a gain is chance
_COLORS = dict(zip(experiment.KINDS, (figures.INK, "#3c9d8f", "#8aa83a", "#d9822b"), strict=True))


def gains(line: dict) -> dict[str, tuple[float, float]]:
    """Return what each of CB, FE and SC takes off a step beside the kind before it, as a share of a dense step.

    Returns:
        The difference of medians, and the spread of the differences of single repeats, which are taken in turn.
    """
    times = {kind: np.array(found) for kind, found in line["seconds"].items()}
    dense = float(np.median(times[DENSE]))
    return {
        _PARTS[kind]: (
            float(np.median(times[before]) - np.median(times[kind])) / dense,
            summary(((times[before] - times[kind]) / dense).tolist())["spread"],
        )
        for kind, before in STEPS.items()
    }


def confirmed(gain: float, spread: float) -> bool:
    """Return whether a gain is more than its spread, and than chance."""
    return gain > max(spread, _LEAST)


def _draw(lines: list[dict]) -> Figure:
    figure = plots.figure(9, 3.4)
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, line in zip(panels, lines):
        plots.style(axes)
        found = [summary(times) for times in line["seconds"].values()]
        at, heights = range(len(found)), [one["median"] for one in found]
        colors = [_COLORS[kind] for kind in line["seconds"]]
        axes.bar(at, heights, 0.6, yerr=[one["spread"] for one in found], color=colors, capsize=3)
        axes.axhline(summary(line["unlimited"])["median"], color=figures.MUTED, linestyle="--", linewidth=1.2)
        axes.set_xticks(list(at), list(line["seconds"]), fontsize=8)
        axes.set_title(f"{line['key']}; dashed: dense without limits of links", **figures.TITLE)
    panels[0].set_ylabel("seconds of a step")
    return figure


# --- Words ------------------------------------------------------------------------------------------------------------


def _setting(lines: list[dict]) -> str:
    split = experiment.programs("1f1b", "all")[DENSE]
    repeats = span(len(times) for line in lines for times in line["seconds"].values())
    chosen = ", ".join(f"{line['selected']} of {line['key']}" for line in lines)
    return f"""Eight hosts of two devices, mesh {"x".join(map(str, split.mesh))}, width {split.hidden},
    {split.candidate.micro_batches} micro-batches, as 8.3B parameters have them with tensor 8, pipe 4 and data 4. The
    links of {lines[0]["rate"]:.0f} Mbit/s are set so that communication takes {lines[0]["share"]:.0%} of a dense step
    of 1F1B, as the planner predicts for that setting on 200 Gbit/s. The planner's rule chooses the stages of SC:
    {chosen}. {repeats} repeats; losses are not compared. The head is as long as a layer, of which a stage has one;
    there it is less than a tenth of a stage. "Takes off" is what CB, then FE, then SC takes off the step before it, as
    a share of a dense step; "its bytes" is what the bytes that it removes take."""


def _traffic() -> str:
    rows = []
    for where, (sent, rest) in experiment.both().items():
        size = sum(sent)
        whole = f"{size / 1e9:.2f} GB" if size > 1e8 else f"{size / 1e6:.2f} MB"
        rows.append((where, whole, *map(percent, sent.shares), *map(percent, rest)))
    headings = ("", "a device sends in a step", "gradients between stages", "embedding", "gradients over data")
    return table((*headings, "rank leaves of a message", "of a layer's gradients"), rows)


def _times(line: dict) -> str:
    dense, free, found, rows = line["seconds"][DENSE], line["unlimited"], gains(line), []
    for kind, times in line["seconds"].items():
        added = ("", "", "", "")
        if kind != DENSE:
            (gain, spread), most = found[_PARTS[kind]], line["most"][_PARTS[kind]] / float(np.median(dense))
            both = speedup(dense, times).as_factor, captured(dense, times, free).as_share
            added = (*both, f"{percent(gain)} ± {percent(spread)}", percent(most))
        rows.append(
            (
                kind,
                measured(times),
                *added,
                seconds(line["predicted"][kind]),
                signed(line["predicted"][kind] / summary(times)["median"] - 1),
                f"{sum(line['wire'][kind].values()) / 1e6:.1f}" if "wire" in line else "",
            )
        )
    rows.append(("dense, links without limits", measured(free), bound(dense, free).as_factor, "100%", *[""] * 5))
    headings = ("step", "speed-up", "captured", "takes off", "its bytes", "predicted", "error", "MB in all")
    return table((line["key"], *headings), rows)


def _reason(lines: list[dict]) -> str:
    """Return why the parts differ, from the bytes."""
    there, _ = experiment.both()["there"]
    candidate = experiment.programs("1f1b", "all")[DENSE].candidate
    m, p = candidate.micro_batches, candidate.pipe
    return f"""The reason is in the bytes. CB compresses {p - 1} of {m} gradients that the first stage gets, and fewer
    on the other links. FE changes a table that is
    {percent(there.shares.embedding)} of the bytes. SC has the gradients over data, {percent(there.shares.data)}. On
    CPUs the gradients that CB leaves as they are are not hidden; on GPUs they are. {_planner()}"""


def _planner() -> str:
    said = listed([f"{factor(gain)} of {kind}" for kind, gain in paper_speedups().items()])
    return f"For 8.3B parameters on GPUs, whose transfers overlap, the planner predicts speed-ups of {said}."


def section(folder: pathlib.Path) -> Section:
    """Return the traffic of both settings, step times, and what each part gains with the reason."""
    records = Records(folder / SOURCE)
    lines = [records[schedule] for schedule in experiment.SCHEDULES if schedule in records]
    command = lab("paper")
    if not lines:
        return Section(TITLE, command, (SOURCE,), (ADDS,))
    target, first = ADDS, lines[0]
    if first["key"] == experiment.SCHEDULES[0]:
        found = gains(first)
        said = ", ".join(f"{part} {signed(gain)} ± {percent(spread)}" for part, (gain, spread) in found.items())
        met = all(confirmed(gain, spread) for gain, spread in found.values())
        target = ADDS.said(f"of a dense step: {said}", met)
    blocks: list[str | Drawing] = [_setting(lines), _traffic()]
    for line in lines:
        blocks.append(_times(line))
    blocks += [
        _reason(lines),
        Drawing("paper", "Step time of each kind, by schedule.", _draw(lines)),
    ]
    return Section(TITLE, command, (SOURCE,), (target,), tuple(blocks))
