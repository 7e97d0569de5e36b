"""The values that a forward keeps for its backward: save modes, and a vjp whose residuals can wait in a ring."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from paxtrain.model import transformer
from paxtrain.model.transformer import Params


def save_policy(save: str) -> Callable[[Callable], Callable]:
    """Return the wrapper that makes the vjp of one layer keep the values of a save mode (PipelineConfig.save)."""
    if save in ("residuals", "inputs"):
        return lambda layer: layer
    if save == "layer_inputs":
        return functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.nothing_saveable)
    names = jax.checkpoint_policies.save_only_these_names(*transformer.SAVED_NAMES)

    def keep(primitive: core.Primitive, *args: Any, **params: Any) -> bool:
        # With its own outputs (context and softmax sums) kept, flash attention's forward does not run twice.
        return primitive.name.startswith("dot_product_attention_fwd") or names(primitive, *args, **params)

    return functools.partial(jax.checkpoint, policy=keep)


class SplitVjp:
    """The `jax.vjp` of function(weights, x, *rest), with residuals that are weights told apart from all others.

    Weights stay in place. Only the other residuals have to be kept from F to B.

    Attributes:
        kept: shapes and dtypes of the residuals that are not weights.

    Raises:
        AssertionError: a copy of a weight would be kept.
    """

    def __init__(self, function: Callable, weights: Params, x: jax.Array, *rest: Any):
        self._function = function
        where: list[int] = []

        def probe(weights: Params, x: jax.Array, *rest: Any) -> Any:
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

    def forward(self, weights: Params, x: jax.Array, *rest: Any) -> tuple[jax.Array, list[jax.Array]]:
        """Run F of the function.

        Args:
            weights: the function's first argument, differentiated.
            x: its second argument, differentiated.
            rest: its other arguments.

        Returns:
            The output, and the residuals that are not weights.
        """
        y, vjp = jax.vjp(lambda w, x: self._function(w, x, *rest), weights, x)
        return y, [leaf for leaf, w in zip(jax.tree.leaves(vjp), self._where) if w < 0]

    def backward(self, weights: Params, kept: list[jax.Array], g: jax.Array) -> tuple[Params, jax.Array]:
        """Return the gradients with respect to the weights and to x.

        Args:
            weights: the weights that F was given.
            kept: the residuals that F returned.
            g: gradient of the output.
        """
        flat, rest = jax.tree.leaves(weights), iter(kept)
        leaves = [flat[w] if w >= 0 else next(rest) for w in self._where]
        return jax.tree.unflatten(self._treedef, leaves)(g)
