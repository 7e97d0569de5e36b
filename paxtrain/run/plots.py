"""Figures of training runs."""

import itertools
import math
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator

from paxtrain import files
from paxtrain.errors import UserError
from paxtrain.profiling import canvas
from paxtrain.run import metrics

_TRAIN, _SKIPPED, _RATE = "#2f6f9f", "#b3261e", "#5c6670"
_OTHERS = ("#d9622b", "#4f8a3c", "#8a5aa8", "#b8901f", "#2f9c95", "#c2578b")


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Return the centred moving mean of values [N] over a window of an odd number of values.

    Near the start the window shrinks on both sides, so that a steep fall stays steep. Near the end it shrinks on the
    right only, so that the curve does not end in the noise of its last value.
    """
    total = np.concatenate([[0.0], np.cumsum(values)])
    index = np.arange(len(values))
    left = np.minimum(index, window // 2)
    right = np.minimum(index[::-1], left)
    return (total[index + right + 1] - total[index - left]) / (left + right + 1)


def _series(records: list[metrics.MetricsLine], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, dtype=float)


def _draw_validation(axes: Axes, records: list[metrics.MetricsLine], name: str, color: str) -> None:
    steps, losses = _series(records, name)
    if not steps.size:
        return
    label = name.replace(metrics.VALIDATION, "validation").replace("/", ", ")
    axes.plot(steps, losses, color=color, linewidth=1.1, marker="o", markersize=5, label=label)
    axes.annotate(
        f"{losses[-1]:.3f}",
        (steps[-1], losses[-1]),
        xytext=(0, 9),
        textcoords="offset points",
        ha="right",
        color=color,
        fontsize=9,
        fontweight="bold",
    )


def _draw_losses(axes: Axes, records: list[metrics.MetricsLine]) -> None:
    steps, losses = _series(records, "loss")
    if steps.size:
        window = 2 * min(25, steps.size // 40) + 1
        axes.plot(steps, losses, color=_TRAIN, alpha=0.28, linewidth=0.9)
        label = f"training (mean over {window} steps)" if window > 1 else "training"
        marker = "o" if steps.size == 1 else None
        axes.plot(steps, smooth(losses, window), color=_TRAIN, linewidth=1.9, marker=marker, label=label)
    for name, color in zip(metrics.validation_names(records), itertools.cycle(_OTHERS)):
        _draw_validation(axes, records, name, color)
    skipped = [record["step"] for record in records if record.get("skipped")]
    if skipped:
        axes.plot(
            skipped,
            np.full(len(skipped), 0.02),
            transform=axes.get_xaxis_transform(),
            color=_SKIPPED,
            marker="x",
            markersize=6,
            markeredgewidth=1.6,
            linestyle="none",
            label=f"skipped, gradients not finite ({len(skipped)})",
        )


def _add_perplexity(axes: Axes) -> None:
    right = axes.secondary_yaxis("right", functions=(np.exp, lambda p: np.log(np.maximum(p, 1e-9))))
    low, high = axes.get_ylim()
    right.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high - low < 4 * math.log(10) else (1,)))
    right.yaxis.set_minor_locator(NullLocator())
    right.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}" if value < 1000 else f"{value:,.0f}")
    right.spines["right"].set_visible(False)
    right.tick_params(length=0)
    right.set_ylabel("perplexity")


def plot_losses(jsonl: str | pathlib.Path, png: str | pathlib.Path) -> None:
    """Draw the losses of a metrics.jsonl, with perplexity on the right and the learning rate below, into a PNG.

    Raises:
        UserError: The metrics cannot be read or have no loss.
    """
    records = metrics.read(jsonl)
    names = ["loss", *metrics.validation_names(records)]
    if not any(record.get(name) is not None for record in records for name in names):
        raise UserError(f"{jsonl} has no loss yet; train for a step first")
    page = canvas.figure(9, 5.6)
    top, bottom = page.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for axes in (top, bottom):
        canvas.style(axes)
        axes.margins(x=0.02)

    _draw_losses(top, records)
    top.set_ylabel("cross-entropy (nats per token)")
    top.legend(frameon=False, loc="upper right")
    top.set_ylim(bottom=max(top.get_ylim()[0], 0.0))
    if top.get_ylim()[1] < 100:  # perplexities of larger losses overflow
        _add_perplexity(top)

    steps, rates = _series(records, "learning_rate")
    if steps.size:
        peak = rates.max()
        bottom.plot(steps, rates, color=_RATE, linewidth=1.4)
        bottom.set_ylim(0, 1.1 * peak or 1)
        bottom.set_yticks([0, peak], ["0", np.format_float_scientific(peak, precision=2, trim="-", exp_digits=1)])
    bottom.set_ylabel("learning rate")
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    bottom.set_xlabel("optimizer step")
    with files.replacing(png) as new:
        page.savefig(new, format="png")


def plot_runs(runs: Sequence[str | pathlib.Path], png: str | pathlib.Path) -> None:
    """Draw the losses of several runs into a PNG, without the steep first tenth; each run is named by its folder.

    Args:
        runs: Folders of the runs.
        png: File to write.

    Raises:
        UserError: The metrics of a run cannot be read, or have fewer than two steps' losses.
    """
    page = canvas.figure(9, 5)
    axes = page.subplots()
    canvas.style(axes)
    axes.margins(x=0.02)
    highest, lowest = -math.inf, math.inf
    for folder, color in zip(map(pathlib.Path, runs), itertools.cycle((_TRAIN, *_OTHERS))):
        records = metrics.read(folder / metrics.FILE)
        steps, losses = _series(records, "loss")
        if steps.size < 2:
            raise UserError(f"{folder / metrics.FILE} has fewer than two steps' losses; train for longer first")
        drawn = smooth(losses, 2 * min(25, steps.size // 40) + 1)
        label = folder.name
        at, validation = _series(records, "validation_loss")
        if at.size:
            label += f" (validation {validation[-1]:.3f})"
            axes.plot(at, validation, color=color, linestyle="none", marker="o", markersize=4)
        axes.plot(steps, drawn, color=color, linewidth=1.5, label=label)
        highest, lowest = max(highest, drawn[steps.size // 10]), min(lowest, drawn.min(), *validation)
    axes.set_ylim(lowest - 0.05 * (highest - lowest or 1.0), highest)
    axes.legend(frameon=False, loc="upper right")
    axes.set_ylabel("cross-entropy (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.set_xlabel("optimizer step")
    page.savefig(png)
