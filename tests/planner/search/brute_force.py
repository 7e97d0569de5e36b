"""Every plan of a small instance, tried: an independent judge of the search, with which it shares the cost model alone.

Instances have 6 to 8 hosts of one GPU. All meshes, micro-batches, schedules, all splits of the layers into stages of
one layer or more, and all placements are simulated.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np

from paxtrain.config import ModelConfig
from planner.cluster.cluster import Cluster
from planner.cluster.trunks import Trunks
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.search.budget import Budget
from planner.search.search import Options, Search
from planner.search.space import Choices

KINDS = ("racks", "slow NIC", "asymmetric", "mixed kinds", "spread")
_TOGETHER = 200_000  # pipelines that are simulated in one call


@dataclasses.dataclass(frozen=True)
class Instance:
    """A model and a batch on a cluster, and the choices that a plan has."""

    name: str
    cluster: Cluster
    model: ModelConfig
    batch: int
    choices: Choices

    def search(self, **narrowed: tuple) -> Search:
        """Return the search for its best plan, whose choices may be narrowed."""
        choices = dataclasses.replace(self.choices, **narrowed)
        return Search(
            self.cluster, self.model, self.batch, choices, Budget(margin=False, outer=choices.outer), Options()
        )


def _factors(rng: np.random.Generator, kind: str, hosts: int) -> np.ndarray:
    """Return by how much each link is slower than the fastest could be, [hosts, hosts]."""
    noise = np.exp(rng.normal(0, 0.05, (hosts, hosts)))
    if kind == "racks":
        rack = rng.permutation(np.arange(hosts) % int(rng.integers(2, 4)))
        return noise * np.where(rack[:, None] == rack, 1.0, np.exp(rng.uniform(np.log(2), np.log(30))))
    if kind == "slow NIC":
        host, slower = np.ones(hosts), np.exp(rng.uniform(np.log(2), np.log(30)))
        host[rng.integers(hosts)] = slower
        return noise * np.maximum(host[:, None], host)
    if kind == "asymmetric":
        leave, enter = np.exp(rng.normal(0, rng.uniform(0.2, 1.2), (2, hosts)))
        return noise * np.maximum(leave[:, None], enter)
    if kind == "mixed kinds":
        return noise * np.exp(rng.normal(0, 0.3, (hosts, hosts)))
    return np.exp(rng.normal(0, np.exp(rng.uniform(np.log(0.1), np.log(3))), (hosts, hosts)))


def instance(seed: int) -> Instance:
    """Return the instance of a seed; the kinds of clusters take turns."""
    rng = np.random.default_rng(seed)
    kind, hosts = KINDS[seed % len(KINDS)], int(rng.choice([6, 6, 6, 7, 8]))
    same = np.eye(hosts, dtype=bool)
    bandwidth = np.exp(rng.uniform(np.log(1e9), np.log(5e10))) / _factors(rng, kind, hosts)
    devices = ["a100-80gb"] * hosts
    if kind == "mixed kinds":
        devices = rng.permutation(["a100-80gb", "h100", "v100"][: rng.integers(2, 4)] * hosts)[:hosts].tolist()
    cluster = Cluster.parse(
        {
            "version": 1,
            "hosts": hosts,
            "devices_per_host": 1,
            "device": devices,
            "links": {
                "alpha": np.where(same, 3e-6, 1e-5).tolist(),
                "bandwidth": np.where(same, 3e11, bandwidth).tolist(),
            },
        }
    )
    cluster = dataclasses.replace(cluster, memory=np.full(hosts, 1e12))  # all plans fit
    hidden = int(rng.choice([512, 1024, 2048]))
    layers = {6: 8, 7: 8, 8: 5}[hosts]
    model = ModelConfig(
        vocab_size=int(rng.choice([8000, 50257])), layers=layers, hidden=hidden, heads=16, sequence=1024
    )
    batch = hosts * int(rng.choice([2, 4, 8]))
    sizes = [size for size in range(1, batch + 1) if batch % size == 0 and size <= 8]
    choices = Choices(
        micro_batch=tuple(sorted(rng.choice(sizes, min(3, len(sizes)), replace=False).tolist())),
        schedules=(("1f1b",), ("eager_1f1b",), ("eager_1f1b", "gpipe"), ("gpipe",))[rng.integers(4)],
        saves=(("dots",), ("residuals",), ("layer_inputs",))[rng.integers(3)],
        shards=(("optimizer",), ("none",), ("optimizer", "none"))[rng.integers(3)],
        backward=(),
        data_ranks=(),
    )
    if not any(batch // hosts % size == 0 for size in choices.micro_batch):
        choices = dataclasses.replace(choices, micro_batch=(1, *choices.micro_batch[:2]))
    return Instance(f"{seed}: {kind}, {hosts} hosts", cluster, model, batch, choices)


def behind_trunks(some: Instance, seed: int) -> Instance:
    """Return an instance whose hosts share uplinks: those of two sites, each about as fast as a single link."""
    rng, hosts = np.random.default_rng([11, seed]), len(some.cluster.hosts)
    site = rng.permutation(np.arange(hosts) % 2)
    links = some.cluster.bandwidth[~np.eye(hosts, dtype=bool)]
    rates = np.median(links) * np.exp(rng.uniform(np.log(0.1), np.log(2), 2))
    trunks = Trunks(np.stack([site == 0, site == 1]), rates)
    cluster = dataclasses.replace(some.cluster, trunks=trunks)
    return dataclasses.replace(some, name=f"{some.name}, two sites", cluster=cluster)


def candidates(some: Instance) -> Iterator[Candidate]:
    """Yield all plans without their placements; 1f1b comes with all numbers of micro-batches in flight."""
    hosts, choices, outer = len(some.cluster.hosts), some.choices, some.choices.outer
    for pipe in (p for p in range(1, hosts + 1) if hosts % p == 0 and p <= some.model.layers):
        data = hosts // pipe
        if outer.every and (data == 1 or data % choices.apart(data)):
            continue
        together = data // choices.apart(data)
        for size, save, shard in itertools.product(choices.micro_batch, choices.saves, choices.shards):
            if some.batch % (data * size) or (together == 1 and shard != choices.shards[0]):
                continue
            names = list(choices.schedules if pipe > 1 else choices.schedules[:1])
            names += [f"1f1b:{most}" for most in range(pipe + 1, 2 * pipe - 1) if "1f1b" in names]
            for name in names:
                for cuts in itertools.combinations(range(1, some.model.layers), pipe - 1):
                    counts = tuple(np.diff([0, *cuts, some.model.layers]).tolist())
                    count = some.batch // data // size
                    how = {"save": save, "shard": shard, "outer": outer}
                    yield Candidate(data, pipe, 1, size, count, name, counts, **how)


def placements(data: int, pipe: int) -> np.ndarray:
    """Return all placements [count, D, P]; a data ring may begin anywhere, so host 0 is in its first rank."""
    hosts = data * pipe
    first = range(pipe)  # places of host 0
    every = []
    for at in first:
        others = np.array(list(itertools.permutations(range(1, hosts))), np.int8).reshape(-1, hosts - 1)
        every.append(np.insert(others, at, 0, axis=1))
    return np.concatenate(every).reshape(-1, data, pipe)


def best(some: Instance) -> tuple[float, Candidate, np.ndarray]:
    """Return the least predicted step in seconds, and the plan and the placement that have it."""
    links, found = fabric(some.cluster), (np.inf, None, None)
    for _, group in itertools.groupby(candidates(some), key=lambda c: (c.data, c.pipe)):
        members = list(group)
        every = placements(members[0].data, members[0].pipe)
        size = max(1, _TOGETHER // members[0].data)
        for start in range(0, len(every), size):
            hosts = every[start : start + size]
            where = Problem(some.cluster, some.model, members[0]).paths(links, hosts)
            for c in members:
                problem = Problem(some.cluster, some.model, c)
                total = problem.evaluate(problem.links(where), problem.kind_of_host[hosts]).total
                at = int(np.argmin(total))
                if total[at] < found[0]:
                    found = float(total[at]), c, hosts[at]
    return found


def regret(some: Instance) -> float:
    """Return by which share the search's plan takes longer than the best plan; below 0 only by rounding."""
    return some.search().run().ranked[0].seconds / best(some)[0] - 1
