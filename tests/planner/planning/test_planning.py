"""Planning from Python: ranked plans, figures as arrays, and options."""

import dataclasses
import json

import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.config import plan as plans
from planner.planning.planning import PLAN, REPORT
from tests.planner.examples import cluster

OPTIONS = planner.PlanOptions(memory_margin=False, top=3, placed=1, oracle="no")


@pytest.fixture(scope="module")
def config():
    small = {"layers": 4, "hidden": 64, "heads": 4, "sequence": 32, "vocab_size": 1000}
    return paxtrain.load_config("tiny", {f"model.{name}": value for name, value in small.items()})


@pytest.fixture(scope="module")
def found(config):
    return planner.plan(config, cluster(2, 4), OPTIONS, explained=True)


def test_plans_are_ranked_with_figures_as_arrays(found):
    assert 1 <= len(found.ranked) <= OPTIONS.top
    assert found.step_seconds.shape == found.memory_bytes.shape == (len(found.ranked),)
    assert found.step_seconds[0] > 0 and (found.step_seconds >= [plan.bound for plan in found.ranked]).all()
    best = found.ranked[0]
    mesh = found.plan.mesh
    assert (mesh.data, mesh.pipe, mesh.tensor) == (best.candidate.data, best.candidate.pipe, best.candidate.tensor)
    assert mesh.devices == 8 and best.hosts.shape == (best.candidate.data, best.candidate.pipe)
    assert found.plan.predicted["step_seconds"] == best.seconds
    assert found.explain()


def test_what_is_saved_is_what_the_trainer_reads(found, tmp_path):
    found.save(tmp_path / "new")
    assert plans.load(tmp_path / "new" / PLAN) == plans.from_json(json.loads(json.dumps(plans.to_json(found.plan))))
    page = (tmp_path / "new" / REPORT).read_text()
    assert page == found.html() and "<svg" in page
    assert f"{found.plan.mesh.data}x{found.plan.mesh.pipe}x{found.plan.mesh.tensor}" in found.text()
    (tmp_path / "file").write_text("")
    with pytest.raises(paxtrain.UserError, match="cannot write the plan to"):
        found.save(tmp_path / "file")


def test_options_narrow_the_choice(config, found):
    pipe = found.plan.mesh.pipe
    other = next(size for size in (1, 2, 4) if size != pipe)
    narrowed = planner.plan(config, cluster(2, 4), dataclasses.replace(OPTIONS, pipe=(other,)))
    assert narrowed.plan.mesh.pipe == other
    assert np.min([plan.seconds for plan in narrowed.ranked]) >= found.step_seconds.min()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"compress": ("everything",)}, "--compress must be none or some of epilogue"),
        ({"schedules": ()}, "--schedules must be some of .*, got none"),
        ({"schedules": ("zb_h1",), "saves": ("inputs",)}, "--schedules=zb_h1 needs --saves=dots or residuals"),
        ({"pipe": (0,)}, "--pipe must be positive integers"),
        ({"tensor": ("2",)}, "--tensor must be positive integers"),
        ({"quantile": float("nan")}, "--quantile must be a number, got nan"),
        ({"usable_memory": 1.5}, "--usable_memory must be 0.05 to 1, got 1.5"),
        ({"top": 0}, "--top must be at least 1, got 0"),
        ({"oracle": "perhaps"}, "--oracle must be one of auto, yes, no"),
    ],
)
def test_options_that_make_no_sense_are_one_sentence(changes, words):
    with pytest.raises(paxtrain.UserError, match=words):
        planner.PlanOptions(**changes)
