"""The search finds the best plan of small instances whose links or devices differ much, by trying all plans.

Regret is the share by which the search's plan takes longer than the best. `brute_force` shares the cost model with the
search, and nothing else.
"""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.search.refine import Refinement
from tests.planner.search import brute_force

MOST = 0.01  # regret
NARROWED = 0.005  # by which a narrowed search may find a better plan


EACH_KIND = range(4, 9)  # one of each kind of cluster
MANY = 200


@pytest.mark.parametrize("seed", [*EACH_KIND[:1], *(pytest.param(x, marks=pytest.mark.once) for x in EACH_KIND[1:])])
def test_no_plan_is_better(seed):
    assert -1e-6 < brute_force.regret(brute_force.instance(seed)) <= MOST


@pytest.mark.parametrize("seed", (1, pytest.param(4, marks=pytest.mark.slow)))
def test_no_plan_is_better_where_hosts_share_uplinks(seed):
    assert -1e-6 < brute_force.regret(brute_force.behind_trunks(brute_force.instance(seed), seed)) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2, 3, *range(5, 50)])
def test_no_plan_is_better_where_hosts_share_uplinks_in_fifty(seed):
    assert -1e-6 < brute_force.regret(brute_force.behind_trunks(brute_force.instance(seed), seed)) <= MOST


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(MANY)) - set(EACH_KIND)))
def test_no_plan_is_better_in_two_hundred(seed):
    assert -1e-6 < brute_force.regret(brute_force.instance(seed)) <= MOST


def test_two_hundred_have_every_two_settings_of_an_instance_together():
    """More instances of the same settings differ in numbers alone."""
    some = [brute_force.instance(seed) for seed in range(MANY)]
    settings = [(x.name.split()[1], len(x.cluster.hosts), x.choices.schedules, x.choices.shards) for x in some]
    each = [set(values) for values in zip(*settings)]
    assert [len(values) for values in each] == [5, 3, 4, 3]
    for i, j in itertools.combinations(range(len(each)), 2):
        assert {(one[i], one[j]) for one in settings} == set(itertools.product(each[i], each[j]))


@pytest.mark.once
def test_a_plan_that_is_not_placed_jointly_is_seen(monkeypatch):
    """Negative control: without the joint choice some instances have a regret far above the limit."""
    for name in ("quickly", "carefully"):
        monkeypatch.setattr(Refinement, name, lambda *_: None)
    assert max(brute_force.regret(brute_force.instance(seed)) for seed in (13, 23, 30)) > 10 * MOST


def narrowed(some: brute_force.Instance, rng: np.random.Generator) -> dict[str, tuple]:
    """Return a random restriction of the choices, as flags make one."""
    hosts = len(some.cluster.hosts)
    sizes = [p for p in range(1, hosts + 1) if hosts % p == 0 and p <= some.model.layers]
    pipes = rng.choice(sizes, int(rng.integers(1, len(sizes) + 1)), replace=False)
    found: dict[str, tuple] = {"pipe": tuple(sorted(pipes.tolist()))} if rng.random() < 0.8 else {}
    for name in ("schedules", "shards", "saves", "micro_batch"):
        values = getattr(some.choices, name)
        if len(values) > 1 and rng.random() < 0.5:
            found[name] = (values[rng.integers(len(values))],)
    return found


def better_by_narrowing(seed: int) -> float:
    """Return by which share a search with fewer choices finds a quicker plan than the whole search, or 0."""
    some = brute_force.instance(seed)
    choices = dataclasses.replace(some.choices, schedules=("1f1b", "eager_1f1b", "gpipe"), shards=("optimizer", "none"))
    some = dataclasses.replace(some, choices=choices)
    fewer = narrowed(some, np.random.default_rng([7, seed]))
    if "micro_batch" in fewer and some.batch // len(some.cluster.hosts) % fewer["micro_batch"][0]:
        del fewer["micro_batch"]  # not all meshes divide it
    whole, part = (one.run().ranked[0].seconds for one in (some.search(), some.search(**fewer)))
    return max(whole / part - 1, 0.0)


QUICKEST = (7, 9)  # of the first twelve, whose other instances take several times as long


@pytest.mark.parametrize("seed", (QUICKEST[0], pytest.param(QUICKEST[1], marks=pytest.mark.slow)))
def test_a_flag_that_narrows_the_space_gives_no_better_plan(seed):
    assert better_by_narrowing(seed) <= NARROWED


@pytest.mark.slow
@pytest.mark.parametrize("seed", sorted(set(range(25)) - set(QUICKEST)))
def test_none_of_twenty_five_restrictions_gives_a_better_plan(seed):
    assert better_by_narrowing(seed) <= NARROWED
