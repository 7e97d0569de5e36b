"""The links that neighbors in a mesh use, each timed by itself."""

import types

import numpy as np
import pytest

from paxtrain.run.stragglers.suspects import Suspect, from_texts, neighbors, numbered, rounds, to_text


def devices(shape, per_process=1):
    count = int(np.prod(shape))
    found = np.empty(count, object)
    found[:] = [types.SimpleNamespace(process_index=i // per_process) for i in range(count)]
    return found.reshape(shape)


def test_links_are_those_of_rings_over_each_axis_in_both_directions():
    found = neighbors(devices((2, 3, 1)), host_of=range(6))
    pipes = {(0, 1), (1, 2), (0, 2), (3, 4), (4, 5), (3, 5)}
    across = {(0, 3), (1, 4), (2, 5)}
    assert set(found) == {pair for a, b in pipes | across for pair in ((a, b), (b, a))}
    assert all(found[link] == link for link in found)  # a device each


def test_a_link_between_hosts_has_one_pair_of_devices_and_none_is_inside_a_host():
    # Two hosts of two processes of two devices: data over the hosts, tensor inside.
    found = neighbors(devices((2, 1, 4), per_process=2), host_of=[0, 0, 1, 1])
    assert found == {(0, 1): (0, 4), (1, 0): (4, 0)}
    assert neighbors(devices((2, 2, 2)), host_of=[0] * 8) == {}


@pytest.mark.parametrize("count", [2, 5, 64])
def test_no_host_takes_part_twice_in_a_round_and_rounds_do_not_grow_with_the_ring(count):
    links = neighbors(devices((count,)), host_of=range(count))
    found = rounds(links)
    assert sorted(link for some in found for link in some) == sorted(links)
    for some in found:
        ends = [host for link in some for host in link]
        assert len(ends) == len(set(ends))
    assert len(found) <= 6


def test_hosts_are_numbered_by_their_first_process():
    assert numbered(["b", "b", "a", "b"]) == (["b", "a"], [0, 0, 1, 0])


def test_seconds_travel_as_text():
    mine, others = {Suspect("cpu", 0): 0.5}, {Suspect("link", 1, 0): 0.25, Suspect("device", 1, 3): 2.0}
    assert from_texts(map(to_text, (mine, others))) == mine | others
