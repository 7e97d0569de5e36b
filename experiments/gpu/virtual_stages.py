"""Eight virtual stages on one GPU: what compression does to the loss of a model of 100M parameters, and the bytes.

The study's variants (paxtrain.study), each in a process of its own. The device computes what all devices of the mesh
would; bytes are read from the step compiled for the real mesh.
"""

import pathlib
from typing import Any

import jax

from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from paxtrain.config.load import load_config
from paxtrain.data.preparation import prepare
from paxtrain.profiling import canvas
from paxtrain.study.runs import Study
from paxtrain.study.variants import chosen, settled
from paxtrain.tables import size

_DENSE = "dense"


def measure(folder: pathlib.Path, variant: str, settings: dict[str, Any], source: str) -> Result:
    """Train one variant of the study.

    Args:
        folder: folder of the section, for the data.
        variant: name of the variant.
        settings: settings of the configuration "study", by dotted key.
        source: input of paxtrain.prepare: "stdlib", or a name with a star for files of this package.
    """
    folder /= variant  # other variants may train beside this one
    data = folder / "data"
    if not (data / "train.idx").exists():
        prepare([source], data)
    paths = {"data.train": str(data / "train"), "data.validation": str(data / "validation")}
    config = settled(load_config("study", settings | paths))
    jax.config.update("jax_num_cpu_devices", config.mesh.devices)  # the real mesh, for which steps are compiled
    [result] = Study(config, str(folder / "study"), 1, chosen(config, (), (variant,)), real_mesh=False).run(1)
    return {
        "label": result.label,
        "loss": result.final,
        "untrained": result.validation[0],
        "bytes": result.bytes,
        "total_bytes": result.total_bytes,
        "skipped": result.skipped,
        "steps": len(result.losses),
    }


def _draw(results: dict[str, Result], path: pathlib.Path) -> None:
    """Draw the loss of each variant over its bytes."""
    figure = canvas.figure(6.5, 4)
    axes = figure.subplots()
    canvas.style(axes)
    for result in results.values():
        dense = result["label"] == _DENSE
        x, y = result["total_bytes"] / 1e6, result["loss"]
        axes.plot(x, y, "o", color="#5c6670" if dense else "#2f6f9f", markersize=7)
        axes.annotate(f"  {result['label']}", (x, y), fontsize=8, va="center")
    axes.margins(0.2)
    axes.set_xlabel("MB on the links per step")
    axes.set_ylabel("validation loss, nats per token")
    figure.savefig(path)


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text, and draw its picture."""
    lines = ["| variant | bytes per step | of dense | loss | over dense | steps |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    dense = next((r for r in results.values() if r["label"] == _DENSE), None)
    for row in results.values():
        share = f"{row['total_bytes'] / dense['total_bytes']:.1%}" if dense else "-"
        more = f"{row['loss'] / dense['loss'] - 1:+.2%}" if dense else "-"
        cells = [row["label"], size(row["total_bytes"], "B"), share, f"{row['loss']:.4f}", more]
        lines.append("| " + " | ".join([*cells, str(row["steps"])]) + " |")
    if results:
        _draw(results, folder / "virtual_stages.png")
        lines += ["", "![Loss against bytes](virtual_stages.png)"]
    return "\n".join(lines)


def _parts(variants: tuple[str, ...], settings: dict[str, Any], source: str) -> tuple[SectionPart, ...]:
    return tuple(
        SectionPart(variant, measure, {"variant": variant, "settings": settings, "source": source})
        for variant in variants
    )


_LARGE = {
    "model.layers": 8,
    "model.hidden": 1024,
    "model.heads": 16,
    "model.sequence": 512,
    "model.dtype": "bfloat16",
    "mesh.data": 1,
    "mesh.pipe": 8,
    "batch.global_batch": 32,
    "batch.micro_batch": 4,
    "optimizer.learning_rate": 6e-4,
    "run.steps": 200,
    "run.eval_every": 100,
    "run.eval_batches": 4,
}
_SMALL = {"model.hidden": 32, "model.sequence": 16, "mesh.data": 1, "mesh.pipe": 2, "batch.global_batch": 4}
_SMALL |= {"batch.micro_batch": 2, "run.steps": 3, "run.eval_every": 0, "run.eval_batches": 1}
_SMALL |= {"optimizer.warmup_steps": 1, "model.layers": 2, "compress.backward.rank": 8, "compress.data.rank": 8}
_SMALL |= {"compress.forward.rank": 8}

SECTION = Section(
    name="virtual_stages",
    title="Eight virtual stages on one GPU",
    seconds=230,
    parts={
        FULL: _parts((_DENSE, "cb", "everything", "cb_epilogue", "cb_fe_sc", "cb_naive"), _LARGE, "stdlib"),
        TOY: _parts((_DENSE, "cb"), _SMALL, "stdlib"),
    },
    describe=describe,
    timed=False,
)
