"""A process that takes a shaped cluster down when the one that made it ends, however that ends; hosts.py starts it.

It reads its standard input: a line with the number of a process group makes it responsible for it, and the end of the
input, which also comes when the parent is killed, is the sign to begin. It runs in a session of its own, so that Ctrl-C
does not reach it, and needs the standard library alone.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

NETNS = pathlib.Path("/run/netns")


def namespaces(token: str) -> list[str]:
    """Return the names of the cluster's network namespaces."""
    return sorted(path.name for path in NETNS.glob(f"{token}-*"))


def _members(groups: list[pathlib.Path], token: str) -> set[int]:
    """Return the processes in the cluster's control groups or network namespaces."""
    found: set[int] = set()
    for folder in groups:
        for file in folder.rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found |= {int(line) for line in file.read_text().split()}
    for name in namespaces(token):
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        found |= {int(line) for line in listed.stdout.split()}
    return found - {os.getpid()}


def kill(groups: list[pathlib.Path], token: str, leaders: set[int] = frozenset(), limit: float = 20.0) -> None:
    """End all that runs on the cluster, with the process groups that its leaders lead; wait until they are gone."""
    for leader in leaders:
        with contextlib.suppress(OSError):
            os.killpg(leader, signal.SIGKILL)
    until = time.monotonic() + limit
    while (found := _members(groups, token)) and time.monotonic() < until:
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.05)


def _remove(groups: list[pathlib.Path], limit: float = 10.0) -> None:
    """Remove control groups; one is busy for a moment longer while its last process ends."""
    until = time.monotonic() + limit
    while (left := [top for top in groups if top.exists()]) and time.monotonic() < until:
        for top in left:
            for path in (*sorted((path for path in top.rglob("*") if path.is_dir()), reverse=True), top):
                with contextlib.suppress(OSError):
                    path.rmdir()
        time.sleep(0.05)


def take_down(token: str, groups: list[pathlib.Path], folder: pathlib.Path, leaders: set[int] = frozenset()) -> None:
    """End all processes, then remove namespaces (and with them their links), control groups and the folder."""
    kill(groups, token, leaders)
    for name in namespaces(token):
        subprocess.run(["ip", "netns", "del", name], check=False)
    _remove(groups)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    token, folder, *groups = sys.argv[1:]
    started: set[int] = set()
    for line in sys.stdin:
        started.add(int(line))
    take_down(token, [pathlib.Path(group) for group in groups], pathlib.Path(folder), started)
