"""The defaults of paxtrain.config as an ml_collections ConfigDict, for config files to build on."""

from typing import Any

from ml_collections import ConfigDict

from paxtrain.config import Config, to_dict


def gpt(**sections: dict[str, Any]) -> ConfigDict:
    """All defaults, with some values of some sections replaced: gpt(model={"layers": 12}, mesh={"data": 2})."""
    config = ConfigDict(to_dict(Config()))
    config.update(sections)
    return config


def gpt2(layers: int, hidden: int, heads: int, out: str, **sections: dict[str, Any]) -> ConfigDict:
    """A model with GPT-2's vocabulary at sequence length 1024, and data prepared with `--tokenizer=gpt2`."""
    model = {"vocab_size": 50257, "sequence": 1024, "layers": layers, "hidden": hidden, "heads": heads}
    sections["model"] = model | sections.get("model", {})
    optimizer = {"learning_rate": 3e-4, "warmup_steps": 2000}
    sections["optimizer"] = optimizer | sections.get("optimizer", {})
    run = {"steps": 100_000, "out": out, "eval_every": 1000, "eval_batches": 20, "log_every": 10, "sample_tokens": 0}
    sections["run"] = run | sections.get("run", {})
    checkpoint = {"every": 1000, "keep": 3, "keep_every": 10_000}
    sections["checkpoint"] = checkpoint | sections.get("checkpoint", {})
    data = {"train": "runs/gpt2_data/train", "validation": "runs/gpt2_data/validation"}
    sections["data"] = data | sections.get("data", {})
    return gpt(**sections)
