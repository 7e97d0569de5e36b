"""Findings of the lab against plain arithmetic; that the page follows from its records is test_results.py's."""

import dataclasses
import statistics

import numpy as np
import pytest
from scipy import stats

from experiments.lab.findings import accuracy, compression, gains, links, losses
from experiments.lab.findings import pairs as pairs_of
from experiments.lab.page.section import Section, Target
from experiments.lab.records import Records
from tests.experiments.lab.made_up_records import add_links, add_pair, add_predictions


def rows(section: Section) -> list[list[str]]:
    """Return the cells of all tables of a section, headings included."""
    lines = [line for block in section.blocks if isinstance(block, str) for line in block.splitlines()]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]


def row(section: Section, *begin: str) -> list[str]:
    """Return the rest of the only row that begins with these cells."""
    [found] = [cells for cells in rows(section) if cells[: len(begin)] == list(begin)]
    return found[len(begin) :]


def judged(section: Section, target: Target) -> Target:
    """Return the section's verdict on a target."""
    [found] = [t for t in section.targets if t.what == target.what]
    return found


def test_links_between_20_and_200_are_judged(tmp_path):
    add_links(tmp_path)
    section = links.section(tmp_path)
    error = judged(section, links.ERROR)
    assert error.met
    assert error.seen == "5.0% (median 1.0%, 5 links)"
    assert row(section, "some hosts") == ["6", "10 to 100", "1.0%", "100.0%", "+16.5%", "40.0 s"]
    assert judged(section, links.COST).seen == "not run", "of three hosts nothing is wanted"


def test_links_off_by_more_are_a_miss(tmp_path):
    add_links(tmp_path, worst=0.12, hosts=8, seconds=70)
    section = links.section(tmp_path)
    assert judged(section, links.ERROR).met is False
    assert judged(section, links.COST).met is False


def test_scores_equal_plain_arithmetic(tmp_path):
    add_predictions(tmp_path)
    section = accuracy.section(tmp_path)
    mape = {
        "simulator": (0.1 / 1 + 0.2 / 2 + 1 / 4 + 2 / 10 + 9 / 20) / 5,
        "Pipette's form": (2 / 1 + 0 / 2 + 3 / 4 + 1 / 10 + 2 / 20) / 5,
        "AMP's form": (0.5 / 1 + 0.5 / 2 + 0.5 / 4 + 1 / 10 + 5 / 20) / 5,
    }
    # Ranks: measured 1 2 3 4 5 in all; the simulator exchanges the last two: 1 - 6 * (1 + 1) / (5 * 24) = 0.9.
    pooled = {"simulator": 0.9, "Pipette's form": 1 - 6 * (4 + 0 + 4) / 120, "AMP's form": 1.0}
    # Within a: 1 2 3, Pipette reversed. Within b: the simulator has the order wrong and picks the one of 20 s.
    inside = {"simulator": (1, -1), "Pipette's form": (-1, 1), "AMP's form": (1, 1)}
    regret = {"simulator": (0, 1.0), "Pipette's form": (3.0, 0), "AMP's form": (0, 0)}
    for form in mape:
        cells = row(section, form)
        assert cells[0] == f"{100 * mape[form]:.1f}%"
        assert cells[2] == f"{pooled[form]:.3f}"
        # The two of 1 and 2 s are not compared, since the spread of the former is 1.025 s. No other order is noise.
        assert cells[3:5] == cells[5:7] == [f"{statistics.fmean(inside[form]):.3f}", f"{min(inside[form]):.3f}"]
        assert cells[7:] == [f"{100 * statistics.fmean(regret[form]):.1f}%", f"{100 * max(regret[form]):.1f}%"]
    assert row(section, "b", "2")[0] == f"{100 * (2 / 10 + 9 / 20) / 2:.1f}%"
    assert row(section, "a", "3")[3] == "66.7%" and row(section, "b", "2")[3] == "100.0%"
    assert f"{100 * (0.1 - 0.1 + 0.2) / 3:+.1f}% for x (worst +20.0%)" in str(section.blocks[-1])
    met = {target.what: target.met for target in section.targets}
    assert met == {
        accuracy.COUNT.what: False,
        accuracy.MAPE.what: False,
        accuracy.POOLED.what: False,
        accuracy.INSIDE.what: False,
        accuracy.REGRET.what: False,
        accuracy.SLOW_MAPE.what: None,
        accuracy.SLOW_INSIDE.what: None,
        accuracy.SLOW_REGRET.what: None,
        accuracy.BETTER[0].what: True,
        accuracy.BETTER[1].what: False,
        accuracy.BETTER[2].what: False,
    }


def add_scenario(folder, scenario, medians, predicted, spread=0.0):
    """Add pairs with these medians, seconds, whose quartiles lie by `spread` below and above."""
    for i, (median, seconds) in enumerate(zip(medians, predicted, strict=True)):
        repeats = [median - 2 * spread, median, median + 2 * spread]
        add_pair(folder, scenario, "x", f"random {i}", [i], repeats, predicted=seconds)


def test_the_order_without_spreads_is_that_of_scipy():
    draw = np.random.default_rng(0)
    for _ in range(20):
        measured, predicted = draw.integers(1, 8, 12).astype(float), draw.integers(1, 8, 12).astype(float)
        expected = stats.somersd(measured, predicted).statistic
        assert pairs_of.somers_d(predicted, measured, np.zeros(12)) == pytest.approx(expected)


def test_pairs_that_are_alike_are_not_compared(tmp_path):
    medians = (1.0, 1.01, 2.0, 2.01)
    add_scenario(tmp_path / "alike", "a", medians, (1.01, 1.0, 2.01, 2.0), spread=0.02)
    [simulator, *_] = accuracy.FORMS
    found = pairs_of.score(pairs_of.pairs(tmp_path / "alike"), simulator)
    assert (found.somers_d, found.spearman, found.compared) == (1.0, pytest.approx(0.6), pytest.approx(4 / 6))
    assert judged(accuracy.section(tmp_path / "alike"), accuracy.INSIDE).met
    # The same order is wrong if the repeats agree: 2 of 6 comparisons are.
    add_scenario(tmp_path / "apart", "a", medians, (1.01, 1.0, 2.01, 2.0), spread=0.001)
    found = pairs_of.score(pairs_of.pairs(tmp_path / "apart"), simulator)
    assert (found.somers_d, found.compared) == (pytest.approx(2 / 6), 1.0)
    # A wrong order of two that differ lowers it: 1 of 4 comparisons.
    add_scenario(tmp_path / "wrong", "a", medians, (1.0, 2.0, 1.5, 3.0), spread=0.02)
    inside = judged(accuracy.section(tmp_path / "wrong"), accuracy.INSIDE)
    assert (inside.seen, inside.met) == ("0.500 (a)", False)
    # Where all are alike, there is no order to judge.
    add_scenario(tmp_path / "none", "a", medians, medians, spread=2.0)
    assert judged(accuracy.section(tmp_path / "none"), accuracy.INSIDE).met is None


def test_a_placement_that_was_chosen_twice_is_one_pair(tmp_path):
    add_pair(tmp_path, "a", "x", "planned", [0, 1], [1.0, 1.0, 1.2])
    add_pair(tmp_path, "a", "x", "host order", [0, 1], [1.4, 1.4])
    add_pair(tmp_path, "a", "x", "worst", [1, 0], [2.0])
    first, second = pairs_of.pairs(tmp_path)
    assert (first.hows, first.measured, first.repeats) == (("planned", "host order"), 1.2, 5)
    assert first.spread == pytest.approx((1.4 - 1.0) / 2 / 1.2)
    assert second.hows == ("worst",)


def test_a_target_is_not_met_by_what_says_nothing():
    target = Target.at_most("error", 0.1)
    assert target.judged(0.1).met
    assert target.judged(0.1001).met is False
    assert target.judged(float("nan")).met is None
    assert dataclasses.replace(target, least=True).judged(0.0999).met is False


def test_costs_are_against_dense_of_the_same_seed(tmp_path):
    records = Records(tmp_path / compression.SOURCE)
    for seed, dense, int8 in ((0, 2.0, 2.02), (1, 4.0, 4.12)):
        for kind, loss in (("dense", dense), ("int8", int8)):
            records.add(f"{kind} {seed}", kind=kind, seed=seed, losses=[], validation=[[0, 6.0], [100, loss]])
    assert compression.costs(records) == {"int8": pytest.approx([0.01, 0.03])}


def test_captured_is_a_share_of_what_links_cost():
    line = {"seconds": {"dense": [3.0], "half": [2.0], "slower": [4.0]}}
    assert compression.captured(line, free=[1.0]) == {"dense": (0.0, 0.0), "half": (0.5, 0.0), "slower": (-0.5, 0.0)}


def test_gains_have_the_spread_of_their_repeats():
    """Repeats of dense and of a kind are pairs; those on free links were taken at another time."""
    dense, times, free = [3.0, 5.0, 4.0], [2.0, 3.0, 2.5], [1.0, 2.0]

    def spread(values: list[float]) -> float:
        low, _, high = statistics.quantiles(values, n=4, method="inclusive")
        return (high - low) / 2

    pairs = list(zip(dense, times))
    shares = [(d - t) / (d - f) for d, t in pairs for f in free]
    assert gains.captured(dense, times, free) == pytest.approx(((4 - 2.5) / (4 - 1.5), spread(shares)))
    assert gains.speedup(dense, times) == pytest.approx((4 / 2.5, spread([d / t for d, t in pairs])))
    assert gains.bound(dense, free) == pytest.approx((4 / 1.5, spread([d / f for d in dense for f in free])))
    assert gains.captured(dense, times, free).as_share == f"60.0% ± {100 * spread(shares):.1f}%"


def test_a_loss_that_is_never_reached():
    curve = losses.Curve.of({"validation": [[0, 6.0], [10, 4.0], [20, 5.0]]})
    assert curve.reaches(4.5) == 7.5
    assert curve.reaches(6.0) == 0
    assert str(curve.reaches(3.9)) == "nan"
    assert (curve.at(15), curve.last) == (4.5, 5.0)
