"""What a run says about itself in tables: mesh, schedule and bytes on each device at its start, losses at its end."""

import math
from typing import Any

import jax

from paxtrain.parallel.selective import StageTimes
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics
from paxtrain.tables import size


def parameters_per_device(trainer: Trainer) -> int:
    """Parameters of which one device holds the weights in a step: its stage's slots over tensor, padding included."""
    mesh, total = trainer.config.mesh, 0
    specs = trainer.layout.specs(data=False)
    for x, spec in zip(jax.tree.leaves(trainer.layout.shapes), jax.tree.leaves(specs), strict=True):
        shares = {"pipe": mesh.pipe, "tensor": mesh.tensor}
        split = 1
        for axis in spec:
            split *= shares.get(axis, 1)
        total += x.size // split
    return total


def describe(trainer: Trainer, memory: Any, compile_seconds: float) -> list[tuple[str, str]]:
    """The table of a run's start, as (what, figure).

    Args:
        memory: XLA's CompiledMemoryStats of the train step, per device.
        compile_seconds: what compiling it took.
    """
    config, layout = trainer.config, trainer.layout
    mesh, schedule = config.mesh, trainer.schedule
    depth = trainer.buffers.residual_depth if mesh.pipe > 1 else 1
    how = "ZeRO-1 shards" if mesh.zero1 else "replicated optimizer"
    how += ", sequence parallel" if mesh.sequence_parallel else ""
    stages = ",".join(map(str, layout.counts))
    padding = f"; {layout.padding():.0%} of the layer slots are padding" if layout.padding() else ""
    flying = "chunks" if layout.chunks > 1 else "micro-batches"
    # Of F, B and W of equal length; split, (P-1)(F+B-W) of m(F+B+W).
    work = config.micro_batches * (3 if schedule.splits else config.pipeline.virtual_stages)
    bubble = (mesh.pipe - 1) / (work + mesh.pipe - 1)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return [
        ("model", f"{size(config.model.parameter_count())} parameters, {config.model.layers} layers of "
                  f"{config.model.hidden}, sequence {config.model.sequence}, {config.model.dtype}"),
        ("mesh", f"data={mesh.data} pipe={mesh.pipe} tensor={mesh.tensor}, {how}, on "
                 f"{jax.process_count()} process(es) of {trainer.mesh.devices.flat[0].device_kind}"),
        ("batch", f"{config.batch.global_batch} sequences = {mesh.data} data ranks x {config.micro_batches} "
                  f"micro-batches x {config.batch.micro_batch}"),
        ("schedule", f"{config.pipeline.schedule}, {schedule.rows} rows, ideal bubble {bubble:.0%}, "
                     f"{depth} {flying} in flight, save={config.pipeline.save}"),
        ("layers per stage", stages + padding),
        *trainer.compression.describe(),
        ("per device", f"{size(parameters_per_device(trainer))} parameters"),
        ("memory per device", f"{size(held, 'B')} state and batch, {size(memory.temp_size_in_bytes, 'B')} temporary "
                              "(XLA's buffer assignment)"),
        ("compiled in", f"{compile_seconds:.1f} s"),
    ]  # fmt: skip


def stage_times(times: StageTimes, chosen: tuple[int, ...], source: str) -> list[tuple[str, str]]:
    """What selective compression was decided from."""
    row = lambda values: " ".join(f"{value:.4g}" for value in values)  # noqa: E731
    return [
        (f"last backward ends ({source})", f"{row(times.finish)} s, by stage"),
        ("reduction over data", f"{row(times.dense)} s dense, {row(times.compressed)} s compressed"),
        ("compressed over data", "stages " + ", ".join(map(str, chosen)) if chosen else "no stage"),
    ]


def losses(what: str, values: dict[str, float]) -> list[tuple[str, str]]:
    """A row for each validation loss, by its name in the metrics."""
    rows = []
    for name, loss in values.items():
        perplexity = math.inf if loss > 700 else math.exp(loss)  # e**710 is no float: of a run that has diverged
        part = name.removeprefix(metrics.VALIDATION).replace("/", ", ")
        rows.append((what + part, f"{loss:.4f} nats per token, perplexity {perplexity:.2f}"))
    return rows
