"""Attention: heads, rotary positions, attention within documents and windows.

References:
    Su et al. 2021, RoFormer (rotary positions); Gemma Team 2024, "Gemma 2" (caps, windows in every second layer).
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from paxtrain.attention import split
from paxtrain.attention.blocks import Rule
from paxtrain.model import tensor_parallel as tp
from paxtrain.model.context import LayerContext
from paxtrain.model.rotary import Rotary


def heads(x: jax.Array, size: int) -> jax.Array:
    """Return x [B, S, N * D] as heads [B, S, N, D] of a size D."""
    return x.reshape(*x.shape[:2], -1, size)


def rotate(x: jax.Array, turns: float | Rotary, c: LayerContext) -> jax.Array:
    """Apply rotary positions to x [B, S, N, D]: dims i and i + R of position s turn by s times frequency i.

    Positions count from the row's beginning, even if documents begin within it: attention depends on the difference
    of two positions, which is the same from any beginning (Su et al. 2021).

    Args:
        x: [B, S, N, D].
        turns: the angles, or theta of frequencies theta^(-i/R) for all R = D/2 pairs.
        c: what else the layer depends on.
    """
    turns = turns if isinstance(turns, Rotary) else Rotary(turns, x.shape[-1] // 2)
    half = turns.pairs
    frequencies = turns.theta ** (-jnp.arange(half) / half)
    frequencies = frequencies if _same(turns.change, 1.0) else frequencies * turns.change
    context = c.group.context
    length = x.shape[1] * (lax.axis_size(context) if context else 1)
    angles = tp.own_tokens(jnp.arange(length), 0, c.group)[:, None] * frequencies
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
    """Return causal attention within documents, [B, S, N * D], to the tokens of all devices that share the sequence.

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
    context = c.group.context
    length = q.shape[1] * (lax.axis_size(context) if context else 1)
    window = 0 if window >= length else window
    if context and c.group.form != "heads":
        exchange = split.KeyExchange(context, c.group.form, c.group.codec)
        reach = None if not window else jnp.int32(window) if local is None else jnp.where(local, window, length)
        rule = Rule(scale or q.shape[-1] ** -0.5, cap, c.config.attention == "cudnn" and not cap)
        return _flat(split.attend(q, k, v, c.starts, reach, exchange, rule))
    if context:
        q, k, v = (split.to_heads(x, context) for x in (q, k, v))
    # The plain model leaves "auto" as it is, which means XLA's attention here.
    implementation: Literal["xla", "cudnn"] = "cudnn" if c.config.attention == "cudnn" else "xla"
    run = functools.partial(jax.nn.dot_product_attention, q, k, v, scale=scale, is_causal=True)
    if cap:
        y = _capped(q, k, v, _seen(c, length, window, local), scale or q.shape[-1] ** -0.5, cap)
    elif window and implementation == "cudnn" and c.starts is None:
        # Its kernel skips what is outside a window, which it takes as a constant.
        near = functools.partial(run, local_window_size=(window - 1, 0), implementation=implementation)
        far = functools.partial(run, implementation=implementation)
        y = near() if local is None else lax.cond(local, near, far)
    else:
        y = run(mask=_seen(c, length, window, local), implementation=implementation)
    return checkpoint_name(_flat(split.to_tokens(y, context) if context else y), "context")


def _flat(x: jax.Array) -> jax.Array:
    """Return heads [B, S, N, D] as [B, S, N * D]."""
    return x.reshape(*x.shape[:2], -1)
