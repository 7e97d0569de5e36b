"""Shared uplinks: which hosts are asked for them, and what their times tell."""

import dataclasses
import time

import jax
import numpy as np
import pytest

from planner.cluster.trunks import Trunks
from planner.measure import profile_trunks
from planner.measure.link_timing import one_by_one, sampled, tournament
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup
from planner.measure.profile_trunks import UplinkGroup

SIZE = 1000


def test_hosts_of_a_site_or_a_rack_are_a_group():
    sites, racks = ["w", "w", "w", "e", "e", "e"], ["1", "1", "2", "1", "", ""]
    found = profile_trunks.groups_of(list(zip(sites, racks)))
    assert found == [([0, 1, 2], [3, 4, 5]), ([3, 4, 5], [0, 1, 2]), ([0, 1], [2])]
    assert profile_trunks.groups_of([("a", "")] * 6) == []
    assert profile_trunks.groups_of(list(zip(sites, sites))) == found[:2]  # each once
    assert profile_trunks.groups_of([("", rack) for rack in "1122"]) == [([0, 1], [2, 3]), ([2, 3], [0, 1])]


def test_racks_are_not_told_by_messages_that_take_the_sites_uplink():
    """With full links inside the sites, racks would seem to share what their site shares."""
    places = [("w", "1"), ("w", "1"), ("w", "2"), ("w", "2"), ("e", "3"), ("e", "3"), ("e", "3"), ("e", "3")]
    groups = profile_trunks.groups_of(places)
    assert [some.inside for some in groups] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1], [2, 3]]
    times = []
    for some in groups:
        pairs = profile_trunks.crossing(some)
        alone = [SIZE / 10.0] * len(pairs)
        far = [places[a][0] != places[b][0] for a, b in pairs]
        together = transfer([10.0] * len(pairs), 20.0) if all(far) else np.array(alone)
        assert all(far) or not any(far)
        times.append(np.array([[[alone] * 2, [together] * 2]]))
    found = profile_trunks.trunks_of(groups, len(places), times, SIZE)
    assert found.behind.tolist() == [[True] * 4 + [False] * 4, [False] * 4 + [True] * 4]
    assert found.bandwidth == pytest.approx([20.0, 20.0])


def test_hosts_that_are_near_each_other_and_far_from_the_others_are_a_group():
    rng = np.random.default_rng(0)
    rack = np.array([0, 1, 1, 0, 1, 0, 2])
    rates = np.where(rack[:, None] == rack, 100.0, rng.uniform(20.0, 45.0, (7, 7)))
    samples = rates * rng.uniform(0.97, 1.03, (3, 7, 7))
    samples[0, 0, 1] = np.nan
    samples[:, 2, 3] = np.nan
    groups = [UplinkGroup([0, 3, 5], [1, 2, 4, 6]), UplinkGroup([1, 2, 4], [0, 3, 5, 6])]
    assert profile_trunks.groups_of_links(samples) == groups  # a host that is alone shares no uplink
    np.einsum("rii->ri", samples)[:] = np.nan  # inside hosts with one device
    assert profile_trunks.groups_of_links(samples) == groups


@pytest.mark.parametrize(
    "rates",
    [
        np.full((6, 6), 100.0),
        np.where(np.eye(6, k=1) + np.eye(6, k=-1) > 0, 100.0, 20.0),  # a chain, whose ends are far from each other
        np.where(np.arange(6)[:, None] * np.arange(6) == 0, 20.0, 100.0),  # one slow host
        np.exp(np.random.default_rng(1).uniform(3, 5, (6, 6))),
        np.full((6, 6), np.nan),
        np.ones((1, 1)),
    ],
    ids=["equal", "chain", "slow host", "random", "unknown", "one host"],
)
def test_other_links_show_no_groups(rates):
    assert profile_trunks.groups_of_links(rates[None]) == []


def test_pairs_cross_and_are_disjoint():
    for some, hosts in (([0, 1, 2], 6), (list(range(20)), 64), ([5, 9], 10), (list(range(9)), 10)):
        rest = [host for host in range(hosts) if host not in some]
        pairs = profile_trunks.crossing(UplinkGroup(some, rest))
        ends = [end for pair in pairs for end in pair]
        assert len(set(ends)) == len(ends) == 2 * min(len(some), hosts - len(some), 8)
        assert all(a in some and b in rest for a, b in pairs)


def test_of_many_racks_as_many_are_measured_as_there_are_rounds_for():
    """Each takes nine rounds: eight pairs alone, and all at once."""
    places = [("", f"rack{i // 8}") for i in range(512)] + [("", "large")] * 9
    every = profile_trunks.groups_of(places)
    few = profile_trunks.affordable_groups(every, 63)
    assert len(every) == 65 and len(few) == 7
    assert len(profile_trunks.plan(few, 8)) == 63
    assert few[0].inside == list(range(512, 521))  # the largest first
    assert len(profile_trunks.affordable_groups(every, 1)) == 1
    assert profile_trunks.affordable_groups([], 63) == []


def transfer(rates: list[float], uplink: float) -> np.ndarray:
    """Return the seconds of messages that begin at once and share an uplink fairly, by replaying their ends."""
    left, ends, now = dict.fromkeys(range(len(rates)), float(SIZE)), np.zeros(len(rates)), 0.0
    while left:
        speed, free, waiting = {}, uplink, sorted(left, key=lambda i: rates[i])
        for place, i in enumerate(waiting):  # who needs less than a fair share leaves the rest to the others
            speed[i] = min(rates[i], free / (len(waiting) - place))
            free -= speed[i]
        step = min(left[i] / speed[i] for i in left)
        now += step
        for i in list(left):
            left[i] -= step * speed[i]
            if left[i] < 1e-9 * SIZE:
                ends[i] = now
                del left[i]
    return ends


@pytest.mark.parametrize("rates", [[10.0] * 4, [10.0, 10.0, 10.0, 6.0], [10.0, 8.0, 9.0, 7.0], [10.0, 10.0]])
@pytest.mark.parametrize("share", [0.3, 0.5, 0.7, 1.2])
def test_the_rate_of_an_uplink_is_told_from_messages_alone_and_together(rates, share):
    uplink = share * sum(rates)
    alone, together = SIZE / np.array(rates), transfer(rates, uplink)
    found = profile_trunks.shared_rate(alone, together, SIZE)
    if share > 1:
        assert found is None
    else:
        assert found == pytest.approx(uplink, rel=0.1)


def test_uplinks_are_those_of_the_groups_whose_messages_wait():
    hosts = 5
    groups = [UplinkGroup(some, [h for h in range(hosts) if h not in some]) for some in ([0, 1], [2, 3], [0, 2])]
    free = np.ones((3, 2, 2, 2))  # repeats, alone and together, ways, pairs
    slow = free.copy()
    free[:, 1], slow[:, 1] = 1.1, 2.0
    slow[0, 1] = 1.0  # a single repeat says nothing
    one_way = slow.copy()
    one_way[:, 1, 1] = 4.0
    found = profile_trunks.trunks_of(groups, hosts, [free, slow, one_way], SIZE)
    assert found.behind.tolist() == [[False, False, True, True, False], [True, False, True, False, False]]
    assert found.bandwidth == pytest.approx([SIZE, SIZE / 2])  # two messages in two seconds, and in four
    assert profile_trunks.trunks_of(groups, hosts, [free] * 3, SIZE) is None
    assert profile_trunks.trunks_of(groups, hosts, [slow[:0]] * 3, SIZE) is None


def test_every_pair_is_compared_with_its_own_time_alone():
    """The first pair's own link is slower than its share of the uplink, so only the others wait."""
    groups = profile_trunks.groups_of([("w", "")] * 3 + [("e", "")] * 3)
    rates, uplink = [2.0, 10.0, 10.0], 12.0
    alone, together = SIZE / np.array(rates), transfer(rates, uplink)
    assert together[0] == alone[0]
    taken = []
    for one in profile_trunks.plan(groups, 1) * 2:
        seconds = dict(zip(one.hosts, together if len(one.hosts) > 1 else alone[[min(one.hosts[0]) % 3]]))
        seconds = {host: took for pair, took in seconds.items() for host in pair}
        values = [(0.0, [seconds.get(host, 0.1)], [seconds.get(host, 0.1)]) for host in range(6)]  # one is idle
        taken.append(profile_trunks._of_pairs(one, range(6), values))
    for done, repeats in ((16, [2, 2]), (15, [2, 1]), (8, [1, 1]), (7, [1, 0]), (3, [0, 0])):
        times = profile_trunks.by_group(groups, taken[:done])
        assert [len(seconds) for seconds in times] == repeats
        found = profile_trunks.trunks_of(groups, 6, times, SIZE)
        rates = [] if found is None else found.bandwidth.tolist()
        assert rates == pytest.approx([uplink] * np.count_nonzero(repeats), rel=0.1)


def test_in_no_round_two_pairs_take_the_same_trunk_and_all_pairs_meet():
    behind = np.array([[1, 1, 1, 1, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0, 0]], bool)
    trunks = Trunks(behind, np.ones(3))
    rounds = one_by_one(tournament(8), trunks)
    for pairs in rounds:
        crossing = (behind[:, [a for a, _ in pairs]] != behind[:, [b for _, b in pairs]]).sum(axis=1)
        assert crossing.max() <= 1
        assert len({end for pair in pairs for end in pair}) == 2 * len(pairs)
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(p for pairs in tournament(8) for p in pairs)


def test_a_sample_of_rounds_taken_apart_has_all_pairs_inside_and_many_hosts_across():
    hosts = 64
    west = np.arange(hosts) < 32
    rounds = sampled(one_by_one(tournament(hosts), Trunks(np.stack([west, ~west]), np.ones(2))), 63)
    pairs = [pair for of_round in rounds for pair in of_round]
    across = [(a, b) for a, b in pairs if west[a] != west[b]]
    assert len(rounds) == 63 and len(pairs) - len(across) == 2 * 32 * 31 // 2
    assert len({end for pair in across for end in pair}) > 48


def test_uplinks_of_two_sites_are_timed_on_all_devices():
    machines = Machines(
        tuple("abcd"), (0,), tuple(jax.devices()[:4]), 1, ("cpu",) * 4, (1e9,) * 4, ("",) * 4, ("w", "w", "e", "e")
    )
    options = ProfileOptions(sizes=(1024,), repeats=2)
    _, said = profile_trunks.profile_trunks(ProcessGroup(30), machines, options, time.monotonic() + 60)
    assert said.endswith("among 2 sites and racks") or "among 2 sites and racks: " in said
    late = profile_trunks.profile_trunks(ProcessGroup(30), machines, options, time.monotonic())
    assert late == (None, "no shared uplink was found among 0 of 2 sites and racks, since the time limit came")
    small = dataclasses.replace(options, sizes=())
    _, said = profile_trunks.profile_trunks(ProcessGroup(30), machines, small, time.monotonic())
    assert "among 2 sites and racks" in said and "limit" not in said
    alone = profile_trunks.profile_trunks(
        ProcessGroup(30), Machines(("a",), (0,), (), 1, ("cpu",), (1.0,), ("",)), options, time.monotonic() + 60
    )
    assert alone == (None, "")
