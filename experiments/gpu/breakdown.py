"""A traced step, reduced to its parts, beside what the ledger estimates for them from the compiled program."""

import dataclasses
import pathlib
from typing import Any

import jax

from experiments.bench.trainer.steps import PipelinedStep
from experiments.bench.trainer.throughput import of_one_device
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from experiments.gpu.throughput import SMALL
from paxtrain.config.load import load_config
from paxtrain.devices import gpus
from paxtrain.profiling import canvas, ledger
from paxtrain.profiling.breakdown import OVER_TENSOR, breakdown

# Parts of a trace that are one part of the ledger: the ledger counts the embedding's lookup apart, a trace does not.
_TRACED = {
    "layers and embedding": ("forward", "backward"),
    "head": ("head",),
    "optimizer": ("optimizer", "sync"),
    "other": ("other", "embedding", "compression", "pipeline", *OVER_TENSOR, "gather", "data"),
    "idle": ("idle", "input"),
}
_ESTIMATED = {"layers and embedding": ("layers", "embedding"), "head": ("head",), "optimizer": ("optimizer",)}
_ESTIMATED["other"] = ("other",)
_STAND_IN = "h100"  # whose rates the estimate takes if the device is not listed


def measure(folder: pathlib.Path, model: str, settings: dict[str, Any], save: str, steps: int) -> Result:
    """Trace a step on one device.

    Args:
        folder: folder of the section.
        model: name of a configuration.
        settings: settings of it, by dotted key.
        save: save mode.
        steps: steps to trace.
    """
    c, device = of_one_device(load_config(model, settings)), jax.devices()[0]
    c = dataclasses.replace(c, pipeline=dataclasses.replace(c.pipeline, save=save))
    step = PipelinedStep(c, [device])
    found = breakdown(step.run, step.compiled, step.mesh, steps)
    seconds = {name: float(values[0]) for name, values in found.seconds.items()}
    here = gpus.find(device.device_kind)
    kind = here if here in gpus.GPUS else _STAND_IN
    estimate = ledger.read(step.compiled, c, gpus.GPUS[kind])
    return {
        "step": f"{model}, save={save}",
        "traced": {name: sum(seconds[part] for part in parts) for name, parts in _TRACED.items()},
        "parts": {name: value for name, value in seconds.items() if value},
        "estimated": {name: sum(estimate.bounds[part] for part in parts) for name, parts in _ESTIMATED.items()},
        "estimated_for": gpus.GPUS[kind].name,
        "kernels": sum(estimate.kernels.values()),
        "total": found.total,
        "untraced": found.untraced,
    }


def _draw(results: dict[str, Result], path: pathlib.Path) -> None:
    """Draw each step's parts as two stacked bars: traced, and estimated."""
    figure = canvas.figure(7, 0.9 + 0.7 * len(results))
    axes = figure.subplots()
    canvas.style(axes)
    colors = ("#2f6f9f", "#d9622b", "#4f8a3c", "#8a5aa8", "#c9ced3")
    rows = [(f"{r['step']}\n{kind}", r[kind]) for r in results.values() for kind in ("traced", "estimated")]
    left = [0.0] * len(rows)
    for name, color in zip(_TRACED, colors):
        widths = [1e3 * values.get(name, 0.0) for _, values in rows]
        axes.barh([label for label, _ in rows], widths, left=left, color=color, label=name, height=0.6)
        left = [a + b for a, b in zip(left, widths)]
    axes.invert_yaxis()
    axes.set_xlabel("ms of a step")
    figure.legend(ncols=len(_TRACED), fontsize=7, frameon=False, loc="outside lower center")
    figure.savefig(path)


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text, and draw its picture."""
    lines = []
    for result in results.values():
        step = f"{1e3 * result['untraced']:.1f} ms untraced, {1e3 * result['total']:.1f} ms traced"
        lines += [f"{result['step']}: {step}; {result['kernels']} kernels. Estimated for {result['estimated_for']}."]
        lines += ["", "| part | traced ms | estimated ms | traced over estimated |", "| --- | --- | --- | --- |"]
        for name, traced in result["traced"].items():
            estimated = result["estimated"].get(name)
            other = f"{1e3 * estimated:.2f} | {traced / estimated:.2f}" if estimated else "- | -"
            lines.append(f"| {name} | {1e3 * traced:.2f} | {other} |")
        lines.append("")
    if results:
        _draw(results, folder / "breakdown.png")
        lines.append("![Traced and estimated parts of a step](breakdown.png)")
    return "\n".join(lines)


# Each kernel is launched by itself, so that the trace names it; graphs of kernels would count as "other".
_NO_GRAPHS = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
_LARGE = {"model.sequence": 2048, "batch.micro_batch": 4, "model.layers": 12}

SECTION = Section(
    name="breakdown",
    title="A traced step beside the ledger's estimate",
    seconds=100,
    parts={
        FULL: tuple(
            SectionPart(save, measure, {"model": "gpt_1_3b", "settings": _LARGE, "save": save, "steps": 3}, _NO_GRAPHS)
            for save in ("residuals", "dots")
        ),
        TOY: (
            SectionPart(
                "dots", measure, {"model": "gpt_1_3b", "settings": SMALL, "save": "dots", "steps": 2}, _NO_GRAPHS
            ),
        ),
    },
    describe=describe,
)
