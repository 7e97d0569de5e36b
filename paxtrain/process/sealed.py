"""Sealed messages: what two processes of a job say to each other over a port that strangers can reach, too.

Both ends send a random number when they connect. From these and the job's secret each direction gets a key of its own.
Every message carries its length and an HMAC-SHA256 (RFC 2104) of its place in the order, its length and its content. So
a message that somebody else wrote, changed, repeated or recorded on another connection is refused, and a stranger
hears nothing but the random number. Messages are not encrypted.
"""

import asyncio
import contextlib
import hashlib
import hmac
import json
import secrets
import struct
from collections.abc import Mapping
from typing import Any, Self

_NONCE = 32  # bytes of the random number
_TAG = hashlib.sha256().digest_size
HEAD = struct.calcsize(">I") + _TAG  # bytes before the content
GREETING = 4096  # bytes of content of the first message of a connection at most
LARGEST = 1 << 20  # bytes of content of a later one


class ForgedError(ConnectionError):
    """A message that no process of this job has sent on this connection, or that is too long."""


class Seal:
    """One end's keys and counters of a connection."""

    def __init__(self, secret: bytes, dialler: bytes, listener: bytes, *, dialled: bool) -> None:
        """Derive the keys of a connection.

        Args:
            secret: the job's secret.
            dialler: random number of the end that dialled.
            listener: random number of the end that listened.
            dialled: whether this end dialled.
        """
        keys = [hmac.digest(secret, name + dialler + listener, "sha256") for name in (b"dialler", b"listener")]
        self._mine, self._theirs = keys if dialled else keys[::-1]
        self._sent = self._received = 0

    def _tag(self, key: bytes, number: int, content: bytes) -> bytes:
        return hmac.digest(key, struct.pack(">QI", number, len(content)) + content, "sha256")

    def seal(self, content: bytes) -> bytes:
        """Return the bytes to send for a message."""
        tag = self._tag(self._mine, self._sent, content)
        self._sent += 1
        return struct.pack(">I", len(content)) + tag + content

    def length(self, head: bytes) -> int:
        """Return the length of the content that follows a head.

        Raises:
            ForgedError: It is longer than a message may be.
        """
        [length] = struct.unpack_from(">I", head)
        if length > (LARGEST if self._received else GREETING):
            raise ForgedError(f"a message of {length} bytes")
        return int(length)

    def open(self, head: bytes, content: bytes) -> bytes:
        """Return the content of a message.

        Raises:
            ForgedError: The other end of this connection has not sent it, or not now.
        """
        if not hmac.compare_digest(self._tag(self._theirs, self._received, content), head[-_TAG:]):
            raise ForgedError("a message without the job's seal")
        self._received += 1
        return content


def encode(message: Mapping[str, object]) -> bytes:
    """Return a JSON value as the content of a message."""
    return json.dumps(message, separators=(",", ":")).encode()


def decode(content: bytes) -> dict[str, Any]:
    """Return the JSON object that a message contains.

    Raises:
        ForgedError: It contains something else.
    """
    try:
        message = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ForgedError("a message that is no JSON") from error
    if not isinstance(message, dict):
        raise ForgedError("a message that is no JSON object")
    return message


def printable(text: str, most: int = 2000) -> str:
    """Return a text from another process in one line and without control characters, which terminals would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:most])


class SealedStream:
    """A connection that carries sealed JSON objects."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seal: Seal) -> None:
        """Wrap a connection whose ends have exchanged their random numbers; see `meet`."""
        self._reader, self._writer, self._seal = reader, writer, seal

    @classmethod
    async def meet(
        cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, secret: bytes, *, dialled: bool
    ) -> Self:
        """Exchange random numbers with the other end of a new connection.

        The first message that each end then opens shows that the other one knows the secret.

        Args:
            reader: what comes.
            writer: what goes.
            secret: the job's secret.
            dialled: whether this end dialled.

        Raises:
            OSError: The connection has failed.
        """
        own = secrets.token_bytes(_NONCE)
        writer.write(own)
        other = await _exactly(reader, _NONCE)
        pair = (own, other) if dialled else (other, own)
        return cls(reader, writer, Seal(secret, *pair, dialled=dialled))

    @property
    def unsent(self) -> int:
        """Bytes that are queued."""
        return self._writer.transport.get_write_buffer_size()

    @property
    def closed(self) -> bool:
        """True if the connection is closed or closing."""
        return self._writer.is_closing()

    def send(self, message: Mapping[str, object]) -> None:
        """Queue a JSON object."""
        self.write(encode(message))

    def write(self, content: bytes) -> None:
        """Queue an encoded message, or a connection that is closing drops it."""
        if not self.closed:
            self._writer.write(self._seal.seal(content))

    async def receive(self) -> dict[str, Any]:
        """Return the next message.

        Raises:
            OSError: The connection has ended; ForgedError: by a message that is not of this job.
        """
        head = await _exactly(self._reader, HEAD)
        return decode(self._seal.open(head, await _exactly(self._reader, self._seal.length(head))))

    async def send_raw(self, content: bytes) -> None:
        """Send bytes that nobody checks, no faster than they leave."""
        if not self.closed:
            self._writer.write(content)
            await self._writer.drain()

    async def skip_raw(self, count: int) -> None:
        """Read and drop bytes that nobody checks; stop if the connection ends."""
        with contextlib.suppress(OSError):
            while count > 0 and (data := await self._reader.read(min(count, 1 << 16))):
                count -= len(data)

    async def drain(self) -> None:
        """Wait until all queued messages have left or the connection is closed."""
        while self.unsent and not self.closed:
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Close the connection."""
        self._writer.close()


async def _exactly(reader: asyncio.StreamReader, count: int) -> bytes:
    try:
        return await reader.readexactly(count)
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError("it hung up") from error
