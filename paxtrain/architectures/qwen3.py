"""Qwen 3: Llama with a head size of its own, and norms of each head's queries and keys.

References:
    Yang et al. 2025, "Qwen3 Technical Report".
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.architectures import llama
from paxtrain.config import ModelConfig
from paxtrain.model import decoder
from paxtrain.model.spec import Demand, Parameter, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class Qwen3(llama.Llama):
    model_types = ("qwen3",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        head_norms = (decoder.norm(f"{x}_norm", f"self_attn.{x}_norm", "head") for x in "qk")
        return (*super().parameters(config), *head_norms)

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        epsilon, turns = c.config.norm_epsilon, nn.turns(c.config)
        q, k, v = decoder.queries_keys_values(p, h, c)
        q = nn.rotate(nn.norm(p["q_norm"], q, epsilon), turns, c)
        k = nn.rotate(nn.norm(p["k_norm"], k, epsilon), turns, c)
        return nn.attend(q, k, v, c)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return decoder.to_huggingface(config, "Qwen3ForCausalLM", use_sliding_window=False)

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        fields, demands = decoder.from_huggingface(values, head_dim=128, num_key_value_heads=32)
        return fields, {**demands, "use_sliding_window": (values.get("use_sliding_window", False), (False,))}
