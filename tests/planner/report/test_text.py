"""The report as text within a terminal's width, and the words of its page."""

import dataclasses

import pytest

from paxtrain.run import metrics
from planner.cluster.cluster import attained
from planner.cost.candidate import Candidate
from planner.fit.applied import priced
from planner.report import contents, further_text, page
from planner.report import text as report
from tests.planner.examples import cluster
from tests.planner.report.reports import BY_HAND, by_hand, checked, made_report, plain, plan


@pytest.fixture(scope="module")
def made() -> contents.Report:
    return made_report()


# --- Terminal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("report_of", BY_HAND, ids=lambda report_of: report_of.__name__)
def test_the_terminal_and_the_page_say_what_was_found(report_of, snapshot):
    made = report_of()
    said = [*report.text(made).splitlines(), *further_text.lines(made)]
    assert all(len(line) <= 120 for line in said)
    snapshot(f"{report_of.__name__}.txt", "\n".join([*said, "", "--- The page ---", plain(checked(page.page(made)))]))


def test_a_plan_stands_above_a_quicker_one_that_stalls():
    two = contents.Outlook(0.4, 0.6, 0.5, 0.0, 1.0, 0.0), contents.Outlook(0.4, 2.0, 0.75, 0.25, 1.0, 0.75)
    made = by_hand(plan(0.5), plan(0.48), some=priced(cluster(4, 4, seed=None), "nanotron"), outlooks=two)
    assert report.ranking_words(made) == (
        "plan 1 (0.5 s) stands above plan 2 (0.48 s), since runs of nanotron stall: expected are 0.5 s and 0.75 s"
    )
    assert report.assumed_words(made).startswith("times assume nanotron's constants")
    assert "stall" not in report.ranking_words(dataclasses.replace(made, outlooks=two[:1] * 2))


def test_a_plan_that_may_not_fit_is_told_with_one_that_will():
    doubtful, sure = (contents.Outlook(0.4, 0.6, 0.5, 0.0, fits, 0.7) for fits in (0.92, 0.97))
    made = by_hand(plan(0.5), plan(0.51), plan(0.6), outlooks=(doubtful, doubtful, sure))
    assert report.memory_words(made).endswith(", fits with 92% only; plan 3 fits with 97% (step +20.0%)")
    nobody = dataclasses.replace(made, outlooks=(doubtful,) * 3)
    assert report.memory_words(nobody).endswith("with 92% only; a smaller --usable_memory looks for leaner plans")
    assert report.memory_words(dataclasses.replace(made, outlooks=(sure,) * 3)).endswith(", fits with 97%")


def test_the_model_is_named_if_its_name_is_known():
    made = by_hand(plan(0.5), named="mine<1>")
    assert report.text(made).startswith("mine<1>: ") and "<h1>A plan for mine&lt;1&gt;, " in page.page(made)
    assert not report.text(by_hand(plan(0.5))).startswith("mine")


def test_the_margin_is_told_if_the_figures_have_it():
    made = by_hand(plan(0.5), sources={"memory of the ranked plans": "closed form + 20%, as on 65 programs"})
    assert "what the program allocates, plus a safety margin" in " ".join(report.terms(made))
    assert "margin" not in " ".join(report.terms(by_hand(plan(0.5))))


def test_links_that_were_not_measured_are_told():
    some = attained(dataclasses.replace(cluster(4, 4, seed=None), nominal=("between",)))
    words = report.assumed_words(by_hand(plan(0.5), some=some))
    assert words == (
        "times assume paxtrain's constants; links reach 70% between hosts of their nominal rates, as in published runs"
    )


def test_the_widest_table_fits(made):
    widest = Candidate(
        data=1024,
        pipe=128,
        tensor=16,
        micro_batch=128,
        micro_batches=1000,
        schedule="interleaved_1f1b",
        chunks=4,
        counts=tuple(range(1, 129)),
        save="layer_inputs",
        shard="none",
        backward="epilogue",
        backward_rank=128,
        data_rank=128,
    )
    placement = dataclasses.replace(made.chosen.placement, source="host order", bound=made.chosen.seconds / 1.123)
    found = dataclasses.replace(made.chosen, candidate=widest, placement=placement)
    wide = dataclasses.replace(made, chosen=found, outcome=dataclasses.replace(made.outcome, ranked=[found] * 12))
    rows = [line for line in report.text(wide).splitlines() if "1024x128x16" in line]
    assert len(rows) == 12 and all(row.endswith("host order") and len(row) <= 120 for row in rows)


def test_mfu_is_the_trainers(made):
    products = 12 * 12 * 1024**2 + 50257 * 1024  # of a token, by hand; norms and biases are 0.1% more
    flops = 6 * products + 12 * 12 * 1024 * 1024
    by_hand = made.global_batch * 1024 * flops / made.chosen.seconds / (16 * 312e12)
    assert by_hand < made.mfu < 1.002 * by_hand
    trainers = metrics.mfu(made.global_batch * 1024 / made.chosen.seconds, made.model, 16, 312e12)
    assert made.mfu == pytest.approx(trainers)
    cpus = dataclasses.replace(made.cluster, kinds=("cpu",) * 4)
    assert dataclasses.replace(made, cluster=cpus).mfu is None


def test_the_gap_is_over_the_bound_of_all_plans(made):
    def gap(bound: float) -> float:
        report = dataclasses.replace(made, outcome=dataclasses.replace(made.outcome, bound=bound))
        return contents.gap(report, made.chosen)

    assert gap(made.chosen.seconds / 1.02) == pytest.approx(0.02)
    assert gap(made.chosen.seconds * (1 + 1e-12)) == 0
    assert made.outcome.bound <= made.chosen.seconds


@pytest.mark.parametrize(
    ("share", "short", "long"),
    [
        (0.177, "+17.7%", "+17.7%"),
        (-0.01, "-1.00%", "-1.00%"),
        (1.0, "+100.0%", "+100.0%"),
        (21.058, "22.1 times", "22.1 times as long"),
        (1233.6, "1,235 times", "1,235 times as long"),
    ],
)
def test_much_more_is_a_multiple(share, short, long):
    assert (report.percent(share), report.longer(share)) == (short, long)


@pytest.mark.parametrize(
    "counts, width, words",
    [((5, 5, 5, 4), 20, "5x3,4"), ((18,), 20, "18"), ((1, 2, 1, 2, 3, 4), 8, "1 to 4"), ((2, 2), 3, "2x2")],
)
def test_layers_are_told_in_short(counts, width, words):
    assert report.stage_layers(counts, width) == words
