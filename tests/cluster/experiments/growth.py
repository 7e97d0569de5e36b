"""The cost of growth: two, four and eight hosts, each with the same work: two layers, eight micro-batches.

Growth is by data ranks, then by stages.
"""

import numpy as np

from planner.cost.links import fabric
from planner.cost.step_time import Problem, host_order
from tests.cluster.laboratory import Bench, Lab
from tests.cluster.models import Split
from tests.cluster.scenario import Scenario

RATE = 100.0  # Mbit/s
SPLITS = {
    2: Split((1, 2, 1), global_batch=32, layers=4),
    4: Split((2, 2, 1), global_batch=64, layers=4),
    8: Split((2, 4, 1), global_batch=64, layers=8),
}


def done(lab: Lab, hosts: int) -> bool:
    """Return whether that size has been measured."""
    return f"{hosts} hosts" in lab.records("growth")


def measure(lab: Lab, bench: Bench, hosts: int) -> None:
    """Measure one size in a session of that many hosts, where its program has been compiled."""
    records, split = lab.records("growth"), SPLITS[hosts]
    if done(lab, hosts):
        return
    bench.shape(np.full((hosts, hosts), RATE))
    cluster = bench.profile(f"growth {hosts}", split)
    seconds = bench.time([split.name], lab.repeats)[split.name]
    problem = Problem(cluster, split.config.model, split.candidate)
    step = problem.step(fabric(cluster), host_order(split.candidate, 1))
    records.add(
        f"{hosts} hosts",
        hosts=hosts,
        plan=split.name,
        seconds=seconds,
        predicted=float(step.total[0]),
        predicted_reduce=float(step.reduce.max()),
        tokens=split.global_batch * split.config.model.sequence,
    )
    lab.say(f"growth: {hosts} hosts {np.median(seconds):.3f} s a step")


def run(lab: Lab) -> None:
    """Measure two hosts; the sessions of four and eight hosts measure the other sizes."""
    if done(lab, 2):
        return
    with lab.session(Scenario("two hosts", "two hosts", np.full((2, 2), RATE)), "growth") as bench:
        bench.compile([SPLITS[2]])
        measure(lab, bench, 2)
