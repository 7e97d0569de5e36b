"""Terms of a predicted step by stage, which a run compares with what it measured (paxtrain.profiling.terms)."""

import numpy as np

from paxtrain.config.plan import COMPUTE, DATA, OPTIMIZER, SYNC, TRANSFER
from planner.cost.link_seconds import Fabric
from planner.cost.step_time import Problem
from planner.pipeline.rows import Table, numbers, runs
from planner.pipeline.simulator import Seconds, take

Array = np.ndarray


def _compute(table: Table, seconds: Seconds, overlap: bool) -> Array:
    """Return the seconds [pipelines, P] that each stage computes in its rows, on scrap as well.

    Args:
        table: schedule.
        seconds: durations of the candidate's pipelines.
        overlap: see `planner.pipeline.simulator.pipeline`.
    """
    found = np.zeros((len(seconds.forward), table.stages))
    phases = {"forward": seconds.forward, "backward": seconds.backward, "weights": seconds.weights}
    for rows, repeats in runs(table, overlap=overlap):
        for row in rows:
            for name, of_virtual in phases.items():
                if (where := getattr(row, name)) is not None:
                    stages, virtual = map(numbers, where)
                    found[:, stages] += repeats * of_virtual[:, virtual]
            if row.head:
                found[:, -1] += repeats * np.asarray(seconds.head)
            for ends, work in zip(row.packed or (), (seconds.encode, seconds.decode)):
                found[:, numbers(ends)] += repeats * np.asarray(work)[:, numbers(ends)]
    return found


def terms(problem: Problem, fabric: Fabric, hosts: Array) -> dict[str, Array]:
    """Return the seconds [P] of each term of a step, as means over the data ranks; they add up to the step.

    Of groups that train apart they are those of the slowest group in a step without an exchange.

    Args:
        problem: candidate on its cluster.
        fabric: links of the cluster.
        hosts: int [D, P], host of each tensor group.
    """
    links = problem.links(problem.paths(fabric, hosts[None]))
    kinds = problem.kind_of_host[hosts][None]
    step = problem.evaluate(links, kinds)
    seconds = problem.seconds(links, kinds)
    parts = [_compute(t, take(seconds, where), problem.overlap) for t, where in problem.tables(len(seconds.forward))]
    c = problem.candidate
    totals = problem.of_groups(links, kinds, problem.pipelines(seconds)).total
    compute = np.concatenate(parts).reshape(c.apart, c.together, c.pipe)[np.argmax(totals)].mean(axis=0)
    reduced = step.finish[0] + step.reduce[0]
    return {
        COMPUTE: compute,
        TRANSFER: step.finish[0] - step.gather[0] - compute,
        DATA: step.gather[0] + step.reduce[0],
        SYNC: reduced.max() - reduced,
        OPTIMIZER: np.full(len(compute), step.optimizer[0]),
    }
