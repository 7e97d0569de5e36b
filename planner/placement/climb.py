"""A climb by exchanges, from a placement to one that no exchange makes better.

The exchanges are of two hosts with all that they hold, of two racks, and of two tensor groups on different hosts. Racks
are the sets of hosts whose links to each other are fast beside those to other hosts.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator

import numpy as np

from planner.cost.link_seconds import Fabric

Array = np.ndarray
Objective = Callable[[Array], Array]  # hosts [batch, D, P] -> [batch]

_APART = 1.5  # how much slower the links between racks are at least
_PAIRS = 1000  # tensor groups up to which all their pairs are listed
_LEAST = 1e-9  # share of the value that counts as a gain


@functools.lru_cache(maxsize=8)
def racks_of(fabric: Fabric) -> Array:
    """Return the rack of each host [H] of a fabric; see `racks`."""
    return racks(fabric.slowness)


def racks(per_byte: Array) -> Array:
    """Return the rack of each host [H]: hosts that are joined before the largest jump in the links' slowness.

    All hosts are in one rack if there is no such jump.

    Args:
        per_byte: [H, H] seconds per byte of each link.
    """
    hosts = len(per_byte)
    apart = per_byte[~np.eye(hosts, dtype=bool)]
    if hosts < 4 or apart.max() < _APART * apart.min():  # means of links cannot differ by more than the links
        return np.zeros(hosts, int)
    from scipy.cluster import hierarchy  # here, since it takes a good part of a second

    merged = hierarchy.linkage(np.maximum(per_byte, per_byte.T)[np.triu_indices(hosts, 1)], "average")
    height = merged[:, 2]
    jump = height[1:] / height[:-1]
    at = int(np.argmax(jump))
    if jump[at] < _APART:
        return np.zeros(hosts, int)
    return hierarchy.fcluster(merged, height[at], "distance") - 1


def exchanges(members: list[Array], other: list[Array], hosts: int) -> Array:
    """Return the new number of each host [n, H] if the n-th pair of sets exchange their members, one by one."""
    found = np.tile(np.arange(hosts), (len(members), 1))
    for row, a, b in zip(found, members, other):
        size = min(len(a), len(b))
        row[a[:size]], row[b[:size]] = b[:size], a[:size]
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Climbed:
    """The end of a climb.

    Attributes:
        hosts: [D, P] host of each tensor group.
        value: value of the objective.
        evaluations: number of placements that were evaluated.
    """

    hosts: Array
    value: float
    evaluations: int


class _Neighbors:
    """The exchanges of a placement on hosts in racks, in an order drawn anew for each pass."""

    def __init__(self, rack: Array, groups: bool, rng: np.random.Generator) -> None:
        self.count, self.groups, self.rng = len(rack), groups, rng
        sets = [np.flatnonzero(rack == i) for i in range(rack.max() + 1)]
        large = [members for members in sets if len(members) > 1]
        both = list(itertools.combinations(large, 2))
        self.racks = exchanges([a for a, _ in both], [b for _, b in both], self.count)
        self.pairs = np.stack(np.triu_indices(self.count, 1), axis=1)

    def _renamed(self, size: int, most: int) -> Iterator[Array]:
        """Yield the new numbers of the hosts [batch, H] for exchanges of racks and of hosts."""
        if len(self.racks):
            yield self.racks[:size]
        rows = self.rng.permutation(len(self.pairs))[:most]
        for i in range(0, len(rows), size):
            a, b = self.pairs[rows[i : i + size]].T
            yield exchanges(list(a[:, None]), list(b[:, None]), self.count)

    def batches(self, hosts: Array, size: int, most: int) -> Iterator[Array]:
        """Yield the placements [batch, D, P] that one exchange makes, about `most` of each kind."""
        flat = hosts.ravel()
        for renamed in self._renamed(size, most):
            yield renamed[:, flat].reshape(-1, *hosts.shape)
        if not self.groups:
            return
        if len(flat) <= _PAIRS:
            a, b = np.triu_indices(len(flat), 1)
        else:  # so many pairs that some are drawn
            a, b = self.rng.integers(len(flat), size=(2, 2 * most))
        rows = self.rng.permutation(np.flatnonzero(flat[a] != flat[b]))[:most]
        for i in range(0, len(rows), size):
            some = rows[i : i + size]
            new, at = np.tile(flat, (len(some), 1)), np.arange(len(some))
            new[at, a[some]], new[at, b[some]] = flat[b[some]], flat[a[some]]
            yield new.reshape(-1, *hosts.shape)


def climb(
    objective: Objective,
    hosts: Array,
    value: float,
    rack: Array,
    groups: bool,
    rng: np.random.Generator,
    batch: int,
    evaluations: int,
) -> Climbed:
    """Return the placement from which no exchange leads to a better one, or the best one when the evaluations are up.

    Args:
        objective: function from placements [batch, D, P] to the values [batch] that are minimized.
        hosts: placement [D, P] to begin with.
        value: its value.
        rack: [H] rack of each host.
        groups: whether single groups may be exchanged; otherwise only whole hosts.
        rng: random numbers for the order of the exchanges.
        batch: placements that are evaluated at once.
        evaluations: most placements to evaluate.
    """
    neighbors, used = _Neighbors(rack, groups, rng), 0
    moved = True
    while moved and used < evaluations:
        moved = False
        for some in neighbors.batches(hosts, batch, max(evaluations - used, 1)):
            values = objective(some)
            used += len(some)
            best = int(np.argmin(values))
            if values[best] < value * (1 - _LEAST):
                hosts, value, moved = some[best], float(values[best]), True
                break
            if used >= evaluations:
                break
    return Climbed(hosts, value, used)
