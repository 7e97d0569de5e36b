"""A small GPT over bytes on 8 virtual CPU devices: what `make train` trains, in minutes on two cores."""

from ml_collections import ConfigDict

from configs.base import gpt


def get_config() -> ConfigDict:
    return gpt(
        model={"vocab_size": 257, "layers": 4, "hidden": 128, "heads": 4, "sequence": 128, "dtype": "float32"},
        mesh={"data": 2, "pipe": 2, "tensor": 2},
        batch={"global_batch": 32, "micro_batch": 4},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 20},
        run={"steps": 500, "out": "runs/tiny"},
    )
