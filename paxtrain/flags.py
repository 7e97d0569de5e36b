"""Flags that the mains which train or profile share, and the values of all flags."""

import os
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from absl import flags
from ml_collections import config_flags

from paxtrain.command_line import define_config, group
from paxtrain.config import Config, from_dict, plan, to_dict
from paxtrain.config.axes import in_words
from paxtrain.config.load import described
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
    flags.DEFINE_bool("print_config", False, "Print each value of the configuration and its source, and do no more.")
    with group("Several processes"):
        distributed.define_flags()
    define_config("config", "tiny", "The configuration: a file, or the name of one in configs/.")


def configured() -> tuple[Config, plan.Plan | None]:
    """Return the configuration that the flags of `define_training` describe, and the plan that is part of it.

    With --print_config it is printed, and the process ends.

    Raises:
        UserError: a file cannot be read, or values do not fit.
    """
    f = flags.FLAGS
    chosen = plan.load(f.plan) if f.plan else None
    config = chosen.apply(f.config) if chosen else from_dict(f.config)
    if f.print_config:
        print("\n".join(_settled(config, chosen)))
        sys.exit(0)
    # Only the CPU backend reads this; on GPU clusters it changes nothing.
    processes = f.num_processes or launchers.expected_processes(os.environ)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices or cpu_devices(config.mesh, processes))
    return config, chosen


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield values by dotted key; an empty section is a value."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _settled(config: Config, chosen: plan.Plan | None) -> list[str]:
    """Return a line for each value of the configuration, with its source: default, file, import, flag or plan.

    Files of Python say everything, also what they leave as it is, so a value of a file is one that is not the default.
    """
    flag = flags.FLAGS["config"]
    file = "import" if described(config_flags.get_config_filename(flag)) else "file"
    given, defaults = config_flags.get_override_values(flag), dict(_flat(to_dict(Config())))
    planned = chosen.keys() if chosen else ()

    def source(key: str, value: object) -> str:
        if any(f"{key}.".startswith(f"{name}.") for name in planned):
            return "plan"
        if any(f"{key}.".startswith(f"{name}.") for name in given):
            return "flag"
        return "default" if key in defaults and defaults[key] == value else file

    return [f"{key} = {value!r}  # {source(key, value)}" for key, value in _flat(to_dict(config))]


def join() -> None:
    """Join the other processes of the launch, as the flags of `define_training` say.

    Raises:
        UserError: the flags are incomplete or wrong, or the other processes cannot be joined.
    """
    f = flags.FLAGS
    distributed.initialize(f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout, f.lost_timeout)


def tell_cpu_devices(config: Config) -> None:
    """Say how many virtual CPU devices a mesh gets on its own account; call it once the processes have joined."""
    if not flags.FLAGS.cpu_devices and jax.default_backend() == "cpu" and jax.process_index() == 0:
        made = jax.local_device_count()
        each = " in each process" if jax.process_count() > 1 else ""
        devices = f"{made} virtual CPU device{'s are' if made > 1 else ' is'}"
        print(f"{devices} made{each} for {in_words(config.mesh.sizes)}; --cpu_devices sets their number", flush=True)


def progress() -> Progress:
    """Return the progress of a process that trains, which ends when it hangs or fails."""
    return Progress(ends=True, lost=flags.FLAGS.lost_timeout, hang=flags.FLAGS.hang_timeout)
