"""GPT-2 medium, 345M parameters: 24 layers of 1024."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=24,
        hidden=1024,
        heads=16,
        out="runs/gpt2_345m",
        mesh={"data": 8},
        batch={"global_batch": 512, "micro_batch": 8},
    )
