"""Three hosts without a scheduler: each fault ends all processes in time, and the log says what it was.

One run is broken again and again; each start continues from its last checkpoint.
"""

import signal
import time

import pytest

from experiments.hosts import hosts
from experiments.lab import faults
from paxtrain.run import metrics

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
LOST = 8.0  # seconds, --lost_timeout
AT_ONCE = 6.0  # seconds, on a machine that others use as well
OTHERS = [1] * (faults.HOSTS - 1)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with hosts.Cluster([[faults.MBIT] * faults.HOSTS for _ in range(faults.HOSTS)]) as cluster:
        yield faults.Lab(cluster, tmp_path_factory.mktemp("faults") / "lab", lost=LOST)


def ended(lab, fault, within):
    found = faults.broken(lab, fault, 4 * LOST)
    assert found["end_seconds"] is not None and found["end_seconds"] < within, (found, lab.said)
    return found


def test_a_killed_process_ends_the_others_at_once(lab):
    found = ended(lab, "a process is killed", AT_ONCE)
    assert found["codes"] == [*OTHERS, -signal.SIGKILL]
    for host in range(faults.HOSTS - 1):
        assert f"error: process {host} on pax{host}: another process has ended or hangs, after step " in lab.said


def test_a_process_that_hangs_says_where(lab):
    found = ended(lab, "a process hangs between two steps", 1.5 * LOST + AT_ONCE)
    lab.hang.unlink()
    assert 1 in found["codes"] and "error: process 2 on pax2: nothing has finished for " in lab.said
    assert "time.sleep(0.5)" in lab.said or "in report" in lab.said


def test_a_host_without_network_is_named(lab):
    ended(lab, "a host has no network", 1.5 * LOST + AT_ONCE)
    for other in range(faults.HOSTS - 1):
        lab.cluster.restore(faults.HOSTS - 1, other)
    assert "unhealthy (stopped sending heartbeats):\n2\n" in lab.said


def test_after_all_of_that_the_run_goes_on_and_sigterm_stops_it(lab):
    lab.start()
    lab.wait_for_step(lab.last_step + 8)
    lab.term()
    assert lab.wait_for_end(time.monotonic(), faults.PATIENCE)["codes"] == [0] * faults.HOSTS


def test_no_step_is_lost_and_none_comes_twice(lab):
    found = [record["step"] for record in metrics.read(lab.out / metrics.FILE) if "loss" in record]
    assert found == list(range(1, len(found) + 1))
    assert lab.said.count("resumed from step ") == 1
