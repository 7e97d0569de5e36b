"""Muon for the layers' matrices, as its authors wrote it, over global arrays in mesh layout.

Every row of a kernel [rows, n, k] is a separate matrix. Kernels [rows, n, several, k] hold several matrices in each
row: q, k and v, or a gate and the projection that it multiplies. They are orthogonalised separately, because they train
worse if they are orthogonalised together (Jordan et al.). A row without a layer is zero, and so is its update.

Newton-Schulz multiplies whole matrices, but data and tensor parallelism split the weights within matrices. So each
stage's matrices are dealt out to its devices: the momentum is split by rows, gradients move to this split and updates
move back. In between, devices do not communicate. If the size of an axis does not divide the rows, that axis keeps
splitting the dim that it splits in the weights. XLA then splits the products over it, with collectives in every
iteration.

References:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the method; q, k and v apart).
    Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982 (updates of AdamW's size).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from paxtrain.config import ModelConfig, OptimizerConfig
from paxtrain.config.axes import DATA, PIPE, layer_axes
from paxtrain.model import parameters
from paxtrain.parallel.layout import Layout, Params, names

# Shardings of a tree that mirrors the parameters: the first is that of the weights, the last has the matrices dealt
# out.
Route = Sequence[Params]


def is_matrix(config: ModelConfig, path: tuple) -> bool:
    """Return whether a parameter holds matrices of the layers; the tables of embedding and head do not count."""
    return parameters.by_names(config)[names(path)].role == "kernel"


def route(layout: Layout) -> list[Params]:
    """Return the PartitionSpecs from those of the weights to those with each stage's matrices dealt out.

    From one to the next a single axis (data, then those that split layers, the minor one first) moves, which is an
    all-to-all. If two moved at once, XLA would gather the whole array.
    """
    mesh = layout.config.mesh
    shapes = dict(jax.tree_util.tree_leaves_with_path(layout.shapes))

    def move(path: tuple, spec: PartitionSpec, axis: str, size: int) -> PartitionSpec:
        rows = shapes[path].shape[0] // layout.stages
        first, *inner = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        dealt = math.prod(mesh.device_sizes[other] for other in first if other != PIPE)
        splits = is_matrix(layout.config.model, path) and any(axis in entry for entry in inner)
        if not splits or size == 1 or rows % (dealt * size):
            return spec
        moved = [(*first, axis), *(tuple(other for other in entry if other != axis) for entry in inner)]
        return PartitionSpec(*(entry or None for entry in moved))

    found = [layout.specs()]
    for axis in (*mesh.over(DATA), *reversed(layer_axes())):
        step = functools.partial(move, axis=axis, size=mesh.device_sizes[axis])
        found.append(jax.tree_util.tree_map_with_path(step, found[-1], is_leaf=lambda x: isinstance(x, PartitionSpec)))
    return found


def _go(shardings: Route) -> optax.GradientTransformation:
    """Return a transformation that moves updates through the shardings of a route."""
    known = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in shardings]

    def go(path: tuple, x: jax.Array) -> jax.Array:
        for step in known:
            x = lax.with_sharding_constraint(x, step[path])
        return x

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(go, updates))


def _orthogonal(x: jax.Array, steps: int) -> jax.Array:
    """Return matrices [..., n, k] with singular values near 1, by the iteration that Jordan et al. print."""
    if x.shape[-2] > x.shape[-1]:
        return _orthogonal(x.mT, steps).mT
    x = x / jnp.maximum(jnp.linalg.norm(x, axis=(-2, -1), keepdims=True), 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


def _orthogonalize(steps: int) -> optax.GradientTransformation:
    """Return a transformation that orthogonalizes the matrices in kernels [rows, n, k] or [rows, n, several, k]."""

    def each(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(_orthogonal(jnp.moveaxis(x, 1, -2), steps), -2, 1)

    return optax.stateless(lambda updates, _: jax.tree.map(each, updates))


def _scale(rms: float) -> optax.GradientTransformation:
    """Return a transformation that scales updates to AdamW's size (Liu et al.), or as Jordan et al. if rms is 0."""

    def scaled(x: jax.Array) -> jax.Array:
        n, k = x.shape[1], x.shape[-1]
        return x * (rms * math.sqrt(max(n, k)) if rms else math.sqrt(max(1.0, k / n)))

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))


def muon(config: OptimizerConfig, rate: optax.Schedule, route: Route = ()) -> optax.GradientTransformation:
    """Return Muon with Nesterov's momentum and decoupled weight decay, for trees of matrices.

    Args:
        config: Muon's settings: iterations, momentum, size of updates, weight decay.
        rate: Learning rate; that of AdamW fits if config.muon_rms is above 0.
        route: Shardings from that of the weights to the one for orthogonalisation; (): updates are not moved.
    """
    chain = optax.chain(
        _go(route),
        optax.trace(config.muon_momentum, nesterov=True),
        _orthogonalize(config.muon_steps),
        _scale(config.muon_rms),
        # The first constraint repeats the present sharding; without it XLA moves both terms of the last iteration's
        # sum.
        _go(route[::-1]),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.GradientTransformation(chain.init, jax.named_scope("muon")(chain.update))
