"""A small GPT over bytes on a (2, 4, 1) mesh: what `make study` trains again and again, compressed in different ways.

Ranks are a quarter of the full one, about what makes messages of this size twice as small. compress.data.stages names
those of the run with selective stage compression; what else a run compresses is paxtrain.study's to say.
"""

from ml_collections import ConfigDict

from configs.base import gpt


def get_config() -> ConfigDict:
    return gpt(
        model={"vocab_size": 257, "layers": 4, "hidden": 64, "heads": 4, "sequence": 64, "dtype": "float32"},
        mesh={"data": 2, "pipe": 4, "tensor": 1},
        pipeline={"schedule": "eager_1f1b"},
        batch={"global_batch": 32, "micro_batch": 2},
        optimizer={"learning_rate": 2e-3, "warmup_steps": 40},
        compress={
            "backward": {"rank": 16},
            "forward": {"rank": 16},
            "data": {"stages": "0,1", "rank": 16, "start": 0.1},
        },
        run={"steps": 300, "out": "runs/study", "eval_every": 50, "eval_batches": 8},
    )
