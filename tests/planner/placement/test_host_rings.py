"""Rings of hosts over which sequences are shared: their slowest link is the fastest that any partition has."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.cluster.trunks import Trunks
from planner.cost.link_seconds import fabric
from planner.placement.host_rings import host_rings
from tests.planner.examples import cluster


def partitions(hosts, together):
    """Yield the ways to split hosts into sets."""
    if not hosts:
        yield ()
        return
    first, *others = hosts
    for some in itertools.combinations(others, together - 1):
        for rest in partitions([host for host in others if host not in some], together):
            yield ((first, *some), *rest)


def slowest(cluster, blocks):
    """Return the seconds per byte of the slowest link of rings of hosts."""
    slow = np.maximum(fabric(cluster).slowness, fabric(cluster).slowness.T)
    return max(slow[a, b] for ring in blocks for a, b in zip(ring, (*ring[1:], ring[0])))


@pytest.mark.parametrize(("count", "together"), [(4, 2), (6, 2), (6, 3), (8, 4), (5, 5)])
def test_no_rings_of_hosts_are_faster(count, together):
    for seed in range(5):
        some = cluster(count, 8, seed)
        found = host_rings(some, together)
        assert sorted(itertools.chain(*found)) == list(range(count)) and {len(ring) for ring in found} == {together}
        orders = (
            [(first, *rest) for rest in itertools.permutations(others)]
            for blocks in partitions(list(range(count)), together)
            for first, *others in blocks
        )
        best = {frozenset(some_orders[0]): min(slowest(some, [x]) for x in some_orders) for some_orders in orders}
        least = min(max(best[frozenset(ring)] for ring in blocks) for blocks in partitions([*range(count)], together))
        assert slowest(some, found) <= least * 1.02


def test_equal_links_leave_hosts_in_a_row():
    assert host_rings(cluster(8, 8, seed=None), 4) == ((0, 1, 2, 3), (4, 5, 6, 7))


def test_racks_and_trunks_keep_rings_inside():
    """Hosts of two racks take turns in the file; rings over racks would have a tenth of the bandwidth."""
    some, rack = cluster(8, 8, seed=None), np.arange(8) % 2
    apart = rack[:, None] != rack
    slower = dataclasses.replace(some, samples=some.samples * np.where(apart, 0.1, 1.0))
    behind = dataclasses.replace(some, trunks=Trunks((rack == 0)[None], np.array([1e9])))
    for one in (slower, behind):
        assert all(len({rack[host] for host in ring}) == 1 for ring in host_rings(one, 4))


def test_many_hosts_get_rings_that_are_much_faster_than_hosts_in_a_row():
    some = cluster(64, 8)
    for together in (2, 4, 8):
        row = np.arange(64).reshape(-1, together).tolist()
        assert slowest(some, host_rings(some, together)) < 0.6 * slowest(some, row)
