"""The step of a published run by the planner's own costs, links and schedules, as another trainer would run it.

Differences from this trainer: ops begin as soon as their messages are there (planner.pipeline.ideal), attention may
keep its scores in memory, tensor ranks may send a part each of a message that they all hold, gradients of micro-batches
may be added up by passes of their own, hosts may wait for each kernel, and weights may be sharded over data (FSDP),
gathered and reduced under the layers. A host has as many flows at full speed as tensor groups have ranks.
"""

import dataclasses

import numpy as np

from experiments.published.runs import PER_HOST, PublishedRun
from paxtrain.config import MeshConfig
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.cluster import ASSUMED, ATTAINED, Cluster
from planner.cluster.device_sheets import SHEETS
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import LinkSeconds, Paths, fabric, paths
from planner.cost.simulate import sharded_step
from planner.cost.step_time import Problem
from planner.fit.applied import profile, run_by
from planner.planning.settings import Setting, with_setting

_LATENCY = 2e-6, 1.2e-5  # seconds inside a host and between hosts, typical of NCCL
# Bytes/s, each way, between two devices of a host: NVLink's rate by its data sheet.
_INSIDE = {(8, 0): 300e9, (9, 0): 450e9}
_REACHES = {"a100-80gb": "a100", "h100": "h100", "h100-500w": "limited"}
# Names of planner/runs/trainers.py; nothing is known of Meta's.
_TRAINERS = {"Megatron-LM": "megatron-lm", "Megatron-DeepSpeed": "megatron-lm", "torchtitan": "torchtitan", "Meta": ""}
_SAVES = {"none": "residuals", "full": "layers"}


@dataclasses.dataclass(frozen=True)
class PublishedConstants:
    """Shares of data sheets that published runs reach.

    Attributes:
        a100: DeviceSheet.reach of A100s.
        h100: DeviceSheet.reach of H100s.
        limited: the same of H100s with a limit of 500 W.
        memory: Shares.memory.
        inside: share of the rate between devices of a host.
        between: share of the rate of a host's network.
        waiting: seconds that a layer's F takes longer if the host waits for each of its kernels.
    """

    a100: float = SHEETS["a100-80gb"].reach
    h100: float = SHEETS["h100"].reach
    limited: float = 0.50
    memory: float = ASSUMED.memory
    inside: float = ATTAINED["inside"]
    between: float = ATTAINED["between"]
    waiting: float = 1.0e-3


def trainer_of(run: PublishedRun) -> str:
    """Return who made a run, one of planner/runs/trainers.py."""
    return _TRAINERS[run.columns["trainer"]]


def cluster_of(run: PublishedRun, constants: PublishedConstants) -> Cluster:
    """Return the cluster of a run.

    Args:
        run: published run.
        constants: shares of data sheets.
    """
    count, same = run.devices // PER_HOST, np.eye(run.devices // PER_HOST, dtype=bool)
    inside = _INSIDE[run.sheet.capability] * constants.inside
    between = run.host_bytes / run.tensor * constants.between
    found = Cluster(
        name=run.name,
        source=run.columns["source"],
        hosts=tuple(f"n{i}" for i in range(count)),
        devices_per_host=PER_HOST,
        kinds=(run.device,) * count,
        memory=np.full(count, float(run.sheet.memory)),
        nics=run.tensor,
        alpha=np.where(same, *_LATENCY),
        samples=np.where(same, inside, between)[None],
        sheets={run.device: dataclasses.replace(run.sheet, reach=getattr(constants, _REACHES[run.device]))},
    )
    trainer = trainer_of(run)
    found = run_by(found, profile(trainer) | {"memory": constants.memory}, trainer)
    return dataclasses.replace(found, shares=dataclasses.replace(found.shares, stored_scores=not run.flash))


def _candidate(run: PublishedRun) -> Candidate:
    return Candidate(
        data=run.data,
        pipe=run.pipe,
        tensor=run.tensor,
        micro_batch=run.micro_batch,
        micro_batches=run.micro_batches,
        schedule="interleaved_1f1b" if run.chunks > 1 else "1f1b",
        counts=run.stage_layers,
        chunks=run.chunks,
        save=_SAVES.get(run.recompute, run.recompute),
        shard=MeshConfig.of_zero1(run.sharding == "zero1"),
        sequence_parallel=run.sequence_parallel,
        reduce_dtype="bfloat16" if run.sharding == "none" else "float32",
    )


def _links(run: PublishedRun, problem: Problem, where: Paths) -> LinkSeconds:
    """Return the seconds of the messages; those that tensor ranks split are a T-th."""
    links, where = problem.links(where), problem.as_run(where)
    if not run.split_messages or run.sequence_parallel:
        return links
    part = problem.message / run.tensor
    there, back = (path[0] + part * path[1] for path in (where.forward, where.backward))
    return dataclasses.replace(links, activation=there, gradient=back)


def _slow_down(run: PublishedRun, problem: Problem, constants: PublishedConstants) -> None:
    """Add to F and B what other trainers do besides: passes that add up gradients, and waits for kernels.

    B has twice as many kernels as F, and those of F once more if it recomputes all of it.
    """
    layers = np.array(run.stage_layers, float)
    parameters = layers * of_mean_layer(run.model, problem.candidate.layer_sizes)
    parameters[[0, -1]] += problem.embedding_parameters
    passes = run.accumulate * problem.pass_per_byte[:, None] * parameters
    waits = run.waits * constants.waiting * layers
    problem.forward = problem.forward + waits
    problem.backward = problem.backward + passes + (3 if run.recompute == "full" else 2) * waits


def predicted(run: PublishedRun, constants: PublishedConstants | None = None, setting: Setting | None = None) -> float:
    """Return the predicted seconds of a step.

    Args:
        run: published run.
        constants: shares of data sheets; None: those that ship.
        setting: factors on constants of the cluster and the trainer; None: none.
    """
    constants = constants or PublishedConstants()
    cluster = with_setting(cluster_of(run, constants), setting or {})
    problem = Problem(cluster, run.model, _candidate(run))
    # Ranks count tensor fastest, then data, then pipe, and fill host after host.
    groups = np.arange(run.data * run.pipe).reshape(run.pipe, run.data).T
    hosts = groups[None] // (PER_HOST // run.tensor)
    where = paths(fabric(cluster), hosts, run.tensor)
    if run.sharding == "fsdp":
        return float(sharded_step(problem, problem.as_run(where))[0]) + cluster.host_seconds
    if not run.overlap:
        problem.hides = np.zeros_like(problem.hides)
    _slow_down(run, problem, constants)
    links, kinds = _links(run, problem, where), problem.kind_of_host[hosts]
    return float(problem.evaluate(links, kinds).total[0])
