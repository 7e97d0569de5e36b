"""A predicted step's terms add up, and compute is what the replay's events take."""

import dataclasses

import numpy as np
import pytest

from paxtrain.config import OuterConfig
from paxtrain.config.axes import UNSPLIT
from paxtrain.config.plan import (
    BACKWARD,
    COMPRESSION,
    COMPUTE,
    FORWARD,
    GATHER,
    HEAD,
    HOST,
    OPTIMIZER,
    REDUCE,
    SYNC,
    TRANSFER,
)
from paxtrain.model.parameters import of_mean_layer
from planner.cost import compute as costs
from planner.cost import link_seconds
from planner.cost.candidate import Candidate
from planner.cost.step_time import Problem
from planner.cost.terms import terms
from planner.pipeline import simulator
from tests.planner.examples import MODEL, cluster, placements

CANDIDATES = [
    Candidate(2, 4, 2, 2, 6, "eager_1f1b", (3, 3, 3, 3)),
    Candidate(2, 4, 2, 2, 40, "1f1b", (3, 3, 4, 2), backward="epilogue", data_rank=32),
    Candidate(4, 2, 2, 1, 4, "interleaved_1f1b", (3, 3, 3, 3), chunks=2, shard="none"),
    Candidate(1, 4, 4, 4, 3, "zb_h1", (3, 3, 3, 3), save="dots"),
    Candidate(2, 4, 2, 2, 8, "zb_v", (2, 1, 1, 2, 1, 2, 1, 2), chunks=2),
    Candidate(16, 1, 1, 1, 2, "eager_1f1b", (12,), save="residuals"),
]


def found(candidate: Candidate, some=None):
    some = some or dataclasses.replace(cluster(4, 4), host_seconds=0.03)
    problem = Problem(some, MODEL, candidate)
    hosts = placements(1, candidate.data, candidate.pipe, 4 // candidate.tensor)[0]
    return problem, link_seconds.fabric(some), hosts


@pytest.mark.parametrize("candidate", CANDIDATES, ids=lambda c: f"{c.schedule}-{c.data}x{c.pipe}x{c.tensor}")
def test_terms_add_up_to_the_step_and_compute_is_that_of_the_events(candidate):
    problem, fabric, hosts = found(candidate)
    parts = terms(problem, fabric, hosts)
    assert tuple(sorted(parts)) == tuple(sorted((*COMPUTE, TRANSFER, GATHER, REDUCE, SYNC, OPTIMIZER, HOST)))
    total = problem.step(fabric, hosts[None]).total[0]
    np.testing.assert_allclose(sum(parts.values()), np.full(candidate.pipe, total))
    np.testing.assert_array_equal(parts[HOST], np.full(candidate.pipe, 0.03))
    assert all((x >= -1e-12).all() for x in parts.values())

    links = problem.links(link_seconds.paths(fabric, hosts[None], candidate.tensor))
    seconds = problem.seconds(links, problem.kind_of_host[hosts][None])
    kinds = {"F": FORWARD, "B": BACKWARD, "W": BACKWARD, "H": HEAD}
    busy = {term: np.zeros(candidate.pipe) for term in COMPUTE}
    for d in range(candidate.data):
        fields = {f.name: np.asarray(getattr(seconds, f.name)) for f in dataclasses.fields(seconds)}
        one = simulator.Seconds(**{name: x[d : d + 1] if x.ndim else x for name, x in fields.items()})
        for event in simulator.timeline(problem.table, one, problem.overlap):
            if event.what in kinds:
                busy[kinds[event.what]][event.stage] += (event.end - event.begin) / candidate.data
    for term in (FORWARD, BACKWARD, HEAD):
        np.testing.assert_allclose(parts[term], busy[term], rtol=1e-9, atol=1e-12)
    if candidate.backward == "none":
        assert not parts[COMPRESSION].any()
    else:  # the last gradients are compressed by the stages behind the first, and decoded by those before the last
        assert (parts[COMPRESSION] > 0).all()


@pytest.mark.parametrize("schedule", ["eager_1f1b", "1f1b"])
def test_terms_of_groups_add_up_to_the_slowest_groups_step_without_an_exchange(schedule):
    outer = OuterConfig(every=10, groups=2, fragments=2)
    problem, fabric, hosts = found(Candidate(4, 2, 2, 2, 6, schedule, (6, 6), outer=outer))
    parts, step = terms(problem, fabric, hosts), problem.step(fabric, hosts[None])
    assert (step.outer > 0).all()
    total = step.total[0] - step.outer[0].sum() / 10
    np.testing.assert_allclose(sum(parts.values()), [total, total])
    assert all((x >= -1e-12).all() for x in parts.values())


def test_each_term_by_hand():
    """Equal links and two stages: what one stage computes longer, the other one waits for."""
    some = cluster(1, 4, seed=None)
    problem, fabric, hosts = found(Candidate(2, 2, 1, 2, 4, "gpipe", (6, 6)), some)
    parts = terms(problem, fabric, hosts)
    layer = costs.layer(some, "a100-80gb", MODEL, UNSPLIT, 2, "dots")
    ops = 4 * 6 * (layer.forward + layer.backward)
    compute = sum(parts[term] for term in COMPUTE)
    np.testing.assert_allclose(compute, [ops + 4 * layer.embedding, ops + 4 * layer.head])
    np.testing.assert_allclose(parts[HEAD], [0, 4 * layer.head])
    assert parts[SYNC].min() == 0
    assert all((parts[term] > 0).all() for term in (TRANSFER, GATHER, REDUCE))
    held = 6 * of_mean_layer(MODEL, UNSPLIT) + costs.embedding_parameters(MODEL, UNSPLIT, 2)
    np.testing.assert_allclose(parts[OPTIMIZER], held / 2 * layer.optimizer)
