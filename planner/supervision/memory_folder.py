"""The folder in memory in which a worker reports its progress, and the removal of those that nobody has any more.

It is in memory, because a full or hanging disk is one of the faults that a worker has to report. A supervisor that is
killed cannot remove its folder. The kernel gives up its lock, by which the next supervisor on the host knows.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import tempfile
import time

MEMORY = pathlib.Path("/dev/shm")
_PREFIX = "paxtrain-"
_OWNER = "owner"  # file that the supervisor keeps locked
_MOMENT = 60.0  # seconds that a folder may exist without a lock


def _is_left(folder: pathlib.Path) -> bool:
    """Return whether a folder is this user's, and no living supervisor's."""
    try:
        found = folder.stat()
        if found.st_uid != os.getuid():
            return False
        if folder.name.startswith("."):  # it is being made, or whoever made it was killed then
            return time.time() - found.st_mtime > _MOMENT
        owner = os.open(folder / _OWNER, os.O_RDWR)
    except FileNotFoundError:
        return folder.exists() and time.time() - found.st_mtime > _MOMENT
    except OSError:
        return False
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(owner)
    return True


class MemoryFolder:
    """A folder in memory, or on disk if there is no such file system.

    Attributes:
        path: the folder.
    """

    def __init__(self, memory: pathlib.Path = MEMORY) -> None:
        """Remove what killed supervisors of this user have left there, and make a new folder.

        Args:
            memory: folder of a file system in memory.
        """
        home = memory if os.access(memory, os.W_OK) else pathlib.Path(tempfile.gettempdir())
        for folder in (*home.glob(f"{_PREFIX}*"), *home.glob(f".{_PREFIX}*")):
            if _is_left(folder):
                shutil.rmtree(folder, ignore_errors=True)
        # It gets the name by which others find it when it is locked: supervisors of one host start at the same time.
        made = pathlib.Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=home))
        self._owner = os.open(made / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):  # a file system without locks: the folder stays if the supervisor is killed
            fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self.path = made.rename(made.with_name(made.name[1:]))

    def remove(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._owner)
