"""Rings of hosts over which devices that share sequences lie: which hosts make one, and in which order it visits them.

Keys and values go round such a ring, and its slowest link decides. So hosts whose links are fast make one, as alike in
kind and behind the same trunks as one block of hosts must be.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cost.link_seconds import fabric

Array = np.ndarray
Block = tuple[int, ...]

_WORTH = 0.02  # share by which the slowest link must be faster than that of hosts in a row
_OTHERS = {2: 4, 3: 4, 4: 4}  # hosts besides the nearest that a block may take instead of them, by its size; else 1
_MOST = 1024  # hosts of a cluster up to which any but those in a row are tried
_TURNS = 6  # hosts of a ring of which all orders are tried
_NODES = 2000  # blocks that are tried at most


def host_rings(cluster: Cluster, together: int) -> tuple[Block, ...]:
    """Return the hosts of each block, in the order of its ring: those whose slowest link is the fastest.

    Of up to 6 hosts all partitions are tried, of more those into near hosts, as long as that is quick. Hosts in a row
    stay if little is gained.

    Args:
        cluster: cluster of single hosts.
        together: hosts of a block, a divisor of their number.
    """
    slow = fabric(cluster).slowness
    slow = np.maximum(slow, slow.T)
    count, classes = len(cluster.hosts), dict[tuple, list[int]]()
    for host in range(count):
        behind = () if cluster.trunks is None else tuple(cluster.trunks.behind[:, host].tolist())
        classes.setdefault((cluster.kinds[host], behind), []).append(host)
    row = tuple(tuple(range(first, first + together)) for first in range(0, count, together))
    if count > _MOST:
        return row
    of_class = {host: n for n, some in enumerate(classes.values()) for host in some}
    allowed = all(len({of_class[host] for host in block}) == 1 for block in row)
    if any(len(some) % together for some in classes.values()):
        return row  # which `merged` refuses
    found = [block for some in classes.values() for block in _blocks(slow, some, together)]
    slowest = max(_around(slow, block) for block in found)
    if allowed and max(_around(slow, block) for block in row) <= slowest * (1 + _WORTH):
        return row
    return tuple(sorted(found))


def _around(slow: Array, ring: Sequence[int]) -> float:
    """Return the seconds per byte of the slowest link of a ring."""
    return float(slow[list(ring), [*ring[1:], ring[0]]].max())


def _ring(slow: Array, hosts: Sequence[int]) -> Block:
    """Return hosts in the order of the ring whose slowest link is the fastest, or of a good one if they are many."""
    first, *rest = hosts
    if len(hosts) <= _TURNS:
        return min(((first, *order) for order in itertools.permutations(rest)), key=lambda ring: _around(slow, ring))
    ring, left = [first], set(rest)
    while left:
        ring.append(min(left, key=lambda host: (slow[ring[-1], host], host)))
        left.remove(ring[-1])
    best = _around(slow, ring)
    for i, j in itertools.combinations(range(1, len(ring)), 2):  # a part of the ring the other way round
        turned = [*ring[:i], *ring[i : j + 1][::-1], *ring[j + 1 :]]
        if (value := _around(slow, turned)) < best:
            ring, best = turned, value
    return tuple(ring)


def _blocks(slow: Array, hosts: Sequence[int], together: int) -> tuple[Block, ...]:
    """Return a partition of some hosts into rings of `together` whose slowest link is as fast as any that was found.

    The host whose near links are the slowest is given its block first, by trying those of near hosts.
    """
    within = slow[np.ix_(hosts, hosts)] + np.diag(np.full(len(hosts), np.inf))
    # A ring of two needs one fast link of each of its hosts, a longer one two.
    needed = np.sort(within, axis=1)[:, min(together - 1, 2) - 1]
    order = [hosts[n] for n in np.argsort(-needed, kind="stable")]
    best: tuple[float, tuple[Block, ...]] = np.inf, ()
    left, more = _NODES, _OTHERS.get(together, 1)

    def place(open_: list[int], made: tuple[Block, ...], slowest: float) -> None:
        nonlocal best, left
        if not open_:
            best = slowest, made
            return
        first, *others = open_
        near = sorted(others, key=lambda host: (slow[first, host], host))[: together - 1 + more]
        rings = [_ring(slow, (first, *some)) for some in itertools.combinations(near, together - 1)]
        for value, ring in sorted((_around(slow, ring), ring) for ring in rings):
            if value >= best[0] or best[0] <= float(needed.max()) or (left <= 0 and best[1]):
                return
            left -= 1
            place([host for host in others if host not in ring], (*made, ring), max(slowest, value))

    place(order, (), 0.0)
    return best[1]
