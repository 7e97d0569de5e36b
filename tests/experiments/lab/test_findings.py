"""The findings of the lab agree with its records: figures against plain arithmetic, and missed targets."""

import dataclasses
import statistics

import numpy as np
import pytest
from scipy import stats

from experiments.lab.findings import (
    accuracy,
    faults,
    growth,
    joint,
    links,
    peer,
    placement,
    schedules,
)
from experiments.lab.findings import pairs as pairs_of
from experiments.lab.page.section import Section, Target
from experiments.lab.records import Records
from tests.experiments.lab.made_up_records import (
    add_links,
    add_pair,
    add_peer,
    add_placements,
    add_predictions,
    add_schedules,
)


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


# --- Links ------------------------------------------------------------------------------------------------------------


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


# --- Predictions ------------------------------------------------------------------------------------------------------


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
    assert row(section, "x", "3")[0] == f"{100 * (0.1 - 0.1 + 0.2) / 3:+.1f}%"
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


def test_good_predictions_meet_what_was_wanted(tmp_path):
    for scenario in ("a", *accuracy.SLOW):
        for i in range(40):
            closed = {"pipette": 50.0 - i, "amp": 60.0 - i}
            add_pair(tmp_path, scenario, "x", str(i), [i], [1.0 + i], predicted=1.01 * (1 + i), **closed)
    section = accuracy.section(tmp_path)
    assert all(target.met for target in section.targets)
    assert judged(section, accuracy.MAPE).seen == "1.0%"


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


def test_slow_links_are_judged_by_the_worse_of_both_scenarios(tmp_path):
    sites, ethernet = accuracy.SLOW
    add_scenario(tmp_path, sites, (1.0, 2.0, 3.0), (1.08, 2.16, 3.24))
    assert judged(accuracy.section(tmp_path), accuracy.SLOW_MAPE).seen == "not run", "the other one is to come"
    add_scenario(tmp_path, ethernet, (1.0, 2.0, 2.1), (1.0, 2.1, 2.0))
    section = accuracy.section(tmp_path)
    error = judged(section, accuracy.SLOW_MAPE)
    assert (error.seen, error.met) == ("8.0% (two_sites 8.0% and ten_gbe 3.3%)", False)
    order = judged(section, accuracy.SLOW_INSIDE)
    words = "0.333 (two_sites 1.000 and ten_gbe 0.333; Spearman's of all pairs 1.000 and 0.500)"
    assert (order.seen, order.met) == (words, False)
    regret = judged(section, accuracy.SLOW_REGRET)
    assert (regret.seen, regret.met) == ("0.0% (two_sites 0.0% and ten_gbe 0.0%)", True)


def test_a_placement_that_was_chosen_twice_is_one_pair(tmp_path):
    add_pair(tmp_path, "a", "x", "planned", [0, 1], [1.0, 1.0, 1.2])
    add_pair(tmp_path, "a", "x", "host order", [0, 1], [1.4, 1.4])
    add_pair(tmp_path, "a", "x", "worst", [1, 0], [2.0])
    first, second = pairs_of.pairs(tmp_path)
    assert (first.hows, first.measured, first.repeats) == (("planned", "host order"), 1.2, 5)
    assert first.spread == pytest.approx((1.4 - 1.0) / 2 / 1.2)
    assert second.hows == ("worst",)


def test_a_single_pair_has_no_rank(tmp_path):
    add_pair(tmp_path, "a", "x", "planned", [0, 1], [1.0])
    inside = judged(accuracy.section(tmp_path), accuracy.INSIDE)
    assert (inside.seen, inside.met) == ("-", None)


# --- Placement --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host_order, met", [(1.26, True), (1.24, False)])
def test_the_gain_is_that_of_the_plan_predicted_fastest(tmp_path, host_order, met):
    add_placements(tmp_path, host_order)
    section = placement.section(tmp_path)
    gain = judged(section, placement.FASTER)
    assert gain.met is met
    low = f"{host_order / 1.6:.2f}x"
    assert (
        gain.seen
        == f"{host_order:.2f}x (1x2 fast; {low} to {host_order:.2f}x over 2 plans, {int(met)} of which gain as much)"
    )
    assert rows(section)[0] == ["plan", "two_racks, 4 placements"]
    assert row(section, "1x2 fast") == [f"1.000 s, {host_order:.2f}x, 3.00x, +5.0%"]
    assert judged(section, placement.BEST).met is False, "a random placement was 5% faster"


def test_the_planned_order_has_its_place_among_all(tmp_path):
    records = Records(tmp_path / placement.ORDERS)
    for i, seconds in enumerate((1.3, 1.0, 1.02, 2.0)):
        records.add(
            f"order {i}", order=[i, 0], planned=i == 2, seconds=[seconds, seconds, 9.0], predicted=1.1 * seconds
        )
    section = placement.section(tmp_path)
    assert judged(section, placement.OF_ORDERS).seen == "not run", "not all orders are there yet"
    records.add("orders done", rates=[[9e9, 8.2], [79.9, 0]])
    section = placement.section(tmp_path)
    assert judged(section, placement.OF_ORDERS).seen == "+2.0%"
    assert judged(section, placement.OF_ORDERS).met
    words = " ".join(section.blocks[0].split())
    assert "The slowest order takes 2.00x the time of the quickest. " in words
    assert " The planned one is number 2, +2.0% against the quickest" in words
    assert "MAPE 10.0%, rank correlation 1.000" in words
    assert "on links of 8 to 80 Mbit/s, drawn at random" in words


def test_a_placement_made_both_ways(tmp_path):
    add_placements(tmp_path, host_order=1.3)
    placed_by = {"order": [1.0, 1.0, 1.2], "links": [1.1, 1.1, 1.1]}
    Records(tmp_path / placement.SOURCE).add("placed by order", hosts=[[0]], placed_by=placed_by)
    words = " ".join(placement.section(tmp_path).blocks[-1].split())
    assert words.endswith("1.000 s (spread 5.0%) against 1.100 s (spread 0.0%), +10.0%.")


# --- Schedules, growth, joint choice, faults --------------------------------------------------------------------------


def test_what_overlap_gains_stays_open_where_nothing_overlaps(tmp_path):
    add_schedules(tmp_path)
    section = schedules.section(tmp_path)
    faster = judged(section, schedules.FASTER)
    assert faster.met is None
    assert "1.00x here" in faster.seen
    assert "predicted with overlap 1.12x" in faster.seen
    assert rows(section)[0][2:] == ["eager_1f1b", "1f1b"]
    assert row(section, "50", "30.0%") == ["1.000 s ± 5.0%, +10.0%, 0.800 s", "1.000 s ± 5.0%, -10.0%, 0.900 s"]


def test_a_prediction_that_overlap_gains_nothing_is_a_miss(tmp_path):
    add_schedules(tmp_path, overlapping=0.95)
    assert judged(schedules.section(tmp_path), schedules.FASTER).met is False


def test_fast_links_say_nothing_of_overlap(tmp_path):
    add_schedules(tmp_path, share=0.1)
    assert judged(schedules.section(tmp_path), schedules.FASTER).met is None


def test_efficiency_is_against_the_smallest_size(tmp_path):
    records = Records(tmp_path / growth.SOURCE)
    for mesh, seconds in (((4, 2, 1), 2.0), ((2, 2, 1), 1.25), ((1, 2, 1), 1.0)):
        hosts = mesh[0] * mesh[1]
        values = {"predicted": 1.0, "predicted_reduce": 0.1, "tokens": 100 * hosts}
        records.add(f"mesh {mesh}", hosts=hosts, mesh=mesh, seconds=[seconds], **values)
    section = growth.section(tmp_path)
    assert row(section, "2", "1", "1x2x1")[4:6] == ["100.0%", "100.0%"]
    assert row(section, "4", "2", "2x2x1") == [
        "1.250 s",
        "0.0%",
        "1.000 s",
        "-20.0%",
        "80.0%",
        "100.0%",
        "0.100 s",
        "320",
    ]
    assert row(section, "8", "4", "4x2x1")[0] == "2.000 s"


@pytest.mark.parametrize("seconds, met", [(0.5, True), (0.7, False)])
def test_the_joint_choice_has_to_beat_the_best_alone(tmp_path, seconds, met):
    records = Records(tmp_path / joint.SOURCE)
    times = {"nothing": 1.0, "placement alone": 0.6, "compression alone": 0.8, "joint": seconds}
    for what, time in times.items():
        records.add(
            what, what=what, plan="p", predicted=0.9 * time, seconds=[time], wire={"a": 2_000_000, "b": 500_000}
        )
    records.add("done")
    section = joint.section(tmp_path)
    target = judged(section, joint.FASTEST)
    assert target.met is met
    assert target.seen == f"{0.6 / seconds:.2f}x over placement alone"
    assert row(section, "placement alone", "p") == ["0.600 s", "0.0%", "0.540 s", "-10.0%", "1.67x", "2.50"]


@pytest.mark.parametrize("dense, met", [(0.8, True), (0.92, False)])
def test_both_systems_are_compared_rate_by_rate(tmp_path, dense, met):
    add_peer(tmp_path, dense)
    section = peer.section(tmp_path)
    assert judged(section, peer.FASTER).met is met
    assert judged(section, peer.FASTER).seen.startswith(f"{dense:.2f}x (2x4x1 at ")
    assert judged(section, peer.SAME).seen == "5e-06"
    assert judged(section, peer.MUCH_FASTER).seen == "0.45x (2x4x1; 0.45x)"
    assert rows(section)[0] == ["mesh", "", "1000 Mbit/s", "200 Mbit/s", "50 Mbit/s", "MB on the links", "compute"]
    quick, slow = "0.950 s ± 0.0%, 0.95x", "1.900 s ± 0.0%, 0.95x"
    assert row(section, "2x4x1", "1f1b") == [quick, quick, slow, "3.0", "1.50 s"]
    assert row(section, "2x4x1", peer.PYTORCH)[2] == "2.000 s ± 0.0%"


def test_a_compressed_step_whose_loss_is_far_off_meets_nothing(tmp_path):
    add_peer(tmp_path, cost=0.02)
    much = judged(peer.section(tmp_path), peer.MUCH_FASTER)
    assert (much.met, much.seen) == (False, "no loss within 1.0% (+2.0% to +10.0%)")


def test_faults_are_a_table_of_what_is_there(tmp_path):
    records = Records(tmp_path / faults.SOURCE)
    records.add("a", fault="a host is killed", end_seconds=7.891, sentence="pax3 is gone | so", lost_steps=3)
    records.add("b", fault="a link is cut", cut_seconds=4.0, sentence="pax1 hears pax2 again", lost_steps=0)
    block = faults.section(tmp_path).blocks[1].splitlines()
    assert block[0] == "| fault | what is said | also | lost steps |"
    assert block[2:] == [
        "| a host is killed | pax3 is gone \\| so | end, s 7.89 | 3 |",
        "| a link is cut | pax1 hears pax2 again | cut, s 4 | 0 |",
    ]


# --- Targets ----------------------------------------------------------------------------------------------------------


def test_a_target_is_not_met_by_what_says_nothing():
    target = Target.at_most("error", 0.1)
    assert target.judged(0.1).met
    assert target.judged(0.1001).met is False
    assert target.judged(float("nan")).met is None
    assert dataclasses.replace(target, least=True).judged(0.0999).met is False
