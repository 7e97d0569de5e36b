"""Emulated clusters take turns: two at once, each of several processes, starve each other until limits of time pass."""

import fcntl
import pathlib
import tempfile
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """Wait while another process's tests, such as those of pytest-xdist, use a cluster."""
    with (pathlib.Path(tempfile.gettempdir()) / "paxtrain-cluster.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
