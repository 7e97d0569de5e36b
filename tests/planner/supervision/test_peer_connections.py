"""Connections on the loopback carry news to all hosts, tell ended from silent supervisors, and refuse other runs."""

import asyncio
import contextlib
import gc
import json
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from paxtrain.errors import UserError
from paxtrain.process.sealed import SealedStream
from planner.supervision import peer_connections
from planner.supervision.peer_connections import REFUSED, PeerConnections, successors
from tests.planner.ports import free_ports

ROOT = pathlib.Path(__file__).resolve().parents[3]
SECRET = b"secret" * 6


@contextlib.asynccontextmanager
async def channels(count: int, run: str = "run", up: int | None = None):
    """So many hosts of this process, of which the first `up` are started and have come together."""
    addresses = [("127.0.0.1", port) for port in free_ports(count)]
    made = [PeerConnections(i, addresses, run, SECRET) for i in range(count)]
    try:
        for channel in made[:up]:
            await channel.start()
        if up is None:
            await until(lambda: not any(channel.missing for channel in made))
        yield made
    finally:
        await asyncio.gather(*(channel.close() for channel in made))


async def until(holds, limit: float = 10.0) -> float:
    """Seconds until it holds."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit
        await asyncio.sleep(0.01)
    return time.monotonic() - began


def forwarded(count: int, start: int, cut: set[tuple[int, int]]) -> dict[int, int]:
    """Return the hops from `start` to each host that news reaches if some pairs cannot connect."""
    hops, fresh = {start: 0}, [start]
    links = {(a, b) for a in range(count) for b in successors(a, count)}
    links = {pair for pair in links | {(b, a) for a, b in links} if pair not in cut and pair[::-1] not in cut}
    while fresh:
        fresh = [b for a in fresh for b in sorted({b for x, b in links if x == a} - hops.keys())]
        fresh = list(dict.fromkeys(fresh))
        hops |= dict.fromkeys(fresh, max(hops.values()) + 1)
    return hops


def test_nothing_stays_open_whenever_a_channel_is_closed():
    """An open connection would make its transport warn, which fails the test."""

    async def for_so_many_turns(turns: int) -> None:
        made = [PeerConnections(i, addresses, "run", SECRET) for i in range(2)]
        for channel in made:
            await channel.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        await asyncio.gather(*(channel.close() for channel in made))

    for turns in range(40):
        addresses = [("127.0.0.1", port) for port in free_ports(2)]
        asyncio.run(for_so_many_turns(turns))
    gc.collect()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 17, 1000])
def test_few_connections_reach_all_in_few_hops(count):
    degree = len(successors(0, count))
    assert degree <= (count - 1).bit_length() and 0 not in successors(0, count)
    if count <= 17:
        assert forwarded(count, 0, set()).keys() == set(range(count))
    if count == 1000:
        hops = forwarded(count, 0, {(0, 1), (0, 2), (5, 6), (500, 501)})
        assert hops.keys() == set(range(count)) and max(hops.values()) <= 10


def test_news_reach_all_of_many_hosts():
    async def main():
        async with channels(24) as made:
            made[7].board.put("report/7", {"step": 3})
            took = await until(lambda: all("report/7" in channel.board for channel in made))
            assert all(channel.board["report/7"].value == {"step": 3} for channel in made)
            made[7].board.put("report/7", {"step": 4})  # newer replaces older, everywhere
            await until(lambda: all(channel.board["report/7"].value == {"step": 4} for channel in made))
            assert all(0 <= channel.board["report/7"].age < took + 5 for channel in made)

    asyncio.run(main())


def test_age_survives_the_way():
    async def main():
        async with channels(2, up=1) as [first, second]:
            first.board.put("report/0", "early")
            await asyncio.sleep(0.6)
            await second.start()
            await until(lambda: "report/0" in second.board)
            assert 0.6 <= second.board["report/0"].age < 5
            assert second.board["report/0"].age == pytest.approx(first.board["report/0"].age, abs=0.5)

    asyncio.run(main())


def test_who_has_ended_is_noticed_at_once_and_named_by_a_probe():
    async def main():
        async with channels(4) as made:
            heard = []
            made[0].board.listen(heard.append)
            assert await made[0].probe(range(4)) == {}
            await made[1].close()
            took = await until(lambda: 1 in made[0].refused)
            assert "" in heard
            assert await made[2].probe(range(4)) == {1: REFUSED}
            return took

    # On a busy machine the end may meet a dial that was just taken; then only silence tells, after QUIET.
    assert min(asyncio.run(main()) for _ in range(2)) < 2 < peer_connections.QUIET


PROCESS = """
import asyncio, json, sys
from planner.supervision.peer_connections import PeerConnections

async def main():
    await PeerConnections(1, [("127.0.0.1", port) for port in json.loads(sys.argv[1])], "run", b"secret" * 6).start()
    await asyncio.sleep(60)

asyncio.run(main())
"""


def test_who_is_silent_is_not_taken_for_dead(monkeypatch):
    """A stopped process's port still takes connections. It is silent until it runs again, and refuses once killed."""
    monkeypatch.setattr(peer_connections, "QUIET", 0.5)
    monkeypatch.setattr(peer_connections, "TICK", 0.1)

    async def main():
        async with channels(2, up=1) as [first, _]:
            ports = json.dumps([port for _, port in first._addresses])
            process = subprocess.Popen([sys.executable, "-c", PROCESS, ports], cwd=ROOT)
            try:
                await until(lambda: not first.missing)
                assert await first.probe([1]) == {}
                process.send_signal(signal.SIGSTOP)
                await until(lambda: first.silent(1) > 1.0)
                assert (await first.probe([1])).keys() == {1} and first.refused == set()
                seconds, ended = first.silences[1]
                assert seconds > 1.0 and ended == 0
                process.send_signal(signal.SIGCONT)
                await until(lambda: first.silences[1][1] > 0)
                assert first.silences[1][0] >= seconds and await first.probe([1]) == {}
                process.kill()
                await until(lambda: 1 in first.refused)
            finally:
                process.kill()
                process.wait()

    asyncio.run(main())


def test_what_a_link_carries_is_measured(monkeypatch):
    """It is the rate at which the other end reads, and 0 if that end takes no parcel in time or has ended."""
    whole = SealedStream.skip_raw

    async def slowly(stream, count):
        for _ in range(0, count, 1 << 16):
            await whole(stream, 1 << 16)
            await asyncio.sleep(0.1)

    async def main():
        async with channels(2) as [first, second]:
            assert await first.rate(1, 5.0) > 1e7
            monkeypatch.setattr(SealedStream, "skip_raw", slowly)
            assert 1e5 < await first.rate(1, 5.0) < 0.7e6  # 128 KiB in two pauses
            assert await first.rate(1, 0.1) == 0.0
            await second.close()
            assert await first.rate(1, 5.0) == 0.0

    asyncio.run(main())


def test_strangers_and_late_comers_are_turned_away():
    async def main():
        async with channels(2) as [first, _]:
            addresses = first._addresses
            stranger = PeerConnections(1, addresses, "another run", SECRET)
            late = PeerConnections(
                1, addresses, "run", SECRET
            )  # the same host, started anew while the run is under way
            for channel in (stranger, late):
                with pytest.raises(ConnectionRefusedError):
                    await channel._dial(0, "watch")
            assert await first.probe([1]) == {}

    asyncio.run(main())


def test_a_host_that_was_started_anew_counts_as_gone():
    async def main():
        async with channels(3) as made:
            await made[1].close()
            again = PeerConnections(1, made[0]._addresses, "run", SECRET)
            await again.start()
            await until(lambda: 1 in made[0].refused)
            assert await made[2].probe([1]) == {1: REFUSED}
            assert again.missing == [0, 2]  # it takes no part in the run
            await again.close()

    asyncio.run(main())


def test_before_all_have_come_a_host_may_start_again():
    async def main():
        async with channels(3, up=2) as [first, second, third]:
            await until(lambda: first.missing == [2])
            await second.close()
            again = PeerConnections(1, first._addresses, "run", SECRET)
            await again.start()
            await third.start()
            await until(lambda: not (first.missing or third.missing or again.missing))
            assert first.refused == set() and third.board["here/1"].value == again._boot
            await again.close()

    asyncio.run(main())


def test_a_port_in_use_is_told():
    async def main(port):
        with pytest.raises(UserError, match=rf"cannot listen on port {port} .*; does another supervisor run here"):
            await PeerConnections(0, [("127.0.0.1", port)], "run", SECRET).start()

    with socket.create_server(("", 0)) as server:
        asyncio.run(main(server.getsockname()[1]))


def test_what_is_no_message_of_the_job_ends_a_connection():
    """Strangers hear nothing of the run, and who knows the secret must still keep to the form."""

    async def main():
        async with channels(2) as [first, second]:
            port = first._addresses[0][1]
            for rubbish in (b"GET / HTTP/1.1\r\n\r\n", b'{"rank":1}\n', bytes(200), b'{"run":"run","rank":"x"}\n'):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.write(rubbish)
                writer.write_eof()
                assert len(await asyncio.wait_for(reader.read(), 5)) == 32
                writer.close()
            hello = second._hello(0, "watch")
            for greeting in ({}, {"rank": 1}, hello | {"rank": 7}, hello | {"rank": "1"}, hello | {"run": "another"}):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                stream = await SealedStream.meet(reader, writer, SECRET, dialled=True)
                stream.send(greeting)
                assert await asyncio.wait_for(stream.receive(), 5) == {"what": "no"}
                writer.close()
            assert await second.probe([0]) == {} and await first.probe([1]) == {}

    asyncio.run(main())


@pytest.mark.parametrize(
    "message",
    [
        {"name": "report/x", "value": {}, "version": 1, "age": 0.0},
        {"name": "report/2", "value": {}, "version": 1, "age": 0.0},
        {"name": "report", "value": {}, "version": 1, "age": 0.0},
        {"name": 7, "value": {}, "version": 1, "age": 0.0},
        {"name": "report/1", "value": "no", "version": 1, "age": 0.0},
        {"name": "report/1", "value": {}, "version": "1", "age": 0.0},
        {"name": "report/1", "value": {}, "version": 1, "age": -1},
        {"name": "report/1", "value": {}, "version": 1, "age": float("nan")},
        {"pong": "1"},
        {"ping": 1, "aside": "slow"},
        {},
    ],
)
def test_an_entry_that_does_not_fit_its_kind_ends_the_connection_and_is_not_kept(message):
    async def main():
        async with channels(2) as [first, second]:
            before = dict.fromkeys(first.board)
            first._fits = lambda kind, value: kind in ("report", "here") and isinstance(value, dict)
            connection = await second._dial(0, "watch")
            for _ in before:
                await connection.receive()
            connection.send(message)
            while await asyncio.wait_for(connection.receive(), 5):
                pass
            assert dict.fromkeys(first.board) == before
            connection.close()

    asyncio.run(main())
