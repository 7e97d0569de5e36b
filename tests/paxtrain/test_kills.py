"""Kills of whole runs: at every write, at random moments, on one process and on four; and starts in a folder in use.

A start is killed at every third of its writes, from day to day at others; with PAXTRAIN_EVERY=1 at each, which takes
about an hour in all. PAXTRAIN_KILLS limits the kills of a test.
"""

import datetime
import os
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

from paxtrain.run import checkpoint_reading, metrics, sampling
from planner.run import FINISHED
from tests.paxtrain.dying import ROOT, DyingRuns
from tests.paxtrain.training import curve
from tests.small import corpus

pytestmark = pytest.mark.slow
MOST = int(os.environ.get("PAXTRAIN_KILLS", "1000000"))
EVERY = int(os.environ.get("PAXTRAIN_EVERY", "3"))
FIRST = int(os.environ.get("PAXTRAIN_FIRST_KILL", datetime.date.today().toordinal() % EVERY + 1))
ENDED = 8  # runs in a row that end before the call to die at; threads write in more or fewer pieces, 308 to 393 in all
SMALL = {
    "model.vocab_size": 257,
    "model.layers": 2,
    "model.hidden": 16,
    "model.heads": 2,
    "model.sequence": 16,
    "model.dtype": "float32",
    "model.embedding_dropout": 0.1,
    "mesh.data": 1,
    "mesh.pipe": 1,
    "mesh.tensor": 1,
    "batch.global_batch": 4,
    "batch.micro_batch": 2,
    "optimizer.warmup_steps": 1,
    "optimizer.schedule": "constant",  # the same for any number of steps
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("kills"))


def arguments(data, out, **changes):
    paths = {"data.train": data / "data/train", "data.validation": data / "data/validation", "run.out": out}
    values = SMALL | paths | {name.replace("__", "."): value for name, value in changes.items()}
    return ["--config=tiny", *(f"--config.{name}={value}" for name, value in values.items())]


def state(out) -> dict[str, str]:
    """Return the fingerprints of the arrays in the newest checkpoint."""
    folder = pathlib.Path(out) / sampling.CHECKPOINTS
    step = checkpoint_reading.finished_steps(folder)[-1]
    return checkpoint_reading._read_record(folder, step)["fingerprints"]


def same_end(out, reference):
    """Require the same losses at every step, and the same weights at the end."""
    assert curve(out) == curve(reference)
    assert state(out) == state(reference)


# --- At every write ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["fresh", "again"])
def test_a_kill_at_any_write_of_a_start_blocks_nothing(data, tmp_path, how):
    """The next start ends as a run that nothing happened to."""
    steps = {"run__steps": 4, "checkpoint__every": 2}
    reference, out = tmp_path / "reference", tmp_path / "run" / "out"
    out.parent.mkdir()
    with DyingRuns(tmp_path / "dying", out.parent) as runs:
        assert runs.run(arguments(data, reference, **steps)) == 0, runs.log.read_text()

        def begin():
            shutil.rmtree(out, ignore_errors=True)
            if how == "again":  # as after a kill before step 4 was saved
                shutil.copytree(reference, out)
                shutil.rmtree(out / sampling.CHECKPOINTS / "4")

        begin()
        assert runs.run(arguments(data, out, **steps)) == 0
        assert runs.changes > 30
        at, killed, ended = FIRST, 0, 0
        while killed < MOST and ended < ENDED:
            begin()
            code = runs.run(arguments(data, out, **steps), at)
            if code == 0:
                assert runs.changes < at
                ended += 1
            else:
                assert code == -signal.SIGKILL, runs.log.read_text()[-3000:]
                assert runs.run(arguments(data, out, **steps)) == 0, f"at {at}: {runs.log.read_text()[-3000:]}"
                killed, ended = killed + 1, 0
            same_end(out, reference)
            at += EVERY
    print(f"{how}: {killed} kills at every {EVERY}th call of {FIRST} to {at - EVERY}, all continued")


@pytest.mark.parametrize("how", ["fresh", "again"])
def test_a_kill_at_every_write_of_a_planned_start_blocks_nothing(data, tmp_path, how):
    """planner.run measures, plans and trains; what it writes before it trains is killed here, and the rest above.

    The next start trains to the end. A start that measures anew may choose another plan, so losses need not be equal.
    """
    out = tmp_path / "run" / "out"
    out.parent.mkdir()
    flags = [*arguments(data, out, run__steps=2, checkpoint__every=2), f"--out={out}", "--num_processes=1"]
    flags += ["--profile_seconds=1", "--micro_batch=2", "--compress=none", "--host_name=a"]
    with DyingRuns(tmp_path / "dying", out.parent, "planner.run") as runs:
        at, killed = 1, 0
        while killed < MOST:
            shutil.rmtree(out, ignore_errors=True)
            if how == "again":  # as after a start that was killed before its first step
                assert runs.run(flags, start_only=True) == 0, runs.log.read_text()[-3000:]
            code = runs.run(flags, at, start_only=True)
            if code == 0:
                assert runs.changes < at
                break
            assert code == -signal.SIGKILL, runs.log.read_text()[-3000:]
            assert runs.run(flags) == 0, f"at {at}: {runs.log.read_text()[-3000:]}"
            losses = {row["step"]: row["loss"] for row in curve(out) if "loss" in row}
            assert sorted(losses) == [1, 2] and np.isfinite(list(losses.values())).all()
            assert (out / FINISHED).exists() and (out / "plan.json").exists()
            killed, at = killed + 1, at + 1
        assert killed >= min(MOST, 10)
    print(f"{how}: {killed} kills at calls 1 to {at - 1}, all continued")


# --- At random moments ------------------------------------------------------------------------------------------------


def writing(out) -> bool:
    """Return whether a checkpoint is being written."""
    return any((pathlib.Path(out) / sampling.CHECKPOINTS).glob("*.orbax-checkpoint-tmp*"))


def moment(draw: random.Random, out, number: int, alive, seconds: float) -> str:
    """Wait for a moment to kill at, and return its kind: every second one is while a checkpoint is written.

    Args:
        draw: source of the moments.
        out: folder of the run.
        number: number of the kill.
        alive: function that returns whether the run goes on.
        seconds: longest time to wait for a moment of the other kind.
    """
    if number % 2:
        while alive() and not writing(out):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.03)
        return "a checkpoint was written" if writing(out) else "a checkpoint had just been written"
    path = pathlib.Path(out) / metrics.FILE
    before = path.stat().st_size if path.exists() else 0
    if number % 4:  # the others may be killed while they start
        while alive() and (not path.exists() or path.stat().st_size <= before):
            time.sleep(0.01)
    until = time.monotonic() + draw.random() * seconds
    while alive() and time.monotonic() < until:
        time.sleep(0.01)
    return "at random"


def test_kills_at_random_moments_of_one_process(data, tmp_path):
    """The run is so long that no kill comes too late, and ends a few steps behind the last checkpoint."""
    steps = {"run__steps": 100_000, "checkpoint__every": 10, "checkpoint__keep": 2}
    reference, out, draw = tmp_path / "reference", tmp_path / "out", random.Random(0)
    kinds: dict[str, int] = {}
    with DyingRuns(tmp_path / "dying", tmp_path / "none") as runs:
        for number in range(min(25, MOST)):
            process = runs.start(arguments(data, out, **steps))

            def alive(process=process):
                return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"

            kind = moment(draw, out, number, alive, 6.0)
            os.kill(process, signal.SIGKILL)
            assert runs.wait() == -signal.SIGKILL, f"it has ended before: {runs.log.read_text()[-3000:]}"
            kinds[kind] = kinds.get(kind, 0) + 1
        reached = max(checkpoint_reading.finished_steps(out / sampling.CHECKPOINTS), default=0)
        for folder in (out, reference):
            last = arguments(data, folder, **{**steps, "run__steps": reached + 20})
            assert runs.run(last) == 0, runs.log.read_text()[-3000:]
    print(f"one process: kills {kinds}, up to step {reached}")
    same_end(out, reference)


def four(data, out, log, **changes):
    """Start a run of four processes, and return them."""
    with socket.create_server(("localhost", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    given = arguments(data, out, mesh__data=2, mesh__pipe=2, **changes)
    among = ("-m", "paxtrain.train", f"--coordinator={address}", "--num_processes=4")
    with log.open("ab") as file:
        return [
            subprocess.Popen(
                [sys.executable, *among, f"--process_id={i}", *given],
                cwd=ROOT,
                env=os.environ | {"JAX_PLATFORMS": "cpu"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for i in range(4)
        ]


def test_kills_at_random_moments_of_four_processes(data, tmp_path):
    """One of four is killed; a moment later the scheduler kills the rest, and all four start again."""
    steps = {"run__steps": 2000, "checkpoint__every": 20, "checkpoint__keep": 2}
    reference, out, log, draw = tmp_path / "reference", tmp_path / "out", tmp_path / "log", random.Random(1)
    kinds: dict[str, int] = {}
    for number in range(min(12, MOST)):
        processes = four(data, out, log, **steps)
        try:
            kind = moment(draw, out, number, lambda some=processes: all(each.poll() is None for each in some), 8.0)
            victim = processes[draw.randrange(4)]
            assert victim.poll() is None, f"it has ended before: {log.read_text()[-3000:]}"
            victim.kill()
            time.sleep(draw.random())
        finally:
            for each in processes:
                each.kill()
                each.wait()
        kinds[kind] = kinds.get(kind, 0) + 1
    reached = max(checkpoint_reading.finished_steps(out / sampling.CHECKPOINTS), default=0)
    last = {**steps, "run__steps": reached + 40}
    for folder in (out, reference):
        for each in four(data, folder, log, **last):
            assert each.wait(600) == 0, log.read_text()[-3000:]
    print(f"four processes: kills {kinds}, up to step {reached}")
    same_end(out, reference)


# --- Two starts -------------------------------------------------------------------------------------------------------


def test_twenty_starts_in_a_folder_in_use_are_refused(data, tmp_path):
    steps = {"run__steps": 100_000, "checkpoint__every": 50}
    out = tmp_path / "out"
    with (
        DyingRuns(tmp_path / "dying", tmp_path / "none") as runs,
        DyingRuns(tmp_path / "late", tmp_path / "no") as late,
    ):
        process = runs.start(arguments(data, out, **steps))
        try:
            while not (out / metrics.FILE).exists() or not (out / metrics.FILE).read_text().strip():
                time.sleep(0.05)
            refused = [late.run(arguments(data, out, **steps)) for _ in range(20)]
        finally:
            os.kill(process, signal.SIGTERM)
        assert runs.wait() == 0
        assert refused == [2] * 20
        said = [line for line in late.log.read_text().splitlines() if line.startswith("error: ")]
        assert len(said) == 20 and all(f"{out} is in use by process {process} on " in line for line in said)
        done = checkpoint_reading.finished_steps(out / sampling.CHECKPOINTS)[-1]
        assert runs.run(arguments(data, tmp_path / "reference", **steps | {"run__steps": done})) == 0
    mine, other = ({r["step"]: r["loss"] for r in curve(f) if "loss" in r} for f in (out, tmp_path / "reference"))
    assert mine == other and np.isfinite(list(mine.values())).all()
