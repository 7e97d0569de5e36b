"""Supervisors as processes, whose workers are short scripts with a slow step: one line says why it is slow."""

import os
import pathlib
import re
import signal

import pytest

from planner.supervision.supervisor import Limits
from tests.planner.supervision.supervisors import HOSTS, start, wait, wait_for

LIMITS = Limits(link=30.0, hang=60.0, settle=2.0, grace=0.5, start=20.0)
# As in training, all work on a step until the last one has done its part, and then all have finished it.
WORKER = """
import os, pathlib, signal, sys, time
from paxtrain.process import supervised

host, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
(folder / f"pid{host}").write_text(str(os.getpid()))

def until(name):
    while not (folder / name).exists():
        time.sleep(0.01)

with supervised.Progress(os.environ) as p:
    p.placed(supervised.MeshPosition(host, f"stage {host}", tuple({(host - 1) % 3, (host + 1) % 3})))
    for step in range(1, 41):
        time.sleep(0.05)
        EVENT
        (folder / f"{host}.{step}").touch()
        for other in range(3):
            until(f"{other}.{step}")
        p.finished(step)
"""


def notes(path: pathlib.Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if line.startswith("note: ")]


@pytest.mark.parametrize(
    ("event", "what", "logs"),
    [
        (
            "if step == 20 and host == 1: os.kill(os.getpid(), signal.SIGSTOP)",
            r"127\.0\.0\.1:\d+ \(stage 1\) is the one the others wait for: stopped by a signal",
            (0, 1),
        ),
        (
            "if step == 20 and host == 1: until('go')",
            "nothing to be seen from outside: no worker is stopped or behind, no CPU or link slower than before",
            (0,),
        ),
    ],
    ids=["stopped", "unseen"],
)
def test_a_late_step_is_told_and_that_it_went_on(tmp_path, event, what, logs):
    with start(tmp_path, WORKER.replace("EVENT", event), LIMITS) as started:
        wait_for(tmp_path, "err0", lambda path: notes(path) != [])
        (tmp_path / "go").touch()
        os.kill(int((tmp_path / "pid1").read_text()), signal.SIGCONT)
        assert wait(tmp_path, started) == [0] * HOSTS
    first, last = notes(tmp_path / "err0")
    seconds, times, median = re.fullmatch(
        rf"note: step 20 has taken (\S+) s so far, (\S+) times the median of (\S+) s; {what}", first
    ).groups()
    assert 2.0 <= float(seconds) < 15 and float(times) * float(median) == pytest.approx(float(seconds), rel=0.1)
    took = re.fullmatch(r"note: step 20 took (\S+) s in all; training goes on", last)[1]
    assert float(seconds) <= float(took) < float(seconds) + 5
    for host in range(HOSTS):
        assert (tmp_path / f"err{host}").read_text() == ("" if host else f"{first}\n{last}\n")
        assert notes(tmp_path / f"log{host}") == ([first, last] if host in logs else [])


@pytest.mark.once
def test_what_is_no_step_is_not_told(tmp_path):
    """All compile, and one saves longer than the others. Then one step takes as long."""
    event = """
        if step == 10 or (step == 15 and host == 1):
            # Longer than all take to look around, however busy the machine is.
            with p.doing("compiling"): time.sleep(12 if step == 15 else 3.5)
        if step == 25 and host == 1: time.sleep(3.5)
    """
    with start(tmp_path, WORKER.replace("EVENT", event.strip()), LIMITS) as started:
        assert wait(tmp_path, started) == [0] * HOSTS
    told = (tmp_path / "err0").read_text().splitlines()
    assert told and all(line.startswith("note: step 25 ") for line in told)
