"""The split of layers is the best of all, by trying all."""

import itertools

import numpy as np
import pytest

from planner.pipeline import layer_split


@pytest.mark.parametrize("seed", range(30))
def test_no_other_split_has_a_quicker_slowest_stage(seed):
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(1, 5)), int(rng.integers(5, 12))
    unit, extra = rng.choice([1.0, 1.5, 2.0], stages), rng.choice([0.0, 0.7, 3.0], stages)
    found = layer_split.split(count, unit, extra)
    every = [c for c in itertools.product(range(1, count + 1), repeat=stages) if sum(c) == count]
    slowest = lambda c: max(unit * np.array(c) + extra)  # noqa: E731
    best = min(map(slowest, every))
    assert sum(found) == count and min(found) >= 1
    assert slowest(found) == pytest.approx(best)
    fullest = min(max(c) for c in every if slowest(c) <= best * (1 + 1e-9))
    assert max(found) == fullest


def slowest_stage(counts, unit, extra, relative):
    ends = np.cumsum((0, *counts))
    return max(u * relative[a:b].sum() + e for u, a, b, e in zip(unit, ends, ends[1:], extra))


@pytest.mark.parametrize("seed", range(30))
def test_layers_that_differ_are_split_at_best_too(seed):
    """On stages of devices and with extras that differ; layers that are alike are split as well as the other way."""
    rng = np.random.default_rng(seed)
    stages, count = int(rng.integers(1, 5)), int(rng.integers(5, 12))
    how = rng.choice([1.0, 1.5, 2.0], stages), rng.choice([0.0, 0.7, 3.0], stages)
    every = [c for c in itertools.product(range(1, count + 1), repeat=stages) if sum(c) == count]
    for relative in (rng.choice([0.5, 1.0, 2.5], count), np.ones(count)):
        found = layer_split.split(count, *how, relative)
        assert sum(found) == count and min(found) >= 1
        best = min(slowest_stage(counts, *how, relative) for counts in every)
        assert slowest_stage(found, *how, relative) == pytest.approx(best)
    assert slowest_stage(layer_split.split(count, *how), *how, np.ones(count)) == pytest.approx(best)


def test_a_heavy_head_takes_layers_off_the_last_stage():
    assert layer_split.split(16, np.ones(4), np.array([0, 0, 0, 3.0])) == (5, 5, 4, 2)
    assert layer_split.split(16, np.ones(4), np.zeros(4)) == layer_split.even(16, 4) == (4, 4, 4, 4)
    assert layer_split.even(10, 4) == (3, 3, 2, 2)
