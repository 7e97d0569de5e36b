"""The losses that reports quote are those of docs/study.md, and are quoted with their rank and source."""

import dataclasses
import pathlib
import re

import pytest

from compress.codecs import named
from configs.frontier import get_config
from paxtrain.config import OuterConfig
from paxtrain.config.options import CodecOptions
from paxtrain.study import frontier
from planner.cost.candidate import Candidate
from planner.cost.coded import coded
from planner.report import losses, text
from tests.compress_settings import compression

DENSE = Candidate(
    data=4, pipe=2, tensor=1, micro_batch=1, micro_batches=4, schedule="1f1b", chunks=1, counts=(2, 2), save="dots"
)
LOW_RANK = {"backward_rank": 16}

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
        settings |= {f"{place}_codec": point.codec, f"{place}_options": CodecOptions(point.options)}
    what = "all" if place == "backward" else "data"
    mean, _, spread = frontier_of_the_page()[point.label, what].partition(" ")
    words = losses.words(planned(**settings))
    assert f"{mean}% loss ({spread[1:-1]} over 3 seeds) after 50 steps" in words and "nothing" not in words
    mean, _, spread = frontier_of_the_page(large=True)[point.label, what].partition(" ")
    assert f"and with a width of 256 {mean}% loss ({spread[1:-1]} over 3 seeds) after 120 steps" in words


def test_the_default_of_an_amount_is_the_codecs():
    for name, (option, value) in losses.AMOUNTS.items():
        assert getattr(named.build(name, {}), option) == value


def options(**values) -> CodecOptions:
    return CodecOptions(values)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, ""),
        (
            LOW_RANK | {"backward_messages": "epilogue"},
            "the study saw +0.10% loss after 300 steps for low rank of epilogues at rank 16 of a width of 64 "
            "(docs/study.md)",
        ),
        (
            {"backward_messages": "all", "backward_rank": 8},
            "+4.3% loss after 300 steps for low rank of all messages at rank 8",
        ),
        (
            {"backward_messages": "all", "backward_rank": 32},
            "at rank 16 of a width of 64, and with a width of 256 +2.90% loss (+2.47 to +3.21 over 3 seeds) after 120 "
            "steps, and nothing at rank 32 (docs",
        ),
        (
            LOW_RANK | {"backward_messages": "all"},
            "saw +1.72% loss after 300 steps and +0.85% loss (+0.27 to +1.86 over 3 seeds) after 50 steps for low rank",
        ),
        (
            LOW_RANK | {"backward_messages": "all", "error": "none"},
            "saw +1.70% loss after 300 steps for low rank error=none of all messages at rank 16",
        ),
        (LOW_RANK | {"backward_messages": "all", "error": "explicit"}, "saw +1.72% loss"),
        (
            LOW_RANK | {"backward_messages": "epilogue", "data_stages": "all", "data_rank": 128},
            "the study saw +0.15% loss after 300 steps for low rank of epilogues and gradients over data at rank 16 of "
            "a width of 64, and nothing at rank 128 of gradients over data (docs/study.md)",
        ),
        (
            {"data_stages": "all", "data_rank": 128},
            "saw +0.09% loss (-0.75 to +1.40 over 3 seeds) after 50 steps for low rank of gradients over data at rank "
            "16 of a width of 64, and with a width of 256 -0.10% loss (-0.51 to +0.22 over 3 seeds) after 120 steps, "
            "and nothing at rank 128 (docs",
        ),
        (
            LOW_RANK | {"backward_messages": "all", "forward_messages": "all", "data_stages": "all", "data_rank": 16},
            "saw +4.54% loss after 300 steps for low rank of all messages and activations and gradients over data at",
        ),
        ({"forward_messages": "all"}, "the study has no loss for low rank of activations (docs/study.md)"),
        (
            {"backward_codec": "int8"},
            "the study saw +0.16% loss (-0.03 to +0.51 over 3 seeds) after 50 steps for int8 of all messages, and with",
        ),
        ({"backward_codec": "int8", "backward_options": options(block=64)}, "saw +0.16% loss"),
        (
            {"backward_codec": "int8", "backward_options": options(feedback=False)},
            "the study has no loss for int8 feedback=False of all messages (docs/study.md); make study measures one",
        ),
        ({"data_codec": "fp8", "data_options": options(format="e5m2")}, "saw +0.23% loss"),
        (
            {"backward_messages": "epilogue", "backward_codec": "fp8"},
            "for fp8 of all messages, and with a width of 256",
        ),
        ({"backward_codec": "remainder"}, "for remainder of all messages at rank 2 of a width of 64, and with"),
        (
            {"data_codec": "topk", "data_options": options(share=0.01)},
            "after 120 steps, and nothing at share 0.01 (docs",
        ),
        (
            {"data_codec": "int8", "data_inside": 2},
            "saw +0.11% loss (-0.16 to +0.49 over 3 seeds) after 50 steps for int8 of gradients over data, and with",
        ),
        (
            {"backward_codec": "int8", "data_codec": "int4", "weights_codec": "int4"},
            "the study has no loss for these together, but alone: +0.16% loss (-0.03 to +0.51 over 3 seeds) after 50 "
            "steps for int8 of all messages, and with a width of 256 +0.10% loss (+0.00 to +0.16 over 3 seeds) after "
            "120 steps; +0.12% loss (-0.10 to +0.28 over 3 seeds) after 50 steps for int4 of gradients over data, and "
            "with a width of 256 +0.04% loss (-0.39 to +0.37 over 3 seeds) after 120 steps; nothing for int4 of "
            "gathered weights (docs/study.md)",
        ),
        (
            {"backward_codec": "compress.codec:Identity"},
            "the study has no loss for compress.codec:Identity of all messages (docs/study.md); make study",
        ),
    ],
)
def test_a_plan_says_what_was_seen(settings, words):
    said = losses.words(planned(**settings))
    assert words in said and bool(words) == bool(said)


# --- Weights, and what groups exchange --------------------------------------------------------------------------------

GATHERED = planned(weights_codec="int4")
TABLE = planned(embedding_codec="int8")
APART = dataclasses.replace(planned(outer_codec="int8"), outer=OuterConfig(every=20, groups=2))


@pytest.mark.parametrize(
    ("candidate", "short", "long", "loss"),
    [
        (
            GATHERED,
            "wgtint4",
            "weights that are gathered over data compressed by int4",
            "no loss for int4 of gathered weights (docs/study.md); make study",
        ),
        (
            APART,
            "outint8",
            "differences between groups compressed by int8",
            "no loss for int8 of differences between groups (docs/study.md)",
        ),
        (
            TABLE,
            "embint8",
            "the embedding's gradients compressed by int8",
            "no loss for int8 of the embedding's gradients (docs/study.md); make study",
        ),
        (dataclasses.replace(TABLE, data=1, pipe=1, counts=(sum(TABLE.counts),)), "none", "no compression", ""),
        # Nothing is gathered, and nothing exchanged.
        (dataclasses.replace(GATHERED, zero1=False), "none", "no compression", ""),
        (dataclasses.replace(GATHERED, data=1), "none", "no compression", ""),
        (dataclasses.replace(APART, outer=OuterConfig()), "none", "no compression", ""),
    ],
)
def test_weights_and_differences_are_compression(candidate, short, long, loss):
    assert text.compression(candidate) == short
    assert text.compression_words(candidate) == long
    assert loss in losses.words(candidate) and bool(loss) == bool(losses.words(candidate))
