"""Norms and activations with backwards of their own, which keep little: the input, and of a norm its statistics.

Autodiff would keep several float32 arrays of the input's size. From the input XLA makes all of these again within the
kernels that need them. Everything is computed in float32 and rounded once.

References:
    Ba et al. 2016, Layer Normalization; Zhang and Sennrich 2019, RMSNorm.
    Hendrycks and Gimpel 2016, GELU; Shazeer 2020, SwiGLU and GEGLU.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from paxtrain.model.tensor_parallel import Group, total

NormParams = dict[str, jax.Array]

_SLOPE, _CUBIC = math.sqrt(2 / math.pi), 0.044715  # of GELU's approximation by tanh


def _statistics(wide: jax.Array, epsilon: float, centers: bool) -> tuple[jax.Array, jax.Array]:
    """Return the mean, zero if the norm does not center, and the reciprocal deviation of the last dim [..., 1]."""
    mean = wide.mean(axis=-1, keepdims=True) if centers else jnp.zeros((*wide.shape[:-1], 1), jnp.float32)
    return mean, lax.rsqrt(jnp.square(wide - mean).mean(axis=-1, keepdims=True) + epsilon)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def norm(p: NormParams, x: jax.Array, epsilon: float) -> jax.Array:
    """Normalize x over the last dim in float32, and return it in its dtype.

    Args:
        p: scale [H] and bias [H] of a LayerNorm, or the scale alone of an RMSNorm.
        x: [..., H].
        epsilon: added to the variance or mean square.
    """
    return _norm_forward(p, x, epsilon)[0]


def _norm_forward(p: NormParams, x: jax.Array, epsilon: float) -> tuple[jax.Array, tuple]:
    wide = x.astype(jnp.float32)
    mean, rate = _statistics(wide, epsilon, "bias" in p)
    y = (wide - mean) * rate * p["scale"]
    y = y + p["bias"] if "bias" in p else y
    return y.astype(x.dtype), (p, x, mean if "bias" in p else None, rate)


def _norm_weights(x: jax.Array, mean: jax.Array | None, rate: jax.Array, g: jax.Array) -> NormParams:
    """Return the gradients of scale and bias, in passes of their own: a shared float32 array would be written."""
    wide, g, over = x.astype(jnp.float32), g.astype(jnp.float32), tuple(range(x.ndim - 1))
    normal = (wide if mean is None else wide - mean) * rate
    scale = {"scale": (g * normal).sum(axis=over)}
    return scale if mean is None else {**scale, "bias": g.sum(axis=over)}


def _norm_backward(epsilon: float, kept: tuple, g: jax.Array) -> tuple[NormParams, jax.Array]:
    p, x, mean, rate = kept
    weights = _norm_weights(*lax.optimization_barrier((x, mean, rate, g)))
    wide, g = x.astype(jnp.float32), g.astype(jnp.float32)
    normal = (wide if mean is None else wide - mean) * rate
    scaled = g * p["scale"]
    inner = scaled - normal * (scaled * normal).mean(axis=-1, keepdims=True)
    if mean is not None:
        inner = inner - scaled.mean(axis=-1, keepdims=True)
    return weights, (inner * rate).astype(x.dtype)


norm.defvjp(_norm_forward, _norm_backward)


def split_norm(p: NormParams, x: jax.Array, epsilon: float, group: Group) -> jax.Array:
    """Return the RMSNorm of x [B, S, F/T] over a dim that tensor splits.

    Args:
        p: scale [F/T].
        x: [B, S, F/T].
        epsilon: added to the mean square.
        group: the split of the layer.
    """
    wide = x.astype(jnp.float32)
    size = x.shape[-1] * (lax.axis_size(group.axis) if group.axis else 1)
    squares = total(jnp.square(wide).sum(axis=-1, keepdims=True), group.axis)
    return (wide * lax.rsqrt(squares / size + epsilon) * p["scale"]).astype(x.dtype)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """Return GELU of x, in its approximation by tanh."""
    wide = x.astype(jnp.float32)
    return (0.5 * wide * (1 + jnp.tanh(_SLOPE * (wide + _CUBIC * wide**3)))).astype(x.dtype)


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    x, g = lax.optimization_barrier((x, g))  # else XLA keeps the hyperbolic tangents of the forward, in float32
    wide = x.astype(jnp.float32)
    tanh = jnp.tanh(_SLOPE * (wide + _CUBIC * wide**3))
    slope = 1 + wide * (1 - tanh) * _SLOPE * (1 + 3 * _CUBIC * jnp.square(wide))
    return ((g.astype(jnp.float32) * 0.5 * (1 + tanh) * slope).astype(x.dtype),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


@jax.custom_vjp
def exact_gelu(x: jax.Array) -> jax.Array:
    """Return GELU of x, by the error function."""
    return jax.nn.gelu(x.astype(jnp.float32), approximate=False).astype(x.dtype)


def _exact_gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    x, g = lax.optimization_barrier((x, g))
    wide = x.astype(jnp.float32)
    density = jnp.exp(-0.5 * jnp.square(wide)) / math.sqrt(2 * math.pi)
    slope = 0.5 * (1 + lax.erf(wide / math.sqrt(2))) + wide * density
    return ((g.astype(jnp.float32) * slope).astype(x.dtype),)


exact_gelu.defvjp(lambda x: (exact_gelu(x), x), _exact_gelu_backward)


def _gelu(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return GELU of x by tanh, and its slope."""
    tanh = jnp.tanh(_SLOPE * (x + _CUBIC * x**3))
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * _SLOPE * (1 + 3 * _CUBIC * x * x)


@jax.custom_vjp
def swiglu(gate_up: jax.Array) -> jax.Array:
    """Return silu(gate) * up [B, S, F] of both [B, S, 2, F]."""
    gate, up = gate_up[:, :, 0].astype(jnp.float32), gate_up[:, :, 1].astype(jnp.float32)
    return (gate * jax.nn.sigmoid(gate) * up).astype(gate_up.dtype)


def _swiglu_backward(gate_up: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    gate_up, g = lax.optimization_barrier((gate_up, g))
    gate, up = gate_up[:, :, 0].astype(jnp.float32), gate_up[:, :, 1].astype(jnp.float32)
    g, share = g.astype(jnp.float32), jax.nn.sigmoid(gate)
    both = g * up * share * (1 + gate * (1 - share)), g * gate * share
    return (jnp.stack(both, axis=2).astype(gate_up.dtype),)


swiglu.defvjp(lambda gate_up: (swiglu(gate_up), gate_up), _swiglu_backward)


@jax.custom_vjp
def geglu(gate_up: jax.Array) -> jax.Array:
    """Return gelu(gate) * up [B, S, F] of both [B, S, 2, F], with GELU's approximation by tanh."""
    gate, up = gate_up[:, :, 0].astype(jnp.float32), gate_up[:, :, 1].astype(jnp.float32)
    return (_gelu(gate)[0] * up).astype(gate_up.dtype)


def _geglu_backward(gate_up: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    gate_up, g = lax.optimization_barrier((gate_up, g))
    gate, up = gate_up[:, :, 0].astype(jnp.float32), gate_up[:, :, 1].astype(jnp.float32)
    g, (value, slope) = g.astype(jnp.float32), _gelu(gate)
    return (jnp.stack((g * up * slope, g * value), axis=2).astype(gate_up.dtype),)


geglu.defvjp(lambda gate_up: (geglu(gate_up), gate_up), _geglu_backward)
