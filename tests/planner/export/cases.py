"""Plans whose exports the parsers of other trainers are to take: each pair of choices that fit is in one of them."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config.axes import MAIN
from paxtrain.config.plan import Plan

DEVICES, PER_HOST = 16, 4
LLAMA = ModelConfig(
    family="llama",
    vocab_size=128256,
    layers=32,
    hidden=4096,
    heads=32,
    kv_heads=8,
    intermediate=14336,
    sequence=8192,
    tied_head=False,
    rope_theta=500_000.0,
)
GPT2 = ModelConfig(layers=37, hidden=1600, heads=16, sequence=1024, vocab_size=50257, dtype="float32")
MESHES = ((2, 4, 2), (4, 2, 2), (16, 1, 1), (1, 8, 2), (8, 2, 1), (2, 1, 8), (1, 4, 4))  # data, pipe, tensor
SAVES = ("layer_inputs", "dots", "residuals", "inputs")
SHARDING = ((True, "float32"), (False, "float32"), (True, "bfloat16"))  # zero1, reduce_dtype
COUNT = 60


@dataclasses.dataclass(frozen=True)
class Case:
    """A plan, the model that it is for, and the layers of each virtual stage."""

    plan: Plan
    model: ModelConfig
    layers: tuple[int, ...]

    @property
    def micro_batches(self) -> int:
        """Micro-batches of a data rank."""
        return max(self.plan.batch.rank_micro_batches(self.plan.mesh))

    @property
    def positions(self) -> list[tuple[int, ...]]:
        """Data, pipe, context if there is, and tensor of each device, in the order of the plan's devices."""
        sizes = [size for axis, size in self.plan.mesh.sizes.items() if axis in MAIN or size > 1]
        found = list(np.ndindex(*sizes))
        return [found[self.plan.device_order.index(device)] for device in range(DEVICES)]


def uneven(layers: int, stages: int) -> str:
    """Return layers of each stage with one more on the first and one less on the last than in even stages."""
    counts = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    if stages > 1 and counts[-1] > 1:
        counts[0], counts[-1] = counts[0] + 1, counts[-1] - 1
    return ",".join(map(str, counts))


def pipelines(model: ModelConfig, pipe: int, save: str) -> list[PipelineConfig]:
    """Return pipelines of all kinds; without stages there is one."""
    if pipe == 1:
        return [PipelineConfig("1f1b", save=save)]
    return [
        PipelineConfig("1f1b", save=save),
        PipelineConfig("1f1b", pipe_layers=uneven(model.layers, pipe), save=save),
        PipelineConfig("eager_1f1b", save=save),
        PipelineConfig("interleaved_1f1b", 2, save=save),
        PipelineConfig("interleaved_1f1b", 2, pipe_layers=uneven(model.layers, 2 * pipe), save=save),
    ]


def cases(model: ModelConfig) -> Iterator[Case]:
    """Yield plans for a model: choices turn at lengths of 7, 5, 4 and 3, so each pair of two of them comes up."""
    for n in range(COUNT):
        data, pipe, tensor = MESHES[n % len(MESHES)]
        (zero1, reduce_dtype), save = SHARDING[n % len(SHARDING)], SAVES[n % len(SAVES)]
        kinds = pipelines(model, pipe, save)
        pipeline = kinds[n % len(kinds)]
        mesh = MeshConfig(data, pipe, tensor, MeshConfig.of_zero1(zero1), tensor > 1 and n // 7 % 2 == 0, reduce_dtype)
        # Ranks of data side by side on a host, of pipe, or a rank of each host in turn.
        order = [range(DEVICES), sorted(range(DEVICES), key=lambda d: d % 4)][n % 11 % 2]
        hosts = tuple(f"host{host}" for host in range(DEVICES // PER_HOST))
        plan = Plan(mesh, pipeline, BatchConfig(64, 2), CompressConfig(), hosts, PER_HOST, tuple(order))
        yield Case(plan, model, pipeline.layers_per_virtual_stage(model.layers, pipe))
