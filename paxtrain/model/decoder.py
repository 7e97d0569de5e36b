"""Parts that decoders of Llama's kind share: rows of tables, parts of a layer, and of their config.json.

Each family puts them together in a file of paxtrain/architectures.
"""

import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import paxtrain.model as nn  # whose names import jax when they are first used
from paxtrain.config import ModelConfig
from paxtrain.config.options import OptionValues
from paxtrain.model import rotary, spec
from paxtrain.model.spec import Demand, Parameter, Params, vocabulary

if TYPE_CHECKING:
    import jax

    from paxtrain.model.context import LayerContext

LAYER = "model.layers.{}."  # begins the names of a layer's arrays in Hugging Face's files
kernel = functools.partial(spec.kernel, transposed=True)


def norm(module: str, name: str, dims: str = "embed", init: spec.Init = "ones") -> Parameter:
    """Return the scale of a norm in a layer.

    Args:
        module: its place in the layer.
        name: its name in Hugging Face's files.
        dims: its dims besides the layers.
        init: its first values.
    """
    return spec.norm(f"layers/{module}/scale", f"layers {dims}", f"{LAYER}{name}.weight", init=init)


def ends(config: ModelConfig, init: spec.Init = "ones") -> tuple[Parameter, ...]:
    """Return the vocabulary's tables and the final norm, whose first values are given."""
    last = spec.norm("final_norm/scale", "embed", "model.norm.weight", init=init)
    return vocabulary(config, "model.embed_tokens.weight"), last


def attention() -> tuple[Parameter, ...]:
    """Return the kernels of attention."""
    q, k, v, o = (f"{LAYER}self_attn.{name}_proj.weight" for name in "qkvo")
    return (
        kernel("layers/q/kernel", "layers embed heads*head", q),
        kernel("layers/kv/kernel", "layers embed 2 kv_heads*head", f"{k} {v}"),
        kernel("layers/out/kernel", "layers heads*head embed", o, init="residual"),
    )


def feed_forward() -> tuple[Parameter, ...]:
    """Return the kernels of a feed-forward part with a gate."""
    gate_up = f"{LAYER}mlp.gate_proj.weight {LAYER}mlp.up_proj.weight"
    return (
        kernel("layers/gate_up/kernel", "layers embed 2 ffn", gate_up),
        kernel("layers/down/kernel", "layers ffn embed", f"{LAYER}mlp.down_proj.weight", init="residual"),
    )


def queries_keys_values(p: Params, h: "jax.Array", c: "LayerContext") -> "tuple[jax.Array, jax.Array, jax.Array]":
    """Return the heads [B, S, N, D] of queries, and those of keys and of values."""
    q, kv = nn.columns(p["q"], h, "qkv"), nn.columns(p["kv"], h, "qkv")
    size = c.config.head_dim
    return nn.heads(q, size), nn.heads(kv[:, :, 0], size), nn.heads(kv[:, :, 1], size)


def swiglu(p: Params, h: "jax.Array", c: "LayerContext") -> "jax.Array":
    """Return the feed-forward part of h [B, S, H], which has been entered."""
    return nn.rows(p["down"], nn.swiglu(nn.columns(p["gate_up"], h, "up")), c.group)


def to_huggingface(config: ModelConfig, name: str, **others: object) -> dict[str, object]:
    """Return what the config.json of such a decoder says.

    Args:
        config: the model's shape.
        name: name of its class in transformers.
        others: further entries, or other values of these.
    """
    return {
        "architectures": [name],
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.key_value_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.sequence,
        "rms_norm_eps": config.norm_epsilon,
        **rotary.to_huggingface(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        **others,
    }


def from_huggingface(
    values: Mapping[str, Any], options: Mapping[str, object] | None = None, **usual: Any
) -> tuple[dict[str, object], dict[str, Demand]]:
    """Return the fields of ModelConfig that the config.json of such a decoder determines, and what it must say besides.

    Args:
        values: content of the config.json.
        options: the architecture's options.
        usual: values of what the config.json may leave out.
    """
    values = {**usual, **values}
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    theta, scaling, share = rotary.from_huggingface(values)
    size = values.get("head_dim") or hidden // heads
    fields = {
        "layers": values["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "head_size": 0 if size * heads == hidden else size,
        "intermediate": values["intermediate_size"],
        "tied_head": values.get("tie_word_embeddings", False),
        "norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "rope_scaling": scaling,
        **({"options": OptionValues(options)} if options else {}),
    }
    return fields, {
        "hidden_act": (values.get("hidden_act", "silu"), ("silu",)),
        "attention_bias": (values.get("attention_bias", False), (False,)),
        "mlp_bias": (values.get("mlp_bias", False), (False,)),
        "partial_rotary_factor": (share, (1.0,)),
    }
