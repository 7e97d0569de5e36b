"""The record of a run: rows that planner.validate reads, and corrections of the next plan's profile."""

import dataclasses

import numpy as np
import pytest

from paxtrain.config import Config, from_dict
from paxtrain.profiling.terms import StepComparison
from planner.fit import trials
from planner.measure.machines import Machines
from planner.start import run_record
from tests.planner.examples import cluster

TIMES = {"forward": 1e-3, "backward": 2e-3, "head": 1e-3, "embedding": 1e-4, "optimizer": 1e-10}
ROW = {"kind": "a100-80gb", "tensor": 1, "micro_batch": 1, "save": "dots", "hidden": 64, **TIMES}
MACHINES = Machines(("a", "b"), (0, 1), (), 2, ("a100-80gb",) * 2, (8e10,) * 2, ("", ""))


def config(out) -> Config:
    return from_dict(
        {
            "model": {"layers": 5, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000},
            "mesh": {"data": 2, "pipe": 2, "tensor": 1},
            "batch": {"global_batch": 8, "micro_batch": 2},
            "run": {"out": str(out)},
        }
    )


def comparison(backward: list[float], spread: float = 0.0) -> StepComparison:
    """Return a comparison whose B was to take 1 s on both stages, and whose optimizer 0.5 s; the head takes twice."""
    half, none = np.array([0.5, 0.5]), np.zeros(2)
    terms = {"backward": (np.ones(2), np.array(backward)), "optimizer": (half, half), "transfer": (none, half)}
    terms["head"] = np.array([0.0, 0.1]), np.array([0.0, 0.2])
    return StepComparison(2.0, 3.0, 12, spread, terms)


def profiled():
    return dataclasses.replace(cluster(2, 2), compute=(ROW,))


def test_every_start_is_a_row_that_validate_reads(tmp_path):
    for seconds in (3.0, 2.5):
        found = dataclasses.replace(comparison([1.0, 1.0]), measured=seconds)
        run_record.record(tmp_path, config(tmp_path), MACHINES, found, None)
    untraced = dataclasses.replace(comparison([1.0, 1.0]), terms={})
    run_record.record(tmp_path, config(tmp_path), MACHINES, untraced, None)
    rows = trials.read(tmp_path / run_record.TRIALS)
    assert [row.seconds for row in rows] == [3.0, 2.5, 3.0]
    assert rows[0].device_kinds == ("a100-80gb", "a100-80gb")
    assert (rows[0].dp, rows[0].pp, rows[0].stage_layers) == (2, 2, config(tmp_path).stage_layers)
    assert rows[0].columns["predicted_backward"] == "1"
    assert rows[2].columns["predicted_backward"] == ""


@pytest.mark.parametrize(
    ("backward", "spread", "factor"),
    [
        ([2.0, 2.0], 0.01, 2.0),
        ([2.0, 2.0], 0.6, 1.0),  # the steps differ so much that it may be chance
        ([0.7, 2.3], 0.0, 1.0),  # the stages do
        ([1.0, 1.0], 0.0, 1.0),
    ],
)
def test_a_term_is_corrected_if_it_was_off_by_more_than_chance(tmp_path, backward, spread, factor):
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison(backward, spread), None)
    found, told = run_record.corrected(profiled(), tmp_path)
    expected = {"backward": factor, "head": 2.0 if spread < 0.2 else 1.0}
    for name, seconds in TIMES.items():
        assert found.compute[0][name] == pytest.approx(expected.get(name, 1.0) * seconds)
    assert found.compute[0]["hidden"] == 64
    assert told.get("correction", {}) == pytest.approx({name: x for name, x in expected.items() if x != 1.0})
    assert ("backward x" in found.source) == (factor != 1.0)


def test_a_plan_that_was_made_with_a_correction_corrects_it(tmp_path):
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([2.0, 2.0]), None)
    _, told = run_record.corrected(profiled(), tmp_path)
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([1.3, 1.3]), told["correction"])
    assert run_record.read_corrections(tmp_path)["backward"][0] == pytest.approx(2 * 1.3)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", '{"head": 3}', '{"head": {"factor": "a", "error": 0}}'])
def test_a_damaged_record_corrects_nothing(tmp_path, text):
    (tmp_path / run_record.CORRECTIONS).write_text(text)
    (tmp_path / run_record.TRIALS).write_bytes(b"\xff\xfe")
    assert run_record.read_corrections(tmp_path) == {}
    run_record.record(tmp_path, config(tmp_path), MACHINES, comparison([2.0, 2.0]), "damaged")
    assert len(trials.read(tmp_path / run_record.TRIALS)) == 1
