"""GPT-2: learned positions, LayerNorm, GELU by tanh, and biases.

References:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from typing import TYPE_CHECKING

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.model.spec import Architecture, Parameter, Params, bias, kernel, norm, table, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class GPT2(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        h = "transformer.h.{}."
        return (
            vocabulary(config, "transformer.wte.weight"),
            table("embedding/position", "positions embed", "transformer.wpe.weight"),
            norm("layers/ln1/scale", "layers embed", h + "ln_1.weight"),
            bias("layers/ln1/bias", "layers embed", h + "ln_1.bias"),
            kernel("layers/qkv/kernel", "layers embed 3 heads*head", h + "attn.c_attn.weight"),
            bias("layers/qkv/bias", "layers 3 heads*head", h + "attn.c_attn.bias"),
            kernel("layers/out/kernel", "layers heads*head embed", h + "attn.c_proj.weight", init="residual"),
            bias("layers/out/bias", "layers embed", h + "attn.c_proj.bias"),
            norm("layers/ln2/scale", "layers embed", h + "ln_2.weight"),
            bias("layers/ln2/bias", "layers embed", h + "ln_2.bias"),
            kernel("layers/up/kernel", "layers embed ffn", h + "mlp.c_fc.weight"),
            bias("layers/up/bias", "layers ffn", h + "mlp.c_fc.bias"),
            kernel("layers/down/kernel", "layers ffn embed", h + "mlp.c_proj.weight", init="residual"),
            bias("layers/down/bias", "layers embed", h + "mlp.c_proj.bias"),
            norm("final_norm/scale", "embed", "transformer.ln_f.weight"),
            bias("final_norm/bias", "embed", "transformer.ln_f.bias"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        qkv = nn.columns(p["qkv"], h, "qkv")
        q, k, v = (nn.heads(qkv[:, :, i], c.config.head_dim) for i in range(3))
        x = nn.middle(x + nn.dropped(nn.rows(p["out"], nn.attend(q, k, v, c), c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        h = nn.gelu(nn.columns(p["up"], h, "up"))
        return x + nn.dropped(nn.rows(p["down"], h, c.group), c, 2)
