"""The generated batch script on a real SLURM of four hosts: the faults that it survives, their time, and the losses.

One job goes through the tests in their order (the slow ones make one of their own). It is compared with runs to which
nothing happened: on the same hosts to the bit, in one process to rounding. A host here has one core, and there XLA
divides a product otherwise than with the several threads that a process of several devices has. With -s the times are
printed.
"""

import dataclasses
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from experiments.hosts.hosts import Cluster
from experiments.hosts.slurm_cluster import HOLD, SILENT, Slurm, why_not
from paxtrain.config import plan as plans
from paxtrain.run import metrics
from paxtrain.run.checkpoint_reading import read_meta
from tests import small

pytestmark = pytest.mark.skipif(bool(why_not()), reason=f"there is no SLURM here: {why_not()}")

ROOT = pathlib.Path(__file__).resolve().parents[2]
HOSTS, MBIT = 4, 200.0
BATCH, EVERY, STEPS = 12, 20, 160  # samples of a step; steps between two checkpoints; steps in all
SEARCH = ["--pipe=2,3,4", "--micro_batch=3", "--schedules=eager_1f1b", "--compress=none", "--nomemory_margin"]
SEARCH += ["--profile_seconds=5"]
SETTINGS = {
    "model.vocab_size": 257,
    "model.layers": 4,
    "model.hidden": 32,
    "model.heads": 4,
    "model.sequence": 32,
    "model.dtype": "float32",
    "batch.global_batch": BATCH,
    "batch.micro_batch": 3,
    "pipeline.scan_layers": "on",  # a smaller program, sooner compiled
    "optimizer.schedule": "constant",
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 10,
    "checkpoint.every": EVERY,
    "run.steps": STEPS,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}


LIMIT = 300.0  # seconds that anything may take on a machine that has others to serve as well
COORDINATOR = 9703


def losses(out):
    """Return a run's loss by step, after a check that each step occurs once."""
    found = [(record["step"], record["loss"]) for record in metrics.read(out / metrics.FILE) if "loss" in record]
    assert [step for step, _ in found] == list(range(1, len(found) + 1))
    return dict(found)


def largest_difference(curve, other, shift=0):
    """Return the largest relative difference of two runs' losses, one of which may be some steps ahead."""
    return max(abs(curve[step] / other[step + shift] - 1) for step in other if step + shift in other)


def is_same_to_rounding(curve, other):
    """Return whether the losses agree to rounding; a step left out, or repeated, differs a hundred times as much."""
    assert largest_difference(curve, other, shift=1) > 3e-3
    return largest_difference(curve, other) < 3e-5


class Lab:
    """The job that everything happens to."""

    def __init__(self, home: pathlib.Path, cluster: Cluster, slurm: Slurm):
        self.home, self.cluster, self.slurm, self.out = home, cluster, slurm, home / "run"
        small.corpus(home, 40_000)
        self.environment = {
            "JAX_PLATFORMS": "cpu",
            "TF_CPP_MIN_LOG_LEVEL": "1",
            "XLA_FLAGS": "--xla_backend_optimization_level=0",
            "PYTHONPATH": str(ROOT),
        }

    def settings(self, **changes):
        data = {f"data.{name}": self.home / "data" / name for name in ("train", "validation")}
        return [f"--config.{name}={value}" for name, value in {**SETTINGS, **data, **changes}.items()]

    def submit(self):
        """Generate the job as a user does, and submit it."""
        commands = self.home / "bin"
        commands.mkdir()
        (commands / "python").write_text(
            f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        )  # a link would leave the environment
        (commands / "python").chmod(0o755)
        path = f"export PATH={commands}:$PATH"
        command = [sys.executable, "-m", "planner.launch", "slurm", f"--nodes={HOSTS}", "--min_nodes=2", "--plan=auto"]
        command += ["--gpus_per_node=0", "--config=configs/tiny.py", f"--out={self.out}", f"--setup={path}"]
        command += [f"--sbatch=--output={self.home}/job.log", "--", *self.settings(), *SEARCH]
        command.append("--lost_timeout=10")
        script = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        (self.home / "job.sbatch").write_text(script)
        self.job = self.slurm.submit(self.home / "job.sbatch", self.environment)

    # --- What is seen -------------------------------------------------------------------------------------------------

    @property
    def said(self):
        log = self.home / "job.log"
        return log.read_text(errors="replace") if log.exists() else ""

    @property
    def curve(self):
        """Return the loss by step, after a check that each step occurs once."""
        return losses(self.out) if (self.out / metrics.FILE).exists() else {}

    @property
    def checkpoints(self):
        return sorted(int(path.name) for path in (self.out / "checkpoints").iterdir() if path.name.isdecimal())

    def wait_for_step(self, step, limit=LIMIT):
        until = time.monotonic() + limit
        while max(self.curve, default=0) < step:
            assert time.monotonic() < until, f"no step {step} within {limit:g} s:\n{self.said}"
            assert self.slurm.job(self.job).state in ("RUNNING", "PENDING", "COMPLETING", "CONFIGURING"), self.said
            time.sleep(0.2)

    def wait_for_state(self, what, holds, limit=LIMIT):
        return self.slurm.wait_for(self.job, what, holds, limit)

    def started_again(self, broken, restarts, limit=LIMIT):
        """Wait until the job runs again; return the seconds from the fault until it might, and until it did."""
        job = self.wait_for_state("a restart", lambda j: j.restarts == restarts and j.state == "RUNNING", limit)
        return {"allowed": job.eligible - broken, "started": job.started - broken, "nodes": job.nodes}

    def keep_plan(self):
        """Keep the plan as it is now, also for any four devices."""
        plan = plans.load(self.out / "plan.json")
        plans.save(plan, self.home / "kept.json")
        plans.save(dataclasses.replace(plan, hosts=(), device_order=()), self.home / "anywhere.json")

    def undisturbed(self, steps):
        """Return the loss by step of an undisturbed run in one process, by the job's plan."""
        out, plan = self.home / f"alone{steps}", f"--plan={self.home / 'anywhere.json'}"
        command = [sys.executable, "-m", "paxtrain.train", "--config=configs/tiny.py", plan, f"--cpu_devices={HOSTS}"]
        command += self.settings(**{"run.out": out, "run.steps": steps})
        environment = {**os.environ, **self.environment}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return losses(out)

    def undisturbed_on_the_hosts(self, steps):
        """Return the loss by step of such a run on the job's hosts, started by hand, with the job's programs."""
        out = self.home / f"hosts{steps}"
        command = [str(self.home / "bin/python"), "-m", "planner.run", "--config=configs/tiny.py", f"--out={out}"]
        command += [f"--plan={self.home / 'kept.json'}", f"--coordinator={self.cluster.addresses[0]}:{COORDINATOR}"]
        command += [f"--num_processes={HOSTS}", *self.settings(**{"run.steps": steps})]
        logs = [self.home / f"hosts{steps}.{host}.log" for host in range(HOSTS)]
        started = [
            self.cluster.start(host, [*command, f"--process_id={host}"], log=log, env=self.environment)
            for host, log in enumerate(logs)
        ]
        codes = [popen.wait(LIMIT) for popen in started]
        assert codes == [0] * HOSTS, "\n".join(log.read_text() for log in logs)
        return losses(out)

    def tell(self, what, broken, figures, last):
        """Print the time from an event to the first new step, SLURM's part apart."""
        until = time.time() - broken
        slurm = f"SLURM let it start after {figures['allowed']:.0f} s, and started it after {figures['started']:.0f} s"
        print(
            f"\n{what}: {until:.1f} s to step {last + 1}. {slurm}; of that its hold {HOLD} s, a silent node {SILENT} s"
        )

    def resumed(self):
        """Return the step from which the last start continued."""
        return int(re.findall(r"resumed from step (\d+), ", self.said)[-1])

    def worker(self, host):
        """Return the process of planner.run on a host."""
        commands = self.cluster.processes(host)
        [found] = [number for number, words in commands.items() if words[1:3] == ["-m", "planner.run"]]
        return found


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    home = tmp_path_factory.mktemp("slurm")
    with Cluster([[MBIT] * HOSTS for _ in range(HOSTS)]) as cluster, Slurm(cluster, home / "slurm") as slurm:
        made = Lab(home, cluster, slurm)
        made.submit()
        yield made


def test_it_measures_its_nodes_plans_and_trains(lab):
    lab.wait_for_step(EVERY + 5)
    job = lab.slurm.job(lab.job)
    assert job.state == "RUNNING" and job.nodes == lab.cluster.names
    assert "the first one of this run" in lab.said and "measured in " in lab.said
    assert set(plans.load(lab.out / "plan.json").hosts) == set(lab.cluster.names)


@pytest.mark.slow
def test_stopped_by_sigterm_it_saves_and_a_requeue_goes_on(lab):
    lab.wait_for_step(EVERY + 5)
    lab.slurm.ask("scancel", "--signal=TERM", str(lab.job))
    lab.wait_for_state("its end", lambda job: job.state == "COMPLETED")
    last = max(lab.curve)
    assert "stopped by SIGTERM" in lab.said and lab.checkpoints[-1] == last
    broken = time.time()
    lab.slurm.ask("scontrol", "requeue", str(lab.job))
    figures = lab.started_again(broken, restarts=1)
    assert figures["nodes"] == lab.cluster.names
    lab.wait_for_step(last + 5)
    lab.tell("stopped, and requeued", broken, figures, last)
    assert lab.resumed() == last and "again: same nodes" in lab.said
    assert sorted(lab.curve) == list(range(1, max(lab.curve) + 1))


@pytest.mark.slow
def test_a_killed_rank_is_named_and_the_script_starts_all_again(lab):
    lab.wait_for_step(max(lab.curve, default=0) + EVERY + 5)
    lab.keep_plan()
    last, restarts, broken = max(lab.curve), lab.slurm.job(lab.job).restarts, time.time()
    os.kill(lab.worker(2), signal.SIGKILL)
    figures = lab.started_again(broken, restarts + 1)
    lab.wait_for_step(last + 5)
    lab.tell("a rank killed", broken, figures, last)
    assert "srun: error: pax2: task 2: Killed" in lab.said
    assert "fault 1 of 10; the job is requeued" in lab.said
    assert last - 2 * EVERY <= lab.resumed() <= last + EVERY


@pytest.mark.slow
def test_without_a_lost_node_it_finishes_on_the_rest(lab):
    lab.wait_for_step(max(lab.curve) + EVERY)
    last, restarts, broken = max(lab.curve), lab.slurm.job(lab.job).restarts, time.time()
    lab.cluster.kill(3)
    figures = lab.started_again(broken, restarts + 1)
    assert figures["nodes"] == lab.cluster.names[:3]
    lab.wait_for_step(last + 5)
    lab.before_the_loss = lab.resumed()
    lab.tell("a node lost", broken, figures, last)
    assert "made anew: the former one is for other nodes: pax3 of it is not here" in lab.said
    assert lab.slurm.nodes()["pax3"].startswith("down")
    lab.wait_for_state("the end of training", lambda job: job.state == "COMPLETED", 180)
    assert lab.said.splitlines()[-1].endswith("finished")


@pytest.mark.slow
def test_no_sample_is_lost_and_none_comes_twice(lab):
    """Losses agree to the bit on the same nodes, and to rounding on others."""
    meta = read_meta(lab.out / "checkpoints", lab.checkpoints[-1])
    assert (meta["step"], meta["samples"]) == (STEPS, STEPS * BATCH)
    here, there = lab.curve, lab.undisturbed_on_the_hosts(STEPS)
    assert [step for step in range(1, lab.before_the_loss + 1) if here[step] != there[step]] == []
    assert is_same_to_rounding(here, there)
    assert is_same_to_rounding(here, lab.undisturbed(STEPS))
