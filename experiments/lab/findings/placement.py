"""Gains of planned placements over host order, and their distance from the best measured placement."""

import dataclasses
import math
import pathlib

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.lab.findings.pairs import SOURCE, Pair, errors, grouped, pairs, short_names, spearman
from experiments.lab.laboratory import summary
from experiments.lab.page import figures
from experiments.lab.page.section import (
    Drawing,
    Section,
    Target,
    factor,
    lab,
    percent,
    rank,
    seconds,
    signed,
    span,
    table,
)
from experiments.lab.records import Records
from paxtrain.profiling import canvas

TITLE, ORDERS = "Planned placement", "schedules.jsonl"
SCENARIO, GAIN = "two_racks", 1.25
PLANNED, HOST_ORDER, WORST = "planned", "host order", "worst"
WORDS = """Host order is the placement of a run without a planner. "Worst" is the worst prediction of 500 random
placements. A cell has the planned step, its speed-up over host order and over the worst, and its time above the best
placement that was measured, of the few that were."""
_MARKS = {PLANNED: ("#2f6f9f", "D"), HOST_ORDER: ("#22272e", "o"), WORST: ("#c0392b", "X")}
FASTER = Target.at_least(
    f"Speed-up of the planned placement over host order on {SCENARIO}, the plan that is predicted fastest", GAIN, factor
)
BEST = Target.at_most(
    "Step time of the planned placement against the best measured one of its plan, the worst case", 0.03, signed
)
OF_ORDERS = Target.at_most("Step time of the planned one of all orders of four hosts against the best", 0.03, signed)


@dataclasses.dataclass(frozen=True)
class Placed:
    """The placements of a plan in a scenario, by the way they were chosen, and the seconds of all measured ones."""

    scenario: str
    plan: str
    by: dict[str, Pair]
    measured: tuple[float, ...]

    def over(self, how: str) -> float:
        """Return how much faster the planned placement is than another one."""
        return self.by[how].measured / self.by[PLANNED].measured

    @property
    def above_best(self) -> float:
        return self.by[PLANNED].measured / min(self.measured) - 1


def placed(found: list[Pair]) -> list[Placed]:
    """Return every scenario and plan whose planned placement, host order and worst placement are measured."""
    made = []
    for scenario, some in grouped(found).items():
        for plan in dict.fromkeys(pair.plan for pair in some):
            own = [pair for pair in some if pair.plan == plan]
            by = {how: pair for pair in own for how in pair.hows}
            if set(_MARKS) <= set(by):
                made.append(Placed(scenario, plan, by, tuple(pair.measured for pair in own)))
    return made


def _gain(found: list[Placed], short: dict[str, str]) -> Target:
    racks = [p for p in found if p.scenario == SCENARIO]
    if not racks:
        return FASTER
    chosen = min(racks, key=lambda p: p.by[PLANNED].predicted["simulator"])
    gains = [p.over(HOST_ORDER) for p in racks]
    enough = sum(gain >= GAIN for gain in gains)
    return FASTER.judged(
        chosen.over(HOST_ORDER),
        f"{short[chosen.plan]}; {factor(min(gains))} to {factor(max(gains))} over {len(racks)} plans, "
        f"{enough} of which gain as much",
    )


def _dots(axes: Axes, found: list[Placed], short: dict[str, str]) -> None:
    canvas.style(axes)
    for y, p in enumerate(found):
        axes.scatter(p.measured, [y] * len(p.measured), 22, figures.MUTED, linewidths=0, zorder=2)
        for how, (color, mark) in _MARKS.items():
            axes.scatter(
                p.by[how].measured,
                y,
                46,
                color,
                marker=mark,
                linewidths=0,
                zorder=3,
                alpha=0.9,
                label=how if y == 0 else None,
            )
        place = {"xytext": (9, 0), "textcoords": "offset points", "va": "center", "fontsize": 8, "color": figures.INK}
        axes.annotate(factor(p.over(HOST_ORDER)), (max(p.measured), y), **place)
    axes.set_yticks(range(len(found)), [short[p.plan] for p in found])
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_title(found[0].scenario, **figures.TITLE)


def _draw(found: list[Placed], short: dict[str, str]) -> Figure:
    scenarios = list(dict.fromkeys(p.scenario for p in found))
    lines = math.ceil(len(scenarios) / 2)
    most = max(sum(p.scenario == name for p in found) for name in scenarios)
    figure = canvas.figure(12, lines * (1.1 + 0.36 * most))
    times = [time for p in found for time in p.measured]
    panels = list(figure.subplots(lines, 2, sharex=True, squeeze=False).flat)
    for axes, name in zip(panels, scenarios):
        _dots(axes, [p for p in found if p.scenario == name], short)
        axes.set(xscale="log", xlim=(min(times) / 1.06, max(times) * 1.25))
        figures.plain_log(axes.xaxis)
        axes.tick_params(labelbottom=True)
    for axes in panels[len(scenarios) :]:
        axes.set_visible(False)
    figure.supxlabel("measured seconds of a step; the figure at the right: speed-up over host order", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=3, loc="outside upper right", **figures.LEGEND)
    return figure


# --- All orders of four hosts -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Orders:
    """All orders of the hosts of one pipeline, from the quickest to the slowest: [orders] seconds and their spreads.

    `rates` are the links' least and largest, Mbit/s.
    """

    measured: np.ndarray
    spread: np.ndarray
    predicted: np.ndarray
    planned: int | None
    rates: tuple[float, float]

    @property
    def above_best(self) -> float:
        return float(self.measured[self.planned] / self.measured[0] - 1)


def orders(folder: pathlib.Path) -> Orders | None:
    """Return all orders, or None until each of them has been measured."""
    records = Records(folder / ORDERS)
    if "orders done" not in records:
        return None
    lines = [line for line in records if "order" in line]
    times = [summary(line["seconds"]) for line in lines]
    rates = np.array(records["orders done"]["rates"])[~np.eye(len(lines[0]["order"]), dtype=bool)]
    sort = np.argsort([time["median"] for time in times])
    planned = [place for place, i in enumerate(sort) if lines[i]["planned"]]
    return Orders(
        np.array([times[i]["median"] for i in sort]),
        np.array([times[i]["spread"] for i in sort]),
        np.array([lines[i]["predicted"] for i in sort]),
        planned[0] if planned else None,
        (float(rates.min()), float(rates.max())),
    )


def _about(found: Orders) -> str:
    off = np.abs(errors(found.predicted, found.measured))
    if found.planned is None:
        where = "None of them is marked as the planned one."
    else:
        faster = int((found.measured < found.measured[found.planned]).sum())
        where = f"""The planned one is number {faster + 1}, {signed(found.above_best)} against the quickest; its
        spread is {percent(found.spread[found.planned] / found.measured[found.planned])}."""
    slowest = factor(found.measured[-1] / found.measured[0])
    return f"""All {len(found.measured)} orders of four hosts in one pipeline have been measured, on links of
    {found.rates[0]:.0f} to {found.rates[1]:.0f} Mbit/s, drawn at random. The slowest order takes {slowest} the time
    of the quickest. {where} Predictions of these orders, which the scores above leave out: MAPE
    {percent(float(off.mean()))}, rank correlation {rank(spearman(found.predicted, found.measured))}."""


def _table(found: list[Placed], short: dict[str, str]) -> str:
    scenarios = list(dict.fromkeys(p.scenario for p in found))
    cells: dict[str, dict[str, str]] = {}
    for p in found:
        step, better = seconds(p.by[PLANNED].measured), f"{factor(p.over(HOST_ORDER))}, {factor(p.over(WORST))}"
        cells.setdefault(short[p.plan], {})[p.scenario] = f"{step}, {better}, {signed(p.above_best)}"
    placements = {name: span(len(p.measured) for p in found if p.scenario == name) for name in scenarios}
    headings = ("plan", *(f"{name}, {placements[name]} placements" for name in scenarios))
    return table(headings, [(plan, *(by.get(name, "") for name in scenarios)) for plan, by in cells.items()])


def _placed_by(folder: pathlib.Path) -> list[str]:
    """Return a comparison of moving links under processes with moving processes."""
    said = []
    for line in Records(folder / SOURCE):
        if "placed_by" in line:
            order, moved = (summary(line["placed_by"][how]) for how in ("order", "links"))
            said.append(
                f"""The lab makes a placement by moving links under processes. The first planned one of {SCENARIO}
                was also made as training makes it, by the order of the devices in the mesh:
                {seconds(order["median"])} (spread {percent(order["spread"] / order["median"])}) against
                {seconds(moved["median"])} (spread {percent(moved["spread"] / moved["median"])}),
                {signed(moved["median"] / order["median"] - 1)}."""
            )
    return said


def section(folder: pathlib.Path) -> Section:
    """Return planned, host order, worst and measured best placements, and all orders of four hosts."""
    found, all_orders = placed(pairs(folder)), orders(folder)
    short = short_names([p.plan for p in found])
    best, of_orders = BEST, OF_ORDERS
    blocks: list[str | Drawing] = []
    if found:
        worst = max(found, key=lambda p: p.above_best)
        best = BEST.judged(worst.above_best, f"{short[worst.plan]} on {worst.scenario}; {len(found)} cases")
        caption = "Every measured placement of every plan; grey dots are random placements."
        drawing = Drawing("placements", caption, _draw(found, short))
        blocks = [WORDS, _table(found, short), drawing, *_placed_by(folder)]
    if all_orders:
        if all_orders.planned is not None:
            of_orders = OF_ORDERS.judged(all_orders.above_best)
        blocks.append(_about(all_orders))
    targets = (_gain(found, short), best, of_orders)
    return Section(TITLE, lab("placements,schedules"), (SOURCE, ORDERS), targets, tuple(blocks))
