"""What the supervisors of a run know of each other: a board that all of them see, over links that outlive the workers.

Each supervisor dials those 1, 2, 4, 8, ... places after it: of 1,000 hosts each holds 20 connections, and news reaches
all of them in ten hops, around any few that are cut. Whoever puts an entry on its board sends it to its neighbours, and
each sends on what is new to it. A neighbour that is not heard for a while is dialled anew, which tells a link that
carries nothing from a supervisor that has ended; probe() asks any host, neighbour or not.

Entries travel with their age, not with a time: clocks differ between hosts.
"""

import asyncio
import contextlib
import dataclasses
import json
import resource
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from paxtrain.errors import UserError

PORT = 17430  # of supervisors, where nothing else is said: below those that the kernel gives away, and nobody's default
TICK = 0.5  # seconds between two pings
QUIET = 3.0  # seconds without a word after which a neighbour is dialled anew
REFUSED = "refused"  # nobody listens there, or a supervisor that is not of this run any more
_DIAL = 2.0  # seconds that a connection may take
_AT_ONCE = 128  # probes
_LINE = 1 << 22  # bytes of a message at most; more than this unsent ends a connection
_CHUNK = bytes(1 << 16)
# Bytes of the smallest and the largest parcel that measures a rate, seconds that are enough for one, and how many do.
_SMALLEST, _LARGEST, _ENOUGH, _TIMES = 1 << 17, 1 << 23, 0.05, 3


@dataclasses.dataclass
class Entry:
    """Something that one host tells all.

    Attributes:
        version: larger is newer.
        made: when, by this host's monotonic clock.
    """

    value: Any
    version: int
    made: float

    @property
    def age(self) -> float:
        return time.monotonic() - self.made


def _line(message: Any) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class _Connection:
    """Lines of JSON to and from one host."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self.trip = 0.0  # seconds there and back

    def send(self, message: Any) -> None:
        self.write(_line(message))

    def write(self, line: bytes) -> None:
        if self._writer.transport.get_write_buffer_size() > _LINE:
            self.close()
        if not self._writer.is_closing():
            self._writer.write(line)

    async def receive(self) -> dict[str, Any] | None:
        """The next message; None when there will be no more."""
        try:
            line = await self._reader.readline()
            message = json.loads(line) if line.endswith(b"\n") else None
        except (OSError, ValueError):
            return None
        return message if isinstance(message, dict) else None

    async def pour(self, count: int) -> None:
        """Sends a parcel of so many bytes, no faster than they leave."""
        self.send({"parcel": count})
        for start in range(0, count, len(_CHUNK)):
            self._writer.write(_CHUNK[: count - start])
            await self._writer.drain()

    async def swallow(self, count: int) -> None:
        """Takes so many bytes, or what comes of them."""
        with contextlib.suppress(OSError):
            while count > 0 and (data := await self._reader.read(min(count, len(_CHUNK)))):
                count -= len(data)

    async def drain(self) -> None:
        """Returns when all that was sent has left, or never will."""
        while self._writer.transport.get_write_buffer_size() and not self._writer.is_closing():
            await asyncio.sleep(0.01)

    @property
    def closed(self) -> bool:
        return self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()


def successors(me: int, count: int) -> list[int]:
    """Whom this host dials: those 1, 2, 4, ... places after it."""
    return sorted({(me + (1 << k)) % count for k in range(max(0, count - 1).bit_length())} - {me})


class SideChannel:
    """This host's part of it.

    Attributes:
        board: all entries by name, see `put`.
        aside: what rides on each ping, for neighbours alone; asides: what theirs last said.
        refused: neighbours whose supervisor has ended, once all had come.
    """

    def __init__(self, me: int, addresses: Sequence[tuple[str, int]], run: str) -> None:
        """Args:
        me: this host's number.
        addresses: host and port of every supervisor.
        run: what supervisors of one run have in common; others are turned away.
        """
        self._me, self._addresses, self._run = me, list(addresses), run
        self._boot = secrets.token_hex(8)  # tells this process from one that ran here before
        self.board: dict[str, Entry] = {}
        self.aside: Any = None
        self.asides: dict[int, Any] = {}
        self.refused: set[int] = set()
        self._connections: dict[int, list[_Connection]] = {}  # of a neighbour maybe one from each side
        self._made: set[_Connection] = set()  # all that may still be open, also those that nobody converses over yet
        self._heard: dict[int, float] = {}
        self._silences: dict[int, tuple[float, float]] = {}  # how long, and when it ended
        self._listeners: list[Callable[[str], None]] = []
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    # --- The board ----------------------------------------------------------------------------------------------------

    def listen(self, listener: Callable[[str], None]) -> None:
        """Calls it with the name of every entry that comes or changes."""
        self._listeners.append(listener)

    def put(self, name: str, value: Any) -> None:
        """Puts an entry on everybody's board; `value` is JSON. Only one host puts entries of a name."""
        before = self.board[name].version if name in self.board else 0
        self._store(name, Entry(value, max(before + 1, time.time_ns()), time.monotonic()), None)

    def _store(self, name: str, entry: Entry, source: _Connection | None) -> None:
        if name in self.board and self.board[name].version >= entry.version:
            return
        self.board[name] = entry
        line = _line(self._message(name))
        for connection in self._open():
            if connection is not source:
                connection.write(line)
        for listener in self._listeners:
            listener(name)

    def numbers(self, kind: str) -> list[int]:
        """Hosts that have put an entry of this kind, `kind` and their number."""
        return [int(name.removeprefix(kind)) for name in self.board if name.startswith(kind)]

    def _message(self, name: str) -> dict[str, Any]:
        entry = self.board[name]
        return {"name": name, "value": entry.value, "version": entry.version, "age": entry.age}

    def _boot_of(self, rank: int) -> str | None:
        entry = self.board.get(f"here/{rank}")
        return entry.value if entry else None

    @property
    def missing(self) -> list[int]:
        """Hosts that have not come yet."""
        return [rank for rank in range(len(self._addresses)) if f"here/{rank}" not in self.board]

    # --- Connections --------------------------------------------------------------------------------------------------

    def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> _Connection:
        made = _Connection(reader, writer)
        self._made = {connection for connection in self._made if not connection.closed} | {made}
        return made

    def _open(self) -> list[_Connection]:
        return [connection for several in self._connections.values() for connection in several]

    async def start(self) -> None:
        """Begins to listen and to dial.

        Raises:
            UserError: the port cannot be had.
        """
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard != resource.RLIM_INFINITY else 65536, hard))
        port = self._addresses[self._me][1]
        try:
            self._server = await asyncio.start_server(self._accept, None, port, limit=_LINE, backlog=1024)
        except OSError as error:
            why = error.strerror or str(error)
            raise UserError(f"cannot listen on port {port} ({why}); does another supervisor run here?") from error
        self.put(f"here/{self._me}", self._boot)
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
        """Whether who says this is of this run, and not of one before it, nor come anew while it is under way."""
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

    async def _answer(self, connection: _Connection) -> None:
        try:
            with contextlib.suppress(asyncio.TimeoutError):
                hello = await asyncio.wait_for(connection.receive(), _DIAL)
                ours = self._ours(hello) and not self._closed
                connection.send(self._hello(hello["rank"], "welcome" if ours else "no") if hello else {})
                if ours and hello["what"] == "watch":
                    await self._converse(hello["rank"], connection)
                while ours and hello["what"] == "parcels" and (message := await connection.receive()):
                    await connection.swallow(message.get("parcel", 0))
                    connection.send({"took": message.get("parcel")})
        finally:
            connection.close()

    async def _dial(self, rank: int, what: str) -> _Connection:
        """A connection to a host, welcomed there.

        Raises:
            ConnectionRefusedError: nobody listens there, or somebody who is not of this run.
            OSError, TimeoutError: why else there is none.
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

    async def _converse(self, rank: int, connection: _Connection) -> None:
        """Tells a neighbour all there is and listens to it, until the connection ends."""
        if self.silent(rank) > QUIET:  # those before carry nothing
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
                self._store(message["name"], Entry(message["value"], message["version"], made), connection)
        self._connections[rank].remove(connection)
        connection.close()

    async def _watch(self, rank: int) -> None:
        """Keeps a connection to a neighbour."""
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
            for listener in self._listeners:
                listener("")

    # --- Who is heard -------------------------------------------------------------------------------------------------

    def _hear(self, rank: int) -> None:
        now = time.monotonic()
        if (silent := now - self._heard.get(rank, now)) > QUIET:
            self._silences[rank] = (silent, now)
        self._heard[rank] = now

    def silent(self, rank: int) -> float:
        """Seconds since a neighbour was heard; 0 of one that never was."""
        now = time.monotonic()
        return now - self._heard.get(rank, now)

    @property
    def silences(self) -> dict[int, tuple[float, float]]:
        """Neighbours that are silent, or were: how many seconds, and how many ago that ended (0: it has not)."""
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
            if (late := now - last - TICK) > TICK:  # this process was stopped or starved: that is not their silence
                self._heard = {rank: heard + late for rank, heard in self._heard.items()}
            last = now

    async def probe(self, ranks: Iterable[int]) -> dict[int, str]:
        """Of those hosts, the ones that do not answer, and why: REFUSED, or what the network says."""
        slots, why = asyncio.Semaphore(_AT_ONCE), {}

        async def dial(rank: int) -> None:
            for _ in range(3):  # one that is being killed still accepts, and hangs up; a moment later it refuses
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
        """Bytes per second that the way to a host carries now; 0: not even a small parcel in `limit` seconds.

        Larger parcels follow as long as they take next to no time. Beyond some GB/s this measures Python.
        """
        rates, size, long = [0.0], _SMALLEST, 0
        with contextlib.suppress(OSError):  # TimeoutError is one
            async with asyncio.timeout(limit):
                connection = await self._dial(rank, "parcels")
                try:
                    while size <= _LARGEST and long < _TIMES:
                        began = time.monotonic()
                        await connection.pour(size)
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
        return max(rates[-_TIMES:])  # small ones may pass faster than the link; one may have waited for a CPU

    async def close(self) -> None:
        """Sends what is unsent, as far as it goes, and ends."""
        self._closed = True
        if self._server is not None:
            for listening in self._server.sockets:  # asyncio leaves open what it has just accepted for a closed server
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
