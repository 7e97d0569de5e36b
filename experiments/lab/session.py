"""A measuring session: a worker process on every host of a cluster, and their tasks."""

import contextlib
import json
import os
import pathlib
import selectors
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Self

from experiments.hosts.hosts import Cluster
from paxtrain.errors import UserError

ROOT = pathlib.Path(__file__).resolve().parents[2]
_WORKER = pathlib.Path(__file__).with_name("worker.py")
_PORT = 9911
_GRACE = 5.0  # seconds for the other workers' answers when one has failed
# glibc gives a step's big buffers back to the system and faults them in again in the next one; a GPU's allocator keeps
# its memory, and so these settings make glibc. One thread per device: a host's share of a core has no second one.
ENVIRONMENT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_ARENA_MAX": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "1",
}


class SessionError(UserError):
    """Failure of a worker; the message names it and its log."""


class Workers:
    """A process on every host, which serves until the `with` block ends."""

    def __init__(
        self, cluster: Cluster, command: Sequence[str], port: int, logs: pathlib.Path, variables: Mapping[str, str]
    ) -> None:
        """Args:
        command: starts a worker; it also gets --coordinator, --num_processes and --process_id.
        port: of the first host, at which the workers meet.
        logs: folder for the workers' output.
        variables: of their environment, beside ENVIRONMENT.
        """
        self.cluster, self.logs = cluster, logs
        logs.mkdir(parents=True, exist_ok=True)
        meet = [f"--coordinator={cluster.addresses[0]}:{port}", f"--num_processes={cluster.hosts}"]
        self._command = [*command, *meet]
        self._variables = ENVIRONMENT | variables
        self._workers: list[subprocess.Popen[bytes]] = []
        self._hangs = False  # some worker waits for another one that has failed

    def __enter__(self) -> Self:
        for host in range(self.cluster.hosts):
            self._workers.append(
                self.cluster.start(
                    host,
                    [*self._command, f"--process_id={host}"],
                    log=self.logs / f"{self.cluster.names[host]}.log",
                    env=self._variables,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                )
            )
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has ended
                worker.stdin.close()
            if self._hangs:
                worker.kill()
        for worker in self._workers:
            try:
                worker.wait(timeout=20)
            except subprocess.TimeoutExpired:
                worker.kill()
            worker.stdout.close()

    # --- Tasks --------------------------------------------------------------------------------------------------------

    def _send(self, host: int, do: str, **arguments: Any) -> None:
        line = json.dumps({"do": do, **arguments}) + "\n"
        try:
            self._workers[host].stdin.write(line.encode())
            self._workers[host].stdin.flush()
        except OSError as error:
            raise SessionError(self._where(host, "has ended")) from error

    def _answer(self, host: int) -> Any:
        line = self._workers[host].stdout.readline()
        if not line:
            raise SessionError(self._where(host, "has ended"))
        answer = json.loads(line)
        if "error" in answer:
            raise SessionError(self._where(host, f"failed: {answer['error']}"))
        return answer["answer"]

    def _where(self, host: int, what: str) -> str:
        name = self.cluster.names[host]
        return f"the worker on {name} {what}; its log is {self.logs / name}.log"

    def _answers(self) -> list[Any]:
        """Return all hosts' answers. Raise a failure once all have answered, or soon, because others may hang."""
        answers: dict[int, Any] = {}
        failures: dict[int, SessionError] = {}
        with selectors.DefaultSelector() as waiting:
            for host, worker in enumerate(self._workers):
                waiting.register(worker.stdout, selectors.EVENT_READ, host)
            while waiting.get_map() and (ready := waiting.select(_GRACE if failures else None)):
                for key, _ in ready:
                    waiting.unregister(key.fileobj)
                    try:
                        answers[key.data] = self._answer(key.data)
                    except SessionError as error:
                        failures[key.data] = error
        if failures:
            self._hangs = len(answers) + len(failures) < len(self._workers)
            raise failures[min(failures)]
        return [answers[host] for host in range(self.cluster.hosts)]

    def ask(self, do: str, **arguments: Any) -> list[Any]:
        """Give all workers a task at once, and return their answers by host."""
        for host in range(self.cluster.hosts):
            self._send(host, do, **arguments)
        return self._answers()

    def ask_staggered(self, tasks: list[dict[str, Any]], hands_on: str | None = None) -> list[list[Any]]:
        """Give each task to one worker, and to the others once that is done, so that they find its compiled programs.

        Workers on different cores take turns at being first; the first task is the first worker's. Nobody may have to
        wait for another in such a task.

        Args:
            hands_on: of the first answer to a task, what the others get as an argument of that name.

        Returns:
            The answers by task and host.
        """
        hosts = range(self.cluster.hosts)
        first = [i % min(len(hosts), len(os.sched_getaffinity(0))) for i in range(len(tasks))]
        for task, host in zip(tasks, first):
            self._send(host, **task)
        answers: list[list[Any]] = [[None] * len(hosts) for _ in tasks]
        for task, leader, got in zip(tasks, first, answers):
            got[leader] = self._answer(leader)
            more = {hands_on: got[leader][hands_on]} if hands_on else {}
            for host in hosts:
                if host != leader:
                    self._send(host, **task, **more)
        for leader, got in zip(first, answers):
            for host in hosts:
                if host != leader:
                    got[host] = self._answer(host)
        return answers

    def ask_apart(self, tasks: list[dict[str, Any]]) -> list[Any]:
        """Return each task's answer by one worker, on different cores in turn; in no task may one wait for another."""
        cores = min(self.cluster.hosts, len(os.sched_getaffinity(0)))
        for i, task in enumerate(tasks):
            self._send(i % cores, **task)
        return [self._answer(i % cores) for i in range(len(tasks))]

    def ask_one(self, host: int, do: str, **arguments: Any) -> Any:
        """Return one worker's answer to a task in which the others take no part."""
        self._send(host, do, **arguments)
        return self._answer(host)


class Session(Workers):
    """Workers that train and measure. Only `measuring` limits their compute."""

    def __init__(
        self, cluster: Cluster, devices_per_host: int, logs: pathlib.Path, cache: pathlib.Path, *, real: bool = False
    ) -> None:
        """Args:
        logs: folder for the workers' output.
        cache: folder of compiled programs, which all workers and all sessions share.
        real: devices are as fast as they are; else they take their given time (experiments.lab.device).
        """
        cache.mkdir(parents=True, exist_ok=True)
        variables = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, str(_WORKER), f"--cpu_devices={devices_per_host}", f"--programs={cache.resolve()}"]
        super().__init__(cluster, command + ["--real"] * real, _PORT, logs, variables)
