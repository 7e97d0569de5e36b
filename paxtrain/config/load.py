"""Configurations from mappings, and from files for programs that have no flags."""

import contextlib
import dataclasses
import difflib
import importlib
import json
import pathlib
import sys
import traceback
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from paxtrain.config.checks import require, shown
from paxtrain.config.config import Config
from paxtrain.config.options import OptionValues
from paxtrain.config.parallel import MeshConfig
from paxtrain.errors import UserError
from paxtrain.files import find, read_json

Section = TypeVar("Section")
_TYPE = "model_type"  # is in each config.json of Hugging Face's layout
_ALIKE = 0.8  # similarity of two names, of which one is told for the other
JSON = ".json"  # ends the name of a configuration that a run has recorded


def read_section(cls: type[Section], values: object, path: str) -> Section:
    """Return a section, or the whole configuration, made from a mapping of its fields.

    Args:
        cls: dataclass of the section.
        values: values by key; keys left out keep their defaults.
        path: name of the section, for messages; "" for the whole configuration.

    Raises:
        UserError: the values are no mapping, a key is unknown, or a value has another type or is out of bounds.
    """
    items = getattr(values, "items", None)  # a ConfigDict is no Mapping
    if items is None:
        raise UserError(f"{path or 'the configuration'} must be a mapping, got {shown(values)}")
    hints = {name: hint for name, hint in typing.get_type_hints(cls).items() if typing.get_origin(hint) is not ClassVar}
    kwargs: dict[str, object] = {}
    for key, value in renewed(cls, dict(items())).items():
        name = f"{path}.{key}" if path else key
        meant = "" if key in hints else _meant(name, list(hints))
        require(key in hints, f"unknown configuration key {name}{meant}; known here: {', '.join(sorted(hints))}")
        kwargs[key] = _value(hints[key], value, name)
    missing = [f.name for f in dataclasses.fields(cls) if _required(f) and f.name not in kwargs]  # type: ignore[arg-type]
    where = f" in {path}" if path else ""
    require(not missing, f"{', '.join(missing)} missing{where}; known here: {', '.join(sorted(hints))}")
    return cls(**kwargs)


def keys(cls: type = Config, path: str = "") -> Iterator[str]:
    """Yield the dotted key of every value of a section, or of the whole configuration."""
    for name, hint in typing.get_type_hints(cls).items():
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            yield from keys(hint, f"{path}{name}.")
        elif typing.get_origin(hint) is not ClassVar:
            yield path + name


def close(name: str) -> list[str]:
    """Return the keys that end like a wrong one or its end, if any do, and else those that are spelled like it."""
    every, last = list(keys()), name.rpartition(".")[2]
    ends = [key for key in every if f".{key}".endswith(f".{name}")] or [
        key for key in every if key.rpartition(".")[2] == last
    ]
    like = difflib.get_close_matches(last, list(dict.fromkeys(key.rpartition(".")[2] for key in every)), cutoff=_ALIKE)
    return ends or [key for name in like for key in every if key.rpartition(".")[2] == name]


def _meant(name: str, here: Sequence[str]) -> str:
    """Return the key that a wrong one stands for, in brackets; "" if none is known.

    Args:
        name: the wrong key.
        here: the names in its section.
    """
    path, point, last = name.rpartition(".")
    like = [path + point + one for one in difflib.get_close_matches(last, here, cutoff=_ALIKE)] or close(name)
    return f" (did you mean {like[0]}?)" if like else ""


def renewed(cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Return a section's values by today's names, given those that an earlier version may have recorded."""
    return cls.renewed(values) if hasattr(cls, "renewed") else values


def _required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _value(hint: Any, value: Any, name: str) -> object:
    """Return a value of the type of its field: a section, a tuple of such values from a list, or a plain value."""
    if isinstance(hint, types.UnionType):  # a section that may be left out
        [hint] = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return read_section(hint, value, name)
    origin, kinds = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is tuple:
        require(isinstance(value, list), f"{name} must be a list, got {shown(value)}")
        each = kinds[:1] * len(value) if kinds[-1] is ... else kinds
        require(len(each) == len(value), f"{name} must have {len(each)} values, got {len(value)}")
        return tuple(_value(kind, one, f"{name}[{i}]") for i, (kind, one) in enumerate(zip(each, value)))
    if hint is OptionValues and hasattr(value, "items"):
        value = OptionValues(value.items())
    if hint is float and type(value) is int:
        require(abs(value) <= sys.float_info.max, f"{name} must be a finite number, got {shown(value)}")
        value = float(value)
    require(type(value) is origin, f"{name} must be of type {origin.__name__}, got {shown(value)}")
    return value


@contextlib.contextmanager
def errors_of(file: str) -> Iterator[None]:
    """Turn an exception of a configuration file, which is Python, into a sentence with its file and line.

    Raises:
        UserError: The block has raised anything but KeyboardInterrupt.
    """
    try:
        yield
    except (KeyboardInterrupt, UserError):
        raise
    except BaseException as error:  # SystemExit, too: a file must not end the program as if all were well
        # ml_collections raises TypeError and ValueError again, with the traceback in their text.
        cause = error.__context__ if isinstance(error, TypeError | ValueError) and error.__context__ else error
        lines = [frame.lineno for frame in traceback.extract_tb(cause.__traceback__) if frame.filename == file]
        if isinstance(cause, SyntaxError) and cause.lineno is not None:
            lines = [cause.lineno]
        where = f", line {lines[-1]}" if lines else ""
        text = cause.msg if isinstance(cause, SyntaxError) else str(cause)
        raise UserError(
            f"the configuration file {file}{where} raises {type(cause).__name__}{f': {text}' if text else ''}; "
            "get_config() must return a ConfigDict, as in configs/tiny.py"
        ) from error


def require_names(values: object, file: str) -> None:
    """Require that all keys of what a configuration file returns are strings.

    ml_collections sorts the keys of a section when it is read, and would fail on those that cannot be compared.

    Raises:
        UserError: a key is none.
    """
    seen: set[int] = set()  # a section may hold itself
    waiting = [values]
    while waiting:
        section = waiting.pop()
        if id(section) in seen or not hasattr(section, "items"):
            continue
        seen.add(id(section))
        try:
            items = dict(section.items())
            wrong = [shown(key) for key in items if not isinstance(key, str)]
        except TypeError:  # sorting has failed
            items, wrong = {}, ["keys of several types"]
        if wrong:
            raise UserError(f"keys in get_config() of {file} must be strings, as in configs/tiny.py, got {wrong[0]}")
        waiting += items.values()


def from_dict(values: object) -> Config:
    """Return the Config that a (possibly partial) mapping of sections describes.

    Args:
        values: a dict or ConfigDict; sections and keys left out keep their defaults.

    Raises:
        UserError: a key is unknown, a value has another type, or values do not fit each other.
    """
    return read_section(Config, values, "")


def to_dict(config: Config) -> dict[str, Any]:
    """Return the nested dict of plain values that `from_dict` reads."""
    return dataclasses.asdict(config)


def nested(given: Mapping[str, Any], values: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return values by dotted key, such as {"mesh.pipe": 2}, as the nested dict of sections that `from_dict` reads.

    Args:
        given: values by dotted key.
        values: nested dict that they replace values of, in place; None: an empty one.

    Raises:
        UserError: a key goes through a value.
    """
    values = {} if values is None else values
    for key, value in given.items():
        *sections, last = key.split(".")
        place = values
        for section in sections:
            place = place.setdefault(section, {})
            if not isinstance(place, dict):
                raise UserError(f"unknown configuration key {key}; {section} is a value, not a section")
        place[last] = value
    return values


def recorded(path: str) -> dict[str, Any]:
    """Return the values of a configuration in JSON: as a run writes it into its folder, or as Hugging Face has it.

    Raises:
        UserError: the file cannot be read, or has no values by section, or describes a model that is not implemented.
    """

    def parse(values: object) -> dict[str, Any]:
        if not isinstance(values, dict):
            raise UserError(f"must be an object of sections, got {shown(values)}")
        mesh = values.get("mesh")
        return {**values, "mesh": renewed(MeshConfig, mesh)} if isinstance(mesh, dict) else values

    values = read_json(
        path,
        "configuration",
        "name the config.json of a run's folder or of a model, or a file as configs/tiny.py",
        parse,
    )
    if _TYPE in values:  # the room that knows these words is above this one
        return importlib.import_module("paxtrain.huggingface.described").configuration(values, path)
    return values


def described(name: str) -> bool:
    """Return whether a configuration's name leads to a model's config.json in Hugging Face's layout."""
    path = pathlib.Path(find(name))
    return path.suffix == JSON and path.exists() and _TYPE in json.loads(path.read_text())


def load_config(name: str, overrides: Mapping[str, Any] | None = None, *, model: str = "") -> Config:
    """Return the configuration of a file, with some of its values replaced.

    Args:
        name: path of a file that defines `get_config()`, of a run's folder or its config.json, or of a model's in
            Hugging Face's layout; or the name of a shipped file, such as "gpt_8b".
        overrides: values by dotted key, such as {"mesh.pipe": 2}.
        model: architecture of one's own, as package.module:Class; "": the file's.

    Raises:
        UserError: there is no such file, it has no `get_config()`, or a key or value does not fit.
    """
    path = find(name)
    values = recorded(path) if path.endswith(JSON) else _executed(path)
    return from_dict(nested({**({"model.module": model} if model else {}), **(overrides or {})}, values))


def _executed(path: str) -> dict[str, Any]:
    """Return the values of a configuration that a file of Python makes."""
    try:
        source = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot load the configuration {path} ({error}); name a file such as configs/tiny.py, or tiny"
        ) from error
    found: dict[str, Any] = {"__file__": path, "__name__": "config"}
    with errors_of(path):
        exec(compile(source, path, "exec"), found)  # noqa: S102  # configurations are code
        if not callable(found.get("get_config")):
            raise UserError(f"{path} defines no get_config(); write it as configs/tiny.py does")
        made = found["get_config"]()
        require_names(made, path)
        return made.to_dict()
