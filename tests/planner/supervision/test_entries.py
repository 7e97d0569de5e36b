"""Every value that supervisors put on the board fits its kind when it has been JSON, and others do not."""

import dataclasses
import json
import re

import pytest

from paxtrain.process.supervised import MeshPosition
from planner.supervision import entries
from planner.supervision.first_cause import FaultCause, HostReport
from planner.supervision.slow_step import SlowStepNote, StepView
from planner.supervision.worker_process import WorkerStatus
from tests.sources import ROOT

WORKER = WorkerStatus("running", None, "", False, False, "", False, 3, "", "", 0.0, 0.5, None)
GOOD = {
    "here": "0123",
    "name": "pax0",
    "report": HostReport("pax0", WORKER, False, {1: "refused"}, {2: (1.5, 0.0)}, 0.0, True).to_json(),
    "verdict": dataclasses.asdict(FaultCause("killed", ("pax0",), None, 1.0, "is gone", ("pax0",))),
    "done": 7,
    "slow": 3.1,
    "place": dataclasses.asdict(MeshPosition(1, "stage 1", (0, 2))),
    "view": StepView(WORKER, True, 3, 0.1, {1: (1e6, 2e6)}).to_json(),
    "note": dataclasses.asdict(SlowStepNote("note: step 3 took 4 s", (0, 2))),
    "aside": 0.001,
}


def carried(value):
    return json.loads(json.dumps(value))


def test_what_supervisors_say_fits():
    assert GOOD.keys() == entries.KINDS.keys()
    assert {kind: entries.fits(kind, carried(value)) for kind, value in GOOD.items()} == dict.fromkeys(GOOD, True)
    assert entries.fits("done", None) and entries.fits("report", carried(HostReport("a").to_json()))
    HostReport.from_json(carried(GOOD["report"]))
    StepView.from_json(carried(GOOD["view"]))


def test_every_kind_that_is_put_is_known():
    """One that is not would end connections when it comes."""
    source = "".join(path.read_text() for path in (ROOT / "planner/supervision").glob("*.py"))
    put = set(re.findall(r'board\.put\(f?"(\w+)/', source))
    assert put == entries.KINDS.keys() - {"aside"}


@pytest.mark.parametrize("kind", GOOD)
def test_other_types_do_not_fit(kind):
    others = ["abc", 7, 2.5, True, None, [], {}, float("nan"), [1], {"a": 1}]
    fitting = [other for other in others if entries.fits(kind, other)]
    expected = {"here": ["abc"], "name": ["abc"], "done": [7, None], "slow": [7, 2.5], "aside": [7, 2.5]}
    assert fitting == expected.get(kind, [])
    assert not entries.fits("unknown", GOOD[kind])


@pytest.mark.parametrize(
    ("kind", "path", "value"),
    [
        ("report", ("worker", "step"), "3"),
        ("report", ("worker", "more"), 1),
        ("report", ("unreachable",), {"x": "refused"}),
        ("report", ("unreachable",), {"٣": "refused"}),
        ("report", ("unreachable",), {"1": 5}),
        ("report", ("silences",), {"2": [1.5]}),
        ("report", ("silences",), {"2": [1.5, float("inf")]}),
        ("verdict", ("hosts",), "pax0"),
        ("verdict", ("hosts",), [1]),
        ("verdict", ("sentence",), None),
        ("view", ("links",), {"1": [1e6, "fast"]}),
        ("place", ("neighbours",), [0, "2"]),
    ],
)
def test_a_part_of_another_type_does_not_fit(kind, path, value):
    changed = carried(GOOD[kind])
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    assert not entries.fits(kind, changed)
