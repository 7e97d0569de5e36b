"""Which stages' reductions end the step: their times, measured on the mesh before the first step.

Selective stage compression needs, per stage, when its last backward ends and how long its reduction over data takes,
dense and compressed. Reductions are timed one stage at a time, on that stage's own links, whatever the others'. The end
of a backward is the pipeline's time times the share of its rows that the stage needs: rows are taken as equally long.

References:
    Optimus-CC (Song et al. 2023), selective stage compression.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import PartitionSpec

from compress import policy
from paxtrain.parallel import gradients
from paxtrain.parallel.step import BATCH_SPEC, CODEC_SPEC, Trainer, TrainState
from paxtrain.pipeline import executor
from paxtrain.pipeline.rings import only_if

_REPEATS = 5


class StageTimes(NamedTuple):
    """Seconds, a number per stage.

    Attributes:
        finish: from the step's start to the end of the stage's last backward.
        dense, compressed: of its reduction over data.
    """

    finish: tuple[float, ...]
    dense: tuple[float, ...]
    compressed: tuple[float, ...]

    def chosen(self) -> tuple[int, ...]:
        """The stages to compress."""
        return tuple(policy.selective(*self))


def finish_rows(trainer: Trainer) -> tuple[int, ...]:
    """Per stage, the number of the schedule's rows until its last backward has run, that of its weights included."""
    last = dict.fromkeys(range(trainer.schedule.stages), 0)
    for phase in ("backward", "weights"):
        for row, stage, *_ in trainer.schedule.ops(phase):
            last[stage] = max(last[stage], row + 1)
    return tuple(last.values())


def _seconds(run: Callable[[], Any]) -> float:
    """Median of a few runs, the slowest process's."""
    jax.block_until_ready(run())
    taken = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(run())
        taken.append(time.perf_counter() - began)
    median = statistics.median(taken)
    if jax.process_count() > 1:
        median = float(np.max(multihost_utils.process_allgather(np.float32(median))))
    return median


def _spread(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[None, None, None], tree)


def _local(tree: Any) -> Any:
    return jax.tree.map(lambda x: x[0, 0, 0], tree)


def pipelined(trainer: Trainer) -> Any:
    """jit: (params, tokens, codec state) -> loss and unreduced gradients, with leading dims [data, pipe, tensor]."""

    def backward(params: Any, tokens: jax.Array, codec: Any) -> Any:
        stage = trainer.stage(params, tokens, None)
        between = _local({direction: codec[direction] for direction in ("backward", "forward")})
        loss, grads, _ = executor.loss_and_gradients(
            stage, trainer.buffers, trainer.schedule.masked, trainer.compression.links, between
        )
        return _spread((loss, grads))

    return jax.jit(trainer.shard_map(backward, (trainer.layout.specs(), BATCH_SPEC, CODEC_SPEC), CODEC_SPEC))


def reduction(trainer: Trainer, rank: int) -> Any:
    """jit: (a stage, unreduced gradients, state) -> numbers, after that stage alone has reduced its gradients."""

    def one(chosen: jax.Array, grads: Any, power: Any) -> jax.Array:
        layers = gradients.layer_gradients(_local(grads))

        def body(total: jax.Array) -> jax.Array:
            # Bound to the loop: XLA would move out of it what does not change in it, for all stages to run.
            inputs, total = lax.optimization_barrier(((layers, _local(power)), total))
            outputs = gradients.reduce_layers(trainer.compression, rank, *inputs)
            # All of what came out is needed, and hardly any of it read.
            return total + sum(x.reshape(-1)[0] for x in jax.tree.leaves(lax.optimization_barrier(outputs)))

        return _spread(only_if(lax.axis_index("pipe") == chosen, body, jnp.float32(0)))

    return jax.jit(trainer.shard_map(one, (PartitionSpec(), CODEC_SPEC, CODEC_SPEC), CODEC_SPEC))


def measure(trainer: Trainer, state: TrainState) -> StageTimes:
    """Times the mesh with the run's own programs; `state` is read only.

    Args:
        trainer: of a configuration that compresses over data; its stage_ranks do not matter.
    """
    stages, rank = trainer.layout.stages, trainer.config.compress.data_rank
    zeros = lambda: jnp.zeros(trainer.abstract_batch().shape, jnp.int32)  # noqa: E731
    tokens = jax.jit(zeros, out_shardings=trainer.batch_sharding)()
    backward = pipelined(trainer)
    whole = _seconds(lambda: backward(state.params, tokens, state.codec))
    _, grads = backward(state.params, tokens, state.codec)
    costs = []
    for program in (reduction(trainer, 0), reduction(trainer, rank)):
        run = lambda s, program=program: program(jnp.int32(s), grads, state.codec["data"])  # noqa: E731
        costs.append(tuple(_seconds(lambda s=s, run=run: run(s)) for s in range(stages)))
    finish = tuple(whole * rows / trainer.schedule.rows for rows in finish_rows(trainer))
    return StageTimes(finish, *costs)


def choose(trainer: Trainer, state: TrainState) -> tuple[StageTimes, str]:
    """The times that the configuration gives, or measured ones; and where they are from."""
    given = trainer.config.compress.seconds
    if given[0]:
        return StageTimes(*given), "given"
    return measure(trainer, state), "measured"
