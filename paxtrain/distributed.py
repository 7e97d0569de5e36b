"""Many processes: who coordinates them, found in the scheduler's variables or given by flags."""

import os
import socket
import time
from collections.abc import Mapping

import jax

from paxtrain.errors import UserError

# Variables that say: this is one of several processes of a launch. jax.distributed reads the rest itself.
_SIZES = {"SLURM": "SLURM_NTASKS", "Open MPI": "OMPI_COMM_WORLD_SIZE"}


def detect(environment: Mapping[str, str]) -> str | None:
    """The launcher that started this process as one of several, or None.

    SLURM and Open MPI are told by their count of tasks; Kubernetes by an indexed Job's JOB_COMPLETION_INDEX.
    """
    for launcher, variable in _SIZES.items():
        # srun sets SLURM_PROCID in each task; inside a bare salloc or sbatch shell there is a count but no task.
        started = launcher != "SLURM" or "SLURM_PROCID" in environment
        if started and int(environment.get(variable, "1")) > 1:
            return launcher
    if "KUBERNETES_SERVICE_HOST" in environment and "JOB_COMPLETION_INDEX" in environment:
        return "Kubernetes"
    return None


def _wait_for(coordinator: str, timeout: float) -> None:
    """Returns once the coordinator accepts a connection; the runtime's own failure would be a C++ abort."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UserError(f"--coordinator must be HOST:PORT, got {coordinator!r}")
    deadline, reason = time.monotonic() + timeout, "no answer"
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, int(port)), timeout=max(0.1, min(left, 5.0))).close()
            return
        except OSError as error:
            reason = str(error)
        if time.monotonic() >= deadline:
            raise UserError(
                f"the coordinator {coordinator} did not answer within {timeout:g} s ({reason}); start process 0 there, "
                "or give a larger --coordinator_timeout"
            )
        time.sleep(min(0.2, max(0.0, deadline - time.monotonic())))


def initialize(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> None:
    """Joins the processes of a launch; without flags and launcher this process stays alone.

    Args:
        coordinator: HOST:PORT of process 0; processes, process: their number and this one's. All three or none.
        timeout: seconds to wait for the coordinator and for the other processes.

    Raises:
        UserError: only some of the flags are given, or the others did not come in time.
    """
    given = {"--coordinator": coordinator, "--num_processes": processes, "--process_id": process}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise UserError(f"{', '.join(missing)} missing; --coordinator, --num_processes and --process_id go together")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not missing:
        if not 0 <= process < processes:
            raise UserError(f"--process_id must be in [0, {processes}), got {process}")
        if process:
            _wait_for(coordinator, timeout)
    elif detect(os.environ) is None:
        return
    try:
        jax.distributed.initialize(coordinator, processes, process, initialization_timeout=max(1, int(timeout)))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"the processes did not find each other within {timeout:g} s ({reason})") from error
