"""The job as processes of this machine: short scripts stand for planner.run, and one test runs the job itself."""

import dataclasses
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from paxtrain.process.progress import FAULT, STOPPED
from paxtrain.run import metrics
from planner.jobs import local
from planner.jobs.job import Job
from tests import small

ROOT = pathlib.Path(__file__).resolve().parents[3]
HOSTS = 2
# A run of ten steps, which after five of them does EVENT; on SIGTERM it pretends to save, and exits with 0.
RUN = """
import os, pathlib, signal, sys, time

options = dict(each[2:].split("=", 1) for each in sys.argv[1:])
host, folder = options["host_name"], pathlib.Path(options["out"])
start = len(list(folder.glob(f"{host}.start*")))
(folder / f"{host}.start{start}").write_text(" ".join(sys.argv[1:]))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
for step in range(1, 11):
    time.sleep(0.02)
    if step == 5:
        (folder / f"{host}.there{start}").touch()
        EVENT
    if stop:
        print(f"{host} has saved", flush=True)
        sys.exit(0)
(folder / "finished").touch()
print("error: what all hosts say", flush=True)
print(f"{host} is done", flush=True)
"""


@dataclasses.dataclass(frozen=True)
class Script(Job):
    """A job whose run is the script, with an event in it."""

    event: str = "pass"

    def run(self, *more):
        return ["-c", RUN.replace("EVENT", self.event), f"--out={self.out}", *more]


@pytest.fixture
def job(tmp_path):
    return Script("config", "auto", str(tmp_path), HOSTS, HOSTS, max_restarts=2)


def starts(job):
    return len(list(pathlib.Path(job.out).glob("host0.start*")))


def test_it_starts_every_host_with_a_name_of_its_own(job, capfd):
    assert local.Local(job, devices=3).run() == 0
    said = capfd.readouterr().out
    assert "host0 is done" in said and "host1 is done" in said and starts(job) == 1
    assert said.count("error: what all hosts say") == 1
    for host in range(HOSTS):
        given = (pathlib.Path(job.out) / f"host{host}.start0").read_text().split()
        assert {f"--process_id={host}", f"--num_processes={HOSTS}", "--cpu_devices=3"} <= set(given)


def test_after_a_fault_it_ends_the_others_starts_again_and_says_why(job, capfd, monkeypatch):
    monkeypatch.setattr(local, "_GRACE", 0.5)
    kill = 'start or (os.kill(os.getpid(), signal.SIGKILL) if host == "host1" else time.sleep(60))'
    began = time.monotonic()
    assert local.Local(dataclasses.replace(job, event=kill), 1).run() == 0
    said = capfd.readouterr().out
    assert said.count("error: host1 was killed by SIGKILL") == 1 and "starting again, 1 of 2 times" in said
    assert starts(job) == 2 and time.monotonic() - began < 30


def test_it_starts_again_only_so_often(job, capfd):
    assert local.Local(dataclasses.replace(job, event="raise ValueError('always')"), 1).run() == FAULT
    assert starts(job) == 3 and capfd.readouterr().out.count("ValueError: always") == 3 * HOSTS


def test_bad_input_is_not_tried_again(job, capfd):
    event = "print('error: no such data', file=sys.stderr); sys.exit(2)"
    assert local.Local(dataclasses.replace(job, event=event), 1).run() == 2
    assert "no such data" in capfd.readouterr().out and starts(job) == 1


# The launcher as a separate process, so that a test can send it signals.
LAUNCHER = """
import sys
sys.path.insert(0, {root!r})
from planner.jobs.local import Local
from tests.planner.jobs.test_local import Script
sys.exit(Local(Script("config", "auto", sys.argv[1], 2, 2, event=sys.argv[2]), 1).run())
"""


@pytest.fixture
def launched(job):
    """Start a job in a separate process, and return it when both of its runs wait for SIGTERM."""
    event = "[time.sleep(0.05) for _ in range(600) if not stop]"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", LAUNCHER.format(root=str(ROOT)), job.out, event]
    folder, until = pathlib.Path(job.out), time.monotonic() + 30
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as popen:
        while len(list(folder.glob("*.there0"))) < HOSTS:
            assert time.monotonic() < until and popen.poll() is None
            time.sleep(0.02)
        yield popen
        popen.kill()


def processes(folder):
    """Return the commands of other processes that name the folder."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if str(folder) in command and int(path.parent.name) != os.getpid():
            found.append(command)
    return found


def test_ctrl_c_lets_all_save(launched, job):
    launched.send_signal(signal.SIGINT)
    said, _ = launched.communicate(timeout=30)
    assert launched.returncode == 0 and "host0 has saved" in said and "host1 has saved" in said
    assert "the same command continues" in said and not processes(job.out)


def test_nothing_is_left_of_a_launcher_that_is_killed(launched, job):
    assert processes(job.out)
    launched.kill()
    launched.wait()
    until = time.monotonic() + 20
    while processes(job.out):
        assert time.monotonic() < until, processes(job.out)
        time.sleep(0.05)


@pytest.mark.parametrize(
    "codes, asked, finished, code",
    [
        ([0, 0], False, True, 0),
        ([0, 0], True, False, STOPPED),
        ([1, 0], False, False, FAULT),
        ([2, 1], False, False, 2),
        ([0, -15], True, False, STOPPED),
        ([0, -15], False, False, FAULT),
        ([-9, 0], True, False, FAULT),
    ],
)
def test_one_code_of_all(codes, asked, finished, code):
    assert local._of_all(codes, asked, finished) == code


@pytest.mark.slow
def test_the_job_itself(tmp_path):
    """The command is that of docs/launch.md, with data made for the test."""
    small.corpus(tmp_path, 40_000)
    out = tmp_path / "run"
    command = [sys.executable, "-m", "planner.launch", "local", "--hosts=4", "--config=configs/tiny.py", f"--out={out}"]
    data = [f"--config.data.{name}={tmp_path / 'data' / name}" for name in ("train", "validation")]
    options = [*data, "--config.run.steps=8", "--config.optimizer.warmup_steps=2", "--config.run.eval_batches=1"]
    done = subprocess.run(
        [*command, "--", *options], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "4 x 1 cpu: host0, host1, host2, host3" in done.stdout and (out / "finished").exists()
    assert max(record["step"] for record in metrics.read(out / metrics.FILE) if "loss" in record) == 8
