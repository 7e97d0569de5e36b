"""Intervals and probabilities beside a Monte Carlo that prices each plan anew with drawn constants."""

import dataclasses
import math

import numpy as np
import pytest

from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.fit.applied import priced
from planner.memory.margin import MARGINS, chance
from planner.placement.place import Placement
from planner.planning import intervals
from planner.planning.intervals import Beliefs, believe, by_expected, correlations, deviations
from planner.planning.settings import COMPUTE, PlanSettings, PricedPlan, with_setting
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices
from planner.search.tried import Found
from tests.planner.examples import MODEL, cluster

DRAWS = 600


def found(pipe: int, tensor: int = 1, micro_batch: int = 1, memory: float = 1e9, **changes) -> Found:
    """Return a plan for 64 sequences on 16 devices, in host order."""
    data = 16 // (pipe * tensor)
    sizes = {"data": data, "pipe": pipe, "tensor": tensor, "micro_batch": micro_batch}
    values = {"micro_batches": 64 // (data * micro_batch), "schedule": "1f1b", "counts": (12 // pipe,) * pipe}
    candidate = Candidate(**{**sizes, **values, **changes})
    hosts = (np.arange(data * pipe) * tensor // 4).reshape(pipe, data).T
    return Found(0, candidate, Placement(hosts, 1.0, 0.4, "exact", 1), np.nan, np.nan, memory, 0.4)


def search_on(some: Cluster) -> Search:
    return Search(some, MODEL, 64, Choices(tensor=(1,), pipe=(2,), schedules=("1f1b",)), Budget(), Options())


def alone(some: Cluster, plan: Found, setting: dict[str, float]) -> float:
    """Return the seconds of a plan on a cluster with a setting, by itself."""
    moved = with_setting(some, setting)
    return float(Problem(moved, MODEL, plan.candidate).step(fabric(moved), plan.placement.hosts[None]).total[0])


@pytest.mark.parametrize("trainer", ["paxtrain", "nanotron", "maxtext"])
def test_many_settings_at_once_are_what_each_is_alone(trainer):
    some = priced(cluster(4, 4, nics=2), trainer)
    plans = [found(2), found(4, 2, sequence_parallel=True), found(1, shard="none")]
    settings = [{}, *({name: factor} for name in deviations(some) for factor in (0.8, 1.3))]
    seconds = PlanSettings(some, MODEL, 0.5, settings).seconds(
        [PricedPlan(p.candidate, p.placement.hosts) for p in plans]
    )
    expected = [[alone(some, plan, setting) for plan in plans] for setting in settings]
    np.testing.assert_allclose(seconds, expected, rtol=1e-12)
    changed = np.abs(seconds[1:] / seconds[0] - 1).max(axis=1)
    assert changed.max() > 0.05 and (changed > 0).mean() > 0.7  # settings are not lost


def test_a_compute_profile_has_one_deviation():
    profiled = dataclasses.replace(cluster(2, 4), compute=({"kind": "a100-80gb"},))
    known = deviations(profiled)
    assert known[COMPUTE] < 0.05 and not {"matmul", "memory", "backward", "head"} & set(known)
    assert {"matmul", "memory", "backward"} < set(deviations(cluster(2, 4)))
    assert not any(name.startswith("inter") for name in deviations(cluster(1, 4)))


@pytest.fixture(scope="module")
def drawn() -> tuple[Beliefs, np.ndarray]:
    """Return what is believed of two plans, and their seconds [draws, 2] with drawn constants."""
    some = priced(dataclasses.replace(cluster(4, 4, seed=None), reached=("inside", "between")), "megatron-lm")
    plans = [found(2, 2), found(4, 2)]
    known, random = deviations(some), np.random.default_rng(0)
    scores = random.multivariate_normal(np.zeros(len(known)), correlations(some, list(known)), DRAWS)
    draws = [{name: math.exp(x * z) for (name, x), z in zip(known.items(), row)} for row in scores]
    return believe(search_on(some), plans), np.array([[alone(some, plan, one) for plan in plans] for one in draws])


def test_intervals_hold_their_share_of_drawn_constants(drawn, monkeypatch):
    beliefs, seconds = drawn
    monkeypatch.setattr(intervals, "_COMMON", ())  # the model's own error, which draws do not have
    beliefs = dataclasses.replace(beliefs, stalls=np.zeros(2))
    for i, of_plan in enumerate(seconds.T):
        low, high = beliefs.quantile(i, 0.1), beliefs.quantile(i, 0.9)
        assert low < beliefs.plain[i] < high
        # Ends of 64 draws have an error of 5% of the draws.
        assert 0.7 < ((low < of_plan) & (of_plan < high)).mean() < 0.9
        np.testing.assert_allclose([low, high], np.quantile(of_plan, [0.1, 0.9]), rtol=0.2)


def test_what_runs_determine_together_is_drawn_together():
    some = priced(cluster(4, 4), "megatron-lm")
    names = list(known := deviations(some))
    related = correlations(some, names)
    i, j = names.index("backward"), names.index("matmul")
    assert related[i, j] == related[j, i] > 0.5 and np.linalg.eigvalsh(related).min() > 0.05
    draws = intervals._draws(known, related, 4096, 4096)
    logs = np.log([[one[name] for name in names] for one in draws])
    np.testing.assert_allclose(np.corrcoef(logs.T), related, atol=0.06)
    np.testing.assert_allclose(logs.std(axis=0), list(known.values()), rtol=0.05)
    # Constants that runs of the cluster's own say are not those of the published runs; nor are other devices.
    fitted = dataclasses.replace(some, deviations={"matmul": 0.1})
    assert correlations(fitted, names)[i, j] == 0 == correlations(priced(cluster(4, 4), "torchtitan"), names)[i, j]
    hopper = dataclasses.replace(some, kinds=("h100",) * 4)
    np.testing.assert_array_equal(correlations(hopper, names), np.eye(len(names)))


def test_which_plan_is_quicker_is_surer_than_how_quick_each_is(drawn, monkeypatch):
    beliefs, seconds = drawn
    monkeypatch.setattr(intervals, "_COMMON", ())
    beliefs = dataclasses.replace(beliefs, stalls=np.zeros(2))
    share = (seconds[:, 0] < seconds[:, 1]).mean()
    assert beliefs.quicker(0, 1) == pytest.approx(share, abs=0.06)
    assert beliefs.quicker(0, 1) + beliefs.quicker(1, 0) == pytest.approx(1)
    logs = np.log(seconds)
    shuffled = np.random.default_rng(1).permutation(logs[:, 1])  # as if constants were not shared
    assert np.std(logs[:, 0] - logs[:, 1]) < 0.6 * np.std(logs[:, 0] - shuffled)


def test_plans_that_are_alike_have_most_of_their_error_in_common():
    beliefs = believe(search_on(cluster(4, 4)), [found(2), found(2, shard="none"), found(4, 2)])
    even = dataclasses.replace(beliefs, plain=np.array([1.0, 1.03, 1.03]), drawn=np.array([[1.0, 1.03, 1.03]]))
    assert even.quicker(0, 1) > 0.95 > even.quicker(0, 2) > 0.5


def test_stalls_change_which_plan_is_best():
    """A pipeline that is quicker while it does not stall waits for messages of which a single stage has fewer."""
    piped, whole = found(2, micro_batch=1), found(1, micro_batch=4, counts=(12,))
    calm = search_on(cluster(4, 4))
    order = [one.candidate.pipe for one in by_expected(calm, [piped, whole])]
    plain = believe(calm, [piped, whole])
    assert order == [1, 2][:: 1 if plain.plain[1] < plain.plain[0] else -1]
    stalling = search_on(priced(cluster(4, 4), "nanotron"))
    beliefs = believe(stalling, [piped, whole])
    assert beliefs.waits == pytest.approx([0.3 * 2 * 8, 0.3 * 4 * 1])  # there and back, of each neighbour
    assert beliefs.stalls == pytest.approx(-np.expm1([-4 * 0.03, -4 * 0.005]), rel=0.2)
    np.testing.assert_allclose(beliefs.expected, beliefs.plain + beliefs.stalls * beliefs.waits)
    slower = dataclasses.replace(beliefs, plain=np.array([1.0, 1.05]), drawn=np.array([[1.0, 1.05]]))
    assert slower.expected[0] > slower.expected[1]
    assert slower.quicker(0, 1) < dataclasses.replace(slower, stalls=np.zeros(2)).quicker(0, 1)
    assert slower.quantile(0, 0.95) > 5 > slower.quantile(1, 0.95)


def test_a_plan_fits_with_the_probability_of_the_labels():
    several = MARGINS["gpt2"]
    assert chance(MODEL, 2, several.log) == pytest.approx(several.labels / (several.labels + 1))
    assert chance(MODEL, 2, 0.0) == pytest.approx(0.5) and chance(MODEL, 2, 1.0) > 0.999
    tight, roomy = (found(2, memory=size * 80e9) for size in (1.2, 0.2))
    search = search_on(cluster(4, 4))
    fits = believe(search, [tight, roomy]).fits
    assert fits[0] < 0.6 < 0.999 < fits[1]
    assert believe(search, [tight], [tight]).fits[0] == 1.0  # a compiler has said so
