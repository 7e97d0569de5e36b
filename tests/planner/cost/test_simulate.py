"""A simulated configuration is the candidate that the search would evaluate."""

import dataclasses

import numpy as np
import pytest

import paxtrain
import planner
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem, host_order
from tests.planner.examples import cluster

SMALL = {"model.layers": 8, "model.hidden": 64, "model.heads": 4, "mesh.pipe": 4, "mesh.tensor": 1, "mesh.data": 2}


@pytest.mark.parametrize("compress", [{}, {"compress.backward": "epilogue", "compress.data": "all"}])
def test_it_is_the_problems_step(compress):
    config, some = paxtrain.load_config("tiny", SMALL | compress), cluster(2, 4)
    step = planner.simulate(config, some)
    candidate = planner.Candidate(
        2,
        4,
        1,
        4,
        4,
        "eager_1f1b",
        (2, 2, 2, 2),
        backward=config.compress.backward,
        backward_rank=config.compress.backward_rank,
        data_rank=config.compress.data_rank if compress else 0,
    )
    expected = Problem(some, config.model, candidate).step(fabric(some), host_order(candidate, 4))
    assert step.seconds == expected.total[0] > 0
    np.testing.assert_array_equal(step.finish, expected.finish[0])
    np.testing.assert_array_equal(step.hosts, host_order(candidate, 4)[0])
    assert step.gather.shape == step.reduce.shape == step.compressed.shape == (4,)


def test_slow_links_between_the_stages_show():
    config, some = paxtrain.load_config("tiny", SMALL), cluster(2, 4, seed=None)
    apart = np.array([[0, 1, 0, 1], [0, 1, 0, 1]])
    slow = dataclasses.replace(some, samples=some.samples / 1000)
    assert planner.simulate(config, slow, apart).seconds > planner.simulate(config, slow).seconds


@pytest.mark.parametrize(
    ("changes", "hosts", "words"),
    [
        ({"mesh.tensor": 8, "mesh.pipe": 1, "mesh.data": 1, "model.heads": 8}, None, "does not divide the 4 devices"),
        ({"mesh.data": 8}, None, "the mesh has 32 devices, but the cluster 8"),
        ({}, np.zeros((4, 2)), "hosts must be an array"),
        ({}, np.full((2, 4), 2), "numbers below 2"),
    ],
)
def test_what_does_not_fit_is_said(changes, hosts, words):
    with pytest.raises(ValueError, match=words):
        planner.simulate(paxtrain.load_config("tiny", SMALL | changes), cluster(2, 4), hosts)
