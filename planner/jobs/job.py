"""A job, however it is launched: planner.run for each process of each node."""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Sequence

from planner.cluster import device_sheets

# Environment variables of all processes on GPUs, with the reason, unless the user has set them.
GPU_VARIABLES = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": (
        f"{device_sheets.USABLE:g}",
        "Plans assume this fraction; XLA takes three quarters of a GPU's memory by default.",
    ),
    "NCCL_DEBUG": ("WARN", "NCCL then names the peer or device of a failure, and prints nothing else."),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A run and its resources.

    Attributes:
        config: path or shipped name of the configuration, as given to planner.run.
        plan: path of a plan.json, or "auto".
        out: folder of the run, the same on all nodes.
        nodes: number of nodes that the job asks for.
        min_nodes: smallest number of nodes that it accepts.
        gpus_per_node: number of GPUs of each node; 0 on CPUs.
        per_gpu: whether each GPU has its own process, instead of each node.
        max_restarts: largest number of restarts after faults.
        signal_ahead: seconds between SIGTERM and the end, for a last checkpoint.
        arguments: further flags of planner.run.
    """

    config: str
    plan: str
    out: str
    nodes: int
    min_nodes: int
    gpus_per_node: int = 0
    per_gpu: bool = False
    max_restarts: int = 10
    signal_ahead: int = 300
    arguments: tuple[str, ...] = ()

    @property
    def processes_per_node(self) -> int:
        """Number of processes of each node."""
        return self.gpus_per_node if self.per_gpu else 1

    @property
    def gpus_per_process(self) -> int:
        """Number of GPUs of each process."""
        return self.gpus_per_node // self.processes_per_node

    @property
    def finished(self) -> str:
        """File that planner.run writes when all steps are done."""
        return str(pathlib.PurePath(self.out, "finished"))

    def run(self, *more: str) -> list[str]:
        """Return planner.run's arguments after `python`; `arguments` come last and so take precedence."""
        given = [f"--config={self.config}", f"--plan={self.plan}", f"--out={self.out}"]
        given.append(f"--gpus={self.gpus_per_process}")
        if self.plan != "auto" and self.min_nodes < self.nodes:
            given.append("--replan")  # a plan is for all nodes, but the job may continue with fewer
        return ["-m", "planner.run", *given, *more, *self.arguments]


def shell(arguments: Sequence[str], indent: int = 4) -> str:
    """Return a command's arguments, quoted for a shell and broken into lines."""
    lines = [""]
    for argument in map(shlex.quote, arguments):
        if lines[-1] and len(lines[-1]) + len(argument) > 104:
            lines.append("")
        lines[-1] += f" {argument}" if lines[-1] else argument
    return f" \\\n{' ' * indent}".join(lines)


def seconds(time: str) -> int | None:
    """Return the seconds of a time in SLURM's notation, or None if it is not valid.

    SLURM knows MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS and DAYS-HOURS[:MINUTES[:SECONDS]].
    """
    found = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", time, re.ASCII)
    if not found:
        return None
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None:  # without days, minutes come first, or hours if there are three parts
        hours, minutes, secs = parts if len(parts) == 3 else (0, *parts, *([0] if len(parts) == 1 else []))
    else:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
