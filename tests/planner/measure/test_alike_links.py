"""Links that are alike: noise that repeats show is taken out of them, and true differences stay."""

import numpy as np
import pytest

from planner.measure.alike_links import pooled

HOSTS, OFF = 8, ~np.eye(8, dtype=bool)


def measured(true: np.ndarray, noise: float, repeats: int, seed: int = 0) -> np.ndarray:
    """Return [R, H, H] rates with normal noise in their logarithms."""
    rng = np.random.default_rng(seed)
    return true * np.exp(rng.normal(0, noise, (repeats, *true.shape)))


def errors(samples: np.ndarray, true: np.ndarray) -> np.ndarray:
    """Return the relative errors of the medians of links between hosts."""
    return np.median(samples, axis=0)[OFF] / true[OFF] - 1


def two_rates() -> np.ndarray:
    """Return rates of hosts in two racks: 100 inside, 20 between."""
    rack = np.arange(HOSTS) // 4
    return np.where(rack[:, None] == rack, 1e8, 2e7)


@pytest.mark.parametrize("true", [np.full((HOSTS, HOSTS), 6e7), two_rates()], ids=["equal", "two racks"])
@pytest.mark.parametrize("repeats", [2, 5])
def test_links_that_are_alike_lose_most_of_their_noise(true, repeats):
    spread = [[], []]
    for seed in range(10):
        samples = measured(true, 0.01, repeats, seed)
        for found, some in zip(spread, (samples, pooled(samples))):
            found.append(errors(some, true).std())
    assert np.mean(spread[1]) < 0.4 * np.mean(spread[0])


def test_links_that_differ_stay_as_they_are():
    """Rates from 20 to 200 in no groups; and two groups 3% apart, where a single mean would be off by 1.5%."""
    true = np.exp(np.random.default_rng(1).uniform(np.log(2e7), np.log(2e8), (HOSTS, HOSTS)))
    samples = measured(true, 0.005, 3)
    moved = np.median(pooled(samples), axis=0)[OFF] / np.median(samples, axis=0)[OFF] - 1
    assert np.abs(moved).max() < 4 * 0.005
    assert np.sqrt((errors(pooled(samples), true) ** 2).mean()) < 1.05 * np.sqrt((errors(samples, true) ** 2).mean())
    near = np.where(two_rates() > 5e7, 1.03e8, 1e8)
    assert np.abs(errors(pooled(measured(near, 0.003, 3)), near)).max() < 0.005


def test_a_link_with_one_bad_repeat_follows_those_that_it_may_be_like():
    true = two_rates()
    samples = measured(true, 0.004, 2)
    samples[1, 0, 1] *= 0.7  # late once: its median is 15% low
    found = pooled(samples)
    assert errors(samples, true).min() < -0.1
    assert np.abs(errors(found, true)).max() < 0.02
    # Its repeats still differ as they did, for placements that are to be robust.
    assert found[1, 0, 1] / found[0, 0, 1] == pytest.approx(samples[1, 0, 1] / samples[0, 0, 1])


def test_a_slow_link_that_is_slow_each_time_stays_slow():
    true = np.full((HOSTS, HOSTS), 1e8)
    true[2, 5] = 9e7
    assert np.median(pooled(measured(true, 0.004, 3)), axis=0)[2, 5] == pytest.approx(9e7, rel=0.02)


def test_what_is_unknown_or_unrepeated_is_left_alone():
    samples = measured(two_rates(), 0.01, 3)
    samples[:, 3, 4] = np.nan
    samples[1:, 4, 3] = np.nan
    found = pooled(samples)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(samples))
    np.testing.assert_array_equal(found[:, ~OFF], samples[:, ~OFF])  # inside hosts
    np.testing.assert_array_equal(pooled(samples[:1]), samples[:1])  # one repeat shows no noise
    exact = np.broadcast_to(two_rates(), (3, HOSTS, HOSTS))
    np.testing.assert_allclose(pooled(exact), exact, rtol=1e-12)
    one = np.full((2, 1, 1), 1e12)
    np.testing.assert_array_equal(pooled(one), one)
