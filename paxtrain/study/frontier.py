"""The frontier: the loss of every codec of the library against its bytes, one axis of the mesh at a time, over seeds.

`python -m paxtrain.study --frontier` writes frontier.csv, frontier.png and frontier.md. A codec's bytes are those of
its axis, as a share of what that traffic is without one.
"""

import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from paxtrain.config import Config
from paxtrain.config.options import CodecOptions
from paxtrain.run import plots
from paxtrain.study.report import VariantResult, by_run, differences, markdown
from paxtrain.study.variants import Variant, bare

PAGE = "frontier.md"
DENSE = "dense"


class Point(NamedTuple):
    """A codec of the frontier.

    Attributes:
        label: name in the table and in the picture.
        codec: name of the codec; "lowrank" takes `rank`.
        options: its options.
        rank: rank of low rank; 0 for other codecs.
    """

    label: str
    codec: str
    options: Mapping[str, Any] = {}
    rank: int = 0


POINTS = (
    Point("int8", "int8"),
    Point("fp8 e4m3", "fp8"),
    Point("fp8 e5m2", "fp8", {"format": "e5m2"}),
    Point("int4", "int4"),
    Point("int4 rotated", "int4", {"rotate": True}),
    Point("int4 + rank 2", "remainder", {"rank": 2}),
    Point("sign", "sign"),
    Point("top 5%", "topk", {"share": 0.05}),
    Point("rank 16", "lowrank", rank=16),
    Point("rank 4", "lowrank", rank=4),
)
# The kinds of probe.BYTES that a codec takes over, by axis.
AXES = {"between": ("backward",), "data": ("reduce-scatter", "all-reduce")}
WORDS = {"between": "gradients between stages", "data": "gradients over data"}


CODECS = tuple(dict.fromkeys(point.codec for point in POINTS))


def variants(config: Config, axes: Sequence[str] = tuple(AXES), codecs: Sequence[str] = CODECS) -> list[Variant]:
    """Return dense training, and each point of some codecs on each of some axes.

    Args:
        config: configuration of the study.
        axes: names in AXES.
        codecs: names in CODECS.
    """
    # Compression over data from the first step on, so that each variant is one program.
    c = dataclasses.replace(bare(config.compress), data_start=0.0, embedding="fused")
    found = [Variant(DENSE, DENSE, dataclasses.replace(config, compress=c))]
    for axis in axes:
        place = {"between": "backward", "data": "data"}[axis]
        for point in (point for point in POINTS if point.codec in codecs):
            changes: dict[str, Any] = {place: "all"}
            if point.rank:
                changes |= {f"{place}_rank": point.rank, "data_rank_min": 1}
            else:
                changes |= {f"{place}_codec": point.codec, f"{place}_options": CodecOptions(point.options)}
            compress = dataclasses.replace(c, **changes)
            name = f"{axis}: {point.label}"
            found.append(Variant(name, point.label, dataclasses.replace(config, compress=compress)))
    return found


class CodecLoss(NamedTuple):
    """A codec's bytes and losses on an axis.

    Attributes:
        axis: name in AXES.
        label: name of the codec.
        share: bytes of the axis's traffic, as a share of dense training's.
        losses: percent by which the validation loss is above dense training's, for each seed.
    """

    axis: str
    label: str
    share: float
    losses: list[float]


def rows(outcomes: list[VariantResult]) -> list[CodecLoss]:
    """Return the points of all axes, those with most bytes first."""
    runs = by_run(outcomes)
    dense, found = runs[DENSE][0], []
    for name, group in runs.items():
        axis, _, label = name.partition(": ")
        if axis in AXES:
            sent, whole = (sum(one.bytes[kind] for kind in AXES[axis]) for one in (group[0], dense))
            found.append(CodecLoss(axis, label, sent / whole, differences(runs, name)))
    return sorted(found, key=lambda row: (list(AXES).index(row.axis), -row.share))


def write_csv(outcomes: list[VariantResult], out: pathlib.Path) -> None:
    """Write frontier.csv with a row per codec, axis and seed."""
    seeds = [outcome.seed for outcome in by_run(outcomes)[DENSE]]
    with (out / "frontier.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["axis", "codec", "bytes_share", "seed", "percent_above_dense"])
        for row in rows(outcomes):
            for seed, loss in zip(seeds, row.losses, strict=True):
                writer.writerow([row.axis, row.label, f"{row.share:.5g}", seed, f"{loss:.5g}"])


def table(outcomes: list[VariantResult]) -> list[list[str]]:
    """Return the table as rows of cells; the first row has the headings."""
    cells = [["axis", "codec", "bytes of dense's, %", "loss against dense, %", "lowest", "highest"]]
    for row in rows(outcomes):
        spread = [f"{found(row.losses):+.2f}" for found in (statistics.fmean, min, max)]
        cells.append([WORDS[row.axis], row.label, f"{100 * row.share:.1f}", *spread])
    return cells


def _panel(axes: Axes, some: list[CodecLoss], title: str) -> None:
    """Draw the codecs of one axis."""
    plots.style(axes)
    axes.axhspan(-1, 1, color="#e9f2ea", zorder=0)
    axes.axhline(0, color="#22272e", linewidth=0.9)
    for n, row in enumerate(some):
        mean, x = statistics.fmean(row.losses), 100 * row.share
        spread = [[mean - min(row.losses)], [max(row.losses) - mean]]
        axes.errorbar(x, mean, spread, color="#2f6f9f", marker="o", capsize=3, linestyle="none", elinewidth=1.2)
        axes.annotate(
            row.label,
            (x, mean),
            xytext=(5, 5 if n % 2 else -11),
            textcoords="offset points",
            fontsize=8,
            color="#22272e",
        )
    means = [statistics.fmean(row.losses) for row in some]
    shares = np.array([100 * row.share for row in some])
    # No other codec has both fewer bytes and a lower loss than those on the line.
    best = [i for i in np.argsort(shares) if means[i] <= min(m for m, s in zip(means, shares) if s <= shares[i])]
    axes.plot(shares[best], np.array(means)[best], color="#d9822b", linewidth=1.2, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(PercentFormatter(100, decimals=1))
    axes.set_xlabel("bytes, % of what is sent without a codec")
    axes.set_title(title, fontsize=10, loc="left")
    axes.margins(0.15)


def draw(outcomes: list[VariantResult], out: pathlib.Path) -> None:
    """Draw frontier.png: loss against bytes, a panel for each axis."""
    every = rows(outcomes)
    names = list(dict.fromkeys(row.axis for row in every))
    figure = plots.figure(6.5 * len(names), 5)
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names):
        _panel(axes, [row for row in every if row.axis == name], WORDS[name])
    figure.supylabel("validation loss against dense", fontsize=10)
    figure.savefig(out / "frontier.png")


def write(config: Config, outcomes: list[VariantResult], out: pathlib.Path) -> str:
    """Write the page, the picture and the numbers, and return the table as Markdown.

    Args:
        config: configuration of the study.
        outcomes: results of all runs.
        out: folder to write to.
    """
    write_csv(outcomes, out)
    draw(outcomes, out)
    c, m = config, config.model
    seeds = len(by_run(outcomes)[DENSE])
    made = markdown(table(outcomes), words=2)
    setting = (
        f"A GPT of {m.parameter_count():,} parameters ({m.layers} layers of {m.hidden}) on a mesh of {c.mesh.data} "
        f"data ranks x {c.mesh.pipe} stages, {c.run.steps} steps of {c.batch.global_batch * m.sequence:,} tokens, "
        f"{seeds} seed{'s' if seeds > 1 else ''}: mean, lowest and highest. Every message of an axis goes through the "
        "codec, with error feedback, from the first step on. Bytes are read from the program compiled for the real "
        "mesh, norms, biases and the embedding's reduction included."
    )
    page = ["# The frontier of the codecs", setting, made, "![loss against bytes](frontier.png)"]
    (out / PAGE).write_text("\n\n".join(page) + "\n")
    return made
