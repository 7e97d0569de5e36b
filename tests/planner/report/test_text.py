"""The report as text within a terminal's width, and as a page that fetches nothing."""

import dataclasses
import html.parser
import re
import xml.etree.ElementTree as ET

import pytest

from paxtrain.run import metrics
from planner.cluster.cluster import attained
from planner.cost.candidate import Candidate
from planner.fit.applied import priced
from planner.report import contents, further_text, page
from planner.report import text as report
from planner.report.svg import width_of
from tests.planner.examples import cluster
from tests.planner.report.reports import BY_HAND, by_hand, made_report, plan


@pytest.fixture(scope="module")
def made() -> contents.Report:
    return made_report()


def svgs(text: str) -> list[ET.Element]:
    """Return the drawings of a page."""
    return [ET.fromstring(drawn) for drawn in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


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


# --- Page -------------------------------------------------------------------------------------------------------------


class Balanced(html.parser.HTMLParser):
    """A parser that records wrongly nested tags and everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.open, self.wrong, self.fetched = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action", "data") and not value.startswith("data:"):
                self.fetched.append(value)
            if name.startswith("on"):
                self.fetched.append(name)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def checked(text: str) -> str:
    """Return a page after a check that its tags nest and that it fetches nothing."""
    parser = Balanced()
    parser.feed(text)
    assert not parser.open and not parser.wrong and not parser.fetched
    assert not re.search(r"<script|@import|url\(|https?://|\bnan\b|\binf\b", text, re.IGNORECASE)
    return text


def plain(text: str) -> str:
    """Return the words of a page, a line each; of its drawings those of the first alone, the gains."""
    text = re.sub(r"<style>.*?</style>|<title>[^<]*</title>|<span class=.bar.*?</span>", "", text, flags=re.DOTALL)
    for drawn in re.findall(r"<svg .*?</svg>", text, re.DOTALL)[1:]:
        text = text.replace(drawn, "")
    text = re.sub(r"</?(?:td|th|b|dt|span)\b[^>]*>", " ", text)
    return "\n".join(filter(None, (html.unescape(line).strip() for line in re.split(r"<[^>]*>|\n", text))))


CASES = [
    {},
    {"micro_batches": 64, "schedule": "1f1b"},
    {"micro_batches": 8, "schedule": "interleaved_1f1b"},
    {"pipe": 1, "schedule": "1f1b"},
    {"pipe": 8, "schedule": "gpipe", "micro_batches": 40, "cluster": cluster(8, 4, seed=None)},
    {"micro_batches": 24, "schedule": "zb_h1"},
    {"noise": None, "oracle": (), "explained": (), "command": "", "comparisons": []},
    {"cluster": cluster(40, 2, seed=None), "pipe": 4, "tensor": 2},
    {"cluster": cluster(1, 8), "tensor": 2},
    {"cluster": cluster(4, 4, seed=None)},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_the_page_fetches_nothing_and_stays_in_its_frames(case):
    made = made_report(**case)
    text = checked(page.page(made))
    assert len(text) < 400_000
    drawn = svgs(text)
    assert len(drawn) == 3 + 2 * bool(made.comparisons) + (
        len(made.cluster.hosts) > 1
    )  # gains: for a small screen, too
    for picture in drawn:
        width, height = (float(picture.attrib[name]) for name in ("width", "height"))
        for element in picture.iter():
            at = {name: float(element.attrib.get(name, 0)) for name in ("x", "y", "width", "height")}
            if element.tag in ("rect", "image"):
                assert -0.1 <= at["x"] <= at["x"] + at["width"] <= width + 0.1
                assert -0.1 <= at["y"] <= at["y"] + at["height"] <= height + 0.1
            if element.tag == "text" and "transform" not in element.attrib:
                wide = 0.9 * width_of("".join(element.itertext()), float(element.attrib["font-size"]))
                left = at["x"] - wide * {"start": 0, "middle": 0.5, "end": 1}[element.attrib["text-anchor"]]
                assert left >= -1 and left + wide <= width + 1, "".join(element.itertext())
                assert 0 < at["y"] <= height


def test_words_of_the_input_are_no_markup(made):
    evil = '<script>alert("x")</script>&'
    renamed = dataclasses.replace(made.cluster, name=evil, hosts=tuple(f"<b>h{i}&" for i in range(4)))
    text = page.page(dataclasses.replace(made, cluster=renamed, command=evil, sources={evil: evil}, explained=(evil,)))
    checked(text.replace(html.escape(evil), ""))
    assert "<b>h0" not in text and html.escape("<b>h0&") in text


def test_bars_are_as_long_as_what_they_stand_for(made):
    picture = svgs(page.page(made))[0]
    bars = [float(e.attrib["width"]) for e in picture.iter() if e.tag == "rect"]
    assert bars[0] / bars[1] == pytest.approx(25, rel=0.05)
    memory = next(p for p in svgs(page.page(made)) if p.attrib["aria-label"].startswith("Memory"))
    tall = {e.find("title").text: float(e.attrib["height"]) for e in memory.iter("rect") if e.find("title") is not None}
    assert len(tall) == 4
    assert tall["stage 0, activations: 40.00 GB"] / tall["stage 1, activations: 10.00 GB"] == pytest.approx(4, rel=0.05)
