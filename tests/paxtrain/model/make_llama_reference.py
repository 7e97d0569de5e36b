# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.23.0", "numpy==2.4.6"]
# ///
"""Write llama_reference.npz, a tiny random Llama as transformers computes it: `uv run make_llama_reference.py`.

It has grouped-query heads and an untied head. As in make_gpt2_reference.py, every parameter is far from its usual
initial value.
"""

import pathlib

import numpy as np
import torch
import transformers

PATH = pathlib.Path(__file__).with_name("llama_reference.npz")


def main() -> None:
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=24,
        rms_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    generator = torch.Generator().manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3, generator=generator)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    ids = torch.randint(config.vocab_size, (2, 24), generator=generator)
    with torch.no_grad():
        output = model.double()(ids, labels=ids)
    np.savez_compressed(
        PATH,
        **weights,
        ids=ids.numpy().astype(np.int32),
        logits=output.logits.numpy().astype(np.float32),
        loss=output.loss.numpy().astype(np.float32),
    )


if __name__ == "__main__":
    main()
