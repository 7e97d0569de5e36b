"""8.3B parameters: 72 layers of 3072, the largest GPT of the Megatron-LM paper (Shoeybi et al. 2019)."""

from ml_collections import ConfigDict

from configs.base import gpt2


def get_config() -> ConfigDict:
    return gpt2(
        layers=72,
        hidden=3072,
        heads=24,
        out="runs/gpt_8b",
        mesh={"data": 1, "pipe": 4, "tensor": 2},
        batch={"global_batch": 512, "micro_batch": 2},
        optimizer={"learning_rate": 1.5e-4},
    )
