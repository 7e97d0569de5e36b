"""Tokens/s, MFU and bytes of our step on one device, for each save mode, beside a plain jit of the same model.

Each step has a process of its own, so that the peak of the device's memory is that of one step.
"""

import dataclasses
import pathlib
import statistics
import time
from collections.abc import Iterable
from typing import Any

import jax

from experiments.bench.trainer.steps import PipelinedStep, PlainStep
from experiments.bench.trainer.throughput import of_one_device
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from paxtrain.config.load import load_config
from paxtrain.devices import datasheets
from paxtrain.profiling import canvas
from paxtrain.run import metrics
from paxtrain.schedule.schedules import spec_of

PLAIN = "plain jit"
_AIM = 0.5  # MFU of the 1.3B model


def measure(folder: pathlib.Path, model: str, settings: dict[str, Any], save: str, steps: int) -> Result:
    """Time a step, and read its bytes.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        save: save mode, or PLAIN for the plain step.
        steps: steps to time, of which the median counts.
    """
    c, device = of_one_device(load_config(model, settings)), jax.devices()[0]
    began = time.perf_counter()
    step: PlainStep | PipelinedStep
    if save == PLAIN:
        step = PlainStep(c)
    else:
        step = PipelinedStep(dataclasses.replace(c, pipeline=dataclasses.replace(c.pipeline, save=save)), [device])
    compiled = time.perf_counter() - began
    seconds = []
    for _ in range(steps + 2):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    median = statistics.median(seconds[2:])
    speed = c.batch.global_batch * c.model.sequence / median
    peak = datasheets.peak_flops(device.device_kind)
    return {
        "model": model,
        "save": save,
        "seconds": median,
        "spread": max(seconds[2:]) / min(seconds[2:]) - 1,
        "tokens_per_second": speed,
        "mfu": metrics.mfu(speed, c.model, 1, peak) if peak else None,
        "compiled_bytes": step.bytes,
        "peak_bytes": (device.memory_stats() or {}).get("peak_bytes_in_use"),
        "compile_seconds": compiled,
        "loss": step.loss,
    }


def gigabytes(size: float | None) -> str:
    """Return bytes as GB, or a dash if they are not known."""
    return "-" if size is None else f"{size / 1e9:.2f}" if size >= 1e7 else f"{size / 1e9:.4f}"


def _draw(results: Iterable[Result], path: pathlib.Path) -> None:
    """Draw tokens/s over the plain step's, and MFU, as bars by model and save mode."""
    rows = list(results)
    figure = canvas.figure(7, 0.6 + 0.32 * len(rows))
    axes = figure.subplots()
    canvas.style(axes)
    plain = {row["model"]: row["tokens_per_second"] for row in rows if row["save"] == PLAIN}
    names = [f"{row['model']}, {row['save']}" for row in rows]
    known = all(row["mfu"] is not None for row in rows)
    values = [row["mfu"] if known else row["tokens_per_second"] / plain.get(row["model"], float("nan")) for row in rows]
    colors = ["#9aa5ae" if row["save"] == PLAIN else "#2f6f9f" for row in rows]
    axes.barh(names, values, color=colors, height=0.65)
    axes.invert_yaxis()
    axes.axvline(_AIM if known else 1.0, color="#b3261e", linewidth=1)
    axes.set_xlabel("MFU (line: the aim for 1.3B)" if known else "tokens/s over the plain jit's")
    for i, value in enumerate(values):
        axes.annotate(f" {value:.1%}" if known else f" {value:.2f}", (value, i), va="center", fontsize=8)
    axes.margins(x=0.12)
    figure.savefig(path)


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text, and draw its picture."""
    lines = ["| model | step | tokens/s | of plain | MFU | compiled GB | peak GB | spread of steps |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- | --- |")
    plain = {row["model"]: row["tokens_per_second"] for row in results.values() if row["save"] == PLAIN}
    for row in results.values():
        ratio = f"{row['tokens_per_second'] / plain[row['model']]:.3f}" if row["model"] in plain else "-"
        mfu = "-" if row["mfu"] is None else f"{row['mfu']:.1%}"
        cells = [row["model"], row["save"], f"{row['tokens_per_second']:,.0f}", ratio, mfu]
        cells += [gigabytes(row["compiled_bytes"]), gigabytes(row["peak_bytes"]), f"{row['spread']:.1%}"]
        lines.append("| " + " | ".join(cells) + " |")
    if results:
        _draw(results.values(), folder / "throughput.png")
        lines += ["", "![Tokens/s and MFU by model and save mode](throughput.png)"]
    return "\n".join(lines)


def _parts(cases: Iterable[tuple[str, dict[str, Any], str]], steps: int) -> tuple[SectionPart, ...]:
    return tuple(
        SectionPart(f"{model} {save}", measure, {"model": model, "settings": settings, "save": save, "steps": steps})
        for model, settings, save in cases
    )


_LONG: dict[str, Any] = {"model.sequence": 2048}
_MICRO = {"gpt_1_3b": 4, "gpt2_345m": 8, "gpt2_125m": 8}
_CASES: list[tuple[str, dict[str, Any], str]] = [
    (model, _LONG | {"batch.micro_batch": micro}, save)
    for saves in ((PLAIN, "residuals", "dots"), ("layer_inputs", "inputs"))
    for model, micro in _MICRO.items()
    for save in saves
]
# What makes any model small.
SMALL: dict[str, Any] = {
    "model.vocab_size": 257,
    "model.layers": 1,
    "mesh.pipe": 1,
    "model.hidden": 64,
    "model.heads": 2,
    "model.sequence": 32,
}
SMALL |= {"model.dtype": "float32", "batch.micro_batch": 2}


def settings_of(schedule: str) -> dict[str, Any]:
    """Return the settings of a schedule, by dotted key, with the fewest chunks that it takes."""
    return {"pipeline.schedule": schedule, "pipeline.virtual_stages": spec_of(schedule).least_chunks}


SECTION = Section(
    name="throughput",
    title="Tokens/s, MFU and bytes on one GPU",
    seconds=420,
    parts={
        FULL: _parts(_CASES, steps=8),
        TOY: _parts([("gpt2_125m", SMALL, save) for save in (PLAIN, "residuals", "dots")], steps=3),
    },
    describe=describe,
)
