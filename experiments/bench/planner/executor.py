"""The simulator beside the executor: step times of two real processes, predicted and measured in the same run."""

import dataclasses
import json
import statistics
from collections.abc import Callable
from typing import Any

import jax

from experiments.bench.trainer import two_processes
from experiments.bench.trainer.steps import PipelinedStep, configuration, interleave
from paxtrain.config import Config
from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost.candidate import Candidate, host_order
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.measure import profile_cluster, profile_compute
from planner.measure.compute_timing import KINDS, LoopTimer, OptimizerTimer
from planner.measure.machines import find_machines
from planner.measure.options import MIB, ProfileOptions
from planner.measure.process_group import ProcessGroup

# Schedule, chunks and save mode.
EXECUTED = (
    ("eager_1f1b", 1, "layer_inputs"),
    ("gpipe", 1, "layer_inputs"),
    ("1f1b", 1, "layer_inputs"),
    ("interleaved_1f1b", 2, "layer_inputs"),
    ("1f1b", 1, "dots"),
    ("zb_h1", 1, "dots"),
)
MICRO_BATCHES = 8


def _executed(schedule: str, chunks: int, save: str) -> Config:
    return configuration((1, 2, 1), MICRO_BATCHES, schedule=schedule, virtual_stages=chunks, save=save)


def predicted(cluster: Cluster, config: Config) -> float:
    """Return the planner's seconds of a step, in host order."""
    candidate = Candidate(
        data=1,
        pipe=config.mesh.pipe,
        tensor=1,
        micro_batch=config.batch.micro_batch,
        micro_batches=config.micro_batches,
        schedule=config.pipeline.schedule,
        counts=config.stage_layers,
        chunks=config.pipeline.virtual_stages,
        save=config.pipeline.save,
        scan_layers=config.pipeline.scan_layers,
    )
    problem = Problem(cluster, config.model, candidate)
    return float(problem.step(fabric(cluster), host_order(candidate, 1)).total[0])


def _sample(turns: dict[str, LoopTimer], optimizer: OptimizerTimer) -> dict[str, dict[str, float]]:
    """Return one sample of every kind of work and of the optimizer, by save mode."""
    return {save: timer.sample() | {"optimizer": optimizer.sample()} for save, timer in turns.items()}


def worker(process: int, coordinator: str, repeats: int) -> None:
    """Measure as one of the two processes; process 0 prints the profile and [case, measured, predicted] as JSON.

    Compute is profiled and steps are timed in turn, so that anything that slows the machine slows both.

    Args:
        process: number of this process, 0 or 1.
        coordinator: HOST:PORT at which the processes meet.
        repeats: steps per figure.
    """
    two_processes.enter(process, coordinator)
    group = ProcessGroup(120)
    with group.ends_together():
        machines = find_machines(group, "", f"process{group.process}")
        configs = {f"{case[0]} {case[2]}": _executed(*case) for case in EXECUTED}
        of_save = {config.pipeline.save: config for config in configs.values()}
        config = _executed(*EXECUTED[0])
        links = ProfileOptions(sizes=(MIB, 4 * MIB), repeats=repeats, micro_batches=())
        cluster, _ = profile_cluster.profile(group, machines, config, links, "two processes")
        micro_batch, devices = config.batch.micro_batch, jax.local_devices()
        turns = {save: LoopTimer(config, 1, micro_batch, devices) for save, config in of_save.items()}
        optimizer = OptimizerTimer(config, 1, devices)
        for timer in turns.values():
            timer.settle(group.agree)
        samples: list[dict[str, dict[str, float]]] = []
        timed: dict[str, Callable[[], object]] = {"profile": lambda: samples.append(_sample(turns, optimizer))}
        timed |= {name: PipelinedStep(config, jax.devices()) for name, config in configs.items()}
        seconds = interleave(timed, repeats)
        rows: list[dict[str, Any]] = []
        for save, config in of_save.items():
            compute = {kind: statistics.median(s[save][kind] for s in samples) for kind in samples[0][save]}
            rows += profile_compute.compute_rows(machines, config, 1, micro_batch, group.gather(compute))
        cluster = dataclasses.replace(cluster, compute=tuple(rows))
        if process == 0:
            figures = [[name, statistics.median(seconds[name]), predicted(cluster, c)] for name, c in configs.items()]
            print(json.dumps([rows, figures]), flush=True)
        group.gather(None)


def executor(repeats: int) -> None:
    """Print measured and predicted step times; `repeats` steps per figure, of which the median counts."""
    found = two_processes.run_two("experiments.bench.planner", repeats)
    if found is None:
        print("\nexecutor: skipped, it needs two cores")
        return
    rows, figures = found
    print(f"\nexecutor, pipe=2 over two processes, one per core, m={MICRO_BATCHES}, median of {repeats} steps")
    for row in rows:
        kinds = (kind for kind in (*KINDS, *costs.PARTS) if kind in row)
        times = ", ".join(f"{kind} {row[kind] * 1e3:.4g}" for kind in kinds)
        print(f"  profiled, {row['save']}, ms: {times}, optimizer {row['optimizer'] * 1e9:.3g} ns per parameter")
    print(f"  {'schedule, save':<30}{'measured':>10}{'predicted':>11}{'error':>8}")
    for schedule, measured, guess in figures:
        print(f"  {schedule:<30}{measured:>9.4f}s{guess:>10.4f}s{guess / measured - 1:>8.1%}")
