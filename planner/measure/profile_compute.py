"""The compute profile of each device kind, measured with the trainer's own functions until the time is up."""

import statistics
import time
from collections.abc import Sequence

import jax
from tqdm import tqdm

from paxtrain.config import Config
from paxtrain.errors import UserError
from planner.cost import compute
from planner.measure import compute_timing
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup

ProfileRow = dict[str, str | float]  # one row of the compute profile, as a cluster file has it


def tensor_sizes(config: Config, per_host: int, chosen: Sequence[int]) -> tuple[int, ...]:
    """Return the tensor-parallel sizes to measure.

    Args:
        config: configuration whose model the sizes must divide.
        per_host: devices per host, which the sizes must divide too.
        chosen: sizes that the user asked for; empty: all that fit.

    Raises:
        UserError: a chosen size does not divide the devices of a host, or the model.
    """
    model = config.model
    fits = [t for t in range(1, per_host + 1) if not any(size % t for size in (per_host, *model.split_sizes.values()))]
    for size in chosen:
        if size not in fits:
            raise UserError(
                f"--tensor={size} must divide the {per_host} devices of a host and the model's "
                f"{', '.join(f'{name}={size}' for name, size in model.split_sizes.items())}; "
                f"{', '.join(map(str, fits))} would"
                + (f", or this with {vocabulary}" if (vocabulary := model.vocabulary_for(size)) else "")
            )
    return tuple(chosen) or tuple(fits)


def compute_rows(
    machines: Machines, config: Config, tensor: int, micro_batch: int, values: Sequence[dict[str, float] | None]
) -> list[ProfileRow]:
    """Return a row of the compute profile for each device kind, with medians over the processes that measured.

    Args:
        machines: the hosts and their device kinds.
        config: the model and its save mode.
        tensor: tensor-parallel size that was measured.
        micro_batch: sequences per micro-batch.
        values: seconds of each kind of work, per process; None if the process did not measure.
    """
    model, rows = config.model, []
    for kind in dict.fromkeys(machines.kinds):
        of_kind = [v for p, v in enumerate(values) if v and machines.kinds[machines.of_process[p]] == kind]
        row: ProfileRow = {"kind": kind, "tensor": tensor, "micro_batch": micro_batch, "save": config.pipeline.save}
        row |= dict(zip(compute.PROFILED, compute.profiled(model), strict=True))
        rows.append(row | {name: statistics.median(v[name] for v in of_kind) for name in of_kind[0]})
    return rows


class _ComputeProfile:
    """The measurements of one process.

    Attributes:
        measures: whether this process measures; otherwise it only takes part in the decisions.
    """

    def __init__(self, group: ProcessGroup, machines: Machines, config: Config, options: ProfileOptions) -> None:
        mine = machines.of_process[group.process]
        alike = [host for host, kind in enumerate(machines.kinds) if kind == machines.kinds[mine]]
        self._group, self._machines, self._config, self._options = group, machines, config, options
        self._devices = machines.devices[mine * machines.per_host : (mine + 1) * machines.per_host]
        self._optimizer: dict[int, float] = {}  # seconds per parameter, by tensor-parallel size
        self._processes_per_core = machines.processes_per_core(group.process)
        self.measures = mine in alike[: options.compute_hosts or None]

    def _prepare(self, tensor: int, micro_batch: int) -> compute_timing.LoopTimer:
        if not self.measures:
            return compute_timing.Bystander(self._config)
        if tensor not in self._optimizer:
            steps = compute_timing.OptimizerTimer(self._config, tensor, self._devices)
            steps.sample()
            samples = [steps.sample(self._processes_per_core) for _ in range(self._options.repeats)]
            self._optimizer[tensor] = statistics.median(samples)
        return compute_timing.LoopTimer(self._config, tensor, micro_batch, self._devices)

    def measure(self, tensor: int, micro_batch: int) -> tuple[list[ProfileRow], str]:
        """Return the rows of one size and an empty string, or no rows and the reason, such as too little memory."""
        timer, problem = None, ""
        try:
            timer = self._prepare(tensor, micro_batch)
        except jax.errors.JaxRuntimeError as error:
            problem = str(error).splitlines()[0]
        problem = self._group.gather(problem, lambda values: next(filter(None, values), ""))
        if timer is None or problem:
            return [], problem
        timer.settle(self._group.agree)
        samples = [timer.sample(self._processes_per_core) for _ in range(self._options.repeats)]
        value = {kind: statistics.median(s[kind] for s in samples) for kind in timer.kinds}
        values = self._group.gather(value | {"optimizer": self._optimizer[tensor]} if self.measures else None)
        return compute_rows(self._machines, self._config, tensor, micro_batch, values), ""


def profile_compute(
    group: ProcessGroup, machines: Machines, config: Config, options: ProfileOptions, until: float
) -> tuple[list[ProfileRow], list[str]]:
    """Measure compute, smallest sizes first, until the time is up.

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        config: the model to measure.
        options: tensor-parallel sizes, micro-batches and repeats.
        until: time.monotonic() at which to stop; process 0's clock counts.

    Returns:
        Rows of the compute profile, and a sentence on each size that was left out.

    Raises:
        UserError: a chosen tensor-parallel size does not fit, or a process was lost.
    """
    profile = _ComputeProfile(group, machines, config, options)
    cases = [(t, b) for t in tensor_sizes(config, machines.per_host, options.tensor) for b in options.micro_batches]
    rows: list[ProfileRow] = []
    left_out: list[str] = []
    began = time.monotonic()
    with tqdm(total=len(cases), desc="compute", unit="size", disable=group.process > 0 or None) as progress:
        for done, (tensor, micro_batch) in enumerate(cases):
            began, last = time.monotonic(), time.monotonic() - began
            # The next size takes at least as long as the last one.
            time_left = done < options.least or began + last < until
            if not group.agree(time_left):
                left_out += [f"compute of tensor={t}, micro_batch={b}: the time limit came" for t, b in cases[done:]]
                progress.total = done  # so that the bar does not look as if it had stopped on the way
                progress.set_postfix_str(f"no time for {len(cases) - done} larger ones")
                break
            measured, problem = profile.measure(tensor, micro_batch)
            rows += measured
            if problem:
                left_out.append(f"compute of tensor={tensor}, micro_batch={micro_batch}: {problem}")
            progress.update()
    return rows, left_out
