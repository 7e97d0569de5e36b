"""Norms and activations: values and gradients against autodiff in float64, and what they keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.model import pointwise

SHAPE, EPSILON = (2, 5, 48), 1e-5


def normal(p, x):
    mean = x.mean(axis=-1, keepdims=True) if "bias" in p else 0
    y = (x - mean) / jnp.sqrt(jnp.square(x - mean).mean(axis=-1, keepdims=True) + EPSILON) * p["scale"]
    return y + p["bias"] if "bias" in p else y


def swiglu(p, x):
    return jax.nn.silu(x[:, :, 0]) * x[:, :, 1]


CASES = {
    "layer norm": (SHAPE, True, lambda p, x: pointwise.norm(p, x, EPSILON), normal),
    "rms norm": (SHAPE, False, lambda p, x: pointwise.norm(p, x, EPSILON), normal),
    "gelu": (SHAPE, False, lambda p, x: pointwise.gelu(x), lambda p, x: jax.nn.gelu(x, approximate=True)),
    "swiglu": ((2, 5, 2, 48), False, lambda p, x: pointwise.swiglu(x), swiglu),
}


def arguments(name: str, dtype):
    """Return weights and an input whose values reach far into the tails, and a cotangent."""
    shape, bias, *_ = CASES[name]
    keys = jax.random.split(jax.random.key(0), 4)
    p = {"scale": 1 + jax.random.normal(keys[0], shape[-1:])} | ({"bias": jnp.ones(shape[-1:])} if bias else {})
    x = (0.5 + 4 * jax.random.normal(keys[1], shape)).astype(dtype)
    return p, x, jax.random.normal(keys[2], SHAPE).astype(dtype)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 2**-8)])
def test_values_and_gradients_are_those_of_float64(name, dtype, tolerance):
    """In bfloat16 nothing is rounded but the input and the result."""
    p, x, g = arguments(name, dtype)
    _, _, ours, reference = CASES[name]
    y, pull = jax.vjp(ours, p, x)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (p, x, g))
        expected, pull_wide = jax.vjp(reference, *wide[:2])
        expected = jax.device_get((expected, pull_wide(wide[2])))
    for found, wanted in zip(jax.tree.leaves((y, pull(g))), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(
            np.asarray(found, np.float64), wanted, atol=tolerance * np.abs(wanted).max(initial=1)
        )


@pytest.mark.parametrize(("name", "statistics"), [("layer norm", 2), ("rms norm", 1), ("gelu", 0), ("swiglu", 0)])
def test_the_backward_needs_the_input_and_of_norms_the_statistics(name, statistics):
    p, x, _ = arguments(name, jnp.bfloat16)
    kept = jax.tree.leaves(jax.eval_shape(lambda p, x: jax.vjp(CASES[name][2], p, x)[1], p, x))
    assert sum(leaf.dtype == jnp.bfloat16 for leaf in kept) == 1
    large = sorted(leaf.size for leaf in kept if leaf.dtype == jnp.float32 and leaf.ndim > 1)
    assert large == [SHAPE[0] * SHAPE[1]] * statistics
