"""Exact search over placements if there are few: all of them are evaluated in batches, without symmetric copies.

Two placements are the same to the simulator in three cases. Groups take other slots of the same host; the data rings
begin elsewhere, so that data rank d becomes d + 1; or hosts with the same links, trunks and devices are exchanged. If
gradients are summed inside groups of data ranks first, or groups train apart, the rings inside and those between groups
may begin elsewhere, so any data rank may become the first one, too. With rails it may not if hosts have several groups,
because they take a host's devices in mesh order.
"""

from collections.abc import Callable

import numpy as np

from planner.cost.link_seconds import Fabric

Array = np.ndarray

_BATCH = 4096  # placements of 16 groups evaluated at once; the more groups, the fewer


def twins(fabric: Fabric, kinds: Array) -> Array:
    """Return, for each host [H], the last host before it that can take its place without any change, or -1.

    Args:
        fabric: links of the hosts.
        kinds: [H] device kind of each host.
    """
    matrices = fabric.per_byte, fabric.alpha
    behind = None if fabric.trunks is None else fabric.trunks.behind
    found = np.full(len(kinds), -1)
    alike: dict[tuple, list[list[int]]] = {}  # classes of twins, by what all members must share
    for host in range(len(kinds)):
        lines = [np.sort(line).tobytes() for x in matrices for line in (x[host], x[:, host])]
        uplinks = b"" if behind is None else behind[:, host].tobytes()
        classes = alike.setdefault((kinds[host], uplinks, *lines), [])
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


def placements(data: int, pipe: int, slots: int, twin: Array, most: int, turns: bool = True) -> Array | None:
    """Return all placements without symmetric copies.

    Among the rotations of a placement, those with host 0 in data rank 0 are kept.

    Args:
        data: size D of the data axis.
        pipe: size P of the pipe axis.
        slots: tensor groups per host.
        twin: [H] twin of each host, as `twins` returns it.
        most: largest number of placements, counted also while they are built.
        turns: whether rotations of the data ranks are copies.

    Returns:
        [count, D, P] host of each group; None if there are more than `most`.
    """
    hosts, groups = len(twin), data * pipe
    prefix = np.zeros((1, 0), np.int32)
    used = np.zeros((1, hosts), np.int32)
    has_twin = twin >= 0
    for position in range(groups):
        free = used < slots
        # Among unused twins only the first is free, since the others give the same placements.
        free[:, has_twin] &= (used[:, has_twin] > 0) | (used[:, twin[has_twin]] > 0)
        if turns and position == pipe - 1:
            free[(used[:, 0] == 0), 1:] = False
        parent, host = np.nonzero(free)
        if len(parent) > most:
            return None
        prefix = np.concatenate([prefix[parent], host[:, None].astype(np.int32)], axis=1)
        used = used[parent]
        used[np.arange(len(host)), host] += 1
    return prefix.reshape(-1, data, pipe)


def search(objective: Callable[[Array], Array], count: int, groups: int) -> tuple[int, float]:
    """Return the number of the best of some placements, and its value; the first one if several are equal.

    Args:
        objective: function from numbers of placements [batch] to values [batch].
        count: how many placements there are.
        groups: groups of a placement; the more there are, the fewer are evaluated at once.
    """
    size = max(1, _BATCH * 16 // groups)
    values = np.concatenate([objective(np.arange(i, min(i + size, count))) for i in range(0, count, size)])
    best = int(np.argmin(values))
    return best, float(values[best])
