"""The closed-form bound is below every simulated step, and close to it where links are alike."""

import dataclasses
import itertools

import numpy as np
import pytest

from compress.codecs.quantised import QuantisedBlocks
from compress.reducer import Scattered
from paxtrain.config import REDUCE_DTYPES, SAVE_MODES, SHARDS
from paxtrain.schedule.schedules import name_of
from planner.cluster.cluster import Cluster
from planner.cost import link_seconds
from planner.cost.candidate import Candidate, host_order
from planner.cost.coded import LOW_RANK, Coded
from planner.cost.shares import by_speed
from planner.cost.step_time import Problem
from planner.fit.applied import priced
from planner.pipeline import layer_split
from planner.placement import bounds as placement_bounds
from planner.search import pruning
from planner.search.enumeration import enumerate_candidates
from planner.search.space import BACKWARD, COLUMNS, TRIED, Choices
from tests.planner.examples import MODEL, cluster, placements

SPACE_CHOICES = Choices(
    backward=("epilogue", "all"),
    backward_ranks=(16,),
    data_ranks=(32,),
    virtual_stages=(2, 3),
    sequence_parallel=(False, True),
    schedules=(*TRIED, "zb_v"),
)


class OverGloo(Cluster):
    """The same devices, but no transfer runs beside compute, and reduce-scatters are all-to-alls, as on CPUs."""

    overlaps = False


HETERO = cluster(device=["a100-80gb", "h100", "a100-80gb", "h100"], nics=2)


def candidate(space, i: int, counts: tuple[int, ...]) -> Candidate:
    columns = {name: getattr(space, name)[i].item() for name in COLUMNS}
    names = {"save": SAVE_MODES, "backward": BACKWARD, "reduce_dtype": REDUCE_DTYPES, "shard": SHARDS}
    columns |= {key: known[columns[key]] for key, known in names.items()}
    return Candidate(**columns | {"schedule": name_of(columns["schedule"])}, counts=counts)


def some_split(rng: np.random.Generator, count: int, stages: int) -> tuple[int, ...]:
    cuts = np.sort(rng.choice(np.arange(1, count), stages - 1, replace=False))
    return tuple(np.diff([0, *cuts, count]).tolist())


GLOO = OverGloo(**{f.name: getattr(HETERO, f.name) for f in dataclasses.fields(Cluster)} | {"fan_out": 2.0})


@pytest.mark.parametrize("trainer", ["nanotron", "maxtext"])
def test_no_step_of_another_trainer_is_below_its_bound(trainer):
    """Their messages may have fewer bytes than those that are counted."""
    some = priced(cluster(nics=2), trainer)
    choices = Choices(schedules=("1f1b", "interleaved_1f1b"), in_flight=False, backward=(), data_ranks=())
    space = enumerate_candidates(some, MODEL, 32, choices)
    bounds, rng, fabric = pruning.lower_bound(some, MODEL, space), np.random.default_rng(0), link_seconds.fabric(some)
    closest = 0.0
    for i in rng.choice(len(space), 60, replace=False):
        counts = layer_split.even(MODEL.layers, int(space.pipe[i] * space.chunks[i]))
        problem = Problem(some, MODEL, candidate(space, i, counts))
        c = problem.candidate
        hosts = placements(3, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
        total = problem.step(fabric, hosts).total.min()
        assert bounds[i] <= total * (1 + 1e-9), c
        assert placement_bounds.lower(problem, fabric) <= total * (1 + 1e-9), c
        closest = max(closest, bounds[i] / total)
    assert closest > 0.7  # it is a bound that says something


FAR = cluster(8, 1, seed=None, links={"alpha": 5e-3, "bandwidth": np.full((8, 8), 25e9).tolist()})
TABLE = QuantisedBlocks(4)


@pytest.mark.parametrize(
    "forward",
    [
        LOW_RANK,
        Coded(forward_rank=8),
        Coded(forward=QuantisedBlocks(8), embedding=TABLE),
        Coded(inside=2),
        Coded(data=Scattered(TABLE), weights=QuantisedBlocks(8)),
        Coded(data=Scattered(TABLE), inside=4),
    ],
)
@pytest.mark.parametrize(
    "some",
    [cluster(), HETERO, cluster(2, 8, seed=None), cluster(nics=2, rails=True), GLOO],
    ids=["uneven", "kinds", "alike", "rails", "gloo"],
)
def test_no_simulated_step_is_below_the_bound(some, forward):
    choices = dataclasses.replace(SPACE_CHOICES, coded=forward)
    space = enumerate_candidates(some, MODEL, 32, choices)
    bounds, rng = pruning.lower_bound(some, MODEL, space, forward), np.random.default_rng(0)
    fabric = link_seconds.fabric(some)
    drawn = rng.choice(len(space), 250 if forward is LOW_RANK else 60, replace=False)
    if forward.data is not None:  # and what sends shards through it
        sums = np.flatnonzero((space.data_rank > 0) & (space.shard >= SHARDS.index("gradients")))
        assert len(sums) > 20 and (space.shard_group[sums] > 0).any() == (forward.inside == 4)
        drawn = np.concatenate([drawn, rng.choice(sums, 20, replace=False)])
    for i in drawn:
        stages = int(space.pipe[i] * space.chunks[i])
        for counts in {layer_split.even(MODEL.layers, stages), some_split(rng, MODEL.layers, stages)}:
            problem = Problem(some, MODEL, dataclasses.replace(candidate(space, i, counts), coded=forward))
            c = problem.candidate
            hosts = placements(3, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
            total = problem.step(fabric, hosts).total
            assert (total >= bounds[i] * (1 - 1e-12)).all(), c


@pytest.mark.parametrize(
    ("some", "near"),
    [(cluster(8, 4, seed=None, nics=4), 0.85), (cluster(8, 4), 0.05), (GLOO, 0.05)],
    ids=["alike", "uneven", "gloo"],
)
def test_shards_of_groups_are_bounded_with_the_exchange_between_groups(some, near):
    """Where links are alike the bound without that exchange is a half to two thirds of the step."""
    space = enumerate_candidates(some, MODEL, 32, dataclasses.replace(SPACE_CHOICES, backward=(), data_ranks=()))
    bounds, fabric, closest = pruning.lower_bound(some, MODEL, space), link_seconds.fabric(some), []
    for i in np.flatnonzero(space.shard_group):
        counts = layer_split.even(MODEL.layers, int(space.pipe[i] * space.chunks[i]))
        c = (problem := Problem(some, MODEL, candidate(space, i, counts))).candidate
        shuffled = placements(2, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
        total = problem.step(fabric, np.concatenate([host_order(c, some.devices_per_host), shuffled])).total
        assert (total >= bounds[i] * (1 - 1e-12)).all(), c
        closest.append(bounds[i] / total[0])
    assert len(closest) > 30 and min(closest) > near


@pytest.mark.parametrize(("some", "near"), [(cluster(2, 8, seed=None), 0.97), (HETERO, 0.5), (GLOO, 0.5)])
def test_no_step_with_layers_of_several_kinds_is_below_the_bound(some, near):
    model = dataclasses.replace(MODEL, module="tests.paxtrain.model.mixed:Mixed")
    space = enumerate_candidates(some, model, 32, dataclasses.replace(SPACE_CHOICES, backward=(), data_ranks=()))
    bounds, rng, closest = pruning.lower_bound(some, model, space), np.random.default_rng(0), 0.0
    for i in rng.choice(len(space), 120, replace=False):
        stages = int(space.pipe[i] * space.chunks[i])
        for counts in {layer_split.even(model.layers, stages), some_split(rng, model.layers, stages)}:
            c = (problem := Problem(some, model, candidate(space, i, counts))).candidate
            hosts = placements(3, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
            total = problem.step(link_seconds.fabric(some), hosts).total
            assert (total >= bounds[i] * (1 - 1e-12)).all(), c
            closest = max(closest, bounds[i] / total.min())
    assert closest > near


def test_a_split_that_hides_more_of_a_slow_reduction_is_not_below_the_bound():
    """If latency is most of a reduction, a stage with more layers may show less of it than one of an even split."""
    model = dataclasses.replace(MODEL, layers=4)
    space = enumerate_candidates(FAR, model, 128, Choices(schedules=("1f1b",), data=(4,), pipe=(2,), micro_batch=(32,)))
    bounds, fabric, hosts = (
        pruning.lower_bound(FAR, model, space),
        link_seconds.fabric(FAR),
        np.arange(8).reshape(1, 4, 2),
    )
    below = 0
    for i in range(len(space)):
        even, *others = (
            Problem(FAR, model, candidate(space, i, counts)).step(fabric, hosts).total[0]
            for counts in ((2, 2), (3, 1), (1, 3))
        )
        assert bounds[i] <= min(even, *others)
        below += min(others) < even
    assert below  # there are such splits


@pytest.mark.parametrize("some", [HETERO, GLOO], ids=["kinds", "gloo"])
def test_no_step_of_uneven_data_ranks_is_below_the_bound(some):
    """Data ranks have the numbers that suit the placement, or any others that add up to the batch."""
    space = enumerate_candidates(some, MODEL, 32, dataclasses.replace(SPACE_CHOICES, uneven_data=(True,)))
    bounds, rng = pruning.lower_bound(some, MODEL, space), np.random.default_rng(0)
    fabric, tried = link_seconds.fabric(some), 0
    for i in rng.choice(np.flatnonzero(space.uneven_data), 100, replace=False):
        stages = int(space.pipe[i] * space.chunks[i])
        for counts in {layer_split.even(MODEL.layers, stages), some_split(rng, MODEL.layers, stages)}:
            problem = Problem(some, MODEL, candidate(space, i, counts))
            c = problem.candidate
            hosts = placements(3, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
            ranks = some_split(rng, c.data * c.micro_batches, c.data)
            other = Problem(some, MODEL, dataclasses.replace(c, data_micro_batches=ranks, micro_batches=max(ranks)))
            for one, on in [*by_speed(problem, hosts), (other, slice(None))]:
                tried += 1
                total = one.step(fabric, hosts[on]).total
                assert (total >= bounds[i] * (1 - 1e-12)).all(), one.candidate
    assert tried > 150


def test_the_bound_knows_how_many_stages_slow_devices_leave():
    """Two of four hosts are slow. Wherever they lie, and however the layers are split, no step is below the bound."""
    model = dataclasses.replace(MODEL, layers=8)
    some = cluster(4, 1, seed=None, device=["a100-80gb", "h100", "a100-80gb", "h100"])
    choices = Choices(schedules=("eager_1f1b", "1f1b"), saves=("dots",), backward=(), data_ranks=())
    space = enumerate_candidates(some, model, 64, choices)
    bounds, fabric = pruning.lower_bound(some, model, space), link_seconds.fabric(some)
    fast = pruning.lower_bound(cluster(4, 1, seed=None, device="h100"), model, space)
    hosts = np.array(list(itertools.permutations(range(4))))
    for i in np.flatnonzero(space.pipe > 1).tolist():
        p, least = int(space.pipe[i]), np.inf
        for cuts in itertools.combinations(range(1, model.layers), p - 1):
            counts = tuple(np.diff([0, *cuts, model.layers]).tolist())
            problem = Problem(some, model, candidate(space, i, counts))
            least = min(least, problem.step(fabric, hosts.reshape(-1, 4 // p, p)).total.min())
        assert fast[i] <= bounds[i] <= least
    assert (bounds / fast)[space.pipe > 1].max() > 1.05


def test_the_bound_is_close_where_layers_are_all_there_is():
    """The case has equal links, an eager pipeline and a model whose head is small beside its layers."""
    some = cluster(4, 4, seed=None, nics=4)
    model = dataclasses.replace(MODEL, layers=48, hidden=4096, heads=32)
    space = enumerate_candidates(some, model, 64, Choices(schedules=("eager_1f1b",), data_ranks=(), backward=()))
    bounds, fabric = pruning.lower_bound(some, model, space), link_seconds.fabric(some)
    chosen = np.flatnonzero((space.pipe == 4) & (space.tensor == 4) & (space.micro_batch <= 2))
    assert len(chosen)
    for i in chosen:
        problem = Problem(some, model, candidate(space, i, (12, 12, 12, 12)))
        total = problem.step(fabric, np.arange(4).reshape(1, 1, 4)).total[0]
        assert 0.92 * total < bounds[i] <= total
