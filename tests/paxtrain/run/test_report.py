"""What a run says of settings that changed since its checkpoint, against the schedules' closed forms."""

import json
import math
import pathlib

import jax
import numpy as np
import pytest

from paxtrain.config import from_dict, to_dict
from paxtrain.data.token_files import TokenWriter
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run.report import changed_settings, next_steps
from paxtrain.run.run import Run


def config(steps=100, schedule="cosine", **optimizer):
    some = {"schedule": schedule, "warmup_steps": 10, "decay_steps": 20} | optimizer
    return from_dict({"optimizer": some, "run": {"steps": steps}})


def cosine(update, steps):
    """Return the rate over the peak, 1e-3, for a final fraction of a tenth."""
    return 1e-3 * (0.1 + 0.9 * (1 + math.cos(math.pi * (update - 10) / (steps - 10))) / 2)


def test_a_cosine_that_ended_says_that_it_jumps():
    said = changed_settings(to_dict(config(100)), config(200), 100)
    assert said.startswith(
        f"run.steps was 100 and is 200; the next step's learning rate was 0.0001 and is {cosine(101, 200):.3g}; "
        "runs with optimizer.schedule=wsd go on without a jump"
    )
    assert cosine(101, 200) > 5.5e-4
    (what, jump) = next_steps(pathlib.Path("out"), True, config(100))[1]
    assert what == "learning rate" and jump.startswith(f"jumps then from 0.0001 to {cosine(101, 200):.3g}; ")
    assert "learning rate" not in dict(next_steps(pathlib.Path("out"), True, config(100, schedule="constant")))


def test_a_run_is_to_be_exported_only_if_hugging_face_knows_its_model():
    own = {"module": "tests.paxtrain.model.parallel_block:ParallelBlock"}
    for model, exported in (({}, True), (own, False)):
        found = dict(next_steps(pathlib.Path("out"), True, from_dict({"model": model})))
        assert "to sample" in found and ("to export" in found) == exported


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"learning_rate": 2e-3}, "optimizer.learning_rate was 0.001 and is 0.002; the next step's learning rate was "),
        ({"weight_decay": 0.2}, "optimizer.weight_decay was 0.1 and is 0.2"),
        ({"beta2": 0.99}, "optimizer.beta2 was 0.95 and is 0.99"),
        ({}, ""),
    ],
)
def test_changed_settings_are_told(change, said):
    found = changed_settings(to_dict(config()), config(**change), 50)
    assert found.startswith(said) if "rate" in said else found == said
    less = changed_settings(to_dict(config(learning_rate=2e-3)), config(), 50)
    assert less.endswith(f"learning rate was {2 * cosine(51, 100):.3g} and is {cosine(51, 100):.3g}")  # no jump up


def test_what_decides_what_is_learned_is_told_and_where_it_runs_is_not():
    before = to_dict(config())
    before["batch"] |= {"global_batch": 32, "micro_batch": 4}
    before["mesh"]["data"], before["run"]["log_every"], before["run"]["seed"] = 4, 7, 3
    before["model"]["residual_dropout"], before["model"]["of another version"] = 0.1, 1
    assert changed_settings(before, config(), 50) == (
        "model.residual_dropout was 0.1 and is 0.0, batch.global_batch was 32 and is 16, run.seed was 3 and is 0"
    )


def test_a_run_that_goes_on_says_it(tmp_path, capsys):
    with TokenWriter(tmp_path / "data", 100) as writer:
        writer.extend(np.arange(3000) % 100)
        writer.end_document()
    sections = to_dict(config(200))
    sections["data"] |= {"train": str(tmp_path / "data"), "validation": str(tmp_path / "data")}
    sections["run"] |= {"out": str(tmp_path / "out")}
    run = Run(from_dict(sections), make_mesh(from_dict(sections).mesh, devices=jax.devices()[:1]))
    saved = json.loads(json.dumps({"step": 50, "samples": 800, "data": None, "config": sections}))
    run._resume(saved, skipped=0)
    assert "settings have changed" not in capsys.readouterr().out
    saved["config"]["optimizer"]["beta2"] = 0.9
    run._resume(saved, skipped=0)
    assert "settings have changed: optimizer.beta2 was 0.9 and is 0.95\n" in capsys.readouterr().out
