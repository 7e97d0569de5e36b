"""Architectures by their family, and of one's own by package.module:Class; the check of their tables."""

import collections
import contextlib
import functools
import importlib
import math
import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import get_args

from paxtrain.config import ModelConfig
from paxtrain.config.axes import AXES, layer_axes
from paxtrain.config.checks import OUT, choice, require
from paxtrain.errors import UserError
from paxtrain.model.spec import Architecture, Aux, Init, Parameter, Role, vocabulary

_OPTIONS = "model.options"


@functools.cache
def shipped(family: str) -> Architecture:
    """Return the architecture of a family: the class in the file of this name in paxtrain/architectures."""
    module = importlib.import_module(f"paxtrain.architectures.{family}")  # whose files import this room
    [kind] = (one for one in vars(module).values() if _is_architecture(one) and one.__module__ == module.__name__)
    return kind()


@functools.cache
def imported(path: str) -> Architecture:
    """Return the architecture whose class is at package.module:Class.

    Raises:
        UserError: it cannot be imported, or is no architecture.
    """
    module, _, name = path.partition(":")
    try:
        found = importlib.import_module(module)
    except (ImportError, ValueError) as error:  # a ValueError is that of an empty name
        way = "put its package on PYTHONPATH" if name else "write package.module:Class"
        raise UserError(f"model.module={path} cannot be imported ({error}); {way}") from error
    except (Exception, SystemExit) as error:  # the module is a user's
        raise UserError(
            f"model.module={path} cannot be imported: its module raises {type(error).__name__}: {error}"
        ) from error
    require(name != "", f"model.module={path} has no class; write package.module:Class")
    classes = [key for key, value in vars(found).items() if _is_architecture(value)]
    has = ", ".join(classes) or "no architecture"
    require(hasattr(found, name), f"model.module={path}: the module {module} has no class {name}; it has {has}")
    kind = getattr(found, name)
    require(
        isinstance(kind, type) and issubclass(kind, Architecture),
        f"model.module={path} is no architecture; derive its class from paxtrain.model.spec.Architecture",
    )
    try:
        return kind()
    except TypeError as error:
        raise UserError(f"model.module={path} must be made without arguments ({error})") from error


def _is_architecture(value: object) -> bool:
    """Return whether something of a module is a class of one's own."""
    return isinstance(value, type) and issubclass(value, Architecture) and value is not Architecture


@contextlib.contextmanager
def errors_of(config: ModelConfig, what: str) -> Iterator[None]:
    """Turn an exception of an architecture of one's own into a sentence with its line.

    Args:
        config: the model's shape.
        what: what of it runs, such as "layer()".

    Raises:
        UserError: the block has raised an exception.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if not config.module:
            raise
        # A layer may be inherited from a class of another file.
        bases = filter(_is_architecture, type(imported(config.module)).__mro__)
        files = [getattr(sys.modules.get(one.__module__), "__file__", None) for one in bases]
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
        where = f" in line {frames[-1].lineno}" if frames else ""
        if frames and frames[-1].filename != files[0]:
            where += f" of {os.path.basename(frames[-1].filename)}"
        text = str(error).partition("\n")[0]
        raise UserError(
            f"model.module={config.module}: its {what} raises {type(error).__name__}{where}: {text}"
        ) from error


def check(rows: tuple[Parameter, ...], config: ModelConfig) -> None:
    """Require that a table of parameters can be laid out, initialized, trained and named.

    Raises:
        UserError: it cannot.
    """
    of = f"model.module={config.module}"
    require(
        all(isinstance(p, Parameter) for p in rows),
        f"{of}: its parameters() must return a tuple of paxtrain.model.spec.Parameter",
    )
    for path, times in collections.Counter(p.path for p in rows).items():
        require(times == 1, f"{of} has the parameter {path} {times} times; give each a path of its own")
    for p in rows:
        _check_place(p, config, of)
        _check_dims(p, config, f"{of}: {p.path}")
        _check_names(p, f"{of}: {p.path}")
    for name, times in collections.Counter(name for p in rows for name in p.sources).items():
        shared = all(p.role in ("kernel", "bias") and len(p.sources) == 1 for p in rows if name in p.sources)
        require(
            times == 1 or shared,
            f"{of} has the name {name} of Hugging Face's files {times} times; only kernels or biases share an array",
        )
    missing = {"embedding/token", "final_norm/scale"} - {p.path for p in rows}
    require(not missing, f"{of} lacks {' and '.join(sorted(missing))}, which embedding and head need")


def check_options(one: Architecture, config: ModelConfig) -> None:
    """Require that the options of a model are its architecture's, and of the types of their defaults.

    Raises:
        UserError: they are not.
    """
    of = config.module or f"a {config.family}"
    for name, value in config.options.items():
        has = ", ".join(one.options) or "no options"
        require(name in one.options, f"model.options.{name} is no option of {of}, which has {has}", {_OPTIONS: OUT})
        usual = one.options[name]
        same = type(value) is type(usual) or (type(usual) is float and type(value) is int)
        require(
            same and (isinstance(value, str) or math.isfinite(value)),
            f"model.options.{name} of {of} must be as {usual!r} is, got {value!r}",
        )


def check_kinds(kinds: tuple[str, ...], rows: tuple[Parameter, ...], config: ModelConfig) -> None:
    """Require a kind for each layer, and that parameters are of kinds that there are.

    Raises:
        UserError: a layer has none, or no layer has a parameter's.
    """
    of = f"model.module={config.module}: its kinds()"
    require(
        len(kinds) == config.layers and all(isinstance(kind, str) for kind in kinds),
        f"{of} returns {len(kinds)} kinds for model.layers={config.layers}; it must return a string for each layer",
    )
    for p in rows:
        missing = sorted(set(p.kinds) - set(kinds))
        require(
            not missing and (not p.kinds or p.lead == "layers"),
            f"{of} lacks {', '.join(missing)}, of which {p.path} is; it has {', '.join(map(repr, sorted(set(kinds))))}"
            if missing
            else f"model.module={config.module}: {p.path} is of the kinds {', '.join(p.kinds)}; only layers have kinds",
        )


def check_aux(scalars: tuple[Aux, ...], config: ModelConfig) -> None:
    """Require that scalars of a layer have names and weights.

    Raises:
        UserError: one has none.
    """
    of = f"model.module={config.module}: its aux()"
    require(all(isinstance(one, Aux) for one in scalars), f"{of} must return a tuple of paxtrain.model.spec.Aux")
    for name, times in collections.Counter(one.name for one in scalars).items():
        require(times == 1, f"{of} has the name {name} {times} times; give each scalar a name of its own")
    for one in scalars:
        require(
            isinstance(one.name, str) and re.fullmatch(r"\w+", one.name) is not None,
            f"{of} has the name {one.name!r}; letters, digits and underscores would work",
        )
        require(
            isinstance(one.weight, int | float) and math.isfinite(one.weight),
            f"{of} gives {one.name} the weight {one.weight!r}; a finite number would work",
        )


def _check_place(p: Parameter, config: ModelConfig, of: str) -> None:
    """Require that a parameter lies where embedding, layer or head read it, shaped as they read it."""
    outside = {
        "embedding/token": vocabulary(config).dims,
        "embedding/position": "positions embed",
        "final_norm/scale": "embed",
        "final_norm/bias": "embed",
    }
    require(
        p.path in outside or re.fullmatch(r"layers/\w+/\w+", p.path) is not None,
        f"{of} has the parameter {p.path}; paths are layers/MODULE/NAME and {', '.join(outside)}",
    )
    wanted = outside.get(p.path, p.dims)
    require(p.dims == wanted, f"{of}: {p.path} has the dims {p.dims!r}; {wanted!r} would work")
    require(
        (p.lead == "layers") == (p.names[0] == "layers") and len(p.own) > 0,
        f"{of}: {p.path} has the dims {p.dims!r}; those of layers begin with layers, and no others do",
    )


def _check_dims(p: Parameter, config: ModelConfig, of: str) -> None:
    """Require that dims, role and init of a parameter are known, and that axes can split it."""
    known = config.dims
    factors = [dim.split("*") for dim in p.own]
    strange = [x for some in factors for x in some if x not in known and not x.isdecimal()]
    require(
        not strange,
        f"{of} has the dim {', '.join(strange)}; known are {', '.join(known)}, numbers, and products such as "
        "heads*head",
    )
    for axis in layer_axes():
        dims = AXES[axis].dims
        split = [(place, x) for some in factors for place, x in enumerate(some) if x in dims]
        require(
            not any(place for place, _ in split),
            f"{of} has the dims {p.dims!r}; {axis} splits the first factor of a product, so {', '.join(dims)} come "
            "first there, or a number is a dim by itself",
        )
        require(
            len(split) < 2,
            f"{of} has the dims {p.dims!r}, of which {axis} could split {' and '.join(x for _, x in split)}; write "
            "the size of one as a number",
        )
    choice(f"{of}: its role", p.role, get_args(Role))
    choice(f"{of}: its init", p.init, get_args(Init))
    require(
        p.role not in ("kernel", "table") or len(p.own) > 1,
        f"{of} is a {p.role} with the dims {p.dims!r}; a {p.role} has two or more besides layers, a norm or bias one",
    )


def _check_names(p: Parameter, of: str) -> None:
    """Require as many names in Hugging Face's files as arrays of a layer, and {} in those of layers."""
    if not p.files:
        return
    stacked = p.own[p.stack] if p.stack is not None else "2" if p.lead == "tables" else "1"
    require(
        len(p.sources) == int(stacked),
        f"{of} has {len(p.sources)} names in Hugging Face's files for {stacked} arrays stacked by {p.dims!r}",
    )
    require(
        p.lead != "layers" or all("{}" in name for name in p.sources),
        f"{of} has the name {p.files} in Hugging Face's files; one of layers has {{}} for the layer's number",
    )
