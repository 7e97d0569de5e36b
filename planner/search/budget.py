"""The memory budget: the candidates that fit, by the estimate that the search filters by."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from paxtrain.config import ModelConfig, OuterConfig, scans
from paxtrain.config.axes import more_axes
from paxtrain.model import parameters
from paxtrain.model.fragments import fragment_layers
from paxtrain.model.parameters import differ, with_attention
from paxtrain.schedule.schedules import name_of, spec_of
from planner.cluster.cluster import Cluster
from planner.cluster.device_sheets import USABLE
from planner.cost.candidate import NO_GROUPS
from planner.cost.coded import LOW_RANK, Coded
from planner.memory import closed_form
from planner.memory.margin import margin, origin
from planner.memory.shape import Shape
from planner.pipeline import layer_split
from planner.program.kinds import rooms
from planner.search.space import Space

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Budget:
    """The memory that a plan may use, and the estimate of what it does use.

    Attributes:
        usable: share of a device's memory.
        error: CompressConfig.error.
        scan_layers: PipelineConfig.scan_layers.
        coded: codecs other than low rank.
        margin: add the safety margin of the closed form, for programs like those that it was measured on.
        outer: groups of data ranks that train apart.
        min_ratio: CompressConfig.min_ratio, for what groups exchange.
    """

    usable: float = USABLE
    error: str = "lazy"
    scan_layers: str = "auto"
    margin: bool = True
    coded: Coded = LOW_RANK
    outer: OuterConfig = NO_GROUPS
    min_ratio: float = 2.0

    def limit(self, cluster: Cluster) -> float:
        """Return the bytes that a plan may use on the cluster's smallest device: all stages run one program."""
        return float(cluster.memory.min()) * self.usable

    def shape(
        self, cluster: Cluster, model: ModelConfig, space: Space, splits: Sequence[tuple[int, ...]] = ()
    ) -> Shape:
        """Return candidates as the memory estimates take them.

        Args:
            cluster: cluster whose GPUs settle the attention.
            model: model to train.
            space: candidates.
            splits: layers of each virtual stage of each candidate; (): even ones.
        """
        common = model.layers // (space.pipe * space.chunks)
        return Shape(
            model=with_attention(model, capability(cluster)),
            data=space.together,
            pipe=space.pipe,
            tensor=space.tensor,
            others={name: space.column(name) for name in more_axes()},
            virtual_stages=space.chunks,
            slots=space.slots,
            common=common,
            micro_batch=space.micro_batch,
            micro_batches=space.micro_batches,
            schedule=space.schedule,
            save=space.save,
            shard=space.shard,
            copies_of_shards=space.together // space.sharing,
            context_form=space.context_form,
            sequence_parallel=space.sequence_parallel.astype(int),
            scan=scans(self.scan_layers, common, space.pipe * space.chunks) * 1,
            backward_rank=space.backward_rank,
            forward_rank=np.where((space.pipe > 1) & self.coded.compresses_forward, max(self.coded.forward_rank, 1), 0),
            data_rank=space.data_rank,
            error=("none", "explicit", "lazy").index(self.error),
            overlap=int(cluster.overlaps),
            coded=self.coded,
            copies=1 + (self.outer.momentum > 0) if self.outer.every else 0,
            groups=space.data // space.together,
            fragment_layers=self.fragments(model, space) if self.outer.every else (),
            overlaps=self.outer.overlap > 0,
            min_ratio=self.min_ratio,
            rooms=_rooms(model, space, splits) if differ(model) else {},
        )

    def fragments(self, model: ModelConfig, space: Space) -> tuple[Array, ...]:
        """Return the layers [N] that a device sends to other groups of each fragment; of uneven splits at most.

        Args:
            model: model to train.
            space: candidates.
        """
        keys, where = np.unique(np.stack([space.pipe, space.chunks, space.schedule]), axis=1, return_inverse=True)
        even, most = [], []
        for pipe, chunks, schedule in keys.T.tolist():
            stage_of = spec_of(name_of(schedule)).place(pipe, chunks).stage_of
            counts = layer_split.even(model.layers, pipe * chunks)
            even.append(max(counts))
            most.append(fragment_layers(model, self.outer.fragments, counts, stage_of))
        more = np.maximum(space.slots - np.array(even, int)[where.ravel()], 0) * space.chunks
        of_fragments = np.array(most, int).reshape(-1, self.outer.fragments)[where.ravel()]
        return tuple(of_fragments.T + more)

    def bytes(
        self, cluster: Cluster, model: ModelConfig, space: Space, splits: Sequence[tuple[int, ...]] = ()
    ) -> Array:
        """Return the bytes per device [N] that candidates are estimated to need, including the safety margin.

        Args:
            cluster: cluster to run on.
            model: model to train.
            space: candidates.
            splits: layers of each virtual stage of each candidate; (): even ones.
        """
        total = closed_form.analytic(self.shape(cluster, model, space, splits)).total
        total = np.broadcast_to(total, (len(space),)).astype(float)
        return total * np.exp(margin(model, space.pipe)) if self.has_margin(cluster) else total

    def has_margin(self, cluster: Cluster) -> bool:
        """Return whether the margin applies: it was measured on GPU programs."""
        return self.margin and cluster.overlaps

    def source(self, cluster: Cluster, model: ModelConfig, pipe: int = 0) -> str:
        """Return the name of the estimate that the figures are; `pipe` is that of the plan that they are about."""
        return origin(model, pipe) if self.has_margin(cluster) else "closed form"


def _rooms(model: ModelConfig, space: Space, splits: Sequence[tuple[int, ...]]) -> dict[str, Array]:
    """Return the layer slots [N] of a virtual stage of candidates by the kind of their layers; see `Budget.shape`."""
    if splits:
        found = [rooms(model, counts) for counts in splits]
    else:
        stages, where = np.unique(space.pipe * space.chunks, return_inverse=True)
        even = [rooms(model, layer_split.even(model.layers, n)) for n in stages.tolist()]
        found = [even[i] for i in where.tolist()]
    return {kind: np.array([one[kind] for one in found], int) for kind in dict.fromkeys(parameters.kinds(model))}


def capability(cluster: Cluster) -> tuple[int, int]:
    """Return the least CUDA compute capability of the cluster's devices; (0, 0) without GPUs."""
    sheets = [cluster.sheet(kind) for kind in set(cluster.kinds)]
    return min((0, 0) if sheet is None else sheet.capability for sheet in sheets)
