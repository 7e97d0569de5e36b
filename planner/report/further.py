"""Records of answers to further questions: a free choice, more hosts, a cluster that changes."""

import dataclasses
from typing import NamedTuple

from planner.search.tried import Found


class FreeChoice(NamedTuple):
    """The plan as it was asked for, and the plan of a free choice.

    Attributes:
        asked: plan as asked for.
        free: plan of a free choice.
    """

    asked: Found
    free: Found

    @property
    def price(self) -> float:
        """Share by which a step as asked for takes longer."""
        return self.asked.seconds / self.free.seconds - 1


class Size(NamedTuple):
    """The plan for one number of hosts.

    Attributes:
        hosts: number of hosts.
        devices: number of devices.
        found: the plan.
        tokens_per_second: tokens/s of all of them.
    """

    hosts: int
    devices: int
    found: Found
    tokens_per_second: float


@dataclasses.dataclass(frozen=True, eq=False)
class Scaling:
    """The gains of more hosts, for the same global batch.

    Attributes:
        sizes: the plans, fewest hosts first.
        missing: (number of hosts, reason) of each number without a plan.
        tokens: tokens for which the answer says GPU hours and costs.
        price: price of a device for an hour; 0: unknown.
    """

    sizes: tuple[Size, ...]
    missing: tuple[tuple[int, str], ...]
    tokens: float
    price: float = 0.0

    def efficiency(self, size: Size) -> float:
        """Return the tokens/s of a device over those of a device of the fewest hosts."""
        first = self.sizes[0]
        return size.tokens_per_second / size.devices / (first.tokens_per_second / first.devices)

    def device_hours(self, size: Size) -> float:
        """Return the hours of all devices together that the tokens take."""
        return self.tokens / size.tokens_per_second * size.devices / 3600

    def marginal(self, size: Size) -> float:
        """Return the tokens/s that a device brings that came since the size before, over those of the first ones."""
        place = self.sizes.index(size)
        if not place:
            return 1.0
        before, first = self.sizes[place - 1], self.sizes[0]
        added = (size.tokens_per_second - before.tokens_per_second) / (size.devices - before.devices)
        return added / (first.tokens_per_second / first.devices)

    @property
    def knee(self) -> Size:
        """The most hosts up to which each step up brings half of what its devices bring among the fewest."""
        last = self.sizes[0]
        for size in self.sizes[1:]:
            if self.marginal(size) < 0.5:
                break
            last = size
        return last


class WhatIf(NamedTuple):
    """The plan for a cluster that is changed.

    Attributes:
        change: the change, as it was written, with the host if it leaves one to the planner.
        found: plan for the changed cluster.
        kept: seconds of today's plan there, on the same hosts; None: it cannot run there.
    """

    change: str
    found: Found
    kept: float | None
