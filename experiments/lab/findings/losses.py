"""Validation losses of compressed runs beside a dense one, after equal steps and after equal time."""

import dataclasses
import math

import numpy as np
from matplotlib.figure import Figure

from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, factor, table
from paxtrain.profiling import canvas

NEAR = 1.01  # of the dense run's last loss
WORDS = """Validation losses do not depend on the links, so every kind was trained once, from the same state and on the
same samples, with one seed. **Time here is steps times the median seconds of a step**, not a clock. Losses are compared
after equal steps, and after the time at which the first run ends. "Sooner" is the factor by which a kind comes within
1% of dense's last loss in less time than dense does."""


def signed(x: float) -> str:
    """Return a difference of losses, such as +0.34%."""
    return f"{100 * x:+.2f}%"


@dataclasses.dataclass(frozen=True)
class Curve:
    """Validation losses [n] after given steps [n]."""

    steps: np.ndarray
    losses: np.ndarray

    @classmethod
    def of(cls, line: dict) -> "Curve":
        return cls(*np.array(line["validation"], float).T)

    @property
    def last(self) -> float:
        return float(self.losses[-1])

    def at(self, step: float) -> float:
        """Return the loss after a number of steps, which may be fractional."""
        return float(np.interp(step, self.steps, self.losses))

    def reaches(self, loss: float) -> float:
        """Return the steps after which the loss is first as low, or NaN if never."""
        below = np.flatnonzero(self.losses <= loss)
        if not below.size:
            return math.nan
        i = int(below[0])
        if i == 0:
            return float(self.steps[0])
        part = (self.losses[i - 1] - loss) / (self.losses[i - 1] - self.losses[i])
        return float(self.steps[i - 1] + part * (self.steps[i] - self.steps[i - 1]))


def _draw(curves: dict[str, Curve], times: dict[str, dict[str, float]], colors: dict[str, str]) -> Figure:
    figure = canvas.figure(12, 4.3)
    panels = figure.subplots(1, len(times), sharey=True, squeeze=False)[0]
    for axes, (links, seconds) in zip(panels, times.items()):
        canvas.style(axes)
        for kind, curve in curves.items():
            if kind not in seconds:
                continue
            wall, color = curve.steps[1:] * seconds[kind], colors.get(kind, figures.MUTED)
            axes.plot(wall, curve.losses[1:], color=color, linewidth=1.5, marker="o", markersize=3.5, label=kind)
        axes.set_title(f"communication {links}", **figures.TITLE)
        axes.set_xlabel("seconds of training")
        axes.set_xlim(left=0)
    panels[0].set_ylabel("validation loss, nats per token")
    shown = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels())}
    columns = -(-len(shown) // 2)
    figure.legend(shown.values(), shown, ncols=columns, loc="outside upper center", **figures.LEGEND)
    return figure


def _compared(curve: Curve, seconds: float, dense: Curve, dense_seconds: float, until: float) -> tuple[str, str]:
    """Return the loss against dense's after that time, and how much sooner it comes near dense's last loss."""
    near = NEAR * dense.last
    against = curve.at(until / seconds) / dense.at(until / dense_seconds) - 1
    sooner = dense.reaches(near) * dense_seconds / (curve.reaches(near) * seconds)
    return signed(against), "never" if math.isnan(sooner) else factor(sooner)


def blocks(
    curves: dict[str, Curve], times: dict[str, dict[str, float]], dense: str, colors: dict[str, str]
) -> list[str | Drawing]:
    """Return paragraphs, a table and a figure.

    Args:
        curves: by kind of compression; `dense` is the one that the others are compared with.
        times: median seconds of a step by kind, by the words for the links; may be empty, and lack kinds.
    """
    first = {
        links: min(curves[kind].steps[-1] * taken for kind, taken in each.items() if kind in curves)
        for links, each in times.items()
    }
    rows = []
    for kind, curve in curves.items():
        row = [kind, f"{curve.last:.4f}", "" if kind == dense else signed(curve.last / curves[dense].last - 1)]
        for links, each in times.items():
            if kind == dense or kind not in each:
                row += ["", ""]
            else:
                row += _compared(curve, each[kind], curves[dense], each[dense], first[links])
        rows.append(row)
    headings = ["", f"loss after {curves[dense].steps[-1]:.0f} steps", "against dense"]
    for links in times:
        headings += [f"{links}: against dense after {first[links]:.0f} s", "sooner"]
    found: list[str | Drawing] = [WORDS, table(headings, rows)]
    if times:
        caption = "Validation loss against time, at each share of communication."
        found.append(Drawing("losses", caption, _draw(curves, times, colors)))
    return found
