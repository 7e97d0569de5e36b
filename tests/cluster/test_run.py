"""Eight hosts in two racks that the scheduler lists mixed: --plan=auto trains within two minutes, and faster.

As in the whole lab, devices sleep for the time that they are given, and processes share compiled programs. One test
computes for real.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import pytest

from experiments.hosts import hosts, scenario
from experiments.lab.session import ENVIRONMENT, ROOT
from paxtrain.config import plan as plans
from paxtrain.profiling.terms import PARTS
from paxtrain.run import metrics
from tests import small

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(hosts.why_not()), reason=f"there is no shaped cluster here: {hosts.why_not()}"),
]
HOSTS, PORT, STEPS = 8, 9721, 12
FIRST_STEP = 120.0  # seconds, from the start of the processes
HANG = 900.0  # seconds after the first step, on a machine that others use as well
BUSY = 0.1  # of the machine, from which on other work stretches the start of eight hosts
SETTINGS = {
    "pipeline.scan_layers": "on",
    "optimizer.warmup_steps": 2,
    "run.steps": STEPS,
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}


def _processor_seconds(cluster: hosts.Cluster) -> tuple[float, list[float]]:
    """Return the seconds that the cores have been busy since they are up, and those of what runs on each host."""
    cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    lines = [line.split() for line in pathlib.Path("/proc/stat").read_text().splitlines()]
    # Of user, nice, system, idle, iowait, irq, softirq and steal all but idle and iowait.
    everything = sum(int(line[i]) for line in lines if line[0] in cores for i in (1, 2, 3, 6, 7, 8))
    ours = [0] * HOSTS
    for host in range(HOSTS):
        for process in cluster.processes(host):
            with contextlib.suppress(OSError):  # it has ended
                # Behind the name, which may have blanks: of the process and its dead children, user and system.
                words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
                ours[host] += sum(map(int, words[11:15]))
    ticks = os.sysconf("SC_CLK_TCK")
    return everything / ticks, [each / ticks for each in ours]


def train(
    cluster: hosts.Cluster, home: pathlib.Path, out: pathlib.Path, *arguments: str, program: str = "experiments.lab.job"
) -> tuple[float, list[float]]:
    """Train, and return the seconds from the start to the end of the first step, and those of each later step.

    If the machine has other work, the first is the processor time of the busiest host.
    """
    variables = ENVIRONMENT | {
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "PYTHONPATH": str(ROOT),
    }
    data = {f"data.{name}": home / "data" / name for name in ("train", "validation")}
    settings = [f"--config.{name}={value}" for name, value in {**SETTINGS, **data}.items()]
    command = [sys.executable, "-m", program, f"--config={ROOT / 'experiments/lab/config.py'}", *settings]
    command += [f"--out={out}", "--profile_seconds=30", "--compress=none"]
    command += [*arguments, f"--coordinator={cluster.addresses[0]}:{PORT}", f"--num_processes={HOSTS}"]
    out.mkdir()
    began, (before, _) = time.monotonic(), _processor_seconds(cluster)
    started = [
        cluster.start(host, [*command, f"--process_id={host}"], log=out / f"{name}.log", env=variables)
        for host, name in enumerate(cluster.names)
    ]
    seconds = []
    while not seconds and not all(popen.poll() is not None for popen in started):
        seconds = _seconds(out)
        time.sleep(0.2)
    first, (after, ours) = time.monotonic() - began, _processor_seconds(cluster)
    others = (after - before - sum(ours)) / len(os.sched_getaffinity(0)) / first
    print(f"first step after {first:.0f} s; processor seconds of the hosts {ours}; other work {others:.0%}")
    if others > BUSY:
        first = max(ours)
    try:
        codes = [popen.wait(timeout=HANG) for popen in started]
    except subprocess.TimeoutExpired:
        codes = []
    assert codes == [0] * HOSTS, (out / f"{cluster.names[0]}.log").read_text()
    return first, _seconds(out)[1:]


def _seconds(out: pathlib.Path) -> list[float]:
    path = out / metrics.FILE
    records = metrics.read(path) if path.exists() else []
    return [record["step_seconds"] for record in records if "loss" in record]


@pytest.mark.slow
def test_planned_for_its_links_a_job_starts_within_two_minutes_and_is_faster_than_in_host_order(tmp_path):
    small.corpus(tmp_path, 40_000)
    with hosts.Cluster(scenario.load("two_racks", HOSTS).rates.tolist()) as cluster:
        first, planned = train(cluster, tmp_path, tmp_path / "auto", "--compute_hosts=1")
        plan = plans.load(tmp_path / "auto" / "plan.json")
        # The same plan on hosts in the order in which they come, pipelines side by side.
        order = {"hosts": list(cluster.names), "device_order": list(range(HOSTS))}
        values = plans.to_json(plan) | order
        (tmp_path / "order.json").write_text(json.dumps(values))
        given = ("--compute_hosts=1", f"--plan={tmp_path / 'order.json'}")
        _, in_order = train(cluster, tmp_path, tmp_path / "order", *given)
    seconds, others = statistics.median(planned), statistics.median(in_order)
    told = plan.predicted
    print(
        f"first step after {first:.0f} s; {seconds:.2f} s a step ({told['step_seconds']:.2f} predicted), in host "
        f"order {others:.2f} s ({told['host_order_seconds']:.2f} predicted)"
    )
    assert first < FIRST_STEP
    assert seconds < 0.95 * others


def test_eight_hosts_that_compute_for_real_say_what_was_predicted_beside_what_was_measured(tmp_path):
    small.corpus(tmp_path, 40_000)
    out = tmp_path / "real"
    with hosts.Cluster(scenario.load("two_racks", HOSTS).rates.tolist()) as cluster:
        _, seconds = train(cluster, tmp_path, out, "--config.profile=5:8", program="planner.run")
    log = (out / f"{cluster.names[0]}.log").read_text()
    lines = {words[0]: line for line in log.splitlines() if (words := line.split()) and " predicted, " in line}
    print("\n".join(lines.values()))
    told = {}
    for record in metrics.read(out / metrics.FILE):
        told |= {name: value for name, value in record.items() if name.startswith(("predicted_", "measured_"))}
    assert set(lines) == {"step", *PARTS} and "most off" in log
    assert told["measured_step"] == pytest.approx(statistics.median(seconds), rel=1e-6)
    assert told["predicted_step"] == pytest.approx(plans.load(out / "plan.json").predicted["step_seconds"], rel=1e-6)
    # A traced step is slower than others, and no other part of the breakdown is left.
    traced = sum(told[f"measured_{term}"] for term in PARTS)
    assert 0.8 * told["measured_step"] < traced < 2 * told["measured_step"]
    assert "processes share" in log  # it says that waits for turns are not predicted
