"""The tables that a run prints: mesh, schedule and memory per device at its start, losses and what to do at its end."""

import math
import pathlib
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from paxtrain.config import Config, OptimizerConfig, read_section, to_dict
from paxtrain.config.axes import in_words
from paxtrain.errors import command
from paxtrain.model import parameters
from paxtrain.outer.trainer import GroupedTrainer
from paxtrain.parallel.compressed_stages import StageTimes
from paxtrain.parallel.optimizer import learning_rate
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics
from paxtrain.tables import size, some

# What continues without a jump of the learning rate.
NO_JUMP = (
    "runs with optimizer.schedule=wsd go on without a jump from a checkpoint before their decay, and so does a new run "
    "that begins with this one's export (--config.init) and warms up"
)
CONFIG = "config.json"  # the configuration, in the run's folder
_OF_BATCH, _OF_RUN = ("global_batch",), ("steps", "seed")  # settings that change what a run learns
NO_STAGE = "no stage, because the step would not end sooner"  # that compresses over data


# What is in shards over data, by mesh.shard.
_SHARDS = {
    "none": "replicated optimizer",
    "optimizer": "ZeRO-1 shards",
    "gradients": "ZeRO-2 shards",
    "weights": "ZeRO-3 shards",
}


def describe(trainer: Trainer, memory: Any, compile_seconds: float, levels: Sequence[int]) -> list[tuple[str, str]]:
    """Return the table for the start of a run, as rows of (label, figure).

    Args:
        trainer: Trainer of the run.
        memory: XLA's CompiledMemoryStats of the training step, for one device.
        compile_seconds: Seconds that its compilation took.
        levels: Level of every stage once compression over data has started; 0: dense.
    """
    config, layout = trainer.config, trainer.layout
    mesh, schedule = config.mesh, trainer.schedule
    depth = trainer.buffers.residual_depth if mesh.pipe > 1 else 1
    how = _SHARDS[mesh.shard] + (f" in {mesh.copies} groups" if mesh.copies > 1 else "")
    how += ", sequence parallel" if mesh.sequence_parallel else ""
    stages = ",".join(map(str, layout.counts))
    padding = f"; {layout.padding():.0%} of the layer slots are padding" if layout.padding() else ""
    flying = "chunks" if layout.chunks > 1 else "micro-batches"
    # F, B and W are taken to be equally long. A split backward idles (P-1)(F+B-W) beside m(F+B+W) of work.
    work = config.micro_batches * config.pipeline.virtual_stages * (3 if schedule.splits else 1)
    bubble = (mesh.pipe - 1) / (work + mesh.pipe - 1)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    model, batch = config.model, config.batch
    shape = f"{model.layers} layers of {model.hidden}, sequence {model.sequence}, {model.dtype}"
    attention = {"cudnn": "cuDNN's", "xla": "XLA's"}[layout.config.model.attention]
    devices = f"{jax.process_count()} process(es) of {trainer.mesh.devices.flat[0].device_kind}"
    each = batch.data_micro_batches if config.uneven else config.micro_batches
    parts = f"{mesh.data} data ranks x {each} micro-batches x {batch.micro_batch}"
    rows = f"{schedule.rows} rows, ideal bubble {bubble:.0%}, {depth} {flying} in flight"
    temporary = f"{size(memory.temp_size_in_bytes, 'B')} temporary (XLA's buffer assignment)"
    return [
        ("model", f"{size(parameters.published(model))} parameters, {shape}, {attention} attention"),
        ("mesh", f"{in_words(mesh.sizes)}, {how}, on {devices}"),
        ("batch", f"{batch.global_batch} sequences = {parts}"),
        ("schedule", f"{config.pipeline.schedule}, {rows}, save={config.pipeline.save}"),
        ("layers per stage", stages + padding),
        *_compression(trainer, levels),
        *(trainer.describe() if isinstance(trainer, GroupedTrainer) else ()),
        ("per device", f"{size(layout.parameters_per_device)} parameters"),
        ("memory per device", f"{size(held, 'B')} state and batch, {temporary}"),
        ("compiled in", f"{compile_seconds:.1f} s"),
    ]


def _compression(trainer: Trainer, levels: Sequence[int]) -> list[tuple[str, str]]:
    """Return the rows about compression, with the stages that `selective` has chosen."""
    if trainer.config.compress.data.stages != "selective":
        return trainer.compression.describe()
    stages = [stage for stage, level in enumerate(levels) if level]
    rows = trainer.compression.describe(stages)
    return [(what, how if stages or what != "gradients over data" else f"selective: {NO_STAGE}") for what, how in rows]


def stage_times(times: StageTimes, chosen: tuple[int, ...], source: str) -> list[tuple[str, str]]:
    """Return the table of the times from which selective compression chose its stages, as rows of (label, figure).

    Args:
        times: Times of each stage.
        chosen: Numbers of the stages that compress.
        source: "given" or "measured".
    """

    def row(values: tuple[float, ...]) -> str:
        return " ".join(f"{value:.4g}" for value in values)

    return [
        (f"last backward ends ({source})", f"{row(times.finish)} s, by stage"),
        ("reduction over data", f"{row(times.dense)} s dense, {row(times.compressed)} s compressed"),
        ("compressed over data", "stages " + ", ".join(map(str, chosen)) if chosen else NO_STAGE),
    ]


def losses(what: str, values: dict[str, float]) -> list[tuple[str, str]]:
    """Return a table row for each validation loss.

    Args:
        what: Start of the first column.
        values: Losses in nats per token, by their names in the metrics.
    """
    rows = []
    for name, loss in values.items():
        perplexity = math.inf if loss > 700 else math.exp(loss)  # e**710 overflows; such a run has diverged
        part = name.removeprefix(metrics.VALIDATION).replace("/", ", ")
        rows.append((what + part, f"{loss:.4f} nats per token, perplexity {perplexity:.2f}"))
    return rows


def changed_settings(before: Mapping[str, Any], now: Config, updates: int) -> str:
    """Return a sentence on the settings with which a run goes on otherwise than it began, and on the learning rate.

    Where and in which parts the work is done does not count. The data and the compression are told by themselves.

    Args:
        before: The configuration of the checkpoint, as its metadata has it.
        now: The configuration of the run.
        updates: Number of updates that are done.

    Returns:
        The sentence, or "" if nothing differs.
    """
    here = to_dict(now)
    different = [
        f"{section}.{name} was {value} and is {here[section][name]}"
        for section, names in (("optimizer", ()), ("outer", ()), ("model", ()), ("batch", _OF_BATCH), ("run", _OF_RUN))
        for name, value in before.get(section, {}).items()
        if (not names or name in names) and here[section].get(name, value) != value
    ]
    if not different:
        return ""
    opt, steps = read_section(OptimizerConfig, before["optimizer"], "optimizer"), before["run"]["steps"]
    rates = [float(learning_rate(*each)(updates)) for each in ((opt, steps), (now.optimizer, now.run.steps))]
    if math.isclose(*rates, rel_tol=1e-3):
        return some(different)
    jump = f"; {NO_JUMP}" if rates[1] > 1.1 * rates[0] else ""
    return f"{some(different)}; the next step's learning rate was {rates[0]:.3g} and is {rates[1]:.3g}{jump}"


def next_steps(out: pathlib.Path, sampled: bool, config: Config, also: str = "") -> list[tuple[str, str]]:
    """Return the commands that a finished run's folder is for, as rows of (what for, command).

    Args:
        out: Folder of the run.
        sampled: Whether the folder has a tokenizer, without which there is no sample and no export.
        config: Configuration of the run.
        also: What the run has besides its configuration, in words.
    """
    run, model = shlex.quote(str(out)), shlex.quote(f"{out}_hf")
    opt, steps = config.optimizer, config.run.steps
    rates = [float(learning_rate(opt, total)(steps)) for total in (steps, 2 * steps)]
    go_on = f"{command('paxtrain.train')} --config={shlex.quote(str(out / CONFIG))} --config.run.steps={2 * steps}"
    go_on += "" if config.checkpoint.resume else " --config.checkpoint.resume=True"
    rows = [("to go on", f"{go_on} with {also}" if also else go_on)]
    if rates[1] > 1.1 * rates[0]:
        rows.append(("learning rate", f"jumps then from {rates[0]:.3g} to {rates[1]:.3g}; {NO_JUMP}"))
    if sampled:
        rows += [
            ("to sample", f"{command('paxtrain.sample')} --checkpoint={run}"),
        ]
        if parameters.architecture(config.model).model_types:  # else Hugging Face's files do not know it
            rows.append(("to export", f"{command('paxtrain.huggingface export')} --checkpoint={run} --out={model}"))
    return rows
