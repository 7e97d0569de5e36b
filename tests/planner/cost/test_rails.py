"""Rails against loops that route one flow of one device at a time, and against figures made by hand."""

import collections
import dataclasses
import functools
import itertools

import numpy as np
import pytest

from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric, host_slots, paths
from planner.cost.step_time import Problem
from planner.placement.place import place
from planner.planning.to_plan import device_order
from tests.planner.examples import MODEL, cluster, placements

ALPHA, INSIDE_ALPHA, LINK, NVLINK = 1e-5, 3e-6, 25e9, 300e9  # of tests.planner.examples.cluster with equal links
SPINE = {"pxn": False, "oversubscription": 4}


def device_numbers(hosts: np.ndarray, tensor: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Return host and first device of each group: groups take the devices of their host in mesh order."""
    taken, found = collections.Counter(), {}
    for d, p in itertools.product(*map(range, hosts.shape)):
        host = int(hosts[d, p])
        found[d, p] = host, taken[host]
        taken[host] += tensor
    return found


def of_groups(
    hosts: np.ndarray, tensor: int, one: tuple[int, int], other: tuple[int, int]
) -> list[tuple[int, int, int, int]]:
    """Return sender's host and device and receiver's host and device of each flow from one group to another."""
    at = device_numbers(hosts, tensor)
    (a, i), (b, j) = at[one], at[other]
    return [(a, i + t, b, j + t) for t in range(tensor)]


def routed(some, flows: list[list[tuple[int, int, int, int]]], counted: list[bool]) -> list[tuple[float, float]]:
    """Return latency and seconds per byte of each group of flows.

    Args:
        some: cluster.
        flows: sender's host and device and receiver's host and device of each flow of each group.
        counted: whether other groups' flows meet those of a group.
    """
    rails, hosts = some.rails, len(some.hosts)
    capacity = {"out": 1.0, "in": 1.0, "up": hosts / rails.oversubscription, "down": hosts / rails.oversubscription}

    def ways(a: int, i: int, b: int, j: int) -> list[tuple]:
        leaves, enters = (device * some.nics // some.devices_per_host for device in (i, j))
        if a == b:
            return []
        if rails.pxn:
            return [("out", a, enters), ("in", b, enters)]
        spine = [("up", leaves), ("down", enters)] if leaves != enters else []
        return [("out", a, leaves), ("in", b, enters), *spine]

    loads = [collections.Counter(way for flow in group for way in ways(*flow)) for group in flows]
    every = sum((load for load, all_meet in zip(loads, counted) if all_meet), collections.Counter())
    found = []
    for group, own in zip(flows, loads):
        (a, _, b, _), bandwidth = group[0], some.bandwidth
        slowest = max(
            max((max(every[way], own[way]) / capacity[way[0]] for way in ways(*flow)), default=1.0) for flow in group
        )
        moved = rails.pxn and a != b and any(ways(*f)[0][2] != f[1] * some.nics // some.devices_per_host for f in group)
        seconds = max(slowest, 1.0) / bandwidth[a, b]
        latency = some.alpha[a, b] + some.alpha[a, a] * moved
        found.append((latency, max(seconds, 1 / bandwidth[a, a]) if moved else seconds))
    return found


RAILS = [True, {"pxn": False}, {"pxn": False, "oversubscription": 3.5}]


@pytest.mark.parametrize("rails", RAILS, ids=["pxn", "spine", "thin spine"])
@pytest.mark.parametrize("nics", [1, 2, 4])
@pytest.mark.parametrize(("data", "pipe", "tensor"), [(4, 4, 1), (2, 4, 2), (1, 4, 4), (4, 1, 4), (2, 8, 1), (8, 2, 1)])
def test_each_flow_by_itself(data, pipe, tensor, nics, rails):
    some = cluster(nics=nics, rails=rails)
    links = fabric(some)
    for hosts in placements(4, data, pipe, 4 // tensor):
        flows, found = functools.partial(of_groups, hosts, tensor), paths(links, hosts[None], tensor)
        groups = list(np.ndindex(data, pipe))
        for step, (latency, per_byte) in ((1, found.forward), (-1, found.backward)):
            hops = [flows((d, p), (d, (p + step) % pipe)) for d, p in groups]
            expected = routed(some, hops, [0 <= p + step < pipe for _, p in groups])
            np.testing.assert_allclose(latency[0].ravel(), [x for x, _ in expected])
            np.testing.assert_allclose(per_byte[0].ravel(), [x for _, x in expected])
        crossings, of_stage = [], []
        for p in range(pipe if data > 1 else 0):
            leads = sorted({int(hosts[d, p]): (d, p) for d in reversed(range(data))}.values())  # first on their hosts
            pairs = [(a, b) for a, b in zip(leads, leads[1:] + leads[:1]) if a != b]
            inside = [((d, p), (d, p)) for d in range(data) if (d, p) not in leads]
            for pair in pairs + inside:
                crossings.append(flows(*pair))
                of_stage.append(p)
        taken = routed(some, crossings, [True] * len(crossings))
        for p in range(pipe if data > 1 else 0):
            own = [x for x, stage in zip(taken, of_stage) if stage == p]
            assert found.ring[0][0, p] == pytest.approx((data - 1) * max(latency for latency, _ in own))
            assert found.ring[1][0, p] == pytest.approx(max(per_byte for _, per_byte in own))
        for way in (0, 1):
            ends = [((d, 0), (d, pipe - 1))[:: -1 if way else 1] for d in range(data)]
            expected = routed(some, [flows(*pair) for pair in ends], [True] * data)
            np.testing.assert_allclose(np.transpose([x[0, :, way] for x in found.swap]), expected)


def test_groups_take_devices_as_the_trainer_does():
    for hosts in placements(4, 4, 3, 4):
        order = np.array(device_order(hosts, 8, {"tensor": 2})).reshape(4, 3, 2)
        assert {key: host * 8 + first for key, (host, first) in device_numbers(hosts, 2).items()} == {
            key: order[key][0] for key in np.ndindex(4, 3)
        }
        np.testing.assert_array_equal(host_slots(hosts[None])[0] * 2 + hosts * 8, order[..., 0])


def test_with_one_nic_rails_change_nothing():
    for seed in range(3):
        plain, railed = cluster(4, 4, seed), cluster(4, 4, seed, rails=True)
        hosts = placements(5, 4, 2, 2, seed)
        a, b = (paths(fabric(some), hosts, 2) for some in (plain, railed))
        for field in dataclasses.fields(a):
            for one, other in zip(getattr(a, field.name), getattr(b, field.name)):
                np.testing.assert_allclose(one, other, rtol=1e-12)


# --- By hand ----------------------------------------------------------------------------------------------------------


def test_aligned_rings_have_a_nic_each_and_those_over_one_nic_share_it():
    """Four hosts of four devices; the gather of the weights is a ring of each tensor rank over the hosts."""
    c = Candidate(4, 1, 4, 1, 1, "eager_1f1b", (12,))
    # Of a layer a quarter of the matrices and of their 7 H split biases, and 6 H of other vectors.
    weights = 2 * (12 * (12 * 1024**2 / 4 + (7 / 4 + 6) * 1024) + 50304 * 1024 / 4)
    hosts = np.arange(4).reshape(1, 4, 1)
    for nics, flows in ((4, 1), (2, 2), (1, 4)):
        some = cluster(4, 4, seed=None, nics=nics, rails=True)
        gather = Problem(some, MODEL, c).step(fabric(some), hosts).gather
        np.testing.assert_allclose(gather, 3 * ALPHA + 3 / 4 * weights * flows / LINK, rtol=1e-12)


def test_a_group_that_sends_alone_has_the_nics_of_its_own_devices():
    """Its two devices use one NIC of two; if they were shared equally, each device would have one."""
    c, hosts = Candidate(2, 2, 2, 1, 4, "eager_1f1b", (6, 6)), np.array([[[0, 1], [1, 0]]])
    for rails, flows in ((True, 2), (False, 1)):
        some = cluster(2, 4, seed=None, nics=2, rails=rails)
        problem = Problem(some, MODEL, c)
        seconds = problem.links(problem.paths(fabric(some), hosts)).activation[0, :, 0]
        np.testing.assert_allclose(seconds, ALPHA + 2 * 1024 * 1024 * flows / LINK, rtol=1e-12)


@pytest.mark.parametrize(
    ("rails", "per_byte", "latency"),
    [
        (True, (2, 2, 1), (0, INSIDE_ALPHA, 0)),  # both leave host 0 by rail 0, the second after a move inside
        ({"pxn": False, "oversubscription": 2}, (1, 1, 1), (0, 0, 0)),  # a flow over a spine for 1.5 flows a rail
        ({"pxn": False, "oversubscription": 6}, (1, 2, 1), (0, 0, 0)),  # over a spine for half a flow
        (False, (1, 1, 1), (0, 0, 0)),  # two NICs for two flows, whichever devices send
    ],
)
def test_a_message_that_changes_rails(rails, per_byte, latency):
    """Pipelines 0 and 1 begin on host 0, with slots 0 and 1, and end in slot 0 of hosts 1 and 2."""
    some = cluster(3, 2, seed=None, nics=2, rails=rails)
    found = paths(fabric(some), np.array([[[0, 1], [0, 2], [1, 2]]]), 1).forward
    np.testing.assert_allclose(found[1][0, :, 0], np.array(per_byte) / LINK, rtol=1e-12)
    np.testing.assert_allclose(found[0][0, :, 0], ALPHA + np.array(latency), rtol=1e-12)


def test_a_move_inside_a_host_is_no_faster_than_its_links():
    some = cluster(3, 2, seed=None, nics=2, rails=True)
    samples = some.samples.copy()
    samples[:, range(3), range(3)] = LINK / 8
    slow = fabric(dataclasses.replace(some, samples=samples))
    found = paths(slow, np.array([[[0, 1], [0, 2], [1, 2]]]), 1).forward[1][0, :, 0]
    np.testing.assert_allclose(found, np.array([2, 8, 1]) / LINK, rtol=1e-12)


def test_misaligned_rings_cross_the_spine():
    """Two hosts of two devices: stages are in the same slots on both, or in crossed ones (negative control)."""
    c = Candidate(2, 2, 1, 1, 4, "eager_1f1b", (6, 6))
    some = cluster(2, 2, seed=None, nics=2, rails=SPINE)
    problem = Problem(some, MODEL, c)
    weights = 2 * (6 * (12 * 1024**2 + 13 * 1024) + 50304 * 1024)
    aligned, crossed = np.array([[[0, 0], [1, 1]]]), np.array([[[0, 1], [1, 0]]])
    for hosts, flows in ((aligned, 1), (crossed, 2 * 4 / 2)):  # two flows over a spine for half a flow
        step = problem.step(fabric(some), hosts)
        np.testing.assert_allclose(step.gather, ALPHA + weights / 2 * flows / LINK, rtol=1e-12)
    plain = cluster(2, 2, seed=None, nics=2)
    step = Problem(plain, MODEL, c).step(fabric(plain), crossed)
    np.testing.assert_allclose(step.gather, ALPHA + weights / 2 / LINK, rtol=1e-12)


# --- Placement --------------------------------------------------------------------------------------------------------


def everywhere(data: int, pipe: int, host_slots: int) -> np.ndarray:
    """Return every placement [count, D, P] on hosts with so many slots."""
    every = {tuple(i // host_slots for i in order) for order in itertools.permutations(range(data * pipe))}
    return np.array(sorted(every)).reshape(-1, data, pipe)


@pytest.mark.parametrize(("data", "pipe"), [(4, 2), (2, 4)])
def test_the_best_of_all_placements_has_aligned_rings(data, pipe):
    """Of placements that are equally good without rails, those whose flows change rails cost more."""
    every = everywhere(data, pipe, 2)
    plain, railed = (cluster(4, 2, seed=None, nics=2, rails=rails) for rails in (False, SPINE))
    c = Candidate(data, pipe, 1, 2, 4, "eager_1f1b", (12 // pipe,) * pipe)
    free, values = (Problem(some, MODEL, c).step(fabric(some), every).total for some in (plain, railed))
    assert (values >= free * (1 - 1e-12)).all() and values.min() == pytest.approx(free.min())
    alike = np.round(free / free.min(), 9)
    spread = [values[alike == one].max() / values[alike == one].min() for one in np.unique(alike)]
    assert max(spread) > 1.01  # placements that are equally good without rails
    for exactly in (True, False):
        found = place(Problem(railed, MODEL, c), fabric(railed), exactly=exactly)
        assert found.seconds == pytest.approx(values.min(), rel=1e-9)
        at = device_numbers(found.hosts, 1)
        for p in range(pipe):
            first = {at[d, p][0]: at[d, p][1] for d in reversed(range(data))}
            assert len(set(first.values())) == 1


@pytest.mark.parametrize("seed", range(3))
def test_exact_search_misses_nothing_with_rails(seed):
    """Data ranks are not rotated: that would give groups other devices."""
    some = cluster(3, 2, seed, nics=2, rails=SPINE)
    made = Problem(some, MODEL, Candidate(3, 2, 1, 2, 6, "1f1b", (6, 6)))
    every = everywhere(3, 2, 2)
    values = made.step(fabric(some), every).total
    assert place(made, fabric(some)).seconds == pytest.approx(values.min(), rel=1e-12)
    turned = made.step(fabric(some), np.roll(every, 1, axis=1)).total
    assert np.abs(turned / values - 1).max() > 1e-3
