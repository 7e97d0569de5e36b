"""Placement: on which host each tensor group lies, so that the predicted step is shortest.

The objective is the simulated step time itself (planner.cost.step_time). Where placements are few, all are evaluated
but for
symmetries (planner.placement.exact), else they are annealed (planner.placement.anneal). With either comes a bound
(planner.placement.bounds) below
which no placement can be. The rules of Pipette and AMP are here to be compared with.
"""

import dataclasses
import math

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from planner.cost import closed_forms
from planner.cost.links import Fabric, fabric
from planner.cost.step_time import MASTER, Problem, host_order
from planner.placement import anneal, bounds, exact

Array = np.ndarray

_EXACT = 50_000  # placements, but for symmetries, up to which all are evaluated
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
        """By how much of the bound the step is above it, at most what a better placement could save."""
        return self.seconds / self.bound - 1 if self.bound > 0 else math.inf


def slots_per_host(problem: Problem) -> int:
    """Tensor groups of a host.

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
    """The best placement found on these links.

    Deterministic for a seed unless `seconds` cut it short.

    Args:
        start: hosts [D, P] to begin with, beside the plain layouts.
        iterations: of annealing; None: 300, or 600 with up to 32 groups. chains: annealed at once; None: as many as
            cost little more than one.
        seconds: of wall clock for annealing, at most.
        exactly: evaluate all placements where they are few.

    Raises:
        UserError: the mesh does not fill the cluster with whole groups inside hosts.
    """
    slots, c, hosts = slots_per_host(problem), problem.candidate, len(problem.cluster.hosts)
    objective = lambda where: problem.step(fabric, where).total  # noqa: E731
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
            where, found = exact.search(objective, every)
            return better(where, found, found, "exact", len(every) + 1)
    rng = np.random.default_rng(seed)
    work = problem.work[0]
    begin = anneal.starts(
        (c.data, c.pipe, slots),
        fabric.per_byte,
        speed=problem.work.sum(axis=1)[problem.kind_of_host],
        load=work.reshape(c.chunks, c.pipe).sum(axis=0),
        rng=rng,
    )
    if start is not None:
        begin.append(anneal.Start(start, np.arange(hosts), (1, hosts)))
    if chains is None:
        chains = int(np.clip(_GROUPS // c.groups, 8, 64))
    iterations = iterations or (600 if c.groups <= 32 else 300)
    found = anneal.anneal(objective, begin, slots > 1, rng, chains, iterations, seconds, enough)
    source = "layout" if found.started else "annealed"
    return better(found.hosts, found.value, bound, source, found.evaluations + 1)


# --- Gains ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Gain:
    """By how much a placement's step is shorter than another's: the other's time over its own, less 1.

    Attributes:
        mean, std: over the samples of the links; std is nan where there is one.
        samples: how many.
        held_out: mean and std if half of the samples is placed on and the gain is seen on the other half, both ways
            round; nan where there is one sample.
    """

    mean: float
    std: float
    samples: int
    held_out: tuple[float, float]

    @property
    def within_noise(self) -> bool:
        """It cannot be told from none: less than two deviations, or than one where samples were held out."""
        return self.samples < 2 or self.mean <= 2 * self.std or self.held_out[0] <= self.held_out[1]

    @property
    def words(self) -> str:
        """One sentence on how sure it is."""
        if self.samples < 2:
            return "the links were measured once, so its noise is not known"
        mean, std = (100 * x for x in self.held_out)
        return (
            f"placed on half of the {self.samples} samples and seen on the other half it is {mean:.2f} ± {std:.2f}%, "
            f"so it is {'within the noise' if self.within_noise else 'more than the noise'}"
        )


def gain(
    problem: Problem,
    cluster: Cluster,
    chosen: Array,
    baseline: Array,
    *,
    seed: int = 0,
    iterations: int | None = None,
) -> Gain:
    """Return the gain of a placement over another one on each sample of the links; both hosts [D, P].

    A placement that is optimized on noisy links looks better on them than it is. So where there are two samples or
    more, the cluster is placed anew on each half of them alone.

    Args:
        seed: of the placements on halves. iterations: of their annealing, as place takes them.
    """

    def gains(where: Array, samples: range) -> list[float]:
        both = np.stack([where, baseline])
        totals = [problem.step(fabric(cluster, sample=r), both).total for r in samples]
        return [float(other / own) - 1 for own, other in totals]

    count = len(cluster.samples)
    seen = gains(chosen, range(count))
    if count == 1:
        return Gain(seen[0], math.nan, 1, (math.nan, math.nan))
    held = []
    for half in (0, 1):
        part = dataclasses.replace(cluster, samples=cluster.samples[half::2])
        held += gains(place(problem, fabric(part), seed=seed, iterations=iterations).hosts, range(1 - half, count, 2))
    return Gain(
        float(np.mean(seen)), float(np.std(seen, ddof=1)), count, (float(np.mean(held)), float(np.std(held, ddof=1)))
    )


# --- The rules of others ----------------------------------------------------------------------------------------------


def amp_rule(problem: Problem, seed: int = 0) -> Array:
    """AMP's placement, hosts [D, P]: devices in host order, tensor ranks fastest, then data, then pipe.

    That is its released code's default, and DeepSpeed's and Megatron's order. What it measures of links chooses the
    mesh and the split of layers, not hosts.

    Args:
        seed: not used; rules are called alike.
    """
    c = problem.candidate
    return (np.arange(c.groups) // slots_per_host(problem)).reshape(c.pipe, c.data).T


def pipette_rule(problem: Problem, seed: int = 0, chains: int = 16, iterations: int = 400) -> Array:
    """Pipette's placement, hosts [D, P]: whole nodes in AMP's layout, permuted to minimize its released objective.

        P + D    P = max over pipelines of the sum over hops of 2 * bytes_activation / bandwidth, paid once
                 D = all-reduces of the first stage's gradients, embedding included, over nodes and inside them

    on the first sample of the links, without latency and NIC sharing. Its published layout wants a node's slots to
    divide D; where they do not, the same order is cut into nodes.
    """
    c, cluster = problem.candidate, problem.cluster
    layout = amp_rule(problem)
    per_byte = 1 / cluster.samples[0]
    ring = np.unique(layout[:, 0], return_index=True)[1]  # a data rank on each node of the first stage's ring
    inner = -(-c.data // len(ring))
    size = (problem.layer_parameters + problem.embedding_parameters) * MASTER

    def objective(hosts: Array) -> Array:
        pipelines = 2 * problem.message * per_byte[hosts[:, :, :-1], hosts[:, :, 1:]].sum(axis=2)
        nodes = hosts[:, ring, 0]
        between = per_byte[nodes, np.roll(nodes, -1, axis=1)].max(axis=1)
        inside = per_byte[nodes, nodes].max(axis=1)
        over_data = closed_forms.ring(size, len(ring), 1 / between) + closed_forms.ring(size, inner, 1 / inside)
        return pipelines.max(axis=1) + over_data

    rng, hosts = np.random.default_rng(seed), len(cluster.hosts)
    grid = (c.pipe, len(ring)) if c.pipe * len(ring) == hosts else (1, hosts)
    begin = [anneal.Start(layout, rng.permutation(hosts), grid) for _ in range(chains)]
    return anneal.anneal(objective, begin, False, rng, chains, iterations).hosts
