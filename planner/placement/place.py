"""Placement: on which host each tensor group lies, so that the predicted step is shortest.

The objective is the simulated step time itself (planner.cost.step_time). If placements are few, all are evaluated
except those that symmetry makes equal (planner.placement.exact). Else they are annealed (planner.placement.anneal).
Either comes with a lower bound on the step time of any placement (planner.placement.bounds).
"""

import dataclasses
import math

import numpy as np

from paxtrain.errors import UserError
from planner.cost.link_seconds import Fabric
from planner.cost.step_time import Problem, host_order
from planner.placement import anneal, bounds, exact

Array = np.ndarray

_EXACT = 50_000  # placements, without those that symmetry makes equal, up to which all are evaluated
_GROUPS = 4096  # in all chains: a batch that costs little more than the calls that evaluate it


@dataclasses.dataclass(frozen=True, eq=False)
class Placement:
    """A placement of the tensor groups.

    Attributes:
        hosts: int [D, P].
        seconds: the predicted step.
        bound: seconds below which no placement can be.
        source: "exact", "annealed", "layout" (a plain one, which no move made better) or "host order".
        evaluations: placements that were evaluated for it.
    """

    hosts: Array
    seconds: float
    bound: float
    source: str
    evaluations: int

    @property
    def gap(self) -> float:
        """Share of the bound by which the step is above it: a better placement saves no more."""
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


def slots_per_host(problem: Problem) -> int:
    """Return the number of tensor groups on a host.

    Raises:
        UserError: the mesh does not fill the cluster with whole groups inside hosts.
    """
    c, cluster = problem.candidate, problem.cluster
    if cluster.devices_per_host % c.tensor or c.groups * c.tensor != cluster.devices:
        raise UserError(
            f"a mesh of {c.data} x {c.pipe} x {c.tensor} cannot be placed on {len(cluster.hosts)} hosts of "
            f"{cluster.devices_per_host} devices; it must use all devices, with tensor groups inside hosts"
        )
    return cluster.devices_per_host // c.tensor


def place(
    problem: Problem,
    fabric: Fabric,
    *,
    seed: int = 0,
    start: Array | None = None,
    iterations: int | None = None,
    chains: int | None = None,
    seconds: float = math.inf,
    exactly: bool = True,
) -> Placement:
    """Return the best placement found on these links.

    It is deterministic for a seed unless `seconds` cut it short.

    Args:
        problem: candidate to place, on its cluster.
        fabric: links of the cluster.
        seed: seed of the annealing.
        start: hosts [D, P] to begin with, beside the plain layouts.
        iterations: iterations of annealing; None: 300, or 600 with up to 32 groups.
        chains: chains to anneal at once; None: as many as cost little more than one.
        seconds: limit of wall clock for annealing.
        exactly: evaluate all placements if they are few.

    Raises:
        UserError: the mesh does not fill the cluster with whole groups inside hosts.
    """
    c, slots = problem.candidate, slots_per_host(problem)

    def objective(where: Array) -> Array:
        return problem.step(fabric, where).total

    plain = host_order(c, problem.cluster.devices_per_host)[0]
    plain_seconds = float(objective(plain[None])[0])
    bound = bounds.lower(problem, fabric)
    enough = bound * (1 + bounds.ROUNDING * 2)
    if plain_seconds <= enough:
        return Placement(plain, plain_seconds, bound, "host order", 1)

    def better(where: Array, found: float, bound: float, source: str, evaluations: int) -> Placement:
        if found >= plain_seconds * (1 - bounds.ROUNDING):
            return Placement(plain, plain_seconds, min(bound, plain_seconds), "host order", evaluations)
        return Placement(where, found, bound, source, evaluations)

    if exactly:
        twins = exact.twins(fabric, problem.kind_of_host)
        every = exact.placements(c.data, c.pipe, slots, twins, _EXACT)
        if every is not None:
            where, least = exact.search(objective, every)
            return better(where, least, least, "exact", len(every) + 1)
    rng = np.random.default_rng(seed)
    begin = _starts(problem, fabric, slots, start, rng)
    chains = int(np.clip(_GROUPS // c.groups, 8, 64)) if chains is None else chains
    iterations = iterations or (600 if c.groups <= 32 else 300)
    found = anneal.anneal(objective, begin, slots > 1, rng, chains, iterations, seconds, enough)
    source = "layout" if found.started else "annealed"
    return better(found.hosts, found.value, bound, source, found.evaluations + 1)


def _starts(
    problem: Problem, fabric: Fabric, slots: int, start: Array | None, rng: np.random.Generator
) -> list[anneal.Start]:
    """Return the placements that annealing begins with: plain layouts, and `start` if it is given."""
    c, hosts = problem.candidate, len(problem.cluster.hosts)
    begin = anneal.starts(
        (c.data, c.pipe, slots),
        fabric.per_byte,
        speed=problem.work.sum(axis=1)[problem.kind_of_host],
        load=problem.work[0].reshape(c.chunks, c.pipe).sum(axis=0),
        rng=rng,
    )
    if start is not None:
        begin.append(anneal.Start(start, np.arange(hosts), (1, hosts)))
    return begin
