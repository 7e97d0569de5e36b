"""The certainty of predicted steps: intervals of 80%, and the probabilities that one plan is quicker than another.

Constants are known to within their deviations, some only together. Plans are priced under draws of all of them at once,
the same for all plans. So what plans owe to a constant alike is no reason to doubt which one is quicker. What is left
is the model's own error. Errors of plans that have a layer's cost, a mesh or a schedule in common have that part of it
in common, too.

References:
    Stratified draws: McKay, Beckman and Conover 1979 (Latin hypercubes).
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from statistics import NormalDist

import numpy as np

from planner.cluster.cluster import PAXTRAIN, Cluster
from planner.cluster.device_sheets import REACH
from planner.cost.candidate import Candidate
from planner.fit import layouts, memory, stalls
from planner.fit.constants import CONSTANTS
from planner.memory.margin import chance, margin
from planner.planning.settings import COMPUTE, LINKS, PlanSettings, PricedPlan
from planner.report.contents import Outlook
from planner.runs.trainers import TRAINERS
from planner.search.search import Search
from planner.search.tried import Found, handicap

Array = np.ndarray

_NORMAL = NormalDist()
_SURE = 0.8  # probability of an interval
_HALVINGS = 30
# Draws of the constants, and different ones of those of links among them; of many devices, whose paths take their time.
_DRAWS, _FEW_DRAWS, _MANY = (64, 8), (16, 2), 4096
# Standard deviations of logarithms. Those of devices and links are what is left of 15% once half of the published runs
# of docs/accuracy.md are fitted; those of profiles are guesses.
_MATMUL, _UNMEASURED, _MEMORY = 0.05, 0.15, 0.11
_EFFICIENCY = {"reached": 0.15, "measured": 0.03}
_LATENCY = {"reached": 1.0, "measured": 0.2}
_PROFILED = 0.03
_LEAST = 1e-9  # deviation in place of none
# This trainer's constants: no run of it on several GPUs has been measured.
_OWN = {"layer_launch": 0.5, "attention": 0.3, "backward": 0.05, "head": 0.3, "optimizer_bytes": 0.3}
_OWN |= {"hop_ratio": 0.2, "data_ratio": 0.3, "tied_ratio": 0.3}
# The model's own error by what plans have in common: published steps of one source differ by 4% from their predictions,
# layouts of BLOOM with equal meshes by 1%.
_COMMON: tuple[tuple[Callable[[Candidate], object], float], ...] = (
    (lambda c: (c.layer_sizes, c.micro_batch, c.sequence_parallel), 0.03),
    (lambda c: tuple(c.sizes.values()), 0.02),
    (lambda c: (c.schedule, c.chunks), 0.015),
    (lambda c: (c.save, c.shard, c.backward, c.data_rank), 0.012),
    (lambda c: (c.counts, c.data_micro_batches), 0.01),
)


def deviations(cluster: Cluster) -> dict[str, float]:
    """Return the standard deviation of the logarithm of each constant that plans on a cluster depend on."""
    found: dict[str, float] = {}
    for name, link in (("intra", "inside"), ("inter", "between")):
        how = "reached" if link in cluster.reached else "measured"
        found |= {f"{name}_latency": _LATENCY[how], f"{name}_efficiency": _EFFICIENCY[how]}
    if len(cluster.hosts) == 1:
        del found["inter_latency"], found["inter_efficiency"]
    if {row["kind"] for row in cluster.compute} >= set(cluster.kinds):
        found[COMPUTE] = _PROFILED
        devices = {}
    else:
        sheets = [cluster.sheet(kind) for kind in set(cluster.kinds)]
        known = all(one is not None and REACH.get(one.capability) == one.reach for one in sheets)
        devices = {"matmul": _MATMUL if known else _UNMEASURED, "memory": _MEMORY}
    by = cluster.execution.trainer
    if by == PAXTRAIN.trainer:
        of_trainer: Mapping[str, float] = _OWN
    else:
        of_trainer = {c.name: c.spread for c in CONSTANTS if c.owner == "trainer"}
        of_trainer |= {name: deviation for name, (_, deviation) in TRAINERS[by].published.items()}
    shared = {name for name in of_trainer if hasattr(cluster.shares, name)}
    of_trainer = {name: x for name, x in of_trainer.items() if not (COMPUTE in found and name in shared)}
    return {name: cluster.deviations.get(name, x) for name, x in (found | devices | of_trainer).items()}


def own_error() -> float:
    """Return the standard deviation of the model's own error, of the logarithm of a step."""
    return math.sqrt(sum(x**2 for _, x in _COMMON))


def correlations(cluster: Cluster, names: Sequence[str]) -> Array:
    """Return the correlations of the logarithms of constants, [names, names]; those of runs of its own are not known.

    Args:
        cluster: the cluster.
        names: constants, as `deviations` names them.
    """
    found, facts = np.eye(len(names)), TRAINERS.get(cluster.execution.trainer)
    sheets = [cluster.sheet(kind) for kind in set(cluster.kinds)]
    if facts is None or any(one is None or one.capability != facts.capability for one in sheets):
        return found
    for pair, value in facts.correlated.items():
        if cluster.deviations.keys().isdisjoint(pair) and set(pair) <= set(names):
            i, j = (names.index(name) for name in pair)
            found[i, j] = found[j, i] = value
    return found


def _below(logs: Array) -> Array:
    """Return the normal distribution function, elementwise."""
    return np.array([_NORMAL.cdf(x) for x in logs.tolist()])


@dataclasses.dataclass(frozen=True, eq=False)
class Beliefs:
    """The belief about the seconds of some plans.

    Attributes:
        plans: the plans.
        plain: [plans] seconds of a step that does not stall, by the most likely constants.
        drawn: [draws, plans] the same by drawn constants.
        waits: [plans] seconds that a stalled step takes longer.
        stalls: [plans] probability that a run stalls.
        fits: [plans] probability that it fits into memory.
    """

    plans: Sequence[Candidate]
    plain: Array
    drawn: Array
    waits: Array
    stalls: Array
    fits: Array

    @property
    def expected(self) -> Array:
        """Seconds [plans] of a step in the mean over runs that stall and others."""
        return self.plain + self.stalls * self.waits

    def _cases(self, i: int) -> list[tuple[float, Array, float]]:
        """Return of a run that does not stall, and of one that does: probability, logarithms of seconds, variance."""
        p = float(self.stalls[i])
        cases = [(1 - p, np.log(self.drawn[:, i]), 0.0)]
        return [*cases, (p, np.log(self.drawn[:, i] + self.waits[i]), stalls.NOISE**2)] if p else cases

    def quantile(self, i: int, q: float) -> float:
        """Return the seconds below which a plan's step stays with probability q."""
        own = own_error()
        cases = [(p, logs, math.hypot(own, math.sqrt(more))) for p, logs, more in self._cases(i)]
        low = min(float(logs.min()) - 4 * x for _, logs, x in cases)
        high = max(float(logs.max()) + 4 * x for _, logs, x in cases)
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            under = sum(p * _below((middle - logs) / max(x, _LEAST)).mean() for p, logs, x in cases) < q
            low, high = (middle, high) if under else (low, middle)
        return math.exp((low + high) / 2)

    def quicker(self, i: int, j: int) -> float:
        """Return the probability that a plan is quicker than another one."""
        own = sum(2 * x**2 for of, x in _COMMON if of(self.plans[i]) != of(self.plans[j]))
        found = 0.0
        for p, logs, more in self._cases(i):
            for other, than, much in self._cases(j):
                spread = max(math.sqrt(own + more + much), _LEAST)
                found += p * other * float(_below((than - logs) / spread).mean())
        return found

    def outlooks(self, chosen: int) -> tuple[Outlook, ...]:
        """Return what is told of each plan, beside a chosen one."""
        tail = (1 - _SURE) / 2
        return tuple(
            Outlook(
                low=self.quantile(i, tail),
                high=self.quantile(i, 1 - tail),
                expected=float(self.expected[i]),
                stalls=float(self.stalls[i]),
                fits=float(self.fits[i]),
                slower=self.quicker(chosen, i) if i != chosen else 0.0,
            )
            for i in range(len(self.plans))
        )


def _draws(known: Mapping[str, float], related: Array, draws: int, of_links: int) -> list[dict[str, float]]:
    """Return settings with factors that are drawn for each constant, by its deviation.

    Args:
        known: the deviations.
        related: correlations of their logarithms; those of links have none.
        draws: number of settings.
        of_links: different ones of the constants of links.
    """
    random, scores = np.random.default_rng(0), {}
    for name in known:
        count = of_links if name in LINKS else draws
        strata = np.array([_NORMAL.inv_cdf((n + 0.5) / count) for n in range(count)])
        scores[name] = np.tile(random.permutation(strata), draws // count)
    scores = dict(zip(scores, np.linalg.cholesky(related) @ np.array(list(scores.values()))))
    return [{name: math.exp(known[name] * z[n]) for name, z in scores.items()} for n in range(draws)]


def believe(search: Search, ranked: Sequence[Found], compiled: Sequence[Found] = ()) -> Beliefs:
    """Return what is believed of plans that a search has found.

    Args:
        search: the search.
        ranked: the plans.
        compiled: those of them whose memory a compiler has told, and which fit.
    """
    cluster, model, by = search.cluster, search.model, search.cluster.execution
    priced = [PricedPlan(found.candidate, found.placement.hosts) for found in ranked]
    many = cluster.devices > _MANY
    known = deviations(cluster)
    settings = [{}, *_draws(known, correlations(cluster, list(known)), *(_FEW_DRAWS if many else _DRAWS))]
    by_setting = PlanSettings(cluster, model, search.options.quantile, settings)
    parts = [[one] for one in priced] if many else [priced]
    seconds = np.concatenate([by_setting.seconds(some) for some in parts], axis=1)
    fits, chances, waits = [], [], []
    for found in ranked:
        c, full = found.candidate, 0.0
        if by.trainer == PAXTRAIN.trainer:
            added = float(margin(model, c.pipe)) if search.budget.has_margin(cluster) else 0.0
            room = math.log(search.limit / found.memory) + added
            fits.append(1.0 if found in compiled else chance(model, c.pipe, room))
        else:
            peak, noise = _peak(search, found)
            fits.append(_NORMAL.cdf(math.log(search.limit / peak) / noise))
            if TRAINERS[by.trainer].counts:
                full = _NORMAL.cdf(math.log(peak / (stalls.FULL * float(cluster.memory.min()))) / noise)
        hosts = len(np.unique(found.placement.hosts)) * len((cluster.parts or cluster).hosts) // len(cluster.hosts)
        alone, piped, nearly_full = by.stalls
        chances.append(-math.expm1(-(hosts * piped + full * nearly_full if c.pipe > 1 else hosts * alone)))
        waits.append(by.stall_seconds * stalls.messages(c.pipe, c.micro_batches))
    plans = [found.candidate for found in ranked]
    return Beliefs(plans, seconds[0], seconds[1:], np.array(waits), np.array(chances), np.array(fits))


def by_expected(search: Search, ranked: Sequence[Found]) -> list[Found]:
    """Return plans by their expected seconds, the least first; those that probably do not fit are last.

    Args:
        search: the search that has found them.
        ranked: the plans.
    """
    found = believe(search, ranked)
    by = search.cluster.execution.trainer
    known = by in TRAINERS and bool(TRAINERS[by].counts)
    scores = np.where(known & (found.fits < 0.5), np.inf, found.expected)
    scores = scores * [handicap(one.candidate, search.options.gain) for one in ranked]
    return [ranked[i] for i in np.argsort(scores, kind="stable")]


def _peak(search: Search, found: Found) -> tuple[float, float]:
    """Return the bytes that another trainer needs at most, and the standard deviation of their logarithm.

    Of an architecture of one's own they are the closed form's.
    """
    cluster, facts = search.cluster, TRAINERS[search.cluster.execution.trainer]
    if search.model.module:
        return found.memory, facts.peak_noise
    counts = np.array(facts.counts) if facts.counts else memory.TYPICAL.counts
    run = layouts.run_of(cluster, search.model, cluster.execution.trainer, found.candidate, search.global_batch)
    return float(memory.MemoryModel(counts, facts.peak_noise, 0).peaks([run])[0]), facts.peak_noise
