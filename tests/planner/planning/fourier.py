"""Architectures that plans look into: one mixes by a Fourier transform, two cannot be trained, one starts wide."""

import jax
import jax.numpy as jnp

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, kernel, norm, vocabulary


class Fourier(Architecture):
    """Mixing by a Fourier transform, as in FNet (Lee-Thorp et al. 2021)."""

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/gates/kernel", "layers embed 2 ffn"),
            kernel("layers/out/kernel", "layers ffn embed", init="residual"),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        mixed = jnp.fft.fft(x.astype(jnp.float32), axis=1).real.astype(x.dtype)
        keep, new = jnp.moveaxis(nn.columns(p["gates"], nn.enter(mixed, c.group), "up"), 2, 0)
        return x + nn.rows(p["out"], keep * new, c.group)


class Broken(Fourier):
    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return x @ p["nowhere"]["kernel"]


class OneWay(Fourier):
    """Has a loop that has no backward."""

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        return jax.lax.while_loop(lambda y: y.sum() > 0, lambda y: y / 2, super().layer(p, x, c))


class FirstWide(Architecture):
    """A layer of six times as many products before those that are alike."""

    def kinds(self, config: ModelConfig) -> tuple[str, ...]:
        return ("wide", *("narrow",) * (config.layers - 1))

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/up/kernel", "layers embed ffn", kinds=("narrow",)),
            kernel("layers/down/kernel", "layers ffn embed", kinds=("narrow",)),
            kernel("layers/ups/kernel", "layers embed 6 ffn", kinds=("wide",)),
            kernel("layers/downs/kernel", "layers ffn embed", kinds=("wide",)),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        if c.kind == "wide":
            wide = nn.gelu(nn.columns(p["ups"], h, "up")).sum(axis=2)
            return x + nn.rows(p["downs"], wide, c.group)
        return x + nn.rows(p["down"], nn.gelu(nn.columns(p["up"], h, "up")), c.group)
