"""What tests of small models share: a corpus, a configuration, a trainer on the first devices, parameters."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from paxtrain.config import Config, MeshConfig, from_dict
from paxtrain.config.axes import CONTEXT, DATA, PIPE, TENSOR
from paxtrain.data.preparation import prepare
from paxtrain.model import transformer
from paxtrain.outer.trainer import trainer_of
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.testing.layers import random_params
from tests.compress_settings import nested

VOCABULARY, SEQUENCE = 61, 16
MODEL = {"layers": 4, "hidden": 32, "heads": 4, "sequence": SEQUENCE, "vocab_size": VOCABULARY, "dtype": "float32"}


def corpus(folder: pathlib.Path, numbers: int = 16_000, data: str = "data") -> pathlib.Path:
    """Prepare a text of numbers, whose samples all differ, in a folder, and return the folder."""
    (folder / "corpus.txt").write_text(" ".join(map(str, range(numbers))))
    prepare([str(folder / "corpus.txt")], folder / data)
    return folder


def merged(base: Mapping[str, Any], sections: Mapping[str, Any]) -> Config:
    """Return the configuration of some sections, of which others change or add settings."""
    values = dict(base)
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section} if isinstance(section, Mapping) else section
    return from_dict(values | {"compress": nested(values.get("compress", {}))})


def config(sizes: tuple[int, ...] = (), batch: tuple[int, int] = (8, 1), **sections: Any) -> Config:
    """Return a configuration of a small model.

    Args:
        sizes: sizes of data, pipe, tensor and context.
        batch: sequences of a global batch and of a micro-batch.
        sections: settings by section, which come before the others.
    """
    base = {
        "model": MODEL,
        "mesh": dict(zip((DATA, PIPE, TENSOR, CONTEXT), sizes)),
        "batch": dict(zip(("global_batch", "micro_batch"), batch)),
    }
    return merged(base, sections)


def mesh_of(c: Config) -> jax.sharding.Mesh:
    """Return a configuration's mesh, of the first devices."""
    return make_mesh(c.mesh, devices=jax.devices()[: c.mesh.devices])


def trainer(c: Config, **changes: Any) -> Trainer:
    """Return the trainer of a configuration, or of one of its groups, on the first devices."""
    return dataclasses.replace(trainer_of(c, mesh_of(c)), **changes)


def emulated(c: Config, **changes: Any) -> Trainer:
    """Return the trainer of a configuration whose whole mesh one device emulates."""
    return Trainer(c, make_mesh(MeshConfig(), devices=jax.devices()[:1]), virtual=True, **changes)


canonical = jax.jit(random_params, static_argnums=0)  # large parameters of a model, so that nothing hides behind zeros


def tokens(c: Config, steps: tuple[int, ...] = ()) -> np.ndarray:
    """Return random global batches, int32 [*steps, global_batch, sequence + 1]."""
    shape = (*steps, c.batch.global_batch, c.model.sequence + 1)
    return np.random.default_rng(0).integers(0, c.model.vocab_size, shape, dtype=np.int32)


def gradients(trained: Trainer, params: transformer.Params, batch: np.ndarray) -> tuple:
    """Return the loss, the norm and the canonical gradients of a step with canonical parameters."""
    mine = jax.device_put(jax.jit(trained.layout.from_canonical)(params), trained.state_shardings.params)

    @jax.jit
    def run(mine: transformer.Params, batch: jax.Array) -> tuple:
        loss, grads, *_ = trained.loss_and_gradients(mine, batch)
        return loss, trained.norm(grads), trained.layout.to_canonical(grads)

    return jax.device_get(run(mine, jax.device_put(batch, trained.batch_sharding)))
