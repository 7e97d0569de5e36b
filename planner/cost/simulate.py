"""The simulated step of one configuration on one cluster, by this trainer and by others'."""

import dataclasses
import pathlib

import numpy as np

from paxtrain.config import Config
from paxtrain.config.axes import more_axes
from paxtrain.model.parameters import of_mean_layer
from planner.cluster.cluster import Cluster, attained
from planner.cost import compute as costs
from planner.cost.candidate import NO_GROUPS, Candidate, host_order
from planner.cost.coded import LOW_RANK, coded
from planner.cost.link_seconds import Fabric, Paths, fabric
from planner.cost.outer import FragmentExchange, exchanges
from planner.cost.step_time import Problem, steps
from planner.pipeline import ideal


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedStep:
    """The predicted step of one configuration on one placement, in seconds.

    Attributes:
        seconds: the whole step.
        gather: float [stages], gathering of the weights before the first row.
        finish: float [stages], when the last data rank of a stage has left its last row.
        reduce: float [stages], reduction of a stage's gradients over data.
        compressed: bool [stages], whether the stage's gradients over data are compressed.
        optimizer: update of the weights.
        hosts: int [data, stages], host of each tensor group.
        exchanges: exchange of each fragment of the weights between groups (outer.every), of which a step has a share;
            () without groups.
        waits: seconds of the step for which it waits for these exchanges, as a mean over the steps of a round: all of
            them, or what a step does not hide of each (outer.overlap).
    """

    seconds: float
    gather: np.ndarray
    finish: np.ndarray
    reduce: np.ndarray
    compressed: np.ndarray
    optimizer: float
    hosts: np.ndarray
    exchanges: tuple[FragmentExchange, ...] = ()
    waits: float = 0.0

    @property
    def exchange(self) -> float:
        """Seconds of all exchanges of a round, if groups wait for them."""
        return sum(x.seconds for x in self.exchanges)


def candidate_of_config(config: Config) -> Candidate:
    """Return a configuration's mesh, batch, pipeline, compression and groups as the simulator takes them."""
    mesh, pipeline, compress = config.mesh, config.pipeline, config.compress
    together = mesh.data // config.groups
    over_data = compress.data.over(together) != "none" and together > 1
    return Candidate(
        data=mesh.data,
        pipe=mesh.pipe,
        tensor=mesh.tensor,
        others=tuple(mesh.sizes[name] for name in more_axes()),
        micro_batch=config.batch.micro_batch,
        micro_batches=config.micro_batches,
        schedule=pipeline.schedule_key,
        counts=config.stage_layers,
        chunks=pipeline.virtual_stages,
        save=pipeline.save,
        scan_layers=pipeline.scan_layers,
        shard=mesh.shard,
        shard_group=mesh.shard_group if mesh.copies > 1 else 0,
        context_form=mesh.context_form,
        sequence_parallel=mesh.sequence_parallel,
        reduce_dtype=mesh.reduce_dtype,
        backward=compress.backward.chosen if mesh.pipe > 1 else "none",
        backward_rank=compress.backward.rank,
        backward_links=_some(config, "backward"),
        forward_links=_some(config, "forward"),
        data_rank=compress.data.rank if over_data else 0,
        coded=coded(compress, config.model.tied_head),
        data_micro_batches=config.rank_micro_batches if config.uneven else (),
        outer=config.outer,
        min_ratio=compress.min_ratio,
    )


def _some(config: Config, place: str) -> tuple[int, ...]:
    """Return the links on which messages of a place are compressed; () if they are on all."""
    found = config.compress.at(place).on(config.links)
    return found if config.mesh.pipe > 1 and len(found) < config.links else ()


def simulate(config: Config, cluster: Cluster | str | pathlib.Path, hosts: np.ndarray | None = None) -> SimulatedStep:
    """Simulate the step of a configuration on a cluster.

    Args:
        config: configuration; its mesh has as many devices as the cluster, or fewer.
        cluster: cluster, or its file as `Cluster.load` takes it; nominal links count with what they reach.
        hosts: int [data, stages], host of each tensor group; None places them in the order of the devices.

    Raises:
        ValueError: the mesh or the placement does not fit the cluster.
        UserError: the cluster's file cannot be read.
    """
    candidate, cluster = candidate_of_config(config), attained(Cluster.of(cluster))
    if candidate.seat > cluster.devices_per_host or cluster.devices_per_host % candidate.seat:
        per_host = cluster.devices_per_host
        raise ValueError(f"mesh.tensor={candidate.tensor} does not divide the {per_host} devices of a host")
    if config.mesh.devices > cluster.devices:
        raise ValueError(f"the mesh has {config.mesh.devices} devices, but the cluster {cluster.devices}")
    shape = candidate.data, candidate.pipe
    placed = host_order(candidate, cluster.devices_per_host)[0] if hosts is None else np.asarray(hosts, int)
    if placed.shape != shape or placed.min() < 0 or placed.max() >= len(cluster.hosts):
        raise ValueError(f"hosts must be an array {shape} of numbers below {len(cluster.hosts)}, got {placed.shape}")
    if np.bincount(placed.ravel()).max() * candidate.seat > cluster.devices_per_host:
        per_host = cluster.devices_per_host
        raise ValueError(f"hosts puts tensor groups of more than the {per_host} devices of a host on one")
    problem = Problem(cluster, config.model, candidate)
    links = problem.links(problem.paths(fabric(cluster), placed[None]))
    step = problem.evaluate(links, problem.kind_of_host[placed][None])
    return SimulatedStep(
        seconds=float(step.total[0]),
        gather=step.gather[0],
        finish=step.finish[0],
        reduce=step.reduce[0],
        compressed=step.compressed[0],
        optimizer=float(step.optimizer[0]),
        hosts=placed,
        exchanges=exchanges(problem, None if links.outer is None else links.outer[0]) if config.outer.every else (),
        waits=0.0 if step.outer is None else float(step.outer[0].sum()) / config.outer.every,
    )


def ideal_step(problem: Problem, fabric: Fabric, hosts: np.ndarray) -> tuple[str, float]:
    """Return a plan's schedule and seconds of a step as other trainers run it.

    They run 1F1B or its interleaved form, send messages uncompressed, and train all data ranks together on equally many
    micro-batches. Ops begin as soon as their messages are there (planner.pipeline.ideal).

    Args:
        problem: plan on its cluster.
        fabric: links of the cluster.
        hosts: int [data, stages], host of each tensor group.
    """
    c = problem.candidate
    schedule, equal = "interleaved_1f1b" if c.chunks > 1 else "1f1b", sum(c.rank_micro_batches) // c.data
    plain = dataclasses.replace(
        c,
        schedule=schedule,
        micro_batches=equal,
        data_micro_batches=(),
        backward="none",
        data_rank=0,
        coded=LOW_RANK,
        outer=NO_GROUPS,
    )
    other = Problem(problem.cluster, problem.model, plain)
    [step] = steps([other], [(other.paths(fabric, hosts[None]), other.kind_of_host[hosts][None])], ideal.pipeline)
    return schedule, float(step.total[0])


def sharded_step(problem: Problem, where: Paths) -> np.ndarray:
    """Return the seconds of a step whose weights are sharded over data (FSDP, ZeRO-3), for each setting of its costs.

    A layer's weights are gathered under the layer before, in F and again in B of every micro-batch, and its gradients
    are reduced under the layers that follow in B (Rajbhandari et al. 2020; Zhao et al. 2023). What is at the ends has
    nothing to lie under. The seconds of the host are not among these.

    Args:
        problem: candidate of one stage, with a layer's costs in each setting.
        where: paths of its placement in each setting.
    """
    c, model = problem.candidate, problem.model

    def cost(name: str) -> np.ndarray:
        return np.array([getattr(one, name) for one in problem.layer])

    latency, turn = where.ring[0][:, 0], (c.data - 1) / c.data * where.ring[1][:, 0]
    parameters = of_mean_layer(model, c.layer_sizes)
    item, reduced = costs.ITEM[model.dtype], costs.ITEM[c.reduce_dtype]
    gather, reduce = latency + parameters * item * turn, latency + parameters * reduced * turn
    forward = gather + model.layers * np.maximum(cost("forward"), gather)
    backward = model.layers * np.maximum(cost("backward"), gather + reduce) + reduce
    tables = problem.embedding_parameters * turn * (2 * item + reduced)  # gathered twice, reduced once
    held = (problem.layer_parameters + problem.embedding_parameters) / c.data
    micro_batch = forward + backward + cost("embedding") + cost("head") + tables
    return c.micro_batches * micro_batch + held * cost("optimizer")
