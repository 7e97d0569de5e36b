"""Models of one's own have the properties that `check_model` asks for, and models without one of them are caught."""

import re
import subprocess
import sys

import jax
import pytest

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.schedule.schedules import names
from paxtrain.testing import check_model
from paxtrain.testing.layers import layer_properties
from tests import mains
from tests.sources import ROOT

BLOCK, RECURRENCE = "tests.paxtrain.model.parallel_block:ParallelBlock", "tests.paxtrain.model.recurrence:Recurrence"
ROUTED, MIXED = "tests.paxtrain.model.routed:Routed", "tests.paxtrain.model.mixed:Mixed"
BAD = "tests.paxtrain.model.bad_models:"
SHAPE = {"layers": 2, "hidden": 32, "heads": 4, "sequence": 16, "vocab_size": 61, "vocab_multiple": 64}


def test_a_recurrence_trains_on_a_mesh_as_on_one_device():
    found = check_model(ModelConfig(**SHAPE, module=RECURRENCE), schedules=["gpipe"])
    assert len(found) == 11 and "gradients on 2x2x2 with gpipe are those of one device" in found


def test_scalars_of_layers_train_on_a_mesh_as_on_one_device():
    """With float32's rounding; eager_1f1b computes on scrap while a stage is idle, and zb_h1 splits the backward."""
    check_model(ModelConfig(**SHAPE, module=ROUTED))


@pytest.mark.slow
def test_layers_of_two_kinds_train_on_a_mesh_as_on_one_device():
    """The first stage has its dense layer first, the second one in the middle, so they share four slots."""
    found = check_model(ModelConfig(**SHAPE | {"layers": 6}, module=MIXED))
    assert {"a token sees no later one (dense)", "a token sees no later one (experts)"} < {*found}


def test_gradients_that_are_only_rounding_are_not_compared():
    model = ModelConfig(**SHAPE, dtype="float32", module="tests.paxtrain.model.biased:Biased")
    found = [check() for name, check in layer_properties(model, 2) if "tensor group" in name]
    assert len(found) == 2


@pytest.mark.once
def test_one_device_emulates_a_mesh(monkeypatch):
    """Also one whose tensor groups split the sequence, as they do with all schedules but the first."""
    real = jax.devices
    monkeypatch.setattr(jax, "devices", lambda *arguments: real(*arguments)[:1])
    found = check_model(ModelConfig(**SHAPE, module=BAD + "Plain"), [(1, 2, 2)], ["gpipe", "1f1b"])
    assert "gradients on 1x2x2 with 1f1b are those of one device" in found


@pytest.mark.once
def test_a_reference_without_the_weighted_scalars_is_another(monkeypatch):
    monkeypatch.setattr(transformer, "objective", lambda loss, scalars, config: loss)
    with pytest.raises(AssertionError, match="embedding/token differs by"):
        check_model(ModelConfig(**SHAPE, module=ROUTED, intermediate=40), [(1, 1, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("model", [BLOCK, RECURRENCE, ROUTED, MIXED])
def test_models_train_with_every_schedule(model):
    """The sequence is split with all schedules but the first; the state that is saved is of the last one's stages."""
    check_model(model, schedules=["eager_1f1b", *names()])


@pytest.mark.slow
def test_families_have_the_properties_too():
    check_model(ModelConfig(**SHAPE), [(1, 2, 2), (2, 1, 4)])
    check_model(ModelConfig(**SHAPE, family="llama", kv_heads=2, tied_head=False, separator=5), [(1, 2, 2)])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("NoSum", "a tensor group computes the same: with tensor=2 the output differs by .* and leave behind"),
        pytest.param("NoEnter", "with tensor=2 the gradient of weights/ln/scale differs by", marks=pytest.mark.slow),
        ("KeepsNaN", "an input of zeros has finite gradients: not finite: output"),
        ("SeesAhead", "a token sees no later one: later tokens change the output of earlier ones by"),
        ("Unused", "every parameter has a gradient: that of layers/gate/kernel is zero for all tokens; let the model"),
        ("OwnPart", "with tensor=2 and sequence parallelism its scalar busiest differs by"),
        pytest.param(
            "OneDocument",
            "documents do not see each other: a document changes the output of the next one by",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_model_without_a_property_is_caught(model, words):
    with pytest.raises(AssertionError, match=f"{BAD}{model}: .*{words}"):
        check_model(BAD + model)


def test_bad_tables_are_refused_as_by_the_trainer():
    with pytest.raises(UserError, match="has the parameter layers/ln/scale 2 times"):
        check_model(BAD + "Twice")
    with pytest.raises(UserError, match=r"its layer\(\) .* returns float32"):
        check_model(BAD + "Shorter")


@pytest.mark.parametrize(
    ("arguments", "code", "said", "error"),
    [
        (
            [BAD + "SeesAhead"],
            1,
            "a layer returns what it is given, .*\n.*\n.*gradients\n",
            ".*: a token sees no later one: .*",
        ),
        ([BAD + "Twice"], 2, "", ".*Twice has the parameter layers/ln/scale 2 times; .*"),
        ([], 2, "", "name one model as package.module:Class, got nothing"),
        ([""], 2, "", "name one model as package.module:Class, got ''"),
    ],
)
def test_the_main_ends_with_one_sentence(arguments, code, said, error, monkeypatch, capsys):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # those of this process are started
    assert mains.run(monkeypatch, mains.load("paxtrain.testing.__main__"), *arguments) == code
    out, err = capsys.readouterr()
    assert re.fullmatch(said, out) and re.fullmatch(f"error: {error}\n", err)


@pytest.mark.slow
def test_the_main_prints_the_properties_that_hold():
    command = [sys.executable, "-m", "paxtrain.testing", BLOCK]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "") and ended.stdout.splitlines() == check_model(BLOCK)
