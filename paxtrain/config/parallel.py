"""The sections that divide the work over devices: mesh, pipeline and batch."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, overload

import numpy as np

from paxtrain.config.axes import AXES, DATA, REPLICA, AxisSizes, batch_axes, layer_sizes, replica_axes, token_axes
from paxtrain.config.checks import (
    OUT,
    Checked,
    bounded,
    choice,
    counts,
    each,
    multiples_near,
    near,
    positive,
    require,
    shown,
)
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import FILE, ScheduleSpec, between_ends, names, spec_of

MOST_SEQUENCES = 2**20  # of an optimizer step
SAVE_MODES = ("dots", "layer_inputs", "residuals", "inputs")
CONTEXT_FORMS = ("ring", "gather", "heads")
REDUCE_DTYPES = ("float32", "bfloat16")
SHARDS = ("none", "optimizer", "gradients", "weights")
SPLIT_SAVES = ("dots", "residuals")  # save modes of schedules that split the backward
# Up to how many layers of a stage are compiled one by one, and of a stage that is alone. A loop copies each layer's
# weights and residuals: the 24 layers of a model with 1.3B parameters take 13% longer in one on an H200, and compile in
# 8 s instead of 10. Programs of several stages have many bodies, and compile for minutes with as many layers.
_UNROLLED, _UNROLLED_ALONE = 8, 32


@overload
def scans(scan_layers: str, common: int, stages: int) -> bool: ...
@overload
def scans(scan_layers: str, common: np.ndarray, stages: np.ndarray) -> np.ndarray: ...
def scans(scan_layers: str, common: int | np.ndarray, stages: int | np.ndarray) -> bool | np.ndarray:
    """Return whether layers run in a loop, as PipelineConfig.scan_layers says: one bool, or an array of them.

    Args:
        scan_layers: "auto", "on" or "off".
        common: layers of the smallest virtual stage, a number or an array of them; a single layer needs no loop.
        stages: virtual stages, likewise.
    """
    most = _UNROLLED + (_UNROLLED_ALONE - _UNROLLED) * (stages == 1)
    return ((scan_layers == "on") | ((scan_layers == "auto") & (common > most))) & (common > 1)


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Sizes of the mesh axes; their product is the number of devices.

    Attributes:
        data: replicas of the model, each with a share of the batch.
        pipe: stages, each with a share of the layers.
        tensor: devices that share the matrices of each layer.
        shard: what is sharded over data: "none" (gradients are all-reduced); "optimizer" (master weights and optimizer
            state; a step gathers the weights and reduce-scatters the gradients once); "gradients" (also the sums of
            gradients, which each micro-batch reduce-scatters); or "weights" (also the weights, which each layer gathers
            when it needs them).
        shard_group: neighbouring data ranks that share the weights and sums that are sharded; groups of them have
            copies, and sum gradients with each other once a step. 0: all data ranks are one group.
        sequence_parallel: whether a tensor group splits the sequence between the split matrices, so that each device
            keeps and sends a part of the activations.
        context: devices that share each sequence, for long ones.
        context_form: how devices of a context group see each other's tokens (paxtrain/attention/split.py): "ring" and
            "gather" exchange keys and values, "heads" tokens for heads.
        reduce_dtype: dtype in which gradients are summed over data; they are accumulated in float32 either way.
    """

    data: int = 1
    pipe: int = 1
    tensor: int = 1
    shard: str = "optimizer"
    sequence_parallel: bool = False
    reduce_dtype: str = "float32"
    context: int = 1
    context_form: str = "ring"
    shard_group: int = 0

    def check(self) -> None:
        positive("mesh", self, *AXES)
        bounded("mesh", self, **{name: axis.most for name, axis in AXES.items()})
        choice("mesh.shard", self.shard, SHARDS)
        choice("mesh.reduce_dtype", self.reduce_dtype, REDUCE_DTYPES)
        choice("mesh.context_form", self.context_form, CONTEXT_FORMS)
        self._check_groups()
        require(
            not self.sequence_parallel or self.tensor > 1,
            f"mesh.sequence_parallel splits the sequence over tensor, but mesh.tensor={self.tensor}",
            {"mesh.tensor": 2},
            {"mesh.sequence_parallel": False},
        )

    def _check_groups(self) -> None:
        """Require that data ranks fall into groups of `shard_group` that have something to share."""
        group = self.shard_group
        require(group >= 0, f"mesh.shard_group must be 0 or more, got {group}")
        require(
            not group or self.shards_sums,
            f"mesh.shard_group={group} is about weights and sums of gradients in shards, but mesh.shard={self.shard} "
            "has them whole",
            each("mesh.shard", ("weights", "gradients")),
            {"mesh.shard_group": 0},
        )
        require(
            not group or self.data % group == 0,
            f"mesh.shard_group={group} does not divide mesh.data={self.data}",
            each("mesh.shard_group", near(self.data, group)),
        )

    @classmethod
    def renewed(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return values by key in which `zero1`, which earlier versions recorded, has become `shard`.

        Raises:
            UserError: zero1 is neither True nor False, or shard says something else.
        """
        found = dict(values)
        if "zero1" not in found:
            return found
        given = found.pop("zero1")
        require(type(given) is bool, f"mesh.zero1 must be of type bool, got {shown(given)}")
        shard = found.setdefault("shard", cls.of_zero1(given))
        require(
            (shard != "none") == given,
            f"mesh.zero1={given}, as earlier versions called mesh.shard={cls.of_zero1(given)}, but mesh.shard={shard}",
        )
        return found

    @staticmethod
    def of_zero1(zero1: bool) -> str:
        """Return `shard` if only the optimizer's state may be sharded."""
        return "optimizer" if zero1 else "none"

    @property
    def zero1(self) -> bool:
        """True if master weights and optimizer state are sharded over data."""
        return self.shard != "none"

    @property
    def token_ranks(self) -> int:
        """Number of devices with different tokens of the batch: those of its parts, and those that share sequences."""
        return math.prod(self.sizes[name] for name in token_axes())

    @property
    def replicas(self) -> int:
        """Number of devices that need the same weights: data ranks, and those that share their sequences."""
        return math.prod(self.sizes[name] for name in replica_axes(self.sizes))

    @property
    def shards_sums(self) -> bool:
        """True if a data rank sums its shards of the gradients only, which each micro-batch reduce-scatters."""
        return self.shard in ("gradients", "weights")

    @property
    def copies(self) -> int:
        """Number of groups of data ranks that have the same sharded weights, or sums of the same gradients."""
        return self.data // self.shard_group if self.shard_group else 1

    @property
    def sharing(self) -> int:
        """Number of devices that share the shards of weights and of sums: those of a group."""
        return self.replicas // self.copies

    @property
    def device_sizes(self) -> dict[str, int]:
        """Sizes of the axes of the device mesh: `sizes`, with data in two parts if there are several `copies`."""
        groups, inside = self.copies, self.data // self.copies
        return {REPLICA: groups, **self.sizes, DATA: inside} if groups > 1 else self.sizes

    def over(self, *axes: str) -> tuple[str, ...]:
        """Return the axes of the device mesh that make up some axes, the major ones first."""
        return (*(REPLICA,) * (DATA in axes and self.copies > 1), *axes)

    @property
    def devices(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes.values())

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of all axes by name, in the order of the mesh."""
        return {name: getattr(self, name) for name in AXES}

    @property
    def layer_sizes(self) -> AxisSizes:
        """Sizes of the axes that split a layer or for which it waits, without those of one device."""
        return layer_sizes(self.sizes, self.context_form)

    @property
    def ranks(self) -> int:
        """Number of parts of the batch: data ranks, and those of other axes that split it."""
        return math.prod(self.sizes[name] for name in batch_axes())


@dataclasses.dataclass(frozen=True)
class PipelineConfig(Checked):
    """The flow of micro-batches through the stages.

    Attributes:
        schedule: a name in paxtrain.schedule.schedules.SPECS, or a CSV file with a schedule (see docs/train.md); one
            that splits the backward needs a save of SPLIT_SAVES.
        in_flight: micro-batches in flight on the first stage with schedule=1f1b, from P, which is 1f1b's, to 2P-1:
            more memory for residuals, and fewer exposed transfers. 0: the schedule's own.
        virtual_stages: chunks of layers per stage; more than one only with schedules that interleave.
        pipe_layers: layers of each virtual stage, "3,4,4,1"; empty: as equal as possible, the last ones shorter.
        save: values a forward keeps for its backward: "dots" (matrix products and attention; the rest is recomputed),
            "layer_inputs", "residuals" (everything, nothing recomputed) or "inputs" (the stage's input only).
        scan_layers: one compiled layer in a loop instead of unrolled ones; "auto": a loop from 9 layers per stage on,
            and from 33 on if there is one stage only.
        idle: what stages do while they have no op, in schedules whose ScheduleSpec is masked: "compute" on scrap, or
            "skip"; "auto": skip on CPUs, whose cores other stages may need, and compute elsewhere. Other schedules
            always skip.
    """

    schedule: str = "eager_1f1b"
    virtual_stages: int = 1
    pipe_layers: str = ""
    save: str = "dots"
    scan_layers: str = "auto"
    idle: str = "auto"
    in_flight: int = 0

    def check(self) -> None:
        positive("pipeline", self, "virtual_stages")
        require(self.in_flight >= 0, f"pipeline.in_flight must be 0 or more, got {self.in_flight}")
        bounded("pipeline", self, virtual_stages=1024, in_flight=2**16)
        if self.schedule.endswith(FILE):
            try:
                self.spec.travel(True)
            except ValueError as error:
                raise UserError(f"pipeline.schedule: {error}") from error
        else:
            choice("pipeline.schedule", self.schedule, names())
        choice("pipeline.save", self.save, SAVE_MODES)
        choice("pipeline.scan_layers", self.scan_layers, ("auto", "on", "off"))
        choice("pipeline.idle", self.idle, ("auto", "compute", "skip"))
        counts("pipeline.pipe_layers", self.pipe_layers)
        require(
            not self.in_flight or self.schedule == "1f1b",
            f"pipeline.in_flight={self.in_flight} needs pipeline.schedule=1f1b, got {self.schedule}",
            {"pipeline.schedule": "1f1b"},
            {"pipeline.in_flight": 0},
        )
        masked, interleaved = (names(which) for which in (lambda spec: spec.masked, lambda spec: spec.interleaves))
        require(
            self.spec.masked or self.idle != "compute",
            f"pipeline.idle=compute needs pipeline.schedule={' or '.join(masked)}, got {self.schedule}",
            {"pipeline.idle": "auto"},
            each("pipeline.schedule", masked),
        )
        require(
            self.spec.interleaves or self.virtual_stages == 1,
            f"pipeline.virtual_stages={self.virtual_stages} needs pipeline.schedule="
            f"{' or '.join(interleaved)}, got {self.schedule}",
            each("pipeline.schedule", interleaved),
            {"pipeline.virtual_stages": 1},
        )
        require(
            not self.spec.interleaves or self.virtual_stages > 1,
            f"pipeline.schedule={self.schedule} needs pipeline.virtual_stages of 2 or more, got 1",
            {"pipeline.virtual_stages": self.spec.size[1] if self.spec.size else 2},
            {"pipeline.schedule": type(self).schedule},
        )
        most = self.spec.most_chunks or self.virtual_stages
        require(
            self.virtual_stages <= most,
            f"pipeline.schedule={self.schedule} has {most} chunks per stage, but pipeline.virtual_stages="
            f"{self.virtual_stages}",
            {"pipeline.virtual_stages": most},
        )
        require(
            not self.spec.splits or self.save in SPLIT_SAVES,
            f"pipeline.save={self.save} saves no memory with pipeline.schedule={self.schedule}, which keeps a layer's "
            "residuals until its weight gradients",
            each("pipeline.save", SPLIT_SAVES),
        )

    @property
    def spec(self) -> ScheduleSpec:
        """Facts about the schedule."""
        return spec_of(self.schedule_key)

    @property
    def schedule_key(self) -> str:
        """Name of the schedule in `schedules.spec_of`, which also says what is in flight."""
        return between_ends(self.in_flight) if self.in_flight else self.schedule

    def scans(self, counts: Sequence[int]) -> bool:
        """Return whether layers run in a loop with some numbers of layers of the virtual stages."""
        return scans(self.scan_layers, min(counts), len(counts))

    def layers_per_virtual_stage(self, layers: int, pipe: int) -> tuple[int, ...]:
        """Return the layers of each of the pipe * virtual_stages virtual stages, in the order of the forward pass.

        Args:
            layers: layers of the model.
            pipe: stages.

        Raises:
            UserError: the list has another length or sum, or there are fewer layers than virtual stages.
        """
        stages = pipe * self.virtual_stages
        if self.pipe_layers:
            given = counts("pipeline.pipe_layers", self.pipe_layers)
            require(
                len(given) == stages,
                f"pipeline.pipe_layers={self.pipe_layers} names {len(given)} stages, "
                f"but pipe={pipe} with {self.virtual_stages} virtual stages each needs {stages}",
                {"pipeline.pipe_layers": OUT},
                {"mesh.pipe": -(-len(given) // self.virtual_stages)},
            )
            require(
                sum(given) == layers,
                f"pipeline.pipe_layers={self.pipe_layers} adds up to {sum(given)}, but the model has {layers} layers",
                {"pipeline.pipe_layers": OUT},
                {"model.layers": sum(given)},
            )
            return given
        require(
            layers >= stages,
            f"model.layers={layers} cannot fill {stages} virtual stages (mesh.pipe={pipe} x "
            f"pipeline.virtual_stages={self.virtual_stages})",
            {"mesh.pipe": layers // self.virtual_stages},
            {"model.layers": stages},
        )
        return tuple(layers // stages + (i < layers % stages) for i in range(stages))


@dataclasses.dataclass(frozen=True)
class BatchConfig(Checked):
    """Numbers of sequences.

    Attributes:
        global_batch: sequences of an optimizer step over the whole mesh.
        micro_batch: sequences of a micro-batch of one data rank.
        data_micro_batches: micro-batches of each data rank in a step, "4,4,2,2", so that ranks on slow hosts get fewer;
            empty: all have as many. Every sequence weighs as much as any other, whichever rank has it.
    """

    global_batch: int = 16
    micro_batch: int = 2
    data_micro_batches: str = ""

    def check(self) -> None:
        positive("batch", self, "global_batch", "micro_batch")
        bounded("batch", self, global_batch=MOST_SEQUENCES, micro_batch=2**16)
        counts("batch.data_micro_batches", self.data_micro_batches)

    def rank_micro_batches(self, mesh: MeshConfig) -> tuple[int, ...]:
        """Return the micro-batches of each part of the batch in a step, `mesh.ranks` of them.

        Args:
            mesh: sizes of the axes.

        Raises:
            UserError: the list has another length or does not add up to global_batch, or, if there is none,
                global_batch is not divisible by ranks * micro_batch.
        """
        if self.data_micro_batches:
            return self._listed(mesh.ranks)
        per_round = mesh.ranks * self.micro_batch
        require(
            self.global_batch % per_round == 0,
            f"batch.global_batch={self.global_batch} is not divisible by "
            f"{''.join(f'mesh.{name}={mesh.sizes[name]} x ' for name in batch_axes())}"
            f"batch.micro_batch={self.micro_batch}",
            each("batch.global_batch", multiples_near(per_round, self.global_batch)),
        )
        return (self.global_batch // per_round,) * mesh.ranks

    def _listed(self, data: int) -> tuple[int, ...]:
        setting = f"batch.data_micro_batches={self.data_micro_batches}"
        found = counts("batch.data_micro_batches", self.data_micro_batches)
        require(
            len(found) == data,
            f"{setting} names {len(found)} data rank{'s' * (len(found) > 1)}, but mesh.data={data}",
            {"batch.data_micro_batches": OUT},
            {"mesh.data": len(found)},
        )
        total = sum(found) * self.micro_batch
        require(
            total == self.global_batch,
            f"{setting} with batch.micro_batch={self.micro_batch} takes {total} sequences, but batch.global_batch="
            f"{self.global_batch}",
            {"batch.global_batch": total},
            {"batch.data_micro_batches": OUT},
        )
        return found
