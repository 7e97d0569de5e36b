"""A lasting change of a run's seconds of a step, told from noise by a robust CUSUM.

References:
    Page, Continuous inspection schemes, Biometrika 41 (1954), for the sum.
    Hawkins, Robustification of cumulative sum charts by winsorization, Journal of Quality Technology 25 (1993): values
    are clipped, so that no single step raises an alarm.
"""

import dataclasses
import math
import statistics
from collections.abc import Hashable

FIRST = 20  # steps that say what is usual, before which nothing is noticed
_MOST = 100  # steps that say what is usual; later ones do not, so that a drift is noticed
_LAG = 20  # newest steps that do not say yet what is usual, since they may be slow ones that are not noticed yet
_CLIP = 3.0  # standard deviations
_SLACK = 1.0  # standard deviations by which a step may be off and not count
_ALARM = 10.0  # standard deviations, summed beyond the slack: at least 6 steps
_LEAST_SIGMA = 0.04  # of the logarithm: a change by less than 4% does not count, however quiet a run is
_TO_SIGMA = 1.4826  # from the median absolute deviation of normal noise


@dataclasses.dataclass(frozen=True)
class StepChange:
    """A lasting change of a run's seconds of a step.

    Attributes:
        before: Usual seconds of a step before the change.
        now: Median seconds of the newest steps since then.
        steps: Number of steps since the change, about.
    """

    before: float
    now: float
    steps: int

    @property
    def slower(self) -> float:
        """Seconds that a step takes longer, as a share of the seconds before; below 0: it is faster."""
        return self.now / self.before - 1


class StepWatch:
    """The seconds of a run's steps, of which it says when they change for good.

    Logarithms are compared, since noise grows with the seconds. Steps of different kinds, such as those with an
    exchange of groups under them, are compared with steps of their own kind.
    """

    def __init__(self) -> None:
        """Start without steps."""
        self._restart()

    def _restart(self) -> None:
        self._logs: dict[Hashable, list[float]] = {}
        self._sums = [0.0, 0.0]  # of steps that are slower, and of those that are faster
        self._off: list[list[tuple[float, float]]] = [[], []]  # since each sum was 0: usual logarithm and the step's

    def add(self, seconds: float, kind: Hashable = None) -> StepChange | None:
        """Return the change that this step shows, after which the next steps say anew what is usual.

        Args:
            seconds: Seconds of the step, above 0.
            kind: What the usual seconds depend on.
        """
        here, logs = math.log(seconds), self._logs.setdefault(kind, [])
        known = logs[: min(max(FIRST, len(logs) - _LAG), _MOST)]
        if len(logs) < _MOST + _LAG:
            logs.append(here)
        if len(known) < FIRST:
            return None
        usual = statistics.median(known)
        sigma = max(_TO_SIGMA * statistics.median(abs(each - usual) for each in known), _LEAST_SIGMA)
        off = min(max((here - usual) / sigma, -_CLIP), _CLIP)
        for side, sign in enumerate((1, -1)):
            self._sums[side] = max(self._sums[side] + sign * off - _SLACK, 0.0)
            if not self._sums[side]:
                self._off[side].clear()
                continue
            self._off[side].append((usual, here))
            if self._sums[side] > _ALARM:
                return self._changed(self._off[side])
        return None

    def _changed(self, steps: list[tuple[float, float]]) -> StepChange:
        before = statistics.median(usual for usual, _ in steps)
        # The first ones may have been slow by chance.
        off = statistics.median(here - usual for usual, here in steps[len(steps) // 2 :])
        self._restart()
        return StepChange(math.exp(before), math.exp(before + off), len(steps))
