"""Variables by which launchers tell a process its number, how many there are, and which GPUs of the host are its."""

import pathlib
import re
from collections.abc import Mapping
from typing import NamedTuple

from paxtrain.errors import UserError, whole


class Launch(NamedTuple):
    """A launch of several processes, as this one's variables describe it; None: they do not say.

    Attributes:
        launcher: name of the launcher.
        processes: number of processes.
        process: number of this process.
        coordinator: HOST:PORT of process 0.
        found: whether jax finds what is None.
    """

    launcher: str
    processes: int | None
    process: int | None
    coordinator: str | None
    found: bool


class _Launcher(NamedTuple):
    """A launcher and its variables.

    Attributes:
        name: its name.
        processes: variable of the number of processes.
        process: variable of this process's number.
        on_host: variable of the number of processes on this host; empty: there is one.
        of_host: variable of this process's number on this host; empty: it is 0.
        found_by: variable by which jax finds the coordinator; empty: it does not.
    """

    name: str
    processes: str
    process: str
    on_host: str = ""
    of_host: str = ""
    found_by: str = ""


_STEP = "SLURM_STEP_NODELIST"
_INTERACTIVE = "4294967290"  # SLURM's step number for the shell of salloc, which is not a task
_SLURM = _Launcher("SLURM", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_TASKS_PER_NODE", "SLURM_LOCALID", _STEP)
_PMI = _Launcher("MPICH or Intel MPI", "PMI_SIZE", "PMI_RANK", "MPI_LOCALNRANKS", "MPI_LOCALRANKID")
_OPEN_MPI = _Launcher(
    name="Open MPI",
    processes="OMPI_COMM_WORLD_SIZE",
    process="OMPI_COMM_WORLD_RANK",
    on_host="OMPI_COMM_WORLD_LOCAL_SIZE",
    of_host="OMPI_COMM_WORLD_LOCAL_RANK",
    found_by="OMPI_MCA_orte_hnp_uri",  # which Open MPI 5 no longer sets
)
# In this order: MPI starts its processes inside of SLURM's steps, and scripts for PyTorch set its variables everywhere.
_LAUNCHERS = (
    _Launcher("a JAXJob", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"),  # of Kubeflow's trainer, version 2
    _Launcher("a JAXJob", "NUM_PROCESSES", "PROCESS_ID"),  # of version 1
    _OPEN_MPI,
    _PMI,
    _SLURM,
    _Launcher("torchrun", "WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "LOCAL_RANK"),
)
_POD = "JOB_COMPLETION_INDEX"  # of an indexed Job of Kubernetes


def _number(environment: Mapping[str, str], variable: str) -> int:
    """Return the number that a launcher's variable has, 1 if it is not set.

    Raises:
        UserError: It has something else.
    """
    text = environment.get(variable, "1")
    number = whole(text)
    if number is None:
        raise UserError(
            f"the environment has {variable}={text[:40]!r}, where the launcher puts a number; start the processes with "
            f"the launcher, or unset {variable}"
        )
    return number


def _is_step(environment: Mapping[str, str]) -> bool:
    """Return whether srun started this process; the shells of salloc and sbatch have a number of tasks, too."""
    return _STEP in environment and environment.get("SLURM_STEP_ID") != _INTERACTIVE


def _says(launcher: _Launcher, environment: Mapping[str, str]) -> bool:
    """Return whether a launcher's variables are those of this process, which may be its only one."""
    if not {launcher.processes, launcher.process} <= set(environment):
        return False
    if launcher.process == "PROCESS_ID":
        return "COORDINATOR_ADDRESS" in environment  # else these are anybody's variables
    if launcher is _PMI:  # srun sets PMI's variables, too, if it is asked for that interface
        step = environment.get(_SLURM.processes), environment.get(_SLURM.process)
        return not (_is_step(environment) and step == (environment[_PMI.processes], environment[_PMI.process]))
    return launcher is not _SLURM or _is_step(environment)


def _launcher(environment: Mapping[str, str]) -> _Launcher | None:
    """Return the launcher that started this process as one of several, or None."""
    said = (each for each in _LAUNCHERS if _says(each, environment))
    return next((each for each in said if _number(environment, each.processes) > 1), None)


def is_launched(environment: Mapping[str, str]) -> bool:
    """Return whether a launcher started this process, perhaps as the only one."""
    # A process of the shell of sbatch counts, which is where a job of one task runs.
    alone = any(variable in environment for variable in (_POD, _SLURM.process))
    return alone or any(_says(each, environment) for each in _LAUNCHERS)


def _coordinator(launcher: _Launcher, environment: Mapping[str, str]) -> str | None:
    prefix = "" if launcher.process == "PROCESS_ID" else "JAX_"  # jax reads its own variable under every launcher
    address, port = (environment.get(f"{prefix}COORDINATOR_{what}") for what in ("ADDRESS", "PORT"))
    return f"{address}:{port}" if address and port and ":" not in address else address


def detect(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that started this process as one of several, or None.

    Raises:
        UserError: The process runs in the shell of an allocation of several tasks or nodes, and would use only a part;
            or a variable of the launcher has no number.
    """
    if found := _launcher(environment):
        processes, process = _number(environment, found.processes), _number(environment, found.process)
        return Launch(found.name, processes, process, _coordinator(found, environment), found.found_by in environment)
    if "KUBERNETES_SERVICE_HOST" in environment and _POD in environment:
        _number(environment, _POD)
        return Launch("Kubernetes", None, None, None, True)
    if (
        "SLURM_JOB_ID" in environment
        and not _is_step(environment)
        and not any(_says(each, environment) for each in _LAUNCHERS)
    ):
        for variable, what in (("SLURM_NTASKS", "tasks"), ("SLURM_JOB_NUM_NODES", "nodes")):
            if (count := _number(environment, variable)) > 1:
                raise UserError(
                    f"this process is in SLURM's allocation of {count} {what}, but not one of its tasks; start it with "
                    "srun, or with srun --nodes=1 --ntasks=1 to run it alone"
                )
    return None


def expected_processes(environment: Mapping[str, str]) -> int:
    """Return the number of processes that the launcher started, or 1 if it does not say."""
    launch = detect(environment)
    return (launch and launch.processes) or 1


def _on_host(launcher: _Launcher, environment: Mapping[str, str]) -> int:
    """Return the number of processes on this host; SLURM writes "2(x3),1" for three hosts with two and one with one."""
    if launcher is not _SLURM:
        return _number(environment, launcher.on_host)
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", environment.get(launcher.on_host, "1")):
        counts += [int(count)] * min(int(times or 1), 1_000_000)
    host = whole(environment.get("SLURM_NODEID", "0"))
    return counts[host] if host is not None and host < len(counts) else max(counts, default=1)


def local_devices(environment: Mapping[str, str]) -> list[int] | None:
    """Return the GPUs of this process, numbered among those that it sees; None: all.

    A process that is alone on its host has all. Of several each has the one with its number on the host, unless each
    sees other ones (srun --gpus-per-task), as it must if it sees fewer than there are processes.
    """
    launcher = _launcher(environment)
    if launcher is None or "JAX_LOCAL_DEVICE_IDS" in environment:
        return None
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        count = len([device for device in visible.split(",") if device.strip()])
    else:
        count = len([path for path in pathlib.Path("/dev").glob("nvidia[0-9]*") if path.name[6:].isdecimal()])
    processes = _on_host(launcher, environment)
    apart = 0 < count < processes or (launcher is _SLURM and "SLURM_GPUS_PER_TASK" in environment)
    if processes == 1 or apart:
        return list(range(count)) or None
    return [_number(environment, launcher.of_host)]
