"""The worker process of a supervisor: start it, read its output and progress, watch it from outside, and end it."""

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import IO, Any, TextIO

from paxtrain.errors import PREFIX, UserError
from paxtrain.process import supervised
from paxtrain.process.sealed import printable
from planner.supervision.memory_folder import MemoryFolder

_POLL = 0.1  # seconds between two looks at the progress file
_PF_EXITING = 0x4  # flag in /proc/PID/stat of a process that has begun to exit
KILLED = 5.0  # seconds that SIGKILL may take; it does not end a process that waits for a dead disk or driver
_REMEMBERED = 200  # lines of stderr that are kept
# This program asks the kernel (prctl PR_SET_PDEATHSIG) to kill it when the supervisor ends, so that no process keeps
# the devices. Then it becomes the command. It is a separate program because a fork among threads must not run Python.
_FOLLOW = "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9); os.execvp(sys.argv[1], sys.argv[1:])"
# A traceback or the runtime's last words. From such a line on, stderr goes to the log alone until the worker finishes
# another step.
_TRACE = re.compile(
    rb"Traceback \(most recent call last\)|F\d{4} \d\d:|\*\*\* Check failure|Fatal Python error|terminate called"
    rb"|E\d{4} \d\d:.*(coordination|distributed)"
)
_GLOO = b"[Gloo] "  # begins lines about connections, which gloo writes to stdout; they go to the log alone
_RAISED = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit)\b(?::|$)")
_FATAL = re.compile(r"^F\d{4} [\d:.]+ +\d+ \S+\] (.*)")


def following(command: Sequence[str]) -> list[str]:
    """Return a command that runs `command` and that the kernel kills when its parent ends in any way."""
    return [sys.executable, "-I", "-S", "-c", _FOLLOW, *command]


@dataclasses.dataclass(frozen=True)
class WorkerStatus:
    """State of a worker at one moment. Ages are seconds before that moment.

    Attributes:
        state: "running", "ending" (it has begun to exit) or "ended".
        code: exit code if it exited; None if a signal ended it or it still runs.
        signal: name of the signal that ended it, or "".
        asked: whether the user or the supervisor has told it to end.
        out_of_memory: whether the kernel killed a process of this host because memory ran out when the worker ended.
        error: one line about what went wrong, or "".
        failed: whether the process itself has reported an exception that ends it.
        step: number of the last finished step; None before the first.
        doing: what it does outside of steps, such as "compiling"; "" during a step.
        frozen: reason why it cannot run though it has not ended ("stopped by a signal", "waiting for a disk"), or "".
        ended_age: age of its end, or of the report of its exception.
        told_age: age of its last report of progress.
        step_seconds: seconds of a typical step; None before there are any.
    """

    state: str
    code: int | None
    signal: str
    asked: bool
    out_of_memory: bool
    error: str
    failed: bool
    step: int | None
    doing: str
    frozen: str
    ended_age: float
    told_age: float
    step_seconds: float | None

    @property
    def good(self) -> bool:
        """True if the worker ended with exit code 0."""
        return self.state == "ended" and self.code == 0


def _kernel_kills() -> int:
    """Return how many processes of this host the kernel has killed since boot because memory ran out."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/vmstat").read_text().splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def best_line(lines: Sequence[str]) -> str:
    """Return the line of stderr that explains a failure: an exception's, a fatal log line, or else the last line."""
    for number in range(len(lines) - 1, -1, -1):
        if lines[number].startswith(PREFIX):
            return lines[number]
        if _RAISED.match(lines[number]) and any(line.startswith("Traceback ") for line in lines[:number]):
            return lines[number]
    for line in lines:
        if found := _FATAL.match(line):
            return found[1]
    return next((line for line in reversed(lines) if line.strip()), "")


class WorkerProcess:
    """A command in a separate process group.

    Attributes:
        changed: event that is set when the process has ended or has reported an exception.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: pathlib.Path) -> None:
        """Describe the process and open its log; `start` starts it.

        Args:
            command: command and its arguments.
            environment: environment variables of the process.
            log: file to which all of its output is appended.

        Raises:
            UserError: if the log cannot be written.
        """
        self._command, self._environment = list(command), dict(environment)
        self._folder: MemoryFolder | None = None
        try:
            log.parent.mkdir(parents=True, exist_ok=True)
            self._log: IO[bytes] = log.open("ab", buffering=0)
        except OSError as error:
            raise UserError(
                f"cannot write to --log={log} ({error.strerror}); name a file that can be written"
            ) from error
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._lines: deque[str] = deque(maxlen=_REMEMBERED)
        self._tracing = False
        self._asked = False
        self._said: dict[str, Any] = {"count": 0, "step": None, "doing": "starting", "failed": ""}
        self._steps: deque[float] = deque(maxlen=33)  # seconds
        self._step_time = self._told = time.monotonic()
        self._ended: float | None = None
        self._kills = [_kernel_kills()] * 2
        self.changed = asyncio.Event()

    async def start(self) -> None:
        """Start the process.

        Raises:
            UserError: if there is no such command.
        """
        if shutil.which(self._command[0], path=self._environment.get("PATH")) is None:
            raise UserError(f"there is no command {self._command[0]!r}; write the one to run after --")
        self._folder = MemoryFolder()
        self._environment[supervised.VARIABLE] = str(self._progress)
        self._write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(self._command)}\n".encode())
        self._process = await asyncio.create_subprocess_exec(
            *following(self._command),
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        self._told = time.monotonic()
        self._tasks = [
            asyncio.create_task(self._copy_output()),
            asyncio.create_task(self._copy_errors()),
            asyncio.create_task(self._watch()),
        ]
        self._tasks.append(asyncio.create_task(self._wait()))

    def note(self, text: str) -> None:
        """Write a line of the supervisor into the log."""
        if not self._log.closed:
            self._write(f"{printable(text)}\n".encode())

    @property
    def _running(self) -> asyncio.subprocess.Process:
        assert self._process is not None, "the worker has not been started"
        return self._process

    # --- Listening ----------------------------------------------------------------------------------------------------

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk must not end the supervisor, which has to report it
            self._log.write(data)

    def _show(self, stream: TextIO, data: bytes) -> None:
        with contextlib.suppress(OSError, ValueError):  # the reader is gone
            stream.buffer.write(data)
            stream.flush()

    async def _copy_output(self) -> None:
        output, rest = self._running.stdout, b""
        assert output is not None
        while data := await output.read(1 << 16):
            self._write(data)
            *lines, rest = (rest + data).split(b"\n")
            shown = b"".join(line + b"\n" for line in lines if not line.startswith(_GLOO))
            if not (rest.startswith(_GLOO) or _GLOO.startswith(rest)):  # a line that has only begun, such as a question
                shown, rest = shown + rest, b""
            self._show(sys.stdout, shown)
        if not rest.startswith(_GLOO):
            self._show(sys.stdout, rest)

    async def _copy_errors(self) -> None:
        rest, errors = b"", self._running.stderr
        assert errors is not None
        while data := await errors.read(1 << 16):
            self._write(data)
            *lines, rest = (rest + data).split(b"\n")
            rest = rest[-(1 << 16) :]
            for line in lines:
                self._remember(line)
                if not self._tracing and _TRACE.match(line):
                    self._look()  # steps finished before this line do not end the traceback
                    self._tracing = True
                if self._tracing:
                    self._look()  # a step finished since then shows that the worker survived
                # An error sentence may be about another process's fault. The supervisors decide whose fault it is.
                if not self._tracing and not line.startswith(PREFIX.encode()):
                    self._show(sys.stderr, line + b"\n")

    def _remember(self, line: bytes) -> None:
        text = line.decode(errors="replace").rpartition("\r")[2].rstrip()
        if text.strip():
            self._lines.append(text[:2000])

    @property
    def _progress(self) -> pathlib.Path:
        assert self._folder is not None, "the worker has not been started"
        return self._folder.path / "progress"

    def _look(self) -> None:
        """Read the progress file."""
        if self._folder is None:
            return
        said, now = supervised.read(self._progress), time.monotonic()
        if said is None or said["count"] == self._said["count"]:
            return
        if said["step"] != self._said["step"]:
            # Time only steps that follow each other; an evaluation or a checkpoint between them is not a step.
            if self._said["step"] is not None and not self._said["doing"] and said["step"] > self._said["step"]:
                self._steps.append((now - self._step_time) / (said["step"] - self._said["step"]))
            self._step_time, self._tracing = now, False
        if said["failed"] and not self._said["failed"]:
            self.changed.set()
        self._said, self._told = said, now

    async def _watch(self) -> None:
        polls = 0
        while True:
            self._look()
            polls += 1
            if polls % 10 == 0:
                self._kills = [self._kills[1], _kernel_kills()]
            await asyncio.sleep(_POLL)

    async def _gone(self) -> None:
        """Wait until the process has ended. `Process.wait` would also wait for its pipes, which a child may hold."""
        while self._running.returncode is None:
            await asyncio.sleep(_POLL / 5)

    async def _wait(self) -> None:
        await self._gone()
        self._ended = time.monotonic()
        with contextlib.suppress(asyncio.TimeoutError):  # a grandchild may hold the pipes open
            await asyncio.wait_for(asyncio.gather(*self._tasks[:2]), 0.5)
        self._look()
        self.changed.set()

    # --- Status -------------------------------------------------------------------------------------------------------

    def _stat(self) -> list[str]:
        """Return the fields of /proc/PID/stat from the state on, or [] if the process is gone."""
        try:
            text = pathlib.Path(f"/proc/{self._running.pid}/stat").read_text()
        except OSError:
            return []
        return text.rpartition(")")[2].split()

    @property
    def place(self) -> supervised.MeshPosition | None:
        """Position in the mesh, or None if the worker has not reported it."""
        return supervised.place(self._said)

    @property
    def over(self) -> bool:
        """True if the worker has ended or has reported an exception that ends it."""
        return self._ended is not None or bool(self._said["failed"])

    def status(self) -> WorkerStatus:
        """Return the status of the worker now."""
        self._look()
        now, state, frozen, code = time.monotonic(), "running", "", None
        if self._process is not None:
            code = self._process.returncode
            if code is not None:
                state = "ended"
            elif not (stat := self._stat()) or stat[0] in "ZX" or int(stat[6]) & _PF_EXITING:
                state = "ending"
            else:
                frozen = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a disk"}.get(
                    stat[0], ""
                )
        killed = code is not None and code < 0
        failed = self._said["failed"]
        return WorkerStatus(
            state=state,
            code=code if code is not None and not killed else None,
            signal=signal.Signals(-code).name if code is not None and killed else "",
            asked=self._asked,
            out_of_memory=killed and not self._asked and _kernel_kills() > self._kills[0],
            error=failed or (best_line(list(self._lines)) if code else ""),
            failed=bool(failed),
            step=self._said["step"],
            doing=self._said["doing"],
            frozen=frozen,
            ended_age=now - (self._ended or (self._told if failed else now)),
            told_age=now - self._told if self._said["count"] else 0.0,
            step_seconds=statistics.median(self._steps) if self._steps else None,
        )

    # --- Ending -------------------------------------------------------------------------------------------------------

    def ask(self) -> None:
        """Send SIGTERM, after which the worker may save a checkpoint."""
        self._asked = True
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)

    def _tell_of_survival(self) -> None:
        """Print and log a line about a worker that SIGKILL has not ended."""
        frozen = self.status().frozen
        text = (
            f"warning: process {self._running.pid} still lives {KILLED:g} s after SIGKILL"
            f"{f' ({frozen})' if frozen else ''}; it may hold its devices until its host restarts"
        )
        self.note(text)
        self._show(sys.stderr, f"{text}\n".encode())

    async def end(self, grace: float) -> None:
        """End the process and its group: send SIGTERM, and SIGKILL after `grace` seconds."""
        if self._log.closed:
            return
        self._tracing = True  # its last lines go to the log alone
        if self._process is not None:
            if self._ended is None:
                self.ask()
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(self._gone(), grace)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            try:
                await asyncio.wait_for(self._gone(), KILLED)
            except TimeoutError:
                self._tell_of_survival()
            else:
                await asyncio.wait(self._tasks[3:], timeout=1)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._process is not None:
            # The loop would close it at its own end, which fails if another process holds a pipe.
            # asyncio has no public name for it.
            self._process._transport.close()  # type: ignore[attr-defined]
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
        self._log.close()
