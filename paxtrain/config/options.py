"""Options of codecs in the configuration, and the dotted spelling of settings that are kept flat."""

import re
from collections.abc import Mapping
from typing import Any

PLACES = ("backward", "forward", "data")  # what can go through a codec, low rank's or another
LINKED = ("backward", "forward")  # those of the messages between stages, which may be compressed on some links only
OTHERS = ("weights", "outer", "embedding")  # what can go through another only
PROBED = (*PLACES, "embedding")  # what a probe of the loss can tell of
REDUCED = ("data", "outer")  # what a reducer can take in place of a codec
_DOTTED = re.compile(rf"compress\.({'|'.join((*PLACES, *OTHERS))})\.(messages|stages|links|codec|options|inside)\b")


class CodecOptions(dict):
    """Values by option of a codec. It is hashable, so it must not be changed."""

    def __hash__(self) -> int:  # type: ignore[override]  # a dict has none
        return hash(frozenset(self.items()))


NO_OPTIONS = CodecOptions()


def flat(key: str) -> str:
    """Return the key of a setting, given as compress.backward.codec or as it is kept, compress.backward_codec.

    compress.backward.messages and compress.data.stages stand for compress.backward and compress.data.
    """

    def one(found: re.Match[str]) -> str:
        place, part = found.groups()
        return f"compress.{place}" + ("" if part in ("messages", "stages") else f"_{part}")

    return _DOTTED.sub(one, key, count=1)


def flat_argument(argument: str) -> str:
    """Return an argument of a command line with a dotted setting's flag in the spelling in which it is kept."""
    name, equals, value = argument.partition("=")
    return flat(name) + equals + value if name.startswith("-") else argument


def flat_section(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the compress section with its subsections flat: {"backward": {"codec": "int8"}} as backward_codec."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key in (*PLACES, *OTHERS) and hasattr(value, "items"):
            for part, inner in value.items():
                found[flat(f"compress.{key}.{part}").removeprefix("compress.")] = inner
        else:
            found[key] = value
    return found
