"""Timed compute: F and B of a layer, the head, the embedding and the optimizer, run by the trainer's own functions.

B is timed whole and, if the save mode lets schedules split it, in its two parts.

One program per tensor-parallel size and micro-batch runs each of them in a separate loop, whose number of turns is an
argument. The program runs with one turn and with several. The difference in time, divided by the difference in turns,
is the time of a turn, so dispatch, casts and cleared accumulators do not count. The optimizer is a separate program.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from paxtrain.config import SPLIT_SAVES, Config, MeshConfig
from paxtrain.config.axes import AXES
from paxtrain.model import transformer
from paxtrain.parallel.mesh import batch_spec, from_process_rows, make_mesh, process_rows
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.pipeline import executor
from paxtrain.pipeline.program import Weights
from paxtrain.pipeline.rings import read
from paxtrain.pipeline.stage import Stage
from planner.cost import compute
from planner.measure.link_timing import CALLS

KINDS = ("forward", "backward", "head", "embedding")
_OF_LAYERS = ("forward", "backward", *compute.PARTS)
# Layers of the stage that is timed. There are so many that a layer does not find its weights still in the cache.
LAYERS = 4
_CLOCK = 1e-9  # seconds, the resolution of the clock
_LEAST = 0.05  # least seconds that the turns of a measurement take

Agree = Callable[[float], float]  # returns process 0's figure on all processes


def kinds(config: Config) -> tuple[str, ...]:
    """Return the kinds of work to time for a configuration."""
    return (*KINDS, *(compute.PARTS if config.pipeline.save in SPLIT_SAVES else ()))


def _turns(stage: Stage, counts: jax.Array) -> tuple[object, ...]:
    """Run every kind of work counts[kind] times, and return all results so that none of the work is dead code."""
    x = stage.embed(jnp.int32(0))
    g = x * 1e-3
    grads = executor.zeros_like(stage.weights)

    def forward(i: jax.Array, carry: tuple) -> tuple:
        x, ring = carry
        y, _, ring = stage.forward(0, i % 2, x, ring, (i % 2,))
        return y, ring

    # Two more turns fill both slots, whatever the count is.
    y, ring = lax.fori_loop(0, counts[0] + 2, forward, (x, stage.residuals(2)))

    def backward(i: jax.Array, carry: tuple) -> tuple:
        out, grads, *_ = stage.backward(0, i % 2, ring, (i % 2,), stage.cotangents(g), carry[1], ())
        return out, grads

    out, grads = lax.fori_loop(0, counts[1], backward, (g, grads))
    inputs = jnp.stack([y, x])  # used in turn, since with one input XLA would hoist the logits out of the loop

    def head(i: jax.Array, carry: tuple) -> tuple:
        loss, _, embedding, final_norm = carry
        return stage.head(i % 2, read(inputs, (i % 2,)), loss, embedding, final_norm)

    loss, delta, table, final_norm = lax.fori_loop(
        0, counts[2], head, (jnp.float32(0), g, grads.embedding, grads.final_norm)
    )
    grads = grads._replace(embedding=table, final_norm=final_norm)

    def embedding(i: jax.Array, carry: tuple) -> tuple:
        return stage.embed(i % 2), stage.embed_gradient(i % 2, g, carry[1], jnp.bool_(True))

    x, grads = lax.fori_loop(0, counts[3], embedding, (x, grads))
    if stage.program.splits:

        def backward_input(i: jax.Array, carry: tuple) -> tuple:
            _, grads, ring = carry
            return stage.input_gradient(0, ring, (i % 2,), stage.cotangents(g), grads)

        # Two more turns fill both slots for W, whatever the count is.
        out, grads, ring = lax.fori_loop(0, counts[4] + 2, backward_input, (out, grads, ring))

        def backward_weights(i: jax.Array, grads: Weights) -> Weights:
            return stage.weight_gradients(0, ring, (i % 2,), grads)[0]

        grads = lax.fori_loop(0, counts[5], backward_weights, grads)
    return x, y, ring, out, loss[None], delta, grads


def _tokens(trainer: Trainer) -> jax.Array:
    """Return a random global batch on the trainer's mesh."""
    shape, sharding = trainer.abstract_batch().shape, trainer.batch_sharding
    rows = process_rows(sharding, shape)
    values = np.random.default_rng(0).integers(0, trainer.config.model.vocab_size, (len(rows), shape[1]), np.int32)
    return from_process_rows(sharding, shape, rows, values)


def _trainer(config: Config, tensor: int, micro_batch: int, devices: Sequence[jax.Device], layers: int) -> Trainer:
    """Return a trainer for groups of `tensor` devices with one stage each and two micro-batches."""
    groups = len(devices) // tensor
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, layers=layers),
        mesh=MeshConfig(data=groups, pipe=1, tensor=tensor, shard="none"),
        pipeline=dataclasses.replace(
            config.pipeline, schedule="eager_1f1b", virtual_stages=1, pipe_layers="", scan_layers="off"
        ),
        batch=dataclasses.replace(
            config.batch, global_batch=groups * 2 * micro_batch, micro_batch=micro_batch, data_micro_batches=""
        ),
        compress=type(config.compress)(),
    )
    return Trainer(config, make_mesh(config.mesh, devices=devices))


class Took(NamedTuple):
    """The time that work took.

    Attributes:
        wall: seconds from its start to its end.
        processor: seconds of all cores that this process used.
    """

    wall: float
    processor: float

    def crowded(self, processes_per_core: float) -> float:
        """Return the seconds that the work takes if that many processes on shared cores do it at once."""
        return max(self.wall, self.processor * processes_per_core)


def _timed(run: Callable[[], object]) -> Took:
    began, used = time.perf_counter(), time.process_time()
    jax.block_until_ready(run())
    return Took(time.perf_counter() - began, time.process_time() - used)


def _quickest(run: Callable[[], Took]) -> Took:
    """Return the least times of a few measurements in a row."""
    return Took(*map(min, zip(*(run() for _ in range(CALLS)))))


class LoopTimer:
    """The compiled loops of one tensor-parallel size and micro-batch, with their inputs.

    The devices work in groups of `tensor`, all at once.

    Attributes:
        kinds: kinds of work, each a loop.
        layers: layers that a turn of F or B runs.
        counts: number of turns of each loop that are timed; empty before `settle`.
    """

    def __init__(self, config: Config, tensor: int, micro_batch: int, devices: Sequence[jax.Device]) -> None:
        self.layers = min(LAYERS, config.model.layers)
        trainer = _trainer(config, tensor, micro_batch, devices, self.layers)
        c = trainer.config.model
        key = jax.random.key_data(jax.random.key(0)) if c.embedding_dropout or c.residual_dropout else None

        self.kinds = kinds(config)

        def local(params: transformer.Params, tokens: jax.Array, counts: jax.Array) -> tuple[object, ...]:
            return _turns(trainer.stage(params, tokens, key, splits=compute.PARTS[0] in self.kinds), counts)

        specs, whole = trainer.layout.specs(), PartitionSpec()
        mapped = trainer.shard_map(local, (specs, batch_spec(trainer.config.mesh), whole), PartitionSpec(tuple(AXES)))

        def make(key: jax.Array) -> transformer.Params:
            return trainer.layout.from_canonical(transformer.init(c, key))

        params = jax.jit(make, out_shardings=trainer.state_shardings.params)(jax.random.key(0))
        self._run = functools.partial(jax.jit(mapped), params, _tokens(trainer))
        self._time("forward", 1)
        self.counts: dict[str, int] = {}

    def settle(self, agree: Agree) -> None:
        """Find how often each kind of work must run to be timed.

        All processes use the same counts, since a group of devices may span several processes.

        Args:
            agree: function that returns process 0's figure on all processes.
        """
        self.counts = {kind: self._count(kind, agree) for kind in self.kinds}

    def _time(self, kind: str, count: int) -> Took:
        counts = np.array([count if kind == k else 0 for k in self.kinds], np.int32)
        return _timed(lambda: self._run(counts))

    def _count(self, kind: str, agree: Agree) -> int:
        count = 1
        while True:
            one, some = (min(self._time(kind, n).wall for _ in range(2)) for n in (1, 1 + count))
            spent = agree(some - one)
            if spent >= _LEAST or count >= 4096:
                return count
            count *= max(2, min(8, round(_LEAST / max(spent, 1e-9))))

    def sample(self, processes_per_core: float = 0.0) -> dict[str, float]:
        """Measure once, and return the seconds of one turn of every kind; those of F, B and its parts are per layer.

        Args:
            processes_per_core: number of processes that will compute on each core at the same time; 0: the process has
                its cores to itself.
        """
        seconds = {}
        for kind, count in self.counts.items():
            # The first turn also brings its buffers into memory. The quickest of a few measurements counts, as for
            # links; a slow first turn on a busy host would make all others look short.
            one, some = (_quickest(functools.partial(self._time, kind, n)) for n in (1, 1 + count))
            # Other work on the host may hide a turn; a profile has no times of 0.
            more = Took(max(some.wall - one.wall, _CLOCK), max(some.processor - one.processor, 0.0))
            layers = self.layers if kind in _OF_LAYERS else 1
            seconds[kind] = more.crowded(processes_per_core) / count / layers
        return seconds


class Bystander(LoopTimer):
    """A stand-in for LoopTimer on a process that measures nothing but takes part in process 0's decisions."""

    def __init__(self, config: Config) -> None:
        self.kinds, self.layers, self.counts = kinds(config), 1, {}

    def _time(self, kind: str, count: int) -> Took:
        return Took(0.0, 0.0)


class OptimizerTimer:
    """The optimizer's part of a train step, on the group of `tensor` devices that holds this process's first device.

    On a group that holds none of its devices, a process would time only the call.

    Attributes:
        devices: devices of the group.
        parameters: parameters per device.
    """

    def __init__(self, config: Config, tensor: int, devices: Sequence[jax.Device]) -> None:
        own = next(i for i, device in enumerate(devices) if device.process_index == jax.process_index())
        first = own // tensor * tensor
        self.devices = devices[first : first + tensor]
        trainer = _trainer(config, tensor, 1, self.devices, min(LAYERS, config.model.layers))
        self._state = trainer.init(0)
        self._grads = jax.tree.map(jnp.zeros_like, self._state.params)

        def update(state: TrainState, grads: transformer.Params) -> tuple[TrainState, dict[str, jax.Array]]:
            return trainer.update(state, jnp.float32(0), grads, state.codec)

        self._update = jax.jit(update, donate_argnums=0)
        self.parameters = trainer.layout.parameters_per_device

    def sample(self, processes_per_core: float = 0.0) -> float:
        """Measure once, and return the seconds per parameter that a device holds.

        Args:
            processes_per_core: see `LoopTimer.sample`.
        """

        def run() -> object:
            self._state, metrics = self._update(self._state, self._grads)
            return self._state, metrics

        return _timed(run).crowded(processes_per_core) / self.parameters
