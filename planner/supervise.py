"""Run one host's command of a run under supervision: python -m planner.supervise --host=I --hosts=a,b,c -- COMMAND.

Start it once per host, or once per process if a host has several. When a command fails, or a host or a link is gone,
all commands end within a bounded time with one sentence that names the first cause; see docs/faults.md.
"""

import asyncio
import hashlib
import math
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence

from absl import flags

from paxtrain.errors import UserError, run
from planner.supervision.peer_connections import PORT, PeerConnections
from planner.supervision.supervisor import STOPPED, Limits, Supervisor, environment
from planner.supervision.worker_process import WorkerProcess

# Environment variables in which launchers give a process its number.
_NUMBERS = ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "JOB_COMPLETION_INDEX")


def addresses(hosts: str, port: int, per_host: int = 1) -> list[tuple[str, int]]:
    """Return the host and port of every supervisor.

    Args:
        hosts: HOST or HOST:PORT, joined by commas, or @FILE with one a line.
        port: port of hosts that are given without one.
        per_host: number of supervisors of each host, on consecutive ports.

    Raises:
        UserError: if the file cannot be read, or an address is not valid or occurs twice.
    """
    if hosts.startswith("@"):
        try:
            hosts = ",".join(pathlib.Path(hosts[1:]).read_text().split())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"cannot read --hosts={hosts} ({error}); name a file with one HOST or HOST:PORT a line"
            ) from error
    found = []
    for item in hosts.split(","):
        bracket = item.endswith("]")  # an IPv6 address without a port
        host, colon, number = (item, "", "") if bracket or ":" not in item else item.rpartition(":")
        if not host or (colon and not (number.isdecimal() and 0 < int(number) < 1 << 16)):
            raise UserError(
                f"--hosts must be HOST or HOST:PORT joined by commas, or @FILE with one a line, got {item!r}"
            )
        first = int(number) if colon else port
        found += [(host.strip("[]"), first + i) for i in range(per_host)]
    if len(set(found)) < len(found):
        host, twice = next(each for each in found if found.count(each) > 1)
        raise UserError(f"--hosts has {host}:{twice} twice; give processes of one host different ports")
    return found


def names(found: Sequence[tuple[str, int]]) -> list[str]:
    """Return the names of the supervisors in messages: their hosts, with the port if a host has several."""
    hosts = [host for host, _ in found]
    return [host if hosts.count(host) == 1 else f"{host}:{port}" for host, port in found]


def number(given: int | None, count: int, variables: Mapping[str, str]) -> int:
    """Return this host's number, as given or from the launcher's environment.

    Args:
        given: number from the flag; None if not given.
        count: number of hosts.
        variables: environment variables.

    Raises:
        UserError: if the number is missing or out of range.
    """
    if given is None:
        told = next((variables[name] for name in _NUMBERS if variables.get(name, "").isdecimal()), None)
        if told is None and count > 1:
            raise UserError("--host is missing; give this host's place in --hosts, from 0 on")
        given = int(told or 0)
    if not 0 <= given < count:
        raise UserError(f"--host must be in [0, {count}), the places in --hosts, got {given}")
    return given


def _run_id(hosts: str, variables: Mapping[str, str]) -> str:
    """Return an identifier that this run's supervisors share and that other runs of the same hosts rarely have."""
    job = [variables.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")]
    return hashlib.sha256("/".join([hosts, *job]).encode()).hexdigest()[:16]


def _logged(
    command: Sequence[str], variables: Mapping[str, str], log: pathlib.Path, name: str
) -> tuple[WorkerProcess, pathlib.Path | None]:
    """Return the worker of the host `name` and its log, or None as the log if the folder cannot be written."""
    try:
        return WorkerProcess(command, variables, log), log
    except UserError as error:
        # If this supervisor ended, all others would wait for it. The run itself finds hosts without the shared folder.
        print(f"note: {name} keeps no log ({error.__cause__})", file=sys.stderr, flush=True)
        return WorkerProcess(command, variables, pathlib.Path(os.devnull)), None


async def _supervise(supervisor: Supervisor) -> int:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    return await supervisor.run()


def main(argv: Sequence[str]) -> None:
    """Run the command under a supervisor and exit with its code."""
    f, command = flags.FLAGS, list(argv[1:])
    if not command:
        raise UserError("there is no command; write it after --, as in -- python -m paxtrain.train --config=...")
    if command[0].startswith("-"):
        raise UserError(f"the command begins with {command[0]!r}; write it after --")
    if not f.hosts:
        raise UserError("--hosts is missing; name all hosts, in the order of their numbers")
    for name in ("link_timeout", "hang_timeout", "phase_timeout", "start_timeout", "settle", "grace", "slow_step"):
        if not math.isfinite(getattr(f, name)):
            raise UserError(f"--{name} must be a number, got {getattr(f, name)}")
    found = addresses(f.hosts, f.port, f.per_host)
    me = number(f.host, len(found), os.environ)
    limits = Limits(f.link_timeout, f.hang_timeout, f.phase_timeout, f.start_timeout, f.settle, f.grace, f.slow_step)
    log: pathlib.Path | None
    log = pathlib.Path(f.log or (f"{f.logs}/rank{me}.log" if f.logs else f"runs/supervise/host{me}.log"))
    report = f.report or (f"{f.logs}/rank{me}.json" if f.logs else "")
    variables = environment(os.environ, limits)
    if f.log or not f.logs:
        worker = WorkerProcess(command, variables, log)
    else:
        worker, log = _logged(command, variables, log, f.name or names(found)[me])
    run_id = _run_id(",".join(f"{host}:{port}" for host, port in found), os.environ)
    channel = PeerConnections(me, found, run_id)
    machines = [host for host, _ in found] if f.per_host > 1 else names(found)
    supervisor = Supervisor(
        me, names(found), channel, worker, limits, pathlib.Path(report) if report else None, machines
    )
    if f.name:
        supervisor.call_me(f.name)
    code = asyncio.run(_supervise(supervisor))
    # Only the first host checks: on the others a shared folder may not show new files yet.
    if code == 0 and me == 0 and f.finished and not pathlib.Path(f.finished).exists():
        sys.exit(STOPPED)
    if code and log is not None:
        print(f"log     {log}", file=sys.stderr, flush=True)
    sys.exit(code)


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_string("hosts", None, "All hosts, HOST or HOST:PORT joined by commas, or @FILE with one a line.")
    flags.DEFINE_integer("host", None, "This one's place among them, from 0 on; launchers tell it themselves.")
    flags.DEFINE_string("name", None, "What this host is called in messages, as in the plan; default: as in --hosts.")
    flags.DEFINE_integer("port", PORT, "The port of supervisors where --hosts says none.", 1, (1 << 16) - 1)
    flags.DEFINE_integer("per_host", 1, "Supervisors of each host in --hosts, on ports that follow each other.", 1)
    flags.DEFINE_float("link_timeout", 60.0, "Seconds for which a link or a host may be silent.", 1.0)
    flags.DEFINE_float("hang_timeout", 0.0, "Seconds without a finished step; 0: 20 steps, at least 2 links + 5.", 0.0)
    flags.DEFINE_float("phase_timeout", 1800.0, "Seconds that compiling, saving or evaluating may take.", 1.0)
    flags.DEFINE_float("start_timeout", 300.0, "Seconds to wait for the other hosts.", 1.0)
    flags.DEFINE_float("settle", 5.0, "Seconds for the hosts' reports on a fault.", 1.0)
    flags.DEFINE_float("grace", 5.0, "Seconds between SIGTERM and SIGKILL to a worker.", 0.0)
    flags.DEFINE_float("slow_step", 3.0, "Times the median step that a step may take before a note says why.", 1.0)
    flags.DEFINE_string("log", None, "File that takes all of the command's output; runs/supervise/host<I>.log if none.")
    flags.DEFINE_string("logs", None, "Folder for log and report of every host, rank<I>.log and rank<I>.json.")
    flags.DEFINE_string("finished", None, "File that the command leaves when all is done; without it the code is 143.")
    flags.DEFINE_string("report", None, "JSON file that takes the first cause and all reports, if there is a fault.")


if __name__ == "__main__":
    run(main, define_flags)
