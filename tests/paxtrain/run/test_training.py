"""A plan of another model is told before training, and a plan of the same model is not."""

import dataclasses

import pytest

from paxtrain.config.plan import Plan, shape
from paxtrain.errors import UserError
from paxtrain.run import training
from tests import small

CONFIG = small.config((2, 2, 2))


def plan_for(model) -> Plan:
    sections = (CONFIG.mesh, CONFIG.pipeline, CONFIG.batch, CONFIG.compress)
    return Plan(*sections, predicted={"model": {"name": "other", **shape(model)}})


@pytest.fixture
def said(monkeypatch, capsys):
    """Return said(plan, quiet): stderr of training that ends where a run would begin."""

    def ends(*_):
        raise UserError("the run begins")

    monkeypatch.setattr(training, "Run", ends)

    def train(plan, quiet=False):
        with pytest.raises(UserError, match="the run begins"):
            training.train_together(CONFIG, plan, [], quiet=quiet)
        return capsys.readouterr().err

    return train


def test_a_plan_of_another_model_is_told(said):
    plan = plan_for(dataclasses.replace(CONFIG.model, layers=36, hidden=64))
    told = said(plan)
    assert (
        told.startswith("note: the plan was made for other (model.layers=36, model.hidden=64") and "\n" not in told[:-1]
    )
    assert f"the configuration has model.layers={CONFIG.model.layers}, model.hidden={CONFIG.model.hidden}" in told
    assert said(plan, quiet=True) == ""


def test_a_plan_of_this_model_says_nothing(said):
    assert said(plan_for(CONFIG.model)) == said(None) == ""
    assert said(dataclasses.replace(plan_for(CONFIG.model), predicted={})) == ""  # of an earlier version
