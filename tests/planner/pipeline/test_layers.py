"""The split of layers is the best of all, by trying all."""

import itertools

import numpy as np
import pytest

from planner.pipeline import layers


@pytest.mark.parametrize("seed", range(30))
def test_no_other_split_has_a_quicker_slowest_stage(seed):
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(1, 5)), int(rng.integers(5, 12))
    unit, extra = rng.choice([1.0, 1.5, 2.0], stages), rng.choice([0.0, 0.7, 3.0], stages)
    found = layers.split(count, unit, extra)
    every = [c for c in itertools.product(range(1, count + 1), repeat=stages) if sum(c) == count]
    slowest = lambda c: max(unit * np.array(c) + extra)  # noqa: E731
    best = min(map(slowest, every))
    assert sum(found) == count and min(found) >= 1
    assert slowest(found) == pytest.approx(best)
    fullest = min(max(c) for c in every if slowest(c) <= best * (1 + 1e-9))
    assert max(found) == fullest


def test_a_heavy_head_takes_layers_off_the_last_stage():
    assert layers.split(16, np.ones(4), np.array([0, 0, 0, 3.0])) == (5, 5, 4, 2)
    assert layers.split(16, np.ones(4), np.zeros(4)) == layers.even(16, 4) == (4, 4, 4, 4)
    assert layers.even(10, 4) == (3, 3, 2, 2)
