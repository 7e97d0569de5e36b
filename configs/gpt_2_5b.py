"""2.5B parameters: 52 layers of 1920."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=52,
        hidden=1920,
        heads=24,
        out="runs/gpt_2_5b",
        mesh={"data": 2, "pipe": 2, "tensor": 2},
        batch={"global_batch": 512, "micro_batch": 4},
        optimizer={"learning_rate": 1.6e-4},
    )
