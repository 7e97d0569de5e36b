"""The losses that reports quote are those of docs/study.md, and are quoted with their rank and source."""

import dataclasses
import pathlib
import re

import pytest

from compress.codecs import named
from configs.frontier import get_config
from paxtrain.config import OuterConfig
from paxtrain.config.options import OptionValues
from paxtrain.study import frontier
from planner.cost.candidate import Candidate
from planner.cost.coded import coded
from planner.report import losses, text
from tests.compress_settings import compression

DENSE = Candidate(
    data=4, pipe=2, tensor=1, micro_batch=1, micro_batches=4, schedule="1f1b", chunks=1, counts=(2, 2), save="dots"
)

PAGE = (pathlib.Path(__file__).resolve().parents[3] / losses.SOURCE).read_text()


def runs_of_the_page() -> dict[str, str]:
    """Return the percentages of the table of runs by run; a row may have several, by rank."""
    found = {}
    for name, cell in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]*%) \|", PAGE, re.MULTILINE):
        run, _, ranks = name.partition(", rank ")
        for i, percent in enumerate(re.findall(r"[+-][\d.]+", cell)):
            found[f"{run}, rank {ranks.split(', ')[i]}" if ranks else run] = percent
    return found


def frontier_of_the_page(large: bool = False) -> dict[tuple[str, str], str]:
    """Return the losses of a frontier's table, with their spreads, by row and by what was compressed."""
    loss = r"([+-][\d.]+ \([+-][\d.]+ to [+-][\d.]+\))"
    cost = r"[\d.]+ \| [\d.]+"
    page = PAGE.partition("### With 6.4 million parameters")[2 if large else 0]
    rows = re.findall(rf"^\| ([^|]+) \| {cost} \| {loss} \| {cost} \| {loss} \|(?: [^|]+ \|)?$", page, re.MULTILINE)
    return {(name, what): cell for name, *cells in rows for what, cell in zip(("all", "data"), cells, strict=True)}


def test_the_figures_are_those_of_the_page():
    page, seen = runs_of_the_page(), [one for row in losses.SEEN.values() for one in row if one.steps == losses.LONG]
    assert {one.run for one in seen} == page.keys() - {"CB epilogue + FE"}  # which compresses as the epilogue alone
    assert {one.run: one.percent for one in seen}.items() <= page.items()
    assert f"of {losses.WIDTH}" in PAGE and f"trained for {losses.LONG} steps" in PAGE


@pytest.mark.parametrize(("steps", "width"), [(losses.SHORT, losses.WIDTH), (losses.LARGE, losses.WIDE)])
def test_the_frontier_is_that_of_the_page(steps, width):
    page = frontier_of_the_page(large=width == losses.WIDE)
    seen = [(kind, one) for kind, row in losses.SEEN.items() for one in row if one.steps == steps]
    assert {(one.run, kind.what): one.percent for kind, one in seen} == page
    assert len(page) == 2 * len(frontier.POINTS) == len(seen) and {one.width for _, one in seen} == {width}
    assert f"{steps} steps of 2,048 tokens, seeds 0 to {losses.SEEDS - 1}" in PAGE
    assert get_config().model.hidden == losses.WIDE


def planned(**settings) -> Candidate:
    """Return a candidate of a compress section that compresses where the section does."""
    compress = compression(**settings)
    between, over = compress.backward.chosen, compress.data.chosen != "none"
    ranks = {"backward_rank": compress.backward.rank, "data_rank": compress.data.rank * over}
    return dataclasses.replace(DENSE, coded=coded(compress), backward=between, **ranks)


@pytest.mark.parametrize("point", frontier.POINTS, ids=lambda point: point.label)
@pytest.mark.parametrize("place", ["backward", "data"])
def test_each_codec_of_the_frontier_is_found(place, point):
    """A plan with the codec and the options of a point quotes that point's row."""
    chosen = "stages" if place == "data" else "messages"
    settings = {f"{place}_{chosen}": "all", f"{place}_rank": point.rank or 16, "data_rank_min": 1}
    if not point.rank:
        settings |= {f"{place}_codec": point.codec, f"{place}_options": OptionValues(point.options)}
    what = "all" if place == "backward" else "data"
    mean, _, spread = frontier_of_the_page()[point.label, what].partition(" ")
    words = losses.words(planned(**settings))
    assert f"{mean}% loss ({spread[1:-1]} over 3 seeds) after 50 steps" in words and "nothing" not in words
    mean, _, spread = frontier_of_the_page(large=True)[point.label, what].partition(" ")
    assert f"and with a width of 256 {mean}% loss ({spread[1:-1]} over 3 seeds) after 120 steps" in words


def test_the_default_of_an_amount_is_the_codecs():
    for name, (option, value) in losses.AMOUNTS.items():
        assert getattr(named.build(name, {}), option) == value


def options(**values) -> OptionValues:
    return OptionValues(values)


BETWEEN = {"backward_messages": "all", "backward_rank": 16}
EPILOGUE = {"backward_messages": "epilogue", "backward_rank": 16}
OVER_DATA = {"data_stages": "all", "data_rank": 128}
FORWARD = {"forward_messages": "all"}
INT8 = {"backward_codec": "int8"}
PLANS = [
    EPILOGUE,
    BETWEEN | {"backward_rank": 8},
    BETWEEN | {"backward_rank": 32},
    BETWEEN,
    BETWEEN | {"error": "none"},
    BETWEEN | {"error": "explicit"},
    EPILOGUE | OVER_DATA,
    OVER_DATA,
    BETWEEN | FORWARD | OVER_DATA | {"data_rank": 16},
    FORWARD,
    INT8,
    INT8 | {"backward_options": options(block=64)},
    INT8 | {"backward_options": options(feedback=False)},
    {"data_codec": "fp8", "data_options": options(format="e5m2")},
    {"backward_messages": "epilogue", "backward_codec": "fp8"},
    {"backward_codec": "remainder"},
    {"data_codec": "topk", "data_options": options(share=0.01)},
    {"data_codec": "int8", "data_inside": 2},
    INT8 | {"data_codec": "int4", "weights_codec": "int4"},
    {"backward_codec": "compress.codec:Identity"},
    {"weights_codec": "int4"},
    {"embedding_codec": "int8"},
]


def test_a_plan_says_what_was_seen(snapshot):
    assert losses.words(planned()) == ""
    plans = {" ".join(f"{k}={v}" for k, v in plan.items()): planned(**plan) for plan in PLANS}
    plans["outer_codec=int8 in two groups"] = APART
    said = [(name, text.compression(c), text.compression_words(c), losses.words(c)) for name, c in plans.items()]
    snapshot("losses.txt", "\n".join(map("\n    ".join, said)))


# --- What does not travel ---------------------------------------------------------------------------------------------

GATHERED = planned(weights_codec="int4")
TABLE = planned(embedding_codec="int8")
APART = dataclasses.replace(planned(outer_codec="int8"), outer=OuterConfig(every=20, groups=2))


@pytest.mark.parametrize(
    "candidate",
    [
        dataclasses.replace(TABLE, data=1, pipe=1, counts=(sum(TABLE.counts),)),
        dataclasses.replace(GATHERED, shard="none"),
        dataclasses.replace(GATHERED, data=1),
        dataclasses.replace(APART, outer=OuterConfig()),
    ],
)
def test_what_does_not_travel_is_not_compressed(candidate):
    assert text.compression(candidate) == "none" and text.compression_words(candidate) == "no compression"
    assert losses.words(candidate) == ""
