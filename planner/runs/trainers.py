"""Facts of a trainer that predictions need besides the plan that it follows.

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
        eager: its host launches each kernel and collective, as PyTorch does.
        typical: typical values of its constants, by their names in planner/fit/constants.py.
        stalls: typical rates at which its runs stall, see planner/fit/stalls.py.
        published: constants that published runs determine, for plans: each a value and the standard deviation of its
            logarithm. Others are as typical and as wide as in planner/fit/constants.py.
        correlated: correlations of pairs of these logarithms, for plans on devices of `capability`. Runs determine a
            step, so that a slower backward on a quicker device fits them as well.
        capability: compute capability of the devices of these runs.
        counts: counts of planner/fit/memory.py, for plans; empty: the typical ones.
        peak_noise: standard deviation of the logarithm of a peak of memory around what they predict.
    """

    flash: bool = False
    overlaps: tuple[str, ...] = ()
    float32: bool = False
    eager: bool = True
    typical: Mapping[str, float] = dataclasses.field(default_factory=dict)
    stalls: tuple[float, float, float] = (3e-4, 3e-4, 0.03)
    published: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    correlated: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)
    capability: tuple[int, int] | None = None
    counts: tuple[float, ...] = ()
    peak_noise: float = 0.3


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
            "head": 1.0,
            "crossing_launch": 1e-3,
            "optimizer_bytes": 20.0,
            "buckets": 0.14,
            "tied_ratio": 2.0,
            "host_seconds": 0.02,
            "hop_ratio": 0.5,
        },
        stalls=(0.005, 0.03, 0.9),
        # Of the 1,553 runs of the Ultra-Scale Playbook with 1B and 8B parameters.
        published={
            "matmul": (1.05, 0.04),
            "memory": (0.25, 0.08),
            "layer_launch": (1.44e-3, 0.02),
            "attention": (1.35, 0.12),
            "backward": (2.47, 0.04),
            "head": (0.27, 0.08),
            "chunk_seconds": (1.9e-4, 0.35),
            "message_seconds": (9.5e-5, 0.45),
            "crossing_launch": (9.5e-4, 0.01),
            "buckets": (0.126, 0.19),
            "hop_ratio": (0.42, 0.11),
            "data_ratio": (0.88, 0.16),
            "tied_ratio": (2.2, 0.17),
            "optimizer_bytes": (18.9, 0.17),
            "host_seconds": (0.022, 0.25),
        },
        counts=(7.0, 12.5, 7.1, 5.7, 4.2, 7.5, 5.1, 0.33, 1.6),
        peak_noise=0.115,
    ),
    # The rates at which these stall are what is left of the prior once no published run of them has stalled. Their
    # constants are fitted to every second run of experiments/published, at the rates of devices and links that ship;
    # deviations and correlations are of what that half leaves open (experiments/published/posterior.py).
    "megatron-lm": TrainerFacts(
        flash=True,
        overlaps=_EVERY,
        float32=True,
        stalls=(2.7e-4, 3.5e-5, 0.03),
        published={"backward": (1.85, 0.10), "data_ratio": (1.2, 0.30), "chunk_seconds": (5e-4, 0.87)},
        correlated={
            ("backward", "matmul"): 0.81,
            ("backward", "memory"): 0.37,
            ("backward", "chunk_seconds"): -0.31,
            ("chunk_seconds", "memory"): -0.30,
        },
        capability=(8, 0),
    ),
    "torchtitan": TrainerFacts(
        flash=True,
        overlaps=_EVERY,
        float32=True,
        stalls=(2.5e-4, 3e-4, 0.03),
        published={"backward": (2.08, 0.08), "attention": (1.05, 0.31)},
    ),
    # Of the 139 runs of MPT under FSDP.
    "llm-foundry": TrainerFacts(
        flash=True,
        overlaps=_EVERY,
        stalls=(1.9e-4, 3e-4, 0.03),
        published={
            "matmul": (1.31, 0.04),
            "memory": (1.35, 0.18),
            "attention": (1.66, 0.02),
            "backward": (2.72, 0.05),
            "head": (2.03, 0.14),
            "data_ratio": (2.36, 0.26),
            "host_seconds": (0.03, 0.30),
        },
    ),
    "maxtext": TrainerFacts(flash=True, overlaps=_EVERY, float32=True, eager=False),
}
