"""The page as HTML that fetches nothing, whatever the words of the input are."""

import dataclasses
import html
import json
import re

import pytest

from planner.report import page
from tests.planner.examples import cluster
from tests.planner.report.reports import checked, made_report

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


def data_of(text: str) -> dict:
    """Return what the page's scripts read."""
    return json.loads(re.search(r'<script type="application/json" id="report">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize("case", CASES, ids=lambda case: ",".join(case) or "plain")
def test_the_page_fetches_nothing_and_has_its_charts(case):
    made = made_report(**case)
    text = page.page(made)
    assert "default-src 'none'" in checked(text) and len(text) < 1_500_000
    names = ["gains"] * bool(made.comparisons) + ["links_before", "links_after"] * (len(made.cluster.hosts) > 1)
    names += ["step", "memory", "candidates"]
    assert list(data_of(text)["charts"]) == names
    assert sorted(re.findall(r'data-chart="(\w+)"', text)) == sorted(names)


def test_words_of_the_input_are_no_markup():
    made, evil = made_report(), """<script>alert("x")</script>&'<!--"""
    renamed = dataclasses.replace(made.cluster, name=evil, hosts=tuple(f"<b>h{i}&" for i in range(4)))
    changes = {"cluster": renamed, "command": evil, "sources": {evil: evil}, "explained": (evil,), "named": evil}
    text = page.page(dataclasses.replace(made, **changes))
    assert "<b>h0" not in text and "alert(" not in re.sub(r"&lt;script&gt;alert|\\u003cscript\\u003ealert", "", text)
    checked(text)
    assert html.escape("<b>h0&") in text and evil not in text
    assert data_of(text)["charts"]["links_before"]["params"][0]["value"][0] == "<b>h0&"


def test_the_libraries_licences_are_in_the_page_beside_them():
    """The conditions of BSD's, ISC's and MIT's licences, and who holds the copyrights."""
    script = page.page(made_report()).split("<script>")[1]
    kept = script.removeprefix("/*!").partition("*/")
    assert script.startswith("/*!") and kept[2].strip().startswith(page.library())
    holders = "University of Washington Interactive Data Lab", "Mike Bostock", "Joachim Wester", "Mapbox"
    conditions = "Redistributions in binary form must reproduce", "appear in all copies", "substantial portions of the"
    assert all(words in kept[0] for words in (*holders, *conditions, 'PROVIDED "AS IS"', "2015-2023"))
