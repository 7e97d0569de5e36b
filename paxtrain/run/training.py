"""Training: what `python -m paxtrain.train` does, for programs that import it."""

import contextlib
from collections.abc import Sequence
from typing import Protocol

import jax

from compress import Codec
from paxtrain.config import Config, to_dict
from paxtrain.config.plan import Plan
from paxtrain.errors import UserError
from paxtrain.parallel.mesh import cpu_devices, host_major, make_mesh
from paxtrain.process import distributed, setup, supervised
from paxtrain.run.run import Run, TrainingResult


class HasPlan(Protocol):
    """Anything with a plan, such as what `planner.plan` returns."""

    @property
    def plan(self) -> Plan: ...


def train_together(
    config: Config,
    chosen: Plan | None,
    names: Sequence[str],
    progress: supervised.Progress | None = None,
    quiet: bool = False,
    codec: Codec | None = None,
) -> TrainingResult:
    """Train with all processes, which have joined.

    Args:
        config: configuration, with the plan's sections if there is a plan.
        chosen: plan that says which device is where in the mesh; None takes the devices in order.
        names: host name of every process, for a plan that names hosts.
        progress: told of steps and of what happens between them; None for nobody.
        quiet: print nothing.
        codec: codec of the gradients between stages, in place of the configuration's.

    Raises:
        UserError: on every process, if one of them has found bad input.
    """
    run, problem = None, None
    try:
        devices = host_major(chosen.hosts, names) if chosen and chosen.hosts else None
        mesh = make_mesh(config.mesh, chosen.device_order or None if chosen else None, devices)
        run = Run(config, mesh, progress, quiet, codec)
    except UserError as error:
        problem = error
    distributed.agree(problem)
    assert run is not None
    return run.train()


def train(
    config: Config, plan: Plan | HasPlan | None = None, *, codec: Codec | None = None, quiet: bool = False
) -> TrainingResult:
    """Train as `python -m paxtrain.train` does, and return its metrics.

    A process that stands alone, such as a notebook, gets as many virtual CPU devices as the mesh needs, if it has used
    no device before and has no accelerator. Processes of one job call `paxtrain.join` first.

    Args:
        config: configuration; its `run.out` is the folder of checkpoints and metrics, from which training continues.
        plan: plan that overrides mesh, pipeline, batch and compression, or what `planner.plan` returned.
        codec: codec of the gradients between stages, such as one of your own; `compress.Codec` says what it needs.
            compress.backward says which gradients it encodes; its default "none" stands for "all" then.
        quiet: print nothing.

    Raises:
        UserError: the configuration does not fit the data, the folder or the devices.
    """
    chosen = plan if plan is None or isinstance(plan, Plan) else plan.plan
    if chosen:
        config = chosen.apply(to_dict(config))
    with contextlib.suppress(RuntimeError):  # the devices have been used: their number stands
        jax.config.update("jax_num_cpu_devices", cpu_devices(config.mesh, processes=1))
    names = distributed.host_names() if chosen and chosen.hosts else []
    setup.use_one_blas_thread()
    with setup.quiet_orbax():
        return train_together(config, chosen, names, quiet=quiet, codec=codec)
