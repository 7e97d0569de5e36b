"""What predictions need to know of a trainer besides the plan that it follows.

Constants have three owners. A device kind has the speeds of its products and of its memory, a cluster the rates and
latencies of its links, and a trainer the host's time for kernels and messages, the passes over optimizer state and what
it does under other work. A run's table names its trainer, and a trainer of this module has typical values for its own.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TrainerFacts:
    """Facts of a trainer.

    Attributes:
        flash: attention keeps no scores in memory.
        overlaps: shardings with which gradients are reduced under the last backward.
        float32: gradients are reduced in float32; otherwise in the dtype of the weights.
        typical: typical values of its constants, by their names in planner/fit/constants.py.
        stalls: typical rates at which its runs stall, see planner/fit/stalls.py.
    """

    flash: bool = False
    overlaps: tuple[str, ...] = ()
    float32: bool = False
    typical: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stalls: tuple[float, float, float] = (3e-4, 3e-4, 0.03)


_EVERY = ("none", "zero1", "zero2", "zero3")
# The first one is any system of which nothing is known. What is said of the others is said by their sources: nanotron
# adds up and reduces gradients in float32 and syncs those of ZeRO-1 once backward has ended (nanotron/parallel/
# data_parallel and optim/zero.py); Megatron-LM's --overlap-grad-reduce and torchtitan's FSDP2 do it under backward.
TRAINERS: Mapping[str, TrainerFacts] = {
    "": TrainerFacts(),
    "nanotron": TrainerFacts(
        flash=True,
        overlaps=("none",),
        float32=True,
        typical={
            "matmul": 1.0,
            "memory": 0.3,
            "layer_launch": 1.4e-3,
            "attention": 1.2,
            "chunk_seconds": 2e-4,
            "message_seconds": 1e-4,
            "backward": 2.4,
            "head": 0.3,
            "crossing_launch": 1e-3,
            "optimizer_bytes": 20.0,
            "buckets": 0.14,
            "tied_ratio": 2.0,
            "host_seconds": 0.02,
            "hop_ratio": 0.5,
        },
        stalls=(0.005, 0.03, 0.9),
    ),
    "megatron-lm": TrainerFacts(flash=True, overlaps=_EVERY, float32=True),
    "torchtitan": TrainerFacts(flash=True, overlaps=_EVERY, float32=True),
    "llm-foundry": TrainerFacts(flash=True, overlaps=_EVERY),
    "maxtext": TrainerFacts(flash=True, overlaps=_EVERY, float32=True),
}
