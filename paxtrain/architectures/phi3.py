"""Phi 3 and 4: Llama with one array of queries, keys and values in its files, a window, positions on a part of a head.

References:
    Abdin et al. 2024, "Phi-3 Technical Report" and "Phi-4 Technical Report".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, TENSOR
from paxtrain.model import decoder, rotary
from paxtrain.model.decoder import LAYER, kernel
from paxtrain.model.spec import Architecture, Demand, Parameter, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class Phi3(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("phi3",)
    options = MappingProxyType({"partial_rotary_factor": 1.0, "sliding_window": 0})  # 0: each token sees all before it
    reach = ("sliding_window",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        rotary.check(config, self.option(config, "partial_rotary_factor"))
        together = f"{LAYER}self_attn.qkv_proj.weight"
        return (
            *decoder.ends(config),
            decoder.norm("ln1", "input_layernorm"),
            kernel("layers/q/kernel", "layers embed heads*head", together),
            kernel("layers/k/kernel", "layers embed kv_heads*head", together),
            kernel("layers/v/kernel", "layers embed kv_heads*head", together),
            kernel("layers/out/kernel", "layers heads*head embed", f"{LAYER}self_attn.o_proj.weight", init="residual"),
            decoder.norm("ln2", "post_attention_layernorm"),
            kernel("layers/gate_up/kernel", "layers embed 2 ffn", f"{LAYER}mlp.gate_up_proj.weight"),
            kernel("layers/down/kernel", "layers ffn embed", f"{LAYER}mlp.down_proj.weight", init="residual"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        q, k, v = (nn.heads(nn.columns(p[name], h, "qkv"), c.config.head_dim) for name in "qkv")
        turns = nn.turns(c.config, share=self.option(c.config, "partial_rotary_factor"))
        window = self.option(c.config, "sliding_window")
        y = nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c, window=window)
        x = nn.middle(x + nn.dropped(nn.rows(p["out"], y, c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        return x + nn.dropped(decoder.swiglu(p, h, c), c, 2)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        share = self.option(config, "partial_rotary_factor")
        return decoder.to_huggingface(
            config,
            "Phi3ForCausalLM",
            **rotary.to_huggingface(config, partial_rotary_factor=share),
            sliding_window=self.option(config, "sliding_window") or None,
            embd_pdrop=config.embedding_dropout,
            resid_pdrop=config.residual_dropout,
        )

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        share = rotary.from_huggingface(values)[2]
        window = values.get("sliding_window") or 0
        fields, demands = decoder.from_huggingface(
            values, {"partial_rotary_factor": share, "sliding_window": window}, rms_norm_eps=1e-5
        )
        return fields, {**demands, "partial_rotary_factor": (share, (share,))}
