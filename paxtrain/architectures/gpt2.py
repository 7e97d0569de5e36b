"""GPT-2: learned positions, LayerNorm, GELU by tanh, and biases.

References:
    Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, TENSOR
from paxtrain.config.checks import require
from paxtrain.model.spec import Architecture, Demand, Parameter, Params, bias, kernel, norm, table, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext


class GPT2(Architecture):
    axes = CONTEXT, TENSOR
    model_types = ("gpt2",)

    def parameters(self, config: ModelConfig) -> tuple[Parameter, ...]:
        require(
            config.key_value_heads == config.heads,
            f"GPT-2 has keys and values for each head: model.kv_heads={config.kv_heads} with "
            f"model.heads={config.heads}; model.kv_heads=0 or model.family=llama would fit",
        )
        require(
            not config.rope_scaling,
            "GPT-2 has learned positions, which no model.rope_scaling changes; leave it out",
        )
        h = "transformer.h.{}."
        return (
            vocabulary(config, "transformer.wte.weight"),
            table("embedding/position", "positions embed", "transformer.wpe.weight"),
            norm("layers/ln1/scale", "layers embed", h + "ln_1.weight"),
            bias("layers/ln1/bias", "layers embed", h + "ln_1.bias"),
            kernel("layers/qkv/kernel", "layers embed 3 heads*head", h + "attn.c_attn.weight"),
            bias("layers/qkv/bias", "layers 3 heads*head", h + "attn.c_attn.bias"),
            kernel("layers/out/kernel", "layers heads*head embed", h + "attn.c_proj.weight", init="residual"),
            bias("layers/out/bias", "layers embed", h + "attn.c_proj.bias"),
            norm("layers/ln2/scale", "layers embed", h + "ln_2.weight"),
            bias("layers/ln2/bias", "layers embed", h + "ln_2.bias"),
            kernel("layers/up/kernel", "layers embed ffn", h + "mlp.c_fc.weight"),
            bias("layers/up/bias", "layers ffn", h + "mlp.c_fc.bias"),
            kernel("layers/down/kernel", "layers ffn embed", h + "mlp.c_proj.weight", init="residual"),
            bias("layers/down/bias", "layers embed", h + "mlp.c_proj.bias"),
            norm("final_norm/scale", "embed", "transformer.ln_f.weight"),
            bias("final_norm/bias", "embed", "transformer.ln_f.bias"),
        )

    def layer(self, p: Params, x: "jax.Array", c: "LayerContext") -> "jax.Array":
        h = nn.enter(nn.norm(p["ln1"], x, c.config.norm_epsilon), c.group)
        qkv = nn.columns(p["qkv"], h, "qkv")
        q, k, v = (nn.heads(qkv[:, :, i], c.config.head_dim) for i in range(3))
        x = nn.middle(x + nn.dropped(nn.rows(p["out"], nn.attend(q, k, v, c), c.group), c, 1))

        h = nn.enter(nn.norm(p["ln2"], x, c.config.norm_epsilon), c.group)
        h = nn.gelu(nn.columns(p["up"], h, "up"))
        return x + nn.dropped(nn.rows(p["down"], h, c.group), c, 2)

    def to_huggingface(self, config: ModelConfig) -> dict[str, object]:
        return {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": config.hidden,
            "n_inner": config.ffn,
            "n_layer": config.layers,
            "n_head": config.heads,
            "n_positions": config.sequence,
            "layer_norm_epsilon": config.norm_epsilon,
            "activation_function": "gelu_new",
            "embd_pdrop": config.embedding_dropout,
            "resid_pdrop": config.residual_dropout,
            "attn_pdrop": 0.0,
        }

    def from_huggingface(self, values: Mapping[str, Any]) -> tuple[dict[str, object], dict[str, Demand]]:
        known: dict[str, tuple[object, ...]] = {
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "add_cross_attention": (False,),
        }
        fields = {
            "layers": values["n_layer"],
            "hidden": values["n_embd"],
            "heads": values["n_head"],
            "kv_heads": 0,
            "intermediate": values.get("n_inner") or 4 * values["n_embd"],
            "sequence": values["n_positions"],
            "tied_head": values.get("tie_word_embeddings", True),
            "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
        }
        return fields, {name: (values.get(name, some[0]), some) for name, some in known.items()}
