"""Gemma 3, its language model: Gemma 2 with norms of queries and keys in place of bounds, five local layers of six.

Local layers have positions of their own.

References:
    Gemma Team 2025, "Gemma 3 Technical Report".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.architectures import gemma2
from paxtrain.architectures.gemma2 import GLOBAL, LOCAL, norm
from paxtrain.config import ModelConfig
from paxtrain.config.options import NO_OPTIONS
from paxtrain.model import decoder, rotary
from paxtrain.model.spec import Demand, Parameter, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class Gemma3(gemma2.Gemma2):
    model_types = ("gemma3_text",)
    options = MappingProxyType(
        {
            "query_pre_attn_scalar": 256,
            "final_logit_softcapping": 0.0,
            "sliding_window": 4096,
            "sliding_window_pattern": 6,  # the last of so many layers sees all
            "rope_local_base_freq": 10_000.0,
        }
    )
    reach = ("sliding_window", "rope_local_base_freq")

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        head_norms = (decoder.norm(f"{x}_norm", f"self_attn.{x}_norm", "head", init="zeros") for x in "qk")
        return (*super().parameters(config), *head_norms)

    def local(self, config: ModelConfig) -> list[bool]:
        pattern = self.option(config, "sliding_window_pattern")
        return [(i + 1) % pattern != 0 for i in range(config.layers)]

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        q, k, v = decoder.queries_keys_values(p, h, c)
        local = nn.among(c, self.local(c.config))
        near = nn.turns(c.config, self.option(c.config, "rope_local_base_freq"), scaling=NO_OPTIONS)
        turns = nn.either(local, near, nn.turns(c.config))
        return nn.attend(
            nn.rotate(norm(p["q_norm"], q, c), turns, c),
            nn.rotate(norm(p["k_norm"], k, c), turns, c),
            v,
            c,
            window=self.option(c.config, "sliding_window"),
            local=local,
            scale=self.option(c.config, "query_pre_attn_scalar") ** -0.5,
        )

    def flash(self, config: ModelConfig) -> bool:
        return True

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        base = self.option(config, "rope_local_base_freq")
        both = {
            LOCAL: {"rope_type": "default", "rope_theta": base},
            GLOBAL: rotary.to_huggingface(config)["rope_parameters"],
        }
        said = {**self.described(config), "rope_parameters": both}
        return decoder.to_huggingface(config, "Gemma3ForCausalLM", **said)

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        rope = values.get("rope_parameters") or {}
        layers, types = values["num_hidden_layers"], values.get("layer_types")
        pattern = values.get("sliding_window_pattern", values.get("_sliding_window_pattern", 6))
        if types:
            pattern = (types.index(GLOBAL) if GLOBAL in types else layers) + 1
        values = {"rope_theta": 1e6, **values, "sliding_window_pattern": pattern}
        if LOCAL in rope:  # transformers from version 5 on
            values |= {"rope_local_base_freq": rope[LOCAL]["rope_theta"], "rope_parameters": rope[GLOBAL]}
        fields, demands = super().from_huggingface(values)
        usual = [LOCAL if (i + 1) % pattern else GLOBAL for i in range(layers)]
        scores = values.get("attn_logit_softcapping")
        return fields, {
            **demands,
            "layer_types": (types or usual, (usual,)),
            "attn_logit_softcapping": (scores, (None,)),
        }
