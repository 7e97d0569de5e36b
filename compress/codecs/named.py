"""Codecs by name: one of the library's, or any class as package.module:Class, with its options."""

import dataclasses
import importlib
import types
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from compress.codec import Codec, missing_methods


class LibraryCodec(NamedTuple):
    """A codec of the library.

    Attributes:
        path: its class, as package.module:Class.
        fixed: options that its name stands for.
    """

    path: str
    fixed: Mapping[str, object] = types.MappingProxyType({})


# Low rank is here for its options; the trainer makes it from the configuration's ranks.
LOW_RANK = "lowrank"
NAMES = {
    "fp8": LibraryCodec("compress.codecs.float8:Float8Blocks"),
    "identity": LibraryCodec("compress.codec:Identity"),
    "int4": LibraryCodec("compress.codecs.quantised:QuantisedBlocks", {"bits": 4}),
    "int8": LibraryCodec("compress.codecs.quantised:QuantisedBlocks", {"bits": 8}),
    "remainder": LibraryCodec("compress.codecs.remainder:LowRankRemainder"),
    "sign": LibraryCodec("compress.codecs.sign:Signs"),
    "topk": LibraryCodec("compress.codecs.topk:TopK"),
}


# Types of an option whose values are told apart here.
_TYPES = (bool, int, float, str, tuple, list, dict, types.NoneType)


def known() -> str:
    """Return what can be written as the name of a codec, as a phrase."""
    return f"{', '.join(sorted([*NAMES, LOW_RANK]))} or package.module:Class"


def build(name: str, options: Mapping[str, object], protocols: tuple[type, ...] = (Codec,)) -> Any:
    """Return the codec of a name, with its options.

    Args:
        name: one of NAMES, or a class as package.module:Class; a dataclass, whose fields are the options.
        options: values by option.
        protocols: Protocols of which the codec must have one; the first one is named in messages.

    Raises:
        ValueError: there is no such codec, it cannot be imported, or an option is unknown or does not fit; the message
            begins with the name.
    """
    entry = NAMES.get(name) or LibraryCodec(name)
    kind = _imported(name, entry.path)
    fields = {field.name: field for field in dataclasses.fields(kind) if field.init}
    free = sorted(fields.keys() - entry.fixed.keys())
    hints = _hints(name, kind) if options else {}
    given = dict(entry.fixed)
    for key, value in options.items():
        if key not in free:
            raise ValueError(f"{name} has no option {key!r}; {_options(free)}")
        given[key] = _typed(name, key, value, hints[key])
    missing = [key for key in free if key not in given and _required(fields[key])]
    if missing:
        raise ValueError(f"{name} needs the option {missing[0]}; {_options(free)}")
    try:
        made = kind(**given)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    except Exception as error:  # the class is a user's
        raise ValueError(f"{name} raises {type(error).__name__}: {error}") from error
    if not isinstance(made, protocols):
        raise ValueError(f"{name} is no codec: {missing_methods(made, protocols[0])}")
    return made


def _imported(name: str, path: str) -> type:
    """Return the class at a path."""
    module, colon, attribute = path.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{name} is no codec; known are {known()}")
    try:
        kind = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{name} cannot be imported ({error}); put its package on PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # the module is a user's
        raise ValueError(f"{name} cannot be imported: its module raises {type(error).__name__}: {error}") from error
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        raise ValueError(f"{name} is no dataclass; write its class with @dataclasses.dataclass(frozen=True)")
    if kind.__hash__ is None:
        raise ValueError(f"{name} is not frozen; write its class with @dataclasses.dataclass(frozen=True)")
    return kind


def _hints(name: str, kind: type) -> dict[str, Any]:
    """Return the types of a class's fields."""
    try:
        return typing.get_type_hints(kind)
    except Exception as error:  # the annotations are a user's
        raise ValueError(
            f"{name} has annotations that cannot be read ({type(error).__name__}: {error}); import what they name at "
            "run time too, not under TYPE_CHECKING alone"
        ) from error


def _options(names: list[str]) -> str:
    """Return which options there are, as a phrase."""
    return f"its options are {', '.join(names)}" if names else "it has none"


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed(name: str, key: str, value: object, hint: object) -> object:
    """Return an option's value in its type."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [typing.get_origin(one) or one for one in (typing.get_args(hint) if union else (hint,))]
    if float in kinds and int not in kinds and type(value) is int:
        return float(value)
    if isinstance(value, list):
        value = tuple(value)
    # The class judges values of other types, such as those of a Literal.
    if all(kind in _TYPES for kind in kinds) and type(value) not in kinds:
        words = " or ".join("None" if kind is types.NoneType else kind.__name__ for kind in kinds)
        raise ValueError(f"{name} takes {key} of type {words}, got {value!r}")
    return value
