"""The causes of slower steps: the parts that take longer than they did when the steps were usual.

If every part of a step takes at most x times as long, so does the step. So a part counts only if it takes longer by
about the share by which the step does, or more, and by more than its own noise. Parts of one kind are compared with
each other, too: on a machine that is busy all take longer.
"""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from paxtrain.config.plan import HOST
from paxtrain.run.stragglers.step_change import StepChange
from paxtrain.run.stragglers.suspects import CPU, DEVICE, INPUT, LINK, Suspect, SuspectSeconds
from paxtrain.tables import some, times

LEAST = 0.1  # share by which steps must be slower to be worth a line
_OF_STEP = 0.7  # of the step's own share, at least, by which a part that explains it takes longer
_SIGMAS = 4.0  # of the part's own noise
_LEAST_SIGMA = 0.03  # of the part's seconds
_TO_SIGMA = 1.4826  # from the median absolute deviation of normal noise
_OF_INPUT = 0.5  # of the seconds that a step lost, which input must have gained to explain it
_BEHIND = 2.0  # times as long as most others of its kind, by which a part counts as slow from the start
_BESIDES = 2.0  # times as much as its host, by which a link must be slower to be named beside it


@dataclasses.dataclass(frozen=True)
class Culprit:
    """A part of the job that has become slow.

    Attributes:
        name: What the metrics call it, such as "host/pax2", "device/2.0" or "link/pax1-to-pax2".
        words: A clause that says how slow it is.
        times: How many times as long it takes as before.
        host: Host without which a plan would not have it; empty for a link or several hosts.
        link: Names of the host that sends and of the one that receives; empty for anything else.
    """

    name: str
    words: str
    times: float
    host: str = ""
    link: tuple[str, str] | tuple[()] = ()


@dataclasses.dataclass(frozen=True)
class JobNames:
    """The names of a job's parts.

    Attributes:
        hosts: Names of the hosts.
        host_of: Number of the host of each process.
        kinds: Kind of the devices of each process.
    """

    hosts: Sequence[str]
    host_of: Sequence[int]
    kinds: Sequence[str]

    def process(self, number: int) -> str:
        """Return a process in words."""
        return f"process {number} on {self.hosts[self.host_of[number]]}"


class Judge:
    """The usual seconds of all parts, with which later ones are compared."""

    def __init__(self, job: JobNames, usual: Sequence[Mapping[Suspect, float]]) -> None:
        """Take what is usual.

        Args:
            job: Names of the parts.
            usual: Seconds of all parts, measured several times.
        """
        self._job = job
        self._usual: SuspectSeconds = {}
        self._sigma: SuspectSeconds = {}  # as a share
        for part in usual[0] if usual else ():
            values = [one[part] for one in usual]
            middle = statistics.median(values)
            spread = _TO_SIGMA * statistics.median(abs(value - middle) for value in values)
            self._usual[part], self._sigma[part] = middle, max(spread / middle, _LEAST_SIGMA)

    def behind(self) -> list[Culprit]:
        """Return the hosts and devices that are far slower than most others of their kind, from the start on."""
        found: list[Culprit] = []
        slow: dict[int, float] = {}
        for device in dict.fromkeys(self._job.kinds):
            for kind in (DEVICE, CPU):
                alike = {
                    part: seconds
                    for part, seconds in self._usual.items()
                    if part.kind == kind and self._job.kinds[part.first] == device
                }
                most = statistics.median_low(alike.values()) if alike else 0.0
                beyond = {part: seconds / most for part, seconds in alike.items() if seconds > _BEHIND * most}
                found += self._hosts(kind, beyond, slow, "most others")
        return found

    def culprits(self, now: Mapping[Suspect, float], change: StepChange) -> list[Culprit]:
        """Return what explains slower steps, the worst first; empty: nothing that is measured does.

        Args:
            now: Seconds of the parts, now.
            change: Seconds of a step, before and now.
        """
        ratios = {part: now[part] / usual for part, usual in self._usual.items()}
        least = max(LEAST, _OF_STEP * change.slower)
        found: list[Culprit] = []
        slow: dict[int, float] = {}  # hosts, and how many times as long they take
        for kind in (DEVICE, CPU, LINK):
            of_kind = {part: x for part, x in ratios.items() if part.kind == kind}
            others = [x for part, x in of_kind.items() if kind != LINK or not slow.keys() & set(part[1:])]
            typical = max(statistics.median_low(others), 1.0) if others else 1.0
            if typical > 1 + least and len(others) > 1:
                found.append(self._most(kind, typical))
                typical *= 1.5  # those that are far beyond are named besides
            beyond = {p: x for p, x in of_kind.items() if x / typical - 1 > max(least, _SIGMAS * self._sigma[p])}
            if kind == LINK:
                found += self._links(beyond, now, slow)
            else:
                found += self._hosts(kind, beyond, slow)
        found += self._inputs(now, change)
        return sorted(found, key=lambda culprit: -culprit.times)

    def _most(self, kind: str, ratio: float) -> Culprit:
        what = {DEVICE: "most devices", CPU: "the CPUs of most hosts", LINK: "most links"}[kind]
        return Culprit(f"{kind}/most", f"{what} take {times(ratio)} as long as at the start", ratio)

    def _hosts(
        self, kind: str, beyond: Mapping[Suspect, float], slow: dict[int, float], than: str = "at the start"
    ) -> list[Culprit]:
        """Return the hosts, or single devices of them, that are beyond what is usual, and add them to `slow`."""
        found = []
        for host in sorted({self._host(part) for part in beyond} - set(slow)):
            here = {part: ratio for part, ratio in beyond.items() if self._host(part) == host}
            every = sum(part.kind == kind and self._host(part) == host for part in self._usual)
            slow[host] = statistics.median(here.values())
            longer = f"{times(slow[host])} as long as {than} for the same work"
            found.append(self._host_or_devices(kind, host, here, len(here) == every, longer))
        return found

    def _host(self, part: Suspect) -> int:
        """Return the number of the host of a device or a CPU."""
        return self._job.host_of[part.first]

    def _host_or_devices(
        self, kind: str, host: int, slow: Mapping[Suspect, float], whole: bool, longer: str
    ) -> Culprit:
        """Return a host, or some of its devices, as what is slow.

        Args:
            kind: DEVICE or CPU.
            host: Number of the host.
            slow: Its parts of this kind that are slow.
            whole: Whether these are all that it has.
            longer: What follows the word "takes".
        """
        name, ratio = self._job.hosts[host], statistics.median(slow.values())
        parts = sorted(slow)
        if whole:
            who = f"host {name}" if kind == DEVICE else f"the CPU of host {name}"
            return Culprit(f"host/{name}", f"{who} takes {longer}", ratio, name)
        if kind == CPU:
            processes = [part.first for part in parts]
            who = f"the CPU of {some([self._job.process(number) for number in processes])}"
            return Culprit(f"process/{'-'.join(map(str, processes))}", f"{who} takes {longer}", ratio, name)
        who = some([f"device {part.second} of {self._job.process(part.first)}" for part in parts])
        key = "-".join(f"{part.first}.{part.second}" for part in parts)
        return Culprit(f"device/{key}", f"{who} {'takes' if len(parts) == 1 else 'take'} {longer}", ratio, name)

    def _links(
        self, beyond: Mapping[Suspect, float], now: Mapping[Suspect, float], slow: Mapping[int, float]
    ) -> list[Culprit]:
        """Return the links that are beyond what is usual, without those that are slow because a host is."""
        hosts = self._job.hosts
        found = []
        for part, ratio in beyond.items():
            if ratio < _BESIDES * max(slow.get(part.first, 0.0), slow.get(part.second, 0.0)):
                continue
            a, b = hosts[part.first], hosts[part.second]
            back = Suspect(LINK, part.second, part.first)
            words = (
                f"the link from {a} to {b} takes {times(ratio)} as long as at the start for the same message "
                f"({now[part] * 1e3:.3g} ms), its other direction {times(now[back] / self._usual[back])}"
            )
            found.append(Culprit(f"link/{a}-to-{b}", words, ratio, link=(a, b)))
        return found

    def _inputs(self, now: Mapping[Suspect, float], change: StepChange) -> list[Culprit]:
        """Return the processes whose wait for input explains the seconds that a step lost."""
        lost = change.now - change.before
        found = {part: more for part, more in now.items() if part.kind == INPUT and more > _OF_INPUT * lost}
        if not found:
            return []
        who = some([self._job.process(part.first) for part in found])
        wait = "waits" if len(found) == 1 else "wait"
        words = f"{who} {wait} {max(found.values()):.3g} s longer for input (the term {HOST})"
        return [Culprit("term/input", words, change.now / change.before)]
