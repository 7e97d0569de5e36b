"""The values that a forward keeps for its backward: the save modes, and a vjp whose residuals can wait in a ring."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from paxtrain.model import transformer


def save_policy(save: str) -> Callable[[Callable], Callable]:
    """Return the wrapper around one layer that makes its vjp keep what the save mode says."""
    if save in ("residuals", "inputs"):
        return lambda layer: layer
    if save == "layer_inputs":
        return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    names = jax.checkpoint_policies.save_only_these_names(*transformer.SAVED_NAMES)

    def keep(primitive: Any, *args: Any, **params: Any) -> bool:
        # With the outputs of flash attention (context and softmax sums) kept, its forward does not run again.
        return primitive.name.startswith("dot_product_attention_fwd") or names(primitive, *args, **params)

    return functools.partial(jax.checkpoint, policy=keep)


class SplitVjp:
    """`jax.vjp` of function(weights, x, *rest), whose residuals are split into weights and the rest.

    Weights stay where they are. The rest is what waits from F to B.

    Attributes:
        kept: shapes of that rest.

    Raises:
        AssertionError: a copy of a weight would be kept.
    """

    def __init__(self, function: Callable, weights: Any, x: jax.Array, *rest: Any):
        self._function = function
        where: list[int] = []

        def probe(weights: Any, x: jax.Array, *rest: Any) -> Any:
            _, vjp = jax.vjp(lambda w, x: function(w, x, *rest), weights, x)
            ids = {id(w): i for i, w in enumerate(jax.tree.leaves(weights))}
            where.extend(ids.get(id(residual), -1) for residual in jax.tree.leaves(vjp))
            return vjp

        leaves, self._treedef = jax.tree.flatten(jax.eval_shape(probe, weights, x, *rest))
        self._where = where
        self.kept = [leaf for leaf, w in zip(leaves, where) if w < 0]
        kernels = {w.shape for w in jax.tree.leaves(weights) if w.ndim >= 2}
        floats = {leaf.shape for leaf in self.kept if jnp.issubdtype(leaf.dtype, jnp.floating)}
        assert not kernels & floats, "a weight is kept as a residual"

    def forward(self, weights: Any, x: jax.Array, *rest: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Return the output, and the residuals that are not weights.

        Args:
            weights: tree of the function's weights.
            x: input [B, S, H].
            rest: further arguments, which get no gradient.
        """
        y, vjp = jax.vjp(lambda w, x: self._function(w, x, *rest), weights, x)
        return y, [leaf for leaf, w in zip(jax.tree.leaves(vjp), self._where) if w < 0]

    def backward(self, weights: Any, kept: list[jax.Array], g: jax.Array) -> tuple[Any, jax.Array]:
        """Return the gradients with respect to the weights and to x.

        Args:
            weights: tree of the function's weights.
            kept: residuals that `forward` returned.
            g: gradient of the output [B, S, H].
        """
        flat, rest = jax.tree.leaves(weights), iter(kept)
        leaves = [flat[w] if w >= 0 else next(rest) for w in self._where]
        return jax.tree.unflatten(self._treedef, leaves)(g)
