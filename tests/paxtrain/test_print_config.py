"""--print_config: every value that is settled and its source, before anything slow."""

import ast
import dataclasses
import json
import re

import jax
import pytest

from paxtrain.config import from_dict, plan
from paxtrain.config.load import load_config, nested
from tests import mains
from tests.paxtrain.config.test_load import QWEN3

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
FILE = """
from configs.base import gpt


def get_config():
    return gpt(mesh={"data": 2}, run={"steps": 77, "seed": 0}, model={"layers": 8})
"""


@pytest.fixture
def printed(monkeypatch, capfd, tmp_path):
    """Return printed(*flags): value and source of each key; nothing may start, and no file may be written."""

    def starts(*_):
        pytest.fail("devices are counted before the configuration is printed")

    monkeypatch.setattr(jax.config, "update", starts)

    def run(*flags):
        before = sorted(tmp_path.rglob("*"))
        assert mains.run(monkeypatch, mains.load("paxtrain.train"), *flags, "--print_config") == 0
        captured = capfd.readouterr()
        lines = [re.fullmatch(r"(\S+) = (.*)  # (\w+)", line) for line in captured.out.splitlines()]
        assert captured.err == "" and all(lines) and sorted(tmp_path.rglob("*")) == before
        return {line[1]: (ast.literal_eval(line[2]), line[3]) for line in lines}

    return run


def config_of(found):
    return from_dict(nested({key: value for key, (value, _) in found.items()}))


def of(found, source):
    return {key: value for key, (value, its) in found.items() if its == source}


def test_defaults_files_and_flags(printed, tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    codec = ["--config.compress.backward.codec=int8", "--config.compress.backward.options.block=32"]
    changes = ["--config.mesh.pipe=4", "--config.model.separator=-1", f"--config.run.out={tmp_path}/it's", *codec]
    found = printed(f"--config={tmp_path}/mine.py", *changes, "--config.compress.backward.messages=all")
    assert of(found, "file") == {"mesh.data": 2, "run.steps": 77, "model.layers": 8}
    flagged = {"codec": "int8", "options.block": 32, "messages": "all"}
    assert of(found, "flag") == {
        "mesh.pipe": 4,
        "model.separator": -1,  # also the default, and given nevertheless
        "run.out": f"{tmp_path}/it's",
        **{f"compress.backward.{key}": value for key, value in flagged.items()},
    }
    assert set(of(found, "default")) | set(of(found, "file")) | set(of(found, "flag")) == set(found)
    assert config_of(found) == load_config(str(tmp_path / "mine.py"), of(found, "flag"))


def test_a_plan_is_the_source_of_what_it_replaces(printed, tmp_path):
    base = load_config("tiny")
    mesh = dataclasses.replace(base.mesh, data=1, pipe=2, tensor=1)
    plan.save(plan.Plan(mesh, base.pipeline, base.batch, base.compress), tmp_path / "plan.json")
    found = printed(f"--plan={tmp_path}/plan.json", "--config.mesh.pipe=4", "--config.run.steps=700")
    assert found["mesh.pipe"] == (2, "plan") and found["run.steps"] == (700, "flag")
    sections = {key.partition(".")[0] for key in of(found, "plan")}
    assert sections == {"mesh", "pipeline", "batch", "compress"}
    assert not [key for key in found if key.partition(".")[0] in sections and found[key][1] != "plan"]
    assert config_of(found).mesh == mesh


def test_a_model_is_the_source_of_its_shape(printed, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    found = printed(f"--config={tmp_path}", "--config.batch.micro_batch=2")
    assert found["model.hidden"] == (4096, "import") and found["model.family"] == ("qwen3", "import")
    assert {key.partition(".")[0] for key in of(found, "import")} == {"model", "batch"}
    assert of(found, "flag") == {"batch.micro_batch": 2} and not of(found, "file")


def test_what_does_not_fit_is_told_instead(monkeypatch, capfd):
    code = mains.run(monkeypatch, mains.load("paxtrain.train"), "--config.mesh.foo=1", "--print_config")
    captured = capfd.readouterr()
    assert code == 2 and captured.out == "" and "unknown configuration key mesh.foo" in captured.err
