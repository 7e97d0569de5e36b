"""Muon for the layers' matrices: optax's, over global arrays in mesh layout.

Every row of a kernel [rows, n, k] is a matrix of its own. Kernels of several matrices are [rows, n, several, k], as
model.py has them: q, k and v, or a gate and what it multiplies. They are orthogonalised apart, since fused they train
worse (Jordan et al.). A row without a layer is zero, and so is what is made of it.

Newton-Schulz multiplies whole matrices, and the weights are split inside of them, over data and tensor. So a stage's
matrices are dealt out: the momentum lives split by rows, gradients are brought there and updates back, and between the
two no device needs another one. An axis whose size does not divide the rows stays where the weights have it; XLA then
splits the products over it, with collectives in every iteration.

References:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the method; q, k and v apart).
    Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982 (updates of AdamW's size).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import optax
import optax.contrib
from jax import lax
from jax.sharding import PartitionSpec

from paxtrain.config import OptimizerConfig
from paxtrain.parallel.layout import Layout, Params, names

# Shardings of a tree that mirrors the parameters: as the weights have it first, with its matrices dealt out last.
Route = Sequence[Params]


def is_matrix(path: tuple) -> bool:
    """Whether the parameter of that path is the layers' matrices: not the embedding's table, not the head's."""
    return names(path)[0] == "layers" and names(path)[-1] == "kernel"


def route(layout: Layout) -> list[Params]:
    """PartitionSpecs on the way from the weights' to those with every stage's matrices dealt out over data and tensor.

    From one to the next a single axis moves, since that is an all-to-all: for two at once XLA gathers all of the array.
    """
    mesh, rows = layout.config.mesh, layout.layer_of.size // layout.stages

    def move(path: tuple, spec: PartitionSpec, axis: str, size: int) -> PartitionSpec:
        first, *inner = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
        dealt = math.prod(getattr(mesh, other) for other in first if other != "pipe")
        if not is_matrix(path) or size == 1 or rows % (dealt * size) or not any(axis in entry for entry in inner):
            return spec
        moved = [(*first, axis), *(tuple(other for other in entry if other != axis) for entry in inner)]
        return PartitionSpec(*(entry or None for entry in moved))

    found = [layout.specs()]
    for axis, size in (("data", mesh.data), ("tensor", mesh.tensor)):
        step = functools.partial(move, axis=axis, size=size)
        found.append(jax.tree_util.tree_map_with_path(step, found[-1], is_leaf=lambda x: isinstance(x, PartitionSpec)))
    return found


def _go(shardings: Route) -> optax.GradientTransformation:
    """Moves updates from sharding to sharding."""
    known = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in shardings]

    def go(path: tuple, x: jax.Array) -> jax.Array:
        for step in known:
            x = lax.with_sharding_constraint(x, step[path])
        return x

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(go, updates))


def _dimension_numbers(tree: Any) -> Any:
    """Which dims of a kernel [rows, n, k] or [rows, n, several, k] are its matrices': the others are many of them."""
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(1, x.ndim - 1), tree)


def _scale(rms: float) -> optax.GradientTransformation:
    def scaled(x: jax.Array) -> jax.Array:
        n, k = x.shape[1], x.shape[-1]
        return x * (rms * math.sqrt(max(n, k)) if rms else math.sqrt(max(1.0, k / n)))

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))


def muon(config: OptimizerConfig, rate: optax.Schedule, route: Route = ()) -> optax.GradientTransformation:
    """Muon with Nesterov's momentum and decoupled weight decay, for trees of matrices.

    Args:
        rate: the learning rate, AdamW's where config.muon_rms is above 0.
        route: of gradients to where they are orthogonalised, and back of updates; (): they stay where they are.
    """
    chain = optax.chain(
        _go(route),
        optax.contrib.scale_by_muon(
            ns_steps=config.muon_steps, beta=config.muon_momentum, weight_dimension_numbers=_dimension_numbers
        ),
        _scale(config.muon_rms),
        # First where it is already: else XLA moves both terms of the last iteration's sum.
        _go(route[::-1]),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.GradientTransformation(chain.init, jax.named_scope("muon")(chain.update))
