"""Gemma 2: GEGLU, norms before and behind both branches, bounded scores and logits, a window in every second layer.

Scales of norms are stored less 1.

References:
    Gemma Team 2024, "Gemma 2: Improving Open Language Models at a Practical Size".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, TENSOR
from paxtrain.model import decoder, rotary
from paxtrain.model.spec import Architecture, Demand, Parameter, Params

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext

LOCAL, GLOBAL = "sliding_attention", "full_attention"


def norm(p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
    """Return the RMSNorm of x over its last dim, with a scale that is stored less 1."""
    return nn.norm({"scale": 1 + p["scale"]}, x, c.config.norm_epsilon)


class Gemma2(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("gemma2",)
    options = MappingProxyType(
        {
            "query_pre_attn_scalar": 256,  # scores are divided by its root
            "attn_logit_softcapping": 50.0,  # 0: scores have no bound
            "final_logit_softcapping": 30.0,  # 0: logits have no bound
            "sliding_window": 4096,
        }
    )
    reach: tuple[str, ...] = ("sliding_window",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        rotary.check(config)
        names = (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
        )
        return (
            *decoder.ends(config, init="zeros"),
            *(decoder.norm(f"ln{i}", name, init="zeros") for i, name in enumerate(names, 1)),
            *decoder.attention(),
            *decoder.feed_forward(),
        )

    def local(self, config: ModelConfig) -> list[bool]:
        """Return whether each layer has the window: from the first one on every second."""
        return [i % 2 == 0 for i in range(config.layers)]

    def attended(self, p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
        """Return attention [B, S, N * D] of h [B, S, H]."""
        q, k, v = decoder.queries_keys_values(p, h, c)
        turns = nn.turns(c.config)
        return nn.attend(
            nn.rotate(q, turns, c),
            nn.rotate(k, turns, c),
            v,
            c,
            window=self.option(c.config, "sliding_window"),
            local=nn.among(c, self.local(c.config)),
            scale=self.option(c.config, "query_pre_attn_scalar") ** -0.5,
            cap=self.option(c.config, "attn_logit_softcapping"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        y = nn.rows(p["out"], self.attended(p, nn.enter(norm(p["ln1"], x, c), c.group), c), c.group)
        x = nn.middle(x + nn.dropped(norm(p["ln2"], y, c), c, 1))

        h = nn.enter(norm(p["ln3"], x, c), c.group)
        y = nn.rows(p["down"], nn.geglu(nn.columns(p["gate_up"], h, "up")), c.group)
        return x + nn.dropped(norm(p["ln4"], y, c), c, 2)

    def flash(self, config: ModelConfig) -> bool:
        return not self.option(config, "attn_logit_softcapping")

    def embedding_scale(self, config: ModelConfig) -> float:
        return config.hidden**0.5

    def head(self, p: Params, y: "jax.Array", c: "LayerContext") -> "jax.Array":
        return norm(p, y, c)

    def logit_cap(self, config: ModelConfig) -> float:
        return self.option(config, "final_logit_softcapping")

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return decoder.to_huggingface(config, "Gemma2ForCausalLM", **self.described(config))

    def described(self, config: ModelConfig) -> dict[str, object]:
        """Return what a config.json says of the options, of activations and of windows."""
        return {
            **{name: self.option(config, name) or None for name in self.options},
            "layer_types": [LOCAL if one else GLOBAL for one in self.local(config)],
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_activation": "gelu_pytorch_tanh",
        }

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        options = {name: type(usual)(values.get(name, usual) or 0) for name, usual in self.options.items()}
        fields, demands = decoder.from_huggingface(
            values, options, head_dim=256, num_key_value_heads=4, tie_word_embeddings=True
        )
        types = [LOCAL if i % 2 == 0 else GLOBAL for i in range(values["num_hidden_layers"])]
        activation = values.get("hidden_activation") or values.get("hidden_act", "gelu_pytorch_tanh")
        return fields, {
            **demands,
            "hidden_act": (activation, ("gelu_pytorch_tanh",)),
            "layer_types": (values.get("layer_types") or types, (types,)),
        }
