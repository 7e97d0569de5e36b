"""Lower bounds of the step: no placement is below them, and they are tight in cases that can be solved by hand."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.codecs.quantised import QuantisedBlocks
from planner.cluster.rails import Rails
from planner.cost.candidate import Candidate
from planner.cost.coded import LOW_RANK, Coded
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement import bounds, exact, least
from tests.planner.examples import MODEL, cluster, placements


def problem(data, pipe, tensor, hosts, per_host, schedule="1f1b", seed=0, nics=1, device="a100-80gb", **changes):
    nodes = cluster(hosts, per_host, seed, nics=nics, device=device)
    counts = tuple(MODEL.layers // pipe + (s < MODEL.layers % pipe) for s in range(pipe))
    return Problem(nodes, MODEL, Candidate(data, pipe, tensor, 2, 2 * pipe + 1, schedule, counts, **changes))


@st.composite
def problems(draw):
    """Draw a mesh on a small cluster, with its schedule, compression, ZeRO-1, NICs and kinds of devices."""
    hosts, per_host = draw(st.integers(1, 5)), draw(st.sampled_from([1, 2, 4]))
    tensor = draw(st.sampled_from([t for t in (1, 2, 4) if per_host % t == 0]))
    groups = hosts * per_host // tensor
    data = draw(st.sampled_from([d for d in range(1, groups + 1) if groups % d == 0 and groups // d <= MODEL.layers]))
    coded = draw(st.sampled_from([LOW_RANK, Coded(inside=2, embedding=QuantisedBlocks(4))]))
    pipe = groups // data
    return problem(
        data,
        pipe,
        tensor,
        hosts,
        per_host,
        schedule=draw(st.sampled_from(["eager_1f1b", "1f1b", "gpipe"])),
        seed=draw(st.integers(0, 99)),
        nics=draw(st.sampled_from([1, 2, 8])),
        device=draw(st.lists(st.sampled_from(["a100-80gb", "v100"]), min_size=hosts, max_size=hosts)),
        shard=draw(st.sampled_from(("none", "optimizer"))),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        backward=draw(st.sampled_from(["none", "epilogue", "all"])) if pipe > 1 else "none",
        data_rank=draw(st.sampled_from([0, 8])) if data > 1 else 0,
        coded=coded,
    )


@settings(max_examples=90, deadline=None, derandomize=True)
@given(
    problems(),
    st.integers(0, 1000),
    st.sampled_from([False, True, Rails(), Rails(False, 3.0)]),
    st.sampled_from([0.5, 1.0, 2.5, 4.0]),
)
def test_no_placement_is_below_the_bound(made, seed, rings, fan_out):
    """Reductions are all-to-alls or rings, and with rails a device has a NIC of its own or shares it with others."""
    rails = rings if isinstance(rings, Rails) and made.cluster.devices_per_host % made.cluster.nics == 0 else None
    links = dataclasses.replace(fabric(made.cluster), rings=bool(rings), fan_out=fan_out, rails=rails)
    c = made.candidate
    slots = c.groups // len(made.cluster.hosts)
    every = exact.placements(c.data, c.pipe, slots, exact.twins(links, made.kind_of_host), 3000)
    if every is None:
        every = placements(200, c.data, c.pipe, slots, seed)
    assert bounds.lower(made, links) <= made.step(links, every).total.min()


def test_an_exchange_is_as_slow_as_its_slower_way():
    """One way has the latency and the other one the bytes, so their worst together are no message's."""
    made = problem(1, 2, 1, 2, 1, seed=None, schedule="1f1b")
    links = {"alpha": [[3e-6, 2e-3], [1e-5, 3e-6]], "bandwidth": [[3e11, 25e9], [1e9, 3e11]]}
    # A message of 2.1 MB takes as long either way, so that the bound has the hops as they are.
    made = Problem(cluster(2, 1, links=links), MODEL, dataclasses.replace(made.candidate, micro_batch=1))
    both = made.step(fabric(made.cluster), np.array([[[0, 1]], [[1, 0]]])).total
    assert bounds.lower(made, fabric(made.cluster)) <= both.min()


@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b", "gpipe"])
@pytest.mark.parametrize("mesh", [(4, 4, 4), (8, 2, 4), (16, 1, 4), (1, 4, 4), (4, 2, 2)])
def test_equal_links_leave_no_gap(mesh, schedule):
    """If all rings or all hops cross hosts, or each host holds one stage, the bound is reached."""
    hosts = mesh[0] * mesh[1] * mesh[2] // 4
    made = problem(*mesh, hosts, 4, schedule, seed=None, nics=4)
    links = fabric(made.cluster)
    slots = 4 // mesh[2]
    by_stage = (np.arange(mesh[0] * mesh[1]) // slots).reshape(mesh[1], mesh[0]).T
    by_rank = np.arange(mesh[0] * mesh[1]).reshape(mesh[:2]) // slots
    best = made.step(links, np.stack([by_stage, by_rank])).total.min()
    assert best / bounds.lower(made, links) - 1 < 1e-6


def best_and_bound(made):
    """Return the best step over all placements, and its lower bound, in seconds."""
    c, links = made.candidate, fabric(made.cluster)
    every = exact.placements(c.data, c.pipe, 1, exact.twins(links, made.kind_of_host), 50_000)
    return made.step(links, every).total.min(), bounds.lower(made, links)


@pytest.mark.parametrize("seed", range(3))
def test_the_bottleneck_of_a_ring_and_the_assignment_of_hops_are_close(seed):
    """The links differ by a factor of four, so a bound from the fastest link alone is far below (negative control)."""
    ring, hops = problem(7, 1, 4, 7, 4, seed=seed), problem(1, 6, 4, 6, 4, "1f1b", seed=seed)
    for made, most, control in ((ring, 0.03, 1.05), (hops, 0.15, 1.003)):
        best, bound = best_and_bound(made)
        assert best / bound - 1 < most
        nodes = made.cluster
        fast = np.maximum(nodes.samples, nodes.samples[nodes.samples < 1e11].max())
        ideal = Problem(dataclasses.replace(nodes, samples=fast), MODEL, made.candidate)
        assert bound > control * bounds.lower(ideal, fabric(ideal.cluster))


def test_a_host_with_slow_links_is_in_some_ring():
    made = problem(6, 1, 4, 6, 4, seed=None)
    made.cluster.samples[:, 2, [0, 1, 3, 4, 5]] /= 4
    best, bound = best_and_bound(made)
    assert best == pytest.approx(bound, rel=1e-8)


def test_a_host_with_slow_links_is_in_some_all_to_all():
    """Every host exchanges data with five others, so the fifth of its links counts, and the bound is reached."""
    made = problem(6, 1, 4, 6, 4, seed=None)
    made.cluster.samples[:, 2, [0, 1, 3, 4, 5]] /= 4
    links = dataclasses.replace(fabric(made.cluster), rings=False, fan_out=5.0)
    hosts = np.arange(6).reshape(1, 6, 1)
    assert made.step(links, hosts).total[0] == pytest.approx(bounds.lower(made, links), rel=1e-8)


@pytest.mark.parametrize("values", [2, 5, 1000])
@pytest.mark.parametrize("hosts", [2, 3, 6])
def test_bottleneck_is_that_of_the_best_permutation(hosts, values):
    """Few values make equal elements, of which any may be the largest."""
    rng = np.random.default_rng(hosts * values)
    for _ in range(10):
        cost = rng.integers(1, values + 1, (hosts, hosts)).astype(float)
        np.fill_diagonal(cost, np.inf)
        best = min(max(cost[i, j] for i, j in enumerate(p)) for p in itertools.permutations(range(hosts)))
        assert least.bottleneck(cost) == best


def test_a_ring_leaves_pairs_of_near_hosts():
    """A permutation may exchange the hosts of each pair; a ring over six hosts may not."""
    near = np.arange(6) // 2
    cost = np.where(near[:, None] == near, 1.0, 8.0)
    np.fill_diagonal(cost, np.inf)
    assert least.bottleneck(cost) == 1.0
    assert least.bottleneck(cost, one_way=True) == 8.0


@pytest.mark.parametrize("seed", range(20))
def test_the_bottleneck_of_rings_is_between_those_of_permutations_and_of_cycles(seed):
    rng = np.random.default_rng(seed)
    cost = rng.integers(1, 20, (6, 6)).astype(float)
    np.fill_diagonal(cost, np.inf)
    rings = [(0, *others) for others in itertools.permutations(range(1, 6))]
    best = min(max(cost[ring, np.roll(ring, -1)]) for ring in rings)
    assert least.bottleneck(cost) <= least.bottleneck(cost, one_way=True) <= best


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_all_hops_and_exchanges_of_the_ends_are_bounded_together(seed, pipelines):
    """Four devices of a host share its NIC. Bounds of each direction and of exchanges alone are far below."""
    made = problem(pipelines, 6 // pipelines, 4, 6, 4, seed=seed)
    sizes, swapped = {"activation": 2e6, "gradient": 1e6}, 9e6
    links = least.case_links(made, fabric(made.cluster))
    bound = least.cycles(links, sizes, swapped, pipelines)

    def seconds(size):
        return 1e-5 + 4 * size / made.cluster.samples[0]

    there, back, exchange = seconds(2e6), seconds(1e6), np.maximum(seconds(9e6), seconds(9e6).T)
    best = np.inf
    for order in itertools.permutations(range(6)):
        hosts = np.reshape(order, (pipelines, -1))
        here, onward = hosts[:, :-1], hosts[:, 1:]
        ends = exchange[hosts[:, 0], hosts[:, -1]]
        best = min(best, (there[here, onward] + back[onward, here]).sum() + ends.sum())
    apart = ~np.eye(6, dtype=bool)
    alone = (6 - pipelines) * (there[apart].min() + back[apart].min()) + pipelines * exchange[apart].min()
    assert 1.05 * alone < bound <= best < 1.15 * bound
    assert 0 < least.cycles(links, sizes, 0.0, pipelines) < bound  # of a head that is not tied
