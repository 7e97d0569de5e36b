# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.23.0", "numpy==2.4.6", "safetensors"]
# ///
"""Write gpt_neox_reference.npz, a tiny random GPT-NeoX by transformers: `uv run make_gpt_neox_reference.py`.

A quarter of a head's 16 dims turns. As in make_gpt2_reference.py, every parameter is far from its usual initial value.
"""

import pathlib
import tempfile

import numpy as np
import safetensors.numpy
import torch
import transformers

PATH = pathlib.Path(__file__).with_name("gpt_neox_reference.npz")


def main() -> None:
    config = transformers.GPTNeoXConfig(
        vocab_size=101,
        hidden_size=32,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=24,
        layer_norm_eps=1e-4,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.25},
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    generator = torch.Generator().manual_seed(0)
    model = transformers.GPTNeoXForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            norm = "norm" in name and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.3, generator=generator)
    with tempfile.TemporaryDirectory() as folder:  # files name the head otherwise than the model does
        model.save_pretrained(folder)
        weights = safetensors.numpy.load_file(f"{folder}/model.safetensors")
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
