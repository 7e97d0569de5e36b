"""Gains over a dense step: speed-ups, their bound, and captured shares, each with its spread over the repeats."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from experiments.lab.laboratory import summary
from experiments.lab.page.section import factor, percent, seconds


class Gain(NamedTuple):
    """A gain, of medians, and the spread (half the distance between the quartiles) of the gains of single repeats."""

    value: float
    spread: float

    @property
    def as_factor(self) -> str:
        """The gain as a factor, such as 1.32x ± 0.004."""
        return f"{factor(self.value)} ± {self.spread:.3f}"

    @property
    def as_share(self) -> str:
        """The gain as a share, such as 75.2% ± 0.4%."""
        return f"{percent(self.value)} ± {percent(self.spread)}"


def measured(times: Sequence[float]) -> str:
    """Return the median of some seconds with their spread, such as 1.203 s ± 0.4%."""
    found = summary(list(times))
    return f"{seconds(found['median'])} ± {percent(found['spread'] / found['median'])}"


def _spread(gains: np.ndarray) -> float:
    return summary(gains.ravel().tolist())["spread"]


def speedup(dense: Sequence[float], times: Sequence[float]) -> Gain:
    """Return a kind's speed-up over dense.

    Args:
        dense: seconds of dense steps.
        times: seconds of the kind's steps, taken in turn with those.
    """
    return Gain(float(np.median(dense) / np.median(times)), _spread(np.array(dense) / np.array(times)))


def bound(dense: Sequence[float], free: Sequence[float]) -> Gain:
    """Return the largest speed-up that removing communication alone can bring, by Amdahl's law.

    Args:
        dense: seconds of dense steps.
        free: seconds of dense steps without limits of links.
    """
    return Gain(float(np.median(dense) / np.median(free)), _spread(np.array(dense) / np.array(free)[:, None]))


def captured(dense: Sequence[float], times: Sequence[float], free: Sequence[float]) -> Gain:
    """Return the share of the time that links cost a dense step which a kind removes.

    Args:
        dense: seconds of dense steps.
        times: seconds of the kind's steps, taken in turn with those.
        free: seconds of dense steps without limits of links.
    """
    whole, rest = np.median(dense), np.median(free)
    shares = (np.array(dense) - np.array(times)) / (np.array(dense) - np.array(free)[:, None])
    return Gain(float((whole - np.median(times)) / (whole - rest)), _spread(shares))
