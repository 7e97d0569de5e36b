"""OLMo 2: Llama whose norms stand behind attention and feed-forward, with norms of all queries and of all keys.

References:
    OLMo Team 2024, "2 OLMo 2 Furious".
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, TENSOR
from paxtrain.model import decoder, rotary
from paxtrain.model.spec import Architecture, Demand, Parameter, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class OLMo2(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("olmo2",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        rotary.check(config)
        return (
            *decoder.ends(config),
            *decoder.attention(),
            decoder.norm("q_norm", "self_attn.q_norm", "heads*head"),
            decoder.norm("k_norm", "self_attn.k_norm", "kv_heads*head"),
            decoder.norm("ln1", "post_attention_layernorm"),
            *decoder.feed_forward(),
            decoder.norm("ln2", "post_feedforward_layernorm"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        epsilon, size, turns = c.config.norm_epsilon, c.config.head_dim, nn.turns(c.config)
        h = nn.enter(x, c.group)
        q, kv = nn.columns(p["q"], h, "qkv"), nn.columns(p["kv"], h, "qkv")
        q = nn.heads(nn.split_norm(p["q_norm"], q, epsilon, c.group), size)
        k = nn.heads(nn.split_norm(p["k_norm"], kv[:, :, 0], epsilon, c.group), size)
        y = nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), nn.heads(kv[:, :, 1], size), c)
        x = nn.middle(x + nn.dropped(nn.norm(p["ln1"], nn.rows(p["out"], y, c.group), epsilon), c, 1))

        y = decoder.swiglu(p, nn.enter(x, c.group), c)
        return x + nn.dropped(nn.norm(p["ln2"], y, epsilon), c, 2)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return decoder.to_huggingface(config, "Olmo2ForCausalLM")

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        return decoder.from_huggingface(values, rms_norm_eps=1e-5)
