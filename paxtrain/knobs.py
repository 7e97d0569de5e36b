"""Options that are also flags: a dataclass declares each once, with its help in the docstring and bounds in its field.

@dataclasses.dataclass(frozen=True)
class Options:
    \"\"\"Options of this main.

    Attributes:
        top: number of plans to rank.
    \"\"\"

    top: int = knob(10, least=1)

define(Options)                  # --top, "Number of plans to rank."
options = given(Options)
"""

import dataclasses
import inspect
import math
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from paxtrain.errors import UserError, whole

Chosen = TypeVar("Chosen")


def knob(
    default: Any = dataclasses.MISSING,
    *,
    among: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    repeat: bool = False,
) -> Any:
    """Return a field of a dataclass that is a flag.

    Args:
        default: its default, and the flag's.
        among: values that it may have, or that the values of a tuple may have; empty: all.
        least: lower bound of a number; None: none.
        most: upper bound of a number; None: none.
        repeat: the flag is repeated for each value of a tuple; otherwise its values are joined by commas.
    """
    return dataclasses.field(
        default=default, metadata={"among": tuple(among), "least": least, "most": most, "repeat": repeat}
    )


def _texts(cls: type) -> dict[str, str]:
    """Return what a class's docstring says of its attributes."""
    section = re.split(r"\n[A-Z]\w+:\n", (inspect.getdoc(cls) or "").partition("Attributes:\n")[2])[0]
    found = re.findall(r"^    (\w+): ((?:.|\n(?!    \w))*)", section, re.MULTILINE)
    return {name: text[0].upper() + " ".join(text[1:].split()) for name, text in found}


def define(cls: type, *names: str, named: Mapping[str, str] | None = None, **defaults: Any) -> None:
    """Define a flag for each of some fields of a class.

    Args:
        cls: dataclass with such fields.
        names: the fields; none: all.
        named: names of flags by field; others have the field's name.
        defaults: defaults of some fields' flags; default: those of the fields.
    """
    texts, hints = _texts(cls), typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if names and field.name not in names:
            continue
        flag, text, meta = (named or {}).get(field.name, field.name), texts[field.name], field.metadata
        default = defaults.get(field.name, None if field.default is dataclasses.MISSING else field.default)
        bounds: dict[str, Any] = {"lower_bound": meta.get("least"), "upper_bound": meta.get("most")}
        hint, *_ = [kind for kind in typing.get_args(hints[field.name]) or [hints[field.name]] if kind is not ...]
        if typing.get_origin(hints[field.name]) is tuple:
            values = [str(value) for value in default or ()]
            text += f" Of {', '.join(meta['among'])}." if meta.get("among") else ""
            (flags.DEFINE_multi_string if meta.get("repeat") else flags.DEFINE_list)(flag, values, text)
        elif meta.get("among"):
            flags.DEFINE_enum(flag, default, list(meta["among"]), text)
        elif hint is bool:
            flags.DEFINE_bool(flag, default, text)
        elif hint is int:
            flags.DEFINE_integer(flag, default, text, **bounds)
        elif hint is float:
            flags.DEFINE_float(flag, default, text, **bounds)
        else:
            flags.DEFINE_string(flag, default, text)


def given(cls: type[Chosen], *, named: Mapping[str, str] | None = None, **more: Any) -> Chosen:
    """Return a class's options as the flags give them.

    Args:
        cls: dataclass whose fields are flags.
        named: names of flags by field; others have the field's name.
        more: values of other fields, or in place of flags'.

    Raises:
        UserError: a flag is no list of numbers, or the class refuses a value.
    """
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        flag = (named or {}).get(field.name, field.name)
        if field.name in more or flag not in flags.FLAGS:
            continue
        value = getattr(flags.FLAGS, flag)
        more[field.name] = tuple(value) if isinstance(value, list) else value
        if hints[field.name] == tuple[int, ...]:
            more[field.name] = integers(flag, value)
    return cls(**more)


def integers(flag: str, words: Sequence[str]) -> tuple[int, ...]:
    """Return the numbers of a flag.

    Raises:
        UserError: they are no positive integers.
    """
    if not all(whole(word.strip()) for word in words):
        raise UserError(f"--{flag} must be positive integers joined by commas, got {','.join(words)}")
    return tuple(map(int, words))


def check(options: Any, *but: str) -> None:
    """Require that options are within their bounds, whether flags or a program gave them.

    Args:
        options: dataclass with such fields.
        but: fields that are left out.

    Raises:
        UserError: one is not.
    """
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        name, value, meta = field.name, getattr(options, field.name), field.metadata
        if name in but or not meta:
            continue
        known, least, most = ", ".join(meta["among"]), meta["least"], meta["most"]
        if isinstance(value, tuple):
            if hints[name] == tuple[int, ...] and not all(type(each) is int and each > 0 for each in value):
                listed = ",".join(map(str, value))
                raise UserError(f"--{name} must be positive integers joined by commas, got {listed}")
            unknown = [each for each in value if known and each not in meta["among"]]
            if unknown or (known and not value):
                raise UserError(f"--{name} must be some of {known}, got {repr(unknown[0]) if unknown else 'none'}")
        elif known and value not in meta["among"]:
            raise UserError(f"--{name} must be one of {known}, got {value!r}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"--{name} must be a number, got {value}")
        elif least is not None and most is not None and not least <= value <= most:
            raise UserError(f"--{name} must be {least:g} to {most:g}, got {value:g}")
        elif least is not None and value < least:
            raise UserError(f"--{name} must be at least {least:g}, got {value:g}")
