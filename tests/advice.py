"""The advice of refusals, read as whoever follows it does."""

import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from paxtrain.config import Config, from_dict, to_dict
from paxtrain.config.load import nested
from paxtrain.errors import UserError

Values = dict[str, Any]  # values by dotted name; of what an advice leaves out, None


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


@functools.cache
def defaults() -> Values:
    return dict(_flat(to_dict(Config())))


def _read(name: str, text: str) -> Any:
    """Return a value as the flag of a setting reads it."""
    kind = type(defaults()[name])
    assert kind is not bool or text in ("True", "False"), text
    return text == "True" if kind is bool else kind(text)


def advised(message: str) -> list[Values]:
    """Return the changes that a refusal advises.

    Advice is what follows the last semicolon: ways joined by ", or". A way is a setting, or several as "A with B and
    C". A setting is NAME=VALUE, NAME=VALUE or VALUE, or NAME left out.
    """
    advice = re.fullmatch(r".+; ([^;]+?),? would fit", message)
    assert advice, f"no advice, or advice in another form: {message}"
    changes: list[Values] = []
    for way in advice[1].split(", or "):
        found: list[Values] = [{}]
        for part in re.split(" with | and ", way):
            setting = re.fullmatch(r"([\w.]+)(?: left out|=(\S+)(?: or (\S+))?)", part)
            assert setting, f"{part!r} is no setting: {message}"
            name, *texts = setting.groups()
            values = [_read(name, text) for text in texts if text] or [None]
            found = [change | {name: value} for change in found for value in values]
        changes += found
    return changes


def followed(values: Values, change: Values) -> Values:
    """Return values with a change; what it leaves out has its default."""
    out = tuple(f"{name}." for name, value in change.items() if value is None)
    kept = {name: value for name, value in values.items() if not f"{name}.".startswith(out)} if out else values
    return kept | {name: value for name, value in change.items() if value is not None}


def refusal(values: Values) -> UserError | None:
    try:
        from_dict(nested(values))
    except UserError as error:
        return error
    return None


def steps_to_fit(values: Values, most: int) -> list[UserError]:
    """Follow all advice of a refusal, and of what is refused then; return all refusals.

    Each way must be accepted after at most `most` changes.
    """
    error = refusal(values)
    if error is None:
        return []
    assert most, f"still refused: {error}, {values}"
    changes = advised(str(error))
    return [error, *(later for change in changes for later in steps_to_fit(followed(values, change), most - 1))]
