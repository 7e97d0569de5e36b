"""The private names of jax that this project needs, each with the reason why no public one serves.

No other module of the packages imports `jax._src`, and of the tests only `tests/programs.py`. When a new jax moves one
of these names, this module and its test are the only ones to change.
"""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax._src import cache_key, clusters, compiler, distributed
from jax._src.cudnn import fused_attention_stablehlo
from jax._src.lib import _jax


class CoordinationClient(Protocol):
    """The methods of jax's coordination service's client that this project uses."""

    def wait_at_barrier(self, barrier_id: str, timeout_in_ms: int) -> None:
        """Return when every process waits at the barrier; a name can be used once."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Store a value for all processes."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Return the value of a key, and wait until a process has stored it."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Return the keys of a directory that have a value now, with it; the name ends in a slash."""

    def key_value_delete(self, key: str) -> None:
        """Delete a key, or a whole directory if the key ends in a slash."""


def coordination_client() -> CoordinationClient | None:
    """Return this process's client of the coordination service, or None if it has not joined other processes.

    `jax.distributed` has no barrier and no key-value store. The public `multihost_utils` has them as collectives only,
    which hang if a process is lost and need a backend.
    """
    return distributed.global_state.client


def joined_processes() -> int:
    """Return the number of processes that have joined this one, itself included.

    `jax.process_count()` creates the backend, after which the number of its devices is fixed.
    """
    return distributed.global_state.num_processes


def joined_number() -> int:
    """Return the number of this process among those that have joined, 0 if it is alone; see `joined_processes`."""
    return distributed.global_state.process_id


def coordinator_address() -> str | None:
    """Return HOST:PORT of the coordinator that this process has joined, or None.

    `jax.distributed` tells whether it is initialised, but not the address.
    """
    return distributed.global_state.coordinator_address


def name_missing_processes(seconds: int) -> None:
    """Let process 0 say after so many seconds which processes have not joined, and end all that have.

    `jax.distributed.initialize` does not pass this limit on. Its own one ends the processes without naming any.
    """
    service = _jax.get_distributed_runtime_service
    whole = getattr(service, "func", service)
    _jax.get_distributed_runtime_service = functools.partial(whole, cluster_register_timeout=seconds)


def detect_launch(
    coordinator: str | None, processes: int | None, process: int | None, timeout: int
) -> tuple[str | None, int | None, int | None]:
    """Complete the values of the flags with those of the launcher's environment.

    `jax.distributed.initialize` detects the same values, but offers them only after all processes have joined.

    Args:
        coordinator: HOST:PORT of process 0, or None to detect it.
        processes: number of processes, or None to detect it.
        process: number of this process, or None to detect it.
        timeout: seconds to wait for a name server that does not know the coordinator yet.

    Returns:
        Coordinator, number of processes and number of this process; None for each that is unknown.
    """
    detect = clusters.ClusterEnv.auto_detect_unset_distributed_params
    address, count, number, _ = detect(coordinator, processes, process, [], None, timeout)
    return address, count, number


def share_compiled_programs() -> None:
    """Let all processes load from jax's persistent cache the programs that one of them has compiled.

    On GPUs jax leaves the order of the devices, and other facts that differ from process to process, out of a program's
    key; a loaded program gets them anew. On CPUs jax includes them, so that each process would compile every program.
    No setting changes that.
    """
    whole = cache_key._hash_serialized_compile_options
    cache_key._hash_accelerator_config = cache_key._hash_devices  # type: ignore[assignment]  # jax's own fallback
    cache_key._hash_serialized_compile_options = lambda hashed, options, **_: whole(
        hashed, options, strip_device_assignment=True
    )


def compile_options(devices: Sequence[jax.Device]) -> Any:
    """Return the options with which the backend loads a program of one replica for these devices.

    The public `serialize_executable.deserialize_and_load` takes devices, and no device assignment.
    """
    ids = np.array([[device.id for device in devices]])
    return compiler.get_compile_options(1, ids.size, ids, backend=devices[0].client)


@contextlib.contextmanager
def without_cudnn() -> Iterator[None]:
    """Trace cuDNN's attention in the block as on a current GPU, also on a machine that has neither.

    `jax.nn.dot_product_attention` asks for the library and the GPU when it is traced, although only compiling needs
    them. To ask for the GPU it would also create the backend.
    """
    module = fused_attention_stablehlo
    stand_ins = {
        "check_cudnn_version": lambda: 91100,
        "check_compute_capability": lambda capability: True,
        "is_cuda_compute_capability_equal": lambda capability: False,
    }
    before = {name: getattr(module, name) for name in stand_ins}
    for name, stand_in in stand_ins.items():
        setattr(module, name, stand_in)
    try:
        yield
    finally:
        for name, own in before.items():
            setattr(module, name, own)
