"""Attention: heads, rotary positions, attention within documents, and the choice of its implementation.

References:
    Su et al. 2021, RoFormer (rotary positions); Gemma Team 2024, "Gemma 2" (caps, windows in every second layer).
"""

import functools
import os
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name

from paxtrain.config import ModelConfig
from paxtrain.config.model import FLASH
from paxtrain.errors import UserError
from paxtrain.model import parameters
from paxtrain.model.context import LayerContext
from paxtrain.model.rotary import Rotary

_DETERMINISTIC = re.compile(r"--(xla_gpu_deterministic_ops|xla_gpu_exclude_nondeterministic_ops)(?:=(\w*))?(?!\S)")


def heads(x: jax.Array, size: int) -> jax.Array:
    """Return x [B, S, N * D] as heads [B, S, N, D] of a size D."""
    return x.reshape(*x.shape[:2], -1, size)


def rotate(x: jax.Array, turns: float | Rotary) -> jax.Array:
    """Apply rotary positions to x [B, S, N, D]: dims i and i + R of position s turn by s times frequency i.

    Positions count from the row's beginning, even if documents begin within it: attention depends on the difference
    of two positions, which is the same from any beginning (Su et al. 2021).

    Args:
        x: [B, S, N, D].
        turns: the angles, or theta of frequencies theta^(-i/R) for all R = D/2 pairs.
    """
    turns = turns if isinstance(turns, Rotary) else Rotary(turns, x.shape[-1] // 2)
    half = turns.pairs
    frequencies = turns.theta ** (-jnp.arange(half) / half)
    frequencies = frequencies if _same(turns.change, 1.0) else frequencies * turns.change
    angles = jnp.arange(x.shape[1])[:, None] * frequencies
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    if turns.factor != 1:
        cos, sin = cos * turns.factor, sin * turns.factor
    wide = x.astype(jnp.float32)
    first, second, rest = jnp.split(wide, [half, 2 * half], axis=-1)
    parts = [first * cos - second * sin, second * cos + first * sin, *([rest] if rest.shape[-1] else [])]
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def among(c: LayerContext, layers: Sequence[bool]) -> jax.Array:
    """Return whether this layer is one of those that have True, a boolean [] that is traced."""
    return jnp.asarray(np.array(layers))[c.index]


def either(condition: jax.Array, first: Any, second: Any) -> Any:
    """Return the first of two trees of arrays or numbers where a condition holds, and the second elsewhere."""
    return jax.tree.map(lambda a, b: a if _same(a, b) else jnp.where(condition, a, b), first, second)


def _same(a: Any, b: Any) -> bool:
    """Return whether two values are equal numbers; arrays are not compared."""
    return isinstance(a, int | float) and isinstance(b, int | float) and a == b


def _seen(c: LayerContext, length: int, window: int, local: jax.Array | None) -> jax.Array | None:
    """Return which tokens see which, [B or 1, 1, S, S], by documents and the window; None: all see all before them."""
    mask = None if c.starts is None else c.starts[:, None, :, None] == c.starts[:, None, None, :]
    if window:
        index = jnp.arange(length)
        near = index[:, None] - index < (window if local is None else jnp.where(local, window, length))
        mask = near[None, None] if mask is None else mask & near
    return mask


def _capped(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array | None, scale: float, cap: float) -> jax.Array:
    """Return causal attention whose scores s are cap tanh(s / cap)."""
    groups = q.reshape(*k.shape[:3], -1, q.shape[-1])  # [B, S, K, N / K, D]
    scores = jnp.einsum("bskgd,btkd->bkgst", groups, k, preferred_element_type=jnp.float32) * scale
    scores = cap * jnp.tanh(scores / cap)
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    seen = seen if mask is None else (seen & mask)[:, :, None]
    shares = jax.nn.softmax(jnp.where(seen, scores, jnp.finfo(jnp.float32).min), axis=-1).astype(k.dtype)
    return jnp.einsum("bkgst,btkd->bskgd", shares, v).reshape(q.shape)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    c: LayerContext,
    *,
    window: int = 0,
    local: jax.Array | None = None,
    scale: float | None = None,
    cap: float = 0.0,
) -> jax.Array:
    """Return causal attention within documents, [B, S, N * D].

    Args:
        q: [B, S, N, D].
        k: [B, S, K, D] with K heads that divide N.
        v: [B, S, K, D].
        c: what else the layer depends on.
        window: number of tokens that each sees, itself among them; 0: all before it.
        local: whether the window is this layer's, a boolean []; None: it is.
        scale: factor of the scores; None: 1 / sqrt(D).
        cap: bound of the scores, which are then cap tanh(score / cap), by XLA's attention; 0: none.
    """
    length = q.shape[1]
    window = 0 if window >= length else window
    # The plain model leaves "auto" as it is, which means XLA's attention here.
    implementation: Literal["xla", "cudnn"] = "cudnn" if c.config.attention == "cudnn" else "xla"
    run = functools.partial(jax.nn.dot_product_attention, q, k, v, scale=scale, is_causal=True)
    if cap:
        context = _capped(q, k, v, _seen(c, length, window, local), scale or q.shape[-1] ** -0.5, cap)
    elif window and implementation == "cudnn" and c.starts is None:
        # Its kernel skips what is outside a window, which it takes as a constant.
        near = functools.partial(run, local_window_size=(window - 1, 0), implementation=implementation)
        far = functools.partial(run, implementation=implementation)
        context = near() if local is None else jax.lax.cond(local, near, far)
    else:
        context = run(mask=_seen(c, length, window, local), implementation=implementation)
    return checkpoint_name(context.reshape(*context.shape[:2], -1), "context")


def _deterministic() -> bool:
    """Return whether XLA_FLAGS ask for deterministic ops on GPUs."""
    given = _DETERMINISTIC.findall(os.environ.get("XLA_FLAGS", ""))
    return any(value.lower() in ("", "1", "true") for value in dict(given).values())


def settle_attention(config: ModelConfig, device: jax.Device) -> ModelConfig:
    """Return `config` with attention="auto" replaced: "cudnn" if the device runs flash attention, else "xla".

    With deterministic ops "auto" is "xla": there XLA loses the compiled graphs of cuDNN's attention, and the first step
    fails (seen with jax 0.11.2 on an H200; openxla/xla#46500 says why).

    Raises:
        UserError: "cudnn" is asked for, and the device or XLA_FLAGS do not allow it.
    """
    named = str(getattr(device, "compute_capability", "0.0")) if device.platform == "gpu" else "0.0"
    major, _, minor = named.partition(".")
    capability = int(major), int(minor or 0)
    if config.attention == "cudnn" and capability < config.flash_capability:
        since = "Ampere" if config.flash_capability == FLASH[128] else "Hopper"
        raise UserError(
            f"model.attention=cudnn needs NVIDIA GPUs from {since} on for heads of {config.head_dim}, got "
            f"{device.device_kind}; auto or xla would work"
        )
    if not parameters.architecture(config).flash(config):
        if config.attention == "cudnn":
            raise UserError(
                f"model.attention=cudnn has no bound of scores, which a {config.family} has; auto or xla would work"
            )
        capability = 0, 0
    if not _deterministic():
        return config.with_attention(capability)
    if config.attention == "cudnn" and device.platform == "gpu":
        raise UserError(
            "model.attention=cudnn fails with the deterministic ops that XLA_FLAGS ask for; auto or xla would work"
        )
    return config.with_attention((0, 0))
