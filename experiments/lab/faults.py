"""Supervised training on the shaped cluster, broken in every way that docs/faults.md promises to survive.

One run of a small GPT on four hosts goes through all of it: each experiment breaks something, measures how it ends and
with which sentence, starts again from the last checkpoint, and leaves the run going for the next one. At the end the
whole curve is compared with that of a run that nothing happened to: no sample was lost and none came twice.

    python -m experiments.lab.faults      # as root; a few minutes on two cores
"""

import contextlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.hosts.hosts import Cluster, why_not
from experiments.lab.supervised_run import (
    BATCH,
    EVERY,
    HOSTS,
    LIMITS,
    MBIT,
    PATIENCE,
    ROOT,
    Figures,
    Lab,
    checkpoints,
    plan_without,
    require,
)
from paxtrain.run import metrics, sampling
from paxtrain.run.checkpoint_reading import read_meta

SHORT_CUT = 4.0  # seconds, below LIMITS.link
SLOW = 0.1  # of a core, of the slow host

# --- What breaks ------------------------------------------------------------------------------------------------------


def _figures(name: str, broken: float, ended: float, sentence: str, **more: Any) -> Figures:
    return {"fault": name, "end_seconds": ended - broken, "bound_seconds": LIMITS.bound, "sentence": sentence, **more}


def _go_on(lab: Lab, steps: int) -> int:
    """Let the run train for that many steps and until there is a checkpoint; return the last step."""
    if lab.running is None or any(popen.poll() is not None for popen in lab.running.supervisors.values()):
        lab.start()
    lab.running.wait_for_step(max(lab.last_step() + steps, EVERY + 2))
    return lab.last_step()


def killed_worker(lab: Lab) -> Figures:
    """Kill one worker with SIGKILL in the middle of a step; all are restarted."""
    _go_on(lab, 3)
    run = lab.running
    [worker] = _children(run.supervisors[2].pid)
    broken = time.monotonic()
    os.kill(worker, signal.SIGKILL)
    ended, sentence = run.wait_for_end()
    require("pax2: the worker was killed by SIGKILL" in sentence, sentence)
    return _figures("a worker is killed", broken, ended, sentence, **lab.start())


def killed_host(lab: Lab) -> Figures:
    """Kill everything on a host with SIGKILL; the planner plans for the others, and training continues there."""
    _go_on(lab, 3)
    run, lost = lab.running, 3
    broken = time.monotonic()
    lab.cluster.kill(lost)
    ended, sentence = run.wait_for_end(dead=[lost])
    require(sentence.startswith("pax3 is gone"), sentence)
    cause = run.report(0)["cause"]
    require(cause["kind"] == "lost" and cause["leave_out"] == ["pax3"], str(cause))
    plan, seconds = plan_without(lab, cause["leave_out"])
    left = [host for host in range(HOSTS) if host != lost]
    started = lab.start(left, plan)
    on_the_rest = 2 * EVERY  # steps that count: up to a checkpoint
    enough = started["resumed_from"] + on_the_rest
    lab.running.wait_for("a checkpoint", lambda: max(checkpoints(lab.out)) >= enough, PATIENCE)
    more = {"plan_seconds": seconds, "hosts_left": len(left), "steps_on_the_rest": on_the_rest}
    return _figures("a host is killed", broken, ended, sentence, **more, **started)


def short_cut(lab: Lab) -> Figures:
    """Cut a link for less than the limit: training waits and continues."""
    _go_on(lab, 3)
    run, last = lab.running, lab.last_step()
    broken = time.monotonic()
    lab.cluster.cut(1, 2)
    time.sleep(SHORT_CUT)
    lab.cluster.restore(1, 2)
    run.wait_for_step(last + 3, LIMITS.collective)
    stood = time.monotonic() - broken
    run.wait_for_words(1, "pax1 hears pax2 again")
    [note] = [line for line in run.said(1).splitlines() if "hears pax2 again" in line]
    return {
        "fault": "a link is cut for less than the limit",
        "cut_seconds": SHORT_CUT,
        "stood_seconds": stood,
        "sentence": note.removeprefix("note: "),
        "lost_steps": 0,
    }


def long_cut(lab: Lab) -> Figures:
    """Cut a link for longer than the limit, and restore it before the restart."""
    _go_on(lab, 3)
    run = lab.running
    broken = time.monotonic()
    lab.cluster.cut(1, 2)
    ended, sentence = run.wait_for_end()
    require(sentence.startswith("the link between pax1 and pax2 carries nothing"), sentence)
    lab.cluster.restore(1, 2)
    return _figures("a link is cut for longer than the limit", broken, ended, sentence, **lab.start())


def slow_host(lab: Lab) -> Figures:
    """Give a host less of its CPU: training continues at its pace, and the host is named."""
    last = _go_on(lab, 3)
    run, began = lab.running, time.monotonic()
    lab.cluster.limit(SLOW, 2)
    words = "pax2's CPU takes"
    run.wait_for_words(0, words)
    named = time.monotonic() - began
    run.wait_for_step(last + 1)  # training goes on
    lab.cluster.limit(None, 2)
    note, *_ = [line for line in run.said(0).splitlines() if words in line]
    return {"fault": "a host is slow", "named_seconds": named, "sentence": note.removeprefix("note: "), "lost_steps": 0}


def full_disk(lab: Lab) -> Figures:
    """Fill the disk while training saves checkpoints; free space, and training continues."""
    _go_on(lab, EVERY + 1)
    run, filler = lab.running, lab.out / sampling.CHECKPOINTS / "filler"
    broken = time.monotonic()
    with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    ended, sentence = run.wait_for_end(limit=LIMITS.bound + 30)
    require("the worker found its disk full" in sentence and "a checkpoint could not be written" in sentence, sentence)
    filler.unlink()
    return _figures("the disk is full", broken, ended, sentence, **lab.start())


def corrupted_checkpoint(lab: Lab) -> Figures:
    """Change the newest checkpoint's bytes on disk: the one before it is used."""
    _go_on(lab, EVERY + 1)
    lab.running.stop()
    *_, older, newest = checkpoints(lab.out)
    files = [path for path in (lab.out / sampling.CHECKPOINTS / str(newest)).rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    damaged = bytearray(largest.read_bytes())
    damaged[len(damaged) // 2] ^= 0xFF
    largest.write_bytes(damaged)
    began = time.monotonic()
    figures = lab.start()
    require(figures["resumed_from"] == older, f"resumed from {figures['resumed_from']}, not {older}")
    [line] = [line for line in lab.running.said(0).splitlines() if line.startswith(f"checkpoint {newest} in ")]
    return _figures("the newest checkpoint is damaged", began, began, line, **figures)


def _children(process: int) -> list[int]:
    listed = pathlib.Path(f"/proc/{process}/task/{process}/children").read_text()
    return [int(word) for word in listed.split()]


# --- No sample lost or repeated ---------------------------------------------------------------------------------------

# The command itself, but that it believes to have consumed one more batch than it has.
_SHIFTED = """
import runpy
from paxtrain.run import training

class Shifted(training.Run):
    def start(self, checkpoints):
        state = super().start(checkpoints)
        self.samples += self.config.batch.global_batch
        return state

training.Run = Shifted
runpy.run_module("paxtrain.train", run_name="__main__")
"""


def alone(lab: Lab, steps: int, out: pathlib.Path, program: Sequence[str] = ("-m", "paxtrain.train")) -> pathlib.Path:
    """Run the same settings on this machine without faults, and return the run's folder."""
    settings = lab.settings(**{"run.out": out, "run.steps": steps})
    variables = {**os.environ, **lab.environment}
    command = [sys.executable, *program, *settings, "--cpu_devices=4"]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    require(done.returncode == 0, done.stderr)
    return out


def losses(out: pathlib.Path) -> dict[int, float]:
    """Return the loss of each step in the metrics; each step must occur once."""
    found = [(record["step"], record["loss"]) for record in metrics.read(out / metrics.FILE) if "loss" in record]
    require([step for step, _ in found] == list(range(1, len(found) + 1)), "steps are missing, or there twice")
    return dict(found)


def difference(there: dict[int, float], here: dict[int, float]) -> float:
    """Return the largest relative difference between two curves, over the steps of both."""
    return max(abs(here[step] / there[step] - 1) for step in there.keys() & here.keys())


def whole_curve(lab: Lab) -> Figures:
    """End the run and compare its losses with those of a run without faults, and with those shifted by a batch."""
    lab.running.stop()
    here, newest = losses(lab.out), max(checkpoints(lab.out))
    consumed = read_meta(lab.out / sampling.CHECKPOINTS, newest)["samples"]
    require(consumed == newest * BATCH, f"{consumed} samples after {newest} steps of {BATCH}")
    quiet = alone(lab, newest, lab.home / "alone")
    late = shutil.copytree(quiet, lab.home / "late")
    for step in [step for step in checkpoints(late) if step > newest - EVERY]:
        shutil.rmtree(late / sampling.CHECKPOINTS / str(step))
    alone(lab, newest, late, ("-c", _SHIFTED))
    figures = {"fault": "all of these, one after another", "steps": newest, "samples": consumed}
    figures |= {"loss": here[newest], "difference": difference(losses(quiet), here)}
    return figures | {"difference_a_batch_late": difference(losses(quiet), losses(late))}


ALL = (killed_worker, short_cut, slow_host, killed_host, long_cut, full_disk, corrupted_checkpoint, whole_curve)


@contextlib.contextmanager
def lab(home: pathlib.Path) -> Iterator[Lab]:
    """Yield the hosts, with the run on them.

    Args:
        home: folder for everything; must not exist.
    """
    with Cluster([[MBIT] * HOSTS for _ in range(HOSTS)]) as cluster:
        yield Lab(cluster, home)


def run(out: pathlib.Path, say: Callable[[str], None], keep: Callable[[Figures], Any] = lambda _: None) -> None:
    """Run all experiments, in the folder `out`.

    Args:
        keep: takes the figures of each when it is through.

    Raises:
        FaultError: something did not go as promised.
    """
    shutil.rmtree(out / "run", ignore_errors=True)
    with lab(out / "run") as made:
        for experiment in ALL:
            say(f"faults: {' '.join(experiment.__doc__.split())}")
            figures = experiment(made)
            keep(figures)
            say(f"faults: {json.dumps(figures)}")


if __name__ == "__main__":
    if sys.argv[1:]:
        print(f"error: unexpected argument {sys.argv[1]!r}; there are no flags", file=sys.stderr)
        sys.exit(2)
    if why_not():
        print(f"error: there is no shaped cluster here: {why_not()}", file=sys.stderr)
        sys.exit(2)
    with tempfile.TemporaryDirectory(prefix="paxtrain-faults-") as folder:
        run(pathlib.Path(folder), print)
