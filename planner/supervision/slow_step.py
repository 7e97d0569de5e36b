"""Detection of a slow step, and of the host or link that the others wait for, as supervisors see it from outside.

Causes that explain others come first, as in `first_cause`: a silent host, a worker that cannot run, a slow CPU, a link
that carries less than it did before, and last a worker that is behind. A slow device, or a network that supervisors do
not use, cannot be seen this way.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from planner.supervision import host_speed
from planner.supervision.worker_process import WorkerStatus

_STEPS = 5  # steps before the median is trusted
_LEAST = 2.0  # seconds of a step that is worth a line
_SLOWER = 4.0  # factor by which a link's rate must drop to count as slow
# Bytes per second. Rates above it count as equal, because there the measurement shows the CPU.
_FAST = 5e8


class SlowStepClock:
    """Detector of late steps. It reports once, and again only after a step that was not late.

    Attributes:
        late: whether the current step takes too long.
    """

    def __init__(self, times: float) -> None:
        """Start without steps; a step is late after `times` the median step."""
        self._times = times
        self._first: int | None = None
        self._step: int | None = None
        self._known = False
        self.late = False

    def look(self, status: WorkerStatus) -> bool:
        """Return whether a step has become late since the last look while the one before it was not."""
        if status.step != self._step:
            self._known = self._known and self.late
            self._step, self.late = status.step, False
            self._first = status.step if self._first is None else self._first
        if (
            status.step is None
            or self._first is None
            or status.step - self._first < _STEPS
            or status.step_seconds is None
        ):
            return False
        at_work = status.state == "running" and not status.failed and not status.doing
        if at_work and status.told_age > max(_LEAST, self._times * status.step_seconds):
            self.late = True
        news = self.late and not self._known
        self._known = self._known or self.late
        return news


@dataclasses.dataclass(frozen=True)
class StepView:
    """One host's view of a slow step.

    Attributes:
        worker: status of its worker when the host began to look.
        late: whether its own worker was in a step that took too long.
        about: last finished step of the newest late worker that this host knew of; it identifies the slow step.
        pace: seconds that a fixed piece of work takes on its CPU.
        links: bytes per second to each neighbour, now and at the start of the run.
    """

    worker: WorkerStatus
    late: bool = False
    about: int = -1
    pace: float = 0.0
    links: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)

    def older(self, seconds: float) -> "StepView":
        """Return the same view with all ages increased by `seconds`."""
        return dataclasses.replace(
            self, worker=dataclasses.replace(self.worker, told_age=self.worker.told_age + seconds)
        )

    def to_json(self) -> dict[str, object]:
        """Return the view as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "StepView":
        """Return the view that `to_json` has encoded."""
        links = {int(rank): (now, before) for rank, (now, before) in values["links"].items()}
        return cls(**{**values, "worker": WorkerStatus(**values["worker"]), "links": links})


@dataclasses.dataclass(frozen=True)
class SlowCause:
    """Cause of a slow step.

    Attributes:
        text: clause for the note to the user.
        hosts: numbers of the hosts that it names.
    """

    text: str
    hosts: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class SlowStepNote:
    """The first host's note about a slow step, for the logs of the hosts that it names.

    Attributes:
        text: line for the user.
        hosts: numbers of the hosts.
    """

    text: str
    hosts: tuple[int, ...]


def _carries(rate: float) -> str:
    if rate >= _FAST:
        return f"over {_FAST / 1e6:.3g} MB/s"
    return f"{rate / 1e6:.3g} MB/s" if rate else "next to nothing"


def _waited_for(hosts: Sequence[int], names: Sequence[str], why: str) -> SlowCause:
    """Return the cause that the others wait for `hosts`; `why` is about the first of them."""
    more = f", and so {'are' if len(hosts) > 2 else 'is'} {', '.join(names[i] for i in hosts[1:])}" * (len(hosts) > 1)
    return SlowCause(f"{names[hosts[0]]} is the one the others wait for: {why}{more}", tuple(hosts))


def _slow_cpu(views: Mapping[int, StepView], names: Sequence[str]) -> SlowCause | None:
    times = {}
    for rank, view in views.items():
        others = [other.pace for i, other in views.items() if i != rank and other.pace]
        times[rank] = view.pace / statistics.median(others) if others else 0.0
    worst = max(times, key=times.__getitem__)
    if times[worst] < host_speed.SLOW:
        return None
    return _waited_for(
        [worst], names, f"its CPU takes {times[worst]:.1f} times as long as the others' for the same work"
    )


def _slow_link(views: Mapping[int, StepView], names: Sequence[str]) -> SlowCause | None:
    """Return the link whose rate dropped most, or a host all of whose measured links are slow."""
    rates: dict[tuple[int, int], tuple[float, float]] = {}
    for rank, view in views.items():
        for other, (now, before) in view.links.items():
            pair = (min(rank, other), max(rank, other))
            both = (min(now, _FAST), min(before, _FAST))
            if before and (pair not in rates or both[0] / both[1] < rates[pair][0] / rates[pair][1]):
                rates[pair] = both
    slow = {pair for pair, (now, before) in rates.items() if now * _SLOWER < before}
    if not slow:
        return None
    worst = min(slow, key=lambda pair: (rates[pair][0] / rates[pair][1], pair))
    now, before = rates[worst]
    carries = f"{_carries(now)}, {_carries(before)} when the run began"
    for rank in worst:
        own = {pair for pair in rates if rank in pair}
        if len(own) > 1 and own == slow:
            far = names[sum(worst) - rank]
            return SlowCause(f"the links of {names[rank]} are slow: that to {far} carries {carries}", (rank,))
    others = f"; {len(slow) - 1} more {'are' if len(slow) > 2 else 'is'} slow, too" if len(slow) > 1 else ""
    return SlowCause(f"the link {names[worst[0]]} - {names[worst[1]]} carries {carries}{others}", worst)


def seen(views: Mapping[int, StepView], names: Sequence[str]) -> SlowCause:
    """Return the host or link that a slow step waits for.

    Args:
        views: views of the hosts that have answered, by host number; at least one.
        names: names of all hosts with their roles in the mesh.
    """
    silent = [rank for rank in range(len(names)) if rank not in views]
    if silent:
        return _waited_for(silent, names, "its supervisor does not answer")
    frozen = [rank for rank, view in views.items() if view.worker.frozen]
    if frozen:
        return _waited_for(frozen, names, views[frozen[0]].worker.frozen)
    found = _slow_cpu(views, names) or _slow_link(views, names)
    if found is not None:
        return found
    steps = {rank: view.worker.step or 0 for rank, view in views.items()}
    behind = [rank for rank in steps if steps[rank] < max(steps.values())]
    if 0 < len(behind) <= len(steps) / 2:
        return _waited_for(behind, names, f"it has not finished step {steps[behind[0]] + 1}")
    return SlowCause(
        "nothing to be seen from outside: no worker is stopped or behind, no CPU or link slower than before"
    )
