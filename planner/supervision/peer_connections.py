"""Connections between the supervisors of a run, which outlive the workers and carry the board's entries.

Each supervisor dials the hosts 1, 2, 4, 8, ... places after it. Of 1,000 hosts each holds 20 connections. News reaches
all of them in ten hops, around any few connections that are cut: a supervisor that puts an entry on its board sends it
to its neighbours, and each of them forwards what is new to it.

A neighbour that has been silent for a while is dialled again. The outcome distinguishes a link that carries nothing
from a supervisor that has ended. `probe` asks any host, neighbour or not.
"""

import asyncio
import contextlib
import json
import resource
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from paxtrain.errors import UserError
from planner.supervision.peer_board import BoardEntry, PeerBoard

PORT = 17430  # default port of supervisors: below the kernel's ephemeral ports, and no known service's default
TICK = 0.5  # seconds between two pings
QUIET = 3.0  # seconds of silence after which a neighbour is dialled again
REFUSED = "refused"  # nothing listens there, or only a supervisor that no longer belongs to this run
_DIAL = 2.0  # seconds that opening a connection may take
_AT_ONCE = 128  # probes at the same time
_LINE = 1 << 22  # bytes of a message at most; a connection with more unsent bytes is closed
_CHUNK = bytes(1 << 16)
# A rate is measured with parcels of _SMALLEST to _LARGEST bytes. A parcel that takes _ENOUGH seconds is long enough,
# and _TIMES such parcels suffice.
_SMALLEST, _LARGEST, _ENOUGH, _TIMES = 1 << 17, 1 << 23, 0.05, 3


def _encode(message: Any) -> bytes:
    """Return a message as one line of JSON."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class PeerConnection:
    """A connection to one host that carries lines of JSON.

    Attributes:
        trip: seconds that a ping takes there and back.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.trip = 0.0

    def send(self, message: Any) -> None:
        """Queue a message."""
        self.write(_encode(message))

    def write(self, line: bytes) -> None:
        """Queue an encoded message; close the connection if too much is unsent."""
        if self._writer.transport.get_write_buffer_size() > _LINE:
            self.close()
        if not self._writer.is_closing():
            self._writer.write(line)

    async def receive(self) -> dict[str, Any] | None:
        """Return the next message, or None if the connection has ended."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    async def send_parcel(self, count: int) -> None:
        """Send a parcel of `count` bytes, no faster than they leave."""
        self.send({"parcel": count})
        for start in range(0, count, len(_CHUNK)):
            self._writer.write(_CHUNK[: count - start])
            await self._writer.drain()

    async def receive_parcel(self, count: int) -> None:
        """Read and drop `count` bytes, or as many as arrive before the connection ends."""
        with contextlib.suppress(OSError):
            while count > 0 and (data := await self._reader.read(min(count, len(_CHUNK)))):
                count -= len(data)

    async def drain(self) -> None:
        """Wait until all queued messages have left or the connection is closed."""
        while self._writer.transport.get_write_buffer_size() and not self._writer.is_closing():
            await asyncio.sleep(0.01)

    @property
    def closed(self) -> bool:
        """True if the connection is closed or closing."""
        return self._writer.is_closing()

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


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

    def __init__(self, me: int, addresses: Sequence[tuple[str, int]], run: str) -> None:
        """Describe the connections; `start` opens them.

        Args:
            me: this host's number.
            addresses: host and port of every supervisor, by host number.
            run: identifier that the supervisors of one run share; others are turned away.
        """
        self._me, self._addresses, self._run = me, list(addresses), run
        self._boot = secrets.token_hex(8)  # distinguishes this process from an earlier one on the same host
        self.board = PeerBoard(self._forward)
        self.aside: Any = None
        self.asides: dict[int, Any] = {}
        self.refused: set[int] = set()
        self._connections: dict[int, list[PeerConnection]] = {}  # by neighbour; each side may have opened one
        self._made: set[PeerConnection] = set()  # all that may be open, in use or not
        self._heard: dict[int, float] = {}
        self._silences: dict[int, tuple[float, float]] = {}  # by neighbour: seconds of silence, and the time of its end
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    # --- The board ----------------------------------------------------------------------------------------------------

    def _forward(self, name: str, source: object) -> None:
        line = _encode(self._message(name))
        for connection in self._open():
            if connection is not source:
                connection.write(line)

    def _message(self, name: str) -> dict[str, Any]:
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

    def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> PeerConnection:
        made = PeerConnection(reader, writer)
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
        port = self._addresses[self._me][1]
        try:
            self._server = await asyncio.start_server(self._accept, None, port, limit=_LINE, backlog=1024)
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

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _hello(self, rank: int | None, what: str) -> dict[str, Any]:
        known = None if rank is None else self._boot_of(rank)
        joined = not self.missing
        return {"run": self._run, "rank": self._me, "boot": self._boot, "you": known, "joined": joined, "what": what}

    def _ours(self, hello: Mapping[str, Any] | None) -> bool:
        """Return whether a greeting comes from this run, and not from an earlier run or a restarted supervisor."""
        if hello is None or hello.get("run") != self._run or hello.get("rank") not in range(len(self._addresses)):
            return False
        known = self._boot_of(hello["rank"])
        return (known == hello["boot"] or bool(self.missing)) and (hello["you"] == self._boot or not hello["joined"])

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = self._connection(reader, writer)
        if self._closed:
            connection.close()
        else:
            self._spawn(self._answer(connection))

    async def _answer(self, connection: PeerConnection) -> None:
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                hello = await asyncio.wait_for(connection.receive(), _DIAL)
                ours = self._ours(hello) and not self._closed
                connection.send(self._hello(hello["rank"], "welcome" if ours else "no") if hello else {})
                if hello is None or not ours:
                    return
                if hello["what"] == "watch":
                    await self._converse(hello["rank"], connection)
                while hello["what"] == "parcels" and (message := await connection.receive()):
                    await connection.receive_parcel(message.get("parcel", 0))
                    connection.send({"took": message.get("parcel")})
        finally:
            connection.close()

    async def _dial(self, rank: int, what: str) -> PeerConnection:
        """Return a connection that a host has accepted.

        Raises:
            ConnectionRefusedError: if nothing listens there, or a supervisor of another run does.
            OSError, TimeoutError: if the connection fails otherwise.
        """
        host, port = self._addresses[rank]
        reader, writer = await asyncio.wait_for(asyncio.open_connection(host, port, limit=_LINE), _DIAL)
        connection = self._connection(reader, writer)
        try:
            connection.send(self._hello(rank, what))
            answer = await asyncio.wait_for(connection.receive(), _DIAL)
            if answer is None:
                raise ConnectionResetError("it hung up")
            if answer.get("what") != "welcome" or not self._ours(answer):
                raise ConnectionRefusedError
        except BaseException:
            connection.close()
            raise
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
            if "ping" in message:
                self.asides[rank] = message.get("aside")
                connection.send({"pong": message["ping"]})
            elif "pong" in message:
                connection.trip = time.monotonic() - message["pong"]
            elif "name" in message:
                made = time.monotonic() - message["age"] - connection.trip / 2
                self.board.store(message["name"], BoardEntry(message["value"], message["version"], made), connection)
        self._connections[rank].remove(connection)
        connection.close()

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
        if self._server is not None:
            for listening in (
                self._server.sockets
            ):  # asyncio leaves open the connections that it has just accepted for a closed server
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0)
            self._server.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(asyncio.gather(*(c.drain() for c in self._open())), _DIAL)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._made:
            connection.close()
