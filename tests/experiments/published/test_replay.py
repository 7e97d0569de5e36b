"""Replays of chosen runs: tuners on made-up layouts, whose best is known, and choices by constants that runs teach."""

import dataclasses

import numpy as np
import pytest

from experiments.published import replay
from planner.fit.constants import CONSTANTS
from planner.fit.trial_steps import TrialSteps
from planner.runs import trials
from tests import mains
from tests.experiments.published.test_ceiling import ROW


def layouts(hosts: int, **untypical: float) -> list[trials.Trial]:
    """Return layouts on some hosts, with the seconds that typical constants and some others give."""
    devices = 8 * hosts
    rows = [
        {
            **ROW,
            "trainer": "maxtext",
            "devices": devices,
            "tp": tp,
            "pp": pp,
            "dp": devices // (tp * pp),
            "micro_batch": size,
        }
        for tp in (1, 2, 4)
        for pp in (1, 2, 4)
        for size in (1, 2)
        if tp * pp <= devices
    ]
    found = [trials.parse({name: str(value) for name, value in row.items()}) for row in rows]
    values = [untypical.get(c.name, c.typical) for c in CONSTANTS]
    constants = np.broadcast_to(values, (1, len(found), len(CONSTANTS)))
    slots = np.ones((1, len(found), 1))
    seconds = TrialSteps(found).seconds(constants, slots, slots)[0]
    return [dataclasses.replace(run, seconds=float(x)) for run, x in zip(found, seconds)]


def test_tuners_find_the_best_once_they_have_run_all():
    plans = layouts(4)
    random = np.random.default_rng(0)
    for tuner in ("random", "grid", "bayesian"):
        none, few, _, every = replay.tuned(plans, tuner, random)
        assert np.isnan(none) and few >= every == 0  # 18 layouts, 25 runs


def test_expected_improvement_is_that_of_the_process():
    """Close to a known place there is nothing to gain; far from all, what a normal variable gains in the mean."""
    known, values = np.array([[0.0], [1.0]]), np.array([1.0, 3.0])
    found = replay.improvement(known, values, np.array([[1.0], [50.0]]))
    draws = np.random.default_rng(0).normal(size=1_000_000)
    far = np.maximum(1.0 - (2.0 + 1.0 * draws), 0).mean()  # mean 2, deviation 1, least value 1
    assert found[0] < 1e-3 and found[1] == pytest.approx(far, rel=0.01)


def _first(_, __, left, ___, number):
    return list(range(min(number, len(left))))


def test_runs_on_few_hosts_choose_among_all_layouts():
    """A trainer whose messages and launches take long is wrongly believed to be typical, until it is seen."""
    odd = {"layer_launch": 5e-3, "hop_ratio": 4.0, "message_seconds": 5e-3}
    plans, runs = layouts(4, **odd), layouts(1, **odd)
    none, *_, every = replay.by_model(plans, runs, _first)
    assert none > 0.05 > every >= 0
    assert replay.by_model(layouts(4), runs, lambda *_: [])[-1] == 0  # typical ones need no run


def test_it_wants_runs(monkeypatch, capsys, tmp_path):
    module = mains.load("experiments.published.replay")
    assert mains.run(monkeypatch, module) == 2 and "--trials" in capsys.readouterr().err
    trials.write(tmp_path / "some.csv", [{**ROW, "seconds": "1"}])
    assert mains.run(monkeypatch, module, f"--trials={tmp_path / 'some.csv'}", "--hosts=3") == 2
    assert "--hosts=3" in capsys.readouterr().err
