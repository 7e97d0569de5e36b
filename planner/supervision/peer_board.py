"""The board of named entries that all supervisors of a run share.

Every host keeps a copy. `peer_connections` carries new entries from host to host. Clocks differ between hosts, so an
entry travels with its age instead of a time.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any


@dataclasses.dataclass(frozen=True)
class BoardEntry:
    """A value that one host tells all others.

    Attributes:
        value: JSON value.
        version: number that grows with each new value of the same name.
        made: time of the entry by this host's monotonic clock, in seconds.
    """

    value: Any
    version: int
    made: float

    @property
    def age(self) -> float:
        """Seconds since the entry was made."""
        return time.monotonic() - self.made


class PeerBoard:
    """This host's copy of the board: a mapping from names to entries."""

    def __init__(self, forward: Callable[[str, object], None]) -> None:
        """Create an empty board.

        Args:
            forward: function that sends the entry of a name to the neighbours, except to the connection it came from.
        """
        self._forward = forward
        self._entries: dict[str, BoardEntry] = {}
        self._listeners: list[Callable[[str], None]] = []

    def __getitem__(self, name: str) -> BoardEntry:
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def get(self, name: str) -> BoardEntry | None:
        """Return the entry of a name, or None if there is none yet."""
        return self._entries.get(name)

    def listen(self, listener: Callable[[str], None]) -> None:
        """Call `listener` with the name of every entry that is new or has changed."""
        self._listeners.append(listener)

    def notify(self, name: str) -> None:
        """Call all listeners with a name; "" means that the neighbours have changed, not an entry."""
        for listener in self._listeners:
            listener(name)

    def put(self, name: str, value: object) -> None:
        """Put a JSON value on every host's board. Only one host may put entries of a given name."""
        before = self._entries[name].version if name in self._entries else 0
        self.store(name, BoardEntry(value, max(before + 1, time.time_ns()), time.monotonic()))

    def store(self, name: str, entry: BoardEntry, source: object = None) -> None:
        """Keep an entry and forward it, unless the board already has this version or a newer one.

        Args:
            name: name of the entry.
            entry: the entry.
            source: connection that brought it; None if it was made on this host.
        """
        if name in self._entries and self._entries[name].version >= entry.version:
            return
        self._entries[name] = entry
        self._forward(name, source)
        self.notify(name)

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of the hosts that have put an entry named `kind` and their number."""
        return [int(name.removeprefix(kind)) for name in self._entries if name.startswith(kind)]
