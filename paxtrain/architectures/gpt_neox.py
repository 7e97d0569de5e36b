"""GPT-NeoX: attention and feed-forward side by side, rotary positions on a part of a head, LayerNorm, biases.

References:
    Black et al. 2022, "GPT-NeoX-20B"; Biderman et al. 2023, "Pythia".
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, TENSOR
from paxtrain.config.checks import require
from paxtrain.config.options import OptionValues
from paxtrain.model import rotary, spec
from paxtrain.model.spec import Architecture, Demand, Parameter, Params, bias, norm, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext

NAMES = "gpt_neox.layers.{}."


def linear(path: str, dims: str, name: str, init: spec.Init = "normal") -> tuple[Parameter, Parameter]:
    """Return the kernel and the bias of a layer's product."""
    made, _, split = f"{NAMES}{name}", *dims.split()
    return (
        spec.kernel(f"layers/{path}/kernel", f"layers {dims}", f"{made}.weight", init=init, transposed=True),
        bias(f"layers/{path}/bias", f"layers {split}", f"{made}.bias"),
    )


def layer_norm(path: str, lead: str, name: str) -> tuple[Parameter, Parameter]:
    dims = f"{lead} embed".strip()
    return norm(f"{path}/scale", dims, f"{name}.weight"), bias(f"{path}/bias", dims, f"{name}.bias")


class GPTNeoX(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("gpt_neox",)
    options = MappingProxyType({"rotary_pct": 0.25, "use_parallel_residual": True})

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        rotary.check(config, self.option(config, "rotary_pct"))
        require(
            config.key_value_heads == config.heads,
            f"GPT-NeoX has keys and values for each head: model.kv_heads={config.kv_heads} with "
            f"model.heads={config.heads}; model.kv_heads=0 would fit",
        )
        return (
            vocabulary(config, "gpt_neox.embed_in.weight", "embed_out.weight"),
            *layer_norm("layers/ln1", "layers", f"{NAMES}input_layernorm"),
            *layer_norm("layers/ln2", "layers", f"{NAMES}post_attention_layernorm"),
            *linear("qkv", "embed heads*3*head", "attention.query_key_value"),  # head by head
            *linear("out", "heads*head embed", "attention.dense", init="residual"),
            *linear("up", "embed ffn", "mlp.dense_h_to_4h"),
            *linear("down", "ffn embed", "mlp.dense_4h_to_h", init="residual"),
            *layer_norm("final_norm", "", "gpt_neox.final_layer_norm"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        dim, turns = c.config.head_dim, nn.turns(c.config, share=self.option(c.config, "rotary_pct"))
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        qkv = nn.heads(nn.columns(p["qkv"], h, "qkv"), 3 * dim)
        q, k, v = (qkv[..., i * dim : (i + 1) * dim] for i in range(3))
        attended = nn.rows(p["out"], nn.attend(nn.rotate(q, turns, c), nn.rotate(k, turns, c), v, c), c.group)
        after = x + nn.dropped(attended, c, 1)
        if not self.option(c.config, "use_parallel_residual"):
            x = after = nn.middle(after)

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        wide = nn.exact_gelu(nn.columns(p["up"], h, "up"))
        return after + nn.dropped(nn.rows(p["down"], wide, c.group), c, 2)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        share = self.option(config, "rotary_pct")
        return {
            "architectures": ["GPTNeoXForCausalLM"],
            "hidden_size": config.hidden,
            "intermediate_size": config.ffn,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "max_position_embeddings": config.sequence,
            "layer_norm_eps": config.norm_epsilon,
            "rotary_pct": share,
            "rotary_emb_base": config.rope_theta,
            **rotary.to_huggingface(config, partial_rotary_factor=share),
            "use_parallel_residual": self.option(config, "use_parallel_residual"),
            "hidden_act": "gelu",
            "attention_bias": True,
        }

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        share = values.get("rotary_pct", 0.25)
        base = values.get("rotary_emb_base", 10_000.0)
        theta, scaling, share = rotary.from_huggingface({"partial_rotary_factor": share, **values}, base)
        fields = {
            "layers": values["num_hidden_layers"],
            "hidden": values["hidden_size"],
            "heads": values["num_attention_heads"],
            "kv_heads": 0,
            "intermediate": values["intermediate_size"],
            "tied_head": values.get("tie_word_embeddings", False),
            "norm_epsilon": values.get("layer_norm_eps", 1e-5),
            "rope_theta": theta,
            "rope_scaling": scaling,
            "options": OptionValues(
                {"rotary_pct": share, "use_parallel_residual": values.get("use_parallel_residual", True)}
            ),
        }
        return fields, {
            "hidden_act": (values.get("hidden_act", "gelu"), ("gelu",)),
            "attention_bias": (values.get("attention_bias", True), (True,)),
        }
