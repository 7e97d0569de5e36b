"""Flags of the programs that train or profile a configuration."""

import os

import jax
from absl import flags

from paxtrain.command_line import group
from paxtrain.config import Config, from_dict, plan
from paxtrain.flags import define_config
from paxtrain.parallel.mesh import MOST_CPU_DEVICES, cpu_devices
from paxtrain.process import distributed, supervised


def define_flags() -> None:
    """Define the flags."""
    flags.DEFINE_string("plan", None, "A plan.json that overrides mesh, pipeline, batch and compress.")
    description = "Virtual CPU devices per process; 0: what the mesh needs."
    flags.DEFINE_integer("cpu_devices", 0, description, 0, MOST_CPU_DEVICES)
    with group("Several processes"):
        distributed.define_flags()
    define_config("config", "tiny", "The configuration: a file, or the name of one in configs/.")


def configured() -> tuple[Config, plan.Plan | None]:
    """Return the configuration that the flags of `define_flags` describe, and the plan that is part of it.

    Raises:
        UserError: a file cannot be read, or values do not fit.
    """
    f = flags.FLAGS
    chosen = plan.load(f.plan) if f.plan else None
    config = chosen.apply(f.config) if chosen else from_dict(f.config)
    # Only the CPU backend reads this; on GPU clusters it changes nothing.
    processes = f.num_processes or distributed.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices or cpu_devices(config.mesh, processes))
    return config, chosen


def join() -> None:
    """Join the other processes of the launch, as the flags of `define_flags` say.

    Raises:
        UserError: the flags are incomplete or wrong, or the other processes cannot be joined.
    """
    f = flags.FLAGS
    heartbeat = supervised.heartbeat(os.environ)
    distributed.initialize(f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout, heartbeat)
