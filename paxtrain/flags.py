"""Flags that many mains share: that of a configuration file, and the values of all."""

from collections.abc import Callable
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from paxtrain.config.load import errors_of
from paxtrain.config.shipped import find
from paxtrain.errors import UserError


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
