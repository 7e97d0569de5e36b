"""Selective stage compression: the stages to compress, from times measured on the mesh before the first step.

Compression pays on the stages whose reductions over data end the step. The choice needs two times of each stage: the
end of its last backward, and the duration of its reduction, dense and compressed. Reductions are timed one stage at a
time on that stage's links. The end of a backward is the pipeline's duration times the share of the schedule's rows up
to that backward; all rows count as equally long.

References:
    Optimus-CC (Song et al. 2023), selective stage compression.
"""

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from compress import policy
from compress.codec import State
from paxtrain.config.axes import PIPE
from paxtrain.parallel import gradients
from paxtrain.parallel.layout import Params
from paxtrain.parallel.mesh import batch_spec, device_spec, local, spread
from paxtrain.parallel.step import Trainer, TrainState
from paxtrain.pipeline import executor
from paxtrain.pipeline.program import Weights
from paxtrain.pipeline.rings import only_if
from paxtrain.process import distributed

_REPEATS = 5


class StageTimes(NamedTuple):
    """Times of each stage in seconds.

    Attributes:
        finish: Time from the start of the step to the end of the stage's last backward.
        dense: Time of its dense reduction over data.
        compressed: Time of its compressed reduction over data.
    """

    finish: tuple[float, ...]
    dense: tuple[float, ...]
    compressed: tuple[float, ...]

    def chosen(self) -> tuple[int, ...]:
        """Return the numbers of the stages to compress."""
        return tuple(policy.selective(*self))


def finish_rows(trainer: Trainer) -> tuple[int, ...]:
    """Return how many rows of the schedule run until the last backward (B or W) of each stage is done."""
    last = dict.fromkeys(range(trainer.schedule.stages), 0)
    for phase in ("backward", "weights"):
        for row, stage, *_ in trainer.schedule.ops(phase):
            last[stage] = max(last[stage], row + 1)
    return tuple(last.values())


def _seconds(run: Callable[[], object]) -> float:
    """Return the median seconds of a few runs, on the slowest process."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    median = statistics.median(taken)
    if jax.process_count() > 1:
        median = float(np.max(distributed.allgather(np.float32(median))))
    return median


def pipelined(trainer: Trainer) -> jax.stages.Wrapped:
    """Return the jitted pipeline without the reduction of gradients.

    Returns:
        A function of parameters in mesh layout, tokens [global_batch, sequence + 1] and codec state, which returns the
        loss and the unreduced gradients of each device, with the axes as leading dims.
    """

    def backward(params: Params, tokens: jax.Array, codec: State) -> tuple[jax.Array, Weights]:
        stage = trainer.stage(params, tokens, None)
        between = local({direction: codec[direction] for direction in ("backward", "forward")})
        loss, grads, *_ = executor.loss_and_gradients(
            stage, trainer.buffers, trainer.schedule.masked, trainer.compression.links, between
        )
        return spread((loss, grads))

    mesh, every = trainer.config.mesh, device_spec(trainer.config.mesh)
    return jax.jit(trainer.shard_map(backward, (trainer.layout.specs(), batch_spec(mesh), every), every))


def reduction(trainer: Trainer, level: int) -> jax.stages.Wrapped:
    """Return the jitted reduction over data of the gradients of one stage.

    Args:
        trainer: The trainer of the run.
        level: Level of the reducer, the rank of PowerSGD; 0 for a dense reduction.

    Returns:
        A function of the stage's number, the unreduced gradients and the state of the compression over data. Its result
        only shows that the stage has reduced its gradients; the other stages do nothing.
    """

    def one(chosen: jax.Array, grads: Weights, state: State) -> jax.Array:
        layers = gradients.layer_gradients(local(grads))

        def body(total: jax.Array) -> jax.Array:
            # The barrier binds the inputs to the loop. Without it XLA would move the reduction out of the loop, and all
            # stages would run it.
            inputs, total = lax.optimization_barrier(((layers, local(state)), total))
            outputs = gradients.reduce_layers(trainer.compression, level, *inputs)
            # Every output is needed, and only one element of each is read.
            return total + sum(x.reshape(-1)[0] for x in jax.tree.leaves(lax.optimization_barrier(outputs)))

        return spread(only_if(lax.axis_index(PIPE) == chosen, body, jnp.float32(0)))

    every = device_spec(trainer.config.mesh)
    return jax.jit(trainer.shard_map(one, (PartitionSpec(), every, every), every))


def measure(trainer: Trainer, state: TrainState) -> StageTimes:
    """Measure the stages' times with the programs of the run.

    Args:
        trainer: Trainer of a configuration that compresses over data; its stage_ranks have no effect.
        state: Training state; it is read and not changed.
    """
    stages, level = trainer.layout.stages, trainer.compression.level
    shape = trainer.abstract_batch().shape
    tokens = jax.jit(lambda: jnp.zeros(shape, jnp.int32), out_shardings=trainer.batch_sharding)()
    backward = distributed.compiled_together(pipelined(trainer), "the backward without reductions")
    whole = _seconds(lambda: backward(state.params, tokens, state.codec))
    _, grads = backward(state.params, tokens, state.codec)

    def seconds(program: Callable[..., object], stage: int) -> float:
        return _seconds(lambda: program(jnp.int32(stage), grads, state.codec["data"]))

    dense, compressed = (
        tuple(seconds(program, stage) for stage in range(stages))
        for program in (
            distributed.compiled_together(reduction(trainer, n), f"a reduction of level {n}") for n in (0, level)
        )
    )
    finish = tuple(whole * rows / trainer.schedule.rows for rows in finish_rows(trainer))
    return StageTimes(finish, dense, compressed)


def choose(trainer: Trainer, state: TrainState) -> tuple[StageTimes, str]:
    """Return the stages' times, and "given" if the configuration states them or "measured"."""
    given = trainer.config.compress.data.seconds
    if given[0]:
        return StageTimes(*given), "given"
    return measure(trainer, state), "measured"
