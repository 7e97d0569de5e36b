"""A GPT of 6.4 million parameters on a (2, 4, 1) mesh: the frontier of the codecs, overnight.

make study ARGS="--frontier --config=configs/frontier.py --steps=300 --out=runs/frontier"
"""

from ml_collections import ConfigDict

from configs.base import gpt


def get_config() -> ConfigDict:
    return gpt(
        model={"vocab_size": 257, "layers": 8, "hidden": 256, "heads": 8, "sequence": 128, "dtype": "float32"},
        mesh={"data": 2, "pipe": 4, "tensor": 1},
        pipeline={"schedule": "eager_1f1b"},
        batch={"global_batch": 16, "micro_batch": 1},
        optimizer={"learning_rate": 1e-3, "warmup_steps": 40},
        compress={"backward": {"rank": 64}, "data": {"stages": "0,1", "rank": 64}},
        run={"steps": 300, "out": "runs/frontier", "eval_batches": 16},
    )
