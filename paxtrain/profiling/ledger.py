"""The ledger: what a step computes, moves and sends, read from programs compiled for GPUs that are not there."""

import collections
import dataclasses
import functools
import re
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax

from paxtrain.config import BatchConfig, Config, MeshConfig
from paxtrain.devices.gpus import GPUS, Gpu
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.model.parameters import flops_per_token, with_attention
from paxtrain.model.transformer import Params
from paxtrain.parallel import compiler_options
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.optimizer import make_optimizer
from paxtrain.parallel.step import Trainer
from paxtrain.schedule.schedules import names, spec_of
from paxtrain.xla import aot, costs, hlo

# The share of the data sheet's rates that kernels are taken to reach, for matrix products and for memory.
REACHED = 0.8

# Parts of a step, by the named scopes of which a kernel has one: the first part that fits, from above.
_PARTS = {
    "optimizer": ("optimizer", "sync"),
    "head": ("head", "head_loss"),
    "embedding": ("embed", "embedding"),
    "layers": ("layer",),
}
PARTS = (*_PARTS, "other")


@dataclasses.dataclass(frozen=True)
class Ledger:
    """Figures of one run of a step on one device.

    Attributes:
        executed: FLOPs of matrix products over the model's FLOPs.
        moved: bytes that kernels other than products read and write, by part.
        kernels: kernels that are run, by part, products included.
        seconds: time by the roofline: for each kernel the larger of FLOPs over FLOP/s and bytes over bytes/s, both
            rates at REACHED of the data sheet's.
        bounds: these seconds, by part.
        mfu: the model's FLOPs over what the GPU could do in these seconds, 0 to 1.
        temporary: bytes that XLA allocates besides arguments and results.
    """

    executed: float
    moved: dict[str, int]
    kernels: dict[str, int]
    seconds: float
    bounds: dict[str, float]
    mfu: float
    temporary: int

    @property
    def total(self) -> int:
        """Bytes that kernels other than products read and write."""
        return sum(self.moved.values())


def part(op_name: str) -> str:
    """Return the part of the step, one of PARTS, to which a kernel with these scopes belongs."""
    words = set(re.split(r"[/()]", op_name))
    return next((name for name, scopes in _PARTS.items() if words & set(scopes)), "other")


def read(compiled: jax.stages.Compiled, config: Config, gpu: Gpu) -> Ledger:
    """Return the ledger of a compiled step of one device.

    Args:
        compiled: the step, compiled for a GPU.
        config: its configuration, of a mesh of one device.
        gpu: the GPU.
    """
    text = compiled.as_text()
    assert text is not None
    moved, count = collections.Counter(dict.fromkeys(PARTS, 0)), collections.Counter(dict.fromkeys(PARTS, 0))
    bounds, flops = dict.fromkeys(PARTS, 0.0), 0.0
    for kernel in costs.kernels(text):
        name = part(kernel.op_name)
        count[name] += kernel.executions
        if not kernel.product:
            moved[name] += kernel.executions * kernel.bytes
        flops += kernel.executions * kernel.flops
        bound = max(kernel.flops / gpu.peak_flops, kernel.bytes / gpu.bandwidth) / REACHED
        bounds[name] += kernel.executions * bound
    wanted = config.batch.global_batch * config.model.sequence * flops_per_token(config.model)
    memory, seconds = compiled.memory_analysis(), sum(bounds.values())
    assert memory is not None
    return Ledger(
        executed=flops / wanted,
        moved=dict(moved),
        kernels=dict(count),
        seconds=seconds,
        bounds=bounds,
        mfu=wanted / seconds / gpu.peak_flops,
        temporary=memory.temp_size_in_bytes,
    )


def one_device(config: Config, layers: int = 6, micro_batches: int = 1) -> Config:
    """Return a configuration for one device, with some layers of the model.

    Args:
        config: configuration with the model, the micro-batch and the optimizer.
        layers: layers of the model.
        micro_batches: micro-batches of a step.
    """
    micro = config.batch.micro_batch
    return dataclasses.replace(
        config,
        model=with_attention(dataclasses.replace(config.model, layers=layers), (9, 0)),
        mesh=MeshConfig(),
        pipeline=dataclasses.replace(config.pipeline, schedule="eager_1f1b", virtual_stages=1, pipe_layers=""),
        batch=BatchConfig(global_batch=micro_batches * micro, micro_batch=micro),
    )


def gpus(kind: str, count: int) -> list[jax.Device]:
    try:
        return aot.devices(kind, hosts=1, per_host=count)
    except aot.Unavailable as reason:
        raise UserError(f"the ledger is read from a program for GPUs: {reason}") from reason


def trainer_for(config: Config, kind: str) -> Trainer:
    """Return the trainer of a configuration on GPUs of a kind that are not there."""
    return Trainer(config, make_mesh(config.mesh, devices=gpus(kind, config.mesh.devices)))


def ours(config: Config, kind: str) -> jax.stages.Compiled:
    """Return the training step of a configuration, compiled for GPUs of a kind."""
    trainer = trainer_for(config, kind)
    lowered = trainer.step.lower(trainer.abstract_state(), trainer.abstract_batch())
    return aot.compile(lowered, trainer.compiler_options)


def plain_step(config: Config) -> jax.stages.Wrapped:
    """Return a jitted training step with gradient accumulation that uses the model and optax only.

    The step maps (params, optimizer state, tokens) to (params, optimizer state, loss). The first two are donated.
    """
    transformation = make_optimizer(config)
    gradient = jax.value_and_grad(functools.partial(transformer.loss, config=config.model))

    @jax.named_scope("optimizer")
    def update(params: Params, state: optax.OptState, grads: Params) -> tuple[optax.Params, optax.OptState]:
        grads = jax.tree.map(lambda g: g / config.micro_batches, grads)
        if config.optimizer.clip_norm:
            norm = optax.tree.norm(grads)
            grads = jax.tree.map(lambda g: g * jnp.minimum(1, config.optimizer.clip_norm / norm), grads)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def step(
        params: Params, state: optax.OptState, tokens: jax.Array
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        batches = tokens.reshape(config.micro_batches, config.batch.micro_batch, -1)

        def accumulate(carry: tuple, batch: jax.Array) -> tuple[tuple, None]:
            total, grads = carry
            loss, new = gradient(params, batch)
            return (total + loss, jax.tree.map(jnp.add, grads, new)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zero, batches)
        return *update(params, state, grads), loss / config.micro_batches

    return jax.jit(step, donate_argnums=(0, 1))


def plain(config: Config, kind: str) -> jax.stages.Compiled:
    """Return the plain step of a configuration (`steps.plain_step`), compiled for a GPU of a kind."""
    sharding = jax.sharding.SingleDeviceSharding(gpus(kind, 1)[0])
    params = transformer.shapes(config.model)
    state = jax.eval_shape(make_optimizer(config).init, params)
    tokens = jax.ShapeDtypeStruct((config.batch.global_batch, config.model.sequence + 1), jnp.int32)
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), (params, state, tokens))
    return aot.compile(plain_step(config).lower(*placed))


@dataclasses.dataclass(frozen=True)
class Sent:
    """The collectives of one kind.

    Attributes:
        count: number of times that one is run.
        bytes: bytes of one participant's operands, over all runs.
        hidden: share of these bytes with matrix products between start and done.
    """

    count: int
    bytes: int
    hidden: float


def collectives(compiled: jax.stages.Compiled) -> dict[str, Sent]:
    """Return the collectives of a program by kind, without those of single numbers."""
    text, found = compiled.as_text(), {}
    assert text is not None
    for kind in hlo.COLLECTIVES:
        ops = [op for op in hlo.overlap(text, kind=kind) if op.bytes > 4]
        total = sum(op.bytes * op.executions for op in ops)
        if total:
            hidden = sum(op.bytes * op.executions for op in ops if op.matmuls)
            found[kind] = Sent(sum(op.executions for op in ops), total, hidden / total)
    return found


def on_mesh(config: Config, layers: int = 8, micro_batches: int = 8) -> Config:
    """Return a configuration of a 2x2x2 mesh, with some layers of the model.

    Args:
        config: configuration with the model, the micro-batch, the schedule and the optimizer.
        layers: layers of the model.
        micro_batches: micro-batches of each data rank.
    """
    micro = config.batch.micro_batch
    return dataclasses.replace(
        config,
        model=with_attention(dataclasses.replace(config.model, layers=layers), (9, 0)),
        mesh=dataclasses.replace(config.mesh, data=2, pipe=2, tensor=2),
        pipeline=dataclasses.replace(config.pipeline, pipe_layers=""),
        batch=BatchConfig(global_batch=2 * micro_batches * micro, micro_batch=micro),
    )


# Seconds for which the GPU has nothing to do each time the host reads a loop's condition: the condition's kernel
# starts, its result is copied, the host wakes up, the next kernel starts. That is four times the 5 us that the planner
# takes for a launch (planner/cost/compute.py). One kernel and a synchronisation took 5 to 7 us (JuliaGPU/CUDA.jl#896).
STOP = 20e-6


@dataclasses.dataclass(frozen=True)
class HostTime:
    """The loops of a schedule's step whose condition the host reads.

    Attributes:
        rows: rows of the schedule.
        read: loops that a device enters, or passes by, in a step, if no loop is part of a CUDA graph.
        left: loops that remain, as the step is compiled.
        most: readings of a condition in a step at most: before each loop, and behind its trip.
    """

    rows: int
    read: int
    left: int
    most: int

    @property
    def stalls(self) -> tuple[float, float]:
        """Seconds of a step that the readings cost at most: without graphs, and as the step is compiled."""
        return 2 * self.read * STOP, self.most * STOP


def host_time(trainer: Trainer, compiled: jax.stages.Compiled) -> HostTime:
    """Return the loops that ask the host in a compiled step."""
    text = compiled.as_text()
    assert text is not None
    graphs = compiler_options.GPU_LOOPS.items() <= trainer.compiler_options.items()
    read, left = (sum(loop.executions for loop in hlo.host_loops(text, graphs=g)) for g in (False, graphs))
    return HostTime(trainer.schedule.rows, read, left, 2 * left)


def scheduled(config: Config, schedule: str, tensor: int, pipe: int = 4, micro_batches: int = 8) -> Config:
    """Return a configuration of one schedule, whose stages have two layers.

    Args:
        config: configuration with the model and the micro-batch.
        schedule: name of the schedule.
        tensor: size of the tensor axis.
        pipe: number of stages.
        micro_batches: micro-batches of each data rank.
    """
    chunks = spec_of(schedule).least_chunks
    return dataclasses.replace(
        config,
        model=with_attention(dataclasses.replace(config.model, layers=2 * pipe), (9, 0)),
        mesh=dataclasses.replace(config.mesh, data=8 // pipe // tensor, pipe=pipe, tensor=tensor),
        pipeline=dataclasses.replace(config.pipeline, schedule=schedule, virtual_stages=chunks, pipe_layers=""),
        batch=BatchConfig(
            global_batch=8 // pipe // tensor * micro_batches * config.batch.micro_batch,
            micro_batch=config.batch.micro_batch,
        ),
    )


def _with_save(config: Config, save: str) -> Config:
    return dataclasses.replace(config, pipeline=dataclasses.replace(config.pipeline, save=save))


def _row(label: str, figures: Iterable[str]) -> str:
    return f"  {label:<28}" + "".join(f"{figure:>13}" for figure in figures)


def ledger(config: Config, kind: str = "h100") -> None:
    """Print the ledger of a configuration's step beside that of a plain jit, and the collectives of its step on a mesh.

    Args:
        config: configuration whose model and micro-batch are compiled.
        kind: key of paxtrain.devices.gpus.GPUS.
    """
    gpu, c, m = GPUS[kind], one_device(config), on_mesh(config)
    gpus(kind, m.mesh.devices)  # refused before anything is compiled or printed
    programs = {"plain jit": functools.partial(plain, c)}
    for save in ("residuals", "dots"):
        programs[f"ours, save={save}"] = functools.partial(ours, _with_save(c, save))
    tokens, layers = c.batch.micro_batch * c.model.sequence, c.model.layers
    shape = f"{layers} layers of {c.model.hidden}, micro-batch {c.batch.micro_batch} x {c.model.sequence}"
    print(f"\none {gpu.name}, {shape}, {c.batch.global_batch // c.batch.micro_batch} micro-batch, with the optimizer")
    print(_row("", ("executed", "other GB", "of a layer", *(n for n in PARTS if n != "layers"))))
    found = {name: read(compile(kind), c, gpu) for name, compile in programs.items()}
    for name, one in found.items():
        moved = [one.total, one.moved["layers"] / layers, *(one.moved[n] for n in PARTS if n != "layers")]
        print(_row(name, (f"{one.executed:.3f}", *(f"{x / 1e9:.2f}" for x in moved))))
    print(_row("", ("kernels", "of a layer", "temporary GB", "ms", "tokens/s", "MFU")))
    for name, one in found.items():
        figures = [f"{sum(one.kernels.values())}", f"{one.kernels['layers'] / layers:.1f}"]
        figures += [f"{one.temporary / 1e9:.2f}", f"{1e3 * one.seconds:.1f}", f"{tokens / one.seconds:,.0f}"]
        print(_row(name, (*figures, f"{one.mfu:.1%}")))

    print(f"\n8 x {gpu.name}, data=2, pipe=2, tensor=2, {m.model.layers} layers, {m.micro_batches} micro-batches")
    print(_row("", ("count", "GB", "under products")))
    for name, sent in collectives(ours(m, kind)).items():
        print(_row(name, (f"{sent.count}", f"{sent.bytes / 1e9:.3f}", f"{sent.hidden:.1%}")))
    _print_host_time(config, kind)


def _print_host_time(config: Config, kind: str) -> None:
    """Print the loops of every schedule whose condition the host reads, with and without CUDA graphs."""
    print(f"\n8 x {GPUS[kind].name}, pipe=4, 8 layers, 8 micro-batches: loops whose condition the host reads")
    print(_row("", ("rows", "loops", "of a row", "stall ms", "with graphs", "of a row", "stall ms")))
    for schedule in names():
        for tensor in (1, 2):
            c = scheduled(config, schedule, tensor)
            found = host_time(trainer_for(c, kind), ours(c, kind))
            figures = [f"{found.rows}"]
            for loops, seconds in zip((found.read, found.left), found.stalls):
                figures += [f"{loops}", f"{loops / found.rows:.2f}", f"{1e3 * seconds:.2f}"]
            print(_row(f"{schedule}, tensor={tensor}", figures))
