"""Plans on fewer hosts and for batches near by are found where they are quicker, and not told where they are not."""

import dataclasses

import numpy as np
import pytest

from planner.search import nearby
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices
from tests.planner.examples import MODEL, cluster

CHOICES = Choices(schedules=("eager_1f1b",), saves=("dots",), backward=(), data_ranks=(), shards=("optimizer",))


def search(some, batch: int) -> Search:
    return Search(some, MODEL, batch, CHOICES, Budget(margin=False), Options(top=2, placed=1))


def test_a_batch_near_by_that_divides_better_is_found():
    """Six hosts with a batch of 62 leave two data ranks at most; 60 has five divisors more."""
    one = search(cluster(6, 1, seed=None), 62)
    ranked = one.run().ranked
    found = nearby.batches(one, ranked)
    assert found and found[0].global_batch in (60, 66) and found[0].gain > nearby._GAIN
    near = found[0]
    assert near.gain == pytest.approx(ranked[0].seconds / 62 / (near.found.seconds / near.global_batch) - 1)
    assert not nearby.batches(search(cluster(6, 1, seed=None), 60), ranked)


def slow_host(hosts: int, slow: int, slower: float):
    """Return a cluster in which the links of one host are slower."""
    some = cluster(hosts, 1, seed=None)
    samples = some.samples.copy()
    others = [i for i in range(hosts) if i != slow]
    samples[:, slow, others] /= slower
    samples[:, others, slow] /= slower
    return dataclasses.replace(some, samples=samples)


def test_a_host_that_costs_more_than_it_adds_is_left_out():
    one = search(slow_host(5, 3, 40), 40)
    ranked = one.run().ranked
    found = nearby.fewer_hosts(one, ranked)
    assert found and found[0].left_out == ("host3",) and found[0].found.seconds < ranked[0].seconds
    assert found[0].gain == pytest.approx(ranked[0].seconds / found[0].found.seconds - 1)


def test_nothing_is_searched_where_hosts_are_alike_and_the_batch_divides(monkeypatch):
    alike = search(cluster(5, 1, seed=None), 40)
    ranked = alike.run().ranked
    monkeypatch.setattr(nearby, "_like", lambda *_: pytest.fail("searched"))
    assert not nearby.fewer_hosts(alike, ranked) and not nearby.batches(alike, ranked)
    assert nearby.hosts_differ(search(slow_host(5, 3, 40), 40)) and not nearby.hosts_differ(alike)
    assert nearby.divides_badly(42, 512) and not nearby.divides_badly(42, 504)


def test_slow_devices_and_small_racks_are_left_out_first():
    some = cluster(6, 1, seed=None, device=["a100-80gb", "v100"] + ["a100-80gb"] * 4)
    samples = some.samples.copy()
    rack = np.array([0, 0, 0, 1, 1, 0])
    samples[:, rack[:, None] != rack] /= 20
    subsets = nearby._subsets(search(dataclasses.replace(some, samples=samples), 40))
    assert [1] in subsets and [3, 4] in subsets and max(map(len, subsets)) == 3


@pytest.mark.parametrize("sites", [2, 3])
def test_one_site_alone_is_tried_where_the_way_to_the_others_is_slow(sites):
    """Fewer hosts of both sites need the slow way as well, and their bounds, which know no links, are lower."""
    hosts = 3 * sites
    some = cluster(hosts, 1, seed=None)
    site = np.arange(hosts) // 3
    samples = some.samples.copy()
    samples[:, site[:, None] != site] /= 1000
    one = search(dataclasses.replace(some, samples=samples), 36)
    ranked = one.run().ranked
    best = nearby.fewer_hosts(one, ranked)[0]
    left = [i for i, name in enumerate(one.cluster.hosts) if name not in best.left_out]
    assert len(left) == 3 and len(set(site[left])) == 1
    alone = Search(cluster(3, 1, seed=None), MODEL, 36, CHOICES, one.budget, one.options).run().ranked[0]
    assert best.found.seconds == pytest.approx(alone.seconds) and best.gain > 3


@pytest.mark.once
def test_no_plan_trains_more_sequences_than_hosts_can():
    one = search(cluster(4, 2, device=["a100-80gb", "h100"] * 2), 32)
    best = one.run().ranked[0].seconds
    assert 0 < 32 / best < nearby.most_sequences(one).sum()
