"""175B parameters: 96 layers of 12288, the size of GPT-3 (Brown et al. 2020)."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=96,
        hidden=12288,
        heads=96,
        out="runs/gpt_175b",
        model={"sequence": 2048},
        mesh={"data": 8, "pipe": 16, "tensor": 8},
        batch={"global_batch": 1536, "micro_batch": 1},
        optimizer={"learning_rate": 6e-5},
    )
