"""Attention: heads, rotary positions, attention within documents, and the choice of its implementation.

References:
    Su et al. 2021, RoFormer (rotary positions).
"""

import os
import re
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from paxtrain.config import ModelConfig
from paxtrain.config.model import FLASH_CAPABILITY
from paxtrain.errors import UserError
from paxtrain.model.context import LayerContext

_DETERMINISTIC = re.compile(r"--(xla_gpu_deterministic_ops|xla_gpu_exclude_nondeterministic_ops)(?:=(\w*))?(?!\S)")


def heads(x: jax.Array, size: int) -> jax.Array:
    """Return x [B, S, N * D] as heads [B, S, N, D] of a size D."""
    return x.reshape(*x.shape[:2], -1, size)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """Apply rotary positions to x [B, S, N, D]: dims i and i + D/2 of position s turn by s / theta^(2i/D).

    Positions count from the row's beginning, even if documents begin within it: attention depends on the difference
    of two positions, which is the same from any beginning (Su et al. 2021).
    """
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[:, None], jnp.sin(angles)[:, None]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def attend(q: jax.Array, k: jax.Array, v: jax.Array, c: LayerContext) -> jax.Array:
    """Return causal attention within documents, [B, S, N * D], for q [B, S, N, D]; k and v may have fewer heads."""
    # The plain model leaves "auto" as it is, which means XLA's attention here.
    implementation: Literal["xla", "cudnn"] = "cudnn" if c.config.attention == "cudnn" else "xla"
    mask = None if c.starts is None else c.starts[:, None, :, None] == c.starts[:, None, None, :]
    context = jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation=implementation)
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
    if config.attention == "cudnn" and capability < FLASH_CAPABILITY:
        raise UserError(
            f"model.attention=cudnn needs NVIDIA GPUs from Ampere on, got {device.device_kind}; auto or xla would work"
        )
    if not _deterministic():
        return config.with_attention(capability)
    if config.attention == "cudnn" and device.platform == "gpu":
        raise UserError(
            "model.attention=cudnn fails with the deterministic ops that XLA_FLAGS ask for; auto or xla would work"
        )
    return config.with_attention((0, 0))
