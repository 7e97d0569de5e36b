"""A job as processes of this machine, for trials: a supervisor and planner.run for each host."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from typing import IO

from paxtrain.process import job_secret
from planner.jobs.job import Job
from planner.supervision.supervisor import FAULT, STOPPED
from planner.supervision.worker_process import following

_PROFILE = 20  # seconds for the measurement of links, which are all the same here
_ALIKE = (b"error: ", b"note: ")  # beginnings of the lines that all supervisors print alike


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


class Local:
    """A local job, restarted after faults."""

    def __init__(self, job: Job, devices: int) -> None:
        """Prepare a job with `devices` virtual CPU devices on each host."""
        self._job, self._devices = job, devices
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked = 0  # how many times the user has asked it to end
        self._said: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> int:
        """Run the job.

        Returns:
            Exit code: 0, also after Ctrl-C with a checkpoint; 2 for bad input; FAULT.
        """
        before = {
            number: signal.signal(number, self._stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            for restart in range(self._job.max_restarts + 1):
                code = self._start()
                if code != FAULT or self._asked or restart == self._job.max_restarts:
                    break
                self._say(f"starting again, {restart + 1} of {self._job.max_restarts} times")
            if code == STOPPED:
                self._say("stopped; the same command continues from the checkpoint, if there is one")
            elif code:
                self._say(f"the logs are in {self._job.logs}")
            return 0 if code == STOPPED else code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _command(self, host: int, hosts: str, coordinator: int) -> list[str]:
        """Return the command of one host's supervisor."""
        job, count = self._job, self._job.nodes
        mine = f"--hosts={hosts}", f"--host={host}", f"--name=host{host}", f"--logs={job.logs}"
        among = f"--coordinator=127.0.0.1:{coordinator}", f"--num_processes={count}", f"--process_id={host}"
        own = f"--host_name=host{host}", f"--cpu_devices={self._devices}", f"--profile_seconds={_PROFILE}"
        # Hosts share this machine's cores. Compute is measured on one, whose processor time tells how long it takes on
        # all at once; compiling the measurement on all of them would take as long as some training. The one that
        # measures for all may take minutes; a lost process is reported sooner by its supervisor.
        shared = "--compute_hosts=1", "--answer_timeout=600"
        run = [sys.executable, *job.run(*among, *own, *shared)]
        return [sys.executable, *job.supervise(*mine), "--", *run]

    def _start(self) -> int:
        """Start all hosts, wait for their end, and return one exit code for all of them."""
        count = self._job.nodes
        *ports, coordinator = _free_ports(count + 1)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        variables = {**os.environ, "JAX_PLATFORMS": "cpu", job_secret.VARIABLE: job_secret.make()}
        self._said.clear()
        for host in range(count):
            popen = subprocess.Popen(
                following(self._command(host, hosts, coordinator)),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches this process only, which passes it on once
            )
            self._running.append(popen)
        if self._asked:  # while they were started
            self._tell(signal.SIGTERM)
        copying = [threading.Thread(target=self._copy, args=(popen.stdout,)) for popen in self._running]
        for thread in copying:
            thread.start()
        codes = [popen.wait() for popen in self._running]
        for thread in copying:
            thread.join()
        self._running.clear()
        return _of_all(codes, self._asked > 0)

    # --- Output -------------------------------------------------------------------------------------------------------

    def _copy(self, output: IO[bytes]) -> None:
        """Print the output of a supervisor, except lines that another one has printed."""
        with output:
            for line in output:
                with self._lock:
                    again = line in self._said
                    if line.startswith(_ALIKE):
                        self._said.add(line)
                    if not again and not line.startswith(b"log     "):
                        with contextlib.suppress(OSError, ValueError):  # the reader is gone
                            sys.stdout.buffer.write(line)
                            sys.stdout.flush()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, flush=True)

    # --- Ending -------------------------------------------------------------------------------------------------------

    def _stop(self, *_: object) -> None:
        """Ask all hosts to save a checkpoint and end; the second time, kill them."""
        self._asked += 1
        if self._asked == 1:
            self._say("stopping with a checkpoint; once more ends it at once")
        self._tell(signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for popen in self._running:
            if popen.poll() is None:
                popen.send_signal(number)


def _of_all(codes: Sequence[int], asked: bool) -> int:
    """Return one exit code for those of all supervisors.

    Args:
        codes: exit code of each supervisor.
        asked: whether the user has asked them to end.
    """
    if set(codes) == {0}:
        return 0
    if 2 in codes:
        return 2
    # A process that is asked before it handles the signal is ended by it.
    stopped = {0, STOPPED, -signal.SIGTERM} if asked else {0, STOPPED}
    return STOPPED if set(codes) <= stopped else FAULT
