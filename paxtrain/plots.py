"""Figures of a training run, drawn without a display and without pyplot's global state."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from paxtrain import metrics
from paxtrain.errors import UserError

_TRAIN, _VALIDATION, _SKIPPED, _RATE = "#2f6f9f", "#d9622b", "#b3261e", "#5c6670"


def smooth(values: Sequence[float], window: int) -> np.ndarray:
    """Exponential moving average [N] over about `window` values, without the pull towards zero at the start."""
    decay = 1 - 1 / max(window, 1)
    average, weight, result = 0.0, 0.0, []
    for value in values:
        average = decay * average + (1 - decay) * value
        weight = decay * weight + (1 - decay)
        result.append(average / weight)
    return np.array(result)


def _series(records: list[dict], name: str) -> tuple[np.ndarray, np.ndarray]:
    points = [(record["step"], record[name]) for record in records if record.get(name) is not None]
    steps, values = zip(*points, strict=True) if points else ((), ())
    return np.array(steps), np.array(values, dtype=float)


def _draw_losses(axes, records: list[dict]) -> None:
    steps, losses = _series(records, "loss")
    if steps.size:
        window = max(1, min(50, steps.size // 20))
        axes.plot(steps, losses, color=_TRAIN, alpha=0.28, linewidth=0.9)
        label = f"training (mean over about {window} steps)" if window > 1 else "training"
        axes.plot(steps, smooth(losses, window), color=_TRAIN, linewidth=1.9, label=label)
    steps, losses = _series(records, "validation_loss")
    if steps.size:
        axes.plot(steps, losses, color=_VALIDATION, linewidth=1.1, marker="o", markersize=5, label="validation")
        axes.annotate(
            f"{losses[-1]:.3f}",
            (steps[-1], losses[-1]),
            xytext=(0, 9),
            textcoords="offset points",
            ha="right",
            color=_VALIDATION,
            fontsize=9,
            fontweight="bold",
        )
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


def plot_losses(jsonl: str | pathlib.Path, png: str | pathlib.Path) -> None:
    """Draws the losses of a metrics.jsonl, with perplexity at the right and the learning rate below, into a PNG.

    Raises:
        UserError: the metrics cannot be read or hold no loss.
    """
    records = metrics.read(jsonl)
    if not any(record.get(name) is not None for record in records for name in ("loss", "validation_loss")):
        raise UserError(f"{jsonl} holds no loss yet; train for a step first")
    figure = Figure(figsize=(9, 5.6), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for axes in (top, bottom):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(True, color="#e6e8ea", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.margins(x=0.02)

    _draw_losses(top, records)
    top.set_ylabel("cross-entropy (nats per token)")
    top.legend(frameon=False, loc="upper right")
    # Limits are fixed before the second scale is derived from them; its exp overflows beyond 700.
    low, high = top.get_ylim()
    top.set_ylim(max(low, 0.0), min(high, 700.0))
    perplexity = top.secondary_yaxis("right", functions=(np.exp, lambda p: np.log(np.maximum(p, 1e-9))))
    perplexity.set_ylabel("perplexity")
    decades = (min(high, 700.0) - max(low, 0.0)) / math.log(10)
    perplexity.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 4 else (1,)))
    perplexity.yaxis.set_minor_locator(NullLocator())
    perplexity.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
    perplexity.spines["right"].set_visible(False)
    perplexity.tick_params(length=0)

    steps, rates = _series(records, "learning_rate")
    bottom.plot(steps, rates, color=_RATE, linewidth=1.4)
    bottom.set_ylim(bottom=0)
    bottom.set_ylabel("learning rate")
    bottom.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    bottom.yaxis.set_major_locator(MaxNLocator(2))
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlabel("optimizer step")
    figure.savefig(png)
