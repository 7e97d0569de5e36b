"""Configurations from files, for programs that have no flags."""

import runpy
from collections.abc import Mapping
from typing import Any

from paxtrain.config.config import Config, from_dict
from paxtrain.config.shipped import find
from paxtrain.errors import UserError


def load_config(name: str, overrides: Mapping[str, Any] | None = None) -> Config:
    """Return the configuration of a file, with some of its values replaced.

    Args:
        name: path of a file that defines `get_config()`, or the name of a shipped one, such as "gpt_8b".
        overrides: values by dotted key, such as {"mesh.pipe": 2}.

    Raises:
        UserError: there is no such file, it has no `get_config()`, or a key or value does not fit.
    """
    path = find(name)
    try:
        found = runpy.run_path(path)
    except OSError as error:
        raise UserError(
            f"cannot load the configuration {path} ({error}); name a file such as configs/tiny.py"
        ) from error
    if not callable(found.get("get_config")):
        raise UserError(f"{path} defines no get_config(); write it as configs/tiny.py does")
    values = found["get_config"]().to_dict()
    for key, value in (overrides or {}).items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"unknown configuration key {key}; {section} is a value, not a section")
        place[last] = value
    return from_dict(values)
