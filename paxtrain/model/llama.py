"""Llama: rotary positions, RMSNorm, SwiGLU, fewer heads of keys and values, no biases.

References:
    Touvron et al. 2023, "LLaMA" and "Llama 2"; Ainslie et al. 2023 (grouped-query heads); Shazeer 2020 (SwiGLU).
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.model import spec
from paxtrain.model.spec import Architecture, Demand, Parameter, Params, norm, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext

kernel = functools.partial(spec.kernel, transposed=True)


class Llama(Architecture):
    model_types = ("llama", "mistral")  # a Mistral without a sliding window is a Llama

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

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return {
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.key_value_heads,
            "head_dim": config.head_dim,
            "max_position_embeddings": config.sequence,
            "rms_norm_eps": config.norm_epsilon,
            "rope_theta": config.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
        }

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
        hidden, heads = values["hidden_size"], values["num_attention_heads"]
        fields = {
            "layers": values["num_hidden_layers"],
            "hidden": hidden,
            "heads": heads,
            "kv_heads": values.get("num_key_value_heads") or heads,
            "intermediate": values["intermediate_size"],
            "tied_head": values.get("tie_word_embeddings", False),
            "norm_epsilon": values.get("rms_norm_eps", 1e-6),
            "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
        }
        window = values.get("sliding_window", 4096) if values["model_type"] == "mistral" else None
        return fields, {
            "hidden_act": (values.get("hidden_act", "silu"), ("silu",)),
            "attention_bias": (values.get("attention_bias", False), (False,)),
            "mlp_bias": (values.get("mlp_bias", False), (False,)),
            "sliding_window": (window, (None,)),
            "rope_type": (rope.get("rope_type", rope.get("type", "default")), ("default",)),
            "head_dim": (values.get("head_dim") or hidden // heads, (hidden // heads,)),
        }
