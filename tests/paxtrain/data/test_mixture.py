"""The quota method: the first n samples of a mixture hold each data set's share of n, rounded down or up."""

import numpy as np
import pytest

from paxtrain.data.mixture import Mixture


def sources(weights, samples):
    mixture = Mixture(weights)
    return np.array([mixture(n)[0] for n in range(samples)])


def largest_stray(chosen, weights):
    """Return the largest distance, in samples, of a data set from its share, over all prefixes."""
    weights = np.array(weights)
    counts = np.cumsum(chosen[:, None] == np.arange(len(weights)), axis=0)
    n = np.arange(1, len(chosen) + 1)[:, None]
    return np.abs(counts * weights.sum() - n * weights).max() / weights.sum()


def random_weights():
    rng = np.random.default_rng(0)
    return [rng.integers(1, 60, rng.integers(1, 13)).tolist() for _ in range(30)]


WEIGHTS = [[7, 2, 1], [999, 1], [1] * 40, [500, *[1] * 30, 70, 69], *random_weights()]


@pytest.mark.parametrize("weights", WEIGHTS, ids=str)
def test_every_prefix_is_within_one_sample_of_the_weights(weights):
    period = sum(weights)
    chosen = sources(weights, 2 * period + 5)
    assert largest_stray(chosen, weights) < 1
    np.testing.assert_array_equal(np.bincount(chosen[:period], minlength=len(weights)), weights)


def test_a_draw_for_each_sample_would_stray():
    weights = [7, 2, 1]
    drawn = np.random.default_rng(0).choice(3, 1000, p=np.array(weights) / 10)
    assert largest_stray(drawn, weights) > 5


@pytest.mark.parametrize("weights", [[7, 2, 1], [1, 1], [3], [13, 31, 2]], ids=str)
def test_each_data_set_gives_its_samples_in_order(weights):
    mixture, period = Mixture(weights), sum(weights)
    pairs = [mixture(n) for n in range(3 * period)]
    for i, weight in enumerate(weights):
        assert [number for chosen, number in pairs if chosen == i] == list(range(3 * weight))
    far = 10**12 * period
    assert [mixture(far + n) for n in range(period)] == [(i, n + 10**12 * weights[i]) for i, n in pairs[:period]]


def test_the_pattern_never_changes_between_versions():
    # As with the order of a single data set, a checkpoint only stores how many samples were consumed.
    assert sources([7, 2, 1], 10).tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 2]
    assert sources([1, 1], 4).tolist() == [0, 1, 0, 1]
