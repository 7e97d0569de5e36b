"""The frontier: every codec's loss against its bytes and its modelled time, one axis of the mesh at a time, over seeds.

`python -m paxtrain.study --frontier` writes frontier.csv, frontier.md and a picture of each axis. A codec's bytes are
those of its axis, as a share of what that traffic is without one.
"""

import csv
import dataclasses
import pathlib
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from paxtrain.config import CompressConfig, Config
from paxtrain.config.options import LINKED, OptionValues
from paxtrain.devices.datasheets import datasheet
from paxtrain.model import parameters
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.layout import Layout
from paxtrain.profiling import canvas
from paxtrain.study.report import VariantResult, by_run, differences, markdown
from paxtrain.study.variants import Variant, bare, shortened

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


class FrontierAxis(NamedTuple):
    """An axis of the frontier: the messages that travel on it, and the place of their codec.

    Attributes:
        place: place of its codec in the configuration, of config.options.PLACES.
        kinds: kinds of probe.BYTES that the codec takes over.
        words: what travels, in words.
    """

    place: str
    kinds: tuple[str, ...]
    words: str


AXES = {
    "between": FrontierAxis("backward", ("backward",), "gradients between stages"),
    "data": FrontierAxis("data", ("reduce-scatter", "all-reduce"), "gradients over data"),
    "activations": FrontierAxis("forward", ("forward",), "activations between stages"),
}
DEFAULT_AXES = ("between", "data")  # a third one takes half as long again
RATES = (1, 10, 100)  # of links, Gbit/s
STEPS, SEEDS = 50, 3
_DEVICE = "H100"  # whose memory codecs read and write in the modelled time
_EQUAL, _APART = 0.02, 0.02  # share within which amounts are equal; how far apart they stand, as a share of the width
_LINE, _INK = "#9aa3ab", "#22272e"
_COLORS = matplotlib.color_sequences["tab20"]


CODECS = tuple(dict.fromkeys(point.codec for point in POINTS))


def points(codecs: Sequence[str], compress: CompressConfig, place: str) -> list[Point]:
    """Return the points of some codecs on an axis.

    Args:
        codecs: names in CODECS, each of which may have several points, and classes as package.module:Class, with one.
        compress: configuration whose options a class has, if it names the class for the place.
        place: place of the axis.
    """
    found = [point for point in POINTS if point.codec in codecs]
    for codec in dict.fromkeys(codec for codec in codecs if codec not in CODECS):
        options = compress.at(place).options if compress.at(place).codec == codec else {}
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        found.append(Point(f"{codec} ({given})" if given else codec, codec, options))
    return found


def variants(
    config: Config, axes: Sequence[str] = DEFAULT_AXES, codecs: Sequence[str] = CODECS, steps: int = STEPS
) -> list[Variant]:
    """Return dense training, and each point of some codecs on each of some axes.

    Args:
        config: configuration of the study; codecs work on the links that it names for their place, or on all.
        axes: names in AXES.
        codecs: names in CODECS, or classes as package.module:Class.
        steps: optimizer steps of each run, over which the learning rate falls.
    """
    own, config = config.compress, shortened(config, steps)
    # Compression over data from the first step on, so that each variant is one program.
    c = bare(config.compress).changed(data={"start": 0.0}, embedding={"sync": "auto"}, backward={"ranks": ""})
    found = [Variant(DENSE, DENSE, dataclasses.replace(config, compress=c))]
    for axis in axes:
        place = AXES[axis].place
        for point in points(codecs, own, place):
            part = own.at(place)
            changes: dict[str, Any] = {part.asked: "all"}
            if point.rank:
                changes["rank"] = point.rank
            else:
                changes |= {"codec": point.codec, "options": OptionValues(point.options)}
            changes |= {"inside": part.inside, "rank_min": 1} if place == "data" else {"links": part.links}
            compress = c.changed(**{place: changes})
            name = f"{axis}: {point.label}"
            found.append(Variant(name, point.label, dataclasses.replace(config, compress=compress)))
    return found


class CodecLoss(NamedTuple):
    """A codec's bytes, work and losses on an axis.

    Attributes:
        axis: name in AXES.
        label: name of the codec.
        share: bytes of the axis's traffic, as a share of dense training's.
        passes: reads and writes of the traffic, as it is without a codec, to encode and to decode it.
        losses: percent by which the validation loss is above dense training's, for each seed.
    """

    axis: str
    label: str
    share: float
    passes: float
    losses: list[float]

    @property
    def mean(self) -> float:
        """Mean of the losses over the seeds."""
        return statistics.fmean(self.losses)

    def seconds(self, rate: float) -> float:
        """Return the modelled time for what is a gigabyte without a codec: on the link, and in the codec's passes.

        Args:
            rate: rate of the link in Gbit/s.
        """
        sheet = datasheet(_DEVICE)
        assert sheet
        return 8 * self.share / rate + self.passes * 1e9 / sheet.memory_bandwidth


def _passes(variant: Variant, axis: str) -> float:
    """Return the passes of a variant's codec over the traffic of its axis."""
    made = Compression(Layout(variant.config))
    places = {"backward": made.backward_codec, "forward": made.forward_codec, "data": made.reducer}
    codec = places[AXES[axis].place]
    assert codec
    encode, decode, _ = codec.passes()
    return encode + decode


def rows(outcomes: list[VariantResult], trained: Sequence[Variant]) -> list[CodecLoss]:
    """Return the points of all axes, those with most bytes first.

    Args:
        outcomes: results of all runs.
        trained: variants of the runs.
    """
    runs = by_run(outcomes)
    dense, found = runs[DENSE][0], []
    for variant in trained:
        axis, _, label = variant.name.partition(": ")
        if axis in AXES:
            one = runs[variant.name][0]
            sent, whole = (sum(outcome.bytes[kind] for kind in AXES[axis].kinds) for outcome in (one, dense))
            losses = differences(runs, variant.name)
            found.append(CodecLoss(axis, label, sent / whole, _passes(variant, axis), losses))
    return sorted(found, key=lambda row: (list(AXES).index(row.axis), -row.share))


def _write_csv(some: list[CodecLoss], seeds: Sequence[int], out: pathlib.Path) -> None:
    """Write frontier.csv with a row per codec, axis and seed."""
    with (out / "frontier.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        times = [f"seconds_per_gigabyte_at_{rate}_gbit" for rate in RATES]
        writer.writerow(["axis", "codec", "bytes_share", *times, "seed", "percent_above_dense"])
        for row in some:
            spent = [f"{row.seconds(rate):.5g}" for rate in RATES]
            for seed, loss in zip(seeds, row.losses, strict=True):
                writer.writerow([row.axis, row.label, f"{row.share:.5g}", *spent, seed, f"{loss:.5g}"])


def table(some: list[CodecLoss]) -> list[list[str]]:
    """Return the table as rows of cells; the first row has the headings."""
    times = [f"ms a GB at {rate} Gbit/s" for rate in RATES]
    cells = [["axis", "codec", "bytes of dense's, %", *times, "loss against dense, %", "lowest", "highest"]]
    for row in some:
        spread = [f"{value:+.2f}" for value in (row.mean, min(row.losses), max(row.losses))]
        spent = [f"{1e3 * row.seconds(rate):.1f}" for rate in RATES]
        cells.append([AXES[row.axis].words, row.label, f"{100 * row.share:.1f}", *spent, *spread])
    return cells


def best(amounts: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Return the points that no other beats: none is both as far left and as low, in the order of their amounts.

    Args:
        amounts: bytes or times.
        losses: losses, of the same points.
    """
    order = sorted(range(len(amounts)), key=lambda i: (amounts[i], losses[i]))
    found: list[int] = []
    for i in order:
        if not found or losses[i] < losses[found[-1]]:
            found.append(i)
    return found


def sentences(some: list[CodecLoss]) -> list[str]:
    """Return for each axis which codecs cost something that these seeds show, and which do not."""
    found = []
    for axis in dict.fromkeys(row.axis for row in some):
        own = [row for row in some if row.axis == axis]
        worse = [f"{row.label} ({row.mean:+.2f}%)" for row in own if min(row.losses) > 0]
        better = [f"{row.label} ({row.mean:+.2f}%)" for row in own if max(row.losses) < 0]
        alike = [row.label for row in own if min(row.losses) <= 0 <= max(row.losses)]
        said = [
            f"above dense with every seed: {', '.join(worse)}" if worse else "none is above dense with every seed",
            *([f"below dense with every seed, which so few seeds do not prove: {', '.join(better)}"] if better else []),
            *([f"not to be told from dense, since its sign changes: {', '.join(alike)}"] if alike else []),
        ]
        found.append(f"{AXES[axis].words.capitalize()}: {'; '.join(said)}.")
    return found


def _panel(axes: Axes, some: list[CodecLoss], amounts: Sequence[float], dense: float, title: str) -> None:
    """Draw the codecs of one axis of the mesh against their bytes or times."""
    canvas.style(axes)
    axes.axhspan(-1, 1, color="#e9f2ea", zorder=0)
    axes.axhline(0, color=_INK, linewidth=0.9)
    axes.plot(dense, 0, color=_INK, marker="D", linestyle="none", label=DENSE)
    shown = _apart(amounts)
    for n, (row, x) in enumerate(zip(some, shown, strict=True)):
        spread = [[row.mean - min(row.losses)], [max(row.losses) - row.mean]]
        style: dict[str, Any] = {"color": _COLORS[n % len(_COLORS)], "marker": "o", "markersize": 5, "label": row.label}
        axes.errorbar(x, row.mean, spread, linestyle="none", capsize=3, elinewidth=1, **style)
    means = [row.mean for row in some]
    line = best([*amounts, dense], [*means, 0.0])
    axes.plot(*zip(*(((*shown, dense)[i], (*means, 0.0)[i]) for i in line)), color=_LINE, linewidth=1.2, zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=1.0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda percent, _: f"{percent:+g} %" if percent else "0"))
    axes.yaxis.set_ticks([y for y in (-3, -1, -0.5, 0, 0.5, 1, 2, 5, 10, 20, 50) if _shown(y, axes)])
    axes.xaxis.set_ticks([x for n in range(-4, 4) for x in (10.0**n, 2 * 10.0**n, 5 * 10.0**n)])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
    axes.minorticks_off()
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(amounts) / 1.6, dense * 1.6)
    axes.set_title(title, fontsize=10, loc="left")


def _apart(amounts: Sequence[float]) -> list[float]:
    """Return the amounts with those that are nearly equal side by side, so that bars of their points can be told."""
    found: list[float] = []
    apart = (max(amounts) / min(amounts)) ** _APART
    for n, x in enumerate(amounts):
        equal = [m for m, other in enumerate(amounts) if abs(other / x - 1) < _EQUAL]
        found.append(x * apart ** (equal.index(n) - (len(equal) - 1) / 2))
    return found


def _shown(y: float, axes: Axes) -> bool:
    """Return whether a tick is within the axes' limits."""
    low, high = axes.get_ylim()
    return low <= y <= high


def _draw(axis: str, some: list[CodecLoss], out: pathlib.Path) -> str:
    """Draw the picture of an axis, with a panel for bytes and one for each rate of links, and return its name."""
    figure = canvas.figure(12, 9)
    panels = [("bytes, % of what is sent without a codec", [100 * row.share for row in some], 100.0)]
    dense = CodecLoss(axis, DENSE, 1, 0, [0])
    for rate in RATES:
        title = f"at {rate} Gbit/s: modelled ms for what is 1 GB without a codec"
        panels.append((title, [1e3 * row.seconds(rate) for row in some], 1e3 * dense.seconds(rate)))
    grid = list(figure.subplots(2, 2, sharey=True).flat)
    for axes, (title, amounts, end) in zip(grid, panels, strict=True):
        _panel(axes, some, amounts, end, title)
    figure.suptitle(AXES[axis].words.capitalize(), fontsize=12, x=0.01, ha="left")
    figure.supylabel("validation loss against dense: mean, lowest and highest of the seeds", fontsize=10)
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
    name = f"frontier_{axis}.png"
    figure.savefig(out / name, dpi=100)
    return name


_MODEL = (
    "The modelled time is that of traffic which is 1 GB without a codec: its bytes over the link's rate, and the "
    f"passes that the codec declares, at the memory bandwidth of an {_DEVICE}. It is no step's time: what "
    "travels under compute costs none of it, and kernels of small messages take longer. Numbers are float32 here. "
    "Beside bfloat16 traffic the shares of int8, int4, fp8 and sign are twice as large. "
    "Points of equal bytes stand side by side."
)


def _which(trained: Sequence[Variant]) -> str:
    """Return which messages go through codecs, in words."""
    given = {(one.config.compress.at(place).links, place) for one in trained for place in LINKED}
    links = [f"links {some} ({place})" for some, place in sorted(given) if some]
    return f"Every message of an axis on {' and '.join(links)}" if links else "Every message of an axis"


def write(config: Config, trained: Sequence[Variant], outcomes: list[VariantResult], out: pathlib.Path) -> str:
    """Write the page, the pictures and the numbers, and return the table and the sentences as Markdown.

    Args:
        config: configuration of the runs.
        trained: variants of the runs.
        outcomes: results of all runs.
        out: folder to write to.
    """
    some, c, m = rows(outcomes, trained), config, config.model
    tokens = f"{c.batch.global_batch * m.sequence:,}"
    seeds = [outcome.seed for outcome in by_run(outcomes)[DENSE]]
    _write_csv(some, seeds, out)
    pictures = [_draw(axis, [row for row in some if row.axis == axis], out) for axis in {row.axis: 0 for row in some}]
    made = "\n\n".join([markdown(table(some), words=2), "\n".join(f"- {one}" for one in sentences(some))])
    setting = (
        f"A GPT of {parameters.published(m):,} parameters ({m.layers} layers of {m.hidden}, {m.dtype}) on a mesh of "
        f"{c.mesh.data} data ranks x {c.mesh.pipe} stages, {c.run.steps} steps of {tokens} tokens, "
        f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''}: mean, lowest and highest. {_which(trained)} goes through "
        "the codec, with its error feedback, from the first step on. Bytes are those that the step sends "
        "on the real mesh, norms, biases and the embedding's reduction included."
    )
    shown = [f"![{AXES[name[9:-4]].words}: loss against bytes and time]({name})" for name in pictures]
    (out / PAGE).write_text("\n\n".join(["# The frontier of the codecs", setting, _MODEL, made, *shown]) + "\n")
    return made
