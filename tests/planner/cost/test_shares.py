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
KINDS = ["a100-80gb", "v100", "a100-80gb", "v100"]
MIXED = cluster(4, 1, seed=None, device=KINDS)
SHAPE = {"tensor": 1, "save": "dots", "hidden": 2048, "heads": 16, "sequence": 1024, "vocab": 8064, "dtype": "bfloat16"}
# Measured seconds of two sequences, by kind; a V100 takes twice as long as an A100.
MEASURED = [
    {"kind": kind, "micro_batch": 2, **SHAPE, "optimizer": 1e-9}
    | {"forward": 1.0 * slow, "backward": 2.0 * slow, "head": 0.5 * slow, "embedding": 0.1 * slow}
    for kind, slow in (("a100-80gb", 1), ("v100", 2))
]


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
    """A micro-batch takes 4 x 3 + 0.5 + 0.1 s on an A100. Of 32, 11 end there after 138.6 s, and 5 on a V100 after 126.

    With equal numbers the V100s take 8 x 25.2 seconds.
    """
    some = cluster(4, 1, seed=None, device=KINDS, compute=MEASURED)
    hosts, fabric = np.arange(4).reshape(1, 4, 1), link_seconds.fabric(some)
    equal = Problem(some, MODEL, Candidate(4, 1, 1, 2, 8, "1f1b", (4,)))
    [(uneven, where)] = by_speed(equal, hosts)
    assert where.tolist() == [0] and uneven.candidate.data_micro_batches == (11, 5, 11, 5)
    weights = 4 * (12 * 2048**2 + 13 * 2048) + 8064 * 2048
    gather = 3 * 1e-5 + 3 / 4 * weights * 2 / 25e9
    for problem, seconds in ((uneven, 138.6), (equal, 201.6)):
        step = problem.step(fabric, hosts)
        assert step.gather[0, 0] == pytest.approx(gather, rel=1e-9)
        assert step.finish[0, 0] == pytest.approx(gather + seconds, rel=1e-9)


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
