"""1.3B parameters: 24 layers of 2048, as GPT-3 XL, with heads of 128."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=24,
        hidden=2048,
        heads=16,
        out="runs/gpt_1_3b",
        model={"sequence": 2048},
        mesh={"data": 2, "pipe": 2, "tensor": 2},
        batch={"global_batch": 512, "micro_batch": 4},
        optimizer={"learning_rate": 2e-4},
    )
