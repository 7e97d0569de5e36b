"""A tiny GPT-2 as transformers computed it, for comparison: weights, token ids, logits and loss.

make_references.py wrote gpt2_reference.npz beside this file.
"""

import pathlib
from typing import Any

import numpy as np

PATH = pathlib.Path(__file__).with_suffix(".npz")
RESULTS = ("ids", "logits", "loss")
LAYERS, HEADS = 3, 4


def load() -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the float32 weights by transformers' state_dict names, and the results.

    Results: ids [B, S] int32; logits [B, S, V] float32, computed in float64; loss [], the mean over the B * (S - 1)
    next-token cross-entropies.
    """
    with np.load(PATH) as file:
        arrays = dict(file)
    return arrays, {name: arrays.pop(name) for name in RESULTS}


def to_paxtrain(weights: dict[str, np.ndarray], padded_vocab: int) -> dict[str, Any]:
    """Return the weights as paxtrain's canonical parameters: layers stacked [L, ...], kernels [in, out] as in Conv1D.

    The columns of c_attn are q, k, v in this order, each of them heads in contiguous blocks; rows of the token table
    past the vocabulary are zero.
    """

    def stacked(name: str) -> np.ndarray:
        return np.stack([weights[f"transformer.h.{layer}.{name}"] for layer in range(LAYERS)])

    def norm(name: str) -> dict[str, np.ndarray]:
        return {"scale": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    def dense(name: str) -> dict[str, np.ndarray]:
        return {"kernel": stacked(f"{name}.weight"), "bias": stacked(f"{name}.bias")}

    token = weights["transformer.wte.weight"]
    vocab, hidden = token.shape
    qkv = dense("attn.c_attn")
    return {
        "embedding": {
            "token": np.pad(token, ((0, padded_vocab - vocab), (0, 0))),
            "position": weights["transformer.wpe.weight"],
        },
        "layers": {
            "ln1": norm("ln_1"),
            "qkv": {name: value.reshape(*value.shape[:-1], 3, hidden) for name, value in qkv.items()},
            "out": dense("attn.c_proj"),
            "ln2": norm("ln_2"),
            "up": dense("mlp.c_fc"),
            "down": dense("mlp.c_proj"),
        },
        "final_norm": {"scale": weights["transformer.ln_f.weight"], "bias": weights["transformer.ln_f.bias"]},
    }
