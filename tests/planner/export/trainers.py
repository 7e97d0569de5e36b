"""The trainers that plans are exported to: their own parsers and models, in environments apart.

`make exports` makes the environments. Without an environment its tests are skipped.
"""

import json
import pathlib
import subprocess

import pytest

from experiments.environment import Environment
from planner.export import maxtext, megatron, torchtitan
from tests.planner.export.cases import DEVICES

SCRIPTS = pathlib.Path(__file__).with_name("parsers")
TRAINERS = {"megatron": megatron, "torchtitan": torchtitan, "maxtext": maxtext}
ENVIRONMENTS = {name: Environment(SCRIPTS / f"parse_{name}.py") for name in TRAINERS}
FILES = {"megatron": "megatron.args", "torchtitan": "torchtitan_plan.py", "maxtext": "maxtext.args"}


def ask(trainer: str, texts: list[str], folder: pathlib.Path, devices: int = DEVICES, arrays=()) -> list[dict]:
    """Return what a trainer's parser makes of each text, or of its model with a file of arrays, in its own process."""
    environment = ENVIRONMENTS[trainer]
    if environment.python is None:
        needs = ", ".join(environment.dependencies)
        pytest.skip(f"there is no environment with {needs} in {environment.folder}; make exports makes it")
    cases = [{"text": text, "devices": devices} for text in texts]
    with_arrays = [case | {"arrays": str(path)} for case, path in zip(cases, arrays)]
    (folder / "cases.json").write_text(json.dumps(with_arrays or cases))
    command = [environment.python, "-W", "ignore", environment.script, folder / "cases.json", folder / "answers.json"]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "answers.json").read_text())
