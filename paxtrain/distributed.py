"""Many processes: who coordinates them, found in the scheduler's variables or given by flags."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping

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


@contextlib.contextmanager
def _limit(seconds: float, message: str) -> Iterator[None]:
    """Ends the process with a sentence if the block takes longer: the runtime's own limit ends in a C++ abort."""

    def give_up() -> None:
        print(f"error: {message}", file=sys.stderr, flush=True)
        os._exit(2)  # The main thread sits in the runtime, where no exception reaches it.

    timer = threading.Timer(seconds, give_up)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _check_address(coordinator: str) -> None:
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise UserError(f"--coordinator must be HOST:PORT with a port from 1 to 65535, got {coordinator!r}")


def initialize(coordinator: str | None, processes: int | None, process: int | None, timeout: float) -> None:
    """Joins the processes of a launch; without flags and launcher this process stays alone.

    Args:
        coordinator: HOST:PORT of process 0; processes, process: their number and this one's. All three or none.
        timeout: seconds to wait for the coordinator and for the other processes.

    Raises:
        UserError: only some of the flags are given, or they make no sense.
        SystemExit: with code 2, after a sentence on stderr, where the others do not come in time.
    """
    given = {"--coordinator": coordinator, "--num_processes": processes, "--process_id": process}
    missing = [flag for flag, value in given.items() if value is None]
    if 0 < len(missing) < len(given):
        raise UserError(f"{', '.join(missing)} missing; --coordinator, --num_processes and --process_id go together")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not missing:
        if not 0 <= process < processes:
            raise UserError(f"--process_id must be in [0, {processes}), got {process}")
        _check_address(coordinator)
    elif detect(os.environ) is None:
        return
    where = "the launcher's variables" if missing else f"process {process} of {processes}, coordinator {coordinator}"
    late = (
        f"the processes did not find each other within {timeout:g} s ({where}); "
        "start all of them, or give a larger --coordinator_timeout"
    )
    try:
        with _limit(timeout, late):
            jax.distributed.initialize(coordinator, processes, process, initialization_timeout=int(timeout) + 60)
    except (RuntimeError, ValueError) as error:
        raise UserError(f"cannot join the other processes: {' '.join(str(error).split())}") from error
