# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.15.0", "transformers==5.23.0", "numpy==2.4.6"]
# ///
"""Write gpt2_reference.npz, a tiny random GPT-2 as transformers computes it: `uv run make_gpt2_reference.py`.

This project does not depend on torch and transformers, so the repository keeps the result, and this script documents
its source. Every parameter is random and far from its usual initial value, so that an exchanged, transposed or
forgotten one shows.
"""

import pathlib

import numpy as np
import torch
import transformers

PATH = pathlib.Path(__file__).with_name("gpt2_reference.npz")


def main() -> None:
    config = transformers.GPT2Config(
        vocab_size=101,
        n_positions=24,
        n_embd=32,
        n_layer=3,
        n_head=4,
        activation_function="gelu_new",
        embd_pdrop=0.0,
        resid_pdrop=0.0,
        attn_pdrop=0.0,
        attn_implementation="eager",
    )
    generator = torch.Generator().manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # The tied lm_head.weight comes once, as wte.
            is_norm_scale = ".ln_" in name and name.endswith(".weight")
            parameter.normal_(1.0 if is_norm_scale else 0.0, 0.3, generator=generator)
    weights = {name: parameter.detach().numpy().copy() for name, parameter in model.named_parameters()}
    ids = torch.randint(config.vocab_size, (2, config.n_positions), generator=generator)
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
