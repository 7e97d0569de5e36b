"""The gain of more hosts: a plan for each number of hosts, with the same global batch."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from paxtrain.errors import UserError, whole
from planner.cluster.cluster import Cluster
from planner.cluster.cluster_file import MOST_HOSTS
from planner.cluster.variants import check_size, resized
from planner.planning.inputs import Values
from planner.planning.options import PlanOptions
from planner.planning.planning import Plans, plan_sections
from planner.report.further import Scaling, Size

# Far above what anyone trains on or pays; hours and costs stay numbers that can be written out.
_MOST_TOKENS, _MOST_PRICE = 1e18, 1e6


@dataclasses.dataclass(frozen=True)
class ScalingOptions:
    """The numbers of hosts to plan for, and what the answer says of each.

    Attributes:
        hosts: numbers of hosts.
        tokens: tokens for which the answer says GPU hours and costs.
        price: price of a device for an hour; 0: unknown.

    Raises:
        UserError: tokens or price are out of their range.
    """

    hosts: tuple[int, ...]
    tokens: float = 1e9
    price: float = 0.0

    def __post_init__(self) -> None:
        for name, low, high in (("tokens", 1.0, _MOST_TOKENS), ("price", 0.0, _MOST_PRICE)):
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise UserError(f"--{name} must be a number from {low:g} to {high:g}, got {value:g}")


def scaling(
    values: Values,
    cluster: Cluster,
    options: PlanOptions,
    wanted: ScalingOptions,
    global_batch: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> Plans:
    """Return the plan at the knee of the numbers of hosts, whose report has all of them.

    Args:
        values: sections of the configuration, nested.
        cluster: cluster, whose first hosts are taken, or as many more if all are alike.
        options: options of the choice and of the search.
        wanted: numbers of hosts, and what the answer says of each.
        global_batch: sequences per step; 0 for the configuration's.
        say: function that gets the name of each phase as it begins.

    Raises:
        UserError: no number of hosts has a plan, or the cluster cannot have that many.
    """
    plans: dict[int, Plans] = {}
    missing: list[tuple[int, str]] = []
    for count in wanted.hosts:
        check_size(cluster, count)
    for count in sorted(set(wanted.hosts)):

        def said(phase: str, count: int = count) -> None:
            say(f"{count} hosts: {phase}")

        without = dataclasses.replace(options, nearby=False)
        try:
            plans[count] = plan_sections(values, resized(cluster, count), without, global_batch=global_batch, say=said)
        except UserError as error:
            missing.append((count, str(error)))
    if not plans:
        raise UserError(f"no number of hosts has a plan; with {missing[0][0]}: {missing[0][1]}")
    sizes = tuple(_size(count, plan) for count, plan in plans.items())
    found = Scaling(sizes, tuple(missing), wanted.tokens, wanted.price)
    at_knee = plans[found.knee.hosts]
    return dataclasses.replace(at_knee, report=dataclasses.replace(at_knee.report, scaling=found))


def _size(hosts: int, plans: Plans) -> Size:
    made = plans.report
    return Size(hosts, made.cluster.devices, made.chosen, made.tokens_per_second(made.chosen.seconds))


def counts(words: Sequence[str]) -> tuple[int, ...]:
    """Return numbers of hosts from the words of a flag.

    Raises:
        UserError: one is no number of hosts that a cluster may have.
    """
    found = []
    for word in words:
        number = whole(word.strip(), MOST_HOSTS)
        if not number:
            raise UserError(
                f"--hosts must be numbers from 1 to {MOST_HOSTS:,} joined by commas, as 2,4,8, got {word[:40]!r}"
            )
        found.append(number)
    return tuple(found)
