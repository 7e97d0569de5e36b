"""What fitted runs leave open: Bayes' rule by another formula, and noise and shares of made-up runs that are known."""

import dataclasses

import numpy as np
import pytest

from experiments.published import posterior, runs
from experiments.published.posterior import Open


def made_up(count: int, noise: float) -> Open:
    """Return runs of ten sources with three constants, whose errors are as the priors and the noise say."""
    random = np.random.default_rng(0)
    slopes, prior = random.normal(size=(count, 3)), np.array([0.2, 0.1, 0.3])
    errors = slopes @ (prior * random.normal(size=3)) + noise * random.normal(size=count)
    names = [(name, "") for name in "abc"]
    return Open(names, slopes, errors, prior, np.arange(count) % 10, np.arange(count) % 2 < 2)


def test_the_posterior_is_that_of_joint_normal_variables():
    some = made_up(12, 0.1)
    mean, covariance = some.posterior(some.fitted, 0.1)
    before = np.diag(some.prior**2)
    gain = before @ some.slopes.T @ np.linalg.inv(some.slopes @ before @ some.slopes.T + 0.01 * np.eye(12))
    np.testing.assert_allclose(mean, gain @ some.errors, rtol=1e-8)
    np.testing.assert_allclose(covariance, before - gain @ some.slopes @ before, rtol=1e-6, atol=1e-12)


def test_the_noise_is_found_again_also_if_constants_are_off():
    for noise in (0.02, 0.08):
        assert made_up(400, noise).noise() == pytest.approx(noise, rel=0.12)
    off = made_up(400, 0.05)
    moved = dataclasses.replace(off, errors=off.errors + off.slopes @ [0.1, -0.1, 0.1])
    assert moved.noise() == pytest.approx(off.noise(), rel=0.05)
    judged = dataclasses.replace(off, fitted=np.arange(400) < 200, errors=np.where(np.arange(400) < 200, off.errors, 9))
    assert judged.noise() == pytest.approx(0.05, rel=0.2)  # the judged half is not read


def test_intervals_of_plans_are_compared_on_published_runs():
    some = [run for run in runs.read() if run.devices <= 64][:6]
    fitted = np.arange(len(some)) % 2 == 0
    found, stated = posterior.open_constants(some, fitted)
    of_backward = found.constants.index(("backward", "megatron-lm"))
    assert np.all(found.slopes[:, of_backward] > 0.2)  # a slower backward makes steps slower
    assert np.all(found.slopes[:, found.constants.index(("matmul", "a100-80gb"))] < -0.5)
    assert np.all(stated < 0.12) and np.all(stated > 0.04)
    lines = posterior.told(some)
    assert any(line.startswith("in 80%, judged: ") for line in lines) and len(lines) > 5
