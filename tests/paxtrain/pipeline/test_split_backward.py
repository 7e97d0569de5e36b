"""The backward in two parts: both together equal the whole backward, and each part has its own equations only."""

import dataclasses
import functools
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from paxtrain.config import ModelConfig
from paxtrain.model import transformer
from paxtrain.model.tensor_parallel import WHOLE
from paxtrain.pipeline.residuals import SplitVjp, save_policy
from paxtrain.pipeline.split_backward import SplitBackward

GPT2 = ModelConfig(layers=1, hidden=32, heads=4, sequence=16, vocab_size=64, residual_dropout=0.1)
MODELS = {"gpt2": GPT2, "llama": dataclasses.replace(GPT2, family="llama", kv_heads=2, intermediate=48)}
KERNELS = {"gpt2": {"qkv", "out", "up", "down"}, "llama": {"q", "kv", "out", "gate_up", "down"}}
CASES = list(itertools.product(MODELS, ("dots", "residuals")))


@functools.cache
def a_layer(family: str, save: str):
    """Return a layer's vjp, its split, weights, input and randomness."""
    c = MODELS[family]
    weights = jax.tree.map(lambda w: w[0], transformer.init(c, jax.random.key(0))["layers"])
    weights = jax.tree.map(lambda w: w + 0.1 * jax.random.normal(jax.random.key(w.size), w.shape), weights)
    x = jax.random.normal(jax.random.key(1), (2, c.sequence, c.hidden))
    rest = jnp.int32(0), transformer.Dropout(jax.random.key_data(jax.random.key(2)), jnp.arange(2))

    def layer(weights, x, index, dropout):
        return transformer.layer(weights, x, c, WHOLE, dropout, index)[0]

    vjp = SplitVjp(save_policy(save)(layer), weights, x, *rest)
    return vjp, SplitBackward(vjp, weights), weights, x, rest


def products(jaxpr) -> int:
    """Return the matrix products of a jaxpr, including those of its calls."""
    inner = [e.params.get("jaxpr", e.params.get("call_jaxpr")) for e in jaxpr.eqns]
    return sum(e.primitive.name == "dot_general" for e in jaxpr.eqns) + sum(map(products, filter(None, inner)))


@pytest.mark.parametrize(("family", "save"), CASES)
def test_both_parts_make_the_gradients_of_the_whole(family, save):
    vjp, split, weights, x, rest = a_layer(family, save)

    @jax.jit
    def whole(weights, x):
        y, kept = vjp.forward(weights, x, *rest)
        return vjp.backward(weights, kept, y)

    @jax.jit
    def parts(weights, x):
        y, kept = vjp.forward(weights, x, *rest)
        # A leaf that nobody has written must not be read, nor one that B has overwritten.
        leaves = [*kept, *(jnp.full(leaf.shape, jnp.nan, leaf.dtype) for leaf in split.leaves[len(kept) :])]
        g, early, left = split.input_gradient(weights, leaves, y)
        leaves = [left.get(n, leaf) for n, leaf in enumerate(leaves)]
        nothing = {n: jnp.zeros(w.shape) for n, w in enumerate(jax.tree.leaves(weights)) if n in split.late}
        deltas = early | split.weight_gradients(weights, leaves, nothing)
        return jax.tree.structure(weights).unflatten([deltas[n] for n in range(len(deltas))]), g

    expected, found = whole(weights, x), parts(weights, x)
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * np.abs(a).max())


@pytest.mark.parametrize(("family", "save"), CASES)
def test_matrices_are_late_and_no_product_runs_twice(family, save):
    vjp, split, weights, x, _ = a_layer(family, save)
    names = [[entry.key for entry in path] for path, _ in jax.tree_util.tree_leaves_with_path(weights)]
    assert {tuple(names[n]) for n in split.late} == {(name, "kernel") for name in KERNELS[family]}
    b = jax.make_jaxpr(lambda *args: split.input_gradient(*args))(weights, split.leaves, x)
    totals = {n: leaf for n, leaf in enumerate(jax.tree.leaves(weights)) if n in split.late}
    w = jax.make_jaxpr(lambda *args: split.weight_gradients(*args))(weights, split.leaves, totals)
    whole = jax.make_jaxpr(lambda *args: vjp.backward(*args))(weights, vjp.kept, x)
    assert products(w) == len(KERNELS[family])
    assert products(b) + products(w) == products(whole)


def test_what_b_leaves_takes_places_that_w_does_not_read():
    """With save="dots", only the operand of qkv's gradient fits into a place; those of three other products do not."""
    vjp, split, *_ = a_layer("gpt2", "dots")
    tokens = 2 * GPT2.sequence * GPT2.hidden
    assert sorted(leaf.size for leaf in split.leaves[len(vjp.kept) :]) == [tokens, tokens, 4 * tokens]
    vjp, split, *_ = a_layer("gpt2", "residuals")
    assert len(split.leaves) - len(vjp.kept) <= 3


def test_a_collective_among_weight_gradients_is_refused():
    weights, x = [jnp.ones((4, 4))], jnp.ones((2, 4))

    def split(reduce):
        def backward(weights, kept, g):
            return [reduce(kept[0].T @ g)], g @ weights[0].T

        def make(_):
            vjp = types.SimpleNamespace(kept=[x], output=x, backward=backward)
            vjp.backward_jaxpr = functools.partial(SplitVjp.backward_jaxpr, vjp)
            SplitBackward(vjp, weights)
            return 0

        jax.make_jaxpr(jax.vmap(make, axis_name="tensor"))(jnp.arange(2))

    split(lambda delta: delta)
    with pytest.raises(AssertionError, match="collective"):
        split(lambda delta: lax.psum(delta, "tensor"))
