"""1.1B parameters in Llama's shape: 22 layers of 2048, as TinyLlama (Zhang et al. 2024)."""

from ml_collections import ConfigDict

from configs.base import llama


def get_config() -> ConfigDict:
    return llama(
        layers=22,
        hidden=2048,
        heads=32,
        kv_heads=4,
        intermediate=5632,
        out="runs/llama_1b",
        model={"sequence": 2048},
        mesh={"data": 8},
        batch={"global_batch": 512, "micro_batch": 4},
        optimizer={"learning_rate": 4e-4},
    )
