"""Mistral: Llama whose tokens see a window, if they do, and with a head size of its own in some.

References:
    Jiang et al. 2023, "Mistral 7B".
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


class Mistral(llama.Llama):
    model_types = ("mistral",)
    options = MappingProxyType({"sliding_window": 0})  # tokens that each sees; 0: all before it
    reach = ("sliding_window",)

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        q, k, v = decoder.queries_keys_values(p, h, c)
        turns = nn.turns(c.config)
        window = self.option(c.config, "sliding_window")
        return nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c, window=window)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        window = self.option(config, "sliding_window") or None
        return decoder.to_huggingface(config, "MistralForCausalLM", sliding_window=window)

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        window = values.get("sliding_window", 4096)
        options = {"sliding_window": window} if window else None
        return decoder.from_huggingface(values, options, num_key_value_heads=8)
