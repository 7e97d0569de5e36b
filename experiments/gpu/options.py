"""Options of XLA, tried one by one on the training step of one device, each with the reason to try it.

Then the step of a pipeline, which the device emulates: with loops of zero or one trip in CUDA graphs, as it is
compiled, and with a host that reads their conditions.
"""

import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax

from experiments.bench.trainer.steps import tokens
from experiments.gpu.section import FULL, TOY, Result, Section, SectionPart
from experiments.gpu.throughput import SMALL, gigabytes, measure, settings_of
from paxtrain.config import MeshConfig
from paxtrain.config.load import load_config
from paxtrain.parallel.compiler_options import GRAPHED
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.schedule.schedules import names

DEFAULT = "as it is"
_GRAPHS = "--xla_gpu_enable_command_buffer"
_SKIPPING = names(lambda spec: not spec.masks(True))  # those whose stages skip in such loops
_IN_GRAPHS, _BY_HOST = "pipeline, loops in graphs", "pipeline, host reads conditions"

# Name: (XLA_FLAGS, reason).
TRIED = {
    DEFAULT: ("", "what the others are compared with"),
    "no graphs": (f"{_GRAPHS}=", "what CUDA graphs save in launches"),
    "loops in graphs": (
        f"{_GRAPHS}={','.join((*GRAPHED, 'WHILE'))}",
        "whether the loop over micro-batches fits into a graph, and what that saves",
    ),
    "library products": (
        "--xla_gpu_enable_triton_gemm=false",
        "whether cuBLAS beats XLA's own products at these sizes",
    ),
    "cuBLASLt": ("--xla_gpu_enable_cublaslt=true", "epilogues (bias, GELU) fused into the library's products"),
    "cuDNN fusions": ("--xla_gpu_cudnn_gemm_fusion_level=2", "products with cuDNN's fused epilogues, if it wins"),
    "all products tuned": ("--xla_gpu_triton_gemm_any=true", "also products that XLA would give to the library"),
    "more tiles": ("--xla_gpu_exhaustive_tiling_search=true", "what a longer search finds for the products' tiles"),
}


def pipelined(folder: pathlib.Path, settings: dict[str, Any], schedules: Sequence[str], steps: int) -> Result:
    """Time steps of a pipeline of two stages that this device emulates.

    Args:
        folder: folder of the section.
        settings: settings of the configuration "tiny", by dotted key.
        schedules: names of the schedules.
        steps: steps to time, of which the median counts.
    """
    seconds, losses = {}, {}
    for name in schedules:
        mesh = {"mesh.data": 1, "mesh.pipe": 2, "mesh.tensor": 1}
        c = load_config("tiny", settings | mesh | settings_of(name))
        trainer = Trainer(c, make_mesh(MeshConfig(), devices=jax.devices()[:1]), virtual=True)
        state, step, times = trainer.init(0), trainer.compile_step(), []
        batch = jax.device_put(tokens(c), trainer.batch_sharding)
        for _ in range(steps + 2):
            began = time.perf_counter()
            state, metrics = step(state, batch)
            losses[name] = float(metrics["loss"])
            times.append(time.perf_counter() - began)
        seconds[name] = statistics.median(times[2:])
    return {"schedules": seconds, "losses": losses}


def describe(results: dict[str, Result], folder: pathlib.Path) -> str:
    """Return the section's text."""
    lines = ["| option | reason | tokens/s | of the default | peak GB | compiled in s |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    base = results.get(DEFAULT, {}).get("tokens_per_second")
    for name, row in results.items():
        if name not in TRIED:
            continue
        flags, reason = TRIED[name]
        ratio = f"{row['tokens_per_second'] / base:.3f}" if base else "-"
        cells = [f"{name} (`{flags}`)" if flags else name, reason, f"{row['tokens_per_second']:,.0f}", ratio]
        peak = row["peak_bytes"] if row["peak_bytes"] is not None else row["compiled_bytes"]
        lines.append("| " + " | ".join([*cells, gigabytes(peak), f"{row['compile_seconds']:.0f}"]) + " |")
    graphs, host = (results.get(name, {}).get("schedules", {}) for name in (_IN_GRAPHS, _BY_HOST))
    if graphs and host:
        lines += ["", "| emulated pipeline | loops in graphs, ms | conditions read by the host, ms |"]
        lines.append("| --- | --- | --- |")
        lines += [f"| {name} | {1e3 * graphs[name]:.2f} | {1e3 * host[name]:.2f} |" for name in graphs]
    return "\n".join(lines)


def _parts(
    settings: dict[str, Any], pipeline: dict[str, Any], schedules: Sequence[str], steps: int
) -> tuple[SectionPart, ...]:
    arguments = {"model": "gpt_1_3b", "settings": settings, "save": "dots", "steps": steps}
    emulated = {"settings": pipeline, "schedules": schedules, "steps": steps}
    found = [
        SectionPart(_IN_GRAPHS, pipelined, emulated),
        SectionPart(_BY_HOST, pipelined, emulated, {"XLA_FLAGS": f"{_GRAPHS}={','.join(GRAPHED)}"}),
    ]
    found += [SectionPart(name, measure, arguments, {"XLA_FLAGS": flags}) for name, (flags, _) in TRIED.items()]
    return tuple(found)


_LARGE = {"model.sequence": 2048, "batch.micro_batch": 4, "model.layers": 6}
_PIPELINE = {
    "model.layers": 8,
    "model.hidden": 1024,
    "model.heads": 8,
    "model.sequence": 1024,
    "model.dtype": "bfloat16",
}
_PIPELINE |= {"batch.global_batch": 16, "batch.micro_batch": 2}

SECTION = Section(
    name="options",
    title="Options of XLA, one by one",
    seconds=240,
    parts={
        FULL: _parts(_LARGE, _PIPELINE, _SKIPPING, 8),
        TOY: _parts(SMALL, SMALL | {"model.layers": 2, "batch.global_batch": 4}, _SKIPPING[:1], 2),
    },
    describe=describe,
)
