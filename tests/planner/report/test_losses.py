"""The losses that reports quote are those of docs/study.md, and are quoted with their rank and source."""

import dataclasses
import pathlib
import re

import pytest

from planner.cost.candidate import Candidate
from planner.cost.coded import Coded
from planner.report import losses

DENSE = Candidate(
    data=2, pipe=2, tensor=1, micro_batch=1, micro_batches=4, schedule="1f1b", chunks=1, counts=(2, 2), save="dots"
)

PAGE = (pathlib.Path(__file__).resolve().parents[3] / losses.SOURCE).read_text()


def on_the_page():
    """Return the percentages of the page's tables by run; a row may have several, by rank."""
    found = {}
    for name, cell in re.findall(r"^\| ([^|]+) \| [^|]+ \| ([^|]*%) \|", PAGE, re.MULTILINE):
        run, _, ranks = name.partition(", rank ")
        for i, percent in enumerate(re.findall(r"[+-][\d.]+", cell)):
            found[f"{run}, rank {ranks.split(', ')[i]}" if ranks else run] = percent
    # The frontier's rows have bytes, time and loss between stages first.
    for name, percent in re.findall(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([+-][\d.]+) \(", PAGE, re.MULTILINE):
        found[f"gradients between stages, {name}"] = percent
    return found


def test_the_figures_are_those_of_the_page():
    page, seen = on_the_page(), [one for row in losses.SEEN.values() for one in row]
    assert len(page) >= len(seen) > 0
    for one in seen:
        digits = len(page[one.run].partition(".")[2])
        assert f"{100 * one.share:+.{digits}f}" == page[one.run], one.run
    assert f"of {losses.WIDTH}" in PAGE


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, r"^$"),
        (
            {"backward": "epilogue", "backward_rank": 16},
            r"saw \+0.10% loss at rank 16 of a width of 64 \(docs",
        ),
        ({"backward": "all", "backward_rank": 8}, r"saw \+4.30% loss at rank 8 of"),
        ({"backward": "all", "backward_rank": 32}, r"\+1.72% loss at rank 16 .*, and nothing at rank 32"),
        ({"backward": "epilogue", "backward_rank": 16, "data_rank": 16}, r"\+0.15% loss"),
        ({"data_rank": 128}, r"no loss for low rank of gradients over data \(docs/study.md\)"),
        (
            {"backward": "all", "backward_rank": 1, "coded": Coded(names=(("backward", "int8"),))},
            r"saw \+0.16% loss \(docs/study.md\)",
        ),
        (
            {"backward": "all", "backward_rank": 1, "coded": Coded(names=(("backward", "mine:Codec"),))},
            r"no loss for mine:Codec of all messages",
        ),
    ],
)
def test_a_plan_says_what_was_seen(changes, words):
    assert re.search(words, losses.words(dataclasses.replace(DENSE, **changes)))
