"""Flags that several mains share."""

import os
from collections.abc import Callable
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from paxtrain.config import Config, from_dict, plan
from paxtrain.config.shipped import find
from paxtrain.parallel.mesh import cpu_devices
from paxtrain.process import distributed, supervised


def define_config(name: str, default: str | None, description: str, unknown_keys: bool = True) -> None:
    """Define a flag for a configuration file, given by its path or by the name of a shipped one.

    Args:
        name: name of the flag; `--name.section.key=value` overrides a value.
        default: name of a shipped file; None if the flag may be left out.
        description: help of the flag.
        unknown_keys: let overrides of unknown keys through, for `from_dict` to say which keys there are.
    """
    config_flags.DEFINE_config_file(
        name, default and find(default), description, lock_config=not unknown_keys, accept_new_attributes=unknown_keys
    )
    parser = flags.FLAGS[name].parser
    load: Callable[[Any], Any] = parser.parse

    def parse(path: Any) -> Any:
        return load(_resolved(path) if isinstance(path, str) else path)

    parser.parse = parse
    if default is not None:
        # A file that could not be loaded raises when it is first used: here, while flags are parsed.
        requirement = "get_config() must return a ConfigDict"
        flags.register_validator(name, lambda config: hasattr(config, "items"), requirement)


def _resolved(path: str) -> str:
    file, colon, argument = path.partition(":")
    return find(file) + colon + argument


def define_training() -> None:
    """Define the flags of the mains that train or profile a configuration."""
    flags.DEFINE_string("plan", None, "A plan.json that overrides mesh, pipeline, batch and compress.")
    flags.DEFINE_integer("cpu_devices", 0, "Virtual CPU devices per process; 0: what the mesh needs.", lower_bound=0)
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
    processes = f.num_processes or distributed.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices or cpu_devices(config.mesh, processes))
    return config, chosen


def join() -> None:
    """Join the other processes of the launch, as the flags of `define_training` say.

    Raises:
        UserError: the flags make no sense.
    """
    f = flags.FLAGS
    heartbeat = supervised.heartbeat(os.environ)
    distributed.initialize(f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout, heartbeat)
