"""6.7B parameters: 32 layers of 4096, as Llama 2 7B (Touvron et al. 2023)."""

from ml_collections import ConfigDict

from configs.base import llama


def get_config() -> ConfigDict:
    return llama(
        layers=32,
        hidden=4096,
        heads=32,
        kv_heads=32,
        intermediate=11008,
        out="runs/llama_7b",
        model={"sequence": 4096},
        mesh={"data": 2, "pipe": 4, "tensor": 4},
        batch={"global_batch": 1024, "micro_batch": 1},
        optimizer={"learning_rate": 3e-4},
    )
