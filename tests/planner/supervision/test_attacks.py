"""Strangers at the supervisors' ports: the run goes on to its end, their memory stays bounded, one line tells of it."""

import asyncio
import concurrent.futures
import contextlib
import json
import os
import pathlib
import socket
import threading
import time

import pytest

from paxtrain.config import to_dict
from paxtrain.process import sealed
from paxtrain.run import checkpoint_reading, metrics, sampling
from planner.supervision.addresses import run_id
from planner.supervision.first_cause import HostReport
from planner.supervision.peer_connections import PeerConnections
from planner.supervision.supervisor import Limits
from tests.paxtrain.training import configuration, corpus, losses
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


TRAINS = """
import json, os, pathlib, sys
import jax
from paxtrain.config import from_dict
from paxtrain.process import distributed, supervised
from paxtrain.run import training
from planner.start import rendezvous

host, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
if __name__ == "__main__":
    launch = (folder / "coordinator").read_text(), 3, host, 60
    with supervised.Progress(os.environ) as progress:
        rendezvous.call(*launch)
        distributed.initialize(*launch, supervised.heartbeat(os.environ))
        training.train_together(from_dict(json.loads((folder / "config.json").read_text())), None, [], progress, True)
"""
TRAINING = Limits(link=5.0, hang=120.0, settle=2.0, grace=0.5, start=60.0, slow_step=1e6)
STEPS = 150


def recorded():
    """Yield what a stranger could have recorded: sealed messages of another connection of the job."""
    mine = os.urandom(32)
    seal = sealed.Seal(SECRET.encode(), mine, os.urandom(32), dialled=True)
    for message in ({"process": 1, "host": "pax1"}, {"name": "verdict/0", "value": VERDICT, "version": 1, "age": 0.0}):
        yield mine + seal.seal(sealed.encode(message))


def attack(ports, over):
    """Send everything that strangers send to the ports until it is over, and return how many messages that were."""
    sent = 0
    while not over.is_set():
        with contextlib.ExitStack() as stack:
            for _ in range(1000 // len(ports)):  # half-open: they say nothing
                for port in ports:
                    with contextlib.suppress(OSError):
                        stack.enter_context(socket.create_connection(("127.0.0.1", port), 3))
            pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(16))
            every = (*lines(), *recorded(), b"x" * (4 << 20))
            sent += len(list(pool.map(ask, ports * len(every), [said for said in every for _ in ports])))
    return sent


def trained(folder, config, attacked):
    """Train on three hosts; return the losses by step, the fingerprints of the end, and how much strangers sent."""
    folder.mkdir()
    ports = free_ports(HOSTS + 1)
    out = pathlib.Path(config.run.out)
    (folder / "config.json").write_text(json.dumps(to_dict(config)))
    (folder / "coordinator").write_text(f"127.0.0.1:{ports.pop()}")
    sent, over = [], threading.Event()
    strangers = threading.Thread(target=lambda: sent.append(attack(ports, over)))
    with start(folder, TRAINS, TRAINING, ports=ports) as started:
        if attacked:
            strangers.start()
        try:
            codes = wait(folder, started, 240.0)
        finally:
            over.set()
            if attacked:
                strangers.join()
    assert codes == [0] * HOSTS, [(folder / f"err{host}").read_text() for host in range(HOSTS)]
    home = out / sampling.CHECKPOINTS
    record = checkpoint_reading._read_record(home, checkpoint_reading.finished_steps(home)[-1])
    assert (out / metrics.FILE).exists()
    return losses(out), record["fingerprints"], sum(sent)


@pytest.mark.slow
def test_training_under_attack_ends_with_the_same_bits(tmp_path):
    data = corpus(tmp_path)
    changes = {"mesh__data": HOSTS, "mesh__pipe": 1, "mesh__tensor": 1, "batch__global_batch": 6, "run__steps": STEPS}
    changes |= {"run__eval_every": 0, "run__sample_tokens": 0, "batch__micro_batch": 1}
    quiet, loud = (
        trained(tmp_path / name, configuration(data, tmp_path / name / "run", **changes), name == "loud")
        for name in ("quiet", "loud")
    )
    assert len(quiet[0]) > 1 and quiet[:2] == loud[:2]
    assert quiet[2] == 0 and loud[2] > 50
