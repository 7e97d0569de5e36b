"""One host's process in a measuring session: it joins the others, and does the tasks of the session's controller.

Tasks come as lines of JSON on standard input, {"do": ..., arguments}; each is answered by a line of JSON on standard
output. All hosts get the same tasks in the same order. What a task runs is the trainer's and the planner's own code.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import sys
import time
import traceback
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from experiments.lab import device
from experiments.lab.programs import Programs
from paxtrain.command_line import run
from paxtrain.config import Config, from_dict
from paxtrain.data import token_files
from paxtrain.parallel.mesh import from_process_rows, make_mesh, process_rows
from paxtrain.parallel.step import Trainer
from paxtrain.process import jax_private
from paxtrain.process.distributed import initialize
from paxtrain.profiling import breakdown
from paxtrain.study import measurements
from planner.measure import compute_timing, profile_cluster
from planner.measure.machines import find_machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup


class Program:
    """A training step compiled for a mesh over some order of the devices, with a state to run it on."""

    def __init__(
        self, config: Config, order: Sequence[int], evaluates: bool, programs: Programs, keys: dict[str, str] | None
    ) -> None:
        """Args:
        order: of the devices in the mesh; empty: as they come.
        programs: where compiled programs are. keys: of this one's, if another process has compiled them.
        """
        self.config = config
        self.trainer = trainer = Trainer(config, make_mesh(config.mesh, order or None))
        devices = trainer.mesh.devices.ravel().tolist()
        self.found = True
        if keys is None:
            state, batch = trainer.abstract_state(), trainer.abstract_batch()
            init = jax.jit(
                lambda: trainer._init(jax.random.key(config.run.seed)), out_shardings=trainer.state_shardings
            )
            lowered = {"step": trainer.step.lower(state, batch), "init": init.lower()}
            if evaluates:
                lowered["evaluate"] = trainer.evaluate.lower(state.params, batch)
            options = {"step": trainer.compiler_options}
            compiled = {name: programs.compile(x, options.get(name, {}), devices) for name, x in lowered.items()}
            keys, self.found = {name: key for name, (key, _) in compiled.items()}, compiled["step"][1]
        # Who has compiled loads all the same: loaded programs may run collectives inside of loops in another order than
        # those fresh from the compiler (paxtrain.process.compilation_cache), and gloo aborts where orders differ.
        self.keys, loaded = keys, {name: programs.load(key, devices) for name, key in keys.items()}
        self.compiled, self._init, self.evaluate = loaded["step"], loaded["init"], loaded.get("evaluate")
        self.shape = trainer.abstract_batch().shape
        self.rows = process_rows(trainer.batch_sharding, self.shape)
        self.state = None  # the first step makes it: that may need all hosts, which load at different times

    def fresh(self) -> None:
        """Start from a new state, and the batches from their beginning."""
        self.state = self._init()
        self._batches = self.batches("train")
        self._batch = next(self._batches)

    def batches(self, name: str) -> Any:
        """Yield global batches of "train" or "validation", without end."""
        c = self.config
        file = token_files.load(getattr(c.data, name), vocab_size=c.model.vocab_size, sequence=c.model.sequence)
        local = token_files.batches(
            file,
            sequence=c.model.sequence,
            global_batch=c.batch.global_batch,
            rows=self.rows,
            seed=c.run.seed,
            start_sample=0,
            shuffle=name == "train",
            prefetch=0,
        )
        for rows in local:
            yield from_process_rows(self.trainer.batch_sharding, self.shape, self.rows, rows)

    def step(self, batch: jax.Array | None = None) -> Any:
        """Run one step and wait for it; without a batch, always on the same one."""
        if self.state is None:
            self.fresh()
        self.state, metrics = self.compiled(self.state, self._batch if batch is None else batch)
        jax.block_until_ready((self.state, metrics))
        return metrics


class Worker:
    """State that the tasks work on."""

    def __init__(self, limit: float, programs: Programs) -> None:
        self._compiled = programs
        self.group = ProcessGroup(limit)
        self.machines = find_machines(self.group, "")
        self.programs: dict[str, Program] = {}
        mesh = Mesh(np.array(jax.devices()), ("all",), axis_types=(AxisType.Auto,))
        spec = PartitionSpec("all")
        mapped = jax.shard_map(lambda x: jax.lax.psum(x, "all"), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
        self._ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=NamedSharding(mesh, spec))()
        self._barrier = jax.jit(mapped)
        self._turns: compute_timing.LoopTimer | None = None

    def _together(self) -> None:
        jax.block_until_ready(self._barrier(self._ones))

    def profile(self, config: dict, options: dict, name: str, path: str, sites: list[str]) -> dict[str, Any]:
        """Write the cluster's links and compute to `path`, with what hosts of a site share."""
        options = ProfileOptions(**{key: tuple(v) if isinstance(v, list) else v for key, v in options.items()})
        began = time.perf_counter()
        machines = dataclasses.replace(self.machines, sites=tuple(sites))
        cluster, said = profile_cluster.profile(self.group, machines, from_dict(config), options, name)
        if self.group.process == 0:
            cluster.save(pathlib.Path(path))
        return {"seconds": time.perf_counter() - began, "said": said}

    def load(
        self,
        name: str,
        config: dict,
        order: list[int],
        evaluates: bool = False,
        keys: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Load a configuration's train step for a device order, and its evaluation if it `evaluates`.

        Compiled, unless `keys` tell as what another worker has done that; the answer's are for the others.
        """
        if name not in self.programs:
            self.programs[name] = Program(from_dict(config), order, evaluates, self._compiled, keys)
        program = self.programs[name]
        return {"found": program.found, "keys": program.keys}

    def wire(self, name: str) -> dict[str, int]:
        """Return the bytes that all devices together put on the links in a step, by kind."""
        return measurements.wire_bytes(self.programs[name].trainer)

    def speed(self, slowness: float) -> None:
        """Set how many times as long as usual devices take; 0: no longer than they need."""
        device.slow_down(slowness)

    def forget(self, names: list[str]) -> None:
        """Free programs and their states."""
        for name in names:
            del self.programs[name]

    def warm(self, names: list[str]) -> None:
        """Run one step of each program, which also opens the connections between processes."""
        for name in names:
            self.programs[name].step()

    def time(self, names: list[str], repeats: int, steps: int) -> dict[str, list[float]]:
        """Return the seconds per step of each program, `repeats` times in turn, each the mean of so many steps."""
        seconds: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(repeats):
            for name in names:
                program = self.programs[name]
                self._together()
                began = time.perf_counter()
                for _ in range(steps):
                    program.step()
                seconds[name].append((time.perf_counter() - began) / steps)
        return seconds

    def spend(self, name: str) -> dict[str, float]:
        """Return the seconds of one step, and the seconds of this process's compute, all of its threads together."""
        self._together()
        began, computed = time.perf_counter(), time.process_time()
        self.programs[name].step()
        return {"seconds": time.perf_counter() - began, "computed": time.process_time() - computed}

    def breakdown(self, name: str) -> dict[str, float]:
        """Return the seconds of a step by part, as means over this host's devices."""
        program = self.programs[name]
        found = breakdown.breakdown(program.step, program.compiled, program.trainer.mesh, steps=2)
        return {part: float(seconds.mean()) for part, seconds in found.seconds.items()}

    def train(self, name: str, steps: int, eval_every: int, until: float | None = None) -> dict[str, Any]:
        """Train from a fresh state; return the loss of every step, and validation losses as [step, loss].

        The answer's `seconds` are those of training until each evaluation, without evaluations.

        Args:
            eval_every: steps between two evaluations; 0: none.
            until: validation loss at which training ends; None: it runs all steps. All hosts see the same loss.
        """
        program = self.programs[name]
        program.fresh()
        config, losses, validation, seconds, spent = program.config, [], [], [], 0.0
        few = [batch for _, batch in zip(range(config.run.eval_batches), program.batches("validation"))]
        evaluate = lambda: float(np.mean([float(program.evaluate(program.state.params, b)) for b in few]))  # noqa: E731
        for step, batch in zip(range(steps + 1), program.batches("train")):
            if eval_every and step % eval_every == 0:
                seconds.append(spent)
                validation.append([step, evaluate()])
                if until is not None and validation[-1][1] <= until:
                    break
                self._together()
            if step < steps:
                began = time.perf_counter()
                losses.append(float(program.step(batch)["loss"]))
                spent += time.perf_counter() - began
        program.fresh()
        return {"losses": losses, "validation": validation, "seconds": seconds}

    def compute(self, config: dict, repeats: int) -> list[float]:
        """Return the seconds of a fixed piece of compute on this host, during which nothing communicates."""
        if self._turns is None:
            config = from_dict(config)
            tensor = config.mesh.tensor
            self._turns = compute_timing.LoopTimer(config, tensor, config.batch.micro_batch, jax.local_devices())
            compute_timing.OptimizerTimer(config, tensor, jax.local_devices()).sample()  # compiled for the profile
            self._turns.counts = dict.fromkeys(compute_timing.KINDS, 0)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            self._turns._time("backward", 8)
            seconds.append(time.perf_counter() - began)
        return [statistics.median(seconds)]


def _serve(worker: Worker, answers: Any) -> None:
    for line in sys.stdin:
        task = json.loads(line)
        try:
            answer = {"answer": getattr(worker, task.pop("do"))(**task)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


def main(argv: Sequence[str]) -> None:
    """Join the others, report it, and serve until the input ends."""
    del argv
    f = flags.FLAGS
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what others print belongs into the log
    jax_private.share_compiled_programs()
    if not f.real:
        device.install()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", f.cpu_devices)
    with contextlib.ExitStack() as stack:
        initialize(f.coordinator, f.num_processes, f.process_id, 120)
        stack.callback(jax.distributed.shutdown)
        worker = Worker(300, Programs(pathlib.Path(f.programs)))
        print(json.dumps({"answer": "ready"}), file=answers, flush=True)
        _serve(worker, answers)


def define_flags() -> None:
    """Define the flags of this main."""
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0.")
    flags.DEFINE_integer("num_processes", None, "How many there are.")
    flags.DEFINE_integer("process_id", None, "Which of them this is.")
    flags.DEFINE_string("programs", None, "Folder of compiled programs.")
    flags.DEFINE_integer("cpu_devices", 1, "Virtual devices of this host.")
    flags.DEFINE_bool("real", False, "Whether devices are as fast as they are, and not of a given speed.")


if __name__ == "__main__":
    run(main, define_flags)
