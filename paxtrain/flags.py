"""Flags that the mains which train or profile share, and the values of all flags."""

import os
from typing import Any

import jax
from absl import flags

from paxtrain.command_line import define_config, group
from paxtrain.config import Config, from_dict, plan
from paxtrain.parallel.mesh import MOST_CPU_DEVICES, cpu_devices
from paxtrain.process import distributed, launchers
from paxtrain.process.progress import Progress


def values() -> dict[str, Any]:
    """Return the project's flags by name, including those not given; the configuration is not among them."""
    ours = [
        each for module, some in flags.FLAGS.flags_by_module_dict().items() if "absl" not in module for each in some
    ]
    return {flag.name: flag.value for flag in ours if isinstance(flag.value, str | int | float | list | None)}


def define_training() -> None:
    """Define the flags of the programs that train or profile a configuration."""
    flags.DEFINE_string("plan", None, "A plan.json that overrides mesh, pipeline, batch and compress.")
    description = "Virtual CPU devices per process; 0: what the mesh needs."
    flags.DEFINE_integer("cpu_devices", 0, description, 0, MOST_CPU_DEVICES)
    with group("Several processes"):
        distributed.define_flags()
    define_config("config", "tiny", "The configuration: a file, or the name of one in configs/.")


def configured() -> tuple[Config, plan.Plan | None]:
    """Return the configuration that the flags of `define_training` describe, and the plan that is part of it.

    Raises:
        UserError: a file cannot be read, or values do not fit.
    """
    f = flags.FLAGS
    chosen = plan.load(f.plan) if f.plan else None
    config = chosen.apply(f.config) if chosen else from_dict(f.config)
    # Only the CPU backend reads this; on GPU clusters it changes nothing.
    processes = f.num_processes or launchers.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices or cpu_devices(config.mesh, processes))
    return config, chosen


def join() -> None:
    """Join the other processes of the launch, as the flags of `define_training` say.

    Raises:
        UserError: the flags are incomplete or wrong, or the other processes cannot be joined.
    """
    f = flags.FLAGS
    distributed.initialize(f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout, f.lost_timeout)


def progress() -> Progress:
    """Return the progress of a process that trains, which ends when it hangs or fails."""
    return Progress(ends=True, lost=flags.FLAGS.lost_timeout, hang=flags.FLAGS.hang_timeout)
