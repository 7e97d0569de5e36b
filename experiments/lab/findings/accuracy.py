"""Predicted beside measured step times, by the simulator and by the closed forms of Pipette and AMP."""

import math
import pathlib
from collections.abc import Iterable, Iterator

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.findings.pairs import FORMS, SOURCE, Pair, Scores, errors, grouped, pairs, score, short_names
from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, Section, Target, lab, listed, percent, rank, signed, span, table
from paxtrain.profiling import canvas

TITLE = "Predicted against measured step time"
OURS = next(iter(FORMS))
NAMES = [name.removesuffix("'s form") for name in FORMS]
COUNT = Target.at_least("Different (plan, placement) pairs predicted and measured", 40, lambda x: f"{x:.0f}")
MAPE = Target.at_most("Predicted step time, mean error over all pairs (MAPE)", 0.08)
POOLED = Target.at_least("Rank correlation (Spearman), all pairs together", 0.95, rank)
INSIDE = Target.at_least("Order within a scenario of pairs whose times differ (Somers' D), the lowest", 0.95, rank)
REGRET = Target.at_most("Top-1 regret within a scenario, the largest", 0.03)
# Links of sites and of hosts that share their network: what is wanted of each, and the worse one is judged.
SLOW = ("two_sites", "ten_gbe")
_OF_SLOW = f"on {' and '.join(SLOW)}, the worse of both"
SLOW_MAPE = Target.at_most(f"Predicted step time {_OF_SLOW}, mean error (MAPE)", 0.05)
SLOW_INSIDE = Target.at_least(f"Order of pairs whose times differ (Somers' D) {_OF_SLOW}", 0.95, rank)
SLOW_REGRET = Target.at_most(f"Top-1 regret {_OF_SLOW}", 0.03)


class Form:
    """Accuracy of one form's predictions: over all pairs together, and within each scenario."""

    def __init__(self, found: list[Pair], form: str) -> None:
        self.pooled = score(found, form)
        self.each: dict[str, Scores] = {name: score(some, form) for name, some in grouped(found).items()}
        self.regrets = [s.regret for s in self.each.values()]
        # Of the scenarios in which there is something to rank.
        self.orders = _known(s.somers_d for s in self.each.values())
        self.ranks = _known(s.spearman for s in self.each.values())
        self.mean_regret, self.mean_order = float(np.mean(self.regrets)), float(np.mean(self.orders))


def _known(values: Iterable[float]) -> list[float]:
    """Return the values that are known; NaN alone if none is."""
    return [value for value in values if not math.isnan(value)] or [math.nan]


# What the forms are compared by: the value, whether more of it is better, and its words.
_MEASURES = {
    "MAPE": (lambda form: form.pooled.mape, False, percent),
    "Order of pairs whose times differ (Somers' D), mean within scenarios": (lambda form: form.mean_order, True, rank),
    "Top-1 regret, mean over scenarios": (lambda form: form.mean_regret, False, percent),
}
BETTER = tuple(
    Target(f"{what}, beside Pipette's and AMP's forms on the same profile", "better than both") for what in _MEASURES
)
TARGETS = (COUNT, MAPE, POOLED, INSIDE, REGRET, SLOW_MAPE, SLOW_INSIDE, SLOW_REGRET, *BETTER)


def _better(forms: dict[str, Form]) -> Iterator[Target]:
    for target, (value, more, show) in zip(BETTER, _MEASURES.values()):
        values = {name: value(form) for name, form in forms.items()}
        ours, *others = values.values()
        seen = f"{show(ours)}; " + ", ".join(f"{name} {show(x)}" for name, x in values.items() if name != OURS)
        if any(map(math.isnan, values.values())):
            yield target.said(seen, None)
        else:
            yield target.said(seen, ours > max(others) if more else ours < min(others))


def _targets(found: list[Pair], forms: dict[str, Form]) -> tuple[Target, ...]:
    ours = forms[OURS]
    worst = [name for name, scores in ours.each.items() if scores.somers_d == min(ours.orders)]
    most = max(ours.each, key=lambda name: ours.each[name].regret)
    return (
        COUNT.judged(len(found)),
        MAPE.judged(ours.pooled.mape),
        POOLED.judged(ours.pooled.spearman),
        INSIDE.judged(min(ours.orders), listed(worst)),
        REGRET.judged(max(ours.regrets), most),
        *_slow(ours),
        *_better(forms),
    )


def _slow(ours: Form) -> Iterator[Target]:
    """Yield the targets of SLOW, which stay open until both scenarios have been measured."""
    measures = (
        (SLOW_MAPE, lambda s: s.mape, ""),
        (SLOW_INSIDE, lambda s: s.somers_d, "; Spearman's of all pairs {spearman}"),
        (SLOW_REGRET, lambda s: s.regret, ""),
    )
    scores = {name: ours.each[name] for name in SLOW if name in ours.each}
    for target, value, more in measures:
        if len(scores) < len(SLOW):
            yield target
            continue
        values = [value(s) for s in scores.values()]
        spearman = listed([rank(s.spearman) for s in scores.values()])
        each = listed([f"{name} {target.show(x)}" for name, x in zip(scores, values)])
        worst = np.min(values) if target.least else np.max(values)  # NaN of one leaves it open
        yield target.judged(float(worst), each + more.format(spearman=spearman))


def _draw(found: list[Pair], forms: dict[str, Form]) -> Figure:
    figure = canvas.figure(12, 4.5)
    panels = figure.subplots(1, len(FORMS), sharex=True, sharey=True)
    times = np.array([[pair.measured, *pair.predicted.values()] for pair in found])
    line = np.array([times.min() / 1.15, times.max() * 1.15])
    for axes, (name, form) in zip(panels, forms.items()):
        canvas.style(axes)
        band = line * (1 - MAPE.limit), line * (1 + MAPE.limit)
        axes.fill_between(line, *band, color=figures.BAND, zorder=0, label=f"within {MAPE.limit:.0%}")
        axes.plot(line, line, color=figures.INK, linewidth=0.9, zorder=1)
        for color, (scenario, some) in zip(figures.COLORS, grouped(found).items()):
            x, y = [p.measured for p in some], [p.predicted[name] for p in some]
            axes.scatter(x, y, 18, color, linewidths=0, alpha=0.75, zorder=3, label=scenario)
        axes.set(xscale="log", yscale="log", xlim=line, ylim=line, aspect="equal")
        for axis in (axes.xaxis, axes.yaxis):
            figures.plain_log(axis)
        axes.set_title(f"{name}: MAPE {percent(form.pooled.mape)}", **figures.TITLE)
        axes.set_xlabel("measured seconds of a step")
    panels[0].set_ylabel("predicted seconds")
    panels[0].legend(**figures.LEGEND, loc="upper left")
    return figure


def _scores(forms: dict[str, Form]) -> str:
    rows = [
        (
            name,
            percent(f.pooled.mape),
            percent(f.pooled.median),
            rank(f.pooled.spearman),
            rank(float(np.mean(f.ranks))),
            rank(min(f.ranks)),
            rank(f.mean_order),
            rank(min(f.orders)),
            percent(f.mean_regret),
            percent(max(f.regrets)),
        )
        for name, f in forms.items()
    ]
    headings = (
        "",
        "MAPE",
        "median error",
        "Spearman, all pairs",
        "Spearman within a scenario, mean",
        "lowest",
        "Somers' D within a scenario, mean",
        "lowest",
        "top-1 regret, mean",
        "worst",
    )
    return table(headings, rows)


def _scenarios(found: list[Pair], forms: dict[str, Form]) -> str:
    rows = []
    for scenario, some in grouped(found).items():
        each = [form.each[scenario] for form in forms.values()]
        row = [scenario, f"{len(some)}", *(percent(s.mape) for s in each), percent(each[0].compared)]
        row += [*(rank(s.somers_d) for s in each), *(rank(s.spearman) for s in each)]
        rows.append([*row, *(percent(s.regret) for s in each)])
    mape, order, ranks, regrets = (
        [f"{what}, {name}" for name in NAMES] for what in ("MAPE", "Somers' D", "Spearman", "regret")
    )
    return table(["scenario", "pairs", *mape, "comparisons, of all", *order, *ranks, *regrets], rows)


def _plans(found: list[Pair]) -> str:
    """Return the mean error of each plan, and the largest of a pair."""
    said = []
    for plan, short in short_names([pair.plan for pair in found]).items():
        some = [pair for pair in found if pair.plan == plan]
        off = errors(np.array([pair.predicted[OURS] for pair in some]), np.array([pair.measured for pair in some]))
        said.append(f"{signed(float(off.mean()))} for {short} (worst {signed(off[np.abs(off).argmax()])})")
    return f"""Errors of the {OURS} by plan, predicted over measured, minus 1, in the mean: {listed(said)}. Pipette's
    and AMP's forms do not model the schedule, the embedding's exchange or the optimizer."""


def _repeats(found: list[Pair]) -> str:
    spreads = [pair.spread for pair in found]
    return f"""A pair is a plan with a placement. Its time is the median of {span(pair.repeats for pair in found)}
    repeats, with a spread of {percent(float(np.median(spreads)))} for the middle pair and {percent(max(spreads))} for
    the worst."""


def section(folder: pathlib.Path) -> Section:
    """Return the scores of all forms: pooled, by scenario and by plan."""
    if not (found := pairs(folder)):
        return Section(TITLE, lab("placements"), (SOURCE,), TARGETS)
    forms = {form: Form(found, form) for form in FORMS}
    blocks = (
        _repeats(found),
        """Top-1 regret is the measured time of the pair with the best prediction over the best measured time, minus
        1, within a scenario. **A rank correlation over all pairs together flatters the model**, because nobody chooses
        among scenarios. Somers' D compares two pairs only if their medians differ by more than both spreads together.
        It is the share of these comparisons whose order is predicted, less the share of those predicted the other way
        round.""",
        _scores(forms),
        _scenarios(found, forms),
        Drawing("predicted", "Predicted against measured step times of all pairs, by scenario.", _draw(found, forms)),
        _plans(found),
    )
    return Section(TITLE, lab("placements"), (SOURCE,), _targets(found, forms), blocks)
