"""Benchmarks of the planner: python -m planner.bench [--sections=executor,placement,speed].

executor    the simulator beside the executor: pipe=2 over two real processes, one per core, every schedule; compute
            and links are profiled on those two processes in the same run
placement   placements beside exhaustive search, and what they gain on measured links
speed       whole dry runs for 128, 1,024 and 8,192 devices
"""

import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from paxtrain.bench import steps as bench_steps
from paxtrain.bench import two_processes
from paxtrain.config import Config
from paxtrain.errors import UserError, run
from paxtrain.parallel.mesh import from_process_rows, make_mesh, process_rows
from paxtrain.parallel.step import Trainer
from planner.bench import placement as bench_place
from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost import step_time
from planner.cost.links import fabric
from planner.measure import compute_timing, profile_cluster, profile_compute
from planner.measure.machines import find_machines
from planner.measure.options import MIB, ProfileOptions
from planner.measure.process_group import ProcessGroup

SECTIONS = ("executor", "placement", "speed")
HINT = f"choose with --sections={','.join(SECTIONS)}"
# Schedule, chunks and save. Small residuals where they can be: in schedules that skip idle ops XLA for CPUs moves F
# ahead of B, and so must copy their ring.
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
    return bench_steps.configuration((1, 2, 1), MICRO_BATCHES, schedule=schedule, virtual_stages=chunks, save=save)


class _Step:
    """The trainer's step of a configuration with its state, to be called for its time."""

    def __init__(self, config: Config) -> None:
        trainer = Trainer(config, make_mesh(config.mesh))
        self._state, self._step = trainer.init(0), trainer.compile_step()
        shape, sharding = trainer.abstract_batch().shape, trainer.batch_sharding
        rows = process_rows(sharding, shape)
        self._tokens = from_process_rows(sharding, shape, rows, bench_steps.tokens(config)[rows])

    def __call__(self) -> None:
        self._state, metrics = self._step(self._state, self._tokens)
        jax.block_until_ready((self._state, metrics))


def predicted(cluster: Cluster, config: Config) -> float:
    """Seconds of a step by the planner, in host order."""
    candidate = step_time.Candidate(
        data=1,
        pipe=config.mesh.pipe,
        tensor=1,
        micro_batch=config.batch.micro_batch,
        micro_batches=config.micro_batches,
        schedule=config.pipeline.schedule,
        counts=config.stage_layers,
        chunks=config.pipeline.virtual_stages,
        save=config.pipeline.save,
    )
    problem = step_time.Problem(cluster, config.model, candidate)
    return float(problem.step(fabric(cluster), step_time.host_order(candidate, 1)).total[0])


def _worker(process: int, coordinator: str, repeats: int) -> None:
    """One of the two processes; process 0 prints [schedule, m, measured, predicted] of all cases as JSON.

    Compute is profiled and steps are timed in turn, so that whatever slows the machine slows both.
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
        turns = {save: compute_timing.LoopTimer(config, 1, micro_batch, devices) for save, config in of_save.items()}
        optimizer = compute_timing.OptimizerTimer(config, 1, devices)
        for some in turns.values():
            some.settle(group.agree)
        samples: dict[str, list[dict[str, float]]] = {save: [] for save in of_save}

        def profile() -> None:
            for save, some in turns.items():
                samples[save].append(some.sample() | {"optimizer": optimizer.sample()})

        steps = {"profile": profile} | {name: _Step(config) for name, config in configs.items()}
        seconds = bench_steps.interleave(steps, repeats)
        rows: list[dict[str, Any]] = []
        for save, config in of_save.items():
            compute = {kind: statistics.median(s[kind] for s in samples[save]) for kind in samples[save][0]}
            rows += profile_compute.compute_rows(machines, config, 1, micro_batch, group.gather(compute))
        cluster = dataclasses.replace(cluster, compute=tuple(rows))
        if process == 0:
            figures = [[s, statistics.median(seconds[s]), predicted(cluster, c)] for s, c in configs.items()]
            print(json.dumps([rows, figures]), flush=True)
        group.gather(None)


def executor(repeats: int) -> None:
    """Prints measured and predicted step times."""
    found = two_processes.run_two("planner.bench", repeats)
    if found is None:
        print("\nexecutor: skipped, it needs two cores")
        return
    rows, figures = found
    print(f"\nexecutor, pipe=2 over two processes, one per core, m={MICRO_BATCHES}, median of {repeats} steps")
    for row in rows:
        kinds = (kind for kind in (*compute_timing.KINDS, *costs.PARTS) if kind in row)
        times = ", ".join(f"{kind} {row[kind] * 1e3:.4g}" for kind in kinds)
        print(f"  profiled, {row['save']}, ms: {times}, optimizer {row['optimizer'] * 1e9:.3g} ns per parameter")
    print(f"  {'schedule, save':<30}{'measured':>10}{'predicted':>11}{'error':>8}")
    for schedule, measured, guess in figures:
        print(f"  {schedule:<30}{measured:>9.4f}s{guess:>10.4f}s{guess / measured - 1:>8.1%}")


# Devices, configuration and global batch of dry runs: 8 H100s a host.
RUNS = ((128, "gpt_8b", 512), (1024, "gpt_175b", 1536), (8192, "gpt_175b", 8192))


def _cluster(hosts: int, folder: pathlib.Path) -> pathlib.Path:
    """A cluster whose links differ by as much as the measured ones that are shipped, in 3 samples."""
    rng = np.random.default_rng(0)
    bandwidth = 50e9 * np.clip(rng.normal(1, 0.035, (3, hosts, hosts)), 0.85, 1.1)
    bandwidth[:, np.eye(hosts, dtype=bool)] = 450e9
    np.savez(folder / "links.npz", alpha=np.where(np.eye(hosts), 4e-6, 12e-6), bandwidth=bandwidth)
    values = {"version": 1, "name": f"{hosts} hosts of 8 x H100, made up", "hosts": hosts, "devices_per_host": 8,
              "device": "h100", "nics": 8, "links": {"npz": "links.npz"}}  # fmt: skip
    path = folder / "cluster.json"
    path.write_text(json.dumps(values))
    return path


def speed(largest: int = 8192) -> None:
    """Prints seconds and peak memory of dry runs up to a number of devices.

    Raises:
        RuntimeError: a run failed.
    """
    print("\na dry run of python -m planner.plan --oracle=no, imports and report included")
    print(f"  {'devices':>8}  {'model':<10}{'seconds':>9}{'peak GB':>9}  search")
    for devices, model, global_batch in RUNS:
        if devices > largest:
            continue
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "planner.plan", f"--model=configs/{model}.py", f"--out={folder}/plan",
                       f"--cluster={_cluster(devices // 8, pathlib.Path(folder))}", f"--global_batch={global_batch}",
                       "--oracle=no"]  # fmt: skip
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            seconds = time.perf_counter() - began
            if status:
                raise RuntimeError(f"the dry run for {devices} devices failed")
        search = next(line for line in output.splitlines() if line.startswith("search")).removeprefix("search").strip()
        print(f"  {devices:>8,}  {model:<10}{seconds:>9.1f}{usage.ru_maxrss / 1e6:>9.2f}  {search}", flush=True)


def placement() -> None:
    """Prints how placements compare."""
    bench_place.exhaustive(10)
    bench_place.measured("configs/clusters/a100_16x8_measured.json")


def main(argv: Sequence[str]) -> None:
    """Runs the sections."""
    f = flags.FLAGS
    if f.worker is not None:
        _worker(f.worker, f.coordinator, f.repeats)
        return
    unknown = set(f.sections) - set(SECTIONS)
    if unknown:
        raise UserError(f"unknown section {sorted(unknown)[0]!r}; known are {', '.join(SECTIONS)}")
    for section in f.sections:
        {"executor": lambda: executor(f.repeats), "placement": placement, "speed": speed}[section]()


def define_flags() -> None:
    """Defines this main's flags."""
    flags.DEFINE_list("sections", list(SECTIONS), "What to measure.")
    flags.DEFINE_integer("repeats", 15, "Steps per figure, of which the median counts.", lower_bound=1)
    flags.DEFINE_integer("worker", None, "For the benchmark's own processes.")
    flags.DEFINE_string("coordinator", None, "For the benchmark's own processes.")


if __name__ == "__main__":
    define_flags()
    run(main, hint=HINT)
