"""Muon for the layers' matrices: optax's, over global arrays in mesh layout.

Every row of a kernel [rows, n, k] is a matrix of its own, and qkv's [rows, H, 3, H] are three: fused they train worse
(Jordan et al.). A row without a layer is zero, and so is what is made of it.

Newton-Schulz multiplies whole matrices, and the weights are split inside of them, over data and tensor. So a stage's
matrices are dealt out: the momentum lives split by rows, gradients are brought there and updates back, and between the
two no device needs another one. An axis whose size does not divide the rows stays where the weights have it; XLA then
splits the products over it, with collectives in every iteration.

References:
    Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/ (the method; q, k and v apart).
    Liu et al. 2025, Muon is Scalable for LLM Training, https://arxiv.org/abs/2502.16982 (updates of AdamW's size).
"""

import math
from typing import Any, NamedTuple

import jax
import optax
import optax.contrib
from jax import lax
from jax.sharding import PartitionSpec

from paxtrain.config import OptimizerConfig
from paxtrain.layout import Layout, Params, names


class Placement(NamedTuple):
    """Shardings of arrays that mirror the parameters: as the weights are, and with their matrices dealt out."""

    weights: Params
    matrices: Params


def is_matrix(path: tuple) -> bool:
    """Whether the parameter of that path is the layers' matrices: not the embedding, which is the head, too."""
    return names(path)[0] == "layers" and names(path)[-1] == "kernel"


def matrix_specs(layout: Layout) -> Params:
    """PartitionSpecs of the parameters with every stage's matrices dealt out over data and tensor where they divide."""
    mesh, rows = layout.config.mesh, layout.layer_of.size // layout.stages

    def spec(path: tuple, weights: PartitionSpec) -> PartitionSpec:
        if not is_matrix(path):
            return weights
        first, *inner = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in weights]
        dealt = 1
        for axis, size in (("data", mesh.data), ("tensor", mesh.tensor)):
            if size > 1 and any(axis in entry for entry in inner) and rows % (dealt * size) == 0:
                dealt, first = dealt * size, (*first, axis)
                inner = [tuple(other for other in entry if other != axis) for entry in inner]
        return PartitionSpec(*(entry or None for entry in (first, *inner)))

    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    return jax.tree_util.tree_map_with_path(spec, layout.specs(), is_leaf=is_spec)


def _place(shardings: Params | None) -> optax.GradientTransformation:
    known = dict(jax.tree_util.tree_leaves_with_path(shardings))

    def move(path: tuple, x: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(x, known[path]) if known else x

    return optax.stateless(lambda updates, _: jax.tree_util.tree_map_with_path(move, updates))


def _dimension_numbers(tree: Any) -> Any:
    """Which dims of a kernel [rows, n, ..., k] are its matrices': the others are many of them."""
    return jax.tree.map(lambda x: optax.contrib.MuonDimensionNumbers(1, x.ndim - 1), tree)


def _scale(rms: float) -> optax.GradientTransformation:
    def scaled(x: jax.Array) -> jax.Array:
        n, k = x.shape[1], x.shape[-1]
        return x * (rms * math.sqrt(max(n, k)) if rms else math.sqrt(max(1.0, k / n)))

    return optax.stateless(lambda updates, _: jax.tree.map(scaled, updates))


def muon(
    config: OptimizerConfig, rate: optax.Schedule, placement: Placement | None = None
) -> optax.GradientTransformation:
    """Muon with Nesterov's momentum and decoupled weight decay, for trees of matrices.

    Args:
        rate: the learning rate, AdamW's where config.muon_rms is above 0.
        placement: of the mesh's global arrays; None: they stay where they are.
    """
    weights, matrices = placement or (None, None)
    chain = optax.chain(
        _place(matrices),
        optax.contrib.scale_by_muon(
            ns_steps=config.muon_steps, beta=config.muon_momentum, weight_dimension_numbers=_dimension_numbers
        ),
        _scale(config.muon_rms),
        _place(weights),
        optax.add_decayed_weights(config.weight_decay),
        optax.scale_by_learning_rate(rate),
    )
    return optax.GradientTransformation(chain.init, jax.named_scope("muon")(chain.update))
