"""The exact memory of a train step: XLA's own buffer assignment, compiled for GPUs that need not be there.

The step of the configuration is compiled for the named GPU (paxtrain.xla.aot), and its memory figures are read off. If
groups exchange fragments under their steps, it is the step over the largest fragment.
That takes seconds to tens of seconds; it grows with unrolled layers and stages, not with sizes. So answers are kept on
disk, keyed by everything that changes the program. Without jax's CUDA plugin the step is compiled for virtual CPU
devices, and `source` says so: that is another compiler's answer, useful in tests and never a GPU's.

    oracle(config, "h100", hosts=2, per_host=8)          in this process, which jax may already use
    oracles([...], workers=2)                            in separate processes, with a time limit and a progress bar
"""

import concurrent.futures
import dataclasses
import functools
import importlib.metadata
import multiprocessing
import multiprocessing.connection
import multiprocessing.process
import os
import pathlib
import queue
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from paxtrain import files
from paxtrain.config import Config, from_dict, to_dict
from paxtrain.errors import UserError

if TYPE_CHECKING:
    import jax


@dataclasses.dataclass(frozen=True)
class OracleMemory:
    """Memory of one device, the same on every stage: all run one program.

    Attributes:
        state: bytes of the step's arguments: master weights, optimizer, compression state and the batch.
        temporary: bytes that XLA allocates besides while the step runs.
        total: bytes of arguments, outputs that take no argument's place, and temporaries.
        compile_seconds: seconds of tracing and compiling, when it was done.
        source: name of the compilation.
    """

    state: int
    temporary: int
    total: int
    compile_seconds: float
    source: str


class CompileRequest(NamedTuple):
    """An input of `oracles`: a configuration on `hosts` x `per_host` GPUs of a kind in paxtrain.devices.gpus."""

    config: Config
    kind: str
    hosts: int
    per_host: int


@functools.cache
def _sources() -> str:
    """Return a fingerprint of the code that makes the step."""
    return files.fingerprint("compress", "paxtrain")


def program(config: Config) -> dict[str, Any]:
    """Return the parts of a configuration that the compiled step's memory depends on, as JSON values.

    Numbers of the optimizers are constants in the program: only whether a part of them exists counts.
    """
    values, opt, outer = to_dict(config), config.optimizer, config.outer
    sections = {name: values[name] for name in ("model", "mesh", "pipeline", "batch", "compress")}
    sections["pipeline"]["pipe_layers"] = ",".join(map(str, config.stage_layers))
    sections["optimizer"] = {"name": opt.name, "schedule": opt.schedule}
    sections["optimizer"] |= {"warmup": bool(opt.warmup_steps), "clip": bool(opt.clip_norm)}
    if outer.every:
        sections["outer"] = {"groups": config.groups, "momentum": outer.momentum > 0}
        sections["outer"] |= {"fragments": outer.fragments, "overlap": outer.overlap > 0}
    return sections


def cuda() -> bool:
    """Return whether jax's CUDA plugin is installed, which compiling for GPUs needs."""
    return any("cuda" in plugin.value for plugin in importlib.metadata.entry_points(group="jax_plugins"))


def _cache_file(request: CompileRequest) -> pathlib.Path:
    key = [
        program(request.config),
        [request.kind, request.hosts, request.per_host] if cuda() else "cpu",
        {name: importlib.metadata.version(name) for name in ("jax", "jaxlib")},
        _sources(),
    ]
    return files.kept_file("oracle", key)


def _load(path: pathlib.Path) -> OracleMemory | None:
    try:
        return OracleMemory(**files.kept(path))
    except TypeError:  # not there yet, or damaged: compiled again
        return None


def cached(request: CompileRequest) -> OracleMemory | None:
    """Return the answer to a request if it was compiled before; import no jax."""
    return _load(_cache_file(request))


def oracle(config: Config, kind: str, hosts: int, per_host: int) -> OracleMemory:
    """Return the memory of the configuration's train step.

    Args:
        config: configuration whose mesh has hosts * per_host devices.
        kind: kind of GPU in paxtrain.devices.gpus.
        hosts: number of hosts.
        per_host: GPUs of a host.

    Raises:
        UserError: the kind is unknown, the mesh does not have that many devices, or there is neither the CUDA plugin
            nor enough CPU devices in this process.
    """
    request = CompileRequest(config, kind, hosts, per_host)
    path = _cache_file(request)
    memory = _load(path) or _compile(request)
    files.keep(path, dataclasses.asdict(memory))
    return memory


def _devices(request: CompileRequest) -> tuple[list["jax.Device"], str]:
    """Return the devices to compile for, and the name of the compilation."""
    import jax

    from paxtrain.xla import aot

    needed = request.hosts * request.per_host
    if not cuda():
        devices = jax.devices("cpu")
        if len(devices) < needed:
            raise UserError(
                f"compiling for {needed} devices without jax's CUDA plugin takes as many CPU devices, but this process "
                f"has {len(devices)}; install requirements-gpu.txt or set jax_num_cpu_devices={needed}"
            )
        return devices[:needed], "CPU compilation"
    try:
        devices = aot.devices(request.kind, request.hosts, request.per_host)
    except aot.Unavailable as error:
        raise UserError(str(error)) from error
    return devices, f"XLA for {devices[0].device_kind}"


def _compile(request: CompileRequest) -> OracleMemory:
    import jax

    from paxtrain.outer.trainer import GroupedTrainer, trainer_of
    from paxtrain.parallel.mesh import make_mesh
    from paxtrain.xla import aot

    devices, by = _devices(request)
    start = time.perf_counter()
    trainer = trainer_of(request.config, make_mesh(request.config.mesh, devices=devices))
    if isinstance(trainer, GroupedTrainer):
        trainer = trainer.fullest()
    lowered = trainer.step.lower(trainer.abstract_state(), trainer.abstract_batch())
    gpu = trainer.platform == "gpu"
    compiled = aot.compile(lowered, trainer.compiler_options) if gpu else lowered.compile(trainer.compiler_options)
    seconds, stats = time.perf_counter() - start, compiled.memory_analysis()
    assert stats is not None  # only other backends give none
    state, temporary = stats.argument_size_in_bytes, stats.temp_size_in_bytes
    total = state + temporary + stats.output_size_in_bytes - stats.alias_size_in_bytes
    return OracleMemory(state, temporary, total, seconds, f"{by}, jax {jax.__version__}")


# --- Many, in separate processes --------------------------------------------------------------------------------------


def _serve(connection: multiprocessing.connection.Connection, cpu_devices: int) -> None:
    """Answer requests until None comes; an error goes back as a sentence."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # XLA warns of every transfer whose time it cannot estimate
    import jax

    jax.config.update("jax_platforms", "cpu")
    if not cuda():
        jax.config.update("jax_num_cpu_devices", cpu_devices)
    for config, *where in iter(connection.recv, None):
        try:
            connection.send(oracle(from_dict(config), *where))
        except Exception as error:
            connection.send(f"{type(error).__name__}: {error}")


class _Worker:
    """A process that compiles one request at a time; it is killed and started again if one takes too long."""

    def __init__(self, cpu_devices: int):
        self._cpu_devices = cpu_devices
        self._process: multiprocessing.process.BaseProcess | None = None

    def __call__(self, request: CompileRequest, seconds: float) -> OracleMemory | str:
        if self._process is None:
            # Not a fork: jax's threads would not survive it.
            context = multiprocessing.get_context("spawn")
            self._connection, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, self._cpu_devices), daemon=True)
            self._process.start()
            other.close()
        try:
            self._connection.send((to_dict(request.config), *request[1:]))
            if self._connection.poll(seconds):
                return self._connection.recv()
            reason = f"not compiled in {seconds:g} s"
        except (EOFError, OSError):
            reason = "the compiling process ended"
        self.close()
        return reason

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def oracles(
    requests: Sequence[CompileRequest], workers: int = 1, seconds: float = 300, progress: bool = False
) -> list[OracleMemory | str]:
    """Call `oracle` for many requests, at most `workers` at a time, in separate processes.

    This process does not import jax for it.

    Args:
        requests: what to compile.
        workers: number of processes.
        seconds: limit of each.
        progress: show a bar.

    Returns:
        In the order of the requests the memory, or a sentence: why there is none.
    """
    from tqdm import tqdm

    cpu_devices = max((r.hosts * r.per_host for r in requests), default=1)
    idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
    pool = [_Worker(cpu_devices) for _ in range(workers)]
    for worker in pool:
        idle.put(worker)

    def answer(request: CompileRequest) -> OracleMemory | str:
        if found := cached(request):
            return found
        worker = idle.get()
        try:
            return worker(request, seconds)
        finally:
            idle.put(worker)

    try:
        with concurrent.futures.ThreadPoolExecutor(workers) as threads:
            answers = threads.map(answer, requests)
            return list(tqdm(answers, "memory oracle", len(requests), disable=not progress, unit="program"))
    finally:
        for worker in pool:
            worker.close()
