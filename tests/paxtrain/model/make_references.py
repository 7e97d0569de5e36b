# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.14.1", "transformers==5.24.0", "numpy", "safetensors"]
# ///
"""Write *_reference.npz, tiny random models as transformers computes them: `uv run make_references.py [NAME ...]`.

This project does not depend on torch and transformers, so the repository keeps the results, and this script documents
their source. Every parameter is random and far from its usual initial value, so that an exchanged, transposed or
forgotten one shows.
"""

import pathlib
import sys
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers

SEQUENCE = 24
SIZES = {"vocab_size": 101, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": SEQUENCE}
OF_ROTARY = {"intermediate_size": 56, "tie_word_embeddings": False, "attn_implementation": "eager"}
ROPE = {"rope_type": "default", "rope_theta": 500.0}
SMALL = {**SIZES, **OF_ROTARY, "vocab_size": 61, "hidden_size": 16, "num_hidden_layers": 4, "intermediate_size": 24}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-4}
SMALL |= {"rope_parameters": ROPE}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 2.0, "beta_slow": 0.5}
ORIGINAL = {"original_max_position_embeddings": 16, "rope_theta": 500.0}
LOCAL = {
    "sliding_attention": {**ROPE, "rope_theta": 50.0},
    "full_attention": {**ROPE, "rope_type": "linear", "factor": 4.0},
}
DROPOUT = {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attn_pdrop": 0.0}
GRANITE = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 12}
# By family and a word on the variant: model_type, and what its configuration says.
MODELS = {
    "gpt2": ("gpt2", {**SIZES, **DROPOUT, "num_attention_heads": 4, "attn_implementation": "eager"}),
    "llama": (
        "llama",
        {
            **SIZES,
            **OF_ROTARY,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rms_norm_eps": 1e-4,
            "rope_parameters": ROPE,
        },
    ),
    # A quarter of a head's 16 dims turns.
    "gpt_neox": (
        "gpt_neox",
        {**SIZES, **OF_ROTARY, "num_attention_heads": 2, "layer_norm_eps": 1e-4}
        | {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.25}},
    ),
    "gpt_neox_serial": (
        "gpt_neox",
        {**SIZES, **OF_ROTARY, "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
        | {"use_parallel_residual": False, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
    ),
    "llama_llama3": ("llama", {**SMALL, "rope_parameters": {**LLAMA3, **ORIGINAL}}),
    "qwen2": ("qwen2", SMALL),
    "qwen3": ("qwen3", {**SMALL, "rope_parameters": {**YARN, **ORIGINAL}}),
    "mistral": ("mistral", {**SMALL, "sliding_window": 5}),
    "gemma2": ("gemma2", {**SMALL, **CAPS, "sliding_window": 5, "tie_word_embeddings": True}),
    "gemma3": (
        "gemma3_text",
        {**SMALL, "sliding_window": 5, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]}
        | {"tie_word_embeddings": True, "query_pre_attn_scalar": 12, "rope_parameters": LOCAL},
    ),
    "olmo2": ("olmo2", SMALL),
    "phi3": (
        "phi3",
        {**SMALL, **DROPOUT, "sliding_window": 5, "pad_token_id": None, "head_dim": 4}
        | {"rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
    ),
    "smollm3": ("smollm3", {**SMALL, "no_rope_layer_interval": 2, "pad_token_id": None}),
    "granite": ("granite", {**SMALL, **GRANITE}),
}


def write(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    kind, values = MODELS[name]
    config = transformers.AutoConfig.for_model(kind, **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
            scale = ("norm" in parameter_name or ".ln_" in parameter_name) and parameter_name.endswith("weight")
            parameter.normal_(1.0 if scale else 0.0, 0.3, generator=generator)
    with tempfile.TemporaryDirectory() as folder:  # files name some parameters otherwise than the model does
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(f"{folder}/model.safetensors")
        described = pathlib.Path(folder, "config.json").read_text()
    ids = torch.randint(model.config.vocab_size, (2, SEQUENCE), generator=generator)
    with torch.no_grad():
        output = model.double()(ids, labels=ids)
    np.savez_compressed(
        pathlib.Path(__file__).with_name(f"{name}_reference.npz"),
        **weights,
        config=described,
        ids=ids.numpy().astype(np.int32),
        logits=output.logits.numpy().astype(np.float32),
        loss=output.loss.numpy().astype(np.float32),
    )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        write(chosen)
