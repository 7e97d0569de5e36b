"""Fits of links: a line through exact times, and links that follow the model of the fit, which knows its own error."""

import numpy as np
import pytest

from planner.cluster.link_fit import fill, fit_line, multiplicative
from planner.measure.link_timing import sampled, tournament

MIB = 1 << 20


def synthetic(hosts: int, racks: np.ndarray, noise: float, seed: int = 0) -> np.ndarray:
    """Return bandwidths [H, H] in bytes/s with slow senders, slow receivers and slow pairs of racks.

    Args:
        hosts: number of hosts H.
        racks: [H] rack of each host.
        noise: standard deviation of the bandwidths' logarithms beyond these factors.
        seed: seed of the factors and the noise.
    """
    rng = np.random.default_rng(seed)
    sender, receiver = rng.normal(0, 0.15, (2, hosts))
    pairs = rng.normal(0, 0.2, (racks.max() + 1,) * 2)
    logs = sender[:, None] + receiver[None] + pairs[racks[:, None], racks[None]] + rng.normal(0, noise, (hosts, hosts))
    speeds = 2.5e10 * np.exp(logs)
    np.fill_diagonal(speeds, 3e11)
    return speeds


def seen(hosts: int, rounds: int) -> np.ndarray:
    """Return which links [H, H] a sample of the rounds measures."""
    known = np.zeros((hosts, hosts), bool)
    for pairs in sampled(tournament(hosts), rounds):
        for a, b in pairs:
            known[a, b] = known[b, a] = True
    return known


@pytest.mark.parametrize(("noise", "worst"), [(0.0, 0.02), (0.03, 0.035)])
def test_held_out_links_are_predicted(noise, worst):
    racks = np.arange(128) // 16
    speeds = synthetic(128, racks, noise)
    known = seen(128, 24)
    off = ~np.eye(128, dtype=bool)
    samples = np.where(known, speeds, np.nan)[None]
    filled = fill(np.where(known, 1e-5, np.nan), samples, racks)
    assert (filled.measured == known).all()
    np.testing.assert_array_equal(filled.samples[0][known], speeds[known])  # measured samples are kept
    hidden = ~known & off
    error = np.abs(filled.samples[0] / speeds - 1)[hidden]
    assert np.median(error) < worst
    # Without the factors of senders, receivers and racks the error is much larger (negative control).
    assert np.median(np.abs(np.median(speeds[known]) / speeds - 1)[hidden]) > 0.12
    # The estimated error is close to the true one.
    assert 0.5 * np.median(error) <= filled.error <= 2 * np.median(error)
    np.testing.assert_allclose(filled.alpha[hidden], 1e-5)


def test_without_racks_rack_factors_cannot_be_known():
    racks = np.arange(96) // 12
    speeds, known = synthetic(96, racks, 0.0), seen(96, 24)
    values = np.where(known, 1 / speeds, np.nan)
    hidden = ~known & ~np.eye(96, dtype=bool)

    def error(racks: np.ndarray) -> float:
        return np.median(np.abs(multiplicative(values, racks) * speeds - 1)[hidden])

    assert error(racks) < 0.03 < error(np.zeros(96, int))


def test_a_host_hardly_seen_keeps_to_the_mean():
    values = np.full((6, 6), np.nan)
    values[0, 1] = values[1, 2] = values[2, 3] = values[3, 0] = 1.0
    values[4, 0] = 100.0
    found = multiplicative(values, np.zeros(6, int))
    assert found[4, 1] > 2 * found[0, 2]
    assert found[4, 1] < 100
    assert np.isfinite(found).all()


def test_a_repeat_without_a_link_takes_its_other_repeats():
    samples = np.full((3, 2, 2), 8.0)
    samples[1, 0, 1] = np.nan
    samples[2] = np.nan
    samples[0, 0, 1] = 6.0
    filled = fill(np.full((2, 2), 1e-5), samples, [0, 0])
    assert filled.samples.shape == (2, 2, 2)  # the third repeat has no sample
    assert filled.samples[1, 0, 1] == pytest.approx(6.0)
    assert filled.measured.all()
    assert np.isnan(filled.error)


def test_one_device_per_host_has_the_quickest_link_for_its_inside():
    samples = np.array([[[np.nan, 2.0], [4.0, np.nan]]])
    filled = fill(np.array([[np.nan, 3e-5], [2e-5, np.nan]]), samples, [0, 0])
    np.testing.assert_array_equal(np.diag(filled.samples[0]), [4.0, 4.0])
    np.testing.assert_array_equal(np.diag(filled.alpha), [2e-5, 2e-5])
    assert not filled.measured.diagonal().any()


def test_a_thousand_hosts_take_a_moment():
    known = seen(1024, 32)
    samples = np.where(known, synthetic(1024, np.arange(1024) // 32, 0.02), np.nan)[None]
    filled = fill(np.where(known, 1e-5, np.nan), samples, np.arange(1024) // 32)
    assert np.isfinite(filled.samples).all()
    assert filled.error < 0.03


def test_a_line_through_exact_times_is_exact():
    sizes = np.array([1, 4, 16]) * MIB
    alpha, per_byte = np.array([[0.0, 3e-5], [1e-3, 2e-4]]), np.array([[1e-9, 2e-9], [8e-8, 1e-10]])
    found = fit_line(sizes, alpha[..., None] + per_byte[..., None] * sizes)
    np.testing.assert_allclose(found[0], alpha, atol=1e-12)
    np.testing.assert_allclose(found[1], per_byte, rtol=1e-9)


def test_a_line_is_never_negative():
    sizes = np.array([1.0, 2.0]) * MIB
    alpha, per_byte = fit_line(sizes, np.array([[1e-3, 5e-3], [3e-3, 1e-3]]))  # too steep; falling
    assert (alpha >= 0).all()
    assert (per_byte > 0).all()
    assert fit_line(sizes[:1], np.array([2.0]))[1] == 2.0 / MIB
