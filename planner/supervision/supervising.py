"""One host's command, run under a supervisor that the user's options describe."""

import asyncio
import dataclasses
import os
import pathlib
import signal
import sys
from collections.abc import Mapping, Sequence

from paxtrain.errors import MOST_SECONDS, UserError
from paxtrain.knobs import knob
from paxtrain.process import job_secret
from planner.supervision import entries
from planner.supervision.addresses import addresses, names, number, run_id
from planner.supervision.peer_connections import PORT, PeerConnections
from planner.supervision.supervisor import STOPPED, Limits, Supervisor, environment
from planner.supervision.worker_process import WorkerProcess

# Flag of each time limit.
LIMIT_FLAGS = {
    "link": "link_timeout",
    "hang": "hang_timeout",
    "phase": "phase_timeout",
    "start": "start_timeout",
    "settle": "settle",
    "grace": "grace",
    "slow_step": "slow_step",
}


@dataclasses.dataclass(frozen=True)
class SuperviseOptions:
    """Options of `supervise`; the flags of planner.supervise have the same names, see LIMIT_FLAGS for the limits.

    Attributes:
        hosts: all hosts, HOST or HOST:PORT joined by commas, or @FILE with one a line.
        host: number of this host among them, from 0 on; launchers tell it themselves.
        name: name of this host in messages, as in the plan; default: as in --hosts.
        port: port of supervisors where --hosts names none.
        per_host: supervisors of each host in --hosts, on consecutive ports.
        limits: time limits of the run.
        log: file for all of the command's output; default: as --logs says.
        logs: folder for log and report of every host, rank<I>.log and rank<I>.json; default: the log is
            runs/supervise/host<I>.log.
        finished: file that the command leaves when all is done; without it: code 143.
        report: JSON file for the first cause and all reports, if there is a fault; default: as --logs says.

    Raises:
        UserError: the hosts are missing, or a limit is no number.
    """

    hosts: str = knob()
    host: int | None = knob(None)
    name: str | None = knob(None)
    port: int = knob(PORT, least=1, most=(1 << 16) - 1)
    per_host: int = knob(1, least=1, most=1024)
    limits: Limits = dataclasses.field(default_factory=Limits)
    log: str | None = knob(None)
    logs: str | None = knob(None)
    finished: str | None = knob(None)
    report: str | None = knob(None)

    def __post_init__(self) -> None:
        if not self.hosts:
            raise UserError("--hosts is missing; name all hosts, in the order of their numbers")
        for name, flag in LIMIT_FLAGS.items():
            if not getattr(self.limits, name) <= MOST_SECONDS:
                given = getattr(self.limits, name)
                raise UserError(f"--{flag} must be a number, got {given}; {MOST_SECONDS:,.0f} is the most")


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


async def _run(supervisor: Supervisor) -> int:
    """Run a supervisor until its end; SIGTERM and SIGINT stop it."""
    loop = asyncio.get_running_loop()
    for caught in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(caught, supervisor.stop)
    return await supervisor.run()


def supervise(command: Sequence[str], options: SuperviseOptions, variables: Mapping[str, str]) -> int:
    """Run this host's command under a supervisor, and return the exit code.

    Args:
        command: program and arguments.
        options: hosts, limits and files.
        variables: environment variables; the command gets them, with those of `supervisor.environment`.

    Raises:
        UserError: an option makes no sense, there is no such command, or its log cannot be written.
    """
    found = addresses(options.hosts, options.port, options.per_host)
    secret = job_secret.find(variables)
    if secret is None and len(found) > 1:
        raise UserError(
            f"the job has no secret, by which its {len(found)} supervisors know each other; {job_secret.HOW}"
        )
    me = number(options.host, len(found), variables)
    name = options.name or names(found)[me]
    logs = options.logs
    log: pathlib.Path | None
    log = pathlib.Path(options.log or (f"{logs}/rank{me}.log" if logs else f"runs/supervise/host{me}.log"))
    report = options.report or (f"{logs}/rank{me}.json" if logs else "")
    passed = environment(variables, options.limits)
    if options.log or not logs:
        worker = WorkerProcess(command, passed, log)
    else:
        worker, log = _logged(command, passed, log, name)
    supervisor = Supervisor(
        me,
        names(found),
        PeerConnections(me, found, run_id(found, variables), secret or job_secret.make().encode(), entries.fits),
        worker,
        options.limits,
        pathlib.Path(report) if report else None,
        machines=[host for host, _ in found] if options.per_host > 1 else names(found),
    )
    if options.name:
        supervisor.call_me(options.name)
    code = asyncio.run(_run(supervisor))
    # Only the first host checks: on the others a shared folder may not show new files yet.
    if code == 0 and me == 0 and options.finished and not pathlib.Path(options.finished).exists():
        return STOPPED
    if code and log is not None:
        print(f"log     {log}", file=sys.stderr, flush=True)
    return code
