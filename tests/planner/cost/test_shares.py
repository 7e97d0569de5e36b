"""Micro-batches of data ranks by speed: the best numbers against all of them, and steps against closed forms."""

import dataclasses
import itertools

import numpy as np
import pytest

from paxtrain.config import BatchConfig, CompressConfig, Config, MeshConfig, ModelConfig, PipelineConfig
from planner.cost import link_seconds
from planner.cost.candidate import Candidate
from planner.cost.shares import by_speed, shares
from planner.cost.simulate import simulate
from planner.cost.step_time import Problem, steps
from tests.planner.examples import cluster

MODEL = ModelConfig(vocab_size=8000, layers=4, hidden=2048, heads=16, sequence=1024)
MIXED = cluster(4, 1, seed=None, device=["a100-80gb", "v100", "a100-80gb", "v100"])


def every(total: int, ranks: int) -> list[tuple[int, ...]]:
    cuts = itertools.combinations(range(1, total), ranks - 1)
    return [tuple(np.diff([0, *some, total]).tolist()) for some in cuts]


@pytest.mark.parametrize("seed", range(20))
def test_no_other_numbers_end_sooner(seed):
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 5))
    total = int(rng.integers(ranks, 14))
    unit, extra = rng.choice([0.5, 1.0, 1.7, 4.0], (2, ranks)), rng.uniform(0, 3, (2, ranks))
    found = shares(total, unit, extra)
    assert (found.sum(axis=1) == total).all() and found.min() >= 1
    least = np.min([(np.array(some) * unit + extra).max(axis=1) for some in every(total, ranks)], axis=0)
    np.testing.assert_allclose((found * unit + extra).max(axis=1), least, rtol=1e-6)


def test_ranks_that_are_alike_get_equal_numbers():
    alike = np.ones((1, 6))
    assert shares(30, alike, alike).tolist() == [[5] * 6]
    candidate = Candidate(4, 1, 1, 1, 6, "1f1b", (4,))
    same = cluster(4, 1, seed=None)
    assert by_speed(Problem(same, MODEL, candidate), np.arange(4).reshape(1, 4, 1)) == []


def test_without_stages_a_rank_takes_its_micro_batches_one_after_the_other():
    """Hosts 0 and 2 are A100s, the others V100s; the gradients' reduction is the same with equal numbers."""
    hosts, fabric = np.arange(4).reshape(1, 4, 1), link_seconds.fabric(MIXED)
    equal = Problem(MIXED, MODEL, Candidate(4, 1, 1, 2, 8, "1f1b", (4,)))
    [(uneven, where)] = by_speed(equal, hosts)
    ranks = np.array(uneven.candidate.data_micro_batches)
    assert where.tolist() == [0] and ranks.sum() == 32 and ranks[0] == ranks[2] > 1.5 * ranks[1]
    found, before = (problem.step(fabric, hosts) for problem in (uneven, equal))
    one = np.array([x.forward + x.backward for x in equal.layer]) * 4 + equal.head
    one += np.array([x.embedding for x in equal.layer])
    kinds = equal.kind_of_host[hosts[0, :, 0]]
    alone = found.gather[0, 0] + (ranks * one[kinds]).max()
    assert found.finish[0, 0] == pytest.approx(alone, rel=1e-9)
    assert found.finish[0, 0] < 0.8 * before.finish[0, 0]
    assert found.gather[0, 0] == before.gather[0, 0]


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b", "gpipe"])
def test_each_pipeline_takes_the_time_of_its_own_numbers(schedule):
    """Without links' time a pipeline of n micro-batches takes what it takes in a mesh where all have n."""
    quick = dataclasses.replace(MIXED, alpha=0 * MIXED.alpha, samples=1e9 * MIXED.samples)
    hosts, fabric = np.array([[[0, 2], [1, 3]]]), link_seconds.fabric(quick)
    split = Candidate(2, 2, 1, 1, 9, schedule, (2, 2), data_micro_batches=(9, 3))
    both = Problem(quick, MODEL, split)

    def ends(problem: Problem) -> np.ndarray:
        return problem.pipelines(problem.seconds(problem.links(problem.paths(fabric, hosts)), kinds)).max(axis=1)

    kinds = both.kind_of_host[hosts]
    alone = []
    for rank, count in enumerate(split.data_micro_batches):
        table = dataclasses.replace(both.table, micro_batches=count)  # idle stages skip here, too
        one = Problem(quick, MODEL, dataclasses.replace(split, data_micro_batches=(), micro_batches=count))
        one.table = table
        alone.append(ends(one)[rank])
    np.testing.assert_allclose(ends(both), alone, rtol=1e-6)
    [again] = steps([both], [(both.paths(fabric, hosts), kinds)])
    assert again.total[0] == both.step(fabric, hosts).total[0]


def test_a_configuration_with_uneven_ranks_is_simulated_so():
    config = Config(
        model=MODEL,
        mesh=MeshConfig(data=4),
        pipeline=PipelineConfig(),
        batch=BatchConfig(32, 1, "12,4,12,4"),
        compress=CompressConfig(),
    )
    equal = dataclasses.replace(config, batch=BatchConfig(32, 1))
    swapped = dataclasses.replace(config, batch=BatchConfig(32, 1, "4,12,4,12"))
    right, even, wrong = (simulate(c, MIXED).seconds for c in (config, equal, swapped))
    assert right < even < wrong
