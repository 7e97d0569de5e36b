"""An architecture with biases and without positions: the gradient of the keys' bias is zero, up to rounding."""

import jax

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, bias, kernel, norm, vocabulary


class Biased(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            bias("layers/ln/bias", "layers embed"),
            *(kernel(f"layers/{name}/kernel", "layers embed heads*head") for name in "qkv"),
            *(bias(f"layers/{name}/bias", "layers heads*head") for name in "qkv"),
            kernel("layers/out/kernel", "layers heads*head embed", init="residual"),
            bias("layers/out/bias", "layers embed"),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        q, k, v = (nn.heads(nn.columns(p[name], h, "qkv"), c.config.head_dim) for name in "qkv")
        return x + nn.dropped(nn.rows(p["out"], nn.attend(q, k, v, c), c.group), c, 1)
