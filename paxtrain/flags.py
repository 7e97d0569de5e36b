"""Flags that many mains share: those of a configuration file and of training, and the values of all."""

import os
from collections.abc import Callable
from typing import Any

import jax
from absl import flags
from ml_collections import ConfigDict, config_flags

from paxtrain.command_line import group
from paxtrain.config import Config, from_dict, plan
from paxtrain.config.load import JSON, errors_of, recorded
from paxtrain.errors import UserError
from paxtrain.files import find
from paxtrain.parallel.mesh import MOST_CPU_DEVICES, cpu_devices
from paxtrain.process import distributed, launchers
from paxtrain.process.progress import Progress


def define_config(name: str, default: str | None, description: str) -> None:
    """Define a flag for a configuration file, given by its path or by the name of a shipped one.

    Overrides of unknown keys are accepted, so that `from_dict` can name the valid ones.

    Args:
        name: name of the flag; `--name.section.key=value` overrides a value.
        default: name of a shipped file; None if the flag may be left out.
        description: help text of the flag.
    """
    config_flags.DEFINE_config_file(
        name, default and find(default), description, lock_config=False, accept_new_attributes=True
    )
    parser = flags.FLAGS[name].parser
    load: Callable[[Any], Any] = parser.parse

    def parse(path: Any) -> Any:
        if not isinstance(path, str):
            return load(path)
        resolved = _resolved(path)
        file = resolved.partition(":")[0]
        if file.endswith(JSON):
            return ConfigDict(recorded(file))
        with errors_of(file):
            loaded = load(resolved)
        if loaded is None:
            raise UserError(f"get_config() of {file} returns None; it must return a ConfigDict, as in configs/tiny.py")
        return ConfigDict(loaded) if isinstance(loaded, dict) else loaded

    parser.parse = parse  # type: ignore[method-assign,assignment]  # ml_collections has no hook for paths
    if default is not None:
        # A file that cannot be loaded raises when it is first used, which is here, while flags are parsed.
        requirement = "get_config() must return a ConfigDict"
        flags.register_validator(name, lambda config: hasattr(config, "items"), requirement)


def _resolved(path: str) -> str:
    file, colon, argument = path.partition(":")
    return find(file) + colon + argument


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
