"""GPT-2 small, 125M parameters: 12 layers of 768."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=12,
        hidden=768,
        heads=12,
        out="runs/gpt2_125m",
        mesh={"data": 8},
        batch={"global_batch": 512, "micro_batch": 16},
        optimizer={"learning_rate": 6e-4},
    )
