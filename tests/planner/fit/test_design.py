"""Which runs teach most: beliefs against sums by hand, and proposals against chance on made-up clusters."""

import dataclasses

import numpy as np
import pytest

import paxtrain
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from planner.fit import design, fitting
from planner.fit.constants import CONSTANTS, NAMES
from planner.fit.layouts import layouts
from planner.fit.proposals import proposals
from planner.fit.trial_steps import TrialSteps
from planner.runs.trainers import TRAINERS


def _two(noise=0.1):
    """Return two plans as good as each other by what is believed: a value decides between them, which one run shows."""
    of_plans = np.array([[0.2, 0.0], [-0.2, 0.0]])
    of_runs = np.array([[1.0, 0.0], [0.0, 1.0]])
    return design.Belief(np.zeros(2), np.eye(2), of_plans, of_runs, np.full(2, noise))


def test_a_run_is_worth_what_it_lowers_the_regret_by():
    now, after = _two(noise=1e-6).regrets()
    draws = np.random.default_rng(1).normal(size=1_000_000)  # of the value, which makes 0.4 of a logarithm between them
    expected = np.mean(np.maximum(np.expm1(0.4 * draws), 0))
    assert now == pytest.approx(expected, rel=0.25)
    assert after[0] == pytest.approx(0, abs=1e-6) and after[1] == pytest.approx(now, rel=1e-9)
    loud = _two(noise=3.0).regrets()[1]
    assert after[0] < loud[0] < now


def test_a_result_narrows_what_is_believed_as_it_should():
    """The covariance after a run is that of Bayes' rule for normal variables."""
    random = np.random.default_rng(2)
    factor, slopes = random.normal(size=(5, 5)), random.normal(size=(3, 5))
    found = design.Belief(np.zeros(1), factor, np.zeros((1, 5)), slopes, np.array([0.3, 0.5, 0.7])).after(1)
    before, slope = factor @ factor.T, slopes[1]
    expected = np.linalg.inv(np.linalg.inv(before) + np.outer(slope, slope) / 0.5**2)
    np.testing.assert_allclose(found.factor @ found.factor.T, expected, rtol=1e-9)


def test_proposals_end_when_more_would_not_pay():
    first, *more = design.propose(_two(), np.ones(2), 2)
    assert first.run == 0 and first.after < first.before and [one.run for one in more] in ([], [1])
    # A hundred times the cost is too much for it, if another run says half as much.
    both = dataclasses.replace(_two(), of_runs=np.array([[1.0, 0.0], [0.5, 0.5]]))
    assert design.propose(both, np.array([100.0, 1.0]), 1)[0].run == 1
    sure = dataclasses.replace(_two(), plans=np.array([0.0, 3.0]))
    assert design.propose(sure, np.ones(2), 5) == []


@pytest.fixture(scope="module")
def cluster():
    some = Cluster.load("a100_16x8")
    return dataclasses.replace(some, name="made up")


MODEL = paxtrain.load_config("gpt_8b").model


def test_layouts_are_all_that_divide(cluster):
    found = layouts(cluster, MODEL, "nanotron", 2, 64)
    assert {t.tp * t.pp * t.dp for t in found} == {16} and {t.tp for t in found} == {1, 2, 4, 8}
    assert all(t.global_batch % (t.dp * t.micro_batch) == 0 and t.trainer == "nanotron" for t in found)
    assert 3 in {t.dp for t in layouts(cluster, MODEL, "nanotron", 3, 96)}  # not only powers of two
    assert found[0].device_bytes == pytest.approx(cluster.memory.min(), rel=1e-5)  # the cluster's, not a data sheet's
    assert len(set(found)) == len(found) and {t.sharding for t in found} == {"none", "zero1"}
    own = dataclasses.replace(MODEL, module="tests.paxtrain.model.routed:Routed")
    with pytest.raises(UserError, match="has no column in the table of runs"):
        layouts(cluster, own, "nanotron", 2, 64)


def test_errors_that_layouts_have_in_common_are_told_by_runs_like_them(cluster):
    plans = layouts(cluster, MODEL, "megatron-lm", 8, 256)
    small = layouts(cluster, MODEL, "megatron-lm", 2, 64)
    calibration = fitting.fit([], plans)
    sure = dataclasses.replace(calibration, covariance=np.zeros_like(calibration.covariance))
    before = design.belief(sure, plans, small)
    spread = ((before.of_plans @ before.factor) ** 2).sum(axis=1)
    np.testing.assert_allclose(np.sqrt(spread), np.sqrt(0.06**2 + 0.04**2 + 0.04**2), rtol=1e-5)
    after = design.belief(sure, plans, small, [small[0]] * 50)
    left = ((after.of_plans @ after.factor) ** 2).sum(axis=1) / spread
    like = np.array([(p.tp, p.pp, p.micro_batch) == (small[0].tp, small[0].pp, small[0].micro_batch) for p in plans])
    other = np.array([p.tp != small[0].tp and p.pp != small[0].pp for p in plans])
    assert like.any() and np.all(left[like] < 0.02)  # which all of them have in common is known
    np.testing.assert_allclose(left[other], 1, rtol=1e-5)


def _truth(trials, seed):
    """Return the seconds of layouts on a cluster whose constants differ from what is typical."""
    random = np.random.default_rng(seed)
    known = TRAINERS["megatron-lm"].typical
    values = [known.get(c.name, c.typical) * np.exp(c.spread * random.normal()) for c in CONSTANTS]
    values = np.clip(values, [c.low for c in CONSTANTS], [c.high for c in CONSTANTS])
    model, slots = TrialSteps(trials), np.ones((1, len(trials), 1))
    return model.seconds(np.broadcast_to(values, (1, len(trials), len(NAMES))), slots, slots)[0]


def _regrets(cluster, seed, runs, pick):
    """Return the regret before and after some runs, each of which `pick` chooses among the small layouts."""
    plans, small = (layouts(cluster, MODEL, "megatron-lm", n, 32 * n) for n in (8, 2))
    true, seconds = _truth(plans, seed), _truth(small, seed)
    done, left, found = [], list(range(len(small))), []
    for _ in range(runs + 1):
        known = [dataclasses.replace(small[i], seconds=float(seconds[i])) for i in done]
        calibration = fitting.fit(known, plans)
        chosen = calibration.forecast(plans).chosen_by.argmin()
        found.append(true[chosen] / true.min() - 1)
        at = pick(calibration, plans, [small[i] for i in left], known)
        if at is None:
            return [*found, *[found[-1]] * (runs + 1 - len(found))]
        done.append(left.pop(at))
    return found


def _designed(calibration, plans, small, known):
    proposed = design.propose(design.belief(calibration, plans, small, known), np.ones(len(small)), 1)
    return proposed[0].run if proposed else None


@pytest.mark.slow
def test_chosen_runs_teach_more_than_random_ones(cluster):
    random = np.random.default_rng(0)
    seeds = range(12)
    chosen = np.mean([_regrets(cluster, seed, 4, _designed) for seed in seeds], axis=0)
    drawn = np.mean(
        [_regrets(cluster, seed, 4, lambda _, __, s, ___: int(random.integers(len(s)))) for seed in seeds], axis=0
    )
    assert chosen[0] == drawn[0] and chosen[-1] < chosen[0] / 2 and chosen[-1] < drawn[-1]


def test_what_is_told_goes_on_from_results(cluster):
    lines, runs, regrets = proposals(cluster, MODEL, "nanotron", 512, [], 2)
    assert len(regrets) == 1 + len(runs)
    assert lines[0].startswith("0 measured runs; best of") and 0 < len(runs) <= 2
    assert all(run.hosts <= 4 and run.seconds is None for run in runs)
    seconds = _truth(runs, 3)
    measured = [dataclasses.replace(run, seconds=float(s)) for run, s in zip(runs, seconds)]
    lines, more, _ = proposals(cluster, MODEL, "nanotron", 512, measured, 1)
    assert lines[0].startswith(f"{len(measured)} measured runs") and not set(more) & set(runs)
