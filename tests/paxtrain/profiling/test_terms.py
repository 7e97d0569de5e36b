"""A plan's prediction beside what a run measured."""

import math

import numpy as np
import pytest

from paxtrain.profiling import breakdown, terms
from paxtrain.profiling.terms import PARTS, compare

PLANNED = {"forward": [0.5, 1.0], "backward": [1.5, 1.0], "head": [0.0, 1.0], "compression": [0.0, 0.0]}
PLANNED |= {"transfer": [1.0, 0.0], "gather": [0.0, 0.0], "reduce": [0.5, 0.5], "sync": [0.0, 0.0]}
PLANNED |= {"optimizer": [0.5, 0.5]}


def measured(**changes: list[float]) -> dict[str, np.ndarray]:
    """Return a breakdown that agrees with PLANNED, except for the changes."""
    parts = {name: np.zeros(2) for name in breakdown.PARTS}
    parts |= {"forward": np.array([0.5, 1.0]), "backward": np.array([1.5, 1.0]), "head": np.array([0.0, 1.0])}
    parts |= {"pipeline": np.array([1.0, 0.0]), "data": np.array([0.5, 0.5]), "optimizer": np.array([0.5, 0.5])}
    return parts | {name: np.array(value) for name, value in changes.items()}


def test_every_part_of_a_breakdown_belongs_to_one_term():
    assert sorted(part for parts in PARTS.values() for part in parts) == sorted(breakdown.PARTS)


@pytest.mark.parametrize(
    ("changes", "worst"),
    [
        ({"backward": [3.0, 3.0]}, "backward"),
        ({"backward": [1.0, 1.5]}, "backward"),  # one stage is quicker, the other one slower by as much
        ({"tensor/forward": [0.3, 0.3]}, "forward"),
        ({"gather": [0.1, 0.0]}, "gather"),
        ({"pipeline": [0.2, 0.0]}, "transfer"),
        ({"idle": [0.0, 0.4]}, "host"),
    ],
)
def test_the_term_that_is_off_by_most_is_named(changes, worst):
    found = compare({"step_seconds": 4.0, "terms": PLANNED}, [5.0, 4.5, 9.0], measured(**changes))
    assert found.worst() == worst
    assert (found.predicted, found.measured, found.steps) == (4.0, 5.0, 3)
    figures = found.figures()
    assert figures["predicted_forward"] == 0.75
    assert figures["measured_reduce"] == 0.5


def test_the_table_and_without_a_trace_the_step_alone(snapshot):
    traced = compare({"step_seconds": 4.0, "terms": PLANNED}, [5.0, 4.5, 9.0], measured(backward=[1.0, 1.5]))
    found = compare({"step_seconds": 4.0, "terms": PLANNED}, [5.0], {})
    assert found.figures() == {"predicted_step": 4.0, "measured_step": 5.0}
    mends = [(f"most off: {term}", words) for term, words in terms._MENDS.items()]
    lines = [f"{label:22}{words}" for label, words in [*traced.rows(), *found.rows(), *mends]]
    snapshot("terms.txt", "\n".join(lines))


def test_the_hosts_seconds_are_planned_if_an_earlier_run_measured_them():
    """Plans of an earlier version have no such term, and count as planning none."""
    for planned, seconds in (({}, 0.0), ({"host": [0.25, 0.25]}, 0.25)):
        found = compare({"step_seconds": 4.0, "terms": PLANNED | planned}, [5.0], measured(idle=[0.0, 0.4]))
        assert found.figures()["predicted_host"] == seconds


def test_a_plan_for_another_trainer_is_compared_without_advice():
    planned = {"step_seconds": 4.0, "terms": PLANNED, "trainer": "megatron-lm"}
    rows = dict(compare(planned, [5.0], measured(backward=[3.0, 3.0])).rows())
    assert rows["step"].startswith("4 s predicted for megatron-lm, 5 s measured")
    assert "most off" not in rows
    assert [terms.other_trainer({"trainer": x}) for x in ("paxtrain", "nanotron", 7, None)] == ["", "nanotron", "", ""]
    assert terms.other_trainer({}) == ""


def test_of_groups_the_median_step_is_compared_with_the_plans():
    """One of three steps waits for an exchange, so the mean is no step of theirs."""
    predicted = {"step_seconds": 6.0, "groups": {"median_step_seconds": 4.0}}
    assert compare(predicted, [4.5, 10.0, 4.5], {}).figures() == {"predicted_step": 4.0, "measured_step": 4.5}


@pytest.mark.parametrize(
    "predicted",
    [{}, {"step_seconds": "fast"}, {"step_seconds": math.nan}, {"step_seconds": 0}, {"step_seconds": 10**400}],
)
def test_plans_that_predict_nothing_are_not_compared(predicted):
    assert compare(predicted, [5.0], measured()) is None
    assert compare({"step_seconds": 4.0}, [], measured()) is None


@pytest.mark.parametrize(
    "terms",
    [
        [],
        {"forward": "much"},
        {"forward": [1.0]},
        {"forward": [[1.0, 2.0], [1.0]]},
        {"compute": [1.0, 1.0]},
        {"forward": [10**400, 1]},
    ],
)
def test_terms_of_another_form_are_left_out(terms):
    found = compare({"step_seconds": 4.0, "terms": terms}, [5.0], measured())
    assert "forward" not in found.terms
