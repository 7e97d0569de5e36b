"""Supervisor of one host: it runs the worker, and agrees with the others on the first cause of a fault.

A run succeeds when all workers have ended with code 0. Otherwise one host notices the fault first, because its worker
has ended or hangs or because a neighbour is gone, and puts a report on the board. Then each host probes all others and
reports. Of the hosts that have reported, the one with the lowest number judges when all have reported or time is up.
All hosts print its sentence and end. A host that receives no judgement in time makes one, so that none waits forever.
"""

import asyncio
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence

from paxtrain import files
from paxtrain.knobs import knob
from paxtrain.process import supervised
from paxtrain.process.sealed import printable
from planner.supervision import first_cause
from planner.supervision.first_cause import FaultCause, HostReport
from planner.supervision.host_speed import HostSpeed
from planner.supervision.peer_connections import PeerConnections
from planner.supervision.watchdog import Watchdog
from planner.supervision.worker_process import WorkerProcess

FAULT = 3  # exit code
STOPPED = 143  # exit code of a process that SIGTERM ended, and of supervisors that it stopped before the run's end
_CHECK = 0.2  # seconds between two looks at the worker
_AT_LEAST = 1.0  # seconds that reports may take to arrive, even if all seem to be there
_SLACK = 2.0  # seconds that a judgement may take to reach all hosts


@dataclasses.dataclass(frozen=True)
class Limits:
    """Time limits of a supervised run, in seconds except `slow_step`.

    Attributes:
        link: seconds for which a link or a host may be silent.
        hang: seconds without a finished step; 0: 20 typical steps, and at least 2 --link_timeout + 5.
        phase: seconds for anything between steps: compiling, saving, restoring, evaluating.
        start: seconds to wait until all hosts have joined.
        settle: seconds for the hosts' reports on a fault.
        grace: seconds between SIGTERM and SIGKILL to a worker.
        slow_step: factor over the median step from which a note explains a slow step.
    """

    link: float = knob(60.0, least=1)
    hang: float = knob(0.0, least=0)
    phase: float = knob(1800.0, least=1)
    start: float = knob(300.0, least=1)
    settle: float = knob(5.0, least=1)
    grace: float = knob(5.0, least=0)
    slow_step: float = knob(3.0, least=1)

    @property
    def collective(self) -> int:
        """Seconds that a collective may take.

        TCP retransmits after pauses that double. A link that was cut for `link` seconds may carry data again only after
        as long again.
        """
        return int(2 * self.link) + 5

    @property
    def heartbeat(self) -> int:
        """Seconds that jax's coordination service waits before it ends all workers.

        They exceed the limit of a collective, whose error says more, and the time to agree on a cause.
        """
        return 2 * self.collective + int(self.settle + self.grace)

    @property
    def bound(self) -> float:
        """Seconds from a fault to the end of the last survivor if a step takes less than `hang` / 20."""
        return max(self.collective, self.hang) + self.settle + _SLACK + self.grace + 1.0


def environment(variables: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Return a worker's environment variables: collectives end within their limit, and jax's heartbeat comes later.

    NCCL's flag limits only the setup of its communicators. A collective that hangs on GPUs is ended by `hang`.
    """
    flags = variables.get("XLA_FLAGS", "")
    for name in ("xla_cpu_collective_timeout_seconds", "xla_gpu_nccl_termination_timeout_seconds"):
        if name not in flags:
            flags += f" --{name}={limits.collective}"
    return {**variables, "XLA_FLAGS": flags.strip(), supervised.HEARTBEAT: str(limits.heartbeat)}


class Supervisor:
    """Supervisor of one worker, from its start to its end."""

    def __init__(
        self,
        me: int,
        names: Sequence[str],
        channel: PeerConnections,
        worker: WorkerProcess,
        limits: Limits,
        report: pathlib.Path | None,
        machines: Sequence[str] = (),
    ) -> None:
        """Prepare a run; `run` starts it.

        Args:
            me: this host's number.
            names: names of all hosts in messages, unless a host announces another one.
            channel: connections to the other supervisors.
            worker: this host's worker, not started yet.
            limits: time limits of the run.
            report: JSON file for the cause and all reports of a fault; None: none is written.
            machines: the planner's names of the hosts, if several are processes of one machine; default: `names`.
        """
        self._me, self._names, self._channel, self._worker = me, list(names), channel, worker
        self._machines = list(machines or names)
        self._limits, self._file = limits, report
        self._joined = False
        self._news = asyncio.Event()
        self._fault = ""  # how this host noticed a fault; empty if it noticed none
        self._pace = HostSpeed(me, self._names, channel, worker, self._say)
        self._watchdog = Watchdog(me, self._names, channel, worker, limits.slow_step, self._say)
        self._silent: set[int] = set()
        self._stopped = False
        channel.board.listen(self._hear)

    def call_me(self, name: str) -> None:
        """Announce the name of this host in messages, before it joins."""
        self._channel.board.put(f"name/{self._me}", name)

    def _hear(self, entry: str) -> None:
        if entry.startswith("name/"):
            rank = int(entry.removeprefix("name/"))
            self._names[rank] = self._machines[rank] = self._channel.board[entry].value
        self._news.set()

    def stop(self) -> None:
        """End the run at the user's request; the worker may save a checkpoint first."""
        self._stopped = True
        self._worker.ask()
        self._news.set()

    # --- A run --------------------------------------------------------------------------------------------------------

    async def run(self) -> int:
        """Run to the end.

        Returns:
            Exit code: 0, 2 for bad input, STOPPED after SIGTERM before the first step, or FAULT.
        """
        await self._channel.start()
        try:
            self._joined = await self._gather()
            if self._stopped and not self._joined:
                return STOPPED
            if self._joined:
                await self._worker.start()
                if self._stopped:  # by a signal that arrived before the worker existed
                    self._worker.ask()
                beside = [asyncio.create_task(work) for work in (self._pace.keep(), self._watchdog.run())]
                try:
                    done = await self._watch()
                finally:
                    for task in beside:
                        task.cancel()
                if done:
                    return 0
            cause, judge = await self._agree()
            # A worker that has not joined the others yet does not handle SIGTERM, which then ends it.
            stopped = self._stopped and cause.kind == "stopped" and cause.step is None
            self._say("note: stopped before the first step" if stopped else f"error: {cause.sentence}")
            await self._worker.end(self._limits.grace)
            if stopped:
                return STOPPED
            self._write(cause, judge)
            return 2 if cause.kind == "bad input" else FAULT
        finally:
            await self._worker.end(self._limits.grace)
            await self._channel.close()

    async def _wait(self, seconds: float) -> None:
        """Wait for news from the board or the worker, at most `seconds`."""
        self._news.clear()
        self._worker.changed.clear()
        changed = [asyncio.create_task(event.wait()) for event in (self._news, self._worker.changed)]
        await asyncio.wait(changed, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for task in changed:
            task.cancel()

    async def _gather(self) -> bool:
        """Wait for all hosts to join and return whether they did in time."""
        until = time.monotonic() + self._limits.start
        while self._channel.missing and time.monotonic() < until and not self._alarm and not self._stopped:
            await self._wait(_CHECK)
        return not self._channel.missing and not self._alarm

    async def _watch(self) -> bool:
        """Wait until all workers have succeeded (True) or a fault is noticed here or elsewhere (False)."""
        while True:
            status = self._worker.status()
            if status.good and f"done/{self._me}" not in self._channel.board:
                self._channel.board.put(f"done/{self._me}", status.step)
            if all(f"done/{rank}" in self._channel.board for rank in range(len(self._names))):
                return True
            self._fault = self._fault_here()
            if self._fault or self._alarm:
                return False
            self._pace.tell()
            self._tell_of_silence()
            await self._wait(_CHECK)

    def _fault_here(self) -> str:
        """Return the fault that this host notices, or ""."""
        status = self._worker.status()
        if self._worker.over and not status.good:
            return "the worker ended"
        if self._hung:
            return "the worker hangs"
        if any(f"done/{rank}" not in self._channel.board for rank in self._channel.refused):
            return "a neighbour is gone"
        if any(seconds > self._limits.link and not ended for seconds, ended in self._channel.silences.values()) and (
            status.told_age > self._limits.link or status.state == "ended"
        ):
            return "a neighbour is silent"
        return ""

    @property
    def _hung(self) -> bool:
        status = self._worker.status()
        if status.state == "ended":
            return False
        if status.doing or status.step_seconds is None:
            return status.told_age > self._limits.phase
        return status.told_age > (self._limits.hang or max(self._limits.collective, 20 * status.step_seconds))

    # --- The first cause ----------------------------------------------------------------------------------------------

    @property
    def _alarm(self) -> bool:
        """True if a host has noticed a fault."""
        return bool(self._channel.board.numbers("report/"))

    def _reports(self) -> dict[int, HostReport]:
        """Return the reports on the board by host number, with all ages as of now."""
        entries = {rank: self._channel.board[f"report/{rank}"] for rank in self._channel.board.numbers("report/")}
        return {rank: HostReport.from_json(entry.value).older(entry.age) for rank, entry in entries.items()}

    def _report(self, unreachable: Mapping[int, str], final: bool) -> None:
        """Put this host's report on the board."""
        spans = self._channel.silences.items()
        silences = {rank: span for rank, span in spans if span[1] < self._limits.collective}
        report = HostReport(
            name=self._names[self._me],
            worker=self._worker.status() if self._joined else None,
            hung=self._joined and self._hung,
            unreachable=unreachable,
            silences=silences,
            slow=self._pace.slow,
            final=final,
        )
        self._channel.board.put(f"report/{self._me}", report.to_json())

    async def _agree(self) -> tuple[FaultCause, str]:
        """Return the first cause, and the name of the host that judged."""
        began = time.monotonic()
        until = began + self._limits.settle
        self._report({}, final=False)
        asking, over = asyncio.create_task(self._ask_all(until)), False
        try:
            while (verdict := self._verdict()) is None:
                if asking.done() and self._worker.over != over:  # the worker ended after the rest was known
                    over = self._worker.over
                    self._report(asking.result(), final=True)
                now = time.monotonic()
                if now > until + _SLACK:
                    break
                first = min(self._channel.board.numbers("report/")) == self._me
                if first and (now > until or (now > began + _AT_LEAST and self._complete(self._reports()))):
                    break
                await asyncio.sleep(_CHECK / 2)
        finally:
            asking.cancel()
        if verdict is None:
            cause = first_cause.first(self._reports(), self._names, self._joined, self._machines)
            self._channel.board.put(f"verdict/{self._me}", dataclasses.asdict(cause))
            verdict = self._verdict()
            assert verdict is not None, "this host has just put one on the board"
        return verdict

    async def _ask_all(self, until: float) -> dict[int, str]:
        """Probe the other hosts, complete this host's report, and return the unreachable hosts with the reasons."""
        unreachable = await self._channel.probe(range(len(self._names)))
        while self._worker.status().state == "ending" and time.monotonic() < until:
            await asyncio.sleep(_CHECK / 4)  # its exit code will be known in a moment
        self._report(unreachable, final=True)
        return unreachable

    def _complete(self, reports: Mapping[int, HostReport]) -> bool:
        """Return whether each host has reported finally or cannot be reached."""
        missing = [rank for rank in range(len(self._names)) if rank not in reports]
        unreachable = {rank for report in reports.values() for rank in report.unreachable}
        return all(report.final for report in reports.values()) and unreachable.issuperset(missing)

    def _verdict(self) -> tuple[FaultCause, str] | None:
        """Return the verdict of the lowest-numbered host on the board and that host's name, or None without one."""
        judges = self._channel.board.numbers("verdict/")
        if not judges:
            return None
        values = self._channel.board[f"verdict/{min(judges)}"].value
        tuples = {key: tuple(values[key]) for key in ("hosts", "leave_out")}
        return FaultCause(**{**values, **tuples}), self._names[min(judges)]

    def _write(self, cause: FaultCause, judge: str) -> None:
        if self._file is None:
            return
        reports = {self._names[rank]: report.to_json() for rank, report in sorted(self._reports().items())}
        found = {
            "cause": dataclasses.asdict(cause),
            "judged_by": judge,
            "noticed_here": self._fault,
            "reports": reports,
        }
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            files.write(self._file, json.dumps(found, indent=1) + "\n")
        except OSError as error:
            self._say(f"warning: cannot write the report to {self._file} ({error.strerror})")

    # --- Notes for the user -------------------------------------------------------------------------------------------

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            print(printable(text), file=sys.stderr, flush=True)

    def _tell_of_silence(self) -> None:
        for rank, (seconds, ended) in self._channel.silences.items():
            me, other = self._names[self._me], self._names[rank]
            if not ended and rank not in self._silent:
                self._silent.add(rank)
                self._say(
                    f"note: {me} has not heard {other} for {seconds:.0f} s; up to {self._limits.link:g} s are survived"
                )
            elif ended and rank in self._silent:
                self._silent.remove(rank)
                self._say(f"note: {me} hears {other} again, after {seconds:.1f} s")
