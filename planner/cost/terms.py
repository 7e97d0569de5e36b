"""Terms of a predicted step by stage, which a run compares with what it measured (paxtrain.profiling.terms)."""

import numpy as np

from paxtrain.config.plan import (
    BACKWARD,
    COMPRESSION,
    COMPUTE,
    FORWARD,
    GATHER,
    HEAD,
    HOST,
    OPTIMIZER,
    REDUCE,
    SYNC,
    TRANSFER,
)
from planner.cost.link_seconds import Fabric
from planner.cost.step_time import Problem
from planner.pipeline.rows import Table, numbers, runs
from planner.pipeline.simulator import Seconds, take

Array = np.ndarray


def _compute(table: Table, seconds: Seconds, overlap: bool) -> dict[str, Array]:
    """Return the seconds [pipelines, P] of each term of COMPUTE that a stage spends in its rows, on scrap as well.

    Args:
        table: schedule.
        seconds: durations of the candidate's pipelines.
        overlap: see `planner.pipeline.simulator.pipeline`.
    """
    found = {name: np.zeros((len(seconds.forward), table.stages)) for name in COMPUTE}
    phases = {"forward": FORWARD, "backward": BACKWARD, "weights": BACKWARD}
    for rows, repeats in runs(table, overlap=overlap):
        for row in rows:
            for phase, term in phases.items():
                if (where := getattr(row, phase)) is not None:
                    stages, virtual = map(numbers, where)
                    found[term][:, stages] += repeats * getattr(seconds, phase)[:, virtual]
            if row.head:
                found[HEAD][:, table.stage_map.last] += repeats * np.asarray(seconds.head)
            for ends, work in zip(row.packed or (), (seconds.encode, seconds.decode)):
                found[COMPRESSION][:, numbers(ends)] += repeats * np.asarray(work)[:, numbers(ends)]
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
    slowest = np.argmax(problem.of_groups(links, kinds, problem.pipelines(seconds)).total)

    def of_stages(term: str) -> Array:
        each = np.concatenate([part[term] for part in parts]).reshape(c.apart, c.together, c.pipe)
        return each[slowest].mean(axis=0)

    compute = {term: of_stages(term) for term in COMPUTE}
    reduced = step.finish[0] + step.reduce[0]
    return compute | {
        TRANSFER: step.finish[0] - step.gather[0] - sum(compute.values()),
        GATHER: np.broadcast_to(step.gather[0], c.pipe),
        REDUCE: np.broadcast_to(step.reduce[0], c.pipe),
        SYNC: reduced.max() - reduced,
        OPTIMIZER: np.full(c.pipe, step.optimizer[0]),
        HOST: np.full(c.pipe, problem.cluster.host_seconds),
    }
