"""The cluster on one machine: rates are kept, also after a pause; hosts are separate; nothing of it remains."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from experiments.hosts import hosts, janitor, quota
from experiments.hosts.hosts import Cluster
from experiments.hosts.network import Uplinks

ROOT = pathlib.Path(__file__).resolve().parents[3]

needs_links = pytest.mark.skipif(bool(hosts.why_not()), reason=hosts.why_not() or "links can be shaped")

# Receives so many messages of a size, each after a pause, and prints when each began, by the sender's word, and when
# its last byte was there. Hosts of one machine have one clock.
RECEIVE = """
import socket, struct, sys, time
size, count = int(sys.argv[1]), int(sys.argv[2])
server = socket.create_server(("", 7000)); link, _ = server.accept()
link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
def read(n):
    parts = b""
    while len(parts) < n: parts += link.recv(n - len(parts))
    return parts
for _ in range(count):
    [began] = struct.unpack("d", read(8)); read(size)
    print(began, time.monotonic(), flush=True)
"""
SEND = """
import socket, struct, sys, time
size, count = int(sys.argv[1]), int(sys.argv[2])
for _ in range(100):
    try: link = socket.create_connection((sys.argv[3], 7000)); break
    except OSError: time.sleep(0.05)
for _ in range(count):
    time.sleep(0.3)
    link.sendall(struct.pack("d", time.monotonic()) + bytes(size))
time.sleep(2)
"""

# Connects, says so, and sends a message at the time that it is told then.
SEND_AT = """
import socket, struct, sys, time
for _ in range(100):
    try: link = socket.create_connection((sys.argv[2], 7000)); break
    except OSError: time.sleep(0.05)
print("connected", flush=True)
time.sleep(max(float(input()) - time.monotonic(), 0))
link.sendall(struct.pack("d", time.monotonic()) + bytes(int(sys.argv[1])))
link.recv(1)
"""


def _seconds(cluster, sender, receiver, size, tmp_path, count=8):
    """Return the seconds of the fastest of some messages between two hosts, since other work only delays messages."""
    arguments = [str(size), str(count)]
    receive = cluster.start(receiver, [sys.executable, "-c", RECEIVE, *arguments], stdout=subprocess.PIPE)
    cluster.start(sender, [sys.executable, "-c", SEND, *arguments, cluster.addresses[receiver]])
    lines = receive.stdout.read().decode().splitlines()
    receive.stdout.close()
    assert receive.wait() == 0
    return min(float(end) - float(began) for began, end in map(str.split, lines))


def _together(cluster, pairs, size, count=4):
    """Return the seconds from the first byte to the last while several pairs send at once: the least of some times.

    It is no less than what the links need, whenever the senders begin, and other work only adds to it.
    """
    spans = []
    for _ in range(count):
        receive = [sys.executable, "-c", RECEIVE, str(size), "1"]
        receivers = [cluster.start(b, receive, stdout=subprocess.PIPE) for _, b in pairs]
        senders = [
            cluster.start(
                a,
                [sys.executable, "-c", SEND_AT, str(size), cluster.addresses[b]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for a, b in pairs
        ]
        assert [sender.stdout.readline() for sender in senders] == [b"connected\n"] * len(pairs)
        at = f"{time.monotonic() + 0.1}\n".encode()
        for sender in senders:
            sender.stdin.write(at)
            sender.stdin.flush()
        began, end = zip(*(map(float, receiver.communicate()[0].split()) for receiver in receivers))
        for sender in senders:
            sender.communicate()
        spans.append(max(end) - min(began))
    return min(spans)


def _left(token):
    groups = list(quota.root().glob(f"{token}*")) if quota.root() else []
    return janitor.namespaces(token) + groups


@needs_links
def test_each_direction_has_its_rate_also_after_a_pause(tmp_path):
    with Cluster([[0, 40, 200], [100, 0, 200], [200, 200, 0]]) as cluster:
        slow = _seconds(cluster, 0, 1, 65_536, tmp_path)
        fast = _seconds(cluster, 1, 0, 65_536, tmp_path)
        assert slow == pytest.approx(65_536 * 8 / 40e6, rel=0.25)
        assert fast == pytest.approx(65_536 * 8 / 100e6, rel=0.35)
        cluster.rate(0, 1, 20)
        assert _seconds(cluster, 0, 1, 65_536, tmp_path) == pytest.approx(65_536 * 8 / 20e6, rel=0.25)


@needs_links
def test_hosts_of_a_rack_share_its_uplink_and_change_racks(tmp_path):
    """Two pairs that cross at once take twice as long as one, and hosts that become neighbors take no uplink."""
    size, fast = 500_000, [[200.0] * 4] * 4
    alone = size * 8 / 40e6
    with Cluster(fast, uplinks=Uplinks((0, 0, 1, 1), 40.0)) as cluster:
        assert _together(cluster, [(0, 2)], size) == pytest.approx(alone, rel=0.3)
        assert _together(cluster, [(0, 2), (1, 3)], size) == pytest.approx(2 * alone, rel=0.3)
        assert _together(cluster, [(0, 1), (2, 3)], size) < 0.8 * alone
        cluster.set_rates(fast, Uplinks((0, 1, 0, 1), 40.0))
        assert _together(cluster, [(0, 2), (1, 3)], size) < 0.8 * alone
        assert _together(cluster, [(0, 1), (2, 3)], size) == pytest.approx(2 * alone, rel=0.3)


@needs_links
def test_hosts_have_names_of_their_own_and_know_each_other(tmp_path):
    log = tmp_path / "log"
    with Cluster([[0, 100], [100, 0]], share=0.5) as cluster:
        script = "import socket; print(socket.gethostname(), socket.gethostbyname('pax0'))"
        assert cluster.start(1, [sys.executable, "-c", script], log=log).wait() == 0
        assert log.read_text() == "pax1 10.77.0.1\n"


@needs_links
def test_a_share_of_a_core_is_all_that_a_host_gets(tmp_path):
    burn = "import time; t = time.process_time(); b = time.monotonic()\nwhile time.monotonic() < b + 1: pass\n"
    burn += "print(time.process_time() - t)"
    log = tmp_path / "log"
    with Cluster([[0, 100], [100, 0]], share=0.1) as cluster:
        assert cluster.start(0, [sys.executable, "-c", burn], log=log).wait() == 0
        limited = float(log.read_text())
        assert 0.05 < limited < 0.2
        cluster.limit(None, host=0)
        assert cluster.start(0, [sys.executable, "-c", burn], log=log).wait() == 0
        assert float(log.read_text().split()[1]) > 1.5 * limited  # others may keep the cores busy


@needs_links
def test_a_cut_link_carries_nothing_until_it_is_restored():
    ping = [sys.executable, "-c", "import socket, sys; socket.create_connection((sys.argv[1], 7001), timeout=0.5)"]
    serve = [sys.executable, "-c", "import socket, time; s = socket.create_server(('', 7001)); time.sleep(60)"]
    quiet = {"stdout": subprocess.DEVNULL}
    with Cluster([[0, 100, 100], [100, 0, 100], [100, 100, 0]]) as cluster:
        cluster.start(1, serve)

        def reached(host):
            silent = ["/bin/sh", "-c", 'exec "$@" 2>/dev/null', "sh", *ping, cluster.addresses[1]]
            return cluster.start(host, silent, **quiet).wait() == 0

        until = time.monotonic() + 20
        while not reached(0):
            assert time.monotonic() < until
        cluster.cut(0, 1)
        assert not reached(0)
        assert reached(2)
        cluster.restore(0, 1)
        assert reached(0)


@needs_links
def test_two_clusters_are_up_at_once_and_leave_nothing_behind():
    with Cluster([[0, 100], [100, 0]]) as one, Cluster([[0, 100], [100, 0]]) as other:
        tokens = [one._token, other._token]
        assert tokens[0] != tokens[1]
        sleeping = one.start(0, ["sleep", "1000"])
        assert all(len(janitor.namespaces(token)) == 2 for token in tokens)
    assert sleeping.returncode == -signal.SIGKILL
    assert not any(_left(token) for token in tokens)


@needs_links
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_whoever_brought_it_up_may_die_in_any_way(how):
    script = "import signal, time; from experiments.hosts.hosts import Cluster\n"
    script += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a shell's & leaves it ignored
    script += "with Cluster([[0, 9], [9, 0]]) as c:\n c.start(0, ['sleep', '999']); print(c._token, flush=True)\n"
    script += " time.sleep(60)"
    popen = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    token = popen.stdout.readline().strip()
    assert len(janitor.namespaces(token)) == 2
    os.kill(popen.pid, how)
    popen.wait()
    popen.stdout.close()
    until = time.monotonic() + 20
    while _left(token):
        assert time.monotonic() < until, _left(token)
        time.sleep(0.1)


def test_without_root_hosts_are_plain_processes(monkeypatch, tmp_path):
    monkeypatch.setattr(hosts, "why_not", lambda: "it needs root")
    with Cluster([[0, 1], [1, 0]], share=0.1) as cluster:
        assert not cluster.shaped
        assert cluster.addresses == ("127.0.0.1", "127.0.0.1")
        cluster.rate(0, 1, 5)
        cluster.set_rates(None)
        cluster.limit(0.5)
        assert cluster.start(1, ["echo", "here"], log=tmp_path / "log").wait() == 0
        sleeping = cluster.start(0, ["sleep", "1000"])
    assert (tmp_path / "log").read_text() == "here\n"
    assert sleeping.returncode == -signal.SIGKILL
