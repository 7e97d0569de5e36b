"""The cost of growth: the same work per host on two, four and eight hosts."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from paxtrain import plots
from tests.cluster import figures
from tests.cluster.laboratory import summary
from tests.cluster.records import Records
from tests.cluster.section import Drawing, Section, lab, percent, seconds, signed, span, table

TITLE, SOURCE = "Growth", "growth.jsonl"


def _efficiency(rates: np.ndarray, hosts: np.ndarray) -> np.ndarray:
    """Tokens/s per host, of what they are on the fewest hosts."""
    return rates / hosts / (rates[0] / hosts[0])


def _draw(hosts: np.ndarray, throughput: dict[str, np.ndarray]) -> Figure:
    figure = plots.figure(9, 3.6)
    left, right = figure.subplots(1, 2)
    styles = {"measured": {"color": figures.INK, "marker": "o"},
              "predicted": {"color": figures.COLORS[1], "marker": ".", "linestyle": (0, (4, 2))}}  # fmt: skip
    efficiency = {name: 100 * _efficiency(rates, hosts) for name, rates in throughput.items()}
    ideal = throughput["measured"][0] * hosts / hosts[0]
    for name, rates in throughput.items():
        left.plot(hosts, rates, **styles[name], label=name)
        right.plot(hosts, efficiency[name], **styles[name])
    left.plot(hosts, ideal, color=figures.MUTED, linewidth=1, label="no cost")
    for axes in (left, right):
        plots.style(axes)
        axes.set_xticks(hosts)
        axes.set_xlabel("hosts")
    figures.from_zero(left, ideal, *throughput.values())
    figures.from_zero(right, *efficiency.values())
    left.set_ylabel("tokens/s")
    right.set_ylabel(f"% of the tokens/s per host on {hosts[0]}")
    left.legend(**figures.LEGEND)
    return figure


def section(folder: pathlib.Path) -> Section:
    """Step time, tokens/s and efficiency by the number of hosts."""
    lines = sorted((line for line in Records(folder / SOURCE) if "hosts" in line), key=lambda line: line["hosts"])
    if not lines:
        return Section(TITLE, lab("growth,schedules,placements"), (SOURCE,))
    times = [summary(line["seconds"]) for line in lines]
    hosts, tokens = (np.array([line[name] for line in lines]) for name in ("hosts", "tokens"))
    rates = {
        "measured": tokens / np.array([time["median"] for time in times]),
        "predicted": tokens / np.array([line["predicted"] for line in lines]),
    }
    measured, predicted = (_efficiency(rate, hosts) for rate in rates.values())
    rows = [
        (f"{line['hosts']}", seconds(time["median"]), percent(time["spread"] / time["median"]),
         seconds(line["predicted"]), signed(line["predicted"] / time["median"] - 1), f"{rates['measured'][i]:.0f}",
         percent(measured[i]), percent(predicted[i]), seconds(line["predicted_reduce"]))
        for i, (line, time) in enumerate(zip(lines, times))
    ]  # fmt: skip
    headings = ("hosts", "step", "spread", "predicted", "error", "tokens/s", "efficiency", "predicted efficiency",
                "predicted reduction over data")  # fmt: skip
    blocks = [
        f"""Every host keeps its work: two stages, and ever more data ranks. So without communication a step would take
        the same time on any number of hosts. Efficiency is tokens/s per host over that on {hosts[0]} hosts. Medians of
        {span(len(line["seconds"]) for line in lines)} repeats.""",
        table(headings, rows),
    ]
    if len(lines) > 1:
        blocks.append(Drawing("growth", "Tokens/s and efficiency by the number of hosts.", _draw(hosts, rates)))
    return Section(TITLE, lab("growth,schedules,placements"), (SOURCE,), (), tuple(blocks))
