"""Connections between the supervisors of a run, which outlive the workers and carry the board's entries.

Each supervisor dials the hosts 1, 2, 4, 8, ... places after it. Of 1,000 hosts each holds 20 connections. News reaches
all of them in ten hops, around any few connections that are cut: a supervisor that puts an entry on its board sends it
to its neighbours, and each of them forwards what is new to it.

Messages are sealed with the job's secret, and who does not know it hears nothing (`paxtrain/process/sealed.py`).

A neighbour that has been silent for a while is dialled again. The outcome distinguishes a link that carries nothing
from a supervisor that has ended. `probe` asks any host, neighbour or not.
"""

import asyncio
import contextlib
import math
import resource
import secrets
import sys
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from paxtrain.errors import UserError
from paxtrain.process import sealed
from paxtrain.process.listening import SealedServer
from paxtrain.process.sealed import SealedStream
from planner.supervision.peer_board import BoardEntry, PeerBoard

PORT = 17430  # default port of supervisors: below the kernel's ephemeral ports, and no known service's default
TICK = 0.5  # seconds between two pings
QUIET = 3.0  # seconds of silence after which a neighbour is dialled again
REFUSED = "refused"  # nothing listens there, or only a supervisor that no longer belongs to this run
_DIAL = 2.0  # seconds that opening a connection may take
_AT_ONCE = 128  # probes at the same time
_UNSENT = 1 << 22  # a connection with more unsent bytes is closed
_CHUNK = bytes(1 << 16)
# A rate is measured with parcels of _SMALLEST to _LARGEST bytes. A parcel that takes _ENOUGH seconds is long enough,
# and _TIMES such parcels suffice.
_SMALLEST, _LARGEST, _ENOUGH, _TIMES = 1 << 17, 1 << 23, 0.05, 3


class PeerConnection:
    """A connection to one host.

    Attributes:
        stream: the sealed messages.
        trip: seconds that a ping takes there and back.
    """

    def __init__(self, stream: SealedStream) -> None:
        self.stream = stream
        self.trip = 0.0

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a message."""
        self.write(sealed.encode(message))

    def write(self, content: bytes) -> None:
        """Queue an encoded message; close the connection if too much is unsent."""
        if self.stream.unsent > _UNSENT:
            self.close()
        self.stream.write(content)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if the connection has ended."""
        try:
            return await self.stream.receive()
        except OSError:
            return None

    async def send_parcel(self, count: int) -> None:
        """Send a parcel of `count` bytes, no faster than they leave."""
        self.send({"parcel": count})
        for start in range(0, count, len(_CHUNK)):
            await self.stream.send_raw(_CHUNK[: count - start])

    @property
    def closed(self) -> bool:
        """True if the connection is closed or closing."""
        return self.stream.closed

    def close(self) -> None:
        """Close the connection."""
        self.stream.close()


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def successors(me: int, count: int) -> list[int]:
    """Return the hosts that host `me` of `count` dials: those 1, 2, 4, ... places after it."""
    return sorted({(me + (1 << k)) % count for k in range(max(0, count - 1).bit_length())} - {me})


class PeerConnections:
    """This host's connections to its neighbours, and the board that they carry.

    Attributes:
        board: entries of all hosts by name.
        aside: JSON value that each ping carries to the neighbours alone.
        asides: last such value of each neighbour, by host number.
        refused: neighbours whose supervisor ended after all hosts had joined.
    """

    def __init__(
        self,
        me: int,
        addresses: Sequence[tuple[str, int]],
        run: str,
        secret: bytes,
        fits: Callable[[str, object], bool] = lambda kind, value: True,
    ) -> None:
        """Describe the connections; `start` opens them.

        Args:
            me: this host's number.
            addresses: host and port of every supervisor, by host number.
            run: identifier that the supervisors of one run share; others are turned away.
            secret: the job's secret; who does not know it is not heard.
            fits: whether a value from another host is one that entries of this kind ("report") have.
        """
        self._me, self._addresses, self._run = me, list(addresses), run
        self._secret, self._fits = secret, fits
        self._boot = secrets.token_hex(8)  # distinguishes this process from an earlier one on the same host
        self.board = PeerBoard(self._forward)
        self.aside: float | None = None
        self.asides: dict[int, float | None] = {}
        self.refused: set[int] = set()
        self._connections: dict[int, list[PeerConnection]] = {}  # by neighbour; each side may have opened one
        self._made: set[PeerConnection] = set()  # all that may be open, in use or not
        self._heard: dict[int, float] = {}
        self._silences: dict[int, tuple[float, float]] = {}  # by neighbour: seconds of silence, and the time of its end
        self._server = SealedServer(secret, self._answer, self._say)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    # --- The board ----------------------------------------------------------------------------------------------------

    def _forward(self, name: str, source: object) -> None:
        line = sealed.encode(self._message(name))
        for connection in self._open():
            if connection is not source:
                connection.write(line)

    def _message(self, name: str) -> dict[str, object]:
        entry = self.board[name]
        return {"name": name, "value": entry.value, "version": entry.version, "age": entry.age}

    def _boot_of(self, rank: int) -> str | None:
        entry = self.board.get(f"here/{rank}")
        return entry.value if entry else None

    @property
    def missing(self) -> list[int]:
        """Hosts that have not joined yet."""
        return [rank for rank in range(len(self._addresses)) if f"here/{rank}" not in self.board]

    # --- Connections --------------------------------------------------------------------------------------------------

    def _connection(self, stream: SealedStream) -> PeerConnection:
        made = PeerConnection(stream)
        self._made = {connection for connection in self._made if not connection.closed} | {made}
        return made

    def _open(self) -> list[PeerConnection]:
        return [connection for several in self._connections.values() for connection in several]

    async def start(self) -> None:
        """Start listening and dialling.

        Raises:
            UserError: if the port cannot be opened.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
        host, port = self._addresses[self._me]
        try:
            await self._server.start(host, port)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(
                f"cannot listen on port {port} ({why}); does another supervisor run here? "
                "Stop it or choose another --port"
            ) from error
        self.board.put(f"here/{self._me}", self._boot)
        self._spawn(self._tick())
        for rank in successors(self._me, len(self._addresses)):
            self._spawn(self._watch(rank))

    def _say(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the reader is gone
            print(text, file=sys.stderr, flush=True)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hello(self, rank: int | None, what: str) -> dict[str, object]:
        known = None if rank is None else self._boot_of(rank)
        joined = not self.missing
        return {"run": self._run, "rank": self._me, "boot": self._boot, "you": known, "joined": joined, "what": what}

    def _ours(self, hello: Mapping[str, Any]) -> bool:
        """Return whether a greeting comes from this run, and not from an earlier run or a restarted supervisor."""
        if hello.keys() != self._hello(None, "").keys() or hello["run"] != self._run:
            return False
        if hello["rank"] not in range(len(self._addresses)):
            return False
        known = self._boot_of(hello["rank"])
        return (known == hello["boot"] or bool(self.missing)) and (hello["you"] == self._boot or not hello["joined"])

    async def _answer(self, stream: SealedStream, hello: dict[str, Any]) -> None:
        connection = self._connection(stream)
        ours = self._ours(hello) and not self._closed
        connection.send(self._hello(hello["rank"], "welcome") if ours else {"what": "no"})
        if ours and hello["what"] == "watch":
            await self._converse(hello["rank"], connection)
        while ours and hello["what"] == "parcels" and (message := await connection.receive()):
            count = message.get("parcel")
            if not isinstance(count, int) or count > _LARGEST:
                break
            await stream.skip_raw(count)
            connection.send({"took": count})

    async def _dial(self, rank: int, what: str) -> PeerConnection:
        """Return a connection that a host has accepted.

        Raises:
            ConnectionRefusedError: if nothing listens there, or a supervisor of another run does.
            OSError, TimeoutError: if the connection fails otherwise.
        """
        host, port = self._addresses[rank]
        async with asyncio.timeout(_DIAL):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                stream = await SealedStream.meet(reader, writer, self._secret, dialled=True)
                stream.send(self._hello(rank, what))
                answer = await stream.receive()
                if answer.get("what") != "welcome" or answer.get("rank") != rank or not self._ours(answer):
                    raise ConnectionRefusedError
            except BaseException:
                writer.close()
                raise
        connection = self._connection(stream)
        return connection

    async def _converse(self, rank: int, connection: PeerConnection) -> None:
        """Send a neighbour the whole board and receive from it until the connection ends."""
        if self.silent(rank) > QUIET:  # earlier connections carry nothing
            for before in self._connections.get(rank, []):
                before.close()
        self._connections.setdefault(rank, []).append(connection)
        self._hear(rank)
        for name in self.board:
            connection.send(self._message(name))
        while (message := await connection.receive()) is not None:
            self._hear(rank)
            if not self._take(rank, message, connection):
                host = self._addresses[rank][0]
                self._say(
                    sealed.printable(f"note: {host} sends what no supervisor of this version does: {message}", 300)
                )
                break
        self._connections[rank].remove(connection)
        connection.close()

    def _take(self, rank: int, message: Mapping[str, Any], connection: PeerConnection) -> bool:
        """Act on a neighbour's message and return whether it is one that a supervisor sends."""
        if "ping" in message:
            aside = message.get("aside")
            if not (aside is None or self._fits("aside", aside)):
                return False
            self.asides[rank] = aside
            connection.send({"pong": message["ping"]})
        elif "pong" in message:
            if not _is_number(message["pong"]):
                return False
            connection.trip = max(time.monotonic() - message["pong"], 0.0)
        else:
            name, version, age = (message.get(key) for key in ("name", "version", "age"))
            if not (isinstance(name, str) and isinstance(version, int) and _is_number(age) and age >= 0):
                return False
            kind, _, number = name.partition("/")
            if number not in map(str, range(len(self._addresses))) or not self._fits(kind, message.get("value")):
                return False
            entry = BoardEntry(message["value"], version, time.monotonic() - age - connection.trip / 2)
            self.board.store(name, entry, connection)
        return True

    async def _watch(self, rank: int) -> None:
        """Keep a connection to a neighbour open."""
        while not self._closed:
            if self._connections.get(rank) and self.silent(rank) < QUIET:
                await asyncio.sleep(TICK / 5)
                continue
            try:
                connection = await self._dial(rank, "watch")
            except ConnectionRefusedError:
                if not self.missing:
                    self._lose(rank)
                await asyncio.sleep(TICK / 2)
            except (TimeoutError, OSError):
                await asyncio.sleep(TICK)
            else:
                self._spawn(self._converse(rank, connection))
                await asyncio.sleep(0)

    def _lose(self, rank: int) -> None:
        if rank not in self.refused:
            self.refused.add(rank)
            self.board.notify("")

    # --- Silence ------------------------------------------------------------------------------------------------------

    def _hear(self, rank: int) -> None:
        now = time.monotonic()
        if (silent := now - self._heard.get(rank, now)) > QUIET:
            self._silences[rank] = (silent, now)
        self._heard[rank] = now

    def silent(self, rank: int) -> float:
        """Return the seconds since a neighbour was last heard; 0 if it never was."""
        now = time.monotonic()
        return now - self._heard.get(rank, now)

    @property
    def silences(self) -> dict[int, tuple[float, float]]:
        """Silent neighbours by number: seconds of silence, and seconds since it ended (0: it has not)."""
        now = time.monotonic()
        found = {rank: (seconds, now - ended) for rank, (seconds, ended) in self._silences.items()}
        return found | {rank: (self.silent(rank), 0.0) for rank in self._heard if self.silent(rank) > QUIET}

    async def _tick(self) -> None:
        last = time.monotonic()
        while True:
            for connection in self._open():
                connection.send({"ping": time.monotonic(), "aside": self.aside})
            await asyncio.sleep(TICK)
            now = time.monotonic()
            if (
                late := now - last - TICK
            ) > TICK:  # this process was stopped or starved, so the neighbours were not silent
                self._heard = {rank: heard + late for rank, heard in self._heard.items()}
            last = now

    async def probe(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the hosts that do not answer, by number, with the reason: REFUSED or the network's error."""
        slots, why = asyncio.Semaphore(_AT_ONCE), {}

        async def dial(rank: int) -> None:
            for _ in range(3):  # a process that is being killed accepts and hangs up; a moment later it refuses
                with contextlib.suppress(ConnectionResetError, BrokenPipeError):
                    (await self._dial(rank, "probe")).close()
                    return
                await asyncio.sleep(TICK / 2)
            (await self._dial(rank, "probe")).close()

        async def ask(rank: int) -> None:
            async with slots:
                try:
                    await dial(rank)
                except ConnectionRefusedError:
                    why[rank] = REFUSED
                except TimeoutError:
                    why[rank] = f"no answer for {_DIAL:g} s"
                except OSError as error:
                    why[rank] = error.strerror or str(error)

        await asyncio.gather(*(ask(rank) for rank in ranks if rank != self._me))
        return why

    async def rate(self, rank: int, limit: float) -> float:
        """Return the bytes per second that the route to a host carries now; 0 if not even a small parcel arrives.

        Larger parcels follow while they take almost no time. Beyond some GB/s this measures Python.

        Args:
            rank: number of the host.
            limit: seconds that the measurement may take.
        """
        rates, size, long = [0.0], _SMALLEST, 0
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(limit):
                connection = await self._dial(rank, "parcels")
                try:
                    while size <= _LARGEST and long < _TIMES:
                        began = time.monotonic()
                        await connection.send_parcel(size)
                        if await connection.receive() is None:
                            break
                        took = time.monotonic() - began
                        rates.append(size / took)
                        if took < _ENOUGH:
                            size *= 4
                        else:
                            long += 1
                finally:
                    connection.close()
        return max(rates[-_TIMES:])  # small parcels may pass faster than the link, and one may have waited for a CPU

    async def close(self) -> None:
        """Send what is still queued, as far as possible, and close all connections."""
        self._closed = True
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(c.stream.drain() for c in self._open())), _DIAL)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.close()
        for connection in self._made:
            connection.close()
