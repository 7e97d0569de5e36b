"""The kinds of entries on the board, and whether a value from another host is one of its kind."""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from paxtrain.process.supervised import MeshPosition
from planner.supervision.first_cause import FaultCause, HostReport
from planner.supervision.slow_step import SlowStepNote, StepView

# Types of the values, as dataclasses where `dataclasses.asdict` made them.
KINDS: Mapping[str, object] = types.MappingProxyType(
    {
        "here": str,
        "name": str,
        "report": HostReport,
        "verdict": FaultCause,
        "done": int | None,
        "slow": float,
        "place": MeshPosition,
        "view": StepView,
        "note": SlowStepNote,
        "aside": float,
    }
)


def _is_tuple(value: object, inner: tuple[object, ...]) -> bool:
    if not isinstance(value, list):
        return False
    if inner[1:] == (Ellipsis,):
        return all(_is(each, inner[0]) for each in value)
    return len(value) == len(inner) and all(map(_is, value, inner))


def _is(value: Any, kind: object) -> bool:
    """Return whether a JSON value can be one of a type: a scalar, union, tuple, mapping, or dataclass of them."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return any(_is(value, each) for each in inner)
    if origin is tuple:
        return _is_tuple(value, inner)
    if origin is Mapping:  # JSON's keys are text
        keys = isinstance(value, dict) and all(inner[0] is not int or _is_digits(key) for key in value)
        return keys and all(_is(each, inner[1]) for each in value.values())
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return isinstance(value, dict) and value.keys() == hints.keys() and all(_is(value[k], hints[k]) for k in hints)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return type(value) is kind


def _is_digits(key: str) -> bool:
    return key.isascii() and key.isdigit() and len(key) < 10


def fits(kind: str, value: object) -> bool:
    """Return whether a value is one that entries of this kind have; no value fits a kind that is not known."""
    return kind in KINDS and _is(value, KINDS[kind])
