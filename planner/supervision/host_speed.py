"""Speed of each host's CPU, measured by the same piece of work everywhere, so that a slow host is found and named."""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from planner.supervision.peer_connections import PeerConnections
from planner.supervision.worker_process import WorkerProcess

SLOW = 3.0  # times the median of the others, from which a host counts as slow
_SLOW_AGAIN = 2.0  # times the median, up to which it no longer counts as slow
_SAMPLES, _INTERVAL = 12, 0.5  # samples that are averaged, and seconds between two of them


def _sample() -> float:
    """Return the seconds that a fixed piece of work takes now: about a millisecond on an idle CPU."""
    began = time.perf_counter()
    for _ in range(40_000):
        pass
    return time.perf_counter() - began


async def burst() -> float:
    """Return the mean seconds of several samples, taken within half a second."""
    samples = []
    for _ in range(_SAMPLES):
        samples.append(_sample())
        await asyncio.sleep(_INTERVAL / _SAMPLES)
    return statistics.mean(samples)


class HostSpeed:
    """Speed of this host's CPU, sent to the neighbours and compared with theirs.

    Attributes:
        slow: time of the work here over the neighbours' median; 0 if this host is not slow.
    """

    def __init__(
        self, me: int, names: Sequence[str], channel: PeerConnections, worker: WorkerProcess, say: Callable[[str], None]
    ) -> None:
        """Start with no samples; `keep` takes them.

        Args:
            me: this host's number.
            names: names of all hosts in messages.
            channel: connections to the other supervisors.
            worker: this host's worker; samples count only while it trains.
            say: function that prints a line for the user.
        """
        self._me, self._names, self._channel, self._worker, self._say = me, names, channel, worker, say
        self.slow = 0.0
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._told: dict[int, int] = {}  # by slow host: version of the entry last printed

    async def keep(self) -> None:
        """Send the neighbours this CPU's speed while the worker trains; between steps hosts may differ."""
        while True:
            status = self._worker.status()
            if status.doing or status.step_seconds is None:
                self._samples.clear()
            else:
                self._samples.append(_sample())
            self._channel.aside = statistics.mean(self._samples) if len(self._samples) == _SAMPLES else None
            await asyncio.sleep(_INTERVAL)

    def tell(self) -> None:
        """Print a line when a host becomes slow and when it recovers, on the first host and on the slow one."""
        mine, others = self._channel.aside, [seconds for seconds in self._channel.asides.values() if seconds]
        if mine and others:
            times = mine / statistics.median(others)
            slow = times if times > (_SLOW_AGAIN if self.slow else SLOW) else 0.0
            if bool(slow) != bool(self.slow):
                self._channel.board.put(f"slow/{self._me}", slow)
            self.slow = slow
        for rank in self._channel.board.numbers("slow/"):
            entry = self._channel.board[f"slow/{rank}"]
            if self._me in (0, rank) and self._told.get(rank) != entry.version:
                self._told[rank] = entry.version
                much = f"takes {entry.value:.1f} times as long as the others' for the same work; they may wait for it"
                self._say(
                    f"note: {self._names[rank]}'s CPU {much if entry.value else 'is as fast as the others again'}"
                )
