"""The names of `paxtrain` for programs that import it."""

import ast
import contextlib
import dataclasses
import io
import json
import logging
import subprocess
import sys
import types

import jax
import numpy as np
import pytest

import paxtrain
from paxtrain.config import to_dict
from paxtrain.run import metrics
from tests.paxtrain.training import configuration, expected_batches
from tests.processes import run_processes
from tests.small import corpus
from tests.sources import ROOT

STEPS = 3
SHORT = {"mesh__tensor": 2, "run__steps": STEPS, "run__eval_every": 0, "optimizer__warmup_steps": 1, "model__layers": 2}


def in_a_process(program):
    """Return the JSON that a program prints in a fresh Python."""
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def test_every_name_is_public_and_known_to_type_checkers():
    source = ast.parse((ROOT / "paxtrain/__init__.py").read_text())
    [block] = [node for node in source.body if isinstance(node, ast.If)]
    typed = {
        alias.asname or alias.name: f"{node.module}:{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == paxtrain._EXPORTS
    assert set(paxtrain.__all__) == set(typed) <= set(dir(paxtrain))
    for name, place in typed.items():
        module, _, attribute = place.partition(":")
        assert getattr(paxtrain, name) is getattr(sys.modules[module], attribute)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = paxtrain.trian


def test_the_package_loads_jax_when_a_name_needs_it():
    program = "import json, sys, paxtrain; print(json.dumps([m in sys.modules for m in ('jax', 'numpy')]))"
    assert in_a_process(program) == [False, False]


GLOBALS = """
import json, logging, os, sys, warnings
import absl.app, flax.struct, matplotlib.figure, ml_collections, optax, optax.contrib, orbax.checkpoint, tensorboardX
import jax, jax.experimental.multihost_utils, jax.experimental.pallas, jax.experimental.topologies
import scipy.sparse, scipy.special, tokenizers  # scipy changes the filters of warnings

def state():
    loggers = [logging.getLogger(name) for name in ("", "absl", "asyncio", "jax", "orbax")]
    return {
        "environment": dict(os.environ),
        "warnings": list(map(str, warnings.filters)),
        "jax": {name: str(value) for name, value in jax.config.values.items()},
        "hooks": [str(hook) for hook in (sys.excepthook, sys.unraisablehook, sys.displayhook)],
        "logging": [(str(logger.filters), logger.level, str(logger.handlers)) for logger in loggers],
    }

before = state()
IMPORTS
after = state()
print(json.dumps(sorted(key for key in before if before[key] != after[key])))
"""


def changed_by(statements):
    """Return which parts of the process's global state some statements change."""
    return in_a_process(GLOBALS.replace("IMPORTS", statements))


def test_imports_change_nothing_global():
    files = [path for top in ("compress", "paxtrain", "planner") for path in sorted((ROOT / top).rglob("*.py"))]
    names = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in files]
    names = [name.removesuffix(".__init__") for name in names if "__main__" not in name]
    assert changed_by("\n".join(f"import {name}" for name in names)) == []
    changes = [
        "os.environ['PAXTRAIN_TEST'] = '1'",
        "sys.unraisablehook = print",
        "logging.getLogger('absl').addFilter(print)",
        "warnings.simplefilter('ignore')",
        "jax.config.update('jax_enable_x64', True)",
    ]
    assert changed_by("; ".join(changes)) == ["environment", "hooks", "jax", "logging", "warnings"]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def trained(home):
    """Return a configuration and the result of a quiet training run with it."""
    config = configuration(home, home / "run", **SHORT)
    hooks = (sys.unraisablehook, list(logging.getLogger("absl").filters))
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = paxtrain.train(config, quiet=True)
    assert printed.getvalue() == ""
    assert (sys.unraisablehook, list(logging.getLogger("absl").filters)) == hooks
    return config, result


def test_train_returns_what_steps_by_hand_give(home, trained):
    """The result's losses are those of a Trainer that is stepped by hand over the same batches."""
    config, result = trained
    trainer = paxtrain.Trainer(config, paxtrain.make_mesh(config.mesh))
    state, losses = trainer.init(config.run.seed), []
    for batch in expected_batches(home, STEPS):
        state, figures = trainer.step(state, batch)
        losses.append(float(figures["loss"]))
    assert result.losses.tolist() == losses
    assert result.steps.tolist() == [1, 2, 3]
    assert (result.finished, result.step, result.skipped, result.mfu) == (True, STEPS, 0, None)
    assert result.folder == home / "run" and (result.folder / metrics.FILE).exists()
    assert result.tokens_per_second > 0
    assert set(result.untrained) == set(result.validation) == {"validation_loss"}
    assert np.isfinite([*result.untrained.values(), *result.validation.values()]).all()


TRAIN = """
import json
import paxtrain
from paxtrain.config import from_dict

result = paxtrain.train(from_dict(json.loads(sys.argv[1])), quiet=True)
print(json.dumps([jax.local_device_count(), result.finished, result.losses.tolist()]))
"""


@pytest.mark.slow
def test_joined_processes_share_the_mesh(home, trained, tmp_path):
    """Each of two processes gets half of the mesh's devices, and the losses are those of one process."""
    values = to_dict(configuration(home, tmp_path / "run", **SHORT))
    outputs = run_processes(TRAIN, json.dumps(values))
    for output in outputs:
        devices, finished, losses = json.loads(output.splitlines()[-1])
        assert (devices, finished) == (4, True)
        np.testing.assert_allclose(losses, trained[1].losses, rtol=1e-5)


@pytest.mark.slow
def test_train_takes_what_has_a_plan(home, tmp_path, capfd):
    """A plan, or an object with a plan, overrides the mesh; a second call finds all steps done."""
    config = configuration(home, tmp_path / "run", **SHORT)
    mesh = paxtrain.MeshConfig(data=4, pipe=2, tensor=1)
    plan = paxtrain.Plan(mesh, config.pipeline, dataclasses.replace(config.batch, micro_batch=1), config.compress)
    first = paxtrain.train(config, types.SimpleNamespace(plan=plan))
    assert "data=4 pipe=2 tensor=1" in capfd.readouterr().out
    again = paxtrain.train(config, plan, quiet=True)
    assert again.finished and again.tokens_per_second == 0
    assert again.losses.tolist() == first.losses.tolist()
    assert again.validation == first.validation


def test_train_refuses_a_mesh_that_does_not_fit_the_devices(home, tmp_path):
    assert len(jax.devices()) == 8  # from now on they are in use, and train can make no others
    config = configuration(home, tmp_path / "run", mesh__data=1, **SHORT)
    with pytest.raises(paxtrain.UserError, match="is 4 devices, but there are 8; choose sizes whose product is 8"):
        paxtrain.train(config, quiet=True)
