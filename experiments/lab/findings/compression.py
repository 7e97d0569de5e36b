"""Gains of compression on links of several speeds, the parts of a step's time, and its cost in loss."""

import pathlib

import numpy as np
from matplotlib.figure import Figure

from compress.policy import compression_ratio
from experiments.lab.findings import gains, losses
from experiments.lab.findings.gains import Gain, measured
from experiments.lab.laboratory import summary
from experiments.lab.measuring import compression as experiment
from experiments.lab.page import figures
from experiments.lab.page.section import Drawing, Section, Target, factor, lab, percent, seconds, span, table
from experiments.lab.records import Records
from paxtrain.profiling import canvas

TITLE, SOURCE = "Compression", "compression.jsonl"
DENSE, PAPER, ALL = "dense", experiment.SELECTIVE, "everything"
AT = "share None"  # the key of the line at the paper's share of communication
_COLORS = (figures.INK, "#3c9d8f", "#8aa83a", "#d9822b", "#8e5aa8", "#2f6f9f", "#c0392b", "#7a5c3e", "#b07aa1")
COLORS = dict(zip(experiment.KINDS, _COLORS))
FASTER = Target.at_least(
    f"Speed-up of {PAPER} over dense, at the share of communication of Optimus-CC's setting", 1.3, factor
)
CAPTURED = Target.at_least(
    "Of the time that links cost a dense step, the share that the best kind within 1% of dense's loss removes, at the "
    "worst share of communication",
    0.75,
    percent,
)
CLOSE = Target.at_most(f"Validation loss of {PAPER} against dense after equal steps", 0.01, losses.signed)
_PARTS = {
    "forward": "#2f6f9f",
    "backward": "#8fb3cf",
    "head": "#3c9d8f",
    "compression": "#8e5aa8",
    "optimizer": "#8aa83a",
    "pipeline": "#d9822b",
    "gather": "#e2a3b5",
    "data": "#c0392b",
    "embedding": "#e0b040",
    "tensor": "#b58a6a",
    "sync": "#5c6670",
    "other": "#b9c0c6",
    "idle": "#e6e8ea",
    "input": "#1d1d1f",
}


def speedups(line: dict) -> dict[str, Gain]:
    """Return every kind's speed-up over dense."""
    return {kind: gains.speedup(line["seconds"][DENSE], times) for kind, times in line["seconds"].items()}


def captured(line: dict, free: list[float]) -> dict[str, Gain]:
    """Return the share of the time that links cost a dense step which each kind removes.

    Args:
        line: times of a share of communication.
        free: seconds of dense steps without limits of links.
    """
    return {kind: gains.captured(line["seconds"][DENSE], times, free) for kind, times in line["seconds"].items()}


def costs(records: Records) -> dict[str, list[float]]:
    """Return each kind's last validation loss over dense's of the same seed, minus 1, by the name of its losses."""
    lines = [line for line in records if "validation" in line]
    dense = {line.get("seed", 0): line["validation"][-1][1] for line in lines if line["kind"] == DENSE}
    paper = next((line for line in records if line["key"] == AT), None)
    found: dict[str, list[float]] = {}
    for line in lines:
        if line["kind"] != DENSE and line.get("seed", 0) in dense:
            cost = line["validation"][-1][1] / dense[line.get("seed", 0)] - 1
            found.setdefault(_trained(line, paper)[line["kind"]], []).append(cost)
    return found


def _free(paper: dict | None) -> list[float] | None:
    """Return the seconds of dense steps without limits of links, if they were measured."""
    return paper["unlimited"][DENSE] if paper and "unlimited" in paper else None


def _captured(lines: list[dict], paper: dict | None, cost: dict[str, list[float]]) -> Target:
    free = _free(paper)
    if free is None or not cost:
        return CAPTURED
    best = {}
    for line in lines:
        names = _trained(line, paper)
        near = {
            kind: share
            for kind, share in captured(line, free).items()
            if kind != DENSE and np.mean(cost.get(names[kind], [np.inf])) <= losses.NEAR - 1
        }
        kind = max(near, key=near.__getitem__, default="")
        best[line["share"]] = (near.get(kind, Gain(0.0, 0.0)), kind)
    said = ", ".join(f"{share.as_share} at {at:.0%} ({kind or 'none'})" for at, (share, kind) in best.items())
    return CAPTURED.judged(min(share.value for share, _ in best.values()), said)


def parts(line: dict) -> dict[str, dict[str, float]]:
    """Return seconds by kind and part, as means over the hosts and their devices; all of tensor groups are one part."""
    found: dict[str, dict[str, float]] = {}
    for kind, hosts in line.get("parts", {}).items():
        seconds = found.setdefault(kind, {})
        for part in dict.fromkeys(name for host in hosts for name in host):
            mean = float(np.mean([np.mean(host.get(part, 0.0)) for host in hosts]))
            name = part.partition("/")[0]
            seconds[name] = seconds.get(name, 0.0) + mean
    return found


def _links(line: dict) -> str:
    return f"{line['share']:.0%} ({line['rate']:.0f} Mbit/s)"


# --- Figures ----------------------------------------------------------------------------------------------------------


def _draw_parts(lines: list[dict]) -> Figure:
    found = [parts(line) for line in lines]
    known = dict.fromkeys(part for kinds in found for values in kinds.values() for part in values)
    spare = iter(figures.COLORS * 2)
    order = [*(part for part in _PARTS if part in known), *(part for part in known if part not in _PARTS)]
    colors = {part: _PARTS.get(part) or next(spare) for part in order}
    figure = canvas.figure(12, 1.7 + 0.34 * len(found[0]))
    panels = figure.subplots(1, len(lines), sharey=True, squeeze=False)[0]
    for axes, line, kinds in zip(panels, lines, found):
        canvas.style(axes)
        figures.bars_of_parts(axes, kinds, colors)
        axes.set_title(f"communication {_links(line)}", **figures.TITLE)
        axes.set_xlabel("seconds of a step, mean over hosts")
    handles, labels = panels[0].get_legend_handles_labels()
    columns = -(-len(labels) // 2)
    figure.legend(handles, labels, ncols=columns, loc="outside upper center", **(figures.LEGEND | {"fontsize": 8}))
    return figure


# --- Words and tables -------------------------------------------------------------------------------------------------


def _words(lines: list[dict], paper: dict | None) -> str:
    split = experiment.SPLITS[ALL]
    (_, pipe, _), width = split.mesh, split.config.model.hidden
    cb, all_ = (dict(experiment.SPLITS[kind].compress) for kind in ("CB", ALL))
    repeats = span(len(times) for line in lines for times in line["seconds"].values())
    where = f"{paper['share']:.0%} is what it takes" if paper else "One of the shares is what it takes"
    chosen = ", ".join(f"{_stages(line['selected'], pipe)} at {line['share']:.0%}" for line in lines)
    words = f"""Eight hosts of two devices, mesh {"x".join(map(str, split.mesh))}, the papers' 1F1B, width {width},
    {repeats} repeats. CB compresses the exposed gradients between stages with rank {cb["backward.rank"]}. FE fuses the
    synchronisation of the tied embedding. SC compresses gradients over data with rank {all_["data.rank"]} on the stages
    that the planner's rule chooses: {chosen}. "{ALL}" compresses all messages between stages with rank
    {all_["backward.rank"]}, and all gradients over data. "{experiment.INT8}" rounds all of these to 8 bits in blocks.
    "{experiment.MIXED}" rounds gradients over data to 4 bits, with error feedback; "{experiment.GRADIENTS}" those
    between stages, too, and "{experiment.TABLE}" also the embedding's. "Captured" is the share that a kind removes of
    the time that links cost a dense step. The links are set so that communication takes a given share of a dense step,
    by the planner's prediction. {where} for 8.3B parameters on 128 A100s, the setting of Optimus-CC. "Bytes" are those
    that all devices send between hosts in a step, of a dense step's, counted in the compiled program."""
    return f"{words} {_unlimited(lines, paper)} {_ranks(cb['backward.rank'], all_['backward.rank'])}"


def _ranks(usual: int, small: int) -> str:
    """Return the reason for two ranks: the share of a message that each leaves."""
    here, there = experiment.messages()
    left = lambda rank, message: percent(1 / compression_ratio(*message, rank))  # noqa: E731
    return f"""Of a message between stages rank {usual} leaves {left(usual, here)} here, rank {small}
    {left(small, here)}, and in that setting rank {usual} {left(usual, there)}."""


def _unlimited(lines: list[dict], paper: dict | None) -> str:
    """Return the measured share of communication beside the predicted one."""
    if not paper or "unlimited" not in paper:
        return ""
    free = {kind: summary(times)["median"] for kind, times in paper["unlimited"].items()}
    shares = [1 - free[DENSE] / summary(line["seconds"][DENSE])["median"] for line in lines]
    said = ", ".join(f"{share:.0%} where {line['share']:.0%} was predicted" for share, line in zip(shares, lines))
    return f"""With unlimited links a dense step takes {seconds(free[DENSE])}, and one with everything compressed
    {seconds(free[ALL])}: as measured, the links therefore take {said}."""


def _stages(selected: str, pipe: int) -> str:
    if selected == "none":
        return "none"
    return "all" if selected.count(",") == pipe - 1 else f"stages {selected}"


def _most(paper: dict) -> str:
    """Return the speed-up if nothing had to travel."""
    if "unlimited" not in paper:
        return f"without it {factor(1 / (1 - paper['share']))}, as predicted"
    free = summary(paper["unlimited"][DENSE])["median"]
    return f"without limits of links {factor(summary(paper['seconds'][DENSE])['median'] / free)}, as measured"


def _trained(line: dict, paper: dict | None) -> dict[str, str]:
    """Return the name of each kind's losses: other stages of selective compression have separate losses."""
    names = {kind: kind for kind in experiment.KINDS}
    if paper and line.get("selected", paper["selected"]) != paper["selected"]:
        names[PAPER] = f"{PAPER} of stages {line['selected']}"
    return names


def _times(lines: list[dict], free: list[float] | None, wire: dict[str, dict[str, float]]) -> str:
    """Return step times, speed-ups, the shares of the links' time that are removed, and the bytes that are left.

    Args:
        lines: times, by share of communication.
        free: seconds of dense steps without limits of links, which bound the speed-ups; None: not measured.
        wire: bytes of a step by kind and by what they are; empty: not counted.
    """
    sent = {kind: sum(sizes.values()) for kind, sizes in wire.items()}
    rows = []
    for kind in lines[0]["seconds"]:
        row = [kind]
        for line in lines:
            row.append(measured(line["seconds"][kind]))
            row.append("" if kind == DENSE else speedups(line)[kind].as_factor)
            row.append("" if kind == DENSE or free is None else captured(line, free)[kind].as_share)
        rows.append([*row, percent(sent[kind] / sent[DENSE]) if kind in sent else ""])
    if free is not None:
        bounds = [(measured(free), gains.bound(line["seconds"][DENSE], free).as_factor, "100%") for line in lines]
        rows.append(["dense, links without limits", *(cell for cells in bounds for cell in cells), ""])
    headings = [heading for line in lines for heading in (_links(line), "speed-up", "captured")]
    return table(["", *headings, "bytes"], rows)


def _seeds(cost: dict[str, list[float]]) -> str:
    """Return the costs of the kinds that were trained with several seeds."""
    said = [
        f"{kind} {losses.signed(float(np.mean(x)))} ± {np.std(x, ddof=1):.2%}" for kind, x in cost.items() if len(x) > 1
    ]
    return (
        f"""Against dense training with the same seed, means and standard deviations over
    {max(map(len, cost.values()))} seeds: {", ".join(said)}."""
        if said
        else ""
    )


def _blocks(lines: list[dict], paper: dict | None) -> list[str | Drawing]:
    blocks: list[str | Drawing] = [
        _words(lines, paper),
        _times(lines, _free(paper), paper["wire"] if paper else {}),
    ]
    if traced := [line for line in lines if parts(line)]:
        caption = """Parts of a step by kind of compression, as `paxtrain/profiling/breakdown.py` defines them; a
        transfer's part includes the wait for its other end."""
        blocks.append(Drawing("breakdown", caption, _draw_parts(traced)))
    return blocks


def section(folder: pathlib.Path) -> Section:
    """Return step times, bytes, breakdown and losses of every kind of compression."""
    records = Records(folder / SOURCE)
    lines = sorted((line for line in records if "share" in line), key=lambda line: line["share"])
    paper = next((line for line in lines if line["key"] == AT), None)
    first = [line for line in records if "validation" in line and not line.get("seed")]
    curves = {_trained(line, paper)[line["kind"]]: losses.Curve.of(line) for line in first}
    cost = costs(records)
    faster, close = FASTER, CLOSE
    if paper:
        found = speedups(paper)
        note = f"communication takes {paper['share']:.0%} of a dense step; {_most(paper)}; spread "
        slowest = lines[-1]
        there = {kind: f"; {factor(gain)} at {slowest['share']:.0%}" for kind, (gain, _) in speedups(slowest).items()}
        faster = FASTER.judged(found[PAPER].value, f"{note}{found[PAPER].spread:.3f}{there[PAPER]}")
    if DENSE in curves and PAPER in curves:
        last = curves[PAPER].last / curves[DENSE].last - 1
        close = CLOSE.judged(last, f"{curves[PAPER].steps[-1]:.0f} steps, one seed")
    blocks = _blocks(lines, paper) if lines else []
    if DENSE in curves:
        times = {
            _links(line): {_trained(line, paper)[k]: summary(t)["median"] for k, t in line["seconds"].items()}
            for line in lines
        }
        blocks += [
            *losses.blocks(curves, times, DENSE, COLORS),
            *filter(None, [_seeds(cost)]),
        ]
    targets = (faster, close, _captured(lines, paper, cost))
    return Section(TITLE, lab("compression"), (SOURCE,), targets, tuple(blocks))
