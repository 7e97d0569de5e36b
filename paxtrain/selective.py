"""Which stages' reductions end the step: their times, measured on the mesh before the first step.

Selective stage compression needs, per stage, when its last backward ends and how long its reduction over data takes,
dense and compressed. Reductions are timed one stage at a time, on that stage's own links, whatever the others'. The end
of a backward is the pipeline's time times the share of its rows that the stage needs: rows are taken as equally long.

References:
    Optimus-CC (Song et al. 2023), selective stage compression.
"""

import dataclasses
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
from paxtrain import gradients, pipeline
from paxtrain.rings import only_if
from paxtrain.step import BATCH_SPEC, CODEC_SPEC, Trainer, TrainState

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
    """Per stage, the number of the schedule's rows until its last backward has run."""
    last = dict.fromkeys(range(trainer.schedule.stages), 0)
    for row, stage, *_ in trainer.schedule.ops("backward"):
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


def measure(trainer: Trainer, state: TrainState) -> StageTimes:
    """Times the mesh with the run's own programs; `state` is read only.

    Args:
        trainer: of a configuration that compresses over data; its stage_ranks do not matter.
    """
    stages, rank = trainer.layout.stages, trainer.config.compress.data_rank
    compression = trainer.compression
    tokens = jax.device_put(jnp.zeros(trainer.abstract_batch().shape, jnp.int32), trainer.batch_sharding)
    spread = lambda tree: jax.tree.map(lambda x: x[None, None, None], tree)  # noqa: E731
    local = lambda tree: jax.tree.map(lambda x: x[0, 0, 0], tree)  # noqa: E731

    def backward(params: Any, tokens: jax.Array, codec: Any) -> Any:
        stage = trainer.stage(params, tokens, None)
        between = {direction: codec[direction] for direction in ("backward", "forward")}
        run = pipeline.loss_and_gradients
        loss, grads, _ = run(stage, trainer.buffers, trainer.schedule.masked, compression.links, local(between))
        return spread((loss, grads))

    specs = (trainer.layout.specs(), BATCH_SPEC, CODEC_SPEC)
    pipelined = jax.jit(trainer.shard_map(backward, specs, CODEC_SPEC))
    whole = _seconds(lambda: pipelined(state.params, tokens, state.codec))

    def reduce(rank: int) -> Any:
        def one(chosen: jax.Array, grads: Any, power: Any) -> jax.Array:
            rows = gradients.layer_rows(local(grads))

            def body(total: jax.Array) -> jax.Array:
                reduced, new, _ = gradients.reduce_layers(compression, rank, rows, local(power))
                # A sum of what came out, so that nothing of it is dead; small beside the reduction itself.
                return total + sum(jnp.sum(x) for x in jax.tree.leaves((reduced, new)))

            return spread(only_if(lax.axis_index("pipe") == chosen, body, jnp.float32(0)))

        return jax.jit(trainer.shard_map(one, (PartitionSpec(), CODEC_SPEC, CODEC_SPEC), CODEC_SPEC))

    _, grads = pipelined(state.params, tokens, state.codec)
    costs = []
    for program in (reduce(0), reduce(rank)):
        costs.append(
            tuple(
                _seconds(lambda s=s, program=program: program(jnp.int32(s), grads, state.codec["data"]))
                for s in range(stages)
            )
        )
    finish = tuple(whole * rows / trainer.schedule.rows for rows in finish_rows(trainer))
    return StageTimes(finish, *costs)


def choose(trainer: Trainer, state: TrainState) -> tuple[StageTimes, str]:
    """The times that the configuration gives, or measured ones; and where they are from."""
    given = trainer.config.compress.seconds
    if given[0]:
        return StageTimes(*given), "given"
    return measure(dataclasses.replace(trainer, stage_ranks=None), state), "measured"
