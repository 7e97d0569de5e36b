"""The noise of twins and what a perfect model could reach, on made-up runs whose noise is known."""

import dataclasses

import numpy as np
import pytest

from experiments.published import ceiling
from paxtrain.errors import UserError
from planner.fit.calibration import Predictions
from planner.runs import trials
from tests import mains

ROW = dict.fromkeys(trials.COLUMNS, "") | {
    **{"cluster": "c", "devices": "64", "devices_per_host": "8", "device_kinds": "H100", "hidden": "1024"},
    **{"heads": "16", "layers": "16", "seq": "1024", "vocab": "1000", "global_batch": "256", "micro_batch": "1"},
    **{"tp": "1", "dp": "64", "pp": "1", "recompute": "none", "dtype": "bf16", "trainer": "nanotron"},
}


def runs(count: int, noise: float, stalled: float = 0.0) -> tuple[list, Predictions, np.ndarray]:
    """Return pairs of runs that differ only in sharding, their predictions and what they take."""
    random = np.random.default_rng(0)
    made = [
        trials.parse({**ROW, "seq": str(1024 + 8 * i), "sharding": sharding})
        for i in range(count)
        for sharding in ("none", "zero1")
    ]
    plain = random.uniform(1, 2.5, 2 * count)
    found = Predictions(plain, 20 * plain, np.full(2 * count, stalled), np.full(2 * count, noise))
    seconds = plain * np.exp(noise * random.normal(size=2 * count))
    return [dataclasses.replace(run, seconds=float(x)) for run, x in zip(made, seconds)], found, seconds


def test_the_noise_of_twins_is_theirs_without_what_they_have_in_common():
    some, found, seconds = runs(400, 0.05)
    common = np.repeat(np.exp(0.3 * np.random.default_rng(1).normal(size=400)), 2)
    off = [dataclasses.replace(run, seconds=float(x)) for run, x in zip(some, seconds * common)]
    for measured in (some, off):
        noise, pairs = ceiling.noise_of_twins(measured, found)
        assert noise == pytest.approx(0.05, rel=0.1) and pairs == 400
    slow = [dataclasses.replace(run, seconds=20 * run.seconds) if i < 100 else run for i, run in enumerate(some)]
    noise, pairs = ceiling.noise_of_twins(slow, found)  # pairs that have stalled say nothing
    assert noise == pytest.approx(0.05, rel=0.1) and pairs == 350
    with pytest.raises(UserError, match="differ only in sharding"):
        ceiling.noise_of_twins(some[::2], Predictions(*(x[::2] for x in dataclasses.astuple(found))))


def test_runs_are_drawn_as_the_model_says():
    _, found, _ = runs(4000, 0.05, stalled=0.25)
    seconds = ceiling.drawn(found, 0.05, np.random.default_rng(2))
    late = seconds > 4 * found.plain
    assert late.mean() == pytest.approx(0.25, abs=0.02)
    assert np.median(np.abs(np.log(seconds / found.plain))[~late]) == pytest.approx(0.05 * 0.727, rel=0.1)  # t of 5
    np.testing.assert_array_equal(
        ceiling.drawn(dataclasses.replace(found, probability=0 * late), 0.0, np.random.default_rng(2)), found.plain
    )


def test_a_perfect_model_orders_and_chooses_rightly_and_another_one_does_not():
    some, found, _ = runs(50, 0.0)
    assert ceiling.in_groups(some, found.plain, found.plain) == pytest.approx(1)
    assert ceiling.in_groups(some, -found.plain, found.plain) == pytest.approx(-1)
    assert ceiling.regrets(some, found.plain, found.plain) == {8: 0.0}
    worst = ceiling.regrets(some, -found.plain, found.plain)
    assert worst == {8: pytest.approx(found.plain.max() / found.plain.min() - 1)}
    far = np.where(np.arange(100) < 50, found.plain, 100 * found.plain)  # rows that nobody would choose are not read
    assert ceiling.in_groups(some, np.where(far < 50, far, 200 - far), far) == pytest.approx(1)


def test_it_wants_runs(monkeypatch, capsys):
    assert mains.run(monkeypatch, mains.load("experiments.published.ceiling")) == 2
    assert "--trials" in capsys.readouterr().err
