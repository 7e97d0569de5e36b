"""Placement: exact search and annealing against enumeration, and the rules of Pipette and AMP."""

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.bench.planner.placement import against_exhaustive
from paxtrain.errors import UserError
from planner.cost.candidate import Candidate, host_order
from planner.cost.coded import Coded
from planner.cost.link_seconds import fabric, rings
from planner.cost.step_time import Problem
from planner.placement import anneal, exact
from planner.placement.gain import gain
from planner.placement.place import place
from planner.placement.rules import amp_rule, pipette_rule
from tests.planner.examples import MODEL, cluster, reordered


def problem(nodes, data, pipe, tensor, schedule="1f1b", micro_batches=8, **changes):
    counts = tuple(MODEL.layers // pipe + (s < MODEL.layers % pipe) for s in range(pipe))
    return Problem(nodes, MODEL, Candidate(data, pipe, tensor, 2, micro_batches, schedule, counts, **changes))


def objective(made, links):
    """Return the function from placements to predicted steps in seconds."""
    return lambda hosts: made.step(links, hosts).total


def best_of(made, links, every):
    """Return the least step of some placements, as the exact search finds it."""
    return exact.search(lambda at: objective(made, links)(every[at]), len(every), every[0].size)[1]


# --- Exact search -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("hosts", "data", "pipe", "slots"), [(4, 2, 2, 1), (5, 5, 1, 1), (3, 2, 3, 2), (2, 2, 4, 4)])
def test_exact_search_misses_nothing(hosts, data, pipe, slots):
    """The best value equals that over every permutation of the slots, made by itertools."""
    made = problem(cluster(hosts, slots, seed=1), data, pipe, 1)
    links = fabric(made.cluster)
    groups = data * pipe
    everything = {tuple(s // slots for s in p) for p in itertools.permutations(range(groups))}
    values = objective(made, links)(np.array(sorted(everything)).reshape(-1, data, pipe))
    few = exact.placements(data, pipe, slots, exact.twins(links, made.kind_of_host), 10_000)
    assert len(few) < len(everything)
    assert best_of(made, links, few) == values.min()


@pytest.mark.parametrize(("hosts", "data", "pipe", "inside"), [(4, 4, 1, 2), (6, 6, 1, 3), (8, 4, 2, 2)])
def test_exact_search_misses_nothing_in_groups_of_data_ranks(hosts, data, pipe, inside):
    """The rings inside groups and those between may begin anywhere, but which ranks are a group matters."""
    made = problem(cluster(hosts, 1, seed=1), data, pipe, 1, data_rank=32, coded=Coded(inside=inside))
    links = fabric(made.cluster)
    every = np.array(list(itertools.permutations(range(hosts)))).reshape(-1, data, pipe)
    values = objective(made, links)(every)
    few = exact.placements(data, pipe, 1, exact.twins(links, made.kind_of_host), 50_000)
    assert len(few) == len(every) // data
    assert best_of(made, links, few) == values.min()
    assert place(made, links).seconds == pytest.approx(values.min())
    other, same = (objective(made, links)(np.roll(every, by, axis=1)) for by in (1, inside))
    np.testing.assert_allclose(same, values)
    assert np.abs(other - values).max() > 1e-3 * values.min()


def test_equal_hosts_are_exchanged_for_nothing():
    """With two pairs of twins among five hosts, a quarter of the placements has the same best step."""
    nodes = cluster(5, 1, seed=2)
    samples = nodes.samples.copy()
    for a, b in ((0, 1), (2, 4)):
        for axis in (1, 2):
            np.moveaxis(samples, axis, 0)[b] = np.moveaxis(samples, axis, 0)[a]
        samples[:, a, b] = samples[:, b, a] = 10e9
        samples[:, [a, b], [a, b]] = 300e9
    samples[:, [0, 0, 1, 1], [2, 4, 2, 4]] = 8e9
    samples[:, [2, 4, 2, 4], [0, 0, 1, 1]] = 9e9
    made = problem(dataclasses.replace(nodes, samples=samples), 1, 5, 1)
    links = fabric(made.cluster)
    twins = exact.twins(links, made.kind_of_host)
    np.testing.assert_array_equal(twins, [-1, 0, -1, -1, 2])
    few, all_ = (exact.placements(1, 5, 1, t, 1000) for t in (twins, np.full(5, -1)))
    assert (len(few), len(all_)) == (30, 120)
    assert best_of(made, links, few) == best_of(made, links, all_)


@pytest.mark.parametrize(
    ("data", "pipe"), [(2, 3), *(pytest.param(*mesh, marks=pytest.mark.slow) for mesh in ((3, 2), (1, 6)))]
)
def test_where_links_are_alike_and_only_a_trunk_is_shared_the_best_of_all_placements_is_found(data, pipe):
    """Three hosts share an uplink, so placements differ; without the trunk any would be as good as any other."""
    nodes = cluster(6, 1, seed=None, trunks=[{"hosts": ["host0", "host3", "host4"], "bandwidth": 2e9}])
    made = problem(nodes, data, pipe, 1)
    links = fabric(nodes)
    every = np.array(list(itertools.permutations(range(6)))).reshape(-1, data, pipe)
    values = objective(made, links)(every)
    least = values.min()
    few = exact.placements(data, pipe, 1, exact.twins(links, made.kind_of_host), 10_000)
    assert len(few) < len(every) and best_of(made, links, few) == least
    for exactly in (True, False):
        assert place(made, links, exactly=exactly).seconds == pytest.approx(least)
    assert values.max() > 1.02 * least
    free = objective(made, dataclasses.replace(links, trunks=None))(every)
    assert free.max() == pytest.approx(free.min())


def test_different_kinds_are_no_twins():
    nodes = cluster(3, 1, seed=None, device=["a100-80gb", "v100", "a100-80gb"])
    made = problem(nodes, 3, 1, 1)
    np.testing.assert_array_equal(exact.twins(fabric(nodes), made.kind_of_host), [-1, -1, 0])


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.permutations(range(4)), st.integers(0, 99), st.sampled_from([(4, 1), (2, 2), (1, 4), (2, 4), (4, 2)]))
def test_relabelled_hosts_have_the_same_optimum(order, seed, mesh):
    slots = mesh[0] * mesh[1] // 4
    made = problem(cluster(4, slots, seed=seed), *mesh, 1)
    other = problem(reordered(made.cluster, np.array(order)), *mesh, 1)
    found = [place(p, fabric(p.cluster)) for p in (made, other)]
    assert found[0].seconds == pytest.approx(found[1].seconds, rel=1e-12)
    again = made.step(fabric(made.cluster), np.array(order)[found[1].hosts][None]).total[0]
    assert again == pytest.approx(found[0].seconds, rel=1e-12)


# --- Annealing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 7, 30])
def test_moves_are_pipettes_five(size):
    """Every row is one of the five moves, made here by list operations, and many rows have all of them."""
    rng = np.random.default_rng(0)
    plain, kinds = list(range(size)), {}
    for i, j in itertools.combinations(range(size + 1), 2):
        part, rest = plain[i:j], plain[:i] + plain[j:]
        kinds.setdefault(tuple(plain[:i] + part[::-1] + plain[j:]), set()).add("reverse")
        for at in set(range(len(rest) + 1)) - {i}:
            kind = "migrate" if j == i + 1 else "move"
            kinds.setdefault(tuple(rest[:at] + part + rest[at:]), set()).add(kind)
            kinds.setdefault(tuple(rest[:at] + part[::-1] + rest[at:]), set()).add("move reversed")
    for i, j in itertools.combinations(range(size), 2):
        swapped = plain.copy()
        swapped[i], swapped[j] = j, i
        kinds.setdefault(tuple(swapped), set()).add("swap")
    seen = set()
    for row in anneal.moves(rng, 500, size).sources(size).tolist():
        assert tuple(row) in kinds, row
        assert row != plain or size == 2
        seen |= {frozenset(kinds[tuple(row)])}
    if size == 30:
        # Some rows are two moves at once: a slice that moves reversed past one element is a reversal of both.
        assert all(any(kind in both for both in seen) for kind in ("reverse", "migrate"))
        assert {frozenset({kind}) for kind in ("move", "move reversed", "swap")} <= seen


@pytest.mark.parametrize(("data", "pipe", "slots"), [(4, 4, 2), (3, 4, 4), (2, 6, 3), (6, 2, 4), (8, 8, 8), (5, 2, 5)])
def test_layouts_fill_hosts_and_differ(data, pipe, slots):
    found = anneal.layouts(data, pipe, slots)
    for layout, grid in found:
        assert (np.bincount(layout.ravel()) == slots).all()
        assert grid[0] * grid[1] == data * pipe // slots
    together = {tuple((layout.ravel()[:, None] == layout.ravel()).ravel()) for layout, _ in found}
    assert len(together) == len(found)


@pytest.mark.once
def test_annealed_placements_of_eight_hosts_are_the_best():
    """The cases are a sample of those that python -m experiments.bench.planner --sections=placement runs."""
    left = np.array([share for _, share in against_exhaustive([3])])
    assert (left < 1e-9).mean() >= 0.8 and left.max() < 5e-3


def test_annealing_moves_groups_between_hosts():
    """With two slots per host there are 1,260 placements. The best is no plain layout, and annealing finds it."""
    made = problem(cluster(4, 2, seed=3), 2, 4, 1)
    links = fabric(made.cluster)
    best = place(made, links)
    assert best.source == "exact" and best.gap == 0
    annealed = place(made, links, chains=32, iterations=100, exactly=False)
    assert annealed.source == "annealed"
    assert annealed.bound <= best.seconds == pytest.approx(annealed.seconds, rel=1e-12)
    assert (np.bincount(annealed.hosts.ravel()) == 2).all()
    assert made.step(links, annealed.hosts[None]).total[0] == annealed.seconds


def test_a_seed_gives_one_placement_and_a_start_is_kept():
    made = problem(cluster(8, 2, seed=5), 4, 4, 1)
    links = fabric(made.cluster)
    one, same, other = (place(made, links, seed=s, iterations=40, chains=8, exactly=False) for s in (1, 1, 2))
    np.testing.assert_array_equal(one.hosts, same.hosts)
    assert one.seconds == same.seconds and not np.array_equal(one.hosts, other.hosts)
    good = place(made, links, chains=8, iterations=100)
    assert place(made, links, iterations=1, chains=2, start=good.hosts).seconds <= good.seconds


@pytest.mark.parametrize("mesh", [(4, 4, 4), (16, 1, 4), (4, 2, 8)])
def test_equal_hosts_end_the_search_at_once(mesh):
    per_host = max(mesh[2], 4)
    made = problem(cluster(mesh[0] * mesh[1] * mesh[2] // per_host, per_host, seed=None), *mesh)
    found = place(made, fabric(made.cluster))
    assert found.evaluations < 10 and found.gap < 1e-6
    np.testing.assert_array_equal(found.hosts, host_order(made.candidate, per_host)[0])
    assert found.source == "host order"


def test_slow_devices_go_where_there_is_least_to_do():
    """Half of the hosts are V100s, and two of four stages have one layer each: V100s hold them in every pipeline."""
    nodes = cluster(8, 1, seed=None, device=["v100", "a100-80gb"] * 4)
    made = Problem(nodes, MODEL, Candidate(2, 4, 1, 2, 8, "eager_1f1b", (5, 5, 1, 1)))
    found = place(made, fabric(nodes))
    slow = np.array([kind == "v100" for kind in nodes.kinds])[found.hosts]
    np.testing.assert_array_equal(slow, [[False, False, True, True]] * 2)


def racked(hosts: int, per_host: int, racks: int):
    """Return hosts in racks, mixed, whose links between racks are eight times as slow."""
    rng = np.random.default_rng(hosts + racks)
    rack = rng.permutation(np.arange(hosts) % racks)
    factor = np.where(rack[:, None] == rack, 1.0, 1 / 8) * np.exp(rng.normal(0, 0.05, (hosts, hosts)))
    nodes = cluster(hosts, per_host, seed=None)
    return dataclasses.replace(nodes, samples=nodes.samples * np.where(np.eye(hosts, dtype=bool), 1.0, factor))


def spread_of_seeds(hosts: int, per_host: int, racks: int, mesh: tuple[int, int], seeds: int) -> float:
    """Return by which share the worst seed's placement takes longer than the best one's."""
    made = problem(racked(hosts, per_host, racks), *mesh, 1, micro_batches=16)
    seconds = [place(made, fabric(made.cluster), seed=seed).seconds for seed in range(seeds)]
    return max(seconds) / min(seconds) - 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hosts", "per_host", "mesh"), [(8, 4, (8, 4)), (16, 4, (16, 4)), (16, 8, (16, 8)), (12, 8, (12, 8))]
)
@pytest.mark.parametrize("racks", [2, 3])
def test_six_seeds_agree_where_hosts_are_in_racks(hosts, per_host, mesh, racks):
    """Three racks divide neither the stages nor, but for twelve, the hosts."""
    assert spread_of_seeds(hosts, per_host, racks, mesh, 6) <= 0.02


def test_a_mesh_that_leaves_devices_over_is_refused():
    with pytest.raises(UserError, match="2 x 2 x 1 cannot be placed on 8 hosts of 1 devices"):
        place(problem(cluster(8, 1), 2, 2, 1), fabric(cluster(8, 1)))


# --- Gains and the rules of others ------------------------------------------------------------------------------------


def noisy(spread, noise, hosts=8, samples=4):
    """Return a cluster whose links differ from one another and from sample to sample.

    Args:
        spread: largest relative difference of a link from the mean.
        noise: largest relative difference of a sample from its link.
        hosts: number of hosts.
        samples: number of samples.
    """
    nodes, rng = cluster(hosts, 4, seed=None), np.random.default_rng(0)
    link = 1 + spread * rng.uniform(-1, 1, (hosts, hosts))
    each = link * (1 + noise * rng.uniform(-1, 1, (samples, hosts, hosts)))
    return dataclasses.replace(nodes, samples=nodes.samples * np.where(np.eye(hosts, dtype=bool), 1, each))


@pytest.mark.parametrize(("spread", "noise", "real"), [(0.5, 0.02, True), (0.0, 0.3, False)])
def test_a_gain_from_noise_is_told_from_one_that_repeats(spread, noise, real):
    made = problem(noisy(spread, noise), 8, 1, 4)
    links = fabric(made.cluster)
    baseline = host_order(made.candidate, 4)[0]
    chosen = place(made, links)
    found = gain(made, made.cluster, chosen.hosts, baseline)
    assert made.step(links, baseline[None]).total[0] > chosen.seconds * 1.01  # on the median links it looks like a gain
    assert found.within_noise != real
    assert ("more than the noise" in found.words) == real


def test_gain_is_of_each_sample():
    made = problem(noisy(0.5, 0.2, samples=2), 8, 1, 4)
    a, b = host_order(made.candidate, 4)[0], host_order(made.candidate, 4)[0][::-1]
    b = b[[0, 2, 4, 6, 1, 3, 5, 7]]
    seconds = [[made.step(fabric(made.cluster, sample=r), x[None]).total[0] for x in (a, b)] for r in range(2)]
    each = [theirs / own - 1 for own, theirs in seconds]
    found = gain(made, made.cluster, a, b)
    assert (found.mean, found.std) == pytest.approx((np.mean(each), abs(each[0] - each[1]) / np.sqrt(2)))


def test_amps_rule_counts_data_ranks_first():
    made = problem(cluster(4, 4), 4, 2, 2)
    np.testing.assert_array_equal(amp_rule(made).T, [[0, 0, 1, 1], [2, 2, 3, 3]])


@pytest.mark.parametrize("mesh", [(2, 3, 4), (4, 3, 2), (6, 1, 4)])
def test_pipettes_rule_is_the_best_of_its_own_objective(mesh):
    """Its objective P + D is computed here by loops for all permutations of six nodes; the step is not compared."""
    data, _, tensor = mesh
    made = problem(cluster(6, 4, seed=4), *mesh)
    slots, seconds = 4 // tensor, 1 / made.cluster.samples[0]
    columns = data // slots if data > slots else 1
    size = 4 * (made.layer_parameters + made.embedding_parameters)

    def value(hosts):  # [D, P]
        p = max(sum(2 * made.message * seconds[a, b] for a, b in zip(row, row[1:])) for row in hosts.tolist())
        nodes = hosts[:: data // columns, 0].tolist()
        d = max(seconds[a, b] for a, b in zip(nodes, nodes[1:] + nodes[:1])) * 2 * (columns - 1) / columns * size
        inner = data // columns
        return p + d + max(seconds[a, a] for a in nodes) * 2 * (inner - 1) / inner * size

    layout = amp_rule(made)
    best = min(value(np.array(order)[layout]) for order in itertools.permutations(range(6)))
    assert value(pipette_rule(made)) == pytest.approx(best, rel=1e-9)


def test_annealing_reads_nothing_but_the_fabric_it_is_given():
    """With another fabric the placement is another, so the links of the cluster itself are not used."""
    made = problem(cluster(6, 4, seed=4), 6, 1, 4)
    links = fabric(made.cluster)
    turned = dataclasses.replace(links, alpha=links.alpha.T, per_byte=links.per_byte.T)
    found = place(made, turned)
    assert rings(turned, found.hosts[None], 4)[1][0, 0] <= rings(turned, place(made, links).hosts[None], 4)[1][0, 0]
