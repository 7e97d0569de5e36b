"""An architecture with attention and feed-forward side by side, as in GPT-J (Wang and Komatsuzaki 2021)."""

import jax

import paxtrain.model as nn
from paxtrain.config import ModelConfig
from paxtrain.model.context import LayerContext
from paxtrain.model.spec import Architecture, Parameter, Params, kernel, norm, vocabulary


class ParallelBlock(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        return (
            vocabulary(config),
            norm("layers/ln/scale", "layers embed"),
            kernel("layers/q/kernel", "layers embed heads*head"),
            kernel("layers/kv/kernel", "layers embed 2 kv_heads*head"),
            kernel("layers/up/kernel", "layers embed ffn"),
            kernel("layers/out/kernel", "layers heads*head embed", init="residual"),
            kernel("layers/down/kernel", "layers ffn embed", init="residual"),
            norm("final_norm/scale", "embed"),
        )

    def layer(self, p: Params, x: jax.Array, c: LayerContext) -> jax.Array:
        h = nn.enter(nn.norm(p["ln"], x, c.config.norm_epsilon), c.group)
        q, kv = nn.columns(p["q"], h, "qkv"), nn.columns(p["kv"], h, "qkv")
        q, k, v = (nn.heads(y, c.config.head_dim) for y in (q, kv[:, :, 0], kv[:, :, 1]))
        q, k = nn.rotate(q, c.config.rope_theta, c), nn.rotate(k, c.config.rope_theta, c)
        wide = nn.gelu(nn.columns(p["up"], h, "up"))
        y = nn.attend(q, k, v, c) @ p["out"]["kernel"] + wide @ p["down"]["kernel"]
        return x + nn.dropped(nn.leave(y, c.group), c, 1)
