# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.23.0", "numpy==2.4.6", "safetensors"]
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


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        **SIZES,
        num_attention_heads=4,
        activation_function="gelu_new",
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> transformers.PreTrainedModel:
    """Return a model with grouped-query heads and an untied head."""
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = transformers.LlamaConfig(
        **SIZES, **OF_ROTARY, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-4, rope_parameters=rope
    )
    return transformers.LlamaForCausalLM(config)


def gpt_neox() -> transformers.PreTrainedModel:
    """Return a model that turns a quarter of a head's 16 dims."""
    rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25}
    config = transformers.GPTNeoXConfig(
        **SIZES, **OF_ROTARY, num_attention_heads=2, layer_norm_eps=1e-4, rope_parameters=rope
    )
    return transformers.GPTNeoXForCausalLM(config)


MODELS = {"gpt2": gpt2, "llama": llama, "gpt_neox": gpt_neox}


def write(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():  # a tied head comes once, as the embedding
            scale = ("norm" in parameter_name or ".ln_" in parameter_name) and parameter_name.endswith("weight")
            parameter.normal_(1.0 if scale else 0.0, 0.3, generator=generator)
    with tempfile.TemporaryDirectory() as folder:  # files name some parameters otherwise than the model does
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(f"{folder}/model.safetensors")
    ids = torch.randint(model.config.vocab_size, (2, SEQUENCE), generator=generator)
    with torch.no_grad():
        output = model.double()(ids, labels=ids)
    np.savez_compressed(
        pathlib.Path(__file__).with_name(f"{name}_reference.npz"),
        **weights,
        ids=ids.numpy().astype(np.int32),
        logits=output.logits.numpy().astype(np.float32),
        loss=output.loss.numpy().astype(np.float32),
    )


if __name__ == "__main__":
    for chosen in sys.argv[1:] or MODELS:
        write(chosen)
