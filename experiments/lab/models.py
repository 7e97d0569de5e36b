"""The model that the lab trains: a GPT over bytes, small enough for a share of a core, split in many ways."""

import dataclasses
from typing import Any

from paxtrain.config import Config, from_dict, to_dict
from paxtrain.config.axes import MAIN
from paxtrain.config.load import nested
from planner.cost.candidate import Candidate
from planner.cost.coded import coded
from planner.pipeline import layer_split

MODEL = {"vocab_size": 257, "layers": 8, "hidden": 64, "heads": 4, "sequence": 32, "dtype": "float32"}
MODEL |= {"vocab_multiple": 4}  # 128, the default, would make a third of so small a table padding
# Nothing is kept but a layer's input: what is kept is copied on CPUs where a GPU leaves it in place.
SAVE = "layer_inputs"


@dataclasses.dataclass(frozen=True)
class Split:
    """A way to train the model.

    Attributes:
        mesh: data, pipe and tensor.
        compress: values of the section by dotted key, such as ("backward.rank", 8); others keep their defaults.
    """

    mesh: tuple[int, int, int]
    schedule: str = "eager_1f1b"
    chunks: int = 1
    global_batch: int = 64
    micro_batch: int = 4
    layers: int = 8
    sequence: int = 32
    hidden: int = 64
    shard: str = "optimizer"
    vocab_multiple: int = 4
    compress: tuple[tuple[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """Return a short name that differs between splits."""
        parts = [
            "x".join(map(str, self.mesh)),
            self.schedule,
            f"b{self.global_batch}",
            f"l{self.layers}",
            f"s{self.sequence}",
            f"h{self.hidden}",
        ]
        parts += [f"v{self.vocab_multiple}"] * (self.vocab_multiple != MODEL["vocab_multiple"])
        parts += [f"{key}={value}" for key, value in self.compress]
        return " ".join(parts)

    def values(self, data: str = "runs/data", **run: Any) -> dict[str, Any]:
        """Return the configuration as nested values."""
        mesh = dict(zip(MAIN, self.mesh)) | {"shard": self.shard}
        return {
            "model": MODEL
            | {"layers": self.layers, "sequence": self.sequence, "hidden": self.hidden}
            | {"vocab_multiple": self.vocab_multiple},
            "mesh": mesh,
            "pipeline": {
                "schedule": self.schedule,
                "save": SAVE,
                "virtual_stages": self.chunks,
                "scan_layers": "on",  # compiles faster; devices take their time in any case
            },
            "batch": {"global_batch": self.global_batch, "micro_batch": self.micro_batch},
            "compress": nested(dict(self.compress)),
            "data": {"train": f"{data}/train", "validation": f"{data}/validation"},
            "optimizer": {"learning_rate": 2e-3, "warmup_steps": 20},
            "run": run,
        }

    @property
    def config(self) -> Config:
        return from_dict(self.values())

    @property
    def candidate(self) -> Candidate:
        """Return the split as a candidate of the planner."""
        c = self.config
        stages = c.mesh.pipe * self.chunks
        data = c.compress.data.chosen
        return Candidate(
            data=c.mesh.data,
            pipe=c.mesh.pipe,
            tensor=c.mesh.tensor,
            micro_batch=self.micro_batch,
            micro_batches=c.micro_batches,
            schedule=self.schedule,
            counts=layer_split.even(self.layers, stages),
            chunks=self.chunks,
            save=SAVE,
            scan_layers=c.pipeline.scan_layers,
            shard=c.mesh.shard,
            backward=c.compress.backward.chosen,
            backward_rank=c.compress.backward.rank,
            data_rank=0 if data == "none" else c.compress.data.rank,
            coded=coded(c.compress),
        )


def values_of(config: Config) -> dict[str, Any]:
    """Return a configuration as JSON."""
    return to_dict(config)
