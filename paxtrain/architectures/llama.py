"""Llama 1 to 3: rotary positions, RMSNorm, SwiGLU, fewer heads of keys and values, no biases.

References:
    Touvron et al. 2023, "LLaMA" and "Llama 2"; Grattafiori et al. 2024, "The Llama 3 Herd of Models".
    Ainslie et al. 2023 (grouped-query heads); Shazeer 2020 (SwiGLU).
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


class Llama(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("llama",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        rotary.check(config)
        return (
            *decoder.ends(config),
            decoder.norm("ln1", "input_layernorm"),
            *decoder.attention(),
            decoder.norm("ln2", "post_attention_layernorm"),
            *decoder.feed_forward(),
        )

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        """Return attention [B, S, N * D] of h [B, S, H]."""
        q, k, v = decoder.queries_keys_values(p, h, c)
        turns = nn.turns(c.config)
        return nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c)

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        x = nn.middle(x + nn.dropped(nn.rows(p["out"], self.attended(p, h, c), c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        return x + nn.dropped(decoder.swiglu(p, h, c), c, 2)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return decoder.to_huggingface(config, "LlamaForCausalLM")

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        return decoder.from_huggingface(values)
