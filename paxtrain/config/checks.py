"""Checks of the configuration's values, with messages that say what would fit."""

import math
import re
import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from paxtrain.errors import UserError, whole

MOST = 2**31 - 1  # steps, and whatever else has no limit of its own
Number = TypeVar("Number", int, float)


def require(condition: bool, message: str) -> None:
    """Raise UserError(message) if the condition does not hold."""
    if not condition:
        raise UserError(message)


def near(n: int, target: int, fits: Callable[[int], bool] = lambda d: True) -> list[int]:
    """Return the divisors of n nearest to `target`, below and above it, of those that also fit the other rules."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    divisors = [d for d in small + [n // d for d in reversed(small) if d * d < n] if fits(d)]
    return [d for d in divisors if d <= target][-1:] + [d for d in divisors if d > target][:1]


def either(values: Iterable[object]) -> str:
    """Return values as a phrase: "4 or 6"."""
    return " or ".join(map(str, values))


def multiples_near(n: int, target: int) -> str:
    """Return the multiples of n nearest to `target`, as a phrase."""
    below = target // n * n
    return either([below, below + n] if below else [n])


def shown(value: object) -> str:
    """Return a value for a message; Python refuses to write numbers of thousands of digits."""
    if isinstance(value, int) and value.bit_length() >= 70:
        return f"a number of about {round(value.bit_length() * 0.30103)} digits"
    try:
        return repr(value)
    except (ValueError, RecursionError):  # such a number inside of it, or lists in lists in lists
        return f"a {type(value).__name__} that is too large to show"


def bounded(section: str, config: object, **most: int) -> None:
    """Require that the numbers of a section are finite and not beyond anything that could be computed.

    Tables, divisors and sizes are then cheap to compute for every configuration that is accepted.

    Args:
        section: name of the section, for the message.
        config: the section, a dataclass.
        most: largest value of some fields; default: `MOST`.

    Raises:
        UserError: a number is larger, infinite or not a number.
    """
    for name, value in vars(config).items():
        if isinstance(value, float):
            require(math.isfinite(value), f"{section}.{name} must be a finite number, got {value}")
        elif isinstance(value, int):
            limit = most.get(name, MOST)
            require(abs(value) <= limit, f"{section}.{name} may be at most {limit:,}, got {shown(value)}")


def positive(section: str, config: object, *names: str) -> None:
    """Require that the named values of a section are above zero."""
    for name in names:
        value = getattr(config, name)
        require(value > 0, f"{section}.{name} must be positive, got {value}")


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Require that a value is one of several.

    Args:
        name: full name of the value, such as "mesh.data", for the message.
        value: the value given.
        choices: the values allowed.

    Raises:
        UserError: it is none of them.
    """
    require(value in choices, f"{name} must be one of {', '.join(choices)}, got {value!r}")


def numbers(name: str, text: str, kind: type[Number]) -> tuple[Number, ...]:
    """Return the numbers of a comma-separated list; an empty text is an empty list.

    Args:
        name: full name of the value, for the message.
        text: the list, such as "16,8,16".
        kind: int or float.

    Raises:
        UserError: a part is no number of this kind, is not finite, too large or negative.
    """
    message = f"{name} must be numbers from 0 on joined by commas, got {text!r}"
    # int() and float() would also take digits of other scripts, and 1_0.
    require(re.fullmatch(r"[\d\s.,eE+-]*", text, re.ASCII) is not None, message)
    try:
        values = tuple(kind(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise UserError(message) from None
    most = MOST if kind is int else sys.float_info.max
    require(all(0 <= value <= most for value in values), message)  # math.isfinite raises on integers above 1.8e308
    return values


def counts(name: str, text: str) -> tuple[int, ...]:
    """Return the positive integers of a comma-separated list; an empty text is an empty list.

    Args:
        name: full name of the value, for the message.
        text: the list, such as "3,4,4,1".

    Raises:
        UserError: a part is no positive integer, or 1,000,000,000 or more.
    """
    parts = text.split(",") if text else []
    require(
        all(whole(part.strip(), 999_999_999) for part in parts),
        f"{name} must be positive integers joined by commas, got {text!r}",
    )
    return tuple(map(int, parts))


def steps(name: str, text: str, last: int) -> range:
    """Return the steps of "FIRST:END", END excluded; an empty text gives no steps.

    Args:
        name: full name of the value, for the message.
        text: the range, such as "10:13".
        last: number of steps of the run.

    Raises:
        UserError: the text has another form, or names no step or steps outside of 1 to `last`.
    """
    if not text:
        return range(0)
    parts = text.split(":")
    require(
        len(parts) == 2 and all(part.isascii() and part.isdecimal() and len(part) < 30 for part in parts),
        f"{name}={text!r} must be FIRST:END, such as 10:13 for the steps 10, 11 and 12",
    )
    found = range(*map(int, parts))
    require(found.start > 0, f"{name}={text} begins with step {found.start}, but steps are counted from 1")
    require(
        found.start < found.stop,
        f"{name}={text} holds no step: END comes after the last; {found.start}:{found.start + 1} would work",
    )
    require(
        found.stop <= last + 1,
        f"{name}={text} reaches to step {found.stop - 1}, but run.steps={last}; ask for more steps, or profile earlier",
    )
    return found
