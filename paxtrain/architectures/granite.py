"""Granite: Llama with factors of embedding, residual branches, attention and logits.

References:
    IBM 2024, "Granite 3.0 Language Models"; Yang et al. 2022, Tensor Programs V (the factors).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.architectures import llama
from paxtrain.config import ModelConfig
from paxtrain.model import decoder
from paxtrain.model.spec import Demand, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class Granite(llama.Llama):
    model_types = ("granite",)
    options = MappingProxyType(
        {
            "embedding_multiplier": 1.0,
            "residual_multiplier": 1.0,
            "attention_multiplier": 1.0,  # of the scores, in place of 1 / sqrt(D)
            "logits_scaling": 1.0,  # divides the logits
        }
    )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        residual, scale = (self.option(c.config, f"{name}_multiplier") for name in ("residual", "attention"))
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        q, k, v = decoder.queries_keys_values(p, h, c)
        turns = nn.turns(c.config)
        y = nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c, scale=scale)
        x = nn.middle(x + residual * nn.dropped(nn.rows(p["out"], y, c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        return x + residual * nn.dropped(decoder.swiglu(p, h, c), c, 2)

    def embedding_scale(self, config: ModelConfig) -> float:
        return self.option(config, "embedding_multiplier")

    def head(self, p: Params, y: "jax.Array", c: "LayerContext") -> "jax.Array":
        return nn.norm(p, y, c.config.norm_epsilon) / self.option(c.config, "logits_scaling")

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        factors = {name: self.option(config, name) for name in self.options}
        return decoder.to_huggingface(config, "GraniteForCausalLM", **factors)

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        return decoder.from_huggingface(values, {name: float(values.get(name, 1.0)) for name in self.options})
