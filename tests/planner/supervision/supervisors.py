"""Supervisors as processes, one per host of this machine, each with a worker that is a script."""

import contextlib
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest

from paxtrain.process import job_secret
from planner.supervision.supervisor import Limits
from tests.planner.ports import free_ports

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOSTS = 3
SECRET = "0123456789abcdef" * 2
# The scheduler makes hosts of one machine, and the links between them, fast or slow at random. Only what a test slows
# down shall count as slow.
SUPERVISE = """
from paxtrain.command_line import run
from planner import supervise
from planner.supervision import host_speed, slow_step
host_speed._sample = lambda: 1e-3
slow_step._FAST = 1e6
run(supervise.main, supervise.define_flags)
"""


@contextlib.contextmanager
def start(
    folder: pathlib.Path,
    script: str,
    limits: Limits,
    hosts: Iterable[int] = range(HOSTS),
    ports: Sequence[int] = (),
) -> Iterator[dict[int, subprocess.Popen[bytes]]]:
    """Start the supervisors of some hosts, given by number, inside a `with` block.

    Args:
        folder: folder for each host's log, report and output: log0, report0.json, out0, err0.
        script: Python source that gets its host's number and the folder as arguments.
        limits: limits of the supervisors.
        hosts: numbers of the hosts to start, of HOSTS.
        ports: ports of all hosts; default: free ones.
    """
    addresses = ",".join(f"127.0.0.1:{port}" for port in ports or free_ports(HOSTS))
    flags = [f"--{name}={getattr(limits, name)}" for name in ("settle", "grace", "slow_step")]
    flags += [f"--{name}_timeout={getattr(limits, name)}" for name in ("link", "hang", "start")]
    started = {}
    try:
        for host in hosts:
            files = [f"--log={folder}/log{host}", f"--report={folder}/report{host}.json"]
            command = [sys.executable, "-c", SUPERVISE, f"--hosts={addresses}", f"--host={host}", *flags, *files]
            run = [sys.executable, "-c", script, str(host), str(folder)]
            with (folder / f"out{host}").open("w") as out, (folder / f"err{host}").open("w") as err:
                started[host] = subprocess.Popen(
                    [*command, "--", *run],
                    cwd=ROOT,
                    env=os.environ | {"PYTHONPATH": str(ROOT), job_secret.VARIABLE: SECRET},
                    stdout=out,
                    stderr=err,
                )
        yield started
    finally:
        for process in started.values():
            process.kill()
            process.wait()


def wait(folder: pathlib.Path, started: dict[int, subprocess.Popen[bytes]], limit: float = 30.0) -> list[int]:
    """Wait until all have ended, and return their exit codes."""
    deadline = time.monotonic() + limit
    try:
        return [process.wait(max(0.1, deadline - time.monotonic())) for process in started.values()]
    except subprocess.TimeoutExpired:
        pytest.fail("\n".join((folder / f"err{host}").read_text() for host in started))


def wait_for(folder: pathlib.Path, name: str, holds: Callable[[pathlib.Path], bool] = pathlib.Path.exists) -> None:
    """Wait until `holds` is true of the file; by default, until it exists."""
    deadline = time.monotonic() + 20
    while not holds(folder / name):
        assert time.monotonic() < deadline, "\n".join(path.read_text() for path in folder.glob("err*"))
        time.sleep(0.01)
