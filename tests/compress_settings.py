"""Settings of the compress section by one name each, with an underscore for the dot: data_rank=4 is data.rank."""

from collections.abc import Mapping
from typing import Any

from paxtrain.config import CompressConfig, read_section
from paxtrain.config.options import OTHERS, PLACES


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section that `from_dict` reads, of settings by such names or nested."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        place, _, key = name.partition("_")
        if place in (*PLACES, *OTHERS):
            found[place] = found.get(place, {}) | ({key: value} if key else dict(value))
        else:
            found[name] = value
    return found


def compression(**settings: Any) -> CompressConfig:
    """Return the section that has some settings by such names."""
    return read_section(CompressConfig, nested(settings), "compress")
