"""The search among groups that train apart: what it chooses is the best of all plans on all placements.

`planner.simulate` prices every plan of a small cluster of two sites, of a configuration as the trainer would have it.
`brute_force` tries larger instances, with splits of the layers.
"""

import dataclasses
import itertools

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import OuterConfig, from_dict, to_dict
from paxtrain.errors import UserError
from planner.cost import outer
from planner.cost.candidate import NO_GROUPS, Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement import bounds, exact
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests.planner.examples import MODEL, cluster
from tests.planner.search import brute_force

HOSTS = 4
SITE = np.array([0, 1, 1, 0])  # sites are not in the order of the hosts
BATCH, MICRO = 16, (1, 2)
SCHEDULES = ("eager_1f1b", "1f1b")
TINY = {"model.layers": 4, "model.hidden": 64, "model.heads": 4, "batch.global_batch": BATCH, "run.steps": 1200}


def two_sites(slower: float = 300.0, hosts: int = HOSTS, site: np.ndarray = SITE):
    """Return hosts of one device on two sites, between which links are slow, and differ in both directions."""
    some = cluster(hosts, 1, seed=4)
    apart = site[:, None] != site
    return dataclasses.replace(some, samples=np.where(apart, some.samples / slower, some.samples))


def groups(every=20, count=2, **more) -> OuterConfig:
    return OuterConfig(every=every, groups=count, **more)


def search(some, chosen: OuterConfig, **changes) -> Search:
    choices = Choices(micro_batch=MICRO, schedules=SCHEDULES, saves=("dots",), backward=(), data_ranks=(), outer=chosen)
    choices = dataclasses.replace(choices, **changes)
    model = paxtrain.load_config("tiny", TINY).model
    return Search(some, model, BATCH, choices, Budget(margin=False, outer=chosen), Options(top=5))


def configured(c: Candidate, chosen: OuterConfig):
    """Return the trainer's configuration of a plan."""
    values = to_dict(paxtrain.load_config("tiny", TINY))
    values["mesh"] |= {"data": c.data, "pipe": c.pipe, "tensor": 1, "shard": c.shard}
    values["batch"] |= {"micro_batch": c.micro_batch}
    schedule, in_flight = paxtrain.schedule.schedules.parts(c.schedule)
    layers = ",".join(map(str, c.counts))
    values["pipeline"] |= {"schedule": schedule, "in_flight": in_flight, "pipe_layers": layers, "save": c.save}
    values["outer"] = dataclasses.asdict(chosen)
    return from_dict(values)


def every_plan(chosen: OuterConfig):
    """Yield all configurations of groups on four hosts of one device."""
    for data, pipe in ((4, 1), (2, 2)):
        if data % (chosen.groups or data):
            continue
        names = [*SCHEDULES, "1f1b:3"] if pipe > 1 else SCHEDULES[:1]
        splits = [(4,)] if pipe == 1 else [(1, 3), (2, 2), (3, 1)]
        shards = ("optimizer", "none") if data > (chosen.groups or data) else ("optimizer",)
        for size, name, counts, shard in itertools.product(MICRO, names, splits, shards):
            if name.endswith(":3") and pipe == 2:
                continue  # two stages have no schedule between 1f1b and eager_1f1b
            yield configured(Candidate(data, pipe, 1, size, 0, name, counts, shard=shard), chosen)


def best(some, chosen: OuterConfig):
    """Return the least predicted step over all plans and all placements, and those that have it."""
    found = (np.inf, None, None)
    for config in every_plan(chosen):
        for order in itertools.permutations(range(HOSTS)):
            hosts = np.array(order).reshape(config.mesh.data, config.mesh.pipe)
            seconds = planner.simulate(config, some, hosts).seconds
            if seconds < found[0] * (1 - 1e-9):
                found = seconds, config, hosts
    return found


@pytest.mark.parametrize(
    "chosen",
    [groups(), groups(count=4), groups(count=0), groups(every=100), groups(every=4, fragments=2, overlap=1)],
    ids=["two", "four", "each rank", "rare", "streaming"],
)
def test_the_chosen_plan_is_the_best_of_all_on_all_placements(chosen):
    some = two_sites()
    seconds, config, hosts = best(some, chosen)
    found = search(some, chosen).run().ranked[0]
    c = found.candidate
    assert found.seconds == pytest.approx(seconds, rel=1e-9), (c, config.mesh, hosts)
    assert c.apart == config.groups and c.data % c.apart == 0


def test_groups_lie_on_sites_and_only_exchanges_cross_between_them():
    some, chosen = two_sites(), groups()
    found = search(some, chosen).run().ranked[0]
    c = found.candidate
    on = SITE[found.placement.hosts].reshape(c.apart, -1)
    assert (on == on[:, :1]).all() and len(set(on[:, 0])) == 2  # in host order they would not
    assert found.seconds < found.plain / 2


def test_without_the_price_of_exchanges_a_worse_plan_is_chosen(monkeypatch):
    """Negative control: groups that exchange in each step over slow links, as if exchanges took no time."""
    some, chosen = two_sites(30.0), groups(every=1, count=0)
    right = search(some, chosen).run().ranked[0]
    with monkeypatch.context() as patched:
        patched.setattr(outer, "exposed", lambda _, exchanges, *__: np.zeros_like(exchanges))
        wrong = search(some, chosen).run().ranked[0]
    seconds = planner.simulate(configured(wrong.candidate, chosen), some, wrong.placement.hosts).seconds
    assert seconds > 1.05 * right.seconds


@pytest.mark.parametrize("chosen", [groups(), groups(count=0, fragments=4, every=40, overlap=3)])
def test_the_searchs_price_is_that_of_the_simulated_configuration(chosen):
    some = two_sites()
    for found in search(some, chosen).run().ranked:
        c = found.candidate
        step = planner.simulate(configured(c, chosen), some, found.placement.hosts)
        assert step.seconds == pytest.approx(found.seconds, rel=1e-12)
        assert step.waits > 0 or chosen.overlap
        assert found.placement.bound <= found.seconds


def test_rarer_exchanges_are_not_slower_and_never_ones_take_a_group_alone():
    some = two_sites()
    steps = [search(some, groups(every=every)).run().ranked[0] for every in (1, 2, 10, 50, 600)]
    seconds = [found.seconds for found in steps]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.5 * seconds[-1]
    alone = configured(steps[-1].candidate, groups()).of_group()
    hosts = np.split(steps[-1].placement.hosts, 2)
    least = max(planner.simulate(alone, some, where).seconds for where in hosts)
    assert least <= seconds[-1] < 1.1 * least


def test_training_together_takes_longer_over_slow_links():
    some = two_sites()
    together = search(some, NO_GROUPS).run().ranked[0]
    assert together.candidate.apart == 1
    assert search(some, groups()).run().ranked[0].seconds < together.seconds / 2


@pytest.mark.parametrize("trunks", [False, True])
@pytest.mark.parametrize("seed", [6, 9, 23, 25, 27])
def test_no_plan_is_better_on_six_hosts(seed, trunks):
    some = brute_force.instance(seed)
    some = brute_force.behind_trunks(some, seed) if trunks else some
    assert len(some.cluster.hosts) == 6
    some = dataclasses.replace(some, choices=dataclasses.replace(some.choices, outer=groups(every=5)))
    assert -1e-6 < brute_force.regret(some) <= 0.01


def candidates(pipe: int, data: int, count: int):
    counts = tuple(MODEL.layers // pipe + (s < MODEL.layers % pipe) for s in range(pipe))
    for schedule, shard, chosen in itertools.product(
        ("eager_1f1b", "1f1b"), ("optimizer", "none"), (groups(3, count), groups(12, count, fragments=3, overlap=1))
    ):
        yield Candidate(data, pipe, 1, 2, 2 * pipe + 1, schedule, counts, shard=shard, outer=chosen)


@pytest.mark.parametrize("device", ["a100-80gb", ["a100-80gb", "v100", "a100-80gb", "v100"]])
@pytest.mark.parametrize(
    ("data", "pipe", "count", "per_host"), [(4, 1, 2, 1), (2, 2, 2, 1), (4, 2, 2, 2), (8, 1, 2, 2)]
)
def test_no_placement_is_below_the_bound(data, pipe, count, per_host, device):
    some = cluster(4, per_host, 3, device=device)
    for links in (fabric(some), dataclasses.replace(fabric(some), rings=False)):
        for c in candidates(pipe, data, count):
            made = Problem(some, MODEL, c)
            every = exact.placements(data, pipe, per_host, exact.twins(links, made.kind_of_host), 5000)
            least = made.step(links, every).total.min()
            assert 0.2 * least < bounds.lower(made, links) <= least


def test_groups_that_no_mesh_has_are_refused():
    for changes, words in (
        ({"chosen": groups(count=3)}, r"outer\.groups=3 divides the data axis of no mesh.*outer\.groups=2,4 would fit"),
        ({"chosen": groups(count=0), "data": (1,)}, "each data rank is a group, and .* data=1; another --data"),
    ):
        with pytest.raises(UserError, match=words):
            search(two_sites(), changes.pop("chosen"), **changes)
