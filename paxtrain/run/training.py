"""The function `paxtrain.train`, and the part that `python -m paxtrain.train` calls once the processes have joined."""

import contextlib
import sys
from collections.abc import Sequence
from typing import Protocol

import jax

from compress import Codec
from paxtrain.config import Config, to_dict
from paxtrain.config.plan import Plan, other_model
from paxtrain.errors import UserError
from paxtrain.parallel.mesh import cpu_devices, host_major, make_mesh
from paxtrain.process import distributed, jax_private, setup
from paxtrain.process.progress import Progress
from paxtrain.run.run import Run, TrainingResult
from paxtrain.run.stragglers.stragglers import Advise


class HasPlan(Protocol):
    """An object with a plan, such as the result of `planner.plan`."""

    @property
    def plan(self) -> Plan: ...


def train_together(
    config: Config,
    chosen: Plan | None,
    names: Sequence[str],
    progress: Progress | None = None,
    quiet: bool = False,
    codec: Codec | None = None,
    advise: Advise | None = None,
) -> TrainingResult:
    """Train with all processes of the job, which must have joined.

    Args:
        config: Configuration, with the plan's sections if there is a plan.
        chosen: Plan with the order of the devices in the mesh; None: all devices in order.
        names: Host name of every process; empty, unless the plan names hosts: what their operating systems say.
        progress: What this process does, for its watchdog; None: nobody watches.
        quiet: Whether to print nothing.
        codec: Codec of the gradients between stages, instead of the configuration's.
        advise: Function that returns what to do about slower steps; None: a command to plan anew with.

    Raises:
        UserError: One of the processes has found bad input; every process raises.
        OSError: One of them has found a full disk; every process raises.
    """
    if chosen and not quiet and (other := other_model(chosen, config.model)) and jax.process_index() == 0:
        print(f"note: {other}", file=sys.stderr, flush=True)
    run, problem = None, None
    try:
        devices = host_major(chosen.hosts, names) if chosen and chosen.hosts else None
        mesh = make_mesh(config.mesh, chosen.device_order or None if chosen else None, devices)
        run = Run(config, mesh, progress, quiet, codec)
    except (UserError, OSError) as error:  # also a full disk
        problem = error
    distributed.agree(problem)
    assert run is not None
    return run.train(chosen.predicted if chosen else None, names, advise)


def train(
    config: Config, plan: Plan | HasPlan | None = None, *, codec: Codec | None = None, quiet: bool = False
) -> TrainingResult:
    """Train as `python -m paxtrain.train` does, and return the outcome.

    Without an accelerator the process gets as many virtual CPU devices as the mesh needs, if it has not used jax's
    devices before. Processes of one job call `paxtrain.join` first and share the mesh.

    Args:
        config: Configuration; its `run.out` is the folder of checkpoints and metrics, from which training continues.
        plan: Plan that overrides mesh, pipeline, batch and compression, or what `planner.plan` returned.
        codec: Codec of the gradients between stages, which `compress.Codec` describes, in place of the one that the
            configuration names. Its compress.backward.messages says which gradients go through it; with a codec the
            default "none" means "all".
        quiet: Whether to print nothing.

    Raises:
        UserError: The configuration does not fit the data, the folder or the devices.
    """
    chosen = plan if plan is None or isinstance(plan, Plan) else plan.plan
    if chosen:
        config = chosen.apply(to_dict(config))
    with contextlib.suppress(RuntimeError):  # devices in use cannot change their number
        jax.config.update("jax_num_cpu_devices", cpu_devices(config.mesh, jax_private.joined_processes()))
    names = distributed.host_names() if chosen and chosen.hosts else []
    setup.use_one_blas_thread()
    with setup.quiet_orbax():
        return train_together(config, chosen, names, quiet=quiet, codec=codec)
