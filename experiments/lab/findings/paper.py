"""CB, FE and SC one after the other in the papers' setting: what each gains, and why."""

import pathlib

import numpy as np

from experiments.lab.findings.gains import bound, captured, measured, speedup
from experiments.lab.laboratory import summary
from experiments.lab.measuring import paper as experiment
from experiments.lab.measuring.compression import paper_speedups
from experiments.lab.page.section import (
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

TITLE, SOURCE = "The papers' setting", "paper.jsonl"
DENSE = experiment.DENSE
STEPS = {"CB": DENSE, "CB+FE": "CB", experiment.SELECTIVE: "CB+FE"}  # each kind beside the one before it
_PARTS = dict(zip(STEPS, ("CB", "FE", "SC"), strict=True))
ADDS = Target(
    "In the papers' setting each of CB, FE and SC makes a step of 1F1B quicker, one after the other",
    "each by more than its spread, and than half a percent of a step",
)
_LEAST = 0.005  # share of a step below which a gain is chance


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


# --- Words ------------------------------------------------------------------------------------------------------------


def _setting(lines: list[dict]) -> str:
    split = experiment.programs("1f1b", "all")[DENSE]
    repeats = span(len(times) for line in lines for times in line["seconds"].values())
    chosen = ", ".join(f"{line['selected']} of {line['key']}" for line in lines)
    return f"""Eight hosts of two devices, mesh {"x".join(map(str, split.mesh))}, width {split.hidden},
    {split.candidate.micro_batches} micro-batches, as 8.3B parameters have them with tensor 8, pipe 4 and data 4. On
    links of {lines[0]["rate"]:.0f} Mbit/s communication takes {lines[0]["share"]:.0%} of a dense step of 1F1B, as the
    planner predicts for that setting on 200 Gbit/s. The planner's rule chooses the stages of SC: {chosen}. {repeats}
    repeats. The head is as long as a layer, of which a stage has one; there it is less than a tenth of a stage. "Takes
    off" is what CB, then FE, then SC takes off the step before it, as a share of a dense step; "its bytes" is what the
    bytes that it removes take."""


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
    on the other links; those that it leaves are hidden on GPUs, but not on CPUs. FE changes a table that is
    {percent(there.shares.embedding)} of the bytes. SC has the gradients over data, {percent(there.shares.data)}.
    {_planner()}"""


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
    blocks = (_setting(lines), _traffic(), *map(_times, lines), _reason(lines))
    return Section(TITLE, command, (SOURCE,), (target,), blocks)
