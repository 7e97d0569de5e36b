"""Joining the processes of a launch: by the launcher's variables or by flags."""

import base64
import contextlib
import errno
import io
import json
import math
import os
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from absl import flags

from paxtrain.errors import PREFIX, UserError, whole
from paxtrain.process import jax_private, launchers, listening

LOST = 60.0  # seconds, the default of --lost_timeout
MOST_PROCESSES = 2**16  # as many as 8,192 hosts of 8 devices have
_BARRIER = 3_600_000  # milliseconds that `wait_for_all` and `gather_texts` wait
_LATER = 10.0  # seconds that jax's service, which names the missing process, has until this process gives up
_GATHER = "gather"
_waits: Counter[str] = Counter()  # calls by name; the name of a barrier, or of a key, can be used once

_BAD_INPUT = -1  # in place of an error number


def define_flags() -> None:
    """Define the flags whose values `initialize` takes."""
    about = (
        "HOST:PORT of process 0; SLURM, Open MPI 4 and Kubernetes need none, other MPIs and torchrun this flag alone."
    )
    flags.DEFINE_string("coordinator", None, about)
    flags.DEFINE_integer("num_processes", None, "Number of processes.", 1, MOST_PROCESSES)
    flags.DEFINE_integer("process_id", None, "This process's number.", 0, MOST_PROCESSES - 1)
    flags.DEFINE_float("coordinator_timeout", 300, "Seconds to wait for the other processes.", 1, 1_000_000)
    flags.DEFINE_float("lost_timeout", LOST, "Seconds after which a silent process counts as lost.", 1, 1_000_000)
    flags.DEFINE_float("hang_timeout", 0, "Seconds without a finished step; 0: 20 steps, at least 0.9 of lost.", 0, 1e6)
    for name in ("coordinator_timeout", "lost_timeout", "hang_timeout"):
        flags.register_validator(name, math.isfinite, "it must be a number of seconds")


def alone(coordinator: str | None, processes: int | None, process: int | None) -> bool:
    """Return whether the flags say that this process is the only one.

    Args:
        coordinator: HOST:PORT of process 0, or None.
        processes: number of processes, or None.
        process: number of this process, or None.
    """
    return (coordinator, processes, process) == (None, 1, None)


def host_names() -> list[str]:
    """Return the host name of every process, by process index."""
    return gather_texts(socket.gethostname())


def agree(error: UserError | OSError | None) -> None:
    """End all processes if one of them has found bad input or a disk that fails, so that none waits for it.

    Args:
        error: The error of this process, or None.

    Raises:
        UserError, OSError: `error`, or an error of its kind that names the first process with one.
    """
    if jax.process_count() > 1:
        kind = 0 if error is None else _BAD_INPUT if isinstance(error, UserError) else error.errno or errno.EIO
        kinds = allgather(np.array([kind])).flatten()
        if kinds.any() and error is None:
            first = int(np.flatnonzero(kinds)[0])
            if kinds[first] == _BAD_INPUT:
                raise UserError(f"process {first} found bad input; its own output says what")
            raise OSError(int(kinds[first]), f"process {first} failed; its own output says what")
    if error is not None:
        raise error


def wait_for_all(what: str) -> None:
    """Return when all processes have called this function equally often with the same `what`.

    This barrier is not a collective. The time limit of collectives notices failures and may be shorter than the
    compilation that delays another process.
    """
    client = jax_private.coordination_client()
    if client is not None and jax.process_count() > 1:
        _waits[what] += 1
        client.wait_at_barrier(f"paxtrain/{what}/{_waits[what]}", _BARRIER)


def gather_texts(text: str) -> list[str]:
    """Return every process's text, once all have called.

    The texts travel through the key-value store of jax's coordinator, which compiles nothing and waits as long as
    `wait_for_all` does.
    """
    client, count, me = jax_private.coordination_client(), jax.process_count(), jax.process_index()
    if client is None or count == 1:
        return [text]
    turn = _waits[_GATHER] = _waits[_GATHER] + 1
    where = f"paxtrain/{_GATHER}/{turn}"
    if me:
        client.key_value_set(f"{where}/{me}", text)
        return json.loads(client.blocking_key_value_get(f"{where}/0", _BARRIER))
    texts = [text, *(client.blocking_key_value_get(f"{where}/{i}", _BARRIER) for i in range(1, count))]
    client.key_value_set(f"{where}/0", json.dumps(texts))
    if turn > 1:  # all have called, so all have read the last texts
        client.key_value_delete(f"paxtrain/{_GATHER}/{turn - 1}/")
    return texts


def allgather(x: Any, tiled: bool = False) -> Any:
    """Return every process's numpy value, which must be small: it travels as `gather_texts` says.

    Args:
        x: array or pytree of arrays, of the same types and, without `tiled`, of the same shapes on all processes.
        tiled: whether to concatenate the values along the first dim, instead of stacking them.
    """
    leaves, structure = jax.tree.flatten(x)
    packed = io.BytesIO()
    np.savez(packed, *leaves)
    every = [np.load(io.BytesIO(base64.b64decode(text))) for text in gather_texts(_base64(packed.getvalue()))]

    def join(parts: list[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts) if tiled else np.stack(parts)

    return jax.tree.unflatten(structure, [join([each[name] for each in every]) for name in every[0].files])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _is_shared(program: jax.stages.Compiled) -> bool:
    """Return whether a program runs on devices of other processes, too."""
    devices = {device for sharding in jax.tree.leaves(program.output_shardings) for device in sharding.device_set}
    return any(device.process_index != jax.process_index() for device in devices)


def compiled_together(function: jax.stages.Wrapped, what: str) -> Callable[..., Any]:
    """Return a jitted function as one that runs only when every process whose devices it uses has compiled it.

    Processes that compile for longer than others would keep those waiting inside the program's first collective, whose
    time limit is short. All processes make the same calls in the same order.

    Args:
        function: jitted function.
        what: name of the program.
    """
    programs: dict[Any, jax.stages.Compiled] = {}

    def call(*arguments: Any) -> Any:
        leaves, structure = jax.tree.flatten(arguments)
        key = (structure, tuple((leaf.shape, leaf.dtype, getattr(leaf, "sharding", None)) for leaf in leaves))
        if key not in programs:
            programs[key] = function.lower(*arguments).compile()
            if _is_shared(programs[key]):
                wait_for_all(f"{what} is compiled")
        return programs[key](*arguments)

    return call


@contextlib.contextmanager
def _limit(seconds: float, message: str) -> Iterator[None]:
    """End the process with an error message if the block takes longer; the runtime's limit would abort in C++."""

    def give_up() -> None:
        print(f"{PREFIX}{message}", file=sys.stderr, flush=True)
        os._exit(1)  # the main thread is inside the runtime, where no exception reaches it

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _limit_collectives(seconds: float) -> None:
    """Let collectives end after 1.5 times so many seconds, unless XLA_FLAGS says otherwise.

    By then jax's service has named the lost process, and a process that hangs has named itself. NCCL's flag limits
    only the forming of its communicators. A collective that hangs on GPUs is ended by `Progress`.
    """
    given = os.environ.get("XLA_FLAGS", "")
    names = ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds")
    more = [f"--{name}={math.ceil(1.5 * seconds)}" for name in names if name not in given]
    os.environ["XLA_FLAGS"] = " ".join([*given.split(), *more])


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not whole(port, 2**16 - 1):
        raise UserError(f"--coordinator must be HOST:PORT with a port from 1 to 65535, got {coordinator!r}")


def _bind_address(coordinator: str) -> str | None:
    """Return the one address at which the coordinator can listen, or None: at all of the machine, as jax has it.

    Args:
        coordinator: HOST:PORT of this process.

    Raises:
        UserError: The port is taken.
    """
    listening.require_free(coordinator)  # jax's server may end the process with SIGSEGV if it is not
    host, _, port = coordinator.rpartition(":")
    found = listening.addresses(host.strip("[]"))
    if found == listening.ALL:
        return None
    return f"[{found[0]}]:{port}" if ":" in found[0] else f"{found[0]}:{port}"


def initialize(
    coordinator: str | None, processes: int | None, process: int | None, timeout: float, lost: float = LOST
) -> None:
    """Join the processes of a launch; without flags and launcher this process stays alone.

    The first three arguments go together: all are given, or none, or only the coordinator if a launcher says the rest.
    `processes=1` alone is allowed as well, and keeps this process alone whatever the launcher says. If the others do
    not join in time, the process ends: jax's service names those that are missing, or one sentence says that process 0
    has not answered.

    Args:
        coordinator: HOST:PORT of process 0.
        processes: Number of processes.
        process: Number of this process, from 0.
        timeout: Seconds to wait for the coordinator and for the other processes.
        lost: Seconds after which a process that is silent counts as lost: jax's service names it, and ends all others.

    Raises:
        UserError: Only some of the flags are given, one has an invalid value, the launcher does not say where process 0
            is, or the runtime cannot join.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if alone(coordinator, processes, process):
        return
    launch = launchers.detect(os.environ) if processes is None and process is None else None
    if launch:
        coordinator, processes, process = coordinator or launch.coordinator, launch.processes, launch.process
    else:
        given = {"--coordinator": coordinator, "--num_processes": processes, "--process_id": process}
        missing = [flag for flag, value in given.items() if value is None]
        if len(missing) == len(given):
            return
        if missing:
            raise UserError(
                f"{', '.join(missing)} missing; --coordinator, --num_processes and --process_id go together"
            )
    if processes is not None and process is not None:
        if processes > MOST_PROCESSES:
            raise UserError(f"--num_processes may be at most {MOST_PROCESSES:,}, got {processes}")
        if not 0 <= process < processes:
            raise UserError(f"--process_id must be in [0, {processes}), got {process}")
    if coordinator is not None:
        _check_address(coordinator)
    elif launch and not launch.found:
        raise UserError(
            f"{launch.launcher} started this process as number {process} of {processes}, but does not say where to "
            "meet; add --coordinator=HOST:PORT, a free port of process 0's host, or --num_processes=1 to run each "
            "process alone"
        )
    where = (
        f"process {process} of {processes}, coordinator {coordinator}" if coordinator else "the launcher's variables"
    )
    late = (
        f"the processes did not find each other within {timeout:g} s ({where}); see whether process 0 is up and can be "
        "reached, and whether its output names a missing one, or give a larger --coordinator_timeout"
    )
    _limit_collectives(lost)
    jax_private.name_missing_processes(math.ceil(timeout))
    try:
        with _limit(timeout + _LATER, late):
            if coordinator is None:
                coordinator, processes, process = jax_private.detect_launch(None, processes, process, int(timeout))
            if coordinator is None or processes is None or process is None:
                raise ValueError(
                    "jax does not find process 0 by the launcher's variables; give --coordinator, --num_processes and "
                    "--process_id" + (", or pip install kubernetes" if launch and launch.process is None else "")
                )
            jax.distributed.initialize(
                coordinator,
                processes,
                process,
                local_device_ids=launchers.local_devices(os.environ),
                cluster_detection_method="deactivate",
                initialization_timeout=int(timeout) + 60,
                coordinator_bind_address=None if process else _bind_address(coordinator),
                heartbeat_timeout_seconds=math.ceil(lost),
            )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the other processes: {' '.join(str(error).split())}") from error
