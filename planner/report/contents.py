"""The contents of a planner's report, which planner.report.text prints and planner.report.page draws."""

import dataclasses
import functools
from typing import NamedTuple

import numpy as np

from paxtrain.config import ModelConfig
from paxtrain.model.parameters import flops_per_token
from planner.cluster.cluster import Cluster
from planner.cost.link_seconds import Fabric
from planner.cost.step_time import Problem, Step
from planner.report.further import FreeChoice, Scaling, WhatIf
from planner.report.losses import Budgeted
from planner.search.baselines import Comparison
from planner.search.nearby import Nearby
from planner.search.search import Found, Outcome


class Noise(NamedTuple):
    """The gain of the placement over host order, and how well it repeats.

    Attributes:
        gain: mean over the link samples of host order's step time over the placement's, less 1.
        std: standard deviation of the gain over the link samples.
        words: one sentence on how the gain was checked.
    """

    gain: float
    std: float
    words: str


class Outlook(NamedTuple):
    """The certainty of a ranked plan's prediction.

    Attributes:
        low: seconds of a step that it stays above with 90%.
        high: seconds that it stays below with 90%.
        expected: seconds in the mean over runs that stall and others.
        stalls: probability that a run stalls.
        fits: probability that it fits into memory.
        slower: probability that the chosen plan is quicker; 0 for the chosen one.
    """

    low: float
    high: float
    expected: float
    stalls: float
    fits: float
    slower: float


class OracleRow(NamedTuple):
    """One plan that was compiled to check its memory.

    Attributes:
        configuration: the plan in words.
        bytes: memory per device.
        compile_seconds: seconds that the compilation took.
        source: the compiler that was asked.
    """

    configuration: str
    bytes: float
    compile_seconds: float
    source: str


class Offer(NamedTuple):
    """A plan with a kind of compression that was not asked for.

    Attributes:
        compress: value of --compress that allows it.
        found: the quickest plan that compresses so.
    """

    compress: str
    found: Found


@dataclasses.dataclass(frozen=True, eq=False)
class Report:
    """The contents of a report.

    Attributes:
        cluster: the cluster that was planned for.
        model: the model that is trained.
        global_batch: sequences per step.
        outcome: the ranked plans and the statistics of the search.
        chosen: the recommended plan, one of outcome.ranked.
        fabric: the links that the search used.
        comparisons: step times of other ways to plan.
        memory: bytes of the chosen plan on a device of each stage [P], by purpose.
        limit: bytes that a device may hold.
        memory_source: origin of the ranked plans' memory.
        sources: origin of each kind of figure, by its name.
        noise: noise of the placement's gain; None if the links were measured once.
        oracle: plans that were compiled to check their memory.
        nearby: quicker plans on fewer hosts, and plans for batches near by that train more tokens a second.
        offers: plans with each kind of compression that could be quicker; None: some kind was asked for.
        budgeted: the choice of codecs within a budget of loss; None: it was not asked for.
        explained: a sentence "what: why" for each plan that was not chosen.
        command: the command that made the report.
        gain: share of the step that each kind of compression must gain, by which compressed plans are handicapped.
        free_choice: the plan of a free choice; None: it was not asked for.
        scaling: what more hosts bring; None: it was not asked for.
        what_ifs: plans for a cluster that is changed.
        outlooks: how sure the prediction of each ranked plan is; (): not told.
        named: name of the model; "": not known.
    """

    cluster: Cluster
    model: ModelConfig
    global_batch: int
    outcome: Outcome
    chosen: Found
    fabric: Fabric
    comparisons: list[Comparison]
    memory: dict[str, np.ndarray]
    limit: float
    memory_source: str
    sources: dict[str, str]
    noise: Noise | None = None
    oracle: tuple[OracleRow, ...] = ()
    nearby: tuple[Nearby, ...] = ()
    offers: tuple[Offer, ...] | None = None
    budgeted: Budgeted | None = None
    explained: tuple[str, ...] = ()
    command: str = ""
    gain: float = 0.01
    free_choice: FreeChoice | None = None
    scaling: Scaling | None = None
    what_ifs: tuple[WhatIf, ...] = ()
    outlooks: tuple[Outlook, ...] = ()
    named: str = ""

    @functools.cached_property
    def problem(self) -> Problem:
        """The chosen plan's costs on the cluster."""
        return Problem(self.cluster, self.model, self.chosen.candidate)

    @functools.cached_property
    def step(self) -> Step:
        """The chosen plan's step on its placement, with a leading axis of one."""
        return self.problem.step(self.fabric, self.chosen.placement.hosts[None])

    def tokens_per_second(self, seconds: float) -> float:
        """Return the tokens/s of the whole cluster for steps of `seconds`."""
        return self.global_batch * self.model.sequence / seconds

    def outlook(self, found: Found) -> Outlook | None:
        """Return how sure a ranked plan's prediction is; None: that is not told."""
        return self.outlooks[self.outcome.ranked.index(found)] if self.outlooks else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization of the chosen plan, 0 to 1; None: a device has no data sheet."""
        sheets = [self.cluster.sheet(kind) for kind in self.cluster.kinds]
        if None in sheets:
            return None
        peak = sum(sheet.peak_flops for sheet in sheets if sheet) * self.cluster.devices_per_host
        return self.tokens_per_second(self.chosen.seconds) * flops_per_token(self.model) / peak

    @property
    def rejected(self) -> list[Found]:
        """Plans that rank before the chosen one but do not fit once compiled."""
        return self.outcome.ranked[: self.outcome.ranked.index(self.chosen)]


def gap(report: Report, found: Found) -> float:
    """Return how much longer the step is, at most, than that of the best plan of all, as a share."""
    return max(found.seconds / report.outcome.bound - 1, 0.0)


def quicker(report: Report, offer: Offer) -> float:
    """Return the share of the chosen plan's step by which an offer's step is shorter."""
    return 1 - offer.found.seconds / report.chosen.seconds


def slower(report: Report, comparison: Comparison) -> float:
    """Return how much longer the comparison's step is than the chosen plan's, as a share."""
    return comparison.seconds / report.chosen.seconds - 1
