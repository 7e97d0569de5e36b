"""Benchmarks of the train step: python -m paxtrain.bench [--sections=memory,throughput,bubble].

    memory      temporary bytes by schedule, save mode and number of micro-batches (XLA's memory analysis)
    throughput  our step on a 1x1x1 mesh beside a plain jit of the same model without any of our machinery; of a small
                model, or of the one that --config=configs/gpt_1_3b.py names: tokens/s, MFU and bytes
    bubble      pipe=2 over two real processes, one per core: step time over its bubble-free part, beside (m+P-1)/m
                or, for F, B and W of equal length, (m+(P-1)/3)/m

Every ratio compares things measured in turn in the same run. Nothing here is a test.
"""

import dataclasses
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from absl import flags

from paxtrain import flags as shared_flags
from paxtrain import tables
from paxtrain.config import SPLIT, BatchConfig, Config, MeshConfig, from_dict
from paxtrain.devices import datasheets
from paxtrain.errors import UserError, run
from paxtrain.model import transformer
from paxtrain.parallel.mesh import from_process_rows, make_mesh, process_rows
from paxtrain.parallel.optimizer import make_optimizer
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.process.distributed import initialize
from paxtrain.run import metrics

SECTIONS = ("memory", "throughput", "bubble")
HINT = f"choose with --sections={','.join(SECTIONS)}"
# glibc gives a step's big buffers back to the system and faults them in again page by page in the next one, which costs
# time that grows with the rings. A GPU's allocator keeps its memory; so these settings make glibc.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40), "MALLOC_ARENA_MAX": "1"}


def configuration(mesh: tuple[int, int, int], micro_batches: int, hidden: int = 256, **pipeline: Any) -> Config:
    """A small model in float32, with `micro_batches` micro-batches of 4 sequences per data rank."""
    data, pipe, tensor = mesh
    return from_dict({
        "model": {"layers": 8, "hidden": hidden, "heads": 4, "sequence": 128, "dtype": "float32"},
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor},
        "pipeline": pipeline,
        "batch": {"global_batch": 4 * micro_batches * data, "micro_batch": 4},
    })  # fmt: skip


def tokens(config: Config) -> np.ndarray:
    shape = (config.batch.global_batch, config.model.sequence + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)


def interleave(steps: dict[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[float]]:
    """Seconds of every step, run in turn, so that whatever slows the machine slows them all."""
    for step in steps.values():
        step()
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def memory() -> None:
    """Prints temporary bytes of the step on a (1, 4, 2) mesh of virtual devices."""
    print("\ntemporary bytes per device, pipe=4, tensor=2, 8 layers of 256, float32 (CPU buffer assignment)")
    print(f"  {'schedule':<18}{'save':<14}{'m=8':>10}{'m=32':>10}{'ratio':>8}")
    rows = [(schedule, "dots") for schedule in ("eager_1f1b", "1f1b", "interleaved_1f1b", "gpipe", "zb_h1")]
    rows += [("eager_1f1b", save) for save in ("layer_inputs", "residuals", "inputs")]
    for schedule, save in rows:
        chunks = 2 if schedule == "interleaved_1f1b" else 1

        def temporary(m: int, schedule: str = schedule, save: str = save, chunks: int = chunks) -> int:
            c = configuration((1, 4, 2), m, schedule=schedule, save=save, virtual_stages=chunks)
            return Trainer(c, make_mesh(c.mesh)).compile_step().memory_analysis().temp_size_in_bytes

        few, many = temporary(8), temporary(32)
        print(
            f"  {schedule:<18}{save:<14}{tables.size(few, 'B'):>10}{tables.size(many, 'B'):>10}{many / few:>8.3f}",
            flush=True,
        )


def plain_step(config: Config) -> Any:
    """jit of a training step with gradient accumulation and nothing of ours but the model and optax.

    (params, optimizer state, tokens) -> (params, optimizer state, loss), the first two donated.
    """
    transformation = make_optimizer(config)
    gradient = jax.value_and_grad(functools.partial(transformer.loss, config=config.model))

    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        batches = tokens.reshape(config.micro_batches, config.batch.micro_batch, -1)

        def accumulate(carry: tuple, batch: jax.Array) -> tuple[tuple, None]:
            total, grads = carry
            loss, new = gradient(params, batch)
            return (total + loss, jax.tree.map(jnp.add, grads, new)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        (loss, grads), _ = jax.lax.scan(accumulate, zero, batches)
        grads = jax.tree.map(lambda g: g / config.micro_batches, grads)
        norm = optax.tree.norm(grads)
        grads = jax.tree.map(lambda g: g * jnp.minimum(1, config.optimizer.clip_norm / norm), grads)
        updates, state = transformation.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss / config.micro_batches

    return jax.jit(step, donate_argnums=(0, 1))


def _bytes(compiled: jax.stages.Compiled) -> int:
    m = compiled.memory_analysis()
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


class _Ours:
    """Our step with its state, to be called for its time; the loss of the last call is kept."""

    def __init__(self, config: Config, devices: Sequence[jax.Device]) -> None:
        self._trainer = Trainer(config, make_mesh(config.mesh, devices=devices))
        self._state: TrainState = self._trainer.init(0)
        sharding, shape = self._trainer.batch_sharding, self._trainer.abstract_batch().shape
        rows = process_rows(sharding, shape)
        self._tokens = from_process_rows(sharding, shape, rows, tokens(config)[rows])
        self._step = self._trainer.compile_step()
        self.bytes = _bytes(self._step)

    def __call__(self) -> None:
        self._state, metrics = self._step(self._state, self._tokens)
        self.loss = float(metrics["loss"])


class _Plain:
    """The plain step with its state."""

    def __init__(self, config: Config) -> None:
        self._params = jax.jit(functools.partial(transformer.init, config.model))(jax.random.key(0))
        self._state = make_optimizer(config).init(self._params)
        self._tokens = jnp.asarray(tokens(config))
        self._step = plain_step(config).lower(self._params, self._state, self._tokens).compile()
        self.bytes = _bytes(self._step)

    def __call__(self) -> None:
        self._params, self._state, loss = self._step(self._params, self._state, self._tokens)
        self.loss = float(loss)


def _of_one_device(config: Config) -> Config:
    """A configuration's model on one device: 8 micro-batches of its size, and the attention that suits the device."""
    micro = config.batch.micro_batch
    return dataclasses.replace(
        config,
        model=transformer.settle_attention(config.model, jax.devices()[0]),
        mesh=MeshConfig(),
        pipeline=dataclasses.replace(config.pipeline, schedule="eager_1f1b", virtual_stages=1, pipe_layers=""),
        batch=BatchConfig(global_batch=8 * micro, micro_batch=micro),
    )


def throughput(repeats: int, config: Config) -> None:
    """Prints tokens/s, bytes and, where the device's peak is known, MFU of our step and of the plain one on one device.

    Bytes are the compiled program's: state, batch and temporary.
    """
    c = _of_one_device(config)
    count, device = c.batch.global_batch * c.model.sequence, jax.devices()[0]
    peak = c.run.peak_flops or datasheets.peak_flops(device.device_kind)
    steps = {"plain jit": _Plain(c)}
    for save in ("residuals", "dots"):
        changed = dataclasses.replace(c, pipeline=dataclasses.replace(c.pipeline, save=save))
        steps[f"ours, save={save}"] = _Ours(changed, [device])
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
        print(f"  {name:<22}{figures}{tables.size(steps[name].bytes, 'B'):>10}   loss {steps[name].loss:.6f}")


def two_processes(module: str, repeats: int) -> Any:
    """What the first of two processes of a module prints as its last line, JSON; None where there is one core only.

    Each calls `enter` with what its flags --worker and --coordinator say.

    Raises:
        UserError: one of them failed.
    """
    if len(os.sched_getaffinity(0)) < 2:
        return None
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{s.getsockname()[1]}"
    command = [sys.executable, "-m", module, f"--coordinator={coordinator}", f"--repeats={repeats}"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}  # stdin closes when this process ends
    environment = os.environ | _KEEP_MEMORY
    workers = [subprocess.Popen([*command, f"--worker={i}"], **pipes, text=True, env=environment) for i in range(2)]
    output = [worker.stdout.read() for worker in workers]
    codes = [worker.wait() for worker in workers]
    for worker in workers:
        worker.stdin.close()
    if any(codes):
        raise UserError(f"the two processes of {module} ended with {codes}")
    return json.loads(output[0].splitlines()[-1])


def enter(process: int, coordinator: str) -> None:
    """Makes this one of `two_processes`: on a core of its own, with one device, and ended when its parent is."""
    threading.Thread(target=lambda: os.read(0, 1) or os._exit(1), daemon=True).start()
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[process]})
    jax.config.update("jax_num_cpu_devices", 1)
    initialize(coordinator, 2, process, 60)


def bubble(repeats: int) -> None:
    """Prints the pipeline's bubble over two processes, each on a core of its own."""
    measured = two_processes("paxtrain.bench", repeats)
    if measured is None:
        print("\nbubble: skipped, it needs two cores")
        return
    print(f"\nbubble, pipe=2 over two processes, one per core, median of {repeats} steps: step time over m x slope")
    print(f"  {'schedule':<14}{'m':>4}{'seconds':>10}{'measured':>10}{'ideal':>8}")
    measured = {schedule: {int(m): s for m, s in seconds.items()} for schedule, seconds in measured.items()}
    few, many = sorted(measured["eager_1f1b"])[-2:]
    # Seconds that a further micro-batch takes. One slope for all, so that a stall in the steady state shows as well.
    slope = min((times[many] - times[few]) / (many - few) for times in measured.values())
    for schedule, times in measured.items():
        for m, value in times.items():
            ideal = (m + (1 / 3 if schedule in SPLIT else 1)) / m
            print(f"  {schedule:<14}{m:>4}{value:>10.4f}{value / (m * slope):>10.3f}{ideal:>8.3f}")


def _worker(process: int, coordinator: str, repeats: int) -> None:
    """One of the two processes of `bubble`: step times of several numbers of micro-batches, as JSON."""
    enter(process, coordinator)
    cases = [(schedule, m) for schedule in ("eager_1f1b", "1f1b", "zb_h1") for m in (2, 4, 8)]
    steps = {case: _Ours(configuration((1, 2, 1), case[1], schedule=case[0]), jax.devices()) for case in cases}
    result: dict[str, dict[int, float]] = {}
    for (schedule, m), values in interleave(steps, repeats).items():
        result.setdefault(schedule, {})[m] = statistics.median(values)
    print(json.dumps(result), flush=True)


def main(argv: Sequence[str]) -> None:
    """Runs the sections."""
    f = flags.FLAGS
    if f.worker is not None:
        _worker(f.worker, f.coordinator, f.repeats)
        return
    unknown = set(f.sections) - set(SECTIONS)
    if unknown:
        raise UserError(f"unknown section {sorted(unknown)[0]!r}; known are {', '.join(SECTIONS)}")
    jax.config.update("jax_num_cpu_devices", 8)
    config = from_dict(f.config) if f.config else configuration((1, 1, 1), 8)
    sections = {
        "memory": memory,
        "throughput": lambda: throughput(f.repeats, config),
        "bubble": lambda: bubble(f.repeats),
    }
    for section in f.sections:
        sections[section]()


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_list("sections", list(SECTIONS), "What to measure.")
    shared_flags.define_config("config", None, "For throughput: a file with model, micro-batch and optimizer.")
    # A file that could not be loaded raises when it is first used: here, while flags are parsed.
    flags.register_validator(
        "config", lambda config: config is None or hasattr(config, "items"), "get_config() must return a ConfigDict"
    )
    flags.DEFINE_integer("repeats", 15, "Steps per figure, of which the median counts.", lower_bound=1)
    flags.DEFINE_integer("worker", None, "For the bubble's own processes.")
    flags.DEFINE_string("coordinator", None, "For the bubble's own processes.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
