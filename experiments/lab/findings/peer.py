"""PyTorch's pipeline and ours on the same hosts: step times, bytes, compute, and the losses of both."""

import pathlib
from typing import Any

import numpy as np

from experiments.lab.findings.gains import measured
from experiments.lab.laboratory import summary
from experiments.lab.measuring import peer as experiment
from experiments.lab.measuring.peer import COMPRESSED, DENSE, PYTORCH
from experiments.lab.page.section import (
    Section,
    Target,
    factor,
    lab,
    listed,
    percent,
    signed,
    span,
    table,
)
from experiments.lab.records import Records

TITLE, SOURCE, COMMAND = "Beside PyTorch", "peer.jsonl", lab("peer")
DENSE_AT, COMPRESSED_AT = (200.0, 50.0), (50.0,)
SAME = Target.at_most(
    f"Losses of the first {experiment.COMPARED} steps, PyTorch's and ours, largest relative difference",
    1e-5,
    "{:.0e}".format,
)
FASTER = Target.at_most("Dense step over PyTorch's at 200 and 50 Mbit/s, the worst of both meshes", 0.9, factor)
MUCH_FASTER = Target.at_most(
    "Compressed step over PyTorch's at 50 Mbit/s, by the quickest codec with a loss within 1% of dense's, worst mesh",
    0.5,
    factor,
)
NEAR = 0.01
Line = dict[str, Any]


def _place(line: Line) -> str:
    return "x".join(map(str, line["mesh"]))


def _median(line: Line, kind: str, what: str = "seconds") -> float:
    return summary(line["kinds"][kind][what])["median"]


def _ratio(line: Line, kind: str) -> float:
    return _median(line, kind) / _median(line, PYTORCH)


def best(line: Line) -> str:
    """Return the quickest of our dense kinds."""
    return min(
        (kind for kind in line["kinds"] if kind not in (PYTORCH, *COMPRESSED)), key=lambda kind: _median(line, kind)
    )


def difference(first: dict[str, list[float]]) -> float:
    """Return the largest relative difference of our losses from PyTorch's."""
    theirs = np.array(first[PYTORCH])
    return max(float(np.abs(np.array(ours) / theirs - 1).max()) for kind, ours in first.items() if kind != PYTORCH)


def costs_of_compression(records: Records) -> dict[tuple[str, str], float]:
    """Return compressed training's last validation loss over dense's, minus 1, by mesh and kind."""
    found: dict[str, dict[str, float]] = {}
    for line in records:
        if "validation" in line:
            found.setdefault(_place(line), {})[line["kind"]] = line["validation"][-1][1]
    return {
        (place, kind): x[kind] / x[DENSE] - 1
        for place, x in found.items()
        for kind in COMPRESSED
        if {kind, DENSE} <= x.keys()
    }


def _targets(records: Records, lines: list[Line]) -> tuple[Target, ...]:
    firsts = [line["first"] for line in records if "first" in line]
    same = SAME.judged(max(map(difference, firsts))) if firsts else SAME
    dense = {(_place(line), line["rate"]): line for line in lines if line["rate"] in DENSE_AT}
    faster = FASTER
    if dense:
        ratios = {where: _ratio(line, best(line)) for where, line in dense.items()}
        worst = max(ratios, key=ratios.__getitem__)
        faster = FASTER.judged(ratios[worst], f"{worst[0]} at {worst[1]:g} Mbit/s; {span(ratios.values(), factor)}")
    costs, much = costs_of_compression(records), MUCH_FASTER
    slow = [line for line in lines if line["rate"] in COMPRESSED_AT]
    packed = {(_place(line), kind): _ratio(line, kind) for line in slow for kind in COMPRESSED if kind in line["kinds"]}
    near: dict[str, float] = {}
    for (place, kind), ratio in packed.items():
        if costs.get((place, kind), np.inf) <= NEAR:
            near[place] = min(ratio, near.get(place, np.inf))
    if near and near.keys() == {place for place, _ in packed}:
        worst_place = max(near, key=near.__getitem__)
        much = MUCH_FASTER.judged(near[worst_place], f"{worst_place}; {span(near.values(), factor)}")
    elif packed and costs:
        much = MUCH_FASTER.said(f"no loss within {percent(NEAR)} ({span(costs.values(), signed)})", False)
    return same, faster, much


def _cell(line: Line, kind: str) -> str:
    """Return a step's seconds with their spread, and over PyTorch's."""
    step = measured(line["kinds"][kind]["seconds"])
    return step if kind == PYTORCH else f"{step}, {factor(_ratio(line, kind))}"


def _table(lines: list[Line]) -> str:
    """Return a row for each mesh and kind: its steps by rate, and the range of its bytes and compute over rates."""
    rates = list(dict.fromkeys(line["rate"] for line in lines))
    found: dict[tuple[str, str], dict[float, Line]] = {}
    for line in lines:
        for kind in line["kinds"]:
            found.setdefault((_place(line), kind), {})[line["rate"]] = line
    rows = [
        (
            place,
            kind,
            *(_cell(at[rate], kind) if rate in at else "" for rate in rates),
            span((_median(line, kind, "bytes") / 1e6 for line in at.values()), "{:.1f}".format),
            span((_median(line, kind, "computed") for line in at.values()), "{:.2f} s".format),
        )
        for (place, kind), at in found.items()
    ]
    headings = ("mesh", "", *(f"{rate:g} Mbit/s" for rate in rates), "MB on the links", "compute")
    return table(headings, rows, words=2)


def _parts(lines: list[Line]) -> list[str]:
    """Return where the time of our steps goes, as a table with a sentence, if that was measured."""
    broken = [(line, kind, parts) for line in lines for kind, parts in line.get("parts", {}).items()]
    if not broken:
        return []
    names = [name for name in broken[0][2] if max(parts[name] for _, _, parts in broken) >= 5e-3]
    rows = [
        (_place(line), f"{line['rate']:g}", kind, *(f"{parts[name]:.2f}" for name in names))
        for line, kind, parts in broken
    ]
    words = """Seconds of our steps by part, as means over the hosts ([the parts](profiling.md#the-breakdown)):"""
    return [words, table(("mesh", "Mbit/s", "", *names), rows, words=3)]


def _words(records: Records, lines: list[Line]) -> str:
    split = experiment.Real(experiment.MESHES[0])
    versions = span([line["torch"] for line in records if "torch" in line] or ["?"])
    saves = listed(sorted({line["save"] for line in lines}))
    repeats = span(len(x["seconds"]) for line in lines for x in line["kinds"].values())
    return f"""PyTorch {versions}, in a separate environment: torch.distributed.pipelining's 1F1B with
    DistributedDataParallel over gloo, and fused AdamW. Both train a GPT-2 of {split.layers} layers, width
    {split.hidden}, sequence {split.sequence} and a head apart from the embedding, in float32, from the same weights, on
    the same batches of {split.global_batch} sequences in micro-batches of {split.micro_batch}, with the same optimizer.
    PyTorch's keeps all that a backward needs, ours what save={saves} says. Eight hosts have
    {percent(experiment.SHARE)} of a core each; {repeats} repeats. A cell has a step with its spread, and its time over
    PyTorch's. Bytes are those of the links' counters, compute is the processor time of all hosts together. With int8
    and with rank {experiment.RANK} all messages between stages and all gradients over data are compressed."""


def section(folder: pathlib.Path) -> Section:
    """Return both systems' step times, bytes and compute, and the losses."""
    records = Records(folder / SOURCE)
    lines = sorted((line for line in records if "kinds" in line), key=lambda line: (line["mesh"], -line["rate"]))
    if not lines:
        return Section(TITLE, COMMAND, (SOURCE,), (SAME, FASTER, MUCH_FASTER))
    blocks = [_words(records, lines), _table(lines), *_parts(lines)]
    if costs := costs_of_compression(records):
        said = ", ".join(f"{signed(cost)} by {kind} on {place}" for (place, kind), cost in costs.items())
        blocks.append(
            f"""Compressed training's validation loss after {experiment.STEPS} steps against dense training's: {said}
            (one seed)."""
        )
    return Section(TITLE, COMMAND, (SOURCE,), _targets(records, lines), tuple(blocks))
