"""Shared parts of the lab's figures: colors, axes, stacked bars."""

from collections.abc import Iterable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator, NullLocator

COLORS = ("#2f6f9f", "#d9622b", "#3c9d8f", "#8e5aa8", "#c0392b", "#8aa83a", "#5c6670")
INK, MUTED, BAND = "#22272e", "#9aa3ab", "#e9f2ea"
TITLE = {"fontsize": 10, "loc": "left"}
LEGEND = {"frameon": False, "fontsize": 9}


def plain_log(axis: Axis, ticks: Sequence[float] | None = None) -> None:
    """Label a logarithmic axis with plain numbers, at the given ticks or at round ones."""
    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7) if high < 10 * low else (1, 2, 5)))
    if ticks is not None:
        axis.set_ticks(list(ticks))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def from_zero(axes: Axes, *values: Iterable[float]) -> None:
    """Show an axis from 0 to somewhat above the largest value."""
    axes.set_ylim(0, 1.08 * max(value for some in values for value in some))


def bars_of_parts(axes: Axes, parts: dict[str, dict[str, float]], colors: dict[str, str]) -> None:
    """Draw horizontal stacked bars in the order of `parts`: label -> part -> length, with totals at their ends."""
    left = np.zeros(len(parts))
    for part, color in colors.items():
        width = np.array([values.get(part, 0.0) for values in parts.values()])
        axes.barh(list(parts), width, left=left, color=color, height=0.7, label=part)
        left += width
    for label, total in zip(parts, left):
        place = {"xytext": (4, 0), "textcoords": "offset points", "va": "center", "fontsize": 8}
        axes.annotate(f"{total:.3g}", (total, label), **place)
    axes.set_ylim(len(parts) - 0.5, -0.5)
    axes.margins(x=0.12)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
