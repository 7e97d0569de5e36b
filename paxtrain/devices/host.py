"""The memory of this machine, which virtual CPU devices share."""

import os
import pathlib
from collections.abc import Iterable
from typing import Any

# Limits of a container, of control groups of version 2 and 1.
_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> int:
    """Return the bytes that processes may use together on this machine, or in this container."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(pathlib.Path, _LIMITS):
        try:
            text = path.read_text().strip()
        except OSError:  # there is no such file
            continue
        if text.isdecimal():
            total = min(total, int(text))
    return total


def bytes_here(arrays: Iterable[Any]) -> int:
    """Return the bytes of arrays on this process's devices together.

    Args:
        arrays: arrays, or jax.ShapeDtypeStructs, with shardings.
    """
    total = 0
    for x in arrays:
        shard = x.dtype.itemsize
        for size in x.sharding.shard_shape(x.shape):
            shard *= size
        total += shard * len(x.sharding.addressable_devices)
    return total
