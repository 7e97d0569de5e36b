"""An architecture without attention: a gated linear recurrence."""

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, kernel, norm, vocabulary


def after(first: tuple[jax.Array, jax.Array], then: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Return one step, state -> keep * state + new, that does what two steps do one after the other."""
    return first[0] * then[0], first[1] * then[0] + then[1]


class Recurrence(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/gates/kernel", "layers embed 2 ffn"),
            kernel("layers/out/kernel", "layers ffn embed", init="residual"),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        keep, new = jnp.moveaxis(nn.columns(p["gates"], h, "up"), 2, 0)
        keep = jax.nn.sigmoid(keep.astype(jnp.float32))
        state = jax.lax.associative_scan(after, (keep, (1 - keep) * new), axis=1)[1]
        return x + nn.rows(p["out"], state.astype(x.dtype), c.group)


class Fourier(Recurrence):
    """Mixing by a Fourier transform, as in FNet (Lee-Thorp et al. 2021), in place of the recurrence."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        mixed = jnp.fft.fft(x.astype(jnp.float32), axis=1).real.astype(x.dtype)
        keep, new = jnp.moveaxis(nn.columns(p["gates"], nn.enter(mixed, c.group), "up"), 2, 0)
        return x + nn.rows(p["out"], keep * new, c.group)


class Broken(Recurrence):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return x @ p["nowhere"]["kernel"]
