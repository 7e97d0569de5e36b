"""Trunks: which of them some hosts still take, and how slow a full one is."""

import numpy as np
import pytest

from planner.cluster.trunks import Trunks


def trunks() -> Trunks:
    """Return the uplinks of two sites of three and two hosts, and of a rack of two in the first."""
    behind = [[1, 1, 1, 0, 0], [0, 0, 0, 1, 1], [1, 1, 0, 0, 0]]
    return Trunks(np.array(behind, bool), np.array([2.0, 4.0, 10.0]))


@pytest.mark.parametrize(
    ("hosts", "left"),
    [((0, 1), []), ((3, 4), []), ((0, 2), [10.0]), ((2, 3), [2.0, 4.0]), ((1, 2, 4), [2.0, 4.0, 10.0])],
)
def test_some_hosts_keep_the_trunks_between_them(hosts, left):
    some = trunks().of_hosts(hosts)
    assert some.bandwidth.tolist() == left and bool(left) == trunks().splits(hosts) == bool(some)
    assert some.behind.shape == (len(left), len(hosts))


def test_a_full_trunk_has_a_flow_of_each_host_of_its_smaller_side():
    slowest = trunks().slowness()
    assert slowest[0, 1] == slowest[3, 4] == slowest[2, 2] == 0
    assert slowest[0, 2] == slowest[2, 1] == 2 / 10
    assert slowest[0, 3] == slowest[4, 2] == max(2 / 2, 2 / 4, 2 / 10)
