"""A job as processes of this machine, for trials: planner.run for each host, and this process as their parent."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import IO

from paxtrain.process.progress import FAULT, STOPPED
from planner.jobs.job import Job

_PROFILE = 20  # seconds for the measurement of links, which are all the same here
_GRACE = 10.0  # seconds that the others have to say their reason when one has failed
_ALIKE = (b"error: ", b"note: ")  # beginnings of lines that several processes may print alike
_GLOO = b"[Gloo] "  # begins lines about connections
# This program asks the kernel (prctl PR_SET_PDEATHSIG) to kill it when its parent ends, so that no process keeps the
# devices. Then it becomes the command. It is a separate program because a fork among threads must not run Python.
_FOLLOW = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


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
            return 0 if code == STOPPED else code
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _command(self, host: int, coordinator: int) -> list[str]:
        """Return the command of one host."""
        among = f"--coordinator=127.0.0.1:{coordinator}", f"--num_processes={self._job.nodes}", f"--process_id={host}"
        own = f"--host_name=host{host}", f"--cpu_devices={self._devices}", f"--profile_seconds={_PROFILE}"
        # Hosts share this machine's cores. Compute is measured on one, whose processor time tells how long it takes on
        # all at once; compiling the measurement on all of them would take as long as some training. The one that
        # measures for all may take minutes.
        shared = "--compute_hosts=1", "--answer_timeout=600"
        return [sys.executable, *self._job.run(*among, *own, *shared)]

    def _start(self) -> int:
        """Start all hosts, wait for their end, and return one exit code for all of them."""
        coordinator = _free_port()
        self._said.clear()
        for host in range(self._job.nodes):
            popen = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _FOLLOW, *self._command(host, coordinator)],
                env={**os.environ, "JAX_PLATFORMS": "cpu"},
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
        self._wait()
        codes = [popen.wait() for popen in self._running]
        for thread in copying:
            thread.join()
        self._running.clear()
        return _of_all(codes, self._asked > 0, pathlib.Path(self._job.finished).exists())

    def _wait(self) -> None:
        """Wait until all have ended; when one fails, name it if a signal ended it, and kill the others soon."""
        failed: float | None = None
        while None in (codes := [popen.poll() for popen in self._running]):
            if failed is None and any(codes):
                failed = time.monotonic()
                for host, code in enumerate(codes):
                    if code is not None and code < 0 and not self._asked:
                        self._say(f"error: host{host} was killed by {signal.Signals(-code).name}")
            elif failed is not None and time.monotonic() > failed + _GRACE:
                self._tell(signal.SIGKILL)
            time.sleep(0.05)

    # --- Output -------------------------------------------------------------------------------------------------------

    def _copy(self, output: IO[bytes]) -> None:
        """Print the output of a host, except lines that another one has printed."""
        with output:
            for line in output:
                with self._lock:
                    again = line in self._said
                    if line.startswith(_ALIKE):
                        self._said.add(line)
                    if not again and not line.startswith(_GLOO):
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


def _of_all(codes: Sequence[int], asked: bool, finished: bool) -> int:
    """Return one exit code for those of all hosts."""
    if set(codes) == {0}:
        return 0 if finished else STOPPED
    if 2 in codes:
        return 2
    # A process that is asked before it handles the signal is ended by it.
    return STOPPED if asked and set(codes) <= {0, -signal.SIGTERM} else FAULT
