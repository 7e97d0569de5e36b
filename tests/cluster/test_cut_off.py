"""Supervisors on a network that breaks: all sides end in time, with the same sentence. Workers are short scripts."""

import itertools
import pathlib
import sys
import time

import pytest

from experiments.hosts import hosts
from paxtrain.process import job_secret
from planner.supervision.peer_connections import PORT
from planner.supervision.supervisor import FAULT, Limits

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMITS = Limits(link=4.0, settle=3.0, grace=0.5, start=20.0)
HOSTS = 4
# It steps until the file is there, and then waits as one does whose collective gets no answer.
WORKER = """
import os, pathlib, sys, time
from paxtrain.process import supervised

p, step, stop = supervised.Progress(os.environ), 0, pathlib.Path(sys.argv[1])
while True:
    time.sleep(0.05)
    if not stop.exists():
        step += 1
        p.finished(step)
"""

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")


@pytest.mark.parametrize(
    ("how", "links", "sentence"),
    [
        ("cut", [(3, 0), (3, 1), (3, 2)], "error: pax3 has not been heard by any other host for "),
        (
            "cut",
            list(itertools.product((0, 1), (2, 3))),
            "error: pax2 and pax3 have not been heard by any other host for ",
        ),
        ("cut", [(0, 1), (1, 2)], "error: each of the links pax0 - pax1 and pax1 - pax2 carries nothing for "),
        ("hang", [(0, 2)], "error: the link between pax0 and pax2 carries nothing for "),
    ],
    ids=["one alone", "two halves", "two links", "a link that hangs"],
)
def test_all_sides_end_with_one_sentence(tmp_path, how, links, sentence):
    """So do hosts that hear nobody any more, and hosts that hear some others only through third ones."""
    with hosts.Cluster([[100.0] * HOSTS] * HOSTS) as cluster:
        addresses = ",".join(f"{name}:{PORT}" for name in cluster.names)
        started = []
        for host in range(HOSTS):
            command = [sys.executable, "-m", "planner.supervise", f"--hosts={addresses}", f"--host={host}"]
            command += [f"--link_timeout={LIMITS.link}", f"--settle={LIMITS.settle}", f"--grace={LIMITS.grace}"]
            command += [f"--log={tmp_path}/log{host}", "--", sys.executable, "-c", WORKER, str(tmp_path / "stop")]
            variables = {"PYTHONPATH": str(ROOT), job_secret.VARIABLE: "secret" * 6}
            started.append(cluster.start(host, command, log=tmp_path / f"said{host}", env=variables))
        deadline = time.monotonic() + 20
        logs = [tmp_path / f"log{host}" for host in range(HOSTS)]
        while not all(log.exists() and log.stat().st_size for log in logs):  # written into when all have met
            assert time.monotonic() < deadline and all(popen.poll() is None for popen in started)
            time.sleep(0.02)
        time.sleep(1.0)  # the workers run
        for a, b in links:
            getattr(cluster, how)(a, b)
        (tmp_path / "stop").touch()
        broken = time.monotonic()
        assert [popen.wait(LIMITS.bound) for popen in started] == [FAULT] * HOSTS
        assert time.monotonic() - broken < LIMITS.link + LIMITS.settle + LIMITS.grace + 6
    said = [(tmp_path / f"said{host}").read_text().splitlines() for host in range(HOSTS)]
    errors = [[line for line in lines if line.startswith("error: ")] for lines in said]
    assert all(len(each) == 1 and each[0].startswith(sentence) for each in errors), said
