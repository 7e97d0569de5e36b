"""Where processes listen, and a server that answers nobody but its job."""

import asyncio
import contextlib
import socket

import pytest

from paxtrain.process import listening
from paxtrain.process.listening import SealedServer
from paxtrain.process.sealed import SealedStream
from tests.planner.ports import free_ports

SECRET = b"secret" * 6


@pytest.mark.parametrize(
    ("host", "known", "expected"),
    [
        ("127.0.0.1", [], ("127.0.0.1",)),
        ("192.0.2.1", [], listening.ALL),  # of a documentation network: no machine has it
        ("me", ["127.0.1.1"], listening.ALL),  # as Debian's /etc/hosts has a machine's own name
        ("me", ["192.0.2.1"], listening.ALL),
        ("localhost", ["127.0.0.1"], ("127.0.0.1",)),
        ("me", None, listening.ALL),
    ],
)
def test_a_process_listens_at_the_address_that_others_use(monkeypatch, host, known, expected):
    def look_up(*_, **__):
        if known is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in known]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    assert listening.addresses(host) == expected


@contextlib.asynccontextmanager
async def server():
    """A server that answers each message with its number, the lines it has said, and its port."""
    said: list[str] = []

    async def echo(stream, greeting):
        with contextlib.suppress(OSError):
            while True:
                stream.send(greeting)
                greeting = await stream.receive()

    [port] = free_ports(1)
    made = SealedServer(SECRET, echo, said.append)
    await made.start("127.0.0.1", port)
    try:
        yield port, said
    finally:
        await made.close()


async def call(port: int, secret: bytes = SECRET) -> dict:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        stream = await SealedStream.meet(reader, writer, secret, dialled=True)
        stream.send({"number": 1})
        return await asyncio.wait_for(stream.receive(), 5)
    finally:
        writer.close()


def test_who_knows_the_secret_is_answered_and_others_are_not():
    async def main():
        async with server() as (port, said):
            assert await call(port) == {"number": 1}
            for _ in range(3):
                with pytest.raises(OSError):
                    await call(port, b"guess" * 8)
            assert len(said) == 1 and said[0].startswith("note: 127.0.0.1 has sent a message without the job's seal")
            assert await call(port) == {"number": 1}

    asyncio.run(main())


@pytest.mark.parametrize(
    "rubbish", [b"", b'{"rank": 1}\n', b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(100), b"\xff" * (1 << 20)]
)
def test_a_stranger_hears_a_random_number_and_is_dropped_within_a_second(rubbish):
    async def main():
        async with server() as (port, _):
            heard = []
            for _ in range(2):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                with contextlib.suppress(OSError):
                    writer.write(rubbish)
                    heard.append(await asyncio.wait_for(reader.read(), listening.GREETING + 2))
                writer.close()
            assert all(len(each) == 32 for each in heard) and len(set(heard)) == len(heard)
            assert await call(port) == {"number": 1}

    asyncio.run(main())


def test_a_recorded_conversation_is_of_no_use():
    """A stranger between two processes records what the first one says, and says it again later."""
    recorded = []

    async def main():
        async with server() as (port, said):

            async def between(reader, writer):
                there, back = await asyncio.open_connection("127.0.0.1", port)
                writer.write(await there.readexactly(32))
                recorded.append(await reader.read(1 << 16))
                back.write(recorded[-1])
                if len(recorded[-1]) == 32:
                    recorded[-1] += (more := await reader.read(1 << 16))
                    back.write(more)
                writer.write(await there.read(1 << 16))
                back.close()
                writer.close()

            [relay] = free_ports(1)
            async with await asyncio.start_server(between, "127.0.0.1", relay):
                assert await call(relay) == {"number": 1}
            assert not said
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(recorded[0])
            assert len(await asyncio.wait_for(reader.read(), 5)) == 32
            writer.close()
            assert len(said) == 1

    asyncio.run(main())


def test_a_flood_of_half_open_connections_does_not_keep_the_job_out(monkeypatch):
    monkeypatch.setattr(listening, "_STRANGERS", 20)

    async def main():
        async with server() as (port, _):
            flood = [await asyncio.open_connection("127.0.0.1", port) for _ in range(200)]
            assert await call(port) == {"number": 1}
            reads = [asyncio.wait_for(reader.read(), listening.GREETING + 3) for reader, _ in flood]
            ended = await asyncio.gather(*reads, return_exceptions=True)
            assert not any(isinstance(end, TimeoutError) for end in ended)
            for _, writer in flood:
                writer.close()

    asyncio.run(main())
