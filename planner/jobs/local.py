"""The job as processes of this machine, to try it out: a supervisor and planner.run for each host there would be."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO

from planner.jobs.job import Job
from planner.supervision.supervisor import FAULT, STOPPED
from planner.supervision.worker_process import following

_PROFILE = 20  # seconds for measuring links that are all the same
_ALIKE = (b"error: ", b"note: ")  # how lines begin that all supervisors say alike


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


def pipes(devices: int) -> tuple[int, ...]:
    """Sizes of the pipe axis at which two data ranks at most are left.

    Of more, the reduce-scatter of gloo, which carries collectives between CPUs, fails now and then.
    """
    return tuple(sorted({max(1, devices // 2), devices}))


def environment(variables: Mapping[str, str], out: str) -> dict[str, str]:
    """The variables of all processes: CPU devices, and compiled programs that the next start finds."""
    kept = {"JAX_COMPILATION_CACHE_DIR": str(pathlib.Path(out, "cache").absolute())}
    return {**kept, **variables, "JAX_PLATFORMS": "cpu"}


class Local:
    """One job, started again after faults."""

    def __init__(self, job: Job, devices: int) -> None:
        """`devices`: of each host."""
        self._job, self._devices = job, devices
        self._running: list[subprocess.Popen[bytes]] = []
        self._asked = 0  # how often it was told to end
        self._said: set[bytes] = set()
        self._lock = threading.Lock()

    def run(self) -> int:
        """Returns the exit code: 0, also after Ctrl-C with a checkpoint; 2 for bad input; FAULT."""
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

    def _start(self) -> int:
        """Starts all hosts and waits for their end; the code of the first, or another's that failed."""
        job, count = self._job, self._job.nodes
        *ports, coordinator = _free_ports(count + 1)
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        variables = environment(os.environ, job.out)
        self._said.clear()
        for host in range(count):
            mine = f"--hosts={hosts}", f"--host={host}", f"--name=host{host}", f"--logs={job.logs}"
            among = f"--coordinator=127.0.0.1:{coordinator}", f"--num_processes={count}", f"--process_id={host}"
            own = f"--host_name=host{host}", f"--cpu_devices={self._devices}", f"--profile_seconds={_PROFILE}"
            # They share this machine's cores: all measured at once would be slower, and the one that compiles and
            # measures for all may take minutes. A lost process is known sooner, its supervisor tells.
            own += ("--compute_hosts=1", "--answer_timeout=600")
            limit = ",".join(map(str, pipes(count * self._devices)))
            run = [sys.executable, *job.run(*among, *own, f"--pipe={limit}")]
            popen = subprocess.Popen(
                following([sys.executable, *job.supervise(*mine), "--", *run]),
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes here, and goes on to each once
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
        """All that a supervisor says, but for what another has said before."""
        with output:
            for line in output:
                with self._lock:
                    again = line in self._said
                    if line.startswith(_ALIKE):
                        self._said.add(line)
                    if not again and not line.startswith(b"log     "):
                        with contextlib.suppress(OSError, ValueError):  # nobody reads any more
                            sys.stdout.buffer.write(line)
                            sys.stdout.flush()

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, flush=True)

    # --- Ending -------------------------------------------------------------------------------------------------------

    def _stop(self, *_: object) -> None:
        """The first time all may save a checkpoint; the second time they are killed."""
        self._asked += 1
        if self._asked == 1:
            self._say("stopping with a checkpoint; once more ends it at once")
        self._tell(signal.SIGTERM if self._asked == 1 else signal.SIGKILL)

    def _tell(self, number: int) -> None:
        for popen in self._running:
            if popen.poll() is None:
                popen.send_signal(number)


def _of_all(codes: Sequence[int], asked: bool) -> int:
    """One exit code for all supervisors', which were asked to end or not."""
    if set(codes) == {0}:
        return 0
    if 2 in codes:
        return 2
    # Who is asked before it can listen is ended by the signal itself.
    stopped = {0, STOPPED, -signal.SIGTERM} if asked else {0, STOPPED}
    return STOPPED if set(codes) <= stopped else FAULT
