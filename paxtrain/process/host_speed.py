"""A host whose processor is slow, found by the same piece of work on every host: all others wait for it at each step.

The figures travel through the key-value store of jax's coordination service. A slow device or link is not seen here;
`planner.profile` measures these.
"""

import hashlib
import json
import socket
import statistics
import time
from collections import deque

from paxtrain.process import jax_private

_SLOW = 3.0  # times the median, from which a host counts as slow
_SLOW_AGAIN = 2.0  # times the median, up to which it no longer counts as slow
_SAMPLES = 10  # whose mean is told, since a process of a busy core waits now and then
_WORK = bytes(1 << 20)  # hashed in about a millisecond, without Python's lock
_KEYS = "paxtrain/host_speed"


def _seconds() -> float:
    """Return the seconds that the piece of work takes now."""
    began = time.perf_counter()
    hashlib.blake2b(_WORK)
    return time.perf_counter() - began


class HostSpeed:
    """Speed of this process's host. Process 0 compares all."""

    def __init__(self) -> None:
        """Start without samples."""
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._slow: set[int] = set()

    def sample(self) -> list[str]:
        """Take a sample, and after some of them tell the others; return what process 0 has to say.

        Raises:
            RuntimeError: The coordination service has ended.
        """
        client, me = jax_private.coordination_client(), jax_private.joined_number()
        self._samples.append(_seconds())
        if client is None or len(self._samples) < _SAMPLES:
            return []
        mine = json.dumps([statistics.mean(self._samples), socket.gethostname()])
        self._samples.clear()
        client.key_value_set(f"{_KEYS}/{me}", mine, allow_overwrite=True)
        if me:
            return []
        found = client.key_value_dir_get(f"{_KEYS}/")
        return self._compare({int(key.rpartition("/")[2]): tuple(json.loads(value)) for key, value in found})

    def _compare(self, told: dict[int, tuple[float, str]]) -> list[str]:
        """Return a line for each process whose host has become slow, or is so no more.

        Args:
            told: by number of the process: seconds of the piece of work, and name of the host.
        """
        usual = statistics.median_low(seconds for seconds, _ in told.values())
        lines = []
        for number, (seconds, host) in told.items():
            times = seconds / usual
            slow = times > (_SLOW_AGAIN if number in self._slow else _SLOW)
            if slow != (number in self._slow):
                what = f"takes {times:.1f} times as long as the others' for the same work; they may wait for it"
                lines.append(
                    f"process {number} on {host}: its CPU {what if slow else 'is as fast as the others again'}"
                )
                self._slow ^= {number}
        return lines
