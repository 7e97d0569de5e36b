"""Linear functions that were learned from some pipelines give the times of others, and are never above them."""

import numpy as np
import pytest

from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric, paths
from planner.cost.step_time import Problem
from planner.pipeline import simulator
from planner.placement.surrogate import Surrogate
from tests.planner.examples import MODEL, cluster, placements

MIXED = ["a100-80gb", "h100", "a100-80gb", "h100"]


def problem(schedule: str, chunks: int = 1, **changes) -> Problem:
    counts = (3, 3, 3, 3) if chunks == 1 else (2, 2, 2, 2, 1, 1, 1, 1)
    return Problem(cluster(4, 4, **changes), MODEL, Candidate(4, 4, 1, 2, 16, schedule, counts, chunks=chunks))


def pipelines(made: Problem, hosts: np.ndarray) -> tuple[simulator.Seconds, np.ndarray]:
    """Return the durations of all pipelines of some placements, and their replayed times."""
    seconds = made.seconds(made.links(paths(fabric(made.cluster), hosts, 1)), made.kind_of_host[hosts])
    return seconds, simulator.pipeline(made.table, seconds, made.overlap)


@pytest.mark.parametrize("changes", [{}, {"device": MIXED}], ids=["one kind", "two kinds"])
@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("eager_1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2)]
)
def test_times_are_those_of_a_replay(schedule, chunks, changes):
    made = problem(schedule, chunks, **changes)
    one = Surrogate(made)
    learned, true = pipelines(made, placements(60, 4, 4, 4))
    for _ in range(12):
        one.learn(learned)
    np.testing.assert_allclose(one.times(learned), true, rtol=1.5e-3)
    others, true = pipelines(made, placements(40, 4, 4, 4, seed=1))
    found = one.times(others)
    assert (found <= true * (1 + 1e-9)).all()
    assert np.mean(1 - found / true) < 1e-2


def test_few_pipelines_do_not_tell_of_slow_links():
    """Negative control: functions that were learned where all links are fast are too low where one is slow."""
    made = problem("1f1b")
    one = Surrogate(made)
    hosts = placements(1, 4, 4, 4)
    seconds, _ = pipelines(made, np.zeros_like(hosts))
    one.learn(seconds)
    others, true = pipelines(made, hosts)
    before = float(np.max(1 - one.times(others) / true))
    one.learn(others)
    assert before > 0.01 > float(np.max(1 - one.times(others) / true))
