"""Emulated clusters take turns, because two at once starve each other until they run into limits of time."""

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
