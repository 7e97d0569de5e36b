"""Good placements of each mesh: those that its candidates are simulated on before any of them is placed.

A pool begins with the plain layouts of the devices in order, and with those of the starts of annealing that are best
for hops, for rings, or for mixtures of both. Placements that are found for a candidate join the pool of its mesh.
"""

import dataclasses

import numpy as np

from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import Fabric, Paths
from planner.cost.step_time import Problem
from planner.placement import anneal

Array = np.ndarray

_MIXTURES = (0.0, 0.15, 0.5, 0.85, 1.0)  # weights of rings beside hops
_GROUPS = 1024  # tensor groups from which on the pool begins with fewer placements
_ORDERS = 4  # orders of kinds over the stages that the pool begins with
_SEED = 0


@dataclasses.dataclass(eq=False)
class Pool:
    """Placements of one mesh.

    Attributes:
        hosts: int [K, D, P].
        paths: their paths.
        plain: how many of the first are plain layouts of the devices in order.
    """

    hosts: Array
    paths: Paths
    plain: int

    @property
    def placements(self) -> tuple[Array, Paths]:
        """The placements and their paths."""
        return self.hosts, self.paths


def plain_layouts(candidate: Candidate, per_host: int) -> Array:
    """Return layouts [1 or 2, D, P] of devices in order: pipeline neighbors side by side, then data ranks."""
    hosts = host_order(candidate, per_host)
    if per_host == candidate.seat:
        return hosts
    groups = np.arange(candidate.groups).reshape(1, candidate.pipe, candidate.data)
    return np.concatenate([hosts, np.swapaxes(groups, 1, 2) // (per_host // candidate.seat)])


def _key(c: Candidate) -> tuple[int, ...]:
    """Return what candidates share that are simulated on the same paths."""
    return *c.sizes.values(), c.shard_group


class Pools:
    """The pools of all meshes on a cluster.

    Attributes:
        found: placements [D, P] that joined the pools, by the sizes of their mesh and the data ranks of a group.
    """

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self.found: dict[tuple[int, ...], list[Array]] = {}
        self._pools: dict[tuple[int, ...], Pool] = {}

    def of(self, problem: Problem) -> Pool:
        """Return the pool of a problem's mesh."""
        c = problem.candidate
        key = _key(c)
        if key not in self._pools:
            plain = plain_layouts(c, problem.cluster.devices_per_host)
            # Hosts of one kind side by side, so that data ranks lie on one kind as far as they can.
            by_kind = np.argsort(problem.kind_of_host, kind="stable")[plain]
            starts = _without(np.concatenate([by_kind, self._starts(problem)]), plain)
            hosts = np.concatenate([plain, starts, *(found[None] for found in self.found.get(key, ()))])
            self._pools[key] = Pool(hosts, problem.paths(self.fabric, hosts), len(plain))
        return self._pools[key]

    def add(self, problem: Problem, hosts: Array) -> bool:
        """Add a placement [D, P] to the pool of a problem's mesh; return whether it is a new one."""
        pool = self.of(problem)
        if not len(_without(hosts[None], pool.hosts)):
            return False
        self.found.setdefault(_key(problem.candidate), []).append(hosts)
        pool.hosts = np.concatenate([pool.hosts, hosts[None]])
        pool.paths = pool.paths.join(problem.paths(self.fabric, hosts[None]))
        return True

    def _starts(self, problem: Problem) -> Array:
        """Return the starts of annealing that are best for mixtures of hops and rings, [count, D, P]."""
        c, cluster, kinds = problem.candidate, problem.cluster, problem.kind_of_host
        several = len(problem.layer) > 1
        if len(cluster.hosts) == 1 or (_alike(self.fabric) and not several):
            return np.empty((0, c.data, c.pipe), int)
        begin = anneal.starts(
            (c.data, c.pipe, cluster.devices_per_host // c.seat),
            self.fabric.slowness,
            speed=problem.work.sum(axis=1)[kinds],
            load=np.arange(c.pipe, 0, -1, dtype=float),
            rng=np.random.default_rng(_SEED),
            most_tours=4 if c.groups < _GROUPS else 1,
        )
        hosts = np.array([start.order[start.layout] for start in begin])
        if several:
            hosts = np.concatenate([hosts, hosts[:, :, ::-1]])
        where = problem.paths(self.fabric, hosts)
        hops = (where.forward[1][:, :, :-1].sum(2) + where.backward[1][:, :, 1:].sum(2)).max(1)
        ring = where.ring[1].max(1)
        if where.outer:  # of which a step has a share
            ring = ring + where.outer[1].max(1) / c.outer.every
        costs = [x / x.min() if x.min() > 0 else x for x in (hops, ring)]
        mixtures = _MIXTURES if c.groups < _GROUPS else _MIXTURES[2:3]
        picked = [int(np.argmin((1 - w) * costs[0] + w * costs[1])) for w in mixtures]
        if several:
            picked += _by_kind(kinds[hosts], costs[0] + costs[1])
        return hosts[sorted(set(picked))]


def _by_kind(on: Array, cost: Array) -> list[int]:
    """Return the placements whose stages hold one kind of device as far as they can, the best of each order of kinds.

    Args:
        on: [count, D, P] kind of device under each group.
        cost: [count] cost of each placement.
    """
    mixed = (on.max(1) > on.min(1)).sum(1)
    best: dict[bytes, int] = {}
    for i in sorted(np.flatnonzero(mixed == mixed.min()).tolist(), key=lambda i: cost[i]):
        best.setdefault(np.sort(on[i], axis=0).tobytes(), i)
    return list(best.values())[:_ORDERS]


def _without(hosts: Array, known: Array) -> Array:
    """Return the placements [count, D, P] that are not among those known, each once."""
    seen, left = {where.tobytes() for where in known.astype(int)}, []
    for where in hosts.astype(int):
        if where.tobytes() not in seen:
            seen.add(where.tobytes())
            left.append(where)
    return np.array(left, int).reshape(-1, *known.shape[1:])


def _alike(fabric: Fabric) -> bool:
    """Return whether all links between hosts are as fast as each other, to within a tenth of a percent."""
    apart = fabric.slowness[~np.eye(len(fabric.slowness), dtype=bool)]
    return bool(np.ptp(apart) <= 1e-3 * apart.max())
