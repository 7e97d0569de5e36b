"""How fast a host's CPU is now: the same piece of work everywhere, so that one that lags behind is seen and named."""

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence

from planner.supervision.peer_connections import PeerConnections
from planner.supervision.worker_process import WorkerProcess

SLOW = 3.0  # times as long as the median of the others: from here on a host is slow
_SLOW_AGAIN = 2.0  # up to here it is slow no more
_SAMPLES, _PACE = 12, 0.5  # of the pace, and seconds between two


def _sample() -> float:
    """Seconds that a fixed piece of work takes here now, about a millisecond if nothing is in its way."""
    began = time.perf_counter()
    for _ in range(40_000):
        pass
    return time.perf_counter() - began


async def burst() -> float:
    """The mean of as many samples as count, within half a second."""
    samples = []
    for _ in range(_SAMPLES):
        samples.append(_sample())
        await asyncio.sleep(_PACE / _SAMPLES)
    return statistics.mean(samples)


class HostSpeed:
    """This host's pace, told to its neighbours and compared with theirs.

    Attributes:
        slow: how many times longer the work takes here than there; 0: no more than usual.
    """

    def __init__(
        self, me: int, names: Sequence[str], channel: PeerConnections, worker: WorkerProcess, say: Callable[[str], None]
    ) -> None:
        """Args:
        me: this host's number; names: what the hosts are called in messages.
        say: takes lines for the user.
        """
        self._me, self._names, self._channel, self._worker, self._say = me, names, channel, worker, say
        self.slow = 0.0
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._told: dict[int, int] = {}  # by slow host the version of the entry that a line has been said about

    async def keep(self) -> None:
        """Tells the neighbours how fast this host's CPU is while it trains; between steps hosts differ rightly."""
        while True:
            status = self._worker.status()
            if status.doing or status.step_seconds is None:
                self._samples.clear()
            else:
                self._samples.append(_sample())
            self._channel.aside = statistics.mean(self._samples) if len(self._samples) == _SAMPLES else None
            await asyncio.sleep(_PACE)

    def tell(self) -> None:
        """Says a line of who is slow, and again when he is no more: on the first host, and on the slow one."""
        mine, others = self._channel.aside, [pace for pace in self._channel.asides.values() if pace]
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
