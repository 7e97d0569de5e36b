"""Small runs on a corpus whose samples all differ, for the tests of the main job and of its step."""

import pathlib
import shutil
from typing import Any

import jax
import numpy as np

from paxtrain.config import Config, from_dict
from paxtrain.data import token_files
from paxtrain.run import metrics
from paxtrain.run.run import Run
from tests.compress_settings import nested
from tests.small import mesh_of

STEPS, EVERY = 60, 10
SETTINGS = {
    "model.vocab_size": 257,
    "model.layers": 4,
    "model.hidden": 32,
    "model.heads": 4,
    "model.sequence": 32,
    "model.dtype": "float32",
    "model.embedding_dropout": 0.1,
    "mesh.data": 2,
    "mesh.pipe": 2,
    "mesh.tensor": 1,
    "batch.global_batch": 8,
    "batch.micro_batch": 2,
    "optimizer.warmup_steps": 10,
    "optimizer.learning_rate": 3e-3,
    "pipeline.scan_layers": "on",
    "checkpoint.every": EVERY,
    "checkpoint.keep": 2,
    "checkpoint.keep_every": 3 * EVERY,
    "run.steps": STEPS,
    "run.eval_every": 25,
    "run.eval_batches": 2,
    "run.sample_tokens": 20,
}


def settings(home, out, **changes):
    paths = {"data.train": home / "data/train", "data.validation": home / "data/validation", "run.out": out}
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    return SETTINGS | {name: str(value) for name, value in paths.items()} | changes


def started(config: Config) -> Run:
    return Run(config, mesh_of(config))


def configuration(*args, **changes):
    sections: dict = {}
    for name, value in settings(*args, **changes).items():
        section, key = name.split(".")
        sections.setdefault(section, {})[key] = value
    return from_dict(sections | {"compress": nested(sections.get("compress", {}))})


def curve(out):
    """Return all metrics of all steps except times, and except records of slower steps."""
    times = ("step_seconds", "tokens_per_second")
    return [
        {name: value for name, value in record.items() if name not in times}
        for record in metrics.read(out / metrics.FILE)
        if "slower/step" not in record
    ]


def losses(out: pathlib.Path) -> dict[int, float]:
    """Return the training losses of a run by step."""
    return {r["step"]: r["loss"] for r in metrics.read(out / metrics.FILE) if "loss" in r}


def past(whole: pathlib.Path, to: pathlib.Path, step: int) -> pathlib.Path:
    """Copy a run as if it had been killed after its checkpoint of that step; return the copy."""
    shutil.copytree(whole, to)
    for path in (to / "checkpoints").iterdir():
        if path.name.isdecimal() and int(path.name) > step:
            shutil.rmtree(path)
    return to


def finished(values: dict[str, dict], changes: dict[str, Any], codec: Any = None) -> tuple[Run, dict[str, np.ndarray]]:
    """Return a finished run and its last state by path.

    Args:
        values: sections of its configuration.
        changes: other values, by section__key.
        codec: codec of the gradients between stages; None: as the configuration says.
    """
    for name, value in changes.items():
        section, key = name.split("__")
        values = values | {section: values[section] | {key: value}}
    config = from_dict(values | {"compress": nested(values["compress"])})
    run = Run(config, mesh_of(config), codec=codec)
    states = []
    save = run.save
    run.save = lambda checkpoints, state, step: (states.append(jax.device_get(state)), save(checkpoints, state, step))
    run.train()
    leaves = jax.tree_util.tree_leaves_with_path(states[-1])
    return run, {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves}


def same_bits(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), a, b))


def expected_batches(home, steps):
    """Return the first global batches, [steps, global_batch, sequence + 1]."""
    file = token_files.TokenFile(home / "data/train")
    stream = token_files.batches(file, sequence=32, global_batch=8, rows=range(8), seed=0)
    return np.stack([next(stream) for _ in range(steps)])
