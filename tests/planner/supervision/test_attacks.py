"""Strangers at the supervisors' ports: the run goes on to its end, their memory stays bounded, one line tells of it."""

import asyncio
import json
import os
import pathlib
import socket
import threading
import time

from planner.supervision.addresses import run_id
from planner.supervision.first_cause import HostReport
from planner.supervision.peer_connections import PeerConnections
from planner.supervision.supervisor import Limits
from tests.planner.ports import free_ports
from tests.planner.supervision.supervisors import HOSTS, SECRET, start, wait, wait_for

LIMITS = Limits(link=2.0, hang=60.0, settle=2.0, grace=0.5, start=20.0, slow_step=1e6)
STRANGERS = 100
WORKER = """
import os, pathlib, sys, time
from paxtrain.process import supervised

host, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
with supervised.Progress(os.environ) as p:
    p.finished(1)
    (folder / f"runs{host}").touch()
    while not (folder / "enough").exists():
        time.sleep(0.02)
    p.finished(2)
"""
VERDICT = {
    "kind": "bad input",
    "hosts": ["pax0"],
    "step": None,
    "age": 0.0,
    "sentence": "the stranger's \x1b[31msentence",
    "leave_out": [],
}


def frame(content: bytes) -> bytes:
    """Return a message in the job's form with a seal that is made up."""
    return len(content).to_bytes(4, "big") + bytes(32) + content


def lines():
    """Yield what strangers send: greetings, forged entries, garbage, giant and absurd frames."""
    hello = {"run": "x", "rank": 1, "boot": "x", "you": None, "joined": False, "what": "watch"}
    entries = [
        {"name": "verdict/0", "value": VERDICT, "version": 1 << 62, "age": 0.0},
        {"name": "done/0", "value": 9, "version": 1 << 62, "age": 0.0},
        {"name": "report/x", "value": 0, "version": 1, "age": 0.0},
        {"name": "slow/1", "value": "abc", "version": 1, "age": 0.0},
        {"name": 7, "value": 0, "version": 1, "age": 0.0},
    ]
    for message in ({"rank": 1}, hello, *entries):
        text = json.dumps(message).encode()
        yield text + b"\n"
        yield bytes(32) + frame(text)
    yield bytes(32) + (1 << 31).to_bytes(4, "big") + bytes(64)
    yield b"GET / HTTP/1.1\r\n\r\n"
    yield b"\xff" * 100


def ask(port: int, said: bytes) -> bytes:
    """Return what a port answers to a stranger before it hangs up, or within three seconds."""
    heard = b""
    try:
        with socket.create_connection(("127.0.0.1", port), 3) as s:
            s.settimeout(3)
            s.sendall(said)
            while part := s.recv(4096):
                heard += part
    except OSError:
        pass
    return heard


def memory(pid: int) -> int:
    """Return the largest resident bytes that a process has had."""
    text = pathlib.Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith("VmHWM"))


def shout(port: int) -> None:
    """Send a line of 4 MB as a stranger."""
    ask(port, b"x" * (4 << 20))


def test_strangers_neither_end_a_run_nor_learn_of_it_nor_fill_its_memory(tmp_path):
    ports = free_ports(HOSTS)
    with start(tmp_path, WORKER, LIMITS, ports=ports) as started:
        for host in range(HOSTS):
            wait_for(tmp_path, f"runs{host}")
        before = {host: memory(process.pid) for host, process in started.items()}
        heard = [ask(port, said) for said in lines() for port in ports[:2]]
        assert {len(each) for each in heard} <= {0, 32}  # a random number, or a connection that was reset
        assert any(heard) and len(set(heard) - {b""}) == len([each for each in heard if each])
        loud = [threading.Thread(target=shout, args=(ports[0],)) for _ in range(STRANGERS)]
        for thread in loud:
            thread.start()
        idle = [socket.create_connection(("127.0.0.1", ports[1]), 3) for _ in range(1000)]  # they say nothing
        for thread in loud:
            thread.join()
        time.sleep(1.5)  # and are dropped
        assert all(process.poll() is None for process in started.values())
        grown = {host: memory(process.pid) - before[host] for host, process in started.items()}
        for each in idle:
            each.close()
        (tmp_path / "enough").touch()
        assert wait(tmp_path, started) == [0] * HOSTS
    assert max(grown.values()) < 64 << 20, grown
    said = [(tmp_path / f"err{host}").read_text() for host in range(HOSTS)]
    assert [text.count("\n") for text in said] == [1, 1, 0], said
    assert all(text.startswith("note: 127.0.0.1 has sent ") for text in said[:2])
    assert not any("stranger's" in text or "\x1b" in text for text in said)


def test_the_same_verdict_from_one_who_knows_the_secret_ends_the_run(tmp_path):
    """The control: with the seal it counts. Its escape codes are not printed all the same."""
    ports = free_ports(HOSTS)
    addresses = [("127.0.0.1", port) for port in ports]
    run = run_id(addresses, os.environ)

    async def betray():
        third = PeerConnections(2, addresses, run, SECRET.encode())
        await third.start()  # in place of the third host
        while third.missing:
            await asyncio.sleep(0.01)
        third.board.put("verdict/2", VERDICT)
        third.board.put("report/2", HostReport("pax2").to_json())
        await asyncio.sleep(1)
        await third.close()

    with start(tmp_path, WORKER, LIMITS, hosts=(0, 1), ports=ports) as started:
        asyncio.run(betray())
        assert wait(tmp_path, started) == [2, 2]
    assert "error: the stranger's \\x1b[31msentence" in (tmp_path / "err0").read_text()
