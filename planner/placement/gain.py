"""The gain of one placement over another, and how sure it is on noisy links."""

import dataclasses
import math

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.place import place

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Gain:
    """The gain of a placement's step over another's: the other's seconds over the placement's, less 1.

    Attributes:
        mean: mean over the samples of the links.
        std: standard deviation over them; nan if there is one sample.
        samples: number of samples.
        held_out: mean and std if the placement is found on half of the samples and the gain is seen on the other half,
            both ways round; nan if there is one sample, or if data ranks have different numbers of micro-batches.
    """

    mean: float
    std: float
    samples: int
    held_out: tuple[float, float]

    @property
    def within_noise(self) -> bool:
        """The gain cannot be told from none: it is less than two deviations, or less than one on samples held out."""
        return self.samples < 2 or self.mean <= 2 * self.std or self.held_out[0] <= self.held_out[1]

    @property
    def words(self) -> str:
        """One sentence on how sure the gain is."""
        if self.samples < 2:
            return "the links were measured once, so its noise is not known"
        if math.isnan(self.held_out[0]):
            return "data ranks differ in micro-batches, so it was not placed anew on halves of the samples"
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
    """Return the gain of a placement over another one on each sample of the links.

    A placement that is optimized on noisy links looks better on them than it is. So if there are two samples or more,
    the cluster is placed anew on each half of them alone, unless data ranks have different numbers of micro-batches.

    Args:
        problem: candidate that is placed.
        cluster: cluster whose links have samples.
        chosen: hosts [D, P] of the placement.
        baseline: hosts [D, P] of the other one.
        seed: seed of the placements on halves.
        iterations: iterations of their annealing, see `place`.
    """

    def gains(where: Array, samples: range) -> list[float]:
        both = np.stack([where, baseline])
        totals = [problem.step(fabric(cluster, sample=r), both).total for r in samples]
        return [float(other / own) - 1 for own, other in totals]

    count = len(cluster.samples)
    seen = gains(chosen, range(count))
    if count == 1 or problem.candidate.data_micro_batches:  # a search places ranks that differ, not `place`
        std = float(np.std(seen, ddof=1)) if count > 1 else math.nan
        return Gain(float(np.mean(seen)), std, count, (math.nan, math.nan))
    held = []
    for half in (0, 1):
        part = dataclasses.replace(cluster, samples=cluster.samples[half::2])
        held += gains(place(problem, fabric(part), seed=seed, iterations=iterations).hosts, range(1 - half, count, 2))
    return Gain(
        float(np.mean(seen)), float(np.std(seen, ddof=1)), count, (float(np.mean(held)), float(np.std(held, ddof=1)))
    )
