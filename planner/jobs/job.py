"""What a job is, whichever way it is launched: a supervisor and planner.run for each process of each node."""

import dataclasses
import pathlib
import re
import shlex
from collections.abc import Sequence

from planner.memory import closed_form

LOGS = "logs"  # in --out

# What all processes on GPUs are given where the user has not set it.
GPU_VARIABLES = {
    "XLA_PYTHON_CLIENT_MEM_FRACTION": (
        f"{closed_form.USABLE:g}",
        "What plans count on; XLA takes three quarters of a GPU's memory otherwise.",
    ),
    "NCCL_DEBUG": ("WARN", "NCCL then says which peer or device it failed on, and nothing else."),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, and what it may use.

    Attributes:
        config, plan, out: what planner.run is given; out must be the same folder on all nodes.
        nodes, min_nodes: how many it wants, and with how many it makes do.
        gpus_per_node: 0 on CPUs. per_gpu: a process per GPU, not per node.
        max_restarts: after faults, so often at most.
        signal_ahead: seconds between SIGTERM and the end, for a last checkpoint.
        link_timeout: of the supervisors.
        arguments: more flags of planner.run.
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
    link_timeout: float = 60.0
    arguments: tuple[str, ...] = ()

    @property
    def processes_per_node(self) -> int:
        return self.gpus_per_node if self.per_gpu else 1

    @property
    def gpus_per_process(self) -> int:
        return self.gpus_per_node // self.processes_per_node

    @property
    def logs(self) -> str:
        return str(pathlib.PurePath(self.out, LOGS))

    @property
    def finished(self) -> str:
        """What planner.run leaves when all steps are done."""
        return str(pathlib.PurePath(self.out, "finished"))

    def supervise(self, *more: str) -> list[str]:
        """The supervisor's arguments, but for the hosts."""
        limits = [f"--link_timeout={self.link_timeout:g}"]
        return ["-m", "planner.supervise", *more, *limits, f"--finished={self.finished}"]

    def run(self, *more: str) -> list[str]:
        """planner.run's arguments; `arguments` come last, and so count."""
        given = [f"--config={self.config}", f"--plan={self.plan}", f"--out={self.out}"]
        given.append(f"--gpus={self.gpus_per_process}")
        if self.plan != "auto" and self.min_nodes < self.nodes:
            given.append("--replan")  # a plan is for all nodes, and the job goes on with fewer
        return ["-m", "planner.run", *given, *more, *self.arguments]


def shell(arguments: Sequence[str], indent: int = 4) -> str:
    """A command's arguments, quoted for a shell and broken into lines."""
    lines = [""]
    for argument in map(shlex.quote, arguments):
        if lines[-1] and len(lines[-1]) + len(argument) > 104:
            lines.append("")
        lines[-1] += f" {argument}" if lines[-1] else argument
    return f" \\\n{' ' * indent}".join(lines)


def seconds(time: str) -> int | None:
    """Of one of SLURM's times: MINUTES, MINUTES:SECONDS, HOURS:MINUTES:SECONDS, DAYS-HOURS[:MINUTES[:SECONDS]].

    None: it is none of these.
    """
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", time)
    if not found:
        return None
    days, *rest = found.groups()
    parts = [int(part) for part in rest if part is not None]
    if days is None:  # minutes come first, or hours where there are three
        hours, minutes, secs = parts if len(parts) == 3 else (0, *parts, *([0] if len(parts) == 1 else []))
    else:
        hours, minutes, secs = (*parts, 0, 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs
