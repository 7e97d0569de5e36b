"""The defaults of paxtrain.config as an ml_collections ConfigDict, for config files to build on."""

from typing import Any

from ml_collections import ConfigDict

from paxtrain.config import Config, to_dict


def gpt(**sections: dict[str, Any]) -> ConfigDict:
    """Return all defaults with some values of some sections replaced: gpt(model={"layers": 12}, mesh={"data": 2})."""
    config = ConfigDict(to_dict(Config()))
    config.update(sections)
    return config


def _large(out: str, data: str, **sections: dict[str, Any]) -> ConfigDict:
    """Return the defaults of large runs with some values of some sections replaced."""
    defaults = {
        "optimizer": {"learning_rate": 3e-4, "warmup_steps": 2000},
        "run": {
            "steps": 100_000,
            "out": out,
            "eval_every": 1000,
            "eval_batches": 20,
            "log_every": 10,
            "sample_tokens": 0,
        },
        "checkpoint": {"every": 1000, "keep": 3, "keep_every": 10_000},
        "data": {"train": f"{data}/train", "validation": f"{data}/validation"},
    }
    return gpt(**{name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections})


def gpt2(layers: int, hidden: int, heads: int, out: str, **sections: dict[str, Any]) -> ConfigDict:
    """Return a model with GPT-2's vocabulary at sequence length 1024, and data made with `--tokenizer=gpt2`."""
    model = {"vocab_size": 50257, "sequence": 1024, "layers": layers, "hidden": hidden, "heads": heads}
    sections["model"] = model | sections.get("model", {})
    return _large(out, "runs/gpt2_data", **sections)


def llama(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, out: str, **sections: dict[str, Any]
) -> ConfigDict:
    """Return a model with Llama 2's shape and vocabulary size, and data in its tokens.

    `paxtrain.prepare --tokenizer=tokenizer.json` with the model's file makes such data; files of Megatron's tools load
    unchanged.
    """
    model = {
        "family": "llama",
        "vocab_size": 32000,
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": kv_heads,
        "intermediate": intermediate,
        "tied_head": False,
    }
    sections["model"] = model | sections.get("model", {})
    return _large(out, "runs/llama_data", **sections)
