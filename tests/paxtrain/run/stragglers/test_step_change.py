"""The seconds of steps: a rise by a fifth is noticed within 20 steps, and noise, outliers and pauses are not."""

import numpy as np
import pytest

from paxtrain.run.stragglers.step_change import FIRST, StepWatch


def noise(steps, sigma, seed=0, spikes=0.02, memory=0.0):
    """Return seconds around 1 as the lab's are: log-normal, some steps much slower, and neighbors alike."""
    random = np.random.default_rng(seed)
    each = random.normal(0, sigma * np.sqrt(1 - memory**2), steps)
    for i in range(1, steps):
        each[i] += memory * each[i - 1]
    return np.exp(each) * np.where(random.random(steps) < spikes, random.uniform(1.5, 4, steps), 1)


def changes(seconds, kinds=None):
    watch = StepWatch()
    found = [(i, watch.add(value, kinds[i] if kinds is not None else None)) for i, value in enumerate(seconds)]
    return [(i, change) for i, change in found if change]


@pytest.mark.parametrize("sigma", [0.005, 0.03, 0.06])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("began", [FIRST, 35, 400])
def test_a_rise_by_a_fifth_is_noticed_within_20_steps(sigma, seed, began):
    seconds = noise(began + 40, sigma, seed)
    seconds[began:] *= 1.2
    (step, change), *_ = changes(seconds)
    assert began + 2 <= step < began + 17  # which leaves time to look for the reason
    assert change.before == pytest.approx(1, rel=0.06) and change.now == pytest.approx(1.2, rel=0.12)
    assert change.steps == pytest.approx(step + 1 - began, abs=6) and change.slower > 0.08


@pytest.mark.parametrize("sigma", [0.005, 0.03, 0.08])
def test_noise_alone_is_no_change_in_10_000_steps(sigma):
    assert changes(noise(10_000, sigma, seed=1)) == []
    assert changes(noise(10_000, sigma, seed=2, memory=0.3)) == []


def test_what_is_made_faster_is_noticed_too():
    seconds = noise(100, 0.03)
    seconds[60:] *= 0.8
    [(step, change)] = changes(seconds)
    assert 60 < step < 80 and change.slower == pytest.approx(-0.2, abs=0.05)


def test_one_slow_step_is_no_straggler_and_neither_is_a_pause_of_a_few():
    for slow in (1, 3):
        seconds = noise(200, 0.03, spikes=0)
        seconds[100 : 100 + slow] = 1000.0
        assert changes(seconds) == []


def test_a_slow_step_at_every_checkpoint_is_usual():
    seconds = noise(1000, 0.03, spikes=0)
    seconds[::5] *= 3
    assert changes(seconds) == []


def test_a_drift_is_noticed_before_it_has_grown_to_a_fifth():
    seconds = noise(3000, 0.03, spikes=0) * np.exp(np.linspace(0, 0.5, 3000))
    (step, change), *_ = changes(seconds)
    assert 0.04 < 0.5 * step / 3000 < 0.2 and change.slower > 0.04


def test_after_a_change_the_new_seconds_are_usual():
    seconds = noise(300, 0.03)
    seconds[100:] *= 1.5
    seconds[200:] /= 1.5
    (_, up), (_, down) = changes(seconds)
    assert up.now == pytest.approx(1.5, rel=0.05)
    assert down.before == pytest.approx(1.5, rel=0.05) and down.now == pytest.approx(1, rel=0.05)


def test_steps_are_compared_with_those_of_their_kind():
    kinds = np.arange(600) % 3 == 0
    seconds = noise(600, 0.03) * np.where(kinds, 2.0, 1.0)
    assert changes(seconds, kinds) == []
    seconds[300:] *= 1.2
    [(step, _), *_] = changes(seconds, kinds)
    assert 300 < step < 320
