"""The results page agrees with its records: figures against plain arithmetic, missing records, missed targets."""

import dataclasses
import json
import pathlib
import re
import statistics
import subprocess
import sys
import types

import matplotlib.image
import pytest

from paxtrain.errors import UserError
from tests.cluster import results
from tests.cluster.experiments import compression as compression_experiment
from tests.cluster.findings import (
    accuracy,
    compression,
    faults,
    growth,
    joint,
    links,
    losses,
    peer,
    placement,
    schedules,
)
from tests.cluster.findings import pairs as pairs_of
from tests.cluster.records import Records
from tests.cluster.section import Section, Target


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


def add_links(folder: pathlib.Path, worst: float = 0.05, hosts: int = 3, seconds: float = 40.0) -> None:
    rates = [[100.0] * hosts for _ in range(hosts)]
    measured = [[101.0] * hosts for _ in range(hosts)]
    measured[0][1] = 100 * (1 - worst)
    rates[1][0], measured[1][0] = 10.0, 20.0  # slower than those for which anything is wanted
    measured[2][2] = 1e6  # the diagonal means nothing
    Records(folder / links.SOURCE).add("some hosts", rates=rates, measured=measured, seconds=seconds)


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


def add_pair(folder: pathlib.Path, scenario: str, plan: str, how: str, hosts: list[int], seconds: list[float], **by):
    by = {"predicted": 1.0, "pipette": 1.0, "amp": 1.0} | by
    values = {"scenario": scenario, "plan": plan, "how": how, "hosts": [hosts], "seconds": seconds}
    Records(folder / pairs_of.SOURCE).add(f"{scenario} | {plan} | {how}", **values, **by)


def add_predictions(folder: pathlib.Path) -> None:
    """Add measured pairs with medians 1, 2, 4 on one scenario and 10, 20 on another."""
    add_pair(folder, "a", "x", "planned", [0, 1], [1.0, 0.9, 5.0], predicted=1.1, pipette=3.0, amp=1.5)
    add_pair(folder, "a", "x", "worst", [1, 0], [2.0, 2.0, 2.0], predicted=1.8, pipette=2.0, amp=2.5)
    add_pair(folder, "a", "y", "planned", [0, 1], [4.0, 3.0, 9.0], predicted=5.0, pipette=1.0, amp=4.5)
    add_pair(folder, "b", "x", "planned", [0, 1], [10.0], predicted=12.0, pipette=9.0, amp=9.0)
    add_pair(folder, "b", "y", "planned", [0, 1], [20.0], predicted=11.0, pipette=18.0, amp=25.0)


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
        assert cells[3:5] == [f"{statistics.fmean(inside[form]):.3f}", f"{min(inside[form]):.3f}"]
        assert cells[5:] == [f"{100 * statistics.fmean(regret[form]):.1f}%", f"{100 * max(regret[form]):.1f}%"]
    assert row(section, "b", "2")[0] == f"{100 * (2 / 10 + 9 / 20) / 2:.1f}%"
    assert row(section, "x", "3")[0] == f"{100 * (0.1 - 0.1 + 0.2) / 3:+.1f}%"
    met = {target.what: target.met for target in section.targets}
    assert met == {
        accuracy.COUNT.what: False,
        accuracy.MAPE.what: False,
        accuracy.POOLED.what: False,
        accuracy.INSIDE.what: False,
        accuracy.REGRET.what: False,
        accuracy.BETTER[0].what: True,
        accuracy.BETTER[1].what: False,
        accuracy.BETTER[2].what: False,
    }


def test_good_predictions_meet_what_was_wanted(tmp_path):
    for i in range(40):
        add_pair(tmp_path, "a", "x", str(i), [i], [1.0 + i], predicted=1.01 * (1 + i), pipette=50.0 - i, amp=60.0 - i)
    section = accuracy.section(tmp_path)
    assert all(target.met for target in section.targets)
    assert judged(section, accuracy.MAPE).seen == "1.0%"


def test_predictions_that_were_made_again_are_told(tmp_path):
    said = lambda: [block for block in accuracy.section(tmp_path).blocks if "computed again" in str(block)]  # noqa: E731
    add_pair(tmp_path, "a", "x", "planned", [0, 1], [1.0])
    assert not said()
    add_pair(tmp_path, "a", "x", "planned", [0, 1], [1.0], predicted=1.1, first_predicted=1.3)
    add_pair(tmp_path, "a", "x", "worst", [1, 0], [2.0], predicted=1.9, first_predicted=1.8)
    [text] = said()
    assert "MAPE of 20.0%" in " ".join(text.split())


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


def add_placements(folder: pathlib.Path, host_order: float) -> None:
    for plan, predicted, planned in (("1x2 fast", 0.9, 1.0), ("2x1 slow", 1.5, 1.6)):
        add_pair(folder, "two_racks", plan, "planned", [0, 1, 2], [planned], predicted=predicted)
        add_pair(folder, "two_racks", plan, "host order", [1, 0, 2], [host_order], predicted=2.0)
        add_pair(folder, "two_racks", plan, "worst", [2, 1, 0], [3.0], predicted=3.0)
        add_pair(folder, "two_racks", plan, "random 0", [2, 0, 1], [planned / 1.05], predicted=1.0)


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
    assert row(section, "two_racks", "1x2 fast") == [
        "4",
        "1.000 s",
        f"{host_order:.3f} s",
        "3.000 s",
        "0.952 s",
        f"{host_order:.2f}x",
        "3.00x",
        "+5.0%",
    ]
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


# --- Compression ------------------------------------------------------------------------------------------------------


def add_compression(folder: pathlib.Path, packed: float = 0.7, loss: float = 2.01) -> None:
    records = Records(folder / compression.SOURCE)
    medians = dict(zip(compression_experiment.KINDS, (1.0, 0.9, 0.8, packed, 0.5), strict=True))
    seconds = {kind: [time, 0.9 * time, 1.3 * time] for kind, time in medians.items()}
    seconds["CB"] = [0.9, 0.9, 0.9]
    wire = {kind: {"backward": round(1e6 * time), "embedding": 1000, "all-reduce": 4} for kind, time in medians.items()}
    hosts = [{"forward": 0.2, "pipeline": 0.1}, {"forward": [0.2, 0.4], "data": 0.1}]
    counted = {"wire": wire, "parts": dict.fromkeys(medians, hosts), "predicted": {"CB": 1.01, "CB+SC": 1.12}}
    counted["unlimited"] = {kind: [0.7 * time] for kind, time in medians.items()}
    records.add("share None", share=0.4, rate=50.0, seconds=seconds, selected="0,1", **counted)
    records.add("share 0.7", share=0.7, rate=12.0, seconds=seconds, selected="0,1,2,3")
    for kind in medians:
        if kind == compression.PAPER:
            records.add("all stages", kind=kind, selected="0,1,2,3", losses=[], validation=[[0, 6.0], [100, 2.2]])
        last = {compression.PAPER: loss, compression.ALL: 2.5}.get(kind, 2.0)
        records.add(f"loss {kind}", kind=kind, losses=[], validation=[[0, 6.0], [50, 4.0], [100, last]])


def test_compression_against_dense(tmp_path):
    add_compression(tmp_path)
    section = compression.section(tmp_path)
    times, wire, parts, _ = [cells for cells in rows(section) if cells[0] == "CB"]
    assert times[1:3] == ["0.900 s ± 0.0%", f"{1 / 0.9:.2f}x ± 0.111"]  # quartiles of ratios of 1, 1.11 and 1.44
    assert wire[1:] == ["900", "1", "901", f"{100 * 901 / 1001:.1f}%"]
    assert parts[1:] == ["250", "50", "50"]
    times, *_ = [cells for cells in rows(section) if cells[0] == "CB+FE"]
    assert times[1:3] == ["0.800 s ± 10.0%", "1.25x ± 0.000"]  # every repeat's own ratio is the same
    assert compression.parts(Records(tmp_path / compression.SOURCE)["share None"])["dense"] == pytest.approx(
        {"forward": (0.2 + 0.3) / 2, "pipeline": 0.05, "data": 0.05}
    )
    assert judged(section, compression.FASTER).seen.startswith(
        "1.43x (communication takes 40% of a dense step; without limits of links 1.43x, as measured; spread 0.0"
    )
    assert judged(section, compression.FASTER).met
    assert "predicts\n    speed-ups of 1.01x of CB, 1.12x of CB+SC." in section.blocks[0]
    assert judged(section, compression.FASTEST).met
    assert judged(section, compression.CLOSE).seen == "+0.50% (100 steps, one seed)"
    assert judged(section, compression.CLOSE).met
    said = "as measured, the links therefore take 30% where 40% was predicted, 30% where 70% was predicted."
    assert said in " ".join(section.blocks[0].split())
    # "everything" is quicker still, and so are all stages at 70%, but not as good.
    said = "1.43x at 40% (50 Mbit/s) (CB+FE+SC), 1.25x at 70% (12 Mbit/s) (CB+FE)."
    assert section.blocks[-1].endswith(f"the quickest are: {said}")
    assert "by the planner's rule and prediction: stages 0,1 at 40%, all at 70%." in " ".join(section.blocks[0].split())
    # The stages chosen at 70% were trained by themselves, and are not compared at 40%.
    first, other = [cells for cells in rows(section) if cells[0].startswith("CB+FE+SC")][-2:]
    assert (first[0], other[0]) == ("CB+FE+SC of stages 0,1,2,3", "CB+FE+SC")
    assert first[1:5] == ["2.2000", "+10.00%", "", ""] and other[5:7] == ["", ""] != first[5:7]


def test_compression_that_falls_short_is_a_miss(tmp_path):
    add_compression(tmp_path, packed=0.8, loss=2.03)
    section = compression.section(tmp_path)
    assert judged(section, compression.FASTER).met is False
    assert judged(section, compression.CLOSE).met is False


def test_losses_after_equal_time(tmp_path):
    add_compression(tmp_path)
    # The first to be through is "everything", after 100 steps of 0.5 s. Dense is then at step 50 with a loss of 4, and
    # CB+FE+SC at step 50 / 0.7 on its line from 4 at 50 to 2.01 at 100. Dense is at 2.02 after 99.5 steps of 1 s.
    there = 4 - (50 / 0.7 - 50) / 50 * (4 - 2.01)
    sooner = 99.5 / (0.7 * (50 + 50 * (4 - 2.02) / (4 - 2.01)))
    cells = [cells for cells in rows(compression.section(tmp_path)) if cells[0] == "CB+FE+SC"][-1]
    assert cells[1:5] == ["2.0100", "+0.50%", f"{100 * (there / 4 - 1):+.2f}%", f"{sooner:.2f}x"]


def test_a_loss_that_is_never_reached():
    curve = losses.Curve.of({"validation": [[0, 6.0], [10, 4.0], [20, 5.0]]})
    assert curve.reaches(4.5) == 7.5
    assert curve.reaches(6.0) == 0
    assert str(curve.reaches(3.9)) == "nan"
    assert (curve.at(15), curve.last) == (4.5, 5.0)


# --- Schedules, growth, joint choice, faults --------------------------------------------------------------------------


def add_schedules(folder: pathlib.Path, overlapping: float = 0.8, share: float = 0.3) -> None:
    predicted = {"eager_1f1b": 1.1, "1f1b": 0.9}
    seconds = {"eager_1f1b": [1.0, 1.0, 1.2], "1f1b": [1.0, 0.8, 1.0]}
    over = {"eager_1f1b": overlapping, "1f1b": 0.9}
    values = {"rate": 50.0, "seconds": seconds, "predicted": predicted, "predicted_overlapping": over}
    Records(folder / schedules.SOURCE).add("50 Mbit/s", transfer_share=share, **values)


def test_what_overlap_gains_stays_open_where_nothing_overlaps(tmp_path):
    add_schedules(tmp_path)
    section = schedules.section(tmp_path)
    faster = judged(section, schedules.FASTER)
    assert faster.met is None
    assert "1.00x here" in faster.seen
    assert "predicted with overlap 1.12x" in faster.seen
    assert row(section, "50", "30.0%", "eager_1f1b") == ["1.000 s", "5.0%", "1.100 s", "+10.0%", "0.800 s"]
    assert row(section, "50", "30.0%", "1f1b")[3] == "-10.0%"


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


def add_peer(folder: pathlib.Path, dense: float = 0.8, cost: float = 0.005) -> None:
    records = Records(folder / peer.SOURCE)
    records.add("first", mesh=[2, 4, 1], torch="2.0", first={peer.PYTORCH: [4.0, 2.0], "1f1b": [4.0, 2.00001]})
    for kind, loss in ((peer.DENSE, 2.0), (peer.COMPRESSED, 2.0 * (1 + cost))):
        records.add(kind, mesh=[2, 4, 1], kind=kind, validation=[[0, 5.0], [100, loss]])
    for rate, slower in ((1000.0, 0.5), (200.0, 0.5), (50.0, 1.0)):
        times = {peer.PYTORCH: 2.0, "1f1b": 1.9, peer.DENSE: 2 * dense, peer.COMPRESSED: 0.9}
        kinds = {
            kind: {"seconds": [slower * time] * 3, "computed": [1.5] * 3, "bytes": [3_000_000] * 3}
            for kind, time in times.items()
        }
        records.add(f"{rate}", mesh=[2, 4, 1], rate=rate, save="dots", kinds=kinds)


@pytest.mark.parametrize("dense, met", [(0.8, True), (0.92, False)])
def test_both_systems_are_compared_rate_by_rate(tmp_path, dense, met):
    add_peer(tmp_path, dense)
    section = peer.section(tmp_path)
    assert judged(section, peer.FASTER).met is met
    assert judged(section, peer.FASTER).seen.startswith(f"{dense:.2f}x (2x4x1 at ")
    assert judged(section, peer.SAME).seen == "5e-06"
    assert judged(section, peer.MUCH_FASTER).seen == "0.45x (2x4x1; 0.45x)"
    assert row(section, "2x4x1", "50", "1f1b") == ["1.900 s", "0.0%", "0.95x", "3.0", "1.50 s"]


def test_a_compressed_step_whose_loss_is_far_off_meets_nothing(tmp_path):
    add_peer(tmp_path, cost=0.02)
    much = judged(peer.section(tmp_path), peer.MUCH_FASTER)
    assert (much.met, much.seen) == (False, "no loss within 1.0% (+2.0%)")


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


# --- The page ---------------------------------------------------------------------------------------------------------


def test_without_records_the_page_says_that_nothing_was_run(tmp_path):
    results.write(tmp_path / "none", tmp_path / "docs" / "results.md")
    text = (tmp_path / "docs" / "results.md").read_text()
    assert "| yes |" not in text
    assert "Every target was met" not in text
    assert text.count("Not run yet.") == 9
    assert "**Not run:** Compression; `python -m tests.cluster.lab --experiments=compression` does." in text
    assert "Nothing says on which machine" in text
    assert not list((tmp_path / "docs" / "results").iterdir())


def test_the_page_says_what_was_met_missed_and_not_run(tmp_path):
    lab, page = tmp_path / "lab", tmp_path / "page.md"
    add_links(lab, worst=0.12)
    add_predictions(lab)
    add_placements(lab, host_order=1.3)
    add_compression(lab)
    add_schedules(lab)
    (lab / "environment.json").write_text(json.dumps({"date": "2026-01-01", "seed": 3, "machine": {"cores": 2}}))
    results.write(lab, page)
    text = page.read_text()
    assert "| Profiled bandwidth of a link of 20 to 200 Mbit/s, largest error | at most 10.0% | 12.0%" in text
    flat = " ".join(text.split())
    assert "**Missed:** Profiled bandwidth of a link of 20 to 200 Mbit/s, largest error. Wanted: at most 10.0%." in flat
    assert "**Open:** eager_1f1b over 1f1b" in flat
    assert "**Not run:** Growth;" in flat
    assert "**Not run:** Step time of the planned one of all orders of four hosts against the best;" in flat
    assert "| machine: cores | 2 |" in text
    assert max(len(line) for line in text.splitlines() if not line.startswith("|")) <= results.WIDTH
    drawn = re.findall(r"\]\((page/\w+\.png)\)", text)
    assert sorted(drawn) == sorted(f"page/{path.name}" for path in (tmp_path / "page").iterdir())
    assert len(drawn) == len(set(drawn)) == 7
    for name in drawn:
        assert matplotlib.image.imread(tmp_path / name).std() > 0.02, f"{name} is empty"


def test_what_the_page_says_stays_without_records(tmp_path):
    first, second, page = tmp_path / "first", tmp_path / "second", tmp_path / "page.md"
    add_links(first, worst=0.12)
    add_schedules(first)
    (first / "environment.json").write_text(json.dumps({"date": "2026-01-01"}))
    results.write(first, page)
    before = page.read_text()
    add_peer(second)
    (second / "environment.json").write_text(json.dumps({"date": "2026-01-02"}))
    results.write(second, page)
    text = page.read_text()
    assert "Made by `python -m tests.cluster.lab --experiments=peer` on 2026-01-02;" in " ".join(text.split())
    assert "| date | 2026-01-01 |" in text
    for title in ("## Schedules at several link rates", "## Profile against set rates"):
        section = before[before.index(title) :].split("\n## ")[0].strip()
        assert section in text
    flat = " ".join(text.split())
    assert "**Missed:** Profiled bandwidth of a link of 20 to 200 Mbit/s, largest error." in flat
    assert "**Open:** eager_1f1b over 1f1b" in flat and "**Not run:** Compression;" in flat
    add_links(second, worst=0.01)
    results.write(second, page)
    assert "**Missed:** Profiled bandwidth" not in page.read_text()


def test_the_page_is_written_again_from_the_records_alone(tmp_path):
    add_schedules(tmp_path / "lab")
    command = [
        sys.executable,
        "-m",
        "tests.cluster.results",
        f"--out={tmp_path / 'lab'}",
        f"--page={tmp_path / 'p.md'}",
    ]
    root = pathlib.Path(__file__).resolve().parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout) == (0, f"wrote {tmp_path / 'p.md'}\n"), done.stderr
    assert "## Schedules at several link rates" in (tmp_path / "p.md").read_text()


def test_a_folder_without_records_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(results.flags, "FLAGS", types.SimpleNamespace(out=str(tmp_path), page=str(tmp_path / "p.md")))
    with pytest.raises(UserError, match="there are no records in --out"):
        results.main(["results"])
    assert not (tmp_path / "p.md").exists()


def test_a_target_is_not_met_by_what_says_nothing():
    target = Target.at_most("error", 0.1)
    assert target.judged(0.1).met
    assert target.judged(0.1001).met is False
    assert target.judged(float("nan")).met is None
    assert dataclasses.replace(target, least=True).judged(0.0999).met is False
