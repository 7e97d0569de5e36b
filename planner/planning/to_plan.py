"""From what the search found to what the trainer takes: a paxtrain.config.plan.Plan."""

import dataclasses
from typing import Any

import numpy as np

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config.plan import Plan
from planner.cluster.cluster import Cluster
from planner.cost.step_time import Candidate, Step
from planner.search import layers


def device_order(hosts: np.ndarray, per_host: int, tensor: int) -> tuple[int, ...]:
    """For every mesh position, row-major over (data, pipe, tensor), an index into all hosts' devices, host after host.

    Args:
        hosts: int [D, P], the host of each tensor group.
    """
    flat = hosts.ravel()
    order = np.argsort(flat, kind="stable")
    # The groups of a host take its devices in the order in which they come in the mesh.
    slot = np.empty(len(flat), int)
    slot[order] = np.arange(len(flat)) - np.searchsorted(flat[order], flat[order])
    first = flat * per_host + slot * tensor
    return tuple((first[:, None] + np.arange(tensor)).ravel().tolist())


def sections(
    candidate: Candidate,
    layer_count: int,
    global_batch: int,
    compress: CompressConfig,
    compressed: np.ndarray,
    scan_layers: str = "auto",
) -> dict[str, Any]:
    """The plan's sections of the configuration.

    Args:
        compress: what the configuration says of compression, for all that the planner does not decide.
        compressed: bool [P], stages that compress over data.
        scan_layers: as PipelineConfig's.
    """
    c = candidate
    even = c.counts == layers.even(layer_count, c.pipe * c.chunks)
    stages = ",".join(map(str, np.flatnonzero(compressed).tolist()))
    return {
        "mesh": MeshConfig(c.data, c.pipe, c.tensor, c.zero1, c.sequence_parallel),
        "pipeline": PipelineConfig(
            schedule=c.schedule,
            virtual_stages=c.chunks,
            pipe_layers="" if even else ",".join(map(str, c.counts)),
            save=c.save,
            scan_layers=scan_layers,
        ),
        "batch": BatchConfig(global_batch, c.micro_batch),
        "compress": dataclasses.replace(
            compress,
            backward=c.backward,
            backward_rank=c.backward_rank,
            backward_ranks="",
            # One stage has no tied copies to synchronise.
            embedding="auto" if c.pipe == 1 else compress.embedding,
            data=stages or "none",
            data_rank=c.data_rank if stages else compress.data_rank,
            data_rank_min=min(compress.data_rank_min, c.data_rank) if stages else compress.data_rank_min,
            stage_seconds="",
            reduce_seconds="",
            compressed_seconds="",
        ),
    }


def decide(
    cluster: Cluster,
    candidate: Candidate,
    hosts: np.ndarray,
    step: Step,
    layer_count: int,
    global_batch: int,
    compress: CompressConfig,
    predicted: dict[str, Any],
    scan_layers: str = "auto",
) -> Plan:
    """The plan of a candidate on a placement, int [D, P], with its predicted step (a batch of one)."""
    real = cluster.parts or cluster  # devices are numbered alike in both
    return Plan(
        **sections(candidate, layer_count, global_batch, compress, step.compressed[0], scan_layers),
        hosts=real.hosts if real.named else (),
        devices_per_host=real.devices_per_host if real.named else 0,
        device_order=device_order(hosts, cluster.devices_per_host, candidate.tensor),
        predicted=predicted,
    )
