"""The first cause of a fault, judged from the reports of all hosts by one rule, so that all hosts print one sentence.

When one process of a run fails, all others fail too, and the runtime blames the process that it noticed. The rule
prefers causes that explain others, in this order:

1. a worker that ended by itself (a signal, no memory, a full disk, bad input, an exception);
2. a host that no other host hears;
3. a link that carries nothing between two hosts that others hear;
4. a worker that the others wait for (stopped, waiting for a disk, long between steps, slow, behind);
5. a worker that ended well before the others, or whose collective failed though every host answers and every link
   carries data.

Among equal causes the earliest counts. Clocks of hosts differ, so reports contain ages instead of times.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paxtrain.errors import PREFIX, UserError
from paxtrain.process import failures
from planner.supervision.peer_connections import REFUSED
from planner.supervision.worker_process import WorkerStatus

# Errors that the end of another process causes: collectives that lost a peer, and jax's coordination service.
_CASCADE = re.compile(
    r"gloo|nccl|collective|coordination|heartbeat|connection (reset|closed)|socket closed|broken pipe|timed out waiting"
    r"|barrier|another task|distributed (service|runtime)|preempt|deadline.exceeded|unavailable",
    re.IGNORECASE,
)
# Beginning of a sentence for the user. Paths in it may contain any of the words above, so sentences about other
# processes are recognized by the phrases of paxtrain/process/failures.py.
_SENTENCE = re.compile(rf"({re.escape(PREFIX)}|{UserError.__name__}: )")
# Exceptions that no collective raises.
_OWN = re.compile(
    r"(OSError|FileNotFoundError|PermissionError|ImportError|ModuleNotFoundError|AssertionError|AttributeError|IndexError"
    r"|KeyError|TypeError|MemoryError|ZeroDivisionError)\b"
)
_FULL = re.compile(r"no space left on device|enospc|disk quota exceeded|edquot", re.IGNORECASE)
_MEMORY = re.compile(r"out of memory|resource_exhausted|bad_alloc|memoryerror|cannot allocate memory", re.IGNORECASE)
_FROM_OUTSIDE = ("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGXCPU", "SIGUSR1", "SIGUSR2")
_MOMENT = 5.0  # seconds that a worker may spend on anything before others count as waiting for it


@dataclasses.dataclass(frozen=True)
class HostReport:
    """Report of one host about itself. Ages are seconds before the report was made.

    Attributes:
        name: name of the host.
        worker: status of its worker; None if it was never started.
        hung: whether the worker finishes no steps and the supervisor's limit has passed.
        unreachable: reasons by number of the hosts that did not answer; REFUSED if nothing listens there.
        silences: silent neighbors by number: seconds of silence, and seconds since it ended (0: it has not).
        slow: time of the same work on this CPU over the other hosts' median; 0 if the host is not slow.
        final: whether all answers of other hosts have arrived.
    """

    name: str
    worker: WorkerStatus | None = None
    hung: bool = False
    unreachable: Mapping[int, str] = dataclasses.field(default_factory=dict)
    silences: Mapping[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    slow: float = 0.0
    final: bool = False

    def older(self, seconds: float) -> "HostReport":
        """Return the same report with all ages increased by `seconds`."""
        worker = self.worker and dataclasses.replace(
            self.worker, ended_age=self.worker.ended_age + seconds, told_age=self.worker.told_age + seconds
        )
        spans = {rank: (long, ended and ended + seconds) for rank, (long, ended) in self.silences.items()}
        return dataclasses.replace(self, worker=worker, silences=spans)

    def to_json(self) -> dict[str, object]:
        """Return the report as JSON values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "HostReport":
        """Return the report that `to_json` has encoded."""
        worker = values["worker"]
        return cls(
            **{
                **values,
                "worker": WorkerStatus(**worker) if worker else None,
                "unreachable": {int(rank): why for rank, why in values["unreachable"].items()},
                "silences": {int(rank): (span[0], span[1]) for rank, span in values["silences"].items()},
            }
        )


@dataclasses.dataclass(frozen=True)
class FaultCause:
    """The first cause of a run's end.

    Attributes:
        kind: "killed", "stopped", "out of memory", "disk full", "bad input", "exception" or "exit" of a worker; "lost";
            "link"; "frozen", "busy", "slow" or "stalled"; "collective".
        hosts: names of the hosts at fault; both ends of a link.
        step: last step finished there, or on any host if that host cannot be asked.
        age: seconds since the fault.
        sentence: message for the user.
        leave_out: names of the hosts without which training can continue.
    """

    kind: str
    hosts: tuple[str, ...]
    step: int | None
    age: float
    sentence: str
    leave_out: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class _CauseCandidate:
    """A possible first cause; `order` is its number in the rule above, and the lowest wins."""

    order: int
    kind: str
    ranks: tuple[int, ...]
    what: str
    age: float | None
    detail: str = ""
    advice: str = "start again, and training continues from its last checkpoint"
    leave_out: tuple[int, ...] = ()


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value < 100 else f"{value:.0f} s"


def _listed(names: Sequence[str]) -> str:
    most = [*names[:4], *([f"{len(names) - 4} others"] if len(names) > 4 else [])]
    return most[0] if len(most) == 1 else f"{', '.join(most[:-1])} and {most[-1]}"


def _says(error: str, phrases: Sequence[str]) -> bool:
    """Return whether the error contains one of the phrases."""
    return any(phrase in error for phrase in phrases)


def is_cascade(worker: WorkerStatus) -> bool:
    """Return whether another worker's failure explains the end of this one."""
    error = worker.error
    if worker.signal in _FROM_OUTSIDE or _FULL.search(error) or _OWN.match(error):
        return False
    if _SENTENCE.match(error):
        quoted = error.partition(failures.CANNOT_JOIN)[2]
        return _says(error, failures.ABOUT_OTHERS) or bool(_CASCADE.search(quoted))
    return bool(_CASCADE.search(error))


def _ended(rank: int, worker: WorkerStatus) -> _CauseCandidate | None:
    """Return the cause of a worker's end, or None if it runs or ended well."""
    if worker.good or (worker.state == "running" and not worker.failed):
        return None

    def own(kind: str, what: str, detail: str = worker.error, order: int = 1, **more: Any) -> _CauseCandidate:
        return _CauseCandidate(order, kind, (rank,), f"the worker {what}", worker.ended_age, detail, **more)

    while_ = f" while {worker.doing}" if worker.failed and worker.doing not in ("", "starting") else ""
    if _says(worker.error, failures.UNREACHED) and is_cascade(worker):
        return own("collective", "did not reach all others before the first step", order=5)
    if is_cascade(worker):
        return own("collective", "lost the others, though every host answers and every link carries", order=5)
    if worker.asked and worker.signal:
        return own("stopped", f"was told to end and ended by {worker.signal}", "")
    if worker.out_of_memory:
        return own("out of memory", "was killed by the kernel, because its host ran out of memory", "")
    if worker.signal in _FROM_OUTSIDE:
        return own("killed", f"was killed by {worker.signal}", "")
    if _FULL.search(worker.error):
        return own("disk full", f"found its disk full{while_}", advice="free some of it and start again")
    if _MEMORY.search(worker.error):
        return own("out of memory", f"ran out of memory{while_}", advice="plan for less memory and start again")
    if worker.signal:
        return own("killed", f"was ended by {worker.signal}{while_}")
    if _SENTENCE.match(worker.error):
        return own("bad input", f"was given bad input{while_}", worker.error.partition(": ")[2], advice="")
    if worker.failed or worker.state == "ended":
        code = "" if worker.code in (None, 1) else f" with exit code {worker.code}"
        return own("exception" if worker.failed else "exit", f"failed{code}{while_}")
    return own("collective", "is ending, and has not said why", order=5)


def _left(reports: Mapping[int, HostReport]) -> Iterator[_CauseCandidate]:
    """Yield the workers that ended well while others still needed them."""
    for rank, report in reports.items():
        if report.worker and report.worker.good:
            what = "the worker ended with exit code 0 while others were at work"
            yield _CauseCandidate(5, "exit", (rank,), what, report.worker.ended_age)


def _silence(reports: Mapping[int, HostReport], rank: int) -> float:
    """Return the seconds for which the neighbors of a host have not heard it."""
    spans = [report.silences[rank] for report in reports.values() if rank in report.silences]
    return max((seconds for seconds, ended in spans if not ended), default=0.0)


def _lost(
    reports: Mapping[int, HostReport], names: Sequence[str], joined: bool, machines: Sequence[str]
) -> _CauseCandidate | None:
    """Return the hosts that have not reported, as a cause, or None if all have."""
    gone = sorted(set(range(len(names))) - set(reports))
    if not gone:
        return None
    refused = [i for i in gone if any(report.unreachable.get(i) == REFUSED for report in reports.values())]
    if refused:
        gone = refused
    elif joined and (len(reports) < len(gone) or (len(reports) == len(gone) and 0 in gone)):
        # The smaller part of a divided network is the lost one. Of two halves, the half with the first host continues.
        gone = sorted(reports)
    many = len(gone) > 1
    them, without = "them" if many else "it", ",".join([*dict.fromkeys(machines[i] for i in gone)][:8])
    advice = f"bring {them} back or plan without {them} (planner.plan --without={without}), and start again"
    if not joined:
        what = f"{'have' if many else 'has'} not come: no supervisor there has been heard since this one was started"
        advice = "start one there, too"
    elif refused:
        what = "are gone: their workers and supervisors" if many else "is gone: its worker and its supervisor"
        what += " have ended without a word (killed, or the host has restarted)"
    else:
        seconds = max(_silence(reports, i) for i in range(len(names)))
        what = f"{'have' if many else 'has'} not been heard by any other host for {_seconds(seconds)}"
        what += ": down, or without a network"
    return _CauseCandidate(2, "lost", tuple(gone), what, None, advice=advice, leave_out=tuple(gone))


def _links(reports: Mapping[int, HostReport], names: Sequence[str], machines: Sequence[str]) -> _CauseCandidate | None:
    """Return the broken links between hosts that have both reported, as a cause, or None without any."""
    now: dict[tuple[int, int], float] = {}
    past: dict[tuple[int, int], tuple[float, float]] = {}
    for i, report in reports.items():
        for j, why in report.unreachable.items():
            if j in reports and why != REFUSED:
                pair = (min(i, j), max(i, j))
                now[pair] = max(now.get(pair, 0.0), report.silences.get(j, (0.0, 0.0))[0])
        for j, span in report.silences.items():
            if j in reports and span[1]:
                pair = (min(i, j), max(i, j))
                past[pair] = max(past.get(pair, (0.0, 0.0)), span)
    if not now and not past:
        return None
    pairs = sorted(now or past)
    counts = Counter(i for pair in pairs for i in pair)
    worst = max(counts, key=lambda i: (counts[i], i))
    if len(pairs) == 1:
        what = f"the link between {names[pairs[0][0]]} and {names[pairs[0][1]]}"
    else:
        what = f"each of the links {_listed([f'{names[a]} - {names[b]}' for a, b in pairs])}"
    if now:
        seconds = max(now.values())
        what += " carries nothing" + (f" for {_seconds(seconds)}" if seconds else "")
        what += ", while other hosts hear both" if len(names) > 2 else ""
    else:
        seconds, ended = max(past.values())
        what += f" carried nothing for {_seconds(seconds)} until {_seconds(ended)} ago, longer than training can wait"
    advice = f"mend it or plan without one of the two (planner.plan --without={machines[worst]}), and start again"
    return _CauseCandidate(3, "link", tuple(sorted(counts)), what, None, advice=advice, leave_out=(worst,))


def _standing(reports: Mapping[int, HostReport]) -> Iterator[_CauseCandidate]:
    """Yield the workers that the others wait for."""
    workers = {i: r.worker for i, r in reports.items() if r.worker}
    running = {i: worker for i, worker in workers.items() if worker.state == "running" and not worker.failed}
    for rank, worker in running.items():
        waiting = any(other.doing != worker.doing or i not in running for i, other in workers.items())
        told, seconds = worker.told_age, _seconds(worker.told_age)
        if worker.frozen and told > _MOMENT:
            yield _CauseCandidate(4, "frozen", (rank,), f"the worker has been {worker.frozen} for {seconds}", told)
        elif worker.doing and told > _MOMENT and (waiting or reports[rank].hung):
            what = f"the worker has been {worker.doing} for {seconds}, and the others wait for it"
            advice = "give a larger --link_timeout if it needs so long, and start again"
            yield _CauseCandidate(4, "busy", (rank,), what, told, advice=advice)
        elif reports[rank].slow:
            what = f"its CPU takes {reports[rank].slow:.1f} times as long as the others' for the same work"
            yield _CauseCandidate(4, "slow", (rank,), what, told)
    steps = {rank: worker.step for rank, worker in running.items() if worker.step is not None}
    hung = [rank for rank in running if reports[rank].hung]
    if hung:
        behind = [rank for rank in steps if steps[rank] < max(steps.values())]
        told = max(running[rank].told_age for rank in hung)
        if len(behind) == 1:
            what = f"the worker has stood still for {_seconds(told)}, behind all others"
            yield _CauseCandidate(4, "stalled", (behind[0],), what, told)
        what = f"no worker has finished a step for {_seconds(told)}, though every host answers and every link carries"
        yield _CauseCandidate(6, "stalled", (), what, told)


def first(
    reports: Mapping[int, HostReport], names: Sequence[str], joined: bool = True, machines: Sequence[str] = ()
) -> FaultCause:
    """Return the first cause.

    Args:
        reports: reports of the hosts that could be asked, by host number; at least one.
        names: names of all hosts.
        joined: whether all hosts had joined the run.
        machines: the planner's names of the hosts, if several are processes of one machine; default: `names`.
    """
    machines = machines or names
    candidates = [found for rank, r in reports.items() if r.worker and (found := _ended(rank, r.worker))]
    elsewhere = (_lost(reports, names, joined, machines), _links(reports, names, machines))
    candidates += [found for found in elsewhere if found]
    candidates += [*_left(reports), *_standing(reports)]
    if not candidates:
        candidates = [_CauseCandidate(7, "stalled", (), "a worker ended, and no host says why", None)]
    chosen = min(candidates, key=lambda c: (c.order, -(c.age or 0.0), c.ranks))
    steps = {rank: r.worker.step for rank, r in reports.items() if r.worker and r.worker.step is not None}
    step = max((steps[i] for i in chosen.ranks if i in steps), default=max(steps.values(), default=None))
    return FaultCause(
        kind=chosen.kind,
        hosts=tuple(names[i] for i in chosen.ranks),
        step=step,
        age=chosen.age or 0.0,
        sentence=_sentence(chosen, names, step),
        leave_out=tuple(dict.fromkeys(machines[i] for i in chosen.leave_out)),
    )


def _sentence(chosen: _CauseCandidate, names: Sequence[str], step: int | None) -> str:
    hosts = _listed([names[i] for i in chosen.ranks]) if chosen.ranks else ""
    subject = {2: f"{hosts} ", 3: ""}.get(chosen.order, f"{hosts}: " if hosts else "")
    finished = "before the first step" if step is None else f"after step {step}"
    when = f", {_seconds(chosen.age)} ago" if chosen.age is not None and chosen.order in (1, 5) else ""
    detail = f" ({chosen.detail})" if chosen.detail else ""
    advice = f"; {chosen.advice}" if chosen.advice else ""
    return f"{subject}{chosen.what}, {finished}{when}{detail}{advice}"
