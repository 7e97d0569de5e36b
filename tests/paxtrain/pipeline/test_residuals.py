"""A layer's backward that adds to accumulators: its sums, and the products that make them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Literal

from paxtrain.config import ModelConfig
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.model.tensor_parallel import WHOLE
from paxtrain.pipeline.residuals import AddingBackward, SplitVjp, WeightProducts, save_policy

GPT2 = ModelConfig(layers=1, hidden=32, heads=4, sequence=16, vocab_size=64, residual_dropout=0.1)
MODELS = {"gpt2": GPT2, "llama": dataclasses.replace(GPT2, family="llama", kv_heads=2, intermediate=48)}
KERNELS = {"gpt2": 4, "llama": 5}


@functools.cache
def a_layer(family: str, save: str):
    """Return a layer's vjp, its weights in bfloat16, accumulators, input and randomness."""
    c = MODELS[family]
    totals = jax.tree.map(lambda w: w[0], transformer.init(c, jax.random.key(0))["layers"])
    totals = jax.tree.map(lambda w: w + 0.1 * jax.random.normal(jax.random.key(w.size), w.shape), totals)
    weights = transformer.cast(totals, c, "layers")
    x = jax.random.normal(jax.random.key(1), (2, c.sequence, c.hidden), jnp.bfloat16)
    rest = jnp.int32(0), transformer.Dropout(jax.random.key_data(jax.random.key(2)), jnp.arange(2))

    def layer(weights, x, index, dropout):
        return transformer.layer(weights, x, c, WHOLE, dropout, index)[0]

    return SplitVjp(save_policy(save)(layer), weights, x, *rest), weights, totals, x, rest


def exact_gradients(closed, arguments):
    """Return the results but the last of a jaxpr; its last matrix products multiply bfloat16 numbers in float64."""
    values = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *arguments], strict=True))
    exact = {}
    for equation in closed.jaxpr.eqns:
        inputs = [a.val if isinstance(a, Literal) else values[a] for a in equation.invars]
        made = equation.primitive.bind(*inputs, **equation.params)
        values.update(zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True))
        if equation.primitive is lax.dot_general_p:
            left, right = (np.asarray(a, np.float64) for a in inputs)
            with jax.enable_x64():
                product = lax.dot_general(left, right, equation.params["dimension_numbers"], precision="highest")
            exact[equation.outvars[0]] = np.asarray(product)
        elif equation.primitive is lax.transpose_p and equation.invars[0] in exact:
            exact[equation.outvars[0]] = exact[equation.invars[0]].transpose(equation.params["permutation"])
    return [exact.get(out, np.asarray(values[out], np.float64)) for out in closed.jaxpr.outvars[:-1]]


@pytest.mark.parametrize(
    ("family", "save"),
    [
        ("gpt2", "residuals"),
        pytest.param("llama", "layer_inputs", marks=pytest.mark.slow),
        pytest.param("gpt2", "dots", marks=pytest.mark.slow),
        pytest.param("gpt2", "layer_inputs", marks=pytest.mark.slow),
        pytest.param("llama", "dots", marks=pytest.mark.slow),
        pytest.param("llama", "residuals", marks=pytest.mark.slow),
    ],
)
def test_the_sums_are_those_of_the_vjp_without_its_rounding(family, save):
    vjp, weights, totals, x, rest = a_layer(family, save)
    adding = AddingBackward(vjp, weights)

    y, kept = vjp.forward(weights, x, *rest)
    (_, g), (added, out) = vjp.backward(weights, kept, y), adding(weights, kept, y, totals)
    np.testing.assert_array_equal(g, out)
    deltas = exact_gradients(vjp.backward_jaxpr(weights), [*jax.tree.leaves(weights), *kept, y])
    controls = 0  # of products that are rounded to bfloat16 before they are added
    for delta, total, new in zip(deltas, *map(jax.tree.leaves, (totals, added)), strict=True):
        want = np.float64(total) + delta
        assert np.linalg.norm(new - want) <= 2.0**-22 * np.linalg.norm(want)
        rounded = np.float64(total) + np.float64(jnp.asarray(delta, jnp.bfloat16))
        controls += delta.ndim > 1 and np.linalg.norm(rounded - want) > 2.0**-12 * np.linalg.norm(want)
    assert controls == KERNELS[family]


@pytest.mark.parametrize("family", MODELS)
def test_each_matrix_has_one_product_in_float32_that_is_added_as_it_is(family):
    vjp, weights, totals, x, _ = a_layer(family, "dots")
    adding = AddingBackward(vjp, weights)
    jaxpr = jax.make_jaxpr(adding)(weights, vjp.kept, x, totals).jaxpr
    makers = {made: equation for equation in jaxpr.eqns for made in equation.outvars}
    kernels = [out for out in jaxpr.outvars[:-1] if out.aval.ndim > 1 and out.aval.dtype == jnp.float32]
    sums = [
        makers[out] for out in kernels if out.aval.size >= GPT2.hidden**2 // 2 and makers[out].primitive.name == "add"
    ]
    direct = [e for e in sums if any(makers[a].primitive.name == "dot_general" for a in e.invars if a in makers)]
    assert len(direct) == KERNELS[family]


def found_in(function, *shapes) -> tuple[int, ...]:
    """Return the numbers of a function's results, except the last, that are products to add."""
    closed = jax.make_jaxpr(function)(*(jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in shapes))
    *gradients, last = closed.jaxpr.outvars
    return WeightProducts(closed.jaxpr.eqns, gradients, [last]).numbers


def test_only_products_that_are_nothing_else_are_found():
    def used_twice(x, g):
        product = x.T @ g
        return product, product.sum()

    assert found_in(lambda x, g: ((x.T @ g).T.astype(jnp.float32), g.sum(axis=0), g), (4, 3), (4, 5)) == (0,)
    assert found_in(used_twice, (4, 3), (4, 5)) == ()
    assert found_in(lambda x, g: (2 * (x.T @ g), g), (4, 3), (4, 5)) == ()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0), (2, 0, 1), (1, 0, 2)])
def test_transposed_products_are_added_in_their_places(order):
    x, g = (jax.random.normal(jax.random.key(i), (4, *dims)) for i, dims in enumerate([(3,), (2, 5)]))

    def gradient(x, g):
        return lax.transpose(jnp.einsum("th,tcd->hcd", x, g), order), g

    closed = jax.make_jaxpr(gradient)(x, g)
    products = WeightProducts(closed.jaxpr.eqns, closed.jaxpr.outvars[:1], closed.jaxpr.outvars[1:])
    total = jnp.ones(gradient(x, g)[0].shape)
    values = dict(zip(closed.jaxpr.invars, (x, g), strict=True))
    np.testing.assert_allclose(products.add(0, values, total), total + gradient(x, g)[0], rtol=1e-6)


def test_a_layer_that_keeps_a_copy_of_a_kernel_is_refused():
    weights, x = {"kernel": jnp.ones((4, 4))}, jnp.ones((2, 4))
    with pytest.raises(
        UserError, match=r"the layer keeps float32\[4, 4\], float32\[4, 4\] for its backward, as large as a kernel"
    ):
        SplitVjp(lambda w, x: x @ jnp.sin(w["kernel"]), weights, x)
    assert [leaf.shape for leaf in SplitVjp(lambda w, x: x @ w["kernel"], weights, x).kept] == [(2, 4)]
