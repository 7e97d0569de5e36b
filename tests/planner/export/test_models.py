"""Trainers' own models on the CPU: loss and logits of our weights and tokens, by the settings of the exports.

`make exports` makes the environments and runs these tests. Without an environment its tests are skipped.
"""

import dataclasses
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config.options import OptionValues
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion
from paxtrain.model import transformer
from planner.export import megatron
from planner.export.exported import USUAL_LLAMA3
from tests.planner.export.trainers import FILES, TRAINERS, ask

pytestmark = pytest.mark.slow
SMALL = ModelConfig(vocab_size=256, layers=3, hidden=64, heads=4, sequence=32, dtype="float32")
SMALL_LLAMA = dataclasses.replace(SMALL, family="llama", kv_heads=2, intermediate=96, rope_theta=5e5, norm_epsilon=1e-3)
# Llama 3.1's positions; and such that small angles, those of 32 tokens, are among those that are scaled.
LLAMA3 = OptionValues({"rope_type": "llama3", "factor": 8.0, **USUAL_LLAMA3})
SHORT = OptionValues({**LLAMA3, "original_max_position_embeddings": 16})
STRETCHED = OptionValues({"rope_type": "linear", "factor": 4.0})
GEMMA = dataclasses.replace(
    SMALL_LLAMA,
    family="gemma2",
    norm_epsilon=1e-6,
    head_size=24,
    options=OptionValues(
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        }
    ),
)
SMALL_MODELS = {
    "gpt2": SMALL,
    "gpt2 with a head": dataclasses.replace(SMALL, tied_head=False),
    "llama": SMALL_LLAMA,
    "llama with a head": dataclasses.replace(SMALL_LLAMA, tied_head=False),
    "llama with documents": dataclasses.replace(SMALL_LLAMA, tied_head=False, separator=0),
    "llama 3": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=LLAMA3),
    "llama with long positions": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=SHORT),
    "llama with stretched positions": dataclasses.replace(SMALL_LLAMA, tied_head=False, rope_scaling=STRETCHED),
    "mistral": dataclasses.replace(SMALL_LLAMA, family="mistral", tied_head=False),
    "mistral with a window": dataclasses.replace(
        SMALL_LLAMA, family="mistral", options=OptionValues({"sliding_window": 6})
    ),
    "phi3": dataclasses.replace(
        SMALL_LLAMA, family="phi3", options=OptionValues({"partial_rotary_factor": 0.5, "sliding_window": 9})
    ),
    "qwen2": dataclasses.replace(SMALL_LLAMA, family="qwen2", tied_head=False),
    "qwen3": dataclasses.replace(SMALL_LLAMA, family="qwen3", head_size=24),
    "smollm3": dataclasses.replace(
        SMALL_LLAMA, family="smollm3", layers=4, options=OptionValues({"no_rope_layer_interval": 2})
    ),
    "qwen3 with a head": dataclasses.replace(SMALL_LLAMA, family="qwen3", tied_head=False),
    "phi3 without a window": dataclasses.replace(SMALL_LLAMA, family="phi3", tied_head=False),
    "olmo2": dataclasses.replace(SMALL_LLAMA, family="olmo2", tied_head=False, layers=5),
    "gemma2": dataclasses.replace(GEMMA, family="gemma2", layers=4),
    "gemma2 with stretched positions": dataclasses.replace(
        GEMMA,
        family="gemma2",
        layers=2,
        rope_scaling=STRETCHED,
        options=OptionValues({**GEMMA.options, "sliding_window": 0, "attn_logit_softcapping": 0.0}),
    ),
    "gemma3": dataclasses.replace(
        GEMMA,
        family="gemma3",
        layers=7,
        rope_scaling=STRETCHED,
        options=OptionValues({"sliding_window": 6, "query_pre_attn_scalar": 24}),
    ),
    "gemma3 with a head": dataclasses.replace(
        GEMMA,
        family="gemma3",
        layers=6,
        tied_head=False,
        options=OptionValues({"sliding_window": 5, "query_pre_attn_scalar": 16, "rope_local_base_freq": 100.0}),
        separator=0,
    ),
    "gpt2 with documents": dataclasses.replace(SMALL, tied_head=False, separator=0),
}
ALONE = Plan(MeshConfig(), PipelineConfig("1f1b", save="residuals"), BatchConfig(2, 2), CompressConfig(), ("a",), 1)


def weights_and_tokens(model: ModelConfig):
    """Return random weights, none of them zero or one, and tokens [2, S + 1]; a few of them begin documents."""
    random = np.random.default_rng(1)
    drawn = transformer.init(model, jax.random.key(0))
    params = jax.tree.map(lambda w: w + 0.1 * random.standard_normal(w.shape, np.float32), drawn)
    tokens = random.integers(1, model.vocab_size, (2, model.sequence + 1))
    tokens[:, [0, 9, 20]] = 0
    return params, tokens


def arrays_of(model: ModelConfig, path: pathlib.Path) -> pathlib.Path:
    """Write a model's tokens, their positions in their documents, and its weights by transformers' names."""
    params, tokens = weights_and_tokens(model)
    index = np.broadcast_to(np.arange(model.sequence), (2, model.sequence))
    starts = np.maximum.accumulate(np.where(tokens[:, :-1] == model.separator, index, 0), axis=1)
    np.savez(path, tokens=tokens, positions=index - starts, **conversion.weights(jax.device_get(params), model))
    return path


def difference(found: dict, model: ModelConfig, params, tokens) -> float:
    """Return the largest difference of a trainer's loss and logits from ours."""
    assert "refused" not in found, found
    loss, logits = transformer.loss(params, tokens, model), transformer.logits(params, tokens[:, :-1], model)
    assert 1 < np.abs(logits).max() < 100
    return max(abs(found["loss"] - float(loss)), np.abs(np.array(found["logits"]) - logits).max())


WRONG = {
    "megatron": [
        ("gpt2", "--norm-epsilon 1e-05", "--norm-epsilon 0.1"),
        ("llama", "--rotary-base 500000", "--rotary-base 10000"),
        ("llama 3", "--use-rope-scaling\n", ""),
        ("llama with stretched positions", "interpolation-factor 4", "interpolation-factor 2"),
        ("mistral with a window", "--window-size 5,0", "--window-size 6,0"),
        ("phi3", "--rotary-percent 0.5", "--rotary-percent 1.0"),
        ("smollm3", "--no-rope-freq 2", "--no-rope-freq 4"),
        ("qwen3", "--norm-epsilon 0.001", "--norm-epsilon 0.1"),
        ("qwen2", "--add-qkv-bias\n", ""),
    ],
    "maxtext": [
        ("gpt2", "normalize_embedding_logits=false", "normalize_embedding_logits=true"),
        ("llama", "normalize_embedding_logits=false", "normalize_embedding_logits=true"),
        ("llama with a head", "rope_max_timescale=500000", "rope_max_timescale=10000"),
        ("llama with a head", "epsilon=0.001", "epsilon=1e-05"),
        ("gpt2 with a head", "dtype=float32", "dtype=bfloat16"),
        ("gpt2 with a head", '["gelu"]', '["relu"]'),
        ("llama 3", "rope_type=llama3.1", "rope_type=default"),
        ("llama with stretched positions", "factor=4.0", "factor=1.0"),
        ("qwen3 with a head", "epsilon=0.001", "epsilon=0.1"),
        ("qwen2", "attention_bias=true", "attention_bias=false"),
        ("olmo2", "sliding_window_size=32", "sliding_window_size=8"),
        ("gemma2", "attn_logits_soft_cap=2.0", "attn_logits_soft_cap=4.0"),
        ("gemma2", "final_logits_soft_cap=3.0", "final_logits_soft_cap=6.0"),
        ("gemma2", "sliding_window_size=6", "sliding_window_size=7"),
        ("gemma3", "rope_linear_scaling_factor=4.0", "rope_linear_scaling_factor=1.0"),
        ("gemma3 with a head", "local_rope_max_timescale=100\n", "local_rope_max_timescale=-1\n"),
        ("gemma3 with a head", "model_name=gemma3-27b", "model_name=gemma3-4b"),
        ("gemma3 with a head", "sliding_window_size=5", "sliding_window_size=6"),
    ],
    "torchtitan": [
        ("llama", "theta=500000.0", "theta=10000.0"),
        ("llama", "theta=500000.0", 'theta=5e5, scaling="llama", original_max_position_embeddings=32'),
        ("llama", ".eps = 0.001", ".eps = 1e-05"),
        ("llama", 'mixed_precision_param = "float32"', 'mixed_precision_param = "bfloat16"'),
        ("llama with long positions", 'scaling="llama"', 'scaling="none"'),
        ("qwen3", "qk_norm.eps = 0.001", "qk_norm.eps = 0.1"),
        ("phi3 without a window", "theta=500000.0", "theta=10000.0"),
    ],
}


# What the trainers cannot be told of, and of what their own models run on no CPU.
UNTOLD = {
    "megatron": ["llama with long positions", "olmo2", *(name for name in SMALL_MODELS if "gemma" in name)],
    "maxtext": ["llama with long positions", "mistral with a window", "phi3", "smollm3"],
    "torchtitan": [
        "llama with stretched positions",
        "mistral with a window",
        "phi3",
        "qwen2",
        "smollm3",
        "olmo2",
        *(name for name in SMALL_MODELS if "gpt2" in name or "gemma" in name),
    ],
}
# Documents apart are left to Transformer Engine, which needs a GPU.
NOT_RUN = {"megatron": ("with documents", "Packed sequence is not supported by DotProductAttention")}


@pytest.mark.parametrize("trainer", WRONG)
def test_a_trainers_own_model_computes_what_ours_does(trainer, tmp_path):
    """Loss and logits of the same weights and tokens are ours, and are not with a setting that is wrong."""
    for name in UNTOLD[trainer]:
        with pytest.raises(UserError, match="cannot be told of"):
            TRAINERS[trainer].export(ALONE, SMALL_MODELS[name], (SMALL_MODELS[name].layers,))
    models = {name: model for name, model in SMALL_MODELS.items() if name not in UNTOLD[trainer]}
    exports = {name: TRAINERS[trainer].export(ALONE, model, (model.layers,)) for name, model in models.items()}
    texts = {name: exported.files[FILES[trainer]] for name, exported in exports.items()}
    paths = {name: arrays_of(model, tmp_path / f"{name}.npz") for name, model in models.items()}
    assert all(texts[name].count(right) == 1 for name, right, _ in WRONG[trainer])
    changed = [texts[name].replace(right, wrong) for name, right, wrong in WRONG[trainer]]
    files = [*paths.values(), *(paths[name] for name, _, _ in WRONG[trainer])]
    found = ask(trainer, [*texts.values(), *changed], tmp_path, 1, files)
    words, why = NOT_RUN.get(trainer, ("", ""))
    for (name, model), computed in zip(models.items(), found):
        if words and words in name:
            assert why in computed["refused"]
            continue
        params, tokens = weights_and_tokens(model)
        if trainer == "maxtext" and model.tied_head:
            assert any("rounds the table of a tied head to bfloat16" in words for words in exports[name].inexpressible)
            assert difference(computed, model, params, tokens) > 1e-3
            token = params["embedding"]["token"]
            rounded = jnp.stack([token, token.astype(jnp.bfloat16).astype(jnp.float32)])
            params["embedding"]["token"], model = rounded, dataclasses.replace(model, tied_head=False)
        assert difference(computed, model, params, tokens) < 2e-5, name
    for (name, _, wrong), computed in zip(WRONG[trainer], found[len(models) :], strict=True):
        assert difference(computed, models[name], *weights_and_tokens(models[name])) > 1e-2, wrong


def test_megatrons_model_has_no_other_factor_of_llama_3s_positions(tmp_path):
    """The flag is read, but not handed to the model, so another factor than 8 is refused."""
    model = SMALL_MODELS["llama 3"]
    wrong = dataclasses.replace(model, rope_scaling=OptionValues({**LLAMA3, "factor": 32.0}))
    with pytest.raises(UserError, match=re.escape("model.rope_scaling.factor=32.0; 8 would work")):
        megatron.export(ALONE, wrong, (model.layers,))
    flags = megatron.export(ALONE, model, (model.layers,)).files["megatron.args"] + "--rope-scaling-factor 32.0\n"
    found = ask("megatron", [flags], tmp_path, 1, [arrays_of(model, tmp_path / "model.npz")])[0]
    assert difference(found, model, *weights_and_tokens(model)) < 2e-5
    assert difference(found, wrong, *weights_and_tokens(model)) > 2e-4
