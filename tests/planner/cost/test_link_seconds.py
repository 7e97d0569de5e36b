"""Hops, rings, all-to-alls and shared NICs against loops that do it one flow at a time."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.cluster.trunks import Trunks
from planner.cost.link_seconds import all_to_all, fabric, hops, paths, ring_order, rings
from tests.planner.examples import cluster, placements


def flows_out_and_in(hosts: np.ndarray, edges: list[tuple[int, int]], tensor: int) -> tuple[dict, dict]:
    out, into = {}, {}
    for a, b in edges:
        if a != b:
            out[a] = out.get(a, 0) + tensor
            into[b] = into.get(b, 0) + tensor
    return out, into


@pytest.mark.parametrize("nics", [1, 2, 8])
@pytest.mark.parametrize(("data", "pipe", "tensor"), [(4, 4, 1), (2, 4, 2), (1, 4, 4), (4, 1, 4), (2, 8, 1), (8, 2, 1)])
def test_each_flow_by_itself(data, pipe, tensor, nics):
    links = fabric(cluster(nics=nics))
    for hosts in placements(5, data, pipe, 4 // tensor):
        found = paths(links, hosts[None], tensor)
        for step, (latency, per_byte) in ((1, found.forward), (-1, found.backward)):
            real = [
                (d, p, int(hosts[d, p]), int(hosts[d, p + step]))
                for d in range(data)
                for p in range(pipe)
                if 0 <= p + step < pipe
            ]
            out, into = flows_out_and_in(hosts, [(a, b) for *_, a, b in real], tensor)
            for d, p, a, b in real:
                crowd = max(out.get(a, 0), into.get(b, 0), nics) / nics if a != b else 1
                assert latency[0, d, p] == links.alpha[a, b]
                assert per_byte[0, d, p] == pytest.approx(links.per_byte[a, b] * crowd)


@pytest.mark.parametrize("nics", [1, 4])
@pytest.mark.parametrize(("data", "pipe", "tensor"), [(4, 4, 1), (2, 4, 2), (4, 1, 4), (8, 2, 1), (16, 1, 1)])
def test_each_ring_by_itself(data, pipe, tensor, nics):
    links = fabric(cluster(nics=nics))
    for hosts in placements(5, data, pipe, 4 // tensor):
        edges = []
        for p in range(pipe):
            ring = list(dict.fromkeys(hosts[:, p].tolist()))  # each host once, in order of first appearance
            repeated = [h for h in ring for _ in range(int((hosts[:, p] == h).sum()))]
            edges.append(list(zip(repeated, repeated[1:] + repeated[:1])))
        out, into = flows_out_and_in(hosts, [edge for ring in edges for edge in ring], tensor)
        latency, per_byte = rings(links, hosts[None], tensor)
        for p, ring in enumerate(edges):
            crowds = [max(out[a], into[b], nics) / nics if a != b else 1 for a, b in ring]
            slowest = max(links.per_byte[edge] * crowd for edge, crowd in zip(ring, crowds))
            assert per_byte[0, p] == pytest.approx(slowest)
            assert latency[0, p] == pytest.approx((data - 1) * max(links.alpha[a, b] for a, b in ring))


@pytest.mark.parametrize(("nics", "fan_out"), [(1, 1.0), (1, 3.0), (2, 0.5), (4, 8.0)])
@pytest.mark.parametrize(
    ("data", "pipe", "tensor"), [(4, 4, 1), (2, 4, 2), (4, 1, 4), (8, 2, 1), (16, 1, 1), (1, 4, 4)]
)
def test_each_pair_of_an_all_to_all_by_itself(data, pipe, tensor, nics, fan_out):
    some = cluster(nics=nics, fan_out=fan_out)
    links = dataclasses.replace(fabric(some), rings=False)
    for hosts in placements(5, data, pipe, 4 // tensor):
        pairs = [
            [(int(a), int(b)) for i, a in enumerate(hosts[:, p]) for j, b in enumerate(hosts[:, p]) if i != j]
            for p in range(pipe)
        ]
        flows = [pair for each in pairs for pair in each]
        out, into = flows_out_and_in(hosts, flows, tensor)
        latency, per_byte = all_to_all(links, hosts[None], tensor)
        for p in range(pipe):
            took = [0.0]
            for a, b in pairs[p]:
                alike = tensor * flows.count((a, b)) / nics
                # A pair takes turns.
                crowd = max(2 * alike, max(out[a], into[b]) / (nics * fan_out), 2) if a != b else 1
                took.append(links.per_byte[a, b] * crowd / data)
            assert per_byte[0, p] == pytest.approx(max(took))
            assert latency[0, p] == max([links.alpha[pair] for pair in pairs[p]], default=0.0)
        found = paths(links, hosts[None], tensor).scatter
        np.testing.assert_array_equal(found, (latency, per_byte))


@pytest.mark.parametrize("gloo", [False, True])
def test_groups_of_data_ranks_are_rings_of_their_own(gloo):
    """Four data ranks on a host each: pairs of neighbours at once, and then those with one place."""
    links = dataclasses.replace(fabric(cluster(4, 1)), rings=not gloo)
    found = paths(links, np.array([2, 0, 3, 1]).reshape(1, 4, 1), 1, inside=2)
    for pairs, (latency, per_byte, scatter_latency, scatter_per_byte) in (
        (((2, 0), (3, 1)), found.inside),
        (((2, 3), (0, 1)), found.between),
    ):
        slowest = max(max(links.per_byte[a, b], links.per_byte[b, a]) for a, b in pairs)
        assert per_byte[0, 0] == pytest.approx(slowest)
        assert scatter_per_byte[0, 0] == pytest.approx(slowest / 2 * (2 if gloo else 1))  # a pair takes turns over gloo
        assert latency[0, 0] == scatter_latency[0, 0] == max(links.alpha[a, b] for a, b in pairs)
    whole = paths(links, np.array([2, 0, 3, 1]).reshape(1, 4, 1), 1)
    assert whole.inside == whole.between == ()
    np.testing.assert_array_equal(whole.ring, found.ring)


def test_groups_on_one_host_share_its_nic_between_them():
    """Two ranks and two stages on each host: inside nothing leaves it, and between all four send at once."""
    links = fabric(cluster(2, 4, seed=None))
    found = paths(links, np.array([[0, 0], [0, 0], [1, 1], [1, 1]])[None], 1, inside=2)
    np.testing.assert_allclose(found.inside[1], 1 / 300e9)
    np.testing.assert_allclose(found.between[1], 4 / 25e9)
    both = found.join(found).take(np.array([1]))
    np.testing.assert_array_equal(both.between, found.between)


def test_a_full_fan_out_reduces_over_many_hosts_in_less_time_than_a_ring():
    """With NICs as the only limit both take (D-1)/D of the array; with full links an all-to-all takes 2/D."""
    hosts = np.arange(8).reshape(1, 8, 1)
    for fan_out, share in ((1.0, 7 / 8), (7.0, 2 / 8)):
        links = dataclasses.replace(fabric(cluster(8, 1, seed=None, fan_out=fan_out)), rings=False)
        assert paths(links, hosts, 1).scatter[1][0, 0] == pytest.approx(share / 25e9)
    ring = paths(dataclasses.replace(links, rings=True), hosts, 1).scatter[1][0, 0]
    assert ring == pytest.approx(7 / 8 / 25e9)


def test_the_last_stages_message_to_the_first_shares_with_its_own_group():
    links = fabric(cluster(4, 4, nics=2))
    found = hops(links, np.arange(4).reshape(1, 1, 4), 4)[0][1]
    assert found[0, 0, 3] == pytest.approx(links.per_byte[3, 0] * 4 / 2)


@pytest.mark.parametrize("nics", [1, 4])
def test_the_embeddings_exchange_shares_nics(nics):
    links = fabric(cluster(4, 4, nics=nics))
    for hosts in placements(5, 4, 2, 2):  # groups of two devices
        first, last = hosts[:, 0].tolist(), hosts[:, -1].tolist()
        pairs = [(a, b) for a, b in zip(first, last) if a != b]
        latency, per_byte = paths(links, hosts[None], 2).swap
        for d, (a, b) in enumerate(zip(first, last)):
            flows = 2 * max(sum(x == a for x, _ in pairs), sum(y == b for _, y in pairs))  # of either end's host
            both = np.array([links.per_byte[a, b], links.per_byte[b, a]])
            assert per_byte[0, d] == pytest.approx(both * (max(flows, nics) / nics if a != b else 1))
            assert latency[0, d].tolist() == [links.alpha[a, b], links.alpha[b, a]]


def test_a_ring_crosses_into_each_host_once():
    assert ring_order(np.array([3, 1, 3, 2, 1])).tolist() == [3, 3, 1, 1, 2]


def test_one_data_rank_has_no_ring_and_one_stage_no_hop():
    links = fabric(cluster())
    latency, per_byte = rings(links, placements(1, 1, 16, 4), 1)
    assert not latency.any() and not per_byte.any()
    _, per_byte = hops(links, placements(1, 16, 1, 4), 1)[0]
    assert per_byte.max() == 1 / 300e9


def test_samples_give_a_quantile_or_one_of_them():
    some = cluster(2, links={"alpha": 0, "bandwidth": [[[9, b], [b, 9]] for b in (1.0, 2.0, 4.0)]})
    assert fabric(some).per_byte[0, 1] == 1 / 2
    assert fabric(some, quantile=0.0).per_byte[0, 1] == 1
    assert fabric(some, sample=2).per_byte[0, 1] == 1 / 4


TRUNKS = Trunks(np.array([[1, 1, 0, 0], [0, 0, 1, 1], [0, 1, 0, 0]], bool), np.array([2e9, 9e9, 4e9]))


def uplinks(flows: list[tuple[int, int]], a: int, b: int, tensor: int) -> float:
    """Return the least seconds per byte of a flow from a to b, beside others, as its trunks have it."""
    found = 0.0
    for behind, rate in TRUNKS:
        if behind[a] != behind[b]:
            alike = [(x, y) for x, y in flows if behind[x] == behind[a] and behind[y] == behind[b]]
            found = max(found, tensor * max(len(alike), 1) / rate)
    return found


@pytest.mark.parametrize(("data", "pipe", "tensor"), [(4, 4, 1), (2, 4, 2), (1, 4, 4), (4, 1, 4), (2, 8, 1), (8, 2, 1)])
def test_flows_that_cross_a_trunk_share_it_each_by_itself(data, pipe, tensor):
    """What a trunk adds to what links and NICs have; the links' part is that of the same cluster without trunks."""
    free = fabric(cluster(nics=2))
    links = dataclasses.replace(free, trunks=TRUNKS)
    for hosts in placements(5, data, pipe, 4 // tensor):
        alone, found = paths(free, hosts[None], tensor), paths(links, hosts[None], tensor)
        for step, before, after in ((1, alone.forward, found.forward), (-1, alone.backward, found.backward)):
            real = [
                (d, p, int(hosts[d, p]), int(hosts[d, p + step]))
                for d in range(data)
                for p in range(pipe)
                if 0 <= p + step < pipe
            ]
            # Activations and gradients are on their way at once, so each hop is crossed both ways.
            flows = [pair for *_, a, b in real for pair in ((a, b), (b, a))]
            for d, p, a, b in real:
                assert after[1][0, d, p] == pytest.approx(max(before[1][0, d, p], uplinks(flows, a, b, tensor)))
        for p, after in enumerate(found.ring[1][0]):
            order = [ring_order(hosts[:, q]).tolist() for q in range(pipe)]
            flows = [pair for ring in order for pair in zip(ring, ring[1:] + ring[:1])] if data > 1 else []
            own = [uplinks(flows, a, b, tensor) for a, b in zip(order[p], order[p][1:] + order[p][:1])]
            assert after == pytest.approx(max(alone.ring[1][0, p], max(own) if data > 1 else 0.0))
        swaps = [(int(a), int(b)) for a, b in zip(hosts[:, 0], hosts[:, -1])]
        flows = [*swaps, *((b, a) for a, b in swaps)]
        for d, (a, b) in enumerate(swaps):
            both = [uplinks(flows, a, b, tensor), uplinks(flows, b, a, tensor)]
            assert found.swap[1][0, d] == pytest.approx(np.maximum(alone.swap[1][0, d], both))
        gloo = [all_to_all(dataclasses.replace(x, rings=False), hosts[None], tensor)[1][0] for x in (free, links)]
        pairs = [[(int(a), int(b)) for a, b in itertools.permutations(hosts[:, p], 2)] for p in range(pipe)]
        flows = [pair for each in pairs for pair in each]
        for p in range(pipe):
            own = max([uplinks(flows, a, b, tensor) for a, b in pairs[p]], default=0.0)
            assert gloo[1][p] == pytest.approx(max(gloo[0][p], own / data))


@pytest.mark.parametrize(("rings", "flows"), [(True, (6.0, 6.0, 6.0)), (False, (1 + 3 * 0.3, 1 + 0.3, 1 + 3 * 0.3))])
def test_on_cpus_each_other_message_is_in_the_trunk_for_three_tenths_of_the_time(rings, flows):
    """Two pipelines leave a site behind stages 0 and 2, and come back behind stage 1; on GPUs gradients travel, too."""
    free = dataclasses.replace(
        fabric(cluster(8, links={"alpha": 0, "bandwidth": np.full((8, 8), 1e9).tolist()})), rings=rings
    )
    behind = np.arange(8) % 2 == 0
    trunks = Trunks(behind[None], np.array([1e6]))
    forward = paths(dataclasses.replace(free, trunks=trunks), np.arange(8).reshape(1, 2, 4), 1).forward[1][0]
    assert forward[:, :3] * 1e6 == pytest.approx(np.array([flows] * 2))


def test_a_trunk_that_no_flow_crosses_changes_nothing():
    free = fabric(cluster())
    links = dataclasses.replace(free, trunks=Trunks(np.array([[True, True, False, False]]), np.array([1.0])))
    hosts = np.array([[[0, 1]], [[2, 3]]])  # each pipeline on one side
    for name, both in (("forward", (0, 1)), ("backward", (1, 0))):
        there = [getattr(paths(x, hosts, 1), name)[1][..., both[0]] for x in (free, links)]
        np.testing.assert_array_equal(*there)
