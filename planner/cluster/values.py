"""Values of a cluster's JSON, judged one by one; what is wrong raises a UserError."""

from collections.abc import Mapping

from paxtrain.errors import UserError

_HUGE = 1e300  # numbers must be below it


def integer(name: str, value: object) -> int:
    """Return a value that must be an integer from 1 on.

    Args:
        name: name of the value, for messages.
        value: the value.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"{name} must be an integer from 1 on, got {value!r}")
    return value


def number(name: str, value: object, zero: bool = False) -> float:
    """Return a value that must be a number above 0.

    Args:
        name: name of the value, for messages.
        value: the value.
        zero: whether it may be 0.
    """
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) < _HUGE
        or value < 0
        or (value == 0 and not zero)
    ):
        raise UserError(f"{name} must be a number {'from 0 on' if zero else 'above 0'}, got {value!r}")
    return float(value)


def at_least(least: float, name: str, value: object) -> float:
    """Return a value that must be a number from some number on.

    Args:
        least: the least that the value may be.
        name: name of the value, for messages.
        value: the value.
    """
    found = number(name, value)
    if found < least:
        raise UserError(f"{name} must be a number from {least:g} on, got {value!r}")
    return found


def per_host(name: str, value: object, hosts: int) -> list[object]:
    """Return a list of one value per host, from such a list or from one value for all.

    Args:
        name: name of the value, for messages.
        value: the value.
        hosts: number of hosts.
    """
    if not isinstance(value, list):
        return [value] * hosts
    if len(value) != hosts:
        raise UserError(f"{name} must be one value or one for each of the {hosts} hosts, got {len(value)}")
    return value


def only(given: Mapping[str, object], known: tuple[str, ...], where: str = "links.") -> None:
    """Require that an object has no other keys than those known.

    Args:
        given: the object.
        known: its keys.
        where: what stands before a key in messages.
    """
    for key in given:
        if key not in known:
            raise UserError(f"unknown key {where}{key}; known are {', '.join(known)}")
