# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.14.1", "transformers==5.23.0"]
# ///
"""Logits by transformers and by paxtrain of the same models, both ways, for tied and untied GPT-2s and Llamas,
and for GPT-NeoX.

In an environment with this and what requirements.txt lists:

    PYTHONPATH=. python tests/paxtrain/huggingface/compare_transformers.py

First transformers makes a random model and saves it, paxtrain imports it; then paxtrain exports it and transformers
loads that. Exits with 1 if any logits differ by more than 1e-4.
"""

import pathlib
import sys
import tempfile

import jax
import numpy as np
import torch
import transformers

from paxtrain.config import Config, from_dict
from paxtrain.data import tokenizer
from paxtrain.huggingface.exporting import export
from paxtrain.huggingface.importing import import_model
from paxtrain.model import transformer
from paxtrain.run import sampling

TOLERANCE, SEQUENCE, VOCABULARY = 1e-4, 48, 300


def theirs(family: str, tied: bool) -> transformers.PreTrainedModel:
    """A random model whose every parameter is far from its usual start."""
    torch.manual_seed(0)
    if family == "llama":
        sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 8}
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=SEQUENCE, rms_norm_eps=1e-5,
            rope_parameters={"rope_type": "default", "rope_theta": 5000.0}, tie_word_embeddings=tied, **sizes,
        )  # fmt: skip
        made = transformers.LlamaForCausalLM(config)
    elif family == "gpt_neox":
        config = transformers.GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
            max_position_embeddings=SEQUENCE, rotary_pct=0.25, tie_word_embeddings=tied,
        )  # fmt: skip
        made = transformers.GPTNeoXForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=SEQUENCE, n_embd=64, n_layer=3, n_head=8, tie_word_embeddings=tied
        )
        made = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            norm = ("norm" in name or ".ln_" in name) and name.endswith("weight")
            parameter.normal_(1.0 if norm else 0.0, 0.2)
    return made.eval()


def ours(family: str, tied: bool, out: pathlib.Path) -> Config:
    shape = {"layers": 3, "hidden": 64, "heads": 8, "sequence": SEQUENCE, "vocab_size": VOCABULARY, "dtype": "float32"}
    if family == "llama":
        shape |= {"kv_heads": 2, "intermediate": 160, "rope_theta": 5000.0}
    if family == "gpt_neox":
        shape |= {"heads": 4, "intermediate": 160, "family": "gpt_neox"}
    else:
        shape |= {"family": family}
    model_values = shape | {"tied_head": tied}
    return from_dict({"model": model_values, "run": {"out": str(out)}})


def difference(family: str, tied: bool, folder: pathlib.Path) -> tuple[float, float]:
    """Largest differences of logits: imported, and exported again and loaded by AutoModelForCausalLM."""
    made = theirs(family, tied)
    made.save_pretrained(folder / "theirs")
    tokenizer.bytes_tokenizer().save(str(folder / "theirs" / sampling.TOKENIZER))
    ids = np.random.default_rng(0).integers(0, VOCABULARY, (4, SEQUENCE))
    with torch.no_grad():
        right = made(torch.from_numpy(ids)).logits.numpy()
    import_model(str(folder / "theirs"), ours(family, tied, folder / "run"))
    params, config, _ = sampling.load(folder / "run")
    mine = np.asarray(jax.jit(transformer.logits, static_argnums=2)(params, ids, config.model))

    export(str(folder / "run"), str(folder / "back"))
    back = transformers.AutoModelForCausalLM.from_pretrained(folder / "back").eval()
    words = transformers.AutoTokenizer.from_pretrained(folder / "back")
    assert words.decode(words("def f():")["input_ids"]) == "def f():"
    with torch.no_grad():
        again = back(torch.from_numpy(ids)).logits.numpy()
    assert (back.get_output_embeddings().weight is back.get_input_embeddings().weight) == tied
    return float(np.abs(mine - right).max()), float(np.abs(again - mine).max())


def main() -> None:
    worst = 0.0
    for family in ("gpt2", "llama", "gpt_neox"):
        for tied in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                found = difference(family, tied, pathlib.Path(folder))
            head = "tied" if tied else "untied"
            print(f"{family:8} {head:7} imported {found[0]:.1e}   exported {found[1]:.1e}")
            worst = max(worst, *found)
    sys.exit(worst > TOLERANCE)


if __name__ == "__main__":
    main()
