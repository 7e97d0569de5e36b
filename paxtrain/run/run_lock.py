"""The lock of a run's folder: a second start is refused with a sentence that names the first.

The lock is a file beside the checkpoints. It is made by a hard link, which a shared file system gives to one process
alone, or where there are no hard links by opening a file that must not exist yet. It holds who made it and a count that
its owner raises every few seconds. A process that ended without removing it does not block the folder: on the same host
its number is gone, and elsewhere the count stands still. Clocks are not compared.
"""

import contextlib
import dataclasses
import errno
import json
import os
import pathlib
import secrets
import socket
import sys
import threading
import time
from typing import Self

from paxtrain import files
from paxtrain.errors import UserError

FILE = "lock.json"
_BEAT = 3.0  # seconds between two counts
_LOOKS, _PAUSE = 5, 0.2  # readings of a lock that is gone or unreadable, seconds apart: another start may hold it
# What file systems say that have no hard links (FAT, some object stores and network folders).
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK, errno.EXDEV)
_DEAD = 15.0  # seconds without a new count after which another host's process has ended


def _born(process: int) -> str:
    """Return the time at which a process of this host began, in the kernel's ticks, or "" if there is none.

    Numbers of processes are used again; number and time together are not.
    """
    try:
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def _boot() -> str:
    """Return the identifier of this boot of this host, which containers of the host share."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


@dataclasses.dataclass(frozen=True)
class LockOwner:
    """The process that has a run's folder.

    Attributes:
        host: name of its host.
        process: its number there.
        born: its start by the kernel, in ticks.
        boot: identifier of the host's boot and of the namespace in which the number counts.
        since: date and time at which it took the folder, for people.
        token: random text.
    """

    host: str
    process: int
    born: str
    boot: str
    since: str
    token: str

    @classmethod
    def here(cls) -> "LockOwner":
        """Return this process as an owner."""
        with contextlib.suppress(OSError):
            namespace = os.readlink("/proc/self/ns/pid")
            return cls(
                host=socket.gethostname(),
                process=os.getpid(),
                born=_born(os.getpid()),
                boot=f"{_boot()} {namespace}",
                since=time.strftime("%Y-%m-%d %H:%M:%S"),
                token=secrets.token_hex(8),
            )
        raise UserError("cannot read /proc/self; paxtrain runs on Linux")

    @property
    def me(self) -> bool:
        """True if it is this process."""
        here = LockOwner.here()
        return (self.process, self.born, self.boot) == (here.process, here.born, here.boot)

    @property
    def known_dead(self) -> bool:
        """True if this host knows that the process has ended."""
        here = LockOwner.here()
        if self.boot == here.boot:
            return _born(self.process) != self.born
        # The same host after a restart. Host names of containers may be the same on two machines; boots never are.
        return False


def _parsed(content: bytes) -> tuple[LockOwner, int] | None:
    """Return owner and count of a lock; None if it is no lock."""
    try:
        values = json.loads(content)
        count = values.pop("count")
        return LockOwner(**values), int(count)
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError):
        return None


def _read(path: pathlib.Path) -> tuple[LockOwner, int] | None:
    """Return owner and count of a lock; None if there is none, it cannot be read, or it is no lock."""
    try:
        return _parsed(path.read_bytes())
    except OSError:
        return None


def _link(path: pathlib.Path, new: pathlib.Path) -> bool:
    """Give a file a second name that nothing has yet, and return False if something has it.

    Without hard links, the second name is a copy.

    Args:
        path: file.
        new: second name.
    """
    try:
        os.link(path, new)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        content = path.read_bytes()
        try:
            with open(new, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
    return True


class RunLock:
    """The lock of a run's folder, held until the context ends."""

    def __init__(self, folder: str | pathlib.Path) -> None:
        """Take the lock of a folder that exists.

        Raises:
            UserError: Another process has it, and lives, or the folder cannot be written; OSError: the disk is full.
        """
        self._path = pathlib.Path(folder) / FILE
        self._owner = LockOwner.here()
        self._count, self._lost = 0, ""
        self._over = threading.Event()
        self._beating: threading.Thread | None = None
        found = _read(self._path)
        self._mine = not (found is not None and found[0].me)  # else this process has it already, and keeps it
        if self._mine:
            with files.writable(self._path.parent, "name a run.out that can be written"):
                self._take()
            self._beating = threading.Thread(target=self._beat, name="run lock", daemon=True)
            self._beating.start()

    # --- Taking -------------------------------------------------------------------------------------------------------

    def _content(self) -> bytes:
        # The count has a fixed width, so that a file that is read during a write is good, too.
        return json.dumps(dataclasses.asdict(self._owner) | {"count": f"{self._count:012d}"}).encode()

    def _make(self) -> bool:
        """Make the lock file, and return False if there is one."""
        own = self._path.with_name(f".{FILE}.{self._owner.token}")
        try:
            own.write_bytes(self._content())
            return _link(own, self._path)
        finally:
            own.unlink(missing_ok=True)

    def _take(self) -> None:
        while not self._make():
            found = self._look()
            if found is None:
                self._remove(None)
            elif found[0].known_dead or self._stands_still(found):
                self._remove(found[0].token)
            else:
                raise self._refusal(found[0])

    def _look(self) -> tuple[LockOwner, int] | None:
        """Return owner and count of the lock; None if there is no longer one, or if it stays unreadable."""
        for _ in range(_LOOKS):
            if (found := _read(self._path)) is not None:
                return found
            time.sleep(_PAUSE)
        return None

    def _stands_still(self, found: tuple[LockOwner, int]) -> bool:
        """Watch another host's lock, and return whether its count stays the same."""
        owner, count = found
        if owner.boot == LockOwner.here().boot:
            return False  # it lives, even if it is stopped
        print(
            f"waiting {_DEAD:g} s to see whether process {owner.process} on {owner.host} still has {self._path.parent}",
            file=sys.stderr,
            flush=True,
        )
        until = time.monotonic() + _DEAD
        while time.monotonic() < until:
            time.sleep(_BEAT / 3)
            now = _read(self._path)
            if now is not None and (now[0] != owner or now[1] != count):
                return False
        return True

    def _remove(self, token: str | None) -> None:
        """Remove the lock of a process that has ended, unless another start has replaced it in the meantime."""
        aside = self._path.with_name(f".{FILE}.{self._owner.token}.dead")
        with contextlib.suppress(FileNotFoundError):
            os.rename(self._path, aside)
            taken = _read(aside)
            if taken is not None and taken[0].token != token:
                _link(aside, self._path)
            aside.unlink(missing_ok=True)

    def _refusal(self, owner: LockOwner) -> UserError:
        return UserError(
            f"{self._path.parent} is in use by process {owner.process} on {owner.host} since {owner.since}; wait for "
            "its end, stop it, or name another run.out"
        )

    # --- Holding ------------------------------------------------------------------------------------------------------

    def _taken(self) -> str:
        """Return who has the folder instead of this process, or that its lock is gone; "" if neither is known.

        What cannot be read for a while (a network folder whose server restarts) is nobody else's. Another start that
        looks at the lock moves it aside for a moment.
        """
        for _ in range(_LOOKS):
            try:
                found = _parsed(self._path.read_bytes())
            except FileNotFoundError:
                self._over.wait(_PAUSE)
                continue
            except OSError:
                return ""
            if found is not None and found[0].token != self._owner.token:
                return f"by process {found[0].process} on {found[0].host}"
            return ""
        return "" if self._over.is_set() else "or its lock removed"

    def _beat(self) -> None:
        while not self._over.wait(_BEAT):
            self._lost = self._taken()
            if self._lost:
                return
            self._count += 1
            with contextlib.suppress(OSError), open(self._path, "r+b") as file:  # a full disk must not end training
                file.write(self._content())

    def check(self) -> None:
        """Raise if another start has taken the folder, because this process had stood still for long.

        Raises:
            UserError: The folder is no longer this process's.
        """
        if self._lost:
            raise UserError(
                f"{self._path.parent} was taken over {self._lost} while this process stood still; this run ends here, "
                "the other one continues"
            )

    def release(self) -> None:
        """Give the folder back."""
        self._over.set()
        if self._beating is not None:
            self._beating.join()
            found = _read(self._path)
            if found is not None and found[0].token == self._owner.token:
                self._path.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()
