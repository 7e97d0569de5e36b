"""What a training process tells the parent that watches over it (planner.supervise), and hears from it.

A line of JSON in the file that PAXTRAIN_PROGRESS names, written over each time, in one system call of a few
microseconds; without the variable nothing is written. The parent learns from it which step was finished last, what
the process does between steps, and why it failed: an exception that ends the process is told at once, while its exit
would wait for the other processes at the coordination service's barrier.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

VARIABLE = "PAXTRAIN_PROGRESS"
# Seconds after which jax's coordination service ends all processes because it has not heard one of them.
HEARTBEAT = "PAXTRAIN_HEARTBEAT_SECONDS"
_LENGTH = 8192  # bytes of the line: always as many, so that a short one covers all of a longer one
_TEXT = 600  # characters of an error at most; JSON makes up to six bytes of one


@dataclasses.dataclass(frozen=True)
class MeshPosition:
    """A process in the mesh.

    Attributes:
        process: its number.
        role: what its devices are, as in "stage 2, data 0"; "" where it has all of them.
        neighbours: numbers of the processes that it sends to or receives from.
    """

    process: int
    role: str
    neighbours: tuple[int, ...]


class Progress:
    """The line, while the process lives. As a context manager, also again inside, it tells of what ends its block."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get(VARIABLE)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if path else None
        self._said: dict[str, Any] = {"count": 0, "step": None, "doing": "starting", "failed": ""}
        self._tell()

    def placed(self, place: MeshPosition) -> None:
        """Where in the mesh this process is."""
        self._tell(place=dataclasses.asdict(place))

    def finished(self, step: int) -> None:
        """All of this step is done."""
        self._tell(step=step, doing="")

    def now(self, what: str) -> None:
        """What follows is no step, and may take longer than one. `what` continues "the process is ..."."""
        self._tell(doing=what)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """The same of a block alone."""
        before = self._said["doing"]
        self.now(what)
        yield
        self.now(before)  # not after an exception: that it happened here is worth knowing

    def _tell(self, **changes: Any) -> None:
        if self._file is None:
            return
        self._said |= changes
        self._said["count"] += 1
        line = json.dumps(self._said).encode()
        with contextlib.suppress(OSError):  # a full disk here is no reason to end training
            os.pwrite(self._file, line.ljust(_LENGTH - 1) + b"\n", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # Of several, one after another on the way out, the first; an exit's code is what the parent sees.
        if error is not None and not isinstance(error, SystemExit) and not self._said["failed"]:
            text = " ".join(str(error).split())[:_TEXT]
            self._tell(failed=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def heartbeat(environment: Mapping[str, str]) -> int | None:
    """Seconds that the parent asks for, or None."""
    return int(environment.get(HEARTBEAT, 0)) or None


def read(path: str | pathlib.Path) -> dict[str, Any] | None:
    """What was told last: count, step (None before the first), doing and failed; None where nothing can be read."""
    try:
        said = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError):  # none yet, or read while it was written
        return None
    return said if isinstance(said, dict) and said.keys() >= {"count", "step", "doing", "failed"} else None


def place(said: Mapping[str, Any]) -> MeshPosition | None:
    """Where the process is that told this; None: it has not told."""
    values = said.get("place")
    return MeshPosition(values["process"], values["role"], tuple(values["neighbours"])) if values else None
