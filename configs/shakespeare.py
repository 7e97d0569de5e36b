"""A small GPT over the bytes of a book-sized text, for two CPU cores and five minutes.

    python -m paxtrain.prepare --input=tinyshakespeare.txt --out=runs/shakespeare_data
    python -m paxtrain.train --config=configs/shakespeare.py

One device: on a shared CPU, splitting a model this small over a mesh only adds messages.
"""

from ml_collections import ConfigDict

from configs.base import gpt


def get_config() -> ConfigDict:
    return gpt(
        model={"layers": 4, "hidden": 160, "heads": 5, "sequence": 64, "dtype": "float32"},
        pipeline={"save": "residuals"},
        batch={"global_batch": 16, "micro_batch": 16},
        optimizer={"learning_rate": 3e-3, "warmup_steps": 100, "final_fraction": 0.05},
        data={"train": "runs/shakespeare_data/train", "validation": "runs/shakespeare_data/validation"},
        checkpoint={"every": 0},
        run={"steps": 2000, "out": "runs/shakespeare", "eval_every": 500, "eval_batches": 20},
    )
