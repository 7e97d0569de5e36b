"""Our training step beside a plain jit of the same model, on one device."""

import dataclasses
import statistics

import jax

from experiments.bench.trainer.steps import PipelinedStep, PlainStep, interleave
from paxtrain.config import BatchConfig, Config, MeshConfig
from paxtrain.devices import datasheets
from paxtrain.model.transformer import settle_attention
from paxtrain.run import metrics
from paxtrain.tables import size


def of_one_device(config: Config) -> Config:
    """Return a configuration for one device: 8 micro-batches of its size, and the attention that suits the device."""
    micro = config.batch.micro_batch
    return dataclasses.replace(
        config,
        model=settle_attention(config.model, jax.devices()[0]),
        mesh=MeshConfig(),
        pipeline=dataclasses.replace(config.pipeline, schedule="eager_1f1b", virtual_stages=1, pipe_layers=""),
        batch=BatchConfig(global_batch=8 * micro, micro_batch=micro),
    )


def throughput(repeats: int, config: Config) -> None:
    """Print tokens/s and bytes of our step and of the plain one, and their MFU if the device's peak is known.

    Args:
        repeats: steps of each, of which the median counts.
        config: configuration whose model and micro-batch are measured.
    """
    c = of_one_device(config)
    count, device = c.batch.global_batch * c.model.sequence, jax.devices()[0]
    peak = c.run.peak_flops or datasheets.peak_flops(device.device_kind)
    steps: dict[str, PipelinedStep | PlainStep] = {"plain jit": PlainStep(c)}
    for save in ("residuals", "dots"):
        changed = dataclasses.replace(c, pipeline=dataclasses.replace(c.pipeline, save=save))
        steps[f"ours, save={save}"] = PipelinedStep(changed, [device])
    seconds = interleave(steps, repeats)
    shape = f"{c.model.layers} layers of {c.model.hidden}, sequence {c.model.sequence}, {c.model.dtype}"
    batch = f"8 micro-batches of {c.batch.micro_batch}"
    print(f"\none {device.device_kind}, {shape}, {batch}, median of {repeats} steps run in turn")
    for name, values in seconds.items():
        # Ratios step by step: neighbours in time see the same machine.
        ratio = statistics.median(a / b for a, b in zip(seconds["plain jit"], values, strict=True))
        speed = count / statistics.median(values)
        figures = f"{speed:>10,.0f} tokens/s{ratio:>8.3f} of plain"
        if peak:
            figures += f"{metrics.mfu(speed, c.model, 1, peak):>8.1%} MFU"
        print(f"  {name:<22}{figures}{size(steps[name].bytes, 'B'):>10}   loss {steps[name].loss:.6f}")
