"""Qwen 2 and 2.5: Llama with biases of queries, keys and values.

References:
    Yang et al. 2024, "Qwen2 Technical Report".
"""

from collections.abc import Mapping
from typing import Any

from paxtrain.architectures import llama
from paxtrain.config import ModelConfig
from paxtrain.model import decoder
from paxtrain.model.spec import Demand, Parameter, bias


class Qwen2(llama.Llama):
    model_types = ("qwen2",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        q, k, v = (f"{decoder.LAYER}self_attn.{name}_proj.bias" for name in "qkv")
        return (
            *super().parameters(config),
            bias("layers/q/bias", "layers heads*head", q),
            bias("layers/kv/bias", "layers 2 kv_heads*head", f"{k} {v}"),
        )

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return decoder.to_huggingface(config, "Qwen2ForCausalLM", use_sliding_window=False)

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        fields, demands = decoder.from_huggingface(values, num_key_value_heads=32)
        return fields, {**demands, "use_sliding_window": (values.get("use_sliding_window", False), (False,))}
