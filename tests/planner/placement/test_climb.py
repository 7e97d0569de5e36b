"""A climb ends where no exchange is better, and racks are those that the links make."""

import itertools

import numpy as np
import pytest

from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.climb import climb, exchanges, racks, racks_of
from planner.placement.place import place, quickly
from tests.planner.examples import MODEL, cluster


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_racks_are_found_in_the_links(count):
    rng = np.random.default_rng(count)
    rack = rng.permutation(np.arange(15) % count)
    slowness = np.where(rack[:, None] == rack, 1.0, 4.0) * rng.uniform(0.9, 1.1, (15, 15))
    found = racks(slowness)
    assert len(set(zip(rack.tolist(), found.tolist()))) == len(set(found.tolist())) == count


def joined(slowness):
    """Return the racks as frozen sets: the two sets with the least mean distance join, one pair after another."""
    apart = np.maximum(slowness, slowness.T)
    sets, steps = [frozenset([i]) for i in range(len(apart))], []
    while len(sets) > 1:
        mean = {(a, b): apart[np.ix_(list(a), list(b))].mean() for a, b in itertools.combinations(sets, 2)}
        a, b = min(mean, key=mean.get)
        steps.append((list(sets), mean[a, b]))
        sets = [one for one in sets if one not in (a, b)] + [a | b]
    jumps = [after / before for (_, before), (_, after) in itertools.pairwise(steps)]
    return set(steps[int(np.argmax(jumps)) + 1][0]) if max(jumps) >= 1.5 else {frozenset(range(len(apart)))}


@pytest.mark.parametrize("seed", range(8))
def test_racks_are_those_of_joining_sets_one_by_one(seed):
    rng = np.random.default_rng(seed)
    slowness = np.exp(rng.normal(0, rng.uniform(0.05, 1), (12, 12)))
    found = racks(slowness)
    assert {frozenset(np.flatnonzero(found == i).tolist()) for i in range(found.max() + 1)} == joined(slowness)


def test_exchanges_are_of_sets_one_by_one():
    found = exchanges([np.array([0, 1]), np.array([4])], [np.array([3, 4]), np.array([2])], 5)
    np.testing.assert_array_equal(found, [[3, 4, 2, 0, 1], [0, 1, 4, 3, 2]])


def made(seed: int) -> Problem:
    return Problem(cluster(5, 2, seed=seed), MODEL, Candidate(2, 5, 1, 2, 8, "1f1b", (3, 3, 2, 2, 2)))


@pytest.mark.parametrize("seed", range(3))
def test_no_exchange_of_two_groups_or_hosts_is_better_at_the_end(seed):
    problem = made(seed)
    links = fabric(problem.cluster)
    objective = lambda hosts: problem.step(links, hosts).total  # noqa: E731
    start = np.random.default_rng(seed).permutation(10).reshape(2, 5) // 2
    begin = float(objective(start[None])[0])
    end = climb(objective, start, begin, racks_of(links), True, np.random.default_rng(0), 16, 100_000)
    assert end.value < begin and (np.bincount(end.hosts.ravel()) == 2).all()
    every = []
    for a, b in itertools.combinations(range(10), 2):
        flat = end.hosts.ravel().copy()
        flat[[a, b]] = flat[[b, a]]
        every.append(flat.reshape(2, 5))
    for a, b in itertools.combinations(range(5), 2):
        every.append(np.select([end.hosts == a, end.hosts == b], [b, a], end.hosts))
    assert objective(np.array(every)).min() >= end.value * (1 - 1e-9)


def test_a_climb_keeps_to_its_evaluations():
    problem = made(0)
    links = fabric(problem.cluster)
    start = np.arange(10).reshape(2, 5) // 2
    objective = lambda hosts: problem.step(links, hosts).total  # noqa: E731
    value = float(objective(start[None])[0])
    end = climb(objective, start, value, racks_of(links), True, np.random.default_rng(0), 8, 20)
    assert end.evaluations <= 28 and end.value <= value


def test_a_quick_placement_is_no_worse_than_its_start():
    problem = made(1)
    links = fabric(problem.cluster)
    start = np.random.default_rng(1).permutation(10).reshape(2, 5) // 2
    found = quickly(problem, links, start[None])
    assert found.seconds <= problem.step(links, start[None]).total[0]
    assert found.bound <= place(problem, links).seconds <= found.seconds * (1 + 1e-9)
