"""Note on a slow step: which host or link the others wait for, and when training continued.

A host whose worker is late in a step looks around and puts its view on the board; then all other hosts do the same. The
first host prints one line about all views. The line also goes into the log of each host that it names.

Links are measured by parcels to the processes that the worker exchanges data with: once when the run begins, mostly
while it compiles, and again when a step is late. A ping would not do, because idle links of any rate answer it equally
fast. Each link is compared with itself, because links differ by nature.
"""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence

from paxtrain.process.supervised import MeshPosition
from planner.supervision import host_speed
from planner.supervision.peer_connections import PeerConnections, successors
from planner.supervision.slow_step import SlowCause, SlowStepClock, SlowStepNote, StepView, seen
from planner.supervision.worker_process import WorkerProcess, WorkerStatus

_LOOK = 0.2  # seconds between two looks at the worker
_PARCELS = 2.0  # seconds that the measurement of a link may take
_ROUND = 5.0  # seconds that the views of all hosts may take to arrive


def _finished(worker: WorkerStatus) -> int:
    """Return the last finished step of a worker, or -1 before the first."""
    return -1 if worker.step is None else worker.step


@dataclasses.dataclass
class _ReportedStep:
    """A slow step that the first host has printed a line about.

    Attributes:
        number: number of the step.
        last: last step that this host's worker had finished by then.
        began: start of the step by this host's monotonic clock, in seconds.
        hosts: numbers of the hosts that the line names.
    """

    number: int
    last: int | None
    began: float
    hosts: tuple[int, ...]


class Watchdog:
    """One host's watchdog for slow steps."""

    def __init__(
        self,
        me: int,
        names: Sequence[str],
        channel: PeerConnections,
        worker: WorkerProcess,
        times: float,
        say: Callable[[str], None],
    ) -> None:
        """Start with no views; `run` watches.

        Args:
            me: this host's number.
            names: names of all hosts in messages.
            channel: connections to the other supervisors.
            worker: this host's worker.
            times: factor over the median step from which a step is slow.
            say: function that prints a line for the user.
        """
        self._me, self._names, self._channel, self._worker, self._say = me, names, channel, worker, say
        self._clock = SlowStepClock(times)
        self._rates: dict[int, float] = {}  # bytes per second by neighbour when the run began
        self._views: dict[int, tuple[int, StepView]] = {}  # by host: version of its entry, and its view
        self._about = -1  # newest late step that this host has looked around for
        self._went_on = 0.0  # time at which its own worker last ended a late step
        self._opened: float | None = None  # start of a round of views; used on the first host only, as is the rest
        self._judged = -1  # newest late step that was judged
        self._told: _ReportedStep | None = None
        channel.board.listen(self._note)

    async def run(self) -> None:
        """Watch until cancelled."""
        neighbours = await self._neighbours()
        for rank, rate in zip(neighbours, await self._measure(neighbours)):
            self._rates[rank] = rate
        viewing: asyncio.Task[None] | None = None
        try:
            while True:
                was = self._clock.late
                news = self._clock.look(self._worker.status())
                if was and not self._clock.late:
                    self._went_on = time.monotonic()
                self._read()
                # A late step one number away is the same event, because hosts finish a step at different times.
                asked = self._newest > self._about + 1
                if (news or asked) and (viewing is None or viewing.done()):
                    viewing = asyncio.create_task(self._look_around())
                if self._me == 0:
                    self._judge()
                    self._tell_of_the_end()
                await asyncio.sleep(_LOOK)
        finally:
            if viewing is not None:
                viewing.cancel()

    # --- The view of this host ---------------------------------------------------------------------------------------

    def _places(self) -> dict[int, MeshPosition]:
        """Return the mesh positions that workers have reported, by host number."""
        entries = {rank: self._channel.board[f"place/{rank}"].value for rank in self._channel.board.numbers("place/")}
        return {
            rank: MeshPosition(**{**value, "neighbours": tuple(value["neighbours"])}) for rank, value in entries.items()
        }

    async def _neighbours(self) -> list[int]:
        """Return the hosts with which the worker exchanges data, or those that this host dials if they are unknown."""
        stepped: float | None = None  # time at which the first step was seen
        while True:
            place, now = self._worker.place, time.monotonic()
            if self._worker.status().step is not None:
                stepped = stepped or now
            if place is not None:
                if f"place/{self._me}" not in self._channel.board:
                    self._channel.board.put(f"place/{self._me}", dataclasses.asdict(place))
                hosts = {each.process: rank for rank, each in self._places().items()}
                if hosts.keys() >= set(place.neighbours):
                    return [hosts[process] for process in place.neighbours]
            if stepped is not None and (place is None or now > stepped + _ROUND):
                return successors(self._me, len(self._names))
            await asyncio.sleep(_LOOK)

    async def _measure(self, ranks: Sequence[int]) -> list[float]:
        """Return the bytes per second to each of these hosts, measured at the same time."""
        return await asyncio.gather(*(self._channel.rate(rank, _PARCELS) for rank in ranks))

    def _read(self) -> None:
        """Read new views from the board."""
        for rank in self._channel.board.numbers("view/"):
            entry = self._channel.board[f"view/{rank}"]
            if rank not in self._views or self._views[rank][0] != entry.version:
                self._views[rank] = entry.version, StepView.from_json(entry.value)

    @property
    def _newest(self) -> int:
        """Last finished step of the newest late worker on the board; -1 if there is none."""
        return max((_finished(view.worker) for _, view in self._views.values() if view.late), default=-1)

    async def _look_around(self) -> None:
        """Measure the CPU and the links, and put this host's view on the board."""
        worker, late, began = self._worker.status(), self._clock.late, time.monotonic()
        self._about = max(self._newest, _finished(worker) if late else -1)
        taken = await host_speed.burst()
        if self._worker.status().frozen != worker.frozen:  # it waited for a disk for a moment only
            worker = dataclasses.replace(worker, frozen="")
        links = {}
        for rank, rate in zip(self._rates, await self._measure(list(self._rates))):
            links[rank] = (rate, self._rates[rank])
        view = StepView(worker, late, self._about, taken, links).older(time.monotonic() - began)
        self._channel.board.put(f"view/{self._me}", view.to_json())

    # --- The judgement of the first host ------------------------------------------------------------------------------

    def _judge(self) -> None:
        """Print the cause when all hosts have put their views on the board or time is up."""
        now, newest = time.monotonic(), self._newest
        if newest <= self._judged + 1:
            return
        self._opened = self._opened or now
        views = {rank: view for rank, (_, view) in sorted(self._views.items()) if view.about >= newest - 1}
        if len(views) < len(self._names) and now < self._opened + _ROUND:
            return
        self._opened, self._judged = None, newest
        if any(view.worker.doing or view.worker.state != "running" for view in views.values()):
            return  # they wait for a worker that saves, evaluates or compiles or has ended, not for a step
        rank, late = next((i, view) for i, view in views.items() if view.late and view.worker.step == newest)
        late = late.older(self._channel.board[f"view/{rank}"].age)
        self._tell(late.worker, seen(views, self._called()))

    def _called(self) -> list[str]:
        """Return the hosts' names with their roles, such as "pax3 (stage 1, data 0)"."""
        roles = {rank: f" ({place.role})" for rank, place in self._places().items() if place.role}
        return [f"{name}{roles.get(rank, '')}" for rank, name in enumerate(self._names)]

    def _tell(self, late: WorkerStatus, what: SlowCause) -> None:
        """Print the note about a slow step and its cause."""
        assert late.step_seconds is not None, "no step is late before the median is known"
        now = time.monotonic()
        number, began = _finished(late) + 1, now - late.told_age
        over = self._went_on > began
        seconds = (self._went_on if over else now) - began
        has = f"took {seconds:.1f} s" if over else f"has taken {seconds:.1f} s so far"
        times = f"{seconds / late.step_seconds:.1f} times the median of {late.step_seconds:.2g} s"
        self._put(f"note: step {number} {has}, {times}; {what.text}", what.hosts)
        self._told = None if over else _ReportedStep(number, self._worker.status().step, began, what.hosts)

    def _tell_of_the_end(self) -> None:
        """Print how long the slow step took when it is over."""
        told = self._told
        if told is not None and self._worker.status().step != told.last:
            self._told = None
            seconds = time.monotonic() - told.began
            self._put(f"note: step {told.number} took {seconds:.1f} s in all; training goes on", told.hosts)

    def _put(self, text: str, hosts: Sequence[int]) -> None:
        """Print a note and put it on the board for the logs of this host and of `hosts`."""
        self._say(text)
        self._channel.board.put("note/0", dataclasses.asdict(SlowStepNote(text, (0, *hosts))))

    def _note(self, name: str) -> None:
        """Write the first host's note into the log if it is about this host."""
        if name == "note/0" and self._me in self._channel.board[name].value["hosts"]:
            self._worker.note(self._channel.board[name].value["text"])
