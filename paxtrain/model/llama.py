"""Llama: rotary positions, RMSNorm, SwiGLU, fewer heads of keys and values, no biases.

References:
    Touvron et al. 2023, "LLaMA" and "Llama 2"; Ainslie et al. 2023 (grouped-query heads); Shazeer 2020 (SwiGLU).
"""

import functools
from typing import TYPE_CHECKING

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.model import spec
from paxtrain.model.spec import Architecture, Parameter, Params, norm, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext

kernel = functools.partial(spec.kernel, transposed=True)


class Llama(Architecture):
    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        one = "model.layers.{}."
        keys_values = f"{one}self_attn.k_proj.weight {one}self_attn.v_proj.weight"
        gate_up = f"{one}mlp.gate_proj.weight {one}mlp.up_proj.weight"
        return (
            vocabulary(config, "model.embed_tokens.weight"),
            norm("layers/ln1/scale", "layers embed", one + "input_layernorm.weight"),
            kernel("layers/q/kernel", "layers embed heads*head", one + "self_attn.q_proj.weight"),
            kernel("layers/kv/kernel", "layers embed 2 kv_heads*head", keys_values),
            kernel("layers/out/kernel", "layers heads*head embed", one + "self_attn.o_proj.weight", init="residual"),
            norm("layers/ln2/scale", "layers embed", one + "post_attention_layernorm.weight"),
            kernel("layers/gate_up/kernel", "layers embed 2 ffn", gate_up),
            kernel("layers/down/kernel", "layers ffn embed", one + "mlp.down_proj.weight", init="residual"),
            norm("final_norm/scale", "embed", "model.norm.weight"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        q, kv = nn.columns(p["q"], h, "qkv"), nn.columns(p["kv"], h, "qkv")
        k, v = (nn.heads(kv[:, :, i], c.config.head_dim) for i in range(2))
        q, k = nn.rotate(nn.heads(q, c.config.head_dim), c.config.rope_theta), nn.rotate(k, c.config.rope_theta)
        x = nn.middle(x + nn.dropped(nn.rows(p["out"], nn.attend(q, k, v, c), c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        h = nn.swiglu(nn.columns(p["gate_up"], h, "up"))
        return x + nn.dropped(nn.rows(p["down"], h, c.group), c, 2)
