"""An architecture without attention: a gated linear recurrence, minGRU (Feng et al. 2024), with a gated output."""

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, bias, kernel, norm, vocabulary


def after(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return one step, state -> keep * state + new, that does what two steps do one after the other."""
    return first[0] * then[0], first[1] * then[0] + then[1]


class Recurrence(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/gates/kernel", "layers embed 3 ffn"),
            bias("layers/gates/bias", "layers 3 ffn"),
            kernel("layers/out/kernel", "layers ffn embed", init="residual"),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        keep, new, gate = jnp.moveaxis(nn.columns(p["gates"], h, "up"), 2, 0)  # each [B, S, ffn / tensor]
        keep = jax.nn.sigmoid(keep.astype(jnp.float32))
        new = (1 - keep) * new
        if c.starts is not None:  # documents begin with an empty state
            begins = c.starts == jnp.arange(c.starts.shape[1])
            keep = jnp.where(begins[..., None], 0, keep)
        state = jax.lax.associative_scan(after, (keep, new), axis=1)[1].astype(x.dtype)
        return x + nn.dropped(nn.rows(p["out"], state * jax.nn.silu(gate), c.group), c, 1)
