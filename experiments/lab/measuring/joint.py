"""The planner's joint choice of placement, schedule and compression beside each of them alone, on two racks.

What a run without a planner would do is the baseline: 1F1B over hosts in order, nothing compressed. Each single choice
is the planner's, too: of everything else it may choose nothing.
"""

import dataclasses

import numpy as np

from experiments.hosts.scenario import Scenario
from experiments.lab import models
from experiments.lab.laboratory import Bench, Lab, summary
from experiments.lab.models import Split
from experiments.lab.records import Records
from planner.cluster.cluster import Cluster
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.place import place
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices

RANK = 8
BACKWARD = ("none", "epilogue", "all")
COMPRESSED = (
    ("backward.messages", "all"),
    ("backward.rank", RANK),
    ("data.stages", "all"),
    ("data.rank", RANK),
    ("data.start", 0.0),
)


def base(hosts: int, devices_per_host: int = 1) -> Split:
    """Return the plan of a run without a planner: tensor groups fill hosts, two data ranks of eight micro-batches."""
    data = 2 if hosts > 2 and hosts % 2 == 0 else 1
    pipe = hosts // data
    return Split((data, pipe, devices_per_host), "1f1b", global_batch=32 * data)


BASE = base(8)


def _split(base: Split, candidate: Candidate, compressed: np.ndarray) -> Split:
    """Return the candidate as a split of the lab."""
    c = candidate
    stages = ",".join(map(str, np.flatnonzero(compressed)))
    compress = dict(COMPRESSED) | {"backward.messages": c.backward, "data.stages": stages or "none"}
    dense = c.backward == "none" and not stages
    return dataclasses.replace(
        base,
        mesh=(c.data, c.pipe, c.tensor),
        schedule=c.schedule,
        chunks=c.chunks,
        micro_batch=c.micro_batch,
        shard=c.shard,
        compress=() if dense else tuple(compress.items()),
    )


def search(base: Split, cluster: Cluster, seed: int) -> tuple[Split, np.ndarray, float]:
    """Return the planner's choice among all candidates: the split, its hosts [D, P], and its predicted seconds."""
    config = base.config
    choices = Choices(
        tensor=(base.mesh[2],),
        micro_batch=(base.micro_batch,),
        saves=(models.SAVE,),
        shards=("optimizer",),
        backward=BACKWARD[1:],
        backward_ranks=(RANK,),
        data_ranks=(RANK,),
    )
    searched = Search(
        cluster, config.model, base.global_batch, choices, Budget(0.9, "lazy", "auto"), Options(uneven=False, seed=seed)
    )
    found = searched.run().ranked[0]
    problem = Problem(cluster, config.model, found.candidate)
    step = problem.step(fabric(cluster), found.placement.hosts[None])
    return _split(base, found.candidate, step.compressed[0]), found.placement.hosts, found.seconds


def _compressed(base: Split, cluster: Cluster, order: np.ndarray) -> Split:
    """Return the kinds of compression that the planner predicts to be the quickest on these hosts."""
    model, links, found = base.config.model, fabric(cluster), []
    for backward in BACKWARD:
        for data_rank in (0, RANK):
            kind = {"backward": backward, "backward_rank": RANK, "data_rank": data_rank}
            candidate = dataclasses.replace(base.candidate, **kind)
            step = Problem(cluster, model, candidate).step(links, order[None])
            found.append((float(step.total[0]), candidate, step.compressed[0]))
    _, candidate, stages = min(found, key=lambda each: each[0])
    return _split(base, candidate, stages)


def choices(base: Split, cluster: Cluster, seed: int) -> dict[str, tuple[Split, np.ndarray, float]]:
    """Return each way to choose: the split, the hosts of its groups, and the predicted seconds."""
    links, model = fabric(cluster), base.config.model

    def seconds(split: Split, hosts: np.ndarray) -> float:
        return float(Problem(cluster, model, split.candidate).step(links, hosts[None]).total[0])

    order = host_order(base.candidate, cluster.devices_per_host)[0]
    placed = place(Problem(cluster, model, base.candidate), links, seed=seed).hosts
    schedules = [dataclasses.replace(base, schedule=name) for name in ("eager_1f1b", "gpipe", "1f1b")]
    found = {
        "nothing": (base, order),
        "placement alone": (base, placed),
        "schedule alone": (min(schedules, key=lambda split: seconds(split, order)), order),
        "compression alone": (_compressed(base, cluster, order), order),
    }
    singly = {what: (*chosen, seconds(*chosen)) for what, chosen in found.items()}
    return singly | {"joint": search(base, cluster, seed)}


def measure(lab: Lab, bench: Bench, records: Records, cluster: Cluster, scene: Scenario) -> None:
    """Compile the choices and time all of them in turn."""
    if "done" in records:
        return
    chosen = choices(BASE, cluster, lab.seed)
    bench.compile([split for split, _, _ in chosen.values()])
    measured: dict[str, list[float]] = {what: [] for what in chosen}
    for _ in range(lab.repeats):
        for what, (split, hosts, _) in chosen.items():
            bench.shape(scene.moved(hosts.ravel()))
            measured[what] += bench.time([split.name], 1)[split.name]
    wires = bench.wires([split.name for split, _, _ in chosen.values()])
    for (what, (split, hosts, predicted)), wire in zip(chosen.items(), wires):
        records.add(
            what,
            what=what,
            plan=split.name,
            hosts=hosts.tolist(),
            predicted=predicted,
            seconds=measured[what],
            wire=wire,
        )
        lab.say(f"{what}: {summary(measured[what])['median']:.3f} s, predicted {predicted:.3f} s ({split.name})")
    records.add("done")
