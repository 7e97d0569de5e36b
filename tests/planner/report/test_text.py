"""The report as text within a terminal's width, and as a page that fetches nothing."""

import dataclasses
import html.parser
import re
import xml.etree.ElementTree as ET

import pytest

from paxtrain.run import metrics
from planner.cost.candidate import Candidate
from planner.report import contents, page
from planner.report import text as report
from planner.report.svg import width_of
from planner.search.nearby import Nearby
from tests.planner.examples import cluster
from tests.planner.report.reports import made_report, other_choice


@pytest.fixture(scope="module")
def made() -> contents.Report:
    return made_report()


def svgs(text: str) -> list[ET.Element]:
    """Return the drawings of a page."""
    return [ET.fromstring(drawn) for drawn in re.findall(r"<svg .*?</svg>", text, re.DOTALL)]


# --- Terminal ---------------------------------------------------------------------------------------------------------


def test_the_terminal_says_what_was_found(made):
    text = report.text(made)
    assert all(len(line) <= 120 for line in text.splitlines())
    lines = text.splitlines()
    first = next(i for i, line in enumerate(lines) if "d x p x t" in line) + 1
    rows = lines[first : first + len(made.outcome.ranked)]
    for n, (row, found) in enumerate(zip(rows, made.outcome.ranked), 1):
        assert row.split()[0] == (f"{n}*" if found is made.chosen else f"{n}")
        assert f"{found.seconds:.4g}" in row and f"{found.memory / 1e9:.3g}" in row
        assert row.endswith(found.placement.source)
    assert "host order +25.0%" in text and "no compression -1.00%" in text
    assert "24.00 ± 1.00% over host order" in text
    assert f"{made.outcome.enumerated:,} candidates" in text


def test_the_star_is_at_the_chosen_plan(made):
    [starred] = [row for row in report.table(other_choice(made, 2)) if row[0].endswith("*")]
    assert starred[0] == "3*"


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
        zero1=False,
        backward="epilogue",
        backward_rank=128,
        data_rank=128,
    )
    placement = dataclasses.replace(made.chosen.placement, source="host order", bound=made.chosen.seconds / 1.123)
    found = dataclasses.replace(made.chosen, candidate=widest, placement=placement)
    wide = dataclasses.replace(made, chosen=found, outcome=dataclasses.replace(made.outcome, ranked=[found] * 12))
    rows = [line for line in report.text(wide).splitlines() if "1024x128x16" in line]
    assert len(rows) == 12 and all(row.endswith("host order") and len(row) <= 120 for row in rows)


def test_how_sure_the_gain_is_comes_with_it(made):
    weak = dataclasses.replace(made, noise=contents.Noise(0.01, 0.008, "so it is within the noise"))
    assert "1.00 ± 0.80% over host order; so it is within the noise" in report.text(weak)
    assert "measured once" in report.text(dataclasses.replace(made, noise=None))


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


def test_plans_near_by_are_told(made):
    found = dataclasses.replace(
        made.chosen, placement=dataclasses.replace(made.chosen.placement, seconds=made.chosen.seconds / 2)
    )
    fewer = Nearby(found, made.global_batch, ("host1", "host3"), 1.0)
    other = Nearby(found, made.global_batch - 8, (), 0.5)
    said = report.text(dataclasses.replace(made, nearby=(fewer, other)))
    assert "2 of 4 hosts are quicker" in said and "--without=host1,host3" in said
    assert f"a global batch of {made.global_batch - 8} divides better" in said and "+50.0%" in said
    assert "nearby" not in report.text(made)


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


def test_much_slower_plans_are_so_many_times_as_long(made):
    other = dataclasses.replace(made.comparisons[0], seconds=22.06 * made.chosen.seconds)
    noise = contents.Noise(21.06, 0.03, "over 3 samples of the links")
    bound = dataclasses.replace(made.outcome, bound=made.chosen.seconds / 3)
    slow = dataclasses.replace(made, comparisons=[other], noise=noise, outcome=bound)
    said, drawn = report.text(slow), checked(page.page(slow))
    assert "host order 22.1 times as long (the same plan" in " ".join(said.split())
    assert "host order takes 22.06 ± 0.03 times as long as the placement; over 3 samples" in said
    for words in ("22.1 times  ·", "22.06 ± 0.03 times by sample", "≤ 3 times", "as long as the best possible plan"):
        assert words in drawn
    found = dataclasses.replace(
        made.chosen, placement=dataclasses.replace(made.chosen.placement, seconds=made.chosen.seconds / 3)
    )
    near = Nearby(found, made.global_batch, ("host1",), 2.0)
    [words] = report.nearby_words(dataclasses.replace(made, nearby=(near,)))
    assert words.endswith(", 3 times as many; --without=host1")


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


def test_the_page_says_what_the_terminal_says(made):
    text = page.page(made)
    plain = html.unescape(re.sub(r"<[^>]*>", "\n", text))
    for row in report.table(made):
        assert all(cell in plain for cell in row)
    for words in (report.statistics(made), made.command, "made up", "needs 99.0 GB", "XLA for a GPU", "12.5 s"):
        assert words in plain
    assert f"≤ {report.share(contents.gap(made, made.chosen))}" in plain


def test_a_plan_that_was_not_taken_is_named(made):
    text = page.page(other_choice(made, 1))
    assert "Plan 1 was not chosen" in text and "Plan 2 was not chosen" not in text
    assert "was not chosen" not in page.page(made)


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
