"""Training steps to time: ours, and a plain jit of the same model, on random tokens."""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from paxtrain.config import Config, from_dict
from paxtrain.model import transformer
from paxtrain.parallel.mesh import from_process_rows, make_mesh, process_rows
from paxtrain.parallel.optimizer import make_optimizer
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.profiling.ledger import plain_step

K = TypeVar("K")


def configuration(mesh: tuple[int, int, int], micro_batches: int, hidden: int = 256, **pipeline: Any) -> Config:
    """Return the configuration of a small float32 model with micro-batches of 4 sequences.

    Args:
        mesh: sizes of (data, pipe, tensor).
        micro_batches: micro-batches of each data rank.
        hidden: hidden size.
        pipeline: settings of the section `pipeline`.
    """
    data, pipe, tensor = mesh
    values = {
        "model": {"layers": 8, "hidden": hidden, "heads": 4, "sequence": 128, "dtype": "float32"},
        "mesh": {"data": data, "pipe": pipe, "tensor": tensor},
        "pipeline": pipeline,
        "batch": {"global_batch": 4 * micro_batches * data, "micro_batch": 4},
    }
    return from_dict(values)


def tokens(config: Config) -> np.ndarray:
    """Return a random global batch, int32 [global_batch, sequence + 1]."""
    shape = (config.batch.global_batch, config.model.sequence + 1)
    return np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)


def interleave(steps: Mapping[K, Callable[[], object]], repeats: int) -> dict[K, list[float]]:
    """Time steps in turn, so that other load on the machine slows all of them alike.

    Args:
        steps: functions to time, by name.
        repeats: calls of each.

    Returns:
        Seconds of every call, by name.
    """
    for step in steps.values():
        step()
        step()
    seconds: dict[K, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            began = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - began)
    return seconds


def _bytes(compiled: jax.stages.Compiled) -> int:
    """Return the bytes that a compiled program holds: state, batch and temporary arrays."""
    m = compiled.memory_analysis()
    assert m is not None
    return m.argument_size_in_bytes + m.output_size_in_bytes - m.alias_size_in_bytes + m.temp_size_in_bytes


class PipelinedStep:
    """Our training step with its state.

    Attributes:
        mesh: mesh of the devices.
        compiled: the compiled step.
        bytes: bytes of the compiled program.
        loss: loss of the last call.
    """

    def __init__(self, config: Config, devices: Sequence[jax.Device]) -> None:
        """Compile the step of a configuration for some devices."""
        self._trainer = Trainer(config, make_mesh(config.mesh, devices=devices))
        self._state: TrainState = self._trainer.init(0)
        sharding, shape = self._trainer.batch_sharding, self._trainer.abstract_batch().shape
        rows = process_rows(sharding, shape)
        self._tokens = from_process_rows(sharding, shape, rows, tokens(config)[rows])
        self.mesh, self.compiled = self._trainer.mesh, self._trainer.compile_step()
        self.bytes = _bytes(self.compiled)

    def run(self) -> dict[str, jax.Array]:
        """Run one step and return its metrics, which may not be ready yet."""
        self._state, metrics = self.compiled(self._state, self._tokens)
        return metrics

    def __call__(self) -> None:
        """Run one step and wait for its loss."""
        self.loss = float(self.run()["loss"])


class PlainStep:
    """The plain step with its state.

    Attributes:
        bytes: bytes of the compiled program.
        loss: loss of the last call.
    """

    def __init__(self, config: Config) -> None:
        """Compile the step of a configuration for one device."""
        self._params = jax.jit(functools.partial(transformer.init, config.model))(jax.random.key(0))
        self._state = make_optimizer(config).init(self._params)
        self._tokens = jnp.asarray(tokens(config))
        self._step = plain_step(config).lower(self._params, self._state, self._tokens).compile()
        self.bytes = _bytes(self._step)

    def __call__(self) -> None:
        """Run one step and wait for its loss."""
        self._params, self._state, loss = self._step(self._params, self._state, self._tokens)
        self.loss = float(loss)
