"""Architectures of one's own, by package.module:Class, and the check of their tables."""

import collections
import functools
import importlib
import re

from paxtrain.config import ModelConfig
from paxtrain.config.checks import require
from paxtrain.errors import UserError
from paxtrain.model.spec import Architecture, Parameter, sizes


@functools.cache
def imported(path: str) -> Architecture:
    """Return the architecture whose class is at package.module:Class.

    Raises:
        UserError: it cannot be imported, or is no architecture.
    """
    module, _, name = path.partition(":")
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UserError(f"model.module={path} cannot be imported ({error}); put its package on PYTHONPATH") from error
    except (Exception, SystemExit) as error:  # the module is a user's
        raise UserError(
            f"model.module={path} cannot be imported: its module raises {type(error).__name__}: {error}"
        ) from error
    require(
        isinstance(kind, type) and issubclass(kind, Architecture),
        f"model.module={path} is no architecture; derive its class from paxtrain.model.spec.Architecture",
    )
    return kind()


def check(rows: tuple[Parameter, ...], config: ModelConfig) -> None:
    """Require that a table of parameters can be laid out, initialized and trained.

    Raises:
        UserError: it cannot.
    """
    of, known = f"model.module={config.module}", sizes(config)
    for path, times in collections.Counter(p.path for p in rows).items():
        require(times == 1, f"{of} has the parameter {path} {times} times; give each a path of its own")
    for p in rows:
        require(
            re.fullmatch(r"layers/\w+/\w+|embedding/(token|position)|final_norm/\w+", p.path) is not None,
            f"{of} has the parameter {p.path}; paths are layers/MODULE/NAME, embedding/token, embedding/position and "
            "final_norm/NAME",
        )
        strange = [x for dim in p.own for x in dim.split("*") if x not in known and not x.isdecimal()]
        require(
            not strange,
            f"{of}: {p.path} has the dim {', '.join(strange)}; known are {', '.join(known)}, numbers, and products "
            "such as heads*head",
        )
        require(
            (p.lead == "layers") == (p.names[0] == "layers") and len(p.own) > 0,
            f"{of}: {p.path} has the dims {p.dims!r}; those of layers begin with layers, and no others do",
        )
    missing = {"embedding/token", "final_norm/scale"} - {p.path for p in rows}
    require(not missing, f"{of} lacks {' and '.join(sorted(missing))}, which embedding and head need")
