"""A small model whose training step is compressed in one way or another: its gradients, steps and compiled program."""

import functools
import math

import jax
import numpy as np

from paxtrain.config import Config, MeshConfig
from paxtrain.model import transformer
from paxtrain.parallel.compression.settled import Compression
from paxtrain.parallel.step import Trainer
from paxtrain.study import measurements
from paxtrain.xla import hlo
from tests import small
from tests.paxtrain.xla import counted
from tests.small import SEQUENCE, trainer

FAST = {"xla_backend_optimization_level": 0}  # half the time to compile; the HLO is the same
HIDDEN = small.MODEL["hidden"]
MESSAGE = (2 * SEQUENCE, HIDDEN)


def config(
    mesh=(2, 4, 1), micro_batches=4, layers=4, zero1=True, sequence=False, schedule="eager_1f1b", chunks=1, **compress
) -> Config:
    return small.config(
        mesh,
        (2 * micro_batches * mesh[0], 2),
        model={"layers": layers, "vocab_multiple": 64},
        mesh={"shard": MeshConfig.of_zero1(zero1), "sequence_parallel": sequence},
        pipeline={"schedule": schedule, "virtual_stages": chunks, "scan_layers": "on"},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 1},
        run={"steps": 100},
        compress=compress,
    )


def compiled(trained: Trainer) -> jax.stages.Compiled:
    return trained.step.lower(trained.abstract_state(), trained.abstract_batch()).compile(FAST)


@functools.cache
def canonical(layers: int = 4) -> transformer.Params:
    return small.canonical(config((1, 1, 1), layers=layers).model)


def batch(trained: Trainer) -> jax.Array:
    return jax.device_put(small.tokens(trained.config), trained.batch_sharding)


@functools.cache
def evaluated(
    c: Config, stage_ranks: tuple[int, ...] | None = None, virtual: bool = False
) -> tuple[float, dict, dict, np.ndarray]:
    """Return loss, canonical gradients, gradients in the mesh's layout and codec state of one step."""
    trained = small.emulated(c) if virtual else trainer(c, stage_ranks=stage_ranks)
    params = jax.device_put(
        jax.jit(trained.layout.from_canonical)(canonical(c.model.layers)), trained.state_shardings.params
    )
    tokens = batch(trained)
    run = jax.jit(trained.loss_and_gradients).lower(params, tokens).compile(FAST)
    loss, grads, codec, *_ = run(params, tokens)
    whole = jax.jit(trained.layout.to_canonical)(grads)
    return float(loss), *jax.device_get((whole, grads, codec))


def trained_steps(c: Config, steps: int) -> tuple[list[float], dict]:
    trained = trainer(c)
    state = trained.from_params(canonical(c.model.layers))
    tokens, losses = batch(trained), []
    step = compiled(trained)
    for _ in range(steps):
        state, metrics = step(state, tokens)
        losses.append(float(metrics["loss"]))
    return losses, jax.device_get(state)


def differences(mine, right) -> dict[str, float]:
    """Return max |difference| / max |right| of each array."""

    def error(a: np.ndarray, b: np.ndarray) -> float:
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        return float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30))

    found = jax.tree.map(error, mine, right)
    return {jax.tree_util.keystr(path): e for path, e in jax.tree_util.tree_leaves_with_path(found)}


def assert_close(mine, right, tolerance=1e-5):
    wrong = {name: e for name, e in differences(mine, right).items() if not e <= tolerance}
    assert not wrong, wrong


@functools.cache
def _one_device(layers: int, global_batch: int) -> tuple[float, dict]:
    alone = config((1, 1, 1), micro_batches=global_batch // 2, layers=layers)
    loss = functools.partial(transformer.loss, config=alone.model)
    value, grads = jax.jit(jax.value_and_grad(loss))(canonical(layers), batch(trainer(alone)))
    return float(value), jax.device_get(grads)


def exact(c: Config) -> tuple[float, dict]:
    """Return the loss and the gradients of the plain model on one device, by autodiff."""
    return _one_device(c.model.layers, c.batch.global_batch)


FULL = {"backward_messages": "all", "backward_rank": 32, "min_ratio": 0.0}


def by_pair(trained: Trainer) -> dict[tuple[int, int], int]:
    """Return bytes from stage to stage on the links of data rank 0, tensor rank 0, without the tied embedding's."""
    mesh = trained.config.mesh
    found = counted.permute_bytes_by_pair(compiled(trained).as_text())
    stages = {s * mesh.tensor: s for s in range(mesh.pipe)}
    pairs = {(stages[a], stages[b]): size for (a, b), size in found.items() if a in stages and b in stages}
    table = trained.config.model.padded_vocab // mesh.tensor * HIDDEN * 4 // mesh.data
    for pair in ((0, mesh.pipe - 1), (mesh.pipe - 1, 0)):
        pairs[pair] = pairs.get(pair, 0) - table
    return {pair: size for pair, size in pairs.items() if size}


SCATTER = "all-to-all"  # on CPUs


@functools.lru_cache(maxsize=8)
def _executed(text: str) -> tuple[list[hlo.Collective], set[str]]:
    """Return the collectives of a program, and the computations that all devices run."""
    certain = {op.computation for op in hlo.collectives(text, unknown_trip_count=0) if op.executions}
    return hlo.collectives(text), certain


def collectives(trained: Trainer, stage: int) -> list[hlo.Collective]:
    """Return the collectives of the compiled step that a device of a stage runs."""
    every, certain = _executed(compiled(trained).as_text())
    return [op for op in every if op.computation in certain or measurements.runs(trained, stage, op.op_name)]


def all_reduced(trained: Trainer, stage: int) -> dict[str, int]:
    """Return the bytes of a device of a stage in each kind of collective over data."""
    ops = collectives(trained, stage)
    return {
        kind: sum(op.bytes * op.executions for op in ops if op.kind == kind)
        for kind in ("all-reduce", SCATTER, "all-gather")
    }


def matrices(compression: Compression) -> dict[tuple[str, str], tuple[int, int]]:
    """Return the layers' kernels on one device as matrices (rows, columns), by path."""
    return {path: (shape[0], math.prod(shape[1:])) for path, shape in compression.kernels.items()}
