"""Conversion between the canonical parameters and the names and shapes of Hugging Face's transformers.

GPT-2's kernels are [in, out] in both. Llama's are [out, in] in transformers, which also has two arrays for each stacked
one of ours (keys and values, gate and up). Only our vocabulary is padded. Both pair rotary dims i and i + D/2.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from paxtrain.config import ModelConfig, read_section
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.model.transformer import Params

LayerPath = tuple[str, str]

# Names of one layer's arrays by path; several names are stacked along dim 1 here.
_LAYER: dict[str, dict[LayerPath, tuple[str, ...]]] = {
    "gpt2": {
        ("ln1", "scale"): ("ln_1.weight",),
        ("ln1", "bias"): ("ln_1.bias",),
        ("qkv", "kernel"): ("attn.c_attn.weight",),
        ("qkv", "bias"): ("attn.c_attn.bias",),
        ("out", "kernel"): ("attn.c_proj.weight",),
        ("out", "bias"): ("attn.c_proj.bias",),
        ("ln2", "scale"): ("ln_2.weight",),
        ("ln2", "bias"): ("ln_2.bias",),
        ("up", "kernel"): ("mlp.c_fc.weight",),
        ("up", "bias"): ("mlp.c_fc.bias",),
        ("down", "kernel"): ("mlp.c_proj.weight",),
        ("down", "bias"): ("mlp.c_proj.bias",),
    },
    "llama": {
        ("ln1", "scale"): ("input_layernorm.weight",),
        ("q", "kernel"): ("self_attn.q_proj.weight",),
        ("kv", "kernel"): ("self_attn.k_proj.weight", "self_attn.v_proj.weight"),
        ("out", "kernel"): ("self_attn.o_proj.weight",),
        ("ln2", "scale"): ("post_attention_layernorm.weight",),
        ("gate_up", "kernel"): ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
        ("down", "kernel"): ("mlp.down_proj.weight",),
    },
}
# Prefix of a layer's names, with its number; and the other arrays except the vocabulary's tables.
_PREFIX = {"gpt2": "transformer.h.{}.", "llama": "model.layers.{}."}
_REST: dict[str, dict[LayerPath, str]] = {
    "gpt2": {
        ("embedding", "position"): "transformer.wpe.weight",
        ("final_norm", "scale"): "transformer.ln_f.weight",
        ("final_norm", "bias"): "transformer.ln_f.bias",
    },
    "llama": {("final_norm", "scale"): "model.norm.weight"},
}
# Families by their model_type; a Mistral without a sliding window is a Llama.
_FAMILY = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama"}
_EMBEDDING = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}
_HEAD = "lm_head.weight"
_FLOATS = ("float64", "float32", "float16", "bfloat16")


# --- Arrays -----------------------------------------------------------------------------------------------------------


def weights(params: Params, config: ModelConfig) -> dict[str, np.ndarray]:
    """Return the arrays of transformers' state_dict by name.

    Args:
        params: canonical parameters in numpy.
        config: architecture.
    """
    family, vocab = config.family, config.vocab_size
    turned = family == "llama"
    token = params["embedding"]["token"]
    found = {_EMBEDDING[family]: (token if config.tied_head else token[0])[:vocab]}
    for (group, name), key in _REST[family].items():
        found[key] = params[group][name]
    for layer in range(config.layers):
        for (group, name), theirs in _LAYER[family].items():
            x = params["layers"][group][name][layer]
            parts = [x[:, i] for i in range(len(theirs))] if len(theirs) > 1 else [x]
            for key, part in zip(theirs, parts, strict=True):
                if name == "kernel":
                    part = part.reshape(part.shape[0], -1)
                    part = part.T if turned else part
                elif name == "bias":
                    part = part.reshape(-1)
                found[_PREFIX[family].format(layer) + key] = part
    if not config.tied_head:
        found[_HEAD] = token[1][:vocab]
    return {name: np.ascontiguousarray(x) for name, x in found.items()}


def params(read: Callable[[str], np.ndarray], config: ModelConfig, vocabulary: int = 0, positions: int = 0) -> Params:
    """Return canonical parameters in numpy, float32.

    Args:
        read: function that returns the array of a name, of any float dtype.
        config: architecture.
        vocabulary: number of tokens of the arrays; the tables' rows of further ones are the mean row. 0: all.
        positions: number of rows of the arrays' position table, of which the first ones are taken. 0: all.

    Raises:
        UserError: an array has another shape than the architecture's, is quantized, or has numbers that are not finite.
    """
    family, shapes = config.family, transformer.shapes(config)
    turned = family == "llama"
    found: Params = {group: {} for group in shapes}

    def checked(name: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array as float32, if it has the shape."""
        x = read(name)
        if x.dtype.name not in _FLOATS:
            raise UserError(f"array {name} is of {x.dtype.name}; {', '.join(_FLOATS)} can be imported")
        if x.shape != shape:
            raise UserError(f"array {name} is {list(x.shape)}; a {family} model of these sizes has {list(shape)}")
        x = x.astype(np.float32)
        if not np.isfinite(x).all():
            raise UserError(
                f"array {name} has numbers that are not finite or too large for float32; "
                "its file is damaged, or was saved from a run that diverged"
            )
        return x

    def kept(name: str, key: str, shape: tuple[int, ...]) -> np.ndarray:
        """Return an array of a layer; files hold kernels as matrices and biases as vectors."""
        if name == "kernel":
            matrix = (shape[0], math.prod(shape[1:]))
            return (checked(key, matrix[::-1]).T if turned else checked(key, matrix)).reshape(shape)
        return checked(key, (math.prod(shape),)).reshape(shape)

    def table(name: str) -> np.ndarray:
        """Return an array with a row per token, padded with zeros."""
        x = checked(name, (vocabulary or config.vocab_size, config.hidden))
        x = np.concatenate([x, np.repeat(x.mean(0, keepdims=True), config.vocab_size - len(x), axis=0)])
        return np.pad(x, ((0, config.padded_vocab - config.vocab_size), (0, 0)))

    token = table(_EMBEDDING[family])
    found["embedding"]["token"] = token if config.tied_head else np.stack([token, table(_HEAD)])
    for (group, name), key in _REST[family].items():
        shape = shapes[group][name].shape
        if name == "position":  # of a shorter sequence the first positions are the same
            shape = (positions or shape[0], *shape[1:])
        found[group][name] = checked(key, shape)[: shapes[group][name].shape[0]]
    for (group, name), theirs in _LAYER[family].items():
        stacked = np.empty(shapes["layers"][group][name].shape, np.float32)
        for layer in range(config.layers):
            keys = [_PREFIX[family].format(layer) + key for key in theirs]
            shape = stacked.shape[1:] if len(keys) == 1 else (stacked.shape[1], *stacked.shape[3:])
            parts = [kept(name, key, shape) for key in keys]
            stacked[layer] = np.stack(parts, axis=1) if len(parts) > 1 else parts[0]
        found["layers"].setdefault(group, {})[name] = stacked
    return found


# --- Configuration ----------------------------------------------------------------------------------------------------


def to_config(config: ModelConfig, dtype: str) -> dict[str, object]:
    """Return the config.json of an architecture, without the ids of tokens that begin and end documents.

    Args:
        config: architecture.
        dtype: dtype of the saved arrays.
    """
    common = {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_head,
        "torch_dtype": dtype,
        "use_cache": True,
    }
    if config.family == "llama":
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
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
            **common,
        }
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
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
        **common,
    }


def _demand(values: Mapping[str, object], where: str, wanted: Mapping[str, tuple[object, ...]]) -> None:
    """Require that settings have implemented values; the first value of each is its default."""
    for name, known in wanted.items():
        if (value := values.get(name, known[0])) not in known:
            raise UserError(
                f"{where} says {name}={value!r}, which is not implemented; "
                f"{' or '.join(repr(x) for x in known)} would work"
            )


def from_config(values: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the fields of ModelConfig that a config.json determines.

    Args:
        values: content of the config.json.
        where: name of the file, for messages.

    Raises:
        UserError: the architecture is not implemented, or a size or the id of a token is missing or invalid.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in _FAMILY:
        raise UserError(f"{where} is of model_type {kind!r}; {', '.join(_FAMILY)} can be imported")
    if quantized := values.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise UserError(f"{where} is of a quantized model ({method}); import the one that it was made of")
    try:
        fields = (_from_llama if _FAMILY[kind] == "llama" else _from_gpt2)(values, where)
    except KeyError as error:
        raise UserError(f"{where} lacks {error.args[0]}; is it the config.json of a {kind} model?") from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError, OverflowError) as error:
        raise UserError(f"{where} has values that no {kind} model has: {error}") from error
    read_section(ModelConfig, fields, f"{where}: model")
    _check_special(values, where)
    return fields


def _check_special(values: Mapping[str, Any], where: str) -> None:
    """Require that the tokens which begin and end a document are ids; those beyond the vocabulary are no tokens."""
    for name in ("bos_token_id", "eos_token_id"):
        found = values.get(name)
        for number in found if isinstance(found, list) else [] if found is None else [found]:
            if type(number) is not int or number < 0:
                raise UserError(
                    f"{where} says {name}={number!r}; it must be an id of the vocabulary, or null if there is no such "
                    "token"
                )


def _from_gpt2(values: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the fields of ModelConfig that a GPT-2's config.json determines."""
    wanted = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }
    _demand(values, where, wanted)
    return {
        "family": "gpt2",
        "vocab_size": values["vocab_size"],
        "layers": values["n_layer"],
        "hidden": values["n_embd"],
        "heads": values["n_head"],
        "kv_heads": 0,
        "intermediate": values.get("n_inner") or 4 * values["n_embd"],
        "sequence": values["n_positions"],
        "tied_head": values.get("tie_word_embeddings", True),
        "norm_epsilon": values.get("layer_norm_epsilon", 1e-5),
    }


def _from_llama(values: Mapping[str, Any], where: str) -> dict[str, object]:
    """Return the fields of ModelConfig that a Llama's config.json determines."""
    _demand(values, where, {"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)})
    if values["model_type"] == "mistral":
        _demand({"sliding_window": values.get("sliding_window", 4096)}, where, {"sliding_window": (None,)})
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    _demand({"rope_type": rope.get("rope_type", rope.get("type", "default"))}, where, {"rope_type": ("default",)})
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    _demand({"head_dim": values.get("head_dim") or hidden // heads}, where, {"head_dim": (hidden // heads,)})
    return {
        "family": "llama",
        "vocab_size": values["vocab_size"],
        "layers": values["num_hidden_layers"],
        "hidden": hidden,
        "heads": heads,
        "kv_heads": values.get("num_key_value_heads") or heads,
        "intermediate": values["intermediate_size"],
        "tied_head": values.get("tie_word_embeddings", False),
        "norm_epsilon": values.get("rms_norm_eps", 1e-6),
        "rope_theta": rope.get("rope_theta", values.get("rope_theta", 10_000.0)),
    }
