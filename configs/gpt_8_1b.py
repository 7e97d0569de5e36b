"""8.1B parameters by name: 64 layers of 3072."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=64,
        hidden=3072,
        heads=24,
        out="runs/gpt_8_1b",
        model={"sequence": 2048},
        mesh={"data": 2, "pipe": 8, "tensor": 8},
        batch={"global_batch": 512, "micro_batch": 2},
        optimizer={"learning_rate": 1.5e-4},
    )
