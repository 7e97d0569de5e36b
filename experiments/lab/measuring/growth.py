"""The cost of growth: two, four and eight hosts, each with the same work: two layers, eight micro-batches.

Growth is by data ranks, then by stages; with eight hosts also by data ranks alone.
"""

import numpy as np

from experiments.hosts.scenario import Scenario
from experiments.lab.laboratory import Bench, Lab
from experiments.lab.models import Split
from planner.cost.candidate import host_order
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem

RATE = 100.0  # Mbit/s
SPLITS = {
    2: Split((1, 2, 1), global_batch=32, layers=4),
    4: Split((2, 2, 1), global_batch=64, layers=4),
    8: Split((2, 4, 1), global_batch=64, layers=8),
}
# Eight hosts with more data ranks, whose devices have the same work.
MORE_DATA = (Split((4, 2, 1), global_batch=128, layers=4), Split((8, 1, 1), global_batch=256, layers=2))


def key(split: Split) -> str:
    """Return the key of a mesh's record."""
    return f"mesh {'x'.join(map(str, split.mesh))}"


def done(lab: Lab, hosts: int) -> bool:
    """Return whether that size has been measured."""
    return all(key(split) in lab.records("growth") for split in splits(hosts))


def splits(hosts: int) -> list[Split]:
    """Return what is measured on that many hosts."""
    return [SPLITS[hosts], *(MORE_DATA if hosts == 8 else ())]


def measure(lab: Lab, bench: Bench, hosts: int) -> None:
    """Measure one size in a session of that many hosts, where its programs have been compiled."""
    records = lab.records("growth")
    if done(lab, hosts):
        return
    bench.shape(np.full((hosts, hosts), RATE))
    cluster = bench.profile(f"growth {hosts}", SPLITS[hosts])
    seconds = bench.time([split.name for split in splits(hosts)], lab.repeats)
    for split in splits(hosts):
        problem = Problem(cluster, split.config.model, split.candidate)
        step = problem.step(fabric(cluster), host_order(split.candidate, 1))
        records.add(
            key(split),
            hosts=hosts,
            mesh=split.mesh,
            plan=split.name,
            seconds=seconds[split.name],
            predicted=float(step.total[0]),
            predicted_reduce=float(step.reduce.max()),
            tokens=split.global_batch * split.config.model.sequence,
        )
        lab.say(f"growth: {split.name} {np.median(seconds[split.name]):.3f} s a step")


def run(lab: Lab) -> None:
    """Measure two hosts; the sessions of four and eight hosts measure the other sizes."""
    if done(lab, 2):
        return
    with lab.session(Scenario("two hosts", "two hosts", np.full((2, 2), RATE)), "growth") as bench:
        bench.compile(splits(2))
        measure(lab, bench, 2)
