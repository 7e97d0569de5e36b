"""The lock of a run's folder: a second start is refused with a sentence that names the first.

The kernel holds it (flock) as long as the process lives, stopped or not, and shared file systems pass it on to other
hosts: NFS, Lustre, GPFS. Where a file system has no such locks, the run says so and goes on without.
"""

import fcntl
import os
import pathlib
import socket
import sys
import time
from typing import Self

from paxtrain import files
from paxtrain.errors import UserError

FILE = "lock"
_held: set[pathlib.Path] = set()  # folders that this process has


class RunLock:
    """The lock of a run's folder, held until the context ends."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        """Take the lock of a folder that exists; a folder that this process has already stays with its first owner.

        Raises:
            UserError: another process has it, or the folder cannot be written; OSError: the disk is full.
        """
        self._folder = pathlib.Path(folder).resolve()
        self._file: int | None = None
        if self._folder in _held:
            return
        with files.writable(self._folder, "name a run.out that can be written"):
            found = os.open(self._folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                self._take(found)
                owner = f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S')}"
                os.ftruncate(found, 0)
                os.pwrite(found, owner.encode(), 0)
            except BaseException:
                os.close(found)
                raise
        self._file = found
        _held.add(self._folder)

    def _take(self, file: int) -> None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            time.sleep(0.2)  # one that has just taken it has yet to write its name
            owner = os.pread(file, 1000, 0).decode(errors="replace") or "another process"
            raise UserError(
                f"{self._folder} is in use by {owner}; wait for its end, stop it, or name another run.out"
            ) from error
        except OSError as error:
            print(
                f"note: {self._folder} is not locked, since its file system has no locks ({error.strerror}); let no "
                "other run use it",
                file=sys.stderr,
                flush=True,
            )

    def release(self) -> None:
        """Give the folder back. The file stays: removing it could take it from a start that has just opened it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
            _held.discard(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
