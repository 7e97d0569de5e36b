"""Links on which a plan does not compress: against all sets of links, simulated one by one."""

import dataclasses
import itertools

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import to_dict
from planner.cost.candidate import Candidate
from planner.cost.coded import Coded
from planner.cost.link_seconds import fabric
from planner.cost.simulate import simulate
from planner.cost.step_time import Problem
from planner.placement.place import Placement
from planner.placement.spared import spared
from tests.planner.examples import MODEL, cluster

HOSTS, SLOW = 4, 2e-3
FREE = 1 + 1e-3
EIGHT = Coded(forward_rank=16)
CASES = {
    "gradients": {"backward": "all", "backward_rank": 8},
    "gradients of the epilogue": {"backward": "epilogue", "backward_rank": 8, "schedule": "eager_1f1b"},
    "activations": {"coded": EIGHT},
    "virtual stages": {"backward": "all", "backward_rank": 8, "schedule": "interleaved_1f1b", "chunks": 3},
}


def candidate(schedule="1f1b", chunks=1, **changes):
    counts = (12 // (HOSTS * chunks),) * HOSTS * chunks
    return Candidate(1, HOSTS, 1, 2, 8, schedule, counts, chunks=chunks, **changes)


def slowed(pairs, factor=SLOW):
    """Return hosts of one device, in a row of stages, with slow links between some of them."""
    made = cluster(HOSTS, 1, seed=None)
    samples = made.samples.copy()
    for a, b in pairs:
        samples[:, a, b] *= factor
        samples[:, b, a] *= factor
    return dataclasses.replace(made, samples=samples)


def seconds(nodes, c):
    problem, hosts = Problem(nodes, MODEL, c), np.arange(HOSTS)[None, None]
    return float(problem.step(fabric(nodes), hosts).total[0])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("slow", [[(1, 2)], [(0, 1), (2, 3)], [(0, 1), (1, 2), (2, 3), (3, 0)]], ids=str)
def test_no_fewer_links_would_do(case, slow):
    c, nodes = candidate(**CASES[case]), slowed(slow)
    place = "forward_links" if case == "activations" else "backward_links"
    links, whole = HOSTS - (c.chunks == 1), seconds(nodes, c)
    made, placed = spared(nodes, MODEL, fabric(nodes), c, Placement(np.arange(HOSTS)[None], whole, 0.0, "known", 1))
    enough = [
        some
        for count in range(1, links + 1)
        for some in itertools.combinations(range(links), count)
        if seconds(nodes, dataclasses.replace(c, **{place: some})) <= whole * FREE
    ]
    chosen = getattr(made, place) or tuple(range(links))
    assert chosen in enough
    assert len(chosen) == len(enough[0])
    assert placed.seconds == seconds(nodes, made) <= whole * FREE
    if len(slow) == 1:
        assert chosen == (1,)


def test_what_compresses_nothing_is_left_alone():
    nodes = slowed([(1, 2)])
    for c in (candidate(), dataclasses.replace(candidate(coded=EIGHT), pipe=1, counts=(12,), data=HOSTS)):
        placement = Placement(np.arange(HOSTS).reshape(c.data, c.pipe), 1.0, 0.0, "known", 1)
        made, placed = spared(nodes, MODEL, fabric(nodes), c, placement)
        assert made is c and placed is placement


def test_a_plan_says_where_it_compresses_and_its_run_is_predicted_like_it():
    """Between two sites links are slow: the trainer's configuration compresses there alone."""
    nodes = slowed([(a, b) for a in (0, 1) for b in (2, 3)], SLOW / 10)
    config = paxtrain.load_config(
        "tiny",
        {"model.layers": 8, "model.hidden": 256, "model.sequence": 256, "compress.forward.codec": "int8"}
        | {"compress.backward.codec": "int4", "batch.global_batch": 16},
    )
    options = planner.PlanOptions(
        compress=("all",), pipe=(4,), tensor=(1,), schedules=("1f1b",), memory_margin=False, nearby=False, oracle="no"
    )
    made = planner.plan(config, nodes, options)
    chosen = made.ranked[0].candidate
    assert chosen.backward == "all"
    [hosts] = made.ranked[0].hosts
    crosses = tuple(np.flatnonzero(np.diff(hosts >= 2)).tolist())
    assert chosen.backward_links == chosen.forward_links == crosses
    trained = made.plan.apply(to_dict(config))
    assert trained.compress.backward.on(3) == chosen.backward_links
    assert trained.compress.forward.on(3) == chosen.forward_links
    assert simulate(trained, nodes, made.ranked[0].hosts).seconds == pytest.approx(made.ranked[0].seconds, rel=1e-9)
