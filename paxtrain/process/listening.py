"""Ports of a job: where a process listens, and a server that hears only who knows the job's secret."""

import asyncio
import contextlib
import errno
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from paxtrain.errors import UserError
from paxtrain.process.sealed import ForgedError, SealedStream

ALL: tuple[str, ...] = ("",)  # every address of the machine
GREETING = 1.0  # seconds in which a connection must show the secret
_STRANGERS = 512  # connections at most that have not shown it yet; the oldest is dropped for a new one
_BUFFER = 1 << 16  # bytes that asyncio reads ahead, about


def _is_here(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False


def addresses(host: str) -> tuple[str, ...]:
    """Return the addresses at which to listen so that `host`:PORT reaches this process; `ALL` if they are not known.

    A machine may know its own name as 127.0.1.1, or may be reached through a translated address. There it has to listen
    at all of its addresses.

    Args:
        host: name or address by which others know this machine.
    """
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(host)
        return (host,) if _is_here(host) else ALL
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return ALL
    several = tuple(dict.fromkeys(str(address[0]) for *_, address in found))
    if host != "localhost" and any(ipaddress.ip_address(each.partition("%")[0]).is_loopback for each in several):
        return ALL
    return several if several and all(map(_is_here, several)) else ALL


def taken(address: str) -> str:
    """Return a sentence for a process that cannot listen at an address, HOST:PORT."""
    port = address.rpartition(":")[2]
    return (
        f"cannot listen at {address}: port {port} of this machine is taken, perhaps by an earlier start that still "
        f"ends; `ss -ltnp 'sport = :{port}'` shows by which process; end it, or choose another port"
    )


def require_free(address: str) -> None:
    """Require that the port of an address of this machine, HOST:PORT, is free to listen at.

    Raises:
        UserError: it is taken.
    """
    host, _, port = address.rpartition(":")
    for where in addresses(host.strip("[]")):
        with socket.socket(socket.AF_INET6 if ":" in where else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # else ends of old connections would count
            try:
                probe.bind((where, int(port)))
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    raise UserError(taken(address)) from error


class SealedServer:
    """A server that hands on only connections whose first message is sealed with the job's secret.

    Others get a random number and nothing else, and are dropped after `GREETING` seconds, or earlier if they are many.
    """

    def __init__(
        self,
        secret: bytes,
        handle: Callable[[SealedStream, dict[str, Any]], Awaitable[None]],
        say: Callable[[str], None],
    ) -> None:
        """Describe the server; `start` opens its port.

        Args:
            secret: the job's secret.
            handle: coroutine for a connection and its first message. The server closes the connection after it.
            say: function that prints a line for the user, on the first stranger.
        """
        self._secret, self._handle, self._say = secret, handle, say
        self._server: asyncio.Server | None = None
        self._strangers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}  # in the order of their coming
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self._told = False

    async def start(self, host: str, port: int) -> None:
        """Listen at the addresses by which others know `host`.

        Raises:
            OSError: The port is taken.
        """
        self._server = await asyncio.start_server(
            self._accept, list(addresses(host)), port, limit=_BUFFER, backlog=1024
        )

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._server is None:
            writer.close()
            return
        while len(self._strangers) >= _STRANGERS:
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest).transport.abort()
            oldest.cancel()
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._strangers[task] = writer
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        task = asyncio.current_task()
        assert task is not None, "a server's coroutine runs as a task"
        try:
            async with asyncio.timeout(GREETING):
                stream = await SealedStream.meet(reader, writer, self._secret, dialled=False)
                greeting = await stream.receive()
            self._strangers.pop(task, None)
            await self._handle(stream, greeting)
        except ForgedError as error:
            self._tell(writer, str(error))
        except OSError:  # TimeoutError is one
            pass
        finally:
            self._strangers.pop(task, None)
            self._writers.discard(writer)
            writer.close()

    def _tell(self, writer: asyncio.StreamWriter, what: str) -> None:
        if not self._told:
            self._told = True
            peer = writer.get_extra_info("peername")
            self._say(
                f"note: {peer[0] if peer else 'somebody'} has sent {what} to a port of this job; it is ignored, and so "
                "are others, which are not told"
            )

    async def finish(self, seconds: float) -> None:
        """Wait until the coroutines of all connections have ended, at most so long; strangers do not count."""
        if busy := self._tasks - self._strangers.keys():
            await asyncio.wait(busy, timeout=seconds)

    async def close(self) -> None:
        """Stop listening and close all connections."""
        server, self._server = self._server, None
        if server is not None:
            # asyncio leaves open the connections that it has just accepted for a closed server.
            for listening in server.sockets:
                asyncio.get_running_loop().remove_reader(listening.fileno())
            await asyncio.sleep(0)
            server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in list(self._writers):
            writer.close()
