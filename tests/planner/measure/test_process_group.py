"""Process groups: verdicts, names of lost processes, and hosts that cannot be reached."""

import contextlib
import errno
import json
import os
import pathlib
import socket

import pytest

from paxtrain.errors import LostError, UserError, is_full
from planner.measure import process_group, reachability
from planner.measure.process_group import ProcessGroup
from planner.measure.reachability import check_reachable, unreachable


class Store:
    """The key-value store of jax.distributed's client, in one process."""

    def __init__(self):
        self.values = {}

    def key_value_set(self, key, value):
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        if key not in self.values:
            raise RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out")
        return self.values[key]

    def key_value_delete(self, key):
        self.values = {k: v for k, v in self.values.items() if not k.startswith(key)}


@pytest.fixture
def processes(monkeypatch):
    """Return a store and the process groups of three processes that share it."""
    store, made = Store(), []
    monkeypatch.setattr(process_group.jax, "process_count", lambda: 3)
    monkeypatch.setattr(process_group.jax_private, "coordination_client", lambda: store)
    for i in range(3):
        monkeypatch.setattr(process_group.jax, "process_index", lambda i=i: i)
        made.append(ProcessGroup(1.0))
        made[-1].names = ["n0", "n1", "n2"]
    return store, made


def answer(store, turn, process, value):
    """Store the value that a process gathers in a turn."""
    store.key_value_set(f"paxtrain/group/{turn}/{process}", json.dumps(value))


def test_alone_the_verdict_is_ones_own():
    assert ProcessGroup(1.0).gather(3, lambda values: values[0] + 1) == 4
    assert ProcessGroup(1.0).agree(2.5) == 2.5


def test_process_0_decides_and_all_read_it(processes):
    store, (first, second, _) = processes
    answer(store, 1, 1, 10)
    answer(store, 1, 2, 20)
    assert first.gather(1, sum) == 31
    assert second.gather(10) == 31
    for i in (1, 2):
        answer(store, 2, i, 0)
    first.gather(0)
    assert not any(key.startswith("paxtrain/group/1/") for key in store.values)  # the store does not grow


def test_a_lost_process_is_named_on_all(processes):
    store, (first, second, _) = processes
    answer(store, 1, 1, None)
    sentence = "^n2 has not answered for 1 s; see whether its host is up"
    with pytest.raises(LostError, match=sentence):
        first.gather(None)
    with pytest.raises(LostError, match=sentence):
        second.gather(None)


@pytest.mark.parametrize("kind", [UserError, LostError])
def test_a_verdict_that_fails_fails_on_all(processes, kind):
    store, (first, second, _) = processes
    for i in (1, 2):
        answer(store, 1, i, i)

    def verdict(values):
        raise kind("n1 and n2 differ")

    for process in (first, second):
        with pytest.raises(kind, match=r"^n1 and n2 differ$"):
            process.gather(0, verdict)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_fails_on_process_0_is_known_to_all_at_once(processes, number):
    store, (first, second, _) = processes
    for i in (1, 2):
        answer(store, 1, i, i)

    def verdict(values):
        raise OSError(number, os.strerror(number))

    with pytest.raises(OSError, match=os.strerror(number)):
        first.gather(0, verdict)
    kind = OSError if number == errno.ENOSPC else UserError
    with pytest.raises(kind, match=r"n0 failed \(OSError\); its own output says what") as elsewhere:
        second.gather(0)
    assert is_full(elsewhere.value) == (number == errno.ENOSPC)


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (UserError("a \x1b[31mstranger's"), 2, "error: a \\x1b[31mstranger's\n"),
        (LostError("n2 is gone"), 1, "error: n2 is gone\n"),
        (OSError(errno.ENOSPC, "no room"), 1, "error: the disk is full: [Errno 28] no room; make room, and start "),
    ],
)
def test_processes_end_together_and_print_no_control_characters(processes, monkeypatch, capsys, error, code, words):
    _, (_, second, _) = processes
    ended = []
    monkeypatch.setattr(process_group.os, "_exit", ended.append)
    with second.ends_together():
        raise error
    assert ended == [code]
    assert capsys.readouterr().err.startswith(words)
    second.fail("a \x1b[31mstranger's")
    assert "\x1b" not in capsys.readouterr().err
    with pytest.raises(ZeroDivisionError), second.ends_together():
        raise ZeroDivisionError


def test_a_meeting_that_loses_a_process_ends_with_a_sentence(processes, monkeypatch, capsys):
    _, (_, second, _) = processes
    ended, met = [], []
    monkeypatch.setattr(process_group.os, "_exit", ended.append)
    monkeypatch.setattr(process_group.distributed, "wait_for_all", met.append)
    second.meet("the link programs are compiled")
    assert (met, ended) == (["the link programs are compiled"], [])

    def lost(what):
        raise RuntimeError("ABORTED: a task\nis gone")

    monkeypatch.setattr(process_group.distributed, "wait_for_all", lost)
    second.meet("again")
    assert ended == [1]
    assert capsys.readouterr().err.startswith("error: n1 lost another process (ABORTED: a task is gone); see whether")


def test_who_waits_too_long_inside_the_runtime_says_for_whom_and_the_others_learn_it(processes, monkeypatch, capsys):
    _, (first, second, third) = processes
    ended = []
    monkeypatch.setattr(process_group.os, "_exit", ended.append)
    with second.watch("n1", "n2"):
        pass
    assert ended == []
    second.fail("n1 has waited for messages from n2")
    assert ended == [1]
    assert capsys.readouterr().err == "error: n1 has waited for messages from n2\n"
    with pytest.raises(LostError, match=r"^n1 has waited for messages from n2$"):
        first.gather(None)
    with pytest.raises(LostError, match=r"^n1 has waited for messages from n2$"):
        third.gather(None)


@pytest.mark.parametrize(
    ("failures", "words"),
    [
        ([(0, 2, "timed out"), (1, 2, "timed out")], "n2 (10.0.0.2) cannot be reached from n0, n1: timed out"),
        ([(0, 1, "refused")], "n1 (10.0.0.1) cannot be reached from n0: refused"),
        ([(1, 0, "x"), (1, 2, "x")], "n1 (10.0.0.1) cannot reach n0, n2: x"),
        ([(0, 1, "x"), (1, 0, "x"), (1, 2, "x"), (2, 1, "x")], "n1 (10.0.0.1) cannot be reached from n0, n2: x"),
    ],
)
def test_the_host_that_most_failures_share_is_named(failures, words):
    names, addresses = ["n0", "n1", "n2"], [f"10.0.0.{i}" for i in range(3)]
    assert unreachable(names, addresses, failures).startswith(words)


def test_hosts_are_really_called(processes, monkeypatch):
    store, (first, *_) = processes
    monkeypatch.setattr(reachability, "own_address", lambda: "127.0.0.1")
    with socket.create_server(("127.0.0.1", 0)) as up, socket.create_server(("127.0.0.1", 0)) as down:
        ports = [s.getsockname()[1] for s in (up, down)]

        def answers(turn):
            for i in (1, 2):
                for of, value in enumerate(("127.0.0.1", ports[i - 1], [])):
                    answer(store, turn + of, i, value)

        answers(1)
        check_reachable(first)
        down.close()
        answers(4)
        with pytest.raises(UserError, match=r"^n2 \(127.0.0.1\) cannot be reached from n0: Connection refused; "):
            check_reachable(first)


def listens_at(port):
    """Return the addresses at which this machine listens at a TCP port of IPv4, as the kernel writes them."""
    rows = [line.split() for line in pathlib.Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return {row[1].partition(":")[0] for row in rows if row[3] == "0A" and int(row[1].partition(":")[2], 16) == port}


def test_the_port_for_calls_is_open_at_one_address_and_strangers_cannot_fill_it(monkeypatch):
    monkeypatch.setattr(reachability, "_BACKLOG", 8)
    with reachability._reachable("127.0.0.1") as port:
        assert listens_at(port) == {"0100007F"}
        with contextlib.ExitStack() as stack:
            strangers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), 3)) for _ in range(100)]
            strangers[0].settimeout(3)
            assert strangers[0].recv(1) == b""  # they are hung up on
            assert reachability._connect("127.0.0.1", port, 3) == ""
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:  # the control: who does not accept is filled
            where = full.getsockname()
            idle = [socket.socket() for _ in range(4)]
            for each in idle:
                each.setblocking(False)
                each.connect_ex(where)
            assert reachability._connect(*where, 0.5) != ""
            for each in idle:
                each.close()
    assert listens_at(port) == set()
    assert "refused" in reachability._connect("127.0.0.1", port, 3)


def test_loopback_is_an_address_for_one_machine_alone(processes, monkeypatch):
    """If the coordinator's own name stands for 127.0.1.1, it uses its address on the way to another process."""
    store, (first, second, _) = processes
    monkeypatch.setattr(process_group.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(process_group.jax_private, "coordinator_address", lambda: "127.0.0.1:1234")
    assert reachability.own_address() == "127.0.0.1"
    ways = []
    monkeypatch.setattr(reachability, "_towards", lambda *far: ways.append(far) or "10.0.0.1")
    mixed = ["127.0.1.1", "10.0.0.2", "10.0.0.3"]
    for i in (1, 2):
        answer(store, 1, i, mixed[i])
    assert reachability._beyond_loopback(first, mixed) == ["10.0.0.1", *mixed[1:]]
    assert reachability._beyond_loopback(second, mixed) == ["10.0.0.1", *mixed[1:]]
    assert [host for host, _ in ways] == ["10.0.0.2"]
    for usual in (["127.0.0.1"] * 3, [f"10.0.0.{i}" for i in range(3)]):
        assert reachability._beyond_loopback(first, usual) == usual
    monkeypatch.setattr(process_group.jax, "default_backend", lambda: "cpu")  # gloo uses the machine's own name
    assert reachability._beyond_loopback(first, mixed) == mixed


def test_a_name_that_stands_for_loopback_is_bad_input():
    """The cause is no other process, so a restart would not help."""
    said = unreachable(["n0", "n1"], ["127.0.1.1", "10.0.0.1"], [(1, 0, "Connection refused")])
    assert said.startswith("n0 (127.0.1.1) cannot be reached from n1: Connection refused; its own name stands for ")


def test_an_address_that_nobody_reaches_is_a_lost_host(processes, monkeypatch):
    store, (first, *_) = processes
    monkeypatch.setattr(reachability, "own_address", lambda: "10.0.0.1")
    monkeypatch.setattr(reachability, "_reachable", lambda _: contextlib.nullcontext(1))
    monkeypatch.setattr(reachability, "_connect", lambda *_: "timed out")
    for i in (1, 2):
        for turn, value in enumerate((f"10.0.0.{i + 1}", 1, [])):
            answer(store, 1 + turn, i, value)
    with pytest.raises(LostError, match=r"^n0 \(10.0.0.1\) cannot reach n1, n2: timed out; "):
        check_reachable(first)


def test_a_lost_connection_is_a_sentence_with_the_hosts_name(processes, monkeypatch, capsys):
    _, (first, second, _) = processes
    ended = []
    monkeypatch.setattr(process_group.os, "_exit", ended.append)
    with second.watch("n1", "n2"):
        raise ValueError("UNKNOWN: Gloo collective permute failed:\n Connection closed by peer")
    assert ended == [1]
    sentence = "n1 lost n2 (UNKNOWN: Gloo collective permute failed: Connection closed by peer); "
    assert capsys.readouterr().err.startswith(f"error: {sentence}")
    with pytest.raises(LostError) as error:
        first.gather(None)
    assert str(error.value).startswith(sentence)


def test_alone_an_error_of_the_runtime_stays_what_it_is():
    with pytest.raises(ValueError, match="broken"), ProcessGroup(1.0).watch("n0", "n0"):
        raise ValueError("broken")
