"""Four hosts that compute for real: what becomes slow while they train is named in the log within 20 steps."""

import re
import sys
import time

import pytest

from experiments.hosts import hosts
from experiments.lab.session import ROOT
from paxtrain.config import plan as plans
from paxtrain.run import metrics
from tests import small

pytestmark = pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}")
HOSTS, PORT, MBIT, SHARE = 4, 9741, 100.0, 0.3
WARM = 30  # steps before anything becomes slow
PATIENCE = 400.0  # seconds, on a machine that others use as well
SETTINGS = {
    "model.vocab_size": 257,
    "model.layers": 4,
    "model.hidden": 64,
    "model.heads": 4,
    "model.sequence": 64,
    "model.dtype": "float32",
    "mesh.data": 2,
    "mesh.pipe": 2,
    "mesh.tensor": 1,
    "batch.global_batch": 16,
    "batch.micro_batch": 1,
    "pipeline.scan_layers": "on",  # a smaller program, sooner compiled
    "optimizer.schedule": "constant",
    "optimizer.warmup_steps": 10,
    "checkpoint.every": 0,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}


class Training:
    """A run on the cluster's hosts."""

    def __init__(self, cluster, home, steps=10_000, processes=HOSTS, program="paxtrain.train", **settings):
        small.corpus(home, 40_000)
        self.cluster, self.out, self.log = cluster, home / "run", home / "said"
        values = {**SETTINGS, **{f"data.{name}": home / "data" / name for name in ("train", "validation")}, **settings}
        values |= {"run.out": self.out, "run.steps": steps}
        command = [sys.executable, "-m", program, *(f"--config.{name}={x}" for name, x in values.items())]
        command += [f"--coordinator={cluster.addresses[0]}:{PORT}", f"--num_processes={processes}", "--cpu_devices=1"]
        command += ["--profile_seconds=15", "--compute_hosts=1", "--compress=none"] * (program == "planner.run")
        environment = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1", "PYTHONPATH": str(ROOT)}
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        self.started = [
            cluster.start(i % HOSTS, [*command, f"--process_id={i}"], log=self.log, env=environment)
            for i in range(processes)
        ]

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    @property
    def records(self):
        path = self.out / metrics.FILE
        return metrics.read(path) if path.exists() else []

    @property
    def step(self):
        return max((record["step"] for record in self.records if "loss" in record), default=0)

    def wait_for(self, holds):
        until = time.monotonic() + PATIENCE
        while not (found := holds()):
            assert time.monotonic() < until and all(popen.poll() is None for popen in self.started), self.said
            time.sleep(0.05)
        return found

    def slowed(self, slow_down):
        """Return the line that names what `slow_down` has made slow, its metrics, and the steps until it came."""
        self.wait_for(lambda: self.step >= WARM)
        assert "slower by" not in self.said
        slow_down()
        began = self.step
        line = self.wait_for(lambda: next(iter(re.findall("^step .*slower by.*$", self.said, re.MULTILINE)), ""))
        [record] = self.wait_for(lambda: [record for record in self.records if "slower/step" in record])
        steps = record["step"] - began
        usual = [r["step_seconds"] for r in self.records if "step_seconds" in r and r["step"] <= began]
        print(f"{steps} steps after the slowdown, steps took {sorted(usual)[len(usual) // 2]:.3f} s: {line}")
        assert steps <= 20
        return line, record


def up(share):
    return hosts.Cluster([[MBIT] * HOSTS for _ in range(HOSTS)], share=share)


@pytest.fixture
def cluster():
    with up(SHARE) as found:
        yield found


def test_a_slow_host_is_named(tmp_path):
    """Hosts that share the cores as they come, so that all compile as soon as can be."""
    small_program = {"mesh.data": 4, "mesh.pipe": 1, "model.layers": 1, "model.sequence": 128}
    with up(None) as cluster:
        line, record = Training(cluster, tmp_path, **small_program).slowed(lambda: cluster.limit(0.06, 2))
    assert "host pax2 takes" in line and "link" not in line and "--without=pax2" in line
    assert record["slower/host/pax2"] > 2


@pytest.mark.slow
def test_a_host_with_a_third_of_its_share_is_named(cluster, tmp_path):
    line, record = Training(cluster, tmp_path).slowed(lambda: cluster.limit(SHARE / 3, 2))
    assert "host pax2 takes" in line and "link" not in line and "--without=pax2" in line
    assert 1.5 < record["slower/host/pax2"] < 6


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), [(0, 1), (3, 1)])  # between stages, and between data ranks
def test_a_link_that_is_slow_in_one_direction_is_named(cluster, tmp_path, a, b):
    line, record = Training(cluster, tmp_path).slowed(lambda: cluster.rate(a, b, MBIT / 20))
    assert f"the link from pax{a} to pax{b} takes" in line and line.count("takes") == 1, line
    assert 4 < record[f"slower/link/pax{a}-to-pax{b}"] < 40


@pytest.mark.slow
def test_one_of_a_hosts_devices_is_named(cluster, tmp_path):
    """Two processes share each host, and one of them then gets a third of its half."""
    training = Training(cluster, tmp_path, processes=2 * HOSTS, **{"mesh.data": 4})
    line, record = training.slowed(lambda: cluster.limit_process(1, training.started[5].pid, SHARE / 6))
    assert "device 0 of process 5 on pax1 takes" in line and "host pax" not in line, line
    assert 1.5 < record["slower/device/5.0"] < 6


@pytest.mark.slow
def test_without_a_slowdown_nothing_is_said(cluster, tmp_path):
    training = Training(cluster, tmp_path, steps=300)
    training.wait_for(lambda: training.step >= 299)
    assert "slower by" not in training.said and not any("slower/step" in record for record in training.records)


@pytest.mark.slow
def test_what_a_plan_without_the_slow_host_would_take_is_predicted_while_the_run_goes_on(cluster, tmp_path):
    training = Training(cluster, tmp_path, program="planner.run", **{"batch.global_batch": 24})
    line, _ = training.slowed(lambda: cluster.limit(SHARE / 5, 2))
    assert "host pax2 takes" in line
    assert re.search(r"A step with another plan is being predicted: \S+ -m planner\.plan", line)
    [answer] = training.wait_for(lambda: re.findall("^step .*is predicted to take.*$", training.said, re.MULTILINE))
    print(f"after step {training.step}: {answer}")
    assert "without pax2 a step is predicted to take " in answer and "replanned/plan.json is its plan" in answer
    plan = plans.load(training.out / "replanned" / "plan.json")
    assert sorted(plan.hosts) == ["pax0", "pax1", "pax3"]
    assert training.step > int(line.split()[1].rstrip(":"))
