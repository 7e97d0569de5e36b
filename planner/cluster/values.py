"""Values of a cluster's JSON, judged one by one; what is wrong raises a UserError."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.device_sheets import DeviceSheet
from planner.cluster.trunks import Trunks

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


# --- Units ------------------------------------------------------------------------------------------------------------


class _Unit(NamedTuple):
    """A unit of the file, the figures in it that clusters have, and other units that people write, by their size."""

    name: str
    least: float
    most: float
    others: Mapping[str, float]


_RATE = _Unit("bytes/s", 1e5, 1e13, {"GB/s": 1e9, "Gbit/s": 1.25e8, "MB/s": 1e6, "Mbit/s": 1.25e5})
_MEMORY_RATE = _Unit("bytes/s", 1e9, 1e14, {"GB/s": 1e9, "TB/s": 1e12})
_SECONDS = _Unit("seconds", 0, 0.5, {"us": 1e-6, "ms": 1e-3})  # by satellite it is 0.3
_BYTES = _Unit("bytes", 1e8, 1e13, {"GB": 1e9, "MB": 1e6})
_FLOPS = _Unit("FLOP/s", 1e10, 1e17, {"TFLOP/s": 1e12, "GFLOP/s": 1e9})


def _check_unit(what: str, value: float, unit: _Unit) -> None:
    """Require a plausible value.

    Raises:
        UserError: it is not; the sentence names the units that it may be in.
    """
    if unit.least <= value <= unit.most:
        return
    likely = [
        f"{value:g} {name} are {value * size:g}"
        for name, size in unit.others.items()
        if unit.least <= value * size <= unit.most
    ]
    raise UserError(
        f"{what} is {value:g} {unit.name}, but {unit.least:g} to {unit.most:g} are plausible"
        + (f"; {' and '.join(likely[:2])} {unit.name}" if likely else "")
    )


def check_units(
    hosts: tuple[str, ...],
    alpha: np.ndarray,
    samples: np.ndarray,
    memory: np.ndarray,
    trunks: Trunks | None,
    sheets: Mapping[str, DeviceSheet],
) -> None:
    """Require that clusters may have such figures; `Cluster` documents the arguments.

    Raises:
        UserError: a figure is too small or too large by far, as in another unit.
    """
    for name, sheet in sheets.items():
        _check_unit(f"devices.{name}.peak_flops", sheet.peak_flops, _FLOPS)
        _check_unit(f"devices.{name}.single_flops", sheet.single_flops, _FLOPS)
        _check_unit(f"devices.{name}.bandwidth", sheet.bandwidth, _MEMORY_RATE)
        _check_unit(f"devices.{name}.memory", sheet.memory, _BYTES)
    for what, unit, values in (("latency", _SECONDS, alpha[None]), ("bandwidth", _RATE, samples)):
        for pick in (np.argmin, np.argmax):
            place = np.unravel_index(pick(values), values.shape)
            a, b = place[1:]
            where = f"from {hosts[a]} to {hosts[b]}" if a != b else f"inside {hosts[a]}"
            _check_unit(f"the {what} {where}", float(values[place]), unit)
    for pick in (np.argmin, np.argmax):
        host = pick(memory)
        _check_unit(f"the memory of a device of {hosts[host]}", float(memory[host]), _BYTES)
    for _, rate in trunks or ():
        _check_unit("trunks.bandwidth", rate, _RATE)
