"""Files: written so that a crash leaves the old or the new, not half of each; JSON and text of users; shipped ones."""

import codecs
import contextlib
import difflib
import gzip
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from paxtrain.errors import UserError, is_full

Parsed = TypeVar("Parsed")
_MOST = 256 << 20  # bytes that are read of a user's text, after it is unpacked
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


@contextlib.contextmanager
def writable(where: str | pathlib.Path, instead: str) -> Iterator[None]:
    """Turn an error of the file system in the block into bad input; a full disk is none, and its error passes.

    Args:
        where: what cannot be written, for the sentence.
        instead: what would work.

    Raises:
        UserError: A file cannot be written; OSError: the disk is full.
    """
    try:
        yield
    except OSError as error:
        if is_full(error):
            raise
        raise UserError(f"cannot write to {where} ({error.strerror or error}); {instead}") from error


def sync_folder(folder: pathlib.Path) -> None:
    """Wait until the names in a folder are on disk, if its file system can say so.

    Raises:
        OSError: The folder cannot be opened.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # some file systems cannot
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync(path: str | pathlib.Path) -> None:
    """Wait until the content of a file is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _mode(path: pathlib.Path) -> int:
    """Return the mode of the file that is there, or the one that the user's umask gives a new file."""
    with contextlib.suppress(OSError):
        return path.stat().st_mode & 0o777
    umask = os.umask(0o077)
    os.umask(umask)
    return 0o666 & ~umask


@contextlib.contextmanager
def replacing(path: str | pathlib.Path) -> Iterator[pathlib.Path]:
    """Yield the path of an empty file beside `path`, which takes its place when the block ends without an exception.

    A crash or a loss of power at any moment leaves the old content or the new: what the block has written is on disk
    before it gets the name. A new file has the mode that the user's umask says, an old one keeps its own.

    Args:
        path: file to write; its folder exists.

    Raises:
        OSError: The file cannot be written; it is as it was.
    """
    path = pathlib.Path(path)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(descriptor)
    try:
        yield pathlib.Path(name)
        os.chmod(name, _mode(path))
        _sync(name)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    sync_folder(path.parent)


def write(path: str | pathlib.Path, content: str | bytes) -> None:
    """Write a file as `replacing` does. A file that has this content already is not touched.

    A device or a pipe, such as /dev/stdout, has no content to keep and is written itself.

    Args:
        path: file to write; its folder exists.
        content: bytes, or text in UTF-8.

    Raises:
        OSError: The file cannot be written; it is as it was.
    """
    path, content = pathlib.Path(path), content.encode() if isinstance(content, str) else content
    if path.exists() and not path.is_file():
        path.write_bytes(content)
        return
    with contextlib.suppress(OSError):
        if path.stat().st_size == len(content) and path.read_bytes() == content:
            return
    with replacing(path) as new:
        new.write_bytes(content)


def cache_folder(name: str) -> pathlib.Path:
    """Return one of this project's folders in the user's cache, XDG_CACHE_HOME or ~/.cache; it need not be there."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "paxtrain" / name


def kept_file(folder: str, key: object) -> pathlib.Path:
    """Return the file of the user's cache that keeps what follows from a key.

    Args:
        folder: one of this project's folders there.
        key: JSON values that stand for everything that the file's content depends on.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    return cache_folder(folder) / f"{name}.json"


def keep(path: pathlib.Path, value: object) -> None:
    """Write a value of JSON to a file of a cache; if that fails, do nothing.

    The file is written whole or not at all, because other processes read it.
    """
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, json.dumps({"digest": _digest(value), "value": value}))


def kept(path: pathlib.Path) -> Any:
    """Return the value that `keep` has written; None if it is not there, damaged, or of somebody else."""
    try:
        stored = json.loads(path.read_text())
        return stored["value"] if stored["digest"] == _digest(stored["value"]) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def fingerprint(*sources: str) -> str:
    """Return a fingerprint of some of this project's code.

    Args:
        sources: paths of modules and of folders with all their modules, from the project's root.
    """
    root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for source in sources:
        for path in sorted((root / source).rglob("*.py")) or [root / source]:
            digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def sync_tree(folder: str | pathlib.Path) -> None:
    """Wait until all files below a folder, and the folders themselves, are on disk.

    Other processes may write there at the same time. A file that they rename meanwhile is theirs to sync.

    Raises:
        OSError: A file could not be written.
    """
    for home, _, names in os.walk(folder, topdown=False):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                _sync(os.path.join(home, name))
        with contextlib.suppress(FileNotFoundError):
            sync_folder(pathlib.Path(home))


def read_json(path: str | pathlib.Path, kind: str, instead: str, parse: Callable[[object], Parsed]) -> Parsed:
    """Return what a user's file of JSON describes.

    Args:
        path: file to read.
        kind: what it should be, for messages, such as "plan".
        instead: what would work, for the message if it cannot be read.
        parse: function that makes it of the JSON's values, and raises UserError if they make no sense.

    Raises:
        UserError: the file cannot be read, or its values make no sense.
    """
    try:
        values = json.loads(pathlib.Path(path).read_text("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UserError(f"cannot read the {kind} {path} ({reason}); {instead}") from error
    try:
        return parse(values)
    except UserError as error:
        raise UserError(f"{kind} {path}: {error}") from error


def read_text(path: str | pathlib.Path, kind: str, most: int = _MOST) -> str:
    """Return the text that a user has copied from a terminal or a file: any encoding, without the codes of colors.

    PowerShell writes UTF-16. Bytes that are no UTF-8 become a sign that no reader here takes for a figure.

    Args:
        path: file to read, which may be gzipped.
        kind: what it should be, for messages, such as "nccl-tests log".
        most: bytes that it may have, after it is unpacked.

    Raises:
        UserError: the file cannot be read, is empty or is too large.
    """
    path = pathlib.Path(path)
    try:
        if path.exists() and not path.is_file():
            raise UserError(f"{path} is no file; name the {kind} itself")
        with path.open("rb") as file:
            packed = file.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            content = file.read(most + 1)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read the {kind} {path} ({reason}); name a file that can be read") from error
    if len(content) > most:
        raise UserError(f"the {kind} {path} has more than {most >> 20:,} MiB; give a part of it")
    encoding = next((name for mark, name in _BYTE_ORDER_MARKS.items() if content.startswith(mark)), "utf-8")
    text = _COLOR.sub("", content.decode(encoding, "replace"))
    if not text.strip():
        raise UserError(f"the {kind} {path} is empty; give what the program has printed")
    return text


def shipped_folder() -> pathlib.Path:
    """Return the folder `configs`, of this checkout or of the installed package.

    Raises:
        UserError: the package `configs` is not installed.
    """
    found = importlib.util.find_spec("configs")
    if found is None or not found.submodule_search_locations:
        raise UserError("the package configs is not installed beside paxtrain; name a file by its path")
    return pathlib.Path(next(iter(found.submodule_search_locations)))


def shipped_names(kind: str, suffix: str) -> list[str]:
    """Return the names of the shipped files of a kind.

    Args:
        kind: folder in `configs`; "" for the configurations themselves.
        suffix: ".py" or ".json".
    """
    return sorted(
        path.stem for path in (shipped_folder() / kind).glob(f"*{suffix}") if path.stem not in ("base", "__init__")
    )


def shipped_models() -> list[str]:
    """Return the names of the shipped folders with a model's config.json."""
    return sorted(path.parent.name for path in (shipped_folder() / "models").glob("*/config.json"))


def find(name: str, kind: str = "", suffix: str = ".py") -> str:
    """Return the path of a shipped file by its bare name; a path comes back unchanged, a folder's as its config.json.

    Args:
        name: bare name such as "gpt_8b" or "Qwen3-8B", or a path: any name with a folder or a suffix, or of an existing
            file.
        kind: folder in `configs`; "" for the configurations themselves.
        suffix: ".py" or ".json".

    Raises:
        UserError: no shipped file has this name.
    """
    path = pathlib.Path(name)
    if len(name) > 4096 or any(len(part) > 255 for part in path.parts):
        raise UserError(f"there is no file of a name of {len(name)} characters, {name[:40]!r}...; name a shorter path")
    if name and not kind and (path / "config.json").exists():
        return str(path / "config.json")
    if not kind and not path.exists() and name in shipped_models():
        return str(shipped_folder() / "models" / name / "config.json")
    if not name or path.suffix or len(path.parts) > 1 or path.exists():
        return name
    known = [*shipped_names(kind, suffix), *(() if kind else shipped_models())]
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3)
        first = f"did you mean {' or '.join(close)}? " if close else ""
        raise UserError(f"there is no shipped file {name!r}; {first}take one of {', '.join(known)}, or name a path")
    return str(shipped_folder() / kind / f"{name}{suffix}")
