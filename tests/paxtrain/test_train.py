"""Training end to end: crashes, signals, other meshes and more processes do not change a run's metrics.

One run of the command, `reference`, is what all others are compared with; most of them continue a copy of its past.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from paxtrain.config import plan
from paxtrain.errors import UserError
from paxtrain.parallel.step import Trainer
from paxtrain.run import metrics, sampling
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.run.run import Run
from tests.paxtrain.training import (
    EVERY,
    STEPS,
    configuration,
    curve,
    expected_batches,
    losses,
    same_bits,
    settings,
    started,
)
from tests.small import corpus, mesh_of

pytestmark = pytest.mark.usefixtures("quiet_orbax")
ROOT = pathlib.Path(__file__).resolve().parents[2]

# The command, which also records the batches it reads, the checkpoints it saves and its devices.
RECORDER = """
import json, pathlib, sys
import runpy
from paxtrain.data import token_files as data
from paxtrain.run import training

path, reads, saves, devices = pathlib.Path(sys.argv.pop(1)), [], [], []

class Recorded(training.Run):
    def save(self, checkpoints, state, step):
        saves.append(step)
        devices[:] = [device.id for device in self.trainer.mesh.devices.flat]
        super().save(checkpoints, state, step)

def read(self, start, stop, read=data.TokenFile.read):
    ids = read(self, start, stop)
    if self.prefix.endswith("train"):
        reads.append(ids.tolist())
    return ids

training.Run, data.TokenFile.read = Recorded, read
try:
    runpy.run_module("paxtrain.train", run_name="__main__")
finally:
    path.write_text(json.dumps({"reads": reads, "saves": saves, "devices": devices}))
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("train"))


@contextlib.contextmanager
def running(home, out, *processes, program=("-m", "paxtrain.train"), **changes):
    """Start the command once for each (arguments before, after its settings); kill running processes at the end."""
    extra = {}
    if len(processes) > 1:
        # All processes compile at the same time, which is twice as fast without optimization.
        extra["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    flags = [f"--config.{name}={value}" for name, value in settings(home, out, **changes).items()]
    started = [
        subprocess.Popen(
            [sys.executable, *map(str, [*program, *head]), *flags, *tail],
            cwd=ROOT,
            env=os.environ | extra,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for head, tail in processes or [((), ())]
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def finish(processes):
    """Wait for all processes, check that their exit code is 0, and return their (stdout, stderr)."""
    outputs = [process.communicate(timeout=150) for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes), outputs
    return outputs


def run_command(home, out, *flags, **changes):
    with running(home, out, ((), flags), **changes) as processes:
        return finish(processes)[0]


def wait_for_step(processes, out, step):
    """Return when the metrics show this step, while the processes run."""
    path, deadline = out / metrics.FILE, time.monotonic() + 120
    while not (path.exists() and any(record["step"] >= step for record in metrics.read(path))):
        assert [process.poll() for process in processes] == [None] * len(processes), finish(processes)
        assert time.monotonic() < deadline
        time.sleep(0.005)


def checkpoints_in(out):
    return sorted(int(path.name) for path in (out / sampling.CHECKPOINTS).iterdir() if path.name.isdecimal())


def final_state(config):
    """Return the newest checkpoint's (arrays, metadata)."""
    trainer = Trainer(config, mesh_of(config))
    found = Checkpoints(pathlib.Path(config.run.out) / sampling.CHECKPOINTS, config.checkpoint).restore(
        trainer.abstract_canonical(), sampling.architecture(config.model)
    )
    return jax.device_get(found[0]), found[1]


def assert_same_run(home, out, reference):
    assert curve(out) == curve(reference)
    (state, meta), (expected, expected_meta) = (final_state(configuration(home, path)) for path in (out, reference))
    assert same_bits(state, expected)
    assert (meta["step"], meta["samples"]) == (expected_meta["step"], expected_meta["samples"])


@pytest.fixture(scope="module")
def finished(home):
    """Return (out, stdout, stderr) of the command that ran without interruption."""
    out = home / "reference"
    return out, *run_command(home, out)


@pytest.fixture(scope="module")
def reference(finished):
    return finished[0]


@pytest.fixture
def past(reference, tmp_path):
    """Copy the reference run's folder as it was after step STEPS - EVERY, except that later metrics are kept."""
    out = shutil.copytree(reference, tmp_path / "past")
    shutil.rmtree(out / sampling.CHECKPOINTS / str(STEPS))
    assert checkpoints_in(out)[-1] == STEPS - EVERY
    return out


# --- One run ----------------------------------------------------------------------------------------------------------


def test_the_end_tells_everything(finished):
    out, stdout, stderr = finished
    figures = r"(\d+\.\d{4}) nats per token, perplexity (\d+\.\d\d)"
    for what in ("validation loss", "untrained"):
        loss, perplexity = map(float, re.search(rf"{what} +{figures}", stdout).groups())
        step = STEPS if what == "validation loss" else 0
        exact = next(r["validation_loss"] for r in curve(out) if r["step"] == step and "validation_loss" in r)
        assert abs(loss - exact) <= 5e-5 and abs(perplexity - np.exp(exact)) <= 5e-3
    assert re.search(r"speed +\d+(\.\d+)? k?tokens/s", stdout)
    for what, name in (("checkpoint", "checkpoints"), ("metrics", "metrics.jsonl"), ("loss curve", "loss.png")):
        assert re.search(rf"{what} +{re.escape(str(out / name))}\n", stdout)
        assert (out / name).exists()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    sample = sampling.printable(sampling.sample(out, "\n", 20, seed=0))
    after = stdout.split("a sample:\n")[1].removeprefix(sample + "\n").splitlines()
    assert [line.split("  ")[1] for line in after] == ["to go on", "learning rate", "to sample", "to export"]
    assert f" -m paxtrain.train --config={out}/config.json --config.run.steps={2 * STEPS}" in after[0]
    assert f" -m paxtrain.sample --checkpoint={out}" in after[2]
    assert f" -m paxtrain.huggingface export --checkpoint={out} --out={out}_hf" in after[3]
    assert f"step {STEPS}/{STEPS}: loss " in stderr
    assert losses(out)[STEPS] < losses(out)[1] - 1
    assert [r["step"] for r in curve(out) if "validation_loss" in r] == [0, 25, 50, STEPS]


@pytest.mark.once
def test_started_again_at_its_end_it_says_the_same(home, finished, tmp_path, capsys):
    reference = finished[0]
    out = shutil.copytree(reference, tmp_path / "out")
    started(configuration(home, out)).train()
    stdout = capsys.readouterr().out
    assert f"resumed from step {STEPS}, {8 * STEPS} samples consumed" in stdout
    assert re.search(r"steps +all were done before", stdout)
    said = re.compile(r"(validation loss|untrained) .*")
    assert [found[0] for found in said.finditer(stdout)] == [found[0] for found in said.finditer(finished[1])]
    assert_same_run(home, out, reference)
    with pytest.raises(UserError, match=r"has a checkpoint of step 60, but run\.steps is 30; ask for more"):
        started(configuration(home, out, run__steps=30)).train()


@pytest.mark.once
def test_the_command_to_go_on_goes_on(home, tmp_path, capsys):
    changes = {"run__steps": 2, "run__sample_tokens": 0, "optimizer__warmup_steps": 0}
    started(configuration(home, tmp_path / "a run", **changes)).train()
    [command] = re.findall(r"to go on +(.*)\n", capsys.readouterr().out)
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and "resumed from step 2, 16 samples consumed" in done.stdout, done.stderr
    assert "settings have changed: run.steps was 2 and is 4; " in done.stdout
    assert final_state(configuration(home, tmp_path / "a run"))[1]["step"] == 4


def test_sampling_from_the_run(reference):
    command = [sys.executable, "-m", "paxtrain.sample", f"--checkpoint={reference}", "--tokens=6", "--temperature=0"]
    done = subprocess.run([*command, "--prompt=100 101 "], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "100 101 " + sampling.sample(reference, "100 101 ", 6, temperature=0) + "\n"


def test_checkpoints_that_are_kept(reference):
    assert checkpoints_in(reference) == [3 * EVERY, STEPS - EVERY, STEPS]


# --- Interruptions ----------------------------------------------------------------------------------------------------


@pytest.mark.once
def test_killed_then_terminated_then_finished(home, reference, tmp_path, capsys):
    """SIGKILL, the same command, SIGTERM, the same run: one uninterrupted curve and the same parameters."""
    # A checkpoint is written beside the steps; the next one waits until it is whole, so the first is before this step.
    kill = np.random.default_rng(1).integers(2 * EVERY + 2, 3 * EVERY)
    with running(home, tmp_path) as processes:
        wait_for_step(processes, tmp_path, kill)
        processes[0].kill()
    assert kill <= max(losses(tmp_path)) < STEPS

    with running(home, tmp_path) as processes:
        wait_for_step(processes, tmp_path, 4 * EVERY + 5)
        processes[0].send_signal(signal.SIGTERM)
        [(stdout, _)] = finish(processes)
    assert re.search(r"resumed from step \d+", stdout)
    step = int(re.search(r"stopped by SIGTERM after step (\d+); the same command continues", stdout)[1])
    assert 4 * EVERY + 5 <= step < STEPS and checkpoints_in(tmp_path)[-1] == step == max(losses(tmp_path))

    started(configuration(home, tmp_path)).train()
    assert f"resumed from step {step}, {8 * step} samples consumed" in capsys.readouterr().out
    assert_same_run(home, tmp_path, reference)


def cut_off(directory):
    newest = directory / str(STEPS)
    largest = max((path for path in newest.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def unfinished(directory):
    (directory / str(STEPS)).rename(directory / f"{STEPS}.orbax-checkpoint-tmp")


@pytest.mark.once
@pytest.mark.parametrize(
    "damage, message",
    [
        (cut_off, "is damaged .* and not used"),
        pytest.param(unfinished, "was never finished", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_gives_way_to_the_one_before(home, reference, tmp_path, capsys, damage, message):
    out = shutil.copytree(reference, tmp_path / "out")
    damage(out / sampling.CHECKPOINTS)
    started(configuration(home, out)).train()
    stdout = capsys.readouterr().out
    assert re.search(f"checkpoint {STEPS} in .* {message}", stdout)
    assert f"resumed from step {STEPS - EVERY}, {8 * (STEPS - EVERY)} samples consumed" in stdout
    assert_same_run(home, out, reference)


# --- Other meshes, other processes ------------------------------------------------------------------------------------


class Recorded(Run):
    """A run that records the batches on which it trains."""

    def batches(self, name, start_sample=0, part=""):
        if name == "train":
            self.consumed = []
        for batch in super().batches(name, start_sample, part):
            if name == "train":
                self.consumed.append(np.asarray(batch))
            yield batch


@pytest.mark.once
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param(
            {
                "mesh__data": 1,
                "mesh__pipe": 2,
                "mesh__tensor": 4,
                "mesh__shard": "none",
                "mesh__sequence_parallel": True,
                "pipeline__virtual_stages": 2,
                "pipeline__schedule": "interleaved_1f1b",
            },
            marks=pytest.mark.slow,
        ),
        {"mesh__pipe": 1, "mesh__tensor": 2, "batch__data_micro_batches": "3,1"},
        pytest.param({"mesh__data": 2, "mesh__pipe": 4}, marks=pytest.mark.slow),
    ],
    ids=["interleaved-sequence-parallel", "uneven-data-ranks", "four-stages"],
)
def test_continuing_on_another_mesh(home, reference, past, capsys, changes):
    run = Recorded(c := configuration(home, past, **changes), mesh_of(c))
    run.train()
    assert f"resumed from step {STEPS - EVERY}" in capsys.readouterr().out
    assert np.array_equal(np.stack(run.consumed), expected_batches(home, STEPS)[-EVERY:, c.batch_samples])
    there, here = losses(reference), losses(past)
    assert there.keys() == here.keys()
    assert max(abs(there[step] - here[step]) for step in there) < 1e-4
    assert checkpoints_in(past) == checkpoints_in(reference)


def processes_flags(count, devices, head=lambda i: ()):
    """Return the arguments by which several processes of one launch find each other, for `running`."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = (f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--cpu_devices={devices}")
    return [(head(i), (*common, f"--process_id={i}")) for i in range(count)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh, batch",
    [
        ({"pipeline__pipe_layers": "3,1"}, "2 data ranks x 2 micro-batches x 2"),
        ({"batch__data_micro_batches": "3,1"}, "2 data ranks x 3,1 micro-batches x 2"),
    ],
    ids=["uneven stages", "uneven data ranks"],
)
def test_continuing_with_other_processes(home, reference, past, mesh, batch):
    """From one process with 8 devices to two with 2 each, to the end and its summary."""
    with running(home, past, *processes_flags(2, 2), **mesh) as processes:
        (stdout, _), (other, _) = finish(processes)
    assert f"resumed from step {STEPS - EVERY}" in stdout
    for promised in ("on 2 process(es)", batch, "validation loss", "untrained", "loss curve", "a sample:\n"):
        assert promised in stdout and promised not in other
    there, here = losses(reference), losses(past)
    assert there.keys() == here.keys()
    assert max(abs(there[step] - here[step]) for step in there) < 1e-4
    assert final_state(configuration(home, past))[1]["samples"] == 8 * STEPS


@pytest.mark.once
@pytest.mark.parametrize("count, tensor", [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_processes_are_one_run_and_stop_together(home, reference, tmp_path, count, tensor):
    records = [tmp_path / f"{i}.json" for i in range(count)]
    out = tmp_path / "out"
    launch = processes_flags(count, 4 * tensor // count, head=lambda i: (records[i],))
    with running(home, out, *launch, program=("-c", RECORDER), mesh__tensor=tensor) as processes:
        wait_for_step(processes, out, 5)
        processes[-1].send_signal(signal.SIGTERM)
        outputs = finish(processes)
    step = int(re.search(r"stopped by SIGTERM after step (\d+)", outputs[0][0])[1])
    recorded = [json.loads(path.read_text()) for path in records]
    assert 5 <= step < STEPS and checkpoints_in(out)[-1] == step
    assert [each["saves"][-1] for each in recorded] == [step] * count

    here, there = losses(out), losses(reference)
    assert list(here) == list(range(1, step + 1))
    assert max(abs(here[n] - there[n]) for n in here) < 1e-5

    # The first half of the processes hold the first data rank, the others the second one.
    batches = expected_batches(home, STEPS)
    for process, each in enumerate(recorded):
        reads = {tuple(ids) for ids in each["reads"] if len(ids) == 33}
        rank = process // (count // 2)
        mine, others = 4 * rank, 4 * (1 - rank)
        assert reads >= {tuple(row) for row in batches[:step, mine : mine + 4].reshape(-1, 33).tolist()}
        assert not reads & {tuple(row) for row in batches[:, others : others + 4].reshape(-1, 33).tolist()}


@pytest.mark.slow
def test_a_plan_overrides_the_configuration(home, reference, past, tmp_path):
    order = (3, 0, 2, 1)
    config = configuration(home, past)
    sections = (config.mesh, config.pipeline, config.batch, config.compress)
    plan.save(plan.Plan(*sections, device_order=order), tmp_path / "plan.json")
    record = tmp_path / "record.json"
    wrong = {"mesh__data": 4, "mesh__pipe": 1, "batch__micro_batch": 1}
    launch = ((record,), (f"--plan={tmp_path / 'plan.json'}",))
    with running(home, past, launch, program=("-c", RECORDER), **wrong) as processes:
        [(stdout, _)] = finish(processes)
    assert "data=2 pipe=2 tensor=1" in stdout and "2 micro-batches x 2" in stdout
    assert tuple(json.loads(record.read_text())["devices"]) == order
    assert_same_run(home, past, reference)
