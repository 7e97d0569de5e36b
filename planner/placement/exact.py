"""Exact search over placements where there are few: all of them, without symmetric copies, evaluated in batches.

Two placements are the same to the simulator if they differ in which slot of a host a group takes, in where the data
rings begin (data rank d becomes d + 1, around), or by an exchange of hosts whose links and devices are the same.
"""

from collections.abc import Callable

import numpy as np

from planner.cost.links import Fabric

Array = np.ndarray

_BATCH = 4096  # groups times placements evaluated at once, in units of 16 groups


def twins(fabric: Fabric, kinds: Array) -> Array:
    """[H] the host before each with which it may be exchanged without any change, or -1.

    Args:
        kinds: [H] device kinds.
    """
    matrices = fabric.per_byte, fabric.alpha
    found = np.full(len(kinds), -1)
    alike: dict[tuple, list[list[int]]] = {}  # classes of twins by what twins have in common
    for host in range(len(kinds)):
        lines = [np.sort(line).tobytes() for x in matrices for line in (x[host], x[:, host])]
        classes = alike.setdefault((kinds[host], *lines), [])
        for twins in classes:
            if all(_exchangeable(x, host, twins[0]) for x in matrices):
                found[host] = twins[-1]
                twins.append(host)
                break
        else:
            classes.append([host])
    return found


def _exchangeable(links: Array, a: int, b: int) -> bool:
    """Return whether a matrix stays the same when two of its indices are exchanged."""
    exchange = np.arange(len(links))
    exchange[[a, b]] = b, a
    return np.array_equal(links[a, exchange], links[b]) and np.array_equal(links[exchange, a], links[:, b])


def placements(data: int, pipe: int, slots: int, twin: Array, most: int) -> Array | None:
    """Return all placements without symmetric copies, [count, D, P] hosts; None if there are more than `most`.

    Of the rotations of a placement at least the one is kept that has host 0 in data rank 0.

    Args:
        slots: groups on a host. twin: [H] as `twins` says.
    """
    hosts, groups = len(twin), data * pipe
    prefix = np.zeros((1, 0), np.int32)
    used = np.zeros((1, hosts), np.int32)
    has_twin = twin >= 0
    for position in range(groups):
        free = used < slots
        # Of unused twins only the first: the others give the same placements.
        free[:, has_twin] &= (used[:, has_twin] > 0) | (used[:, twin[has_twin]] > 0)
        if position == pipe - 1:
            free[(used[:, 0] == 0), 1:] = False
        parent, host = np.nonzero(free)
        if len(parent) > most:
            return None
        prefix = np.concatenate([prefix[parent], host[:, None].astype(np.int32)], axis=1)
        used = used[parent]
        used[np.arange(len(host)), host] += 1
    return prefix.reshape(-1, data, pipe)


def search(objective: Callable[[Array], Array], every: Array) -> tuple[Array, float]:
    """The best of placements [count, D, P] and its value; the first of equals."""
    size = max(1, _BATCH * 16 // every[0].size)
    values = np.concatenate([objective(every[i : i + size]) for i in range(0, len(every), size)])
    best = int(np.argmin(values))
    return every[best], float(values[best])
