"""Documents read from text and .jsonl files, and the choice of those that are held out."""

import dataclasses
import glob
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from paxtrain.errors import UserError

# Third-party code, tests, and tables of code points; some 10 MB of prose and code remain.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
# Sequence sizes are int32 in the format, and a token is at least a byte.
_LARGEST_DOCUMENT = 2**31 - 2
# Folders of the whole machine and of the kernel: no corpus, and some files there have no end.
_NO_CORPUS = ("/", "/dev", "/proc", "/sys")


def stdlib_files() -> list[str]:
    """Return the files of this Python's standard library without its tests: about 10 MB of text, no download."""
    root = Path(sysconfig.get_path("stdlib"))
    return [str(path) for path in sorted(root.rglob("*.py")) if not _NOT_STDLIB & {*path.relative_to(root).parts}]


def input_files(inputs: Sequence[str]) -> list[str]:
    """Return the files named by paths, folders, globs and "stdlib", each once.

    A folder names all files below it except hidden ones.

    Raises:
        UserError: there are no inputs, or one of them names no file, or the whole machine.
    """
    if not inputs:
        raise UserError("--input is empty; name text files, folders or globs, or `stdlib`")
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if (folder := _walked(name)) in _NO_CORPUS:
            raise UserError(f"--input={name} would read all below {folder}, which is no text; name a narrower folder")
        if name == "stdlib":
            found = stdlib_files()
        elif os.path.isfile(name):
            found = [name]
        elif os.path.isdir(name):
            inside = (file for file in sorted(path.rglob("*")) if file.is_file())
            found = [str(file) for file in inside if not _hidden(file.relative_to(path))]
        else:
            found = [file for file in sorted(glob.glob(name, recursive=True)) if os.path.isfile(file)]
        if not found:
            raise UserError(f"--input={name} names no files; it takes text files, folders or globs, or `stdlib`")
        files += found
    once: dict[str, str] = {}
    for file in files:
        # A document under two names could be both held out and trained on.
        once.setdefault(os.path.realpath(file), file)
    return list(once.values())


def _walked(name: str) -> str | None:
    """Return the folder below which an input names files at all depths, without links; None for other inputs."""
    if os.path.isdir(name):
        return os.path.realpath(name)
    above = Path(name.partition("**")[0] + "x").parent if "**" in name else None
    return None if above is None or glob.has_magic(str(above)) else os.path.realpath(above)


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _decode(raw: bytes, path: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset + error.start} "
            f"({error.reason}); convert the file or leave it out of --input"
        ) from error


def _json_text(line: str, where: str, key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        raise UserError(f"{where} is JSON that cannot be read: {error}") from error
    if not isinstance(record, dict) or key not in record:
        found = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where} has no key {key!r} but {found}; name the key of the text with --json_key")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where} has {type(text).__name__} under {key!r} instead of a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half of a surrogate pair in its text, which is not valid Unicode") from error
    return text


def _file_documents(path: str, json_key: str) -> Iterator[str]:
    with open(path, "rb") as file:
        if not path.endswith(".jsonl"):
            yield _decode(file.read(), path, 0)
            return
        offset = 0
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset)
            offset += len(line)
            if text.strip():
                yield _json_text(text, f"{path}, line {number},", json_key)


def documents(files: Sequence[str], json_key: str = "text") -> Iterator[str]:
    """Yield the documents of all files in order, without empty ones.

    Args:
        files: paths of text files, each of which is one document, and .jsonl files with one document a line.
        json_key: key of the text in the objects of .jsonl files.

    Raises:
        UserError: a file cannot be read, is not UTF-8, or a .jsonl line holds no object with a text under `json_key`.
    """
    for path in files:
        try:
            if os.path.getsize(path) > _LARGEST_DOCUMENT and not path.endswith(".jsonl"):
                raise UserError(
                    f"{path} is larger than {_LARGEST_DOCUMENT} bytes, too large for one document; split it"
                )
            yield from filter(None, _file_documents(path, json_key))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, some of which are held out for validation; `split` makes it.

    Attributes:
        files: paths of the files, see `documents`.
        json_key: key of the text in the objects of .jsonl files.
        held_out: indices of the documents that are held out.
        cut: character from which a single document is held out; 0 if there are several documents.
        characters: number of characters of all documents.
    """

    files: Sequence[str]
    json_key: str
    held_out: frozenset[int]
    cut: int
    characters: int

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, held out) for each document."""
        for index, text in enumerate(documents(self.files, self.json_key)):
            if self.cut:
                yield text[: self.cut], False
                yield text[self.cut :], True
            else:
                yield text, index in self.held_out

    def training(self) -> Iterator[str]:
        """Yield the text that is not held out."""
        yield from (text for text, held_out in self if not held_out)


def split(files: Sequence[str], json_key: str, fraction: float, seed: int) -> Corpus:
    """Choose the held-out documents.

    This reads everything once, so that bad input is refused before anything is written.

    Args:
        files: paths of the files, see `documents`.
        json_key: key of the text in the objects of .jsonl files.
        fraction: share that is held out, between 0 and 1: of the documents, or of the text of a single document.
        seed: seed of the choice.

    Raises:
        UserError: the input is unusable (see `documents`), or has fewer than two characters.
    """
    lengths = [len(text) for text in tqdm(documents(files, json_key), "reading", unit=" documents", disable=None)]
    count, characters = len(lengths), sum(lengths)
    if characters < 2:
        raise UserError(f"--input has {characters} characters of text; training and validation need at least one each")
    share = round((characters if count == 1 else count) * fraction)
    if count == 1:
        return Corpus(files, json_key, frozenset(), characters - min(max(share, 1), characters - 1), characters)
    chosen = np.random.default_rng(seed).choice(count, min(max(share, 1), count - 1), replace=False)
    return Corpus(files, json_key, frozenset(chosen.tolist()), 0, characters)
