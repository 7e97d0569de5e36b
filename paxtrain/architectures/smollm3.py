"""SmolLM 3: Llama in which every fourth layer has no positions.

References:
    Bakouch et al. 2025, "SmolLM3"; Yang et al. 2025, "Rope to Nope and Back Again".
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


class SmolLM3(llama.Llama):
    model_types = ("smollm3",)
    options = MappingProxyType({"no_rope_layer_interval": 4})  # the last of so many layers has no positions

    def _turning(self, config: ModelConfig) -> list[bool]:
        """Return whether each layer has positions."""
        interval = self.option(config, "no_rope_layer_interval")
        return [(i + 1) % interval != 0 for i in range(config.layers)]

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        q, k, v = decoder.queries_keys_values(p, h, c)
        turns = nn.turns(c.config)
        turns = nn.either(nn.among(c, self._turning(c.config)), turns, turns._replace(change=0.0))
        return nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        turning, interval = [int(one) for one in self._turning(config)], self.option(config, "no_rope_layer_interval")
        return decoder.to_huggingface(
            config,
            "SmolLM3ForCausalLM",
            no_rope_layers=turning,
            no_rope_layer_interval=interval,
            use_sliding_window=False,
        )

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        layers, turning = values["num_hidden_layers"], values.get("no_rope_layers")
        interval = values.get("no_rope_layer_interval") or 4
        if turning:
            interval = (turning.index(0) if 0 in turning else layers) + 1
        fields, demands = decoder.from_huggingface(
            values,
            {"no_rope_layer_interval": interval},
            num_key_value_heads=4,
            tie_word_embeddings=True,
            rope_theta=2_000_000.0,
        )
        usual = [int((i + 1) % interval != 0) for i in range(layers)]
        return fields, {
            **demands,
            "no_rope_layers": (turning or usual, (usual,)),
            "use_sliding_window": (values.get("use_sliding_window", False), (False,)),
        }
