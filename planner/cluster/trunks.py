"""Trunks: uplinks that several hosts share, a site's to the others or a leaf switch's to the spine."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

Array = np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class Trunks:
    """The shared uplinks of a cluster. All flows between a host behind one and a host that is not take it.

    Attributes:
        behind: [K, H] whether a host is behind a trunk; neither none nor all of the hosts are.
        bandwidth: [K] bytes/s of all flows together, in each direction.
    """

    behind: Array
    bandwidth: Array

    def __len__(self) -> int:
        return len(self.bandwidth)

    def __iter__(self) -> Iterator[tuple[Array, float]]:
        """Yield the hosts behind each trunk, bool [H], and its bytes/s."""
        return zip(self.behind, self.bandwidth.tolist())

    def of_hosts(self, where: Sequence[int] | Array) -> "Trunks":
        """Return the trunks of some hosts, without those that none of their links takes.

        Args:
            where: indices of the hosts.
        """
        behind = self.behind[:, list(where)]
        used = behind.any(axis=1) & ~behind.all(axis=1)
        return Trunks(behind[used], self.bandwidth[used])

    def splits(self, hosts: Sequence[int] | Array) -> bool:
        """Return whether a link among some hosts, given by their indices, takes a trunk."""
        return len(self.of_hosts(hosts)) > 0

    def slowness(self) -> Array:
        """Return the seconds per byte [H, H] of flows in trunks when each host of the smaller side has one there."""
        found = np.zeros((self.behind.shape[1],) * 2)
        for behind, rate in self:
            flows = min(int(behind.sum()), int((~behind).sum()))
            np.maximum(found, np.where(behind[:, None] != behind, flows / rate, 0.0), out=found)
        return found
