"""The cost of growth: the same work per host on two, four and eight hosts."""

import pathlib

import numpy as np

from experiments.lab.laboratory import summary
from experiments.lab.measuring import growth as experiment
from experiments.lab.page.section import Section, lab, listed, percent, seconds, signed, span, table
from experiments.lab.records import Records

TITLE, SOURCE, COMMAND = "Growth", "growth.jsonl", lab("growth,schedules,placements")


def _mesh(line: dict) -> str:
    return "x".join(map(str, line["mesh"]))


def _words(lines: list[dict]) -> str:
    layers = {_mesh({"mesh": split.mesh}): split.layers for n in experiment.SPLITS for split in experiment.splits(n)}
    grown = listed([f"{layers[_mesh(line)]} layers on {_mesh(line)}" for line in lines])
    hosts, repeats = [line["hosts"] for line in lines], span(len(line["seconds"]) for line in lines)
    return f"""Model and batch grow with the hosts ({grown}), so that every device keeps its layers and
    micro-batches. All links have {experiment.RATE:g} Mbit/s; {repeats} repeats. Efficiency is the step time on
    {hosts[0]} hosts over that on the given number of hosts. Tokens/s belong to different models."""


def section(folder: pathlib.Path) -> Section:
    """Return step time, tokens/s and efficiency by the number of hosts."""
    lines = sorted(
        (line for line in Records(folder / SOURCE) if "mesh" in line), key=lambda line: (line["hosts"], line["mesh"][0])
    )
    if not lines:
        return Section(TITLE, COMMAND, (SOURCE,))
    times = [summary(line["seconds"]) for line in lines]
    measured = np.array([time["median"] for time in times])
    predicted = np.array([line["predicted"] for line in lines])
    rows = [
        (
            f"{line['hosts']}",
            f"{line['mesh'][0]}",
            _mesh(line),
            seconds(time["median"]),
            percent(time["spread"] / time["median"]),
            seconds(line["predicted"]),
            signed(line["predicted"] / time["median"] - 1),
            percent(measured[0] / time["median"]),
            percent(predicted[0] / line["predicted"]),
            seconds(line["predicted_reduce"]),
            f"{line['tokens'] / time['median']:.0f}",
        )
        for line, time in zip(lines, times)
    ]
    headings = (
        "hosts",
        "data ranks",
        "mesh",
        "step",
        "spread",
        "predicted",
        "error",
        "efficiency",
        "predicted efficiency",
        "predicted reduction over data",
        "tokens/s",
    )
    return Section(TITLE, COMMAND, (SOURCE,), (), (_words(lines), table(headings, rows)))
