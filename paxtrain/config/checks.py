"""Checks of the configuration, and the settings with which what was refused is accepted.

A rule that several settings break raises `Refusal` with ways out: changes of settings, each of which settles the rule.
What the user reads names the ways that all other rules accept, too. If one breaks another rule, or another rule was
broken anyway, the ways out of that are tried along with it. No setting is changed twice, so advice has no circles.
"""

import copy
import itertools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeAlias, TypeVar

from paxtrain.errors import UserError, whole

MOST = 2**31 - 1  # steps, and whatever else has no limit of its own
Number = TypeVar("Number", int, float)
OUT = object()  # value of a setting, or of all settings below a name, that is to be left out
Way: TypeAlias = dict[str, Any]  # values by dotted name
_SHOWN, _LONG = 2, 3  # ways that advice names, and the settings from which on a way is long
_TRIED, _NEAR = 200, 3  # ways that are tried with as many rules, and divisors on each side


class Refusal(UserError):
    """The refusal of settings that do not fit each other.

    Attributes:
        text: what is wrong, and what was given.
        ways: changes of settings, each of which settles it; the message names the first ones.
    """

    def __init__(self, text: str, ways: Sequence[Way] = ()) -> None:
        super().__init__(f"{text}; {_phrase(ways)} would fit" if ways else text)
        self.text, self.ways = text, ways


class Checked:
    """A part of the configuration that checks itself when it is made."""

    depth: ClassVar[int] = 1  # names before those of its settings: model.heads has one, compress.data.rank two

    def check(self) -> None:
        """Require that the settings fit each other.

        Raises:
            UserError: they do not.
        """

    def __post_init__(self) -> None:
        try:
            self.check()
        except Refusal as refusal:
            raise Refusal(refusal.text, _accepted(self, refusal.ways)) from None


def require(condition: bool, message: str, *ways: Way | Iterable[Way]) -> None:
    """Require that a condition holds.

    Args:
        condition: the condition.
        message: what is wrong, and what was given.
        ways: changes of settings, each of which would make the condition hold, the best first.

    Raises:
        Refusal: it does not hold.
    """
    if not condition:
        raise Refusal(message, [way for some in ways for way in ([some] if isinstance(some, dict) else some)])


def each(name: str, values: Iterable[object]) -> Iterator[Way]:
    """Yield a way for each value of a setting."""
    return ({name: value} for value in values)


def divisors(n: int, most: int | None = None) -> list[int]:
    """Return the divisors of n up to `most`, rising; None: all."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return [d for d in small + [n // d for d in reversed(small) if d * d < n] if most is None or d <= most]


def near(n: int, target: int, fits: Callable[[int], bool] = lambda d: True) -> Iterator[int]:
    """Yield divisors of n nearest to `target`, below and above it in turn, of those that also fit the other rules."""
    some = [d for d in divisors(n) if fits(d)]
    below, above = ([d for d in some if d <= target], [d for d in some if d > target])
    pairs = itertools.zip_longest(below[: -_NEAR - 1 : -1], above[:_NEAR])
    yield from (d for pair in pairs for d in pair if d is not None)


def multiples_near(n: int, target: int) -> Iterator[int]:
    """Yield the multiples of n nearest to `target`."""
    below = target // n * n
    yield from [below, below + n] if below else [n]


def _words(way: Way) -> str:
    """Return a way as words: "mesh.pipe=2 with model.layers=2 and compress.data left out"."""
    first, *others = [f"{name} left out" if value is OUT else f"{name}={value}" for name, value in way.items()]
    return " with ".join(filter(None, (first, " and ".join(others))))


def _phrase(ways: Sequence[Way]) -> str:
    """Return the ways that advice names as a phrase: "mesh.tensor=2 or 4"; of long ones it is the first only."""
    shown = ways[: _SHOWN if len(ways[0]) < _LONG else 1]
    phrases = [_words(way) for way in shown]
    if [len(way) for way in shown] == [1, 1]:
        (first, equals, one), (second, _, other) = (phrase.partition("=") for phrase in phrases)
        if first == second:
            return f"{first}{equals}{one} or {other}"
    return ", or ".join(phrases) + "," * (len(phrases) > 1)


def _changed(part: Checked, way: Way) -> Checked:
    """Return a copy with some settings changed, which is not checked."""
    found = copy.copy(part)
    for name, value in way.items():
        place, (*sections, last) = found, name.split(".")[part.depth :]
        for section in sections:
            object.__setattr__(place, section, copy.copy(getattr(place, section)))
            place = getattr(place, section)
        object.__setattr__(place, last, getattr(type(place), last) if value is OUT else value)
    return found


def _check(part: Checked) -> None:
    """Check a part and the parts inside it."""
    for value in vars(part).values():
        if isinstance(value, Checked):
            _check(value)
    part.check()


def _meet(way: Way, other: Way) -> bool:
    """Return whether two ways change the same setting."""
    return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in way for b in other)


def _accepted(part: Checked, ways: Sequence[Way]) -> Sequence[Way]:
    """Return the ways that all rules of a part accept, each with as few further changes as possible.

    Ways that need more than one further change more than others are left out. If nothing is accepted, all come back.
    """
    found = dict[int, Way]()  # by the number of the way that it begins with
    tried, going = list(enumerate(ways)), True
    while tried and going:
        going, longer = not found, list[tuple[int, Way]]()
        for first, way in tried:
            if first in found:
                continue
            try:
                _check(_changed(part, way))
            except UserError as error:
                others = error.ways if isinstance(error, Refusal) else ()
                longer += [(first, way | other) for other in others if not _meet(way, other)]
            else:
                found[first] = {name: value for name, value in way.items() if _changed(part, {name: value}) != part}
        tried = longer[:_TRIED]
    accepted = [found[first] for first in sorted(found)]
    needed = [way for way in accepted if not any(other.items() < way.items() for other in accepted)]
    return [way for i, way in enumerate(needed) if way not in needed[:i]] or ways


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
    require(
        found.start > 0,
        f"{name}={text} begins with step {found.start}, but steps are counted from 1",
        {name: f"1:{max(found.stop, 2)}"},
        {name: OUT},
    )
    require(
        found.start < found.stop,
        f"{name}={text} holds no step: END comes after the last",
        {name: f"{found.start}:{found.start + 1}"},
        {name: OUT},
    )
    require(
        found.stop <= last + 1,
        f"{name}={text} reaches to step {found.stop - 1}, but run.steps={last}",
        {"run.steps": found.stop - 1},
        {name: f"{min(found.start, last)}:{last + 1}"},
    )
    return found
