"""The cost of growth: the same work per host on two, four and eight hosts."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.laboratory import summary
from experiments.lab.measuring import growth as experiment
from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, Section, lab, listed, percent, seconds, signed, span, table
from experiments.lab.records import Records
from paxtrain.run import plots

TITLE, SOURCE, COMMAND = "Growth", "growth.jsonl", lab("growth,schedules,placements")


def _draw(hosts: np.ndarray, step: dict[str, np.ndarray]) -> Figure:
    figure = plots.figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    styles = {
        "measured": {"color": figures.INK, "marker": "o"},
        "predicted": {"color": figures.COLORS[1], "marker": ".", "linestyle": (0, (4, 2))},
    }
    for name, times in step.items():
        left.plot(hosts, times, **styles[name], label=name)
        right.plot(hosts, 100 * times[0] / times, **styles[name])
    for axes in (left, right):
        plots.style(axes)
        axes.set_xticks(hosts)
        axes.set_xlabel("hosts")
    figures.from_zero(left, *step.values())
    figures.from_zero(right, *(100 * times[0] / times for times in step.values()))
    left.set_ylabel("seconds of a step")
    right.set_ylabel("efficiency, %")
    left.legend(**figures.LEGEND, loc="lower right")
    return figure


def _mesh(line: dict) -> str:
    return "x".join(map(str, line["mesh"]))


def _words(lines: list[dict]) -> str:
    layers = {_mesh({"mesh": split.mesh}): split.layers for n in experiment.SPLITS for split in experiment.splits(n)}
    grown = listed([f"{layers[_mesh(line)]} layers on {_mesh(line)}" for line in lines])
    hosts, repeats = [line["hosts"] for line in lines], span(len(line["seconds"]) for line in lines)
    return f"""Model and batch grow with the hosts ({grown}), so that every device keeps its layers and
    micro-batches. The additional time of a step over that on {hosts[0]} hosts is the cost of growth: communication,
    and the pipeline's bubble if there are more stages. Efficiency is the step time on {hosts[0]} hosts over that on
    the given number of hosts; tokens/s belong to different models. All links have {experiment.RATE:g} Mbit/s. Medians
    of {repeats} repeats."""


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
    blocks: list[str | Drawing] = [
        _words(lines),
        table(headings, rows),
    ]
    first = [i for i, line in enumerate(lines) if line["hosts"] not in [other["hosts"] for other in lines[:i]]]
    if len(first) > 1:  # one mesh of each size: that with the fewest data ranks
        hosts = np.array([lines[i]["hosts"] for i in first])
        drawing = _draw(hosts, {"measured": measured[first], "predicted": predicted[first]})
        blocks.append(Drawing("growth", "Step time and efficiency by the number of hosts.", drawing))
    return Section(TITLE, COMMAND, (SOURCE,), (), tuple(blocks))
