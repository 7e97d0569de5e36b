"""The progress file of a training process, which its supervisor (planner.supervise) reads.

The file that PAXTRAIN_PROGRESS names holds one line of JSON. Each update overwrites it in one system call of a few
microseconds; without the variable nothing is written. The line says which step finished last, what the process does
between steps, and why it failed. An exception is written at once, because the process's exit first waits for the other
processes at the coordination service's barrier.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, Self

from paxtrain.errors import UserError, whole

VARIABLE = "PAXTRAIN_PROGRESS"
# Variable with the seconds without a heartbeat of one process after which jax's coordination service ends all others.
HEARTBEAT = "PAXTRAIN_HEARTBEAT_SECONDS"
_LONGEST_HEARTBEAT = 10**6  # seconds
_LENGTH = 8192  # bytes of the line, always the same, so that a short one overwrites all of a longer one
_TEXT = 600  # most characters of an error; JSON makes up to six bytes of each


@dataclasses.dataclass(frozen=True)
class MeshPosition:
    """The position of a process in the mesh.

    Attributes:
        process: Number of the process.
        role: Mesh coordinates of its devices, as in "stage 2, data 0"; "" if it has all devices.
        neighbours: Numbers of the processes that it sends to or receives from.
    """

    process: int
    role: str
    neighbours: tuple[int, ...]


class Progress:
    """The writer of the progress file.

    As a context manager it writes the exception that ends its block. Blocks may be nested.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        path = environment.get(VARIABLE)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600) if path else None
        self._said: dict[str, Any] = {"count": 0, "step": None, "doing": "starting", "failed": ""}
        self._tell()

    def placed(self, place: MeshPosition) -> None:
        """Write the position of this process in the mesh."""
        self._tell(place=dataclasses.asdict(place))

    def finished(self, step: int) -> None:
        """Write that this step is done."""
        self._tell(step=step, doing="")

    def now(self, what: str) -> None:
        """Write what the process does outside of steps, which may take longer than a step.

        Args:
            what: Words that continue "the process is", such as "compiling".
        """
        self._tell(doing=what)

    @contextlib.contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Write what the process does in a block, as `now` does, and restore the previous text after the block."""
        before = self._said["doing"]
        self.now(what)
        yield
        self.now(before)  # not after an exception, so that the file says where it was raised

    def _tell(self, **changes: Any) -> None:
        if self._file is None:
            return
        self._said |= changes
        self._said["count"] += 1
        line = json.dumps(self._said).encode()
        with contextlib.suppress(OSError):  # a full disk here must not end training
            os.pwrite(self._file, line.ljust(_LENGTH - 1) + b"\n", 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        # The first exception is the cause of later ones. The supervisor sees an exit's code without this file.
        if error is not None and not isinstance(error, SystemExit) and not self._said["failed"]:
            text = " ".join(str(error).split())[:_TEXT]
            self._tell(failed=f"{type(error).__name__}: {text}" if text else type(error).__name__)


def heartbeat(environment: Mapping[str, str]) -> int | None:
    """Return the heartbeat limit in seconds that the supervisor asks for, or None.

    Raises:
        UserError: The variable has no number.
    """
    text = environment.get(HEARTBEAT, "0")
    seconds = whole(text, _LONGEST_HEARTBEAT)
    if seconds is None:
        raise UserError(
            f"the environment has {HEARTBEAT}={text[:40]!r}, where supervisors put seconds, {_LONGEST_HEARTBEAT} at "
            "most; unset it"
        )
    return seconds or None


def read(path: str | pathlib.Path) -> dict[str, Any] | None:
    """Return the newest line of a progress file, or None if there is none to read.

    Returns:
        A dictionary with "count" (number of updates), "step" (the last finished one, or None), "doing", "failed", and
        "place" once the process knows its position in the mesh.
    """
    try:
        said = json.loads(pathlib.Path(path).read_bytes())
    except (OSError, ValueError):  # not written yet, or read during a write
        return None
    return said if isinstance(said, dict) and said.keys() >= {"count", "step", "doing", "failed"} else None


def place(said: Mapping[str, Any]) -> MeshPosition | None:
    """Return the position in the mesh that `read` found, or None if the process has not written it."""
    values = said.get("place")
    return MeshPosition(values["process"], values["role"], tuple(values["neighbours"])) if values else None
