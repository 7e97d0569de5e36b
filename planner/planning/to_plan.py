"""Conversion of a candidate that the search found to a paxtrain.config.plan.Plan, which the trainer takes."""

import math
from collections.abc import Mapping
from typing import Any, TypedDict

import numpy as np

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, ModelConfig, PipelineConfig
from paxtrain.config.axes import inside_axes, seat_axes
from paxtrain.config.compress import SECONDS
from paxtrain.config.options import NO_OPTIONS
from paxtrain.config.plan import Plan, PlannedGroups
from paxtrain.schedule.schedules import parts
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import host_slots
from planner.cost.step_time import Step
from planner.pipeline import layer_split


class Sections(TypedDict):
    """The sections of a configuration that a plan decides.

    Attributes:
        mesh: sizes of the axes.
        pipeline: schedule, layers per stage, and saved activations.
        batch: global batch and micro-batch.
        compress: compression of messages and gradients.
    """

    mesh: MeshConfig
    pipeline: PipelineConfig
    batch: BatchConfig
    compress: CompressConfig


def device_order(hosts: np.ndarray, per_host: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return the device of every mesh position, row-major.

    Args:
        hosts: int [D, P], host of each seat.
        per_host: devices per host.
        sizes: sizes of the axes; those inside hosts are the last ones of the mesh.

    Returns:
        Indices into the devices of all hosts, host after host.
    """
    inside, nested = inside_axes(), seat_axes()
    seat = np.arange(math.prod(sizes.get(name, 1) for name in inside)).reshape([sizes.get(name, 1) for name in nested])
    seat = seat.transpose([nested.index(name) for name in inside]).ravel()
    first = (hosts * per_host + host_slots(hosts) * len(seat)).ravel()
    return tuple((first[:, None] + seat).ravel().tolist())


def sections(
    candidate: Candidate,
    layer_count: int,
    global_batch: int,
    compress: CompressConfig,
    compressed: np.ndarray,
) -> Sections:
    """Return the sections of the configuration that the plan decides.

    Args:
        candidate: the plan.
        layer_count: layers of the model.
        global_batch: sequences per step.
        compress: the configuration's compression, for the settings that the planner does not decide.
        compressed: bool [P], whether each stage compresses its gradients over data.
    """
    c, (schedule, in_flight) = candidate, parts(candidate.schedule)
    even = c.counts == layer_split.even(layer_count, c.pipe * c.chunks)
    stages = ",".join(map(str, np.flatnonzero(compressed).tolist()))
    ranked, off = stages and compress.data.low_rank, _codecs(c, bool(stages))
    return {
        "mesh": _mesh(c),
        "pipeline": PipelineConfig(
            schedule=schedule,
            in_flight=in_flight,
            virtual_stages=c.chunks,
            pipe_layers="" if even else ",".join(map(str, c.counts)),
            save=c.save,
            scan_layers=c.scan_layers,
        ),
        "batch": BatchConfig(global_batch, c.micro_batch, ",".join(map(str, c.data_micro_batches))),
        "compress": compress.changed(
            backward={
                **off["backward"],
                "messages": c.backward,
                "rank": c.backward_rank if compress.backward.low_rank else compress.backward.rank,
                "ranks": "",
                "links": ",".join(map(str, c.backward_links)),
            },
            forward={
                **off["forward"],
                "messages": compress.forward.messages if c.pipe > 1 else "none",
                "links": ",".join(map(str, c.forward_links)),
            },
            data={
                **off["data"],
                "stages": stages or "none",
                "inside": c.inside if stages else 1,
                "rank": c.data_rank if ranked else compress.data.rank,
                "rank_min": min(compress.data.rank_min, c.data_rank) if ranked else compress.data.rank_min,
                **dict.fromkeys(SECONDS, ""),
            },
            # A table on one stage has no copies to synchronize.
            embedding={**off["embedding"], "sync": "auto" if len(c.stage_map.ends) == 1 else compress.embedding.sync},
            weights=off["weights"],
            context=off["context"],
        ),
    }


def _mesh(c: Candidate) -> MeshConfig:
    """Return the section mesh of a candidate."""
    same = ("shard", "shard_group", "context_form", "sequence_parallel", "reduce_dtype")
    values: dict[str, Any] = c.sizes | {name: getattr(c, name) for name in same}
    return MeshConfig(**values)


def groups(candidate: Candidate) -> PlannedGroups | None:
    """Return the groups that a candidate is for; None if all data ranks train together."""
    outer = candidate.outer
    return PlannedGroups(outer.every, candidate.apart, outer.fragments, outer.overlap) if outer.every else None


def _codecs(c: Candidate, data: bool) -> dict[str, dict[str, Any]]:
    """Return the settings of codecs by place where nothing is compressed: a named one would compress everything."""
    used = {
        "backward": c.backward != "none",
        "forward": c.pipe > 1,
        "data": data,
        "weights": c.zero1 and c.together > 1,
        "context": c.compresses_keys,
        "embedding": c.compresses_embedding,
    }
    return {place: {} if needed else {"codec": "", "options": NO_OPTIONS} for place, needed in used.items()}


def decide(
    cluster: Cluster,
    candidate: Candidate,
    hosts: np.ndarray,
    step: Step,
    model: ModelConfig,
    global_batch: int,
    compress: CompressConfig,
    predicted: dict[str, object],
) -> Plan:
    """Return the plan for the trainer.

    Args:
        cluster: cluster that was planned for.
        candidate: the plan that the search found.
        hosts: int [D, P], host of each tensor group.
        step: its predicted step, a batch of one.
        model: model that was planned for.
        global_batch: sequences per step.
        compress: the configuration's compression, for the settings that the planner does not decide.
        predicted: figures to keep in the plan, as JSON values.
    """
    real, order = cluster.parts or cluster, device_order(hosts, cluster.devices_per_host, candidate.sizes)
    if cluster.blocks:
        host, device = np.divmod(order, real.devices_per_host)
        order = tuple((np.ravel(cluster.blocks)[host] * real.devices_per_host + device).tolist())
    return Plan(
        **sections(candidate, model.layers, global_batch, compress, step.compressed[0]),
        hosts=real.hosts if real.named else (),
        devices_per_host=real.devices_per_host,
        device_order=order,
        outer=groups(candidate),
        module=model.module,
        predicted=predicted,
    )
