"""A share of a core for every host of a shaped cluster: control groups of version 1 or 2.

Many processes on few cores stretch each other's compute, so that no model can predict it. With a quota whose sum stays
below the cores a host computes as fast alone as beside all others.
"""

import dataclasses
import os
import pathlib

_SLICE = 1000  # microseconds of compute per period: short, so that a host never waits long for its next turn
_V1, _V2 = pathlib.Path("/sys/fs/cgroup/cpu"), pathlib.Path("/sys/fs/cgroup")


def root() -> pathlib.Path | None:
    """Return the folder for control groups with a CPU quota, or None."""
    if (_V1 / "cpu.cfs_quota_us").exists():
        home = _V1
    elif "cpu" in _controllers(_V2):
        home = _V2
    else:
        return None
    return home if _writable(home) else None


def _controllers(home: pathlib.Path) -> list[str]:
    file = home / "cgroup.controllers"
    return file.read_text().split() if file.exists() else []


def _writable(home: pathlib.Path) -> bool:
    probe = home / f"paxprobe{os.getpid()}"  # of its own: another cluster may be probing, too
    try:
        probe.mkdir(exist_ok=True)
        probe.rmdir()
    except OSError:
        return False
    return True


@dataclasses.dataclass(frozen=True)
class Quotas:
    """The control groups of a cluster's hosts, below a separate folder."""

    home: pathlib.Path

    @classmethod
    def make(cls, token: str, hosts: int) -> "Quotas | None":
        """Create the groups without a limit; return None if the machine does not allow it."""
        top = root()
        if top is None:
            return None
        home = top / token
        home.mkdir()
        if top == _V2:  # the controller is handed down folder by folder
            for folder in (top, home):
                (folder / "cgroup.subtree_control").write_text("+cpu")
        for host in range(hosts):
            (home / str(host)).mkdir()
        return cls(home)

    def procs(self, host: int) -> pathlib.Path:
        """Return the file that a process joins by writing its number into it."""
        return self.home / str(host) / "cgroup.procs"

    def limit(self, host: int, share: float | None) -> None:
        """Limit a host to that share of one core, or remove its limit."""
        _limit(self.home / str(host), share)

    def limit_process(self, host: int, process: int, share: float) -> None:
        """Limit a process of a host, with all its threads, to that share of one core.

        Version 2 allows no groups beside processes, so there the host's other processes must be in groups, too.
        """
        folder = self.home / str(host) / str(process)
        folder.mkdir(exist_ok=True)
        _limit(folder, share)
        (folder / "cgroup.procs").write_text(str(process))


def _limit(folder: pathlib.Path, share: float | None) -> None:
    """Limit a control group to that share of one core, or remove its limit."""
    period = 0 if share is None else round(_SLICE / share)
    if (folder / "cpu.max").exists():
        (folder / "cpu.max").write_text("max" if share is None else f"{_SLICE} {period}")
        return
    (folder / "cpu.cfs_quota_us").write_text("-1")
    if share is not None:
        (folder / "cpu.cfs_period_us").write_text(str(period))
        (folder / "cpu.cfs_quota_us").write_text(str(_SLICE))
