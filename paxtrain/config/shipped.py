"""Files that come with the project, found by name from any folder: configurations and clusters."""

import difflib
import importlib.util
import pathlib

from paxtrain.errors import UserError


def folder() -> pathlib.Path:
    """Return the folder `configs`, of this checkout or of the installed package.

    Raises:
        UserError: the package `configs` is not installed.
    """
    found = importlib.util.find_spec("configs")
    if found is None or not found.submodule_search_locations:
        raise UserError("the package configs is not installed beside paxtrain; name a file by its path")
    return pathlib.Path(next(iter(found.submodule_search_locations)))


def names(kind: str, suffix: str) -> list[str]:
    """Return the names of the shipped files of a kind.

    Args:
        kind: folder in `configs`; "" for the configurations themselves.
        suffix: ".py" or ".json".
    """
    return sorted(path.stem for path in (folder() / kind).glob(f"*{suffix}") if path.stem not in ("base", "__init__"))


def find(name: str, kind: str = "", suffix: str = ".py") -> str:
    """Return the path of a shipped file by its bare name; a path comes back unchanged.

    Args:
        name: bare name such as "gpt_8b", or a path: any name with a folder or a suffix, or of an existing file.
        kind: folder in `configs`; "" for the configurations themselves.
        suffix: ".py" or ".json".

    Raises:
        UserError: no shipped file has this name.
    """
    path = pathlib.Path(name)
    if len(name) > 4096 or any(len(part) > 255 for part in path.parts):
        raise UserError(f"there is no file of a name of {len(name)} characters, {name[:40]!r}...; name a shorter path")
    if not name or path.suffix or len(path.parts) > 1 or path.exists():
        return name
    known = names(kind, suffix)
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        first = f"did you mean {' or '.join(close)}? " if close else ""
        raise UserError(f"there is no shipped file {name!r}; {first}take one of {', '.join(known)}, or name a path")
    return str(folder() / kind / f"{name}{suffix}")
