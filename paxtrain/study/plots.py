"""The figures of a study: the bytes that compression saves, the loss that it costs, and its errors."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from paxtrain.config import Config
from paxtrain.profiling import canvas
from paxtrain.run import plots
from paxtrain.study.measurements import CsvRow
from paxtrain.study.report import KINDS, VariantResult, by_run, differences

_COLORS = {
    "dense": "#22272e",
    "cb_naive": "#c0392b",
    "cb": "#2f6f9f",
    "cb_epilogue": "#3c9d8f",
    "cb_fe": "#8aa83a",
    "cb_fe_sc": "#d9822b",
    "everything": "#8e5aa8",
    "codec_backward": "#1b9e9e",
    "codec_forward": "#b5651d",
    "codec_data": "#d0568f",
    "codec_weights": "#7f8c1f",
    "codec_embedding": "#5c6670",
}
_SWEEP = "#8fb3cf"
_KIND_COLORS = dict(zip(KINDS, ("#5b8db8", "#d9822b", "#8aa83a", "#c0392b", "#8e5aa8", "#9aa3ab"), strict=True))
_LINKS = ("#2f6f9f", "#d9822b", "#3c9d8f", "#8e5aa8", "#c0392b", "#8aa83a", "#22272e")
_BAND = "#e9f2ea"
_TITLE = {"fontsize": 10, "loc": "left"}

ResultsByName = dict[str, list[VariantResult]]


def _signed(percent: float, _: float) -> str:
    """Return a tick's label with its sign."""
    return f"{percent:+g} %" if percent else "0 %"


def _color(name: str) -> str:
    """Return the color of a variant."""
    return _COLORS.get(name, _SWEEP)


def _ordered(runs: ResultsByName) -> ResultsByName:
    """Return the variants in order, those of the sweep last and by rank."""
    sweep = sorted((name for name in runs if name not in _COLORS), key=lambda name: int(name.rpartition("_")[2]))
    return {name: runs[name] for name in [*(name for name in _COLORS if name in runs), *sweep]}


def _points(runs: ResultsByName) -> dict[str, tuple[float, float]]:
    """Return the MB on all links per step of each variant, and the percentage by which its loss exceeds dense."""
    return {name: (group[0].total_bytes / 1e6, float(np.mean(differences(runs, name)))) for name, group in runs.items()}


def _loss_against_bytes(axes: Axes, runs: ResultsByName) -> None:
    """Draw the validation loss of each variant, relative to the dense one's, against its bytes.

    The scale is linear up to a percent, between whose lines most variants lie, and logarithmic from there on.
    """
    axes.axhspan(-1, 1, color=_BAND, zorder=0)
    axes.axhline(0, color=_COLORS["dense"], linewidth=0.9)
    points = _points(runs)
    sweep = [name for name in runs if name not in _COLORS]
    line = sorted(points[name] for name in ("cb", *sweep))
    axes.plot(*zip(*line), color=_SWEEP, linewidth=1.3, zorder=1, label="CB at other ranks" if sweep else None)
    for name, group in runs.items():
        size, mean = points[name]
        found = differences(runs, name)
        spread = [[mean - min(found)], [max(found) - mean]] if len(group) > 1 else None
        axes.errorbar(
            size,
            mean,
            spread,
            color=_color(name),
            label=None if name in sweep else group[0].label,
            marker="o",
            # CB without error feedback sends as many bytes as with it, and often ends at the same loss.
            markersize={"cb_naive": 13}.get(name, 6 if name in sweep else 8),
            markerfacecolor="none" if name == "cb_naive" else _color(name),
            capsize=3,
            linestyle="none",
            elinewidth=1.2,
            zorder=3,
        )
    axes.margins(0.12)
    axes.set_yscale("symlog", linthresh=1, linscale=1.5)
    low, high = axes.get_ylim()
    axes.set_yticks([y for y in (-30, -10, -3, -1, -0.5, 0, 0.5, 1, 3, 10, 30, 100) if low <= y <= high])
    axes.minorticks_off()
    axes.set_xlabel("MB on all links per step")
    axes.set_ylabel("validation loss against dense")
    axes.yaxis.set_major_formatter(_signed)
    axes.legend(frameon=False, fontsize=8, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _bytes_by_kind(axes: Axes, runs: ResultsByName) -> None:
    """Draw the bytes of each variant by kind."""
    labels = [group[0].label for group in runs.values()]
    left = np.zeros(len(runs))
    for kind, color in _KIND_COLORS.items():
        sent = np.array([group[0].bytes[kind] for group in runs.values()]) / 1e6
        axes.barh(labels, sent, left=left, color=color, height=0.7, label=KINDS[kind])
        left += sent
    for label, total in zip(labels, left, strict=True):
        axes.annotate(
            f"{total:.2f}", (total, label), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel("MB on all links per step")
    axes.legend(frameon=False, fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.45, 1.0))


def _overview(runs: ResultsByName) -> Figure:
    """Draw losses against bytes, and bytes by kind."""
    figure = canvas.figure(12, 5)
    left, right = figure.subplots(1, 2)
    for axes in (left, right):
        canvas.style(axes)
    _loss_against_bytes(left, runs)
    _bytes_by_kind(right, runs)
    return figure


def _losses(runs: ResultsByName) -> Figure:
    """Draw training losses and, below them, the distance of each validation loss from the dense run's."""
    figure = canvas.figure(9, 7)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    bottom.axhspan(-1, 1, color=_BAND, zorder=0)
    bottom.axhline(0, color=_COLORS["dense"], linewidth=0.9)
    dense = np.array([list(o.validation.values()) for o in runs["dense"]])
    for name in (name for name in _COLORS if name in runs):
        group, color = runs[name], _color(name)
        curve = np.mean([o.losses for o in group], axis=0)
        window = 2 * min(25, len(curve) // 20) + 1
        top.plot(
            range(1, len(curve) + 1), plots.smooth(curve, window), color=color, linewidth=1.4, label=group[0].label
        )
        steps = list(group[0].validation)
        validation = np.array([list(o.validation.values()) for o in group])
        top.plot(steps, validation.mean(0), color=color, linestyle="none", marker="o", markersize=4)
        if name != "dense":
            above = 100 * (validation / dense - 1)
            bottom.plot(steps, above.mean(0), color=color, linewidth=1.5, marker="o", markersize=4)
            if len(group) > 1:
                bottom.fill_between(steps, above.min(0), above.max(0), color=color, alpha=0.12, linewidth=0)
    for axes in (top, bottom):
        canvas.style(axes)
        axes.margins(x=0.01)
    top.set_ylabel("cross-entropy (nats per token)")
    lines = f"training (mean over {window} steps)" if window > 1 else "training"
    top.legend(frameon=False, title=f"lines: {lines}; dots: validation", alignment="left", ncols=2)
    bottom.set_ylabel("validation loss against dense")
    bottom.yaxis.set_major_formatter(_signed)
    bottom.xaxis.set_major_locator(MaxNLocator(integer=True))
    bottom.set_xlabel("optimizer step")
    return figure


def _rows(group: Sequence[VariantResult], direction: str) -> list[CsvRow]:
    """Return the error rows of a variant in one direction."""
    return [row for outcome in group for row in outcome.errors if row["direction"] == direction]


def _errors(runs: ResultsByName) -> Figure:
    """Draw relative errors over time, with a panel for each variant and direction and a line for each link."""
    panels = [
        (group, direction)
        for name, group in runs.items()
        for direction in ("backward", "forward")
        if name in ("cb_naive", "cb", "cb_epilogue", "everything") and _rows(group, direction)
    ]
    lines = math.ceil(len(panels) / 3)
    figure = canvas.figure(12, 3.3 * lines)
    grid = list(figure.subplots(lines, 3, sharex=True, sharey=True, squeeze=False).flat)
    for axes, (group, direction) in zip(grid, panels):
        canvas.style(axes)
        rows = _rows(group, direction)
        for link in sorted({row["link"] for row in rows}):
            own = [row for row in rows if row["link"] == link]
            arrow = f"stage {link + 1} to {link}" if direction == "backward" else f"stage {link} to {link + 1}"
            for column, style in (("relative_error", {"label": arrow}), ("weight_error", {"linestyle": (0, (2, 1.2))})):
                if column in own[0]:
                    steps = sorted({row["step"] for row in own})
                    means = [np.mean([row[column] for row in own if row["step"] == step]) for step in steps]
                    axes.semilogy(steps, means, color=_LINKS[link % len(_LINKS)], linewidth=1.4, **style)
        axes.set_title(f"{group[0].label}: {'gradients' if direction == 'backward' else 'activations'}", **_TITLE)
        axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        axes.tick_params(labelbottom=True)
        axes.set_xlabel("optimizer step")
        axes.legend(frameon=False, fontsize=8)
    for axes in grid[len(panels) :]:
        axes.set_visible(False)
    figure.supylabel("relative error (dashed: of the weights' gradient)", fontsize=10)
    return figure


def _spectra(runs: ResultsByName, rank: int) -> Figure:
    """Draw singular values of gradients in the dense run at a few steps."""
    rows = runs["dense"][0].spectra
    steps = sorted({row["step"] for row in rows})
    figure = canvas.figure(4 * len(steps), 6.4)
    grid = figure.subplots(2, len(steps), sharex="row", sharey=True, squeeze=False)
    for line, kind in zip(grid, ("activations", "weights")):
        for axes, step in zip(line, steps):
            canvas.style(axes)
            some = [row for row in rows if row["gradients_of"] == kind and row["step"] == step]
            for color, matrix in zip(_LINKS, dict.fromkeys(row["matrix"] for row in some)):
                values = [row["singular_value"] for row in some if row["matrix"] == matrix]
                axes.semilogy(range(1, len(values) + 1), values, color=color, linewidth=1.5, label=matrix)
            axes.axvline(rank, color="#9aa3ab", linewidth=1, linestyle=(0, (2, 2)))
            axes.set_ylim(1e-4, 1.3)
            axes.set_title(f"gradients of {kind}, step {step}", **_TITLE)
            axes.set_xlabel("number of the singular value")
        line[0].set_ylabel("over the largest one")
        line[0].legend(frameon=False, fontsize=8, loc="lower left")
    return figure


def _cosines(runs: ResultsByName, elements: int) -> Figure:
    """Draw histograms of the cosines and of the means of CB's messages."""
    figure = canvas.figure(12, 3.8)
    left, right = figure.subplots(1, 2)
    rows = [row for row in _rows(runs["cb"], "backward") if np.isfinite(row.get("cosine", np.nan))]
    chance = 2 / np.sqrt(elements)
    left.axvspan(-chance, chance, color=_BAND, zorder=0, label="95 % of random directions")
    for axes, column in ((left, "cosine"), (right, "change_mean")):
        canvas.style(axes)
        widest = max((abs(row[column]) for row in rows), default=1.0)
        for link in sorted({row["link"] for row in rows}):
            values = [row[column] for row in rows if row["link"] == link]
            style = {"color": _LINKS[link % len(_LINKS)], "label": f"stage {link + 1} to {link}"}
            axes.hist(values, np.linspace(-widest, widest, 42), histtype="step", linewidth=1.5, **style)
    largest = max((abs(row["error_mean"]) for row in rows), default=0.0)
    right.axvline(0, color=_COLORS["dense"], linewidth=1, label=f"errors: means below {largest:.1g}")
    left.set_xlabel("cosine of a message's error with the change of activations")
    left.set_ylabel("messages")
    right.set_xlabel("mean of the change of activations, over its root mean square")
    for axes in (left, right):
        axes.legend(frameon=False, fontsize=8, loc="upper left")
    return figure


def draw(config: Config, outcomes: list[VariantResult], out: pathlib.Path) -> dict[str, str]:
    """Write the study's figures as PNGs, and return their captions by file name.

    Args:
        config: configuration of the study.
        outcomes: results of all runs.
        out: folder to write to.
    """
    runs = _ordered(by_run(outcomes))
    elements = config.batch.micro_batch * config.model.sequence * config.model.hidden
    figures = {
        "bytes.png": (
            _overview(runs),
            "Bytes of each run on the wire, and its validation loss; the band is 1 % around dense.",
        ),
        "losses.png": (
            _losses(runs),
            "Losses of the runs, and the distance of each validation loss from the dense run's.",
        ),
        "errors.png": (
            _errors(runs),
            "Errors of compressed messages, by link; dashed: of the weights' gradients that a step computes from them.",
        ),
        "cosines.png": (
            _cosines(runs, elements),
            "Lazy error propagation assumes that errors are uncorrelated with the change of activations from one "
            "micro-batch to the next, or that means are near zero. Errors have none: LayerNorm's backward removes it.",
        ),
        "spectra.png": (
            _spectra(runs, config.compress.backward.rank),
            "Singular values of the gradients that would be compressed, in the dense run; dashed: the rank of CB.",
        ),
    }
    for name, (figure, _) in figures.items():
        figure.savefig(out / name)
    return {name: caption for name, (_, caption) in figures.items()}
