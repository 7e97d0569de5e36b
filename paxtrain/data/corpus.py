"""Documents read from files of text, and the choice of those that are held out."""

import dataclasses
import glob
import os
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from paxtrain.data.text_files import texts
from paxtrain.errors import UserError

# Third-party code, tests, and tables of code points; some 10 MB of prose and code remain.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
_SHOWN = 60  # characters of the first document that are shown
# Folders of the whole machine and of the kernel: no corpus, and some files there have no end.
_NO_CORPUS = ("/", "/dev", "/proc", "/sys")


def stdlib_files() -> list[str]:
    """Return the files of this Python's standard library without its tests: about 10 MB of text, no download."""
    root = Path(sysconfig.get_path("stdlib"))
    return [str(path) for path in sorted(root.rglob("*.py")) if not _NOT_STDLIB & {*path.relative_to(root).parts}]


def input_files(inputs: Sequence[str], key: str = "--input") -> list[str]:
    """Return the files named by paths, folders, globs and "stdlib", each once.

    A folder names all files below it except hidden ones.

    Args:
        inputs: paths, folders, globs and "stdlib".
        key: name of the setting that has them, for messages.

    Raises:
        UserError: there are no inputs, or one of them names no file, or the whole machine.
    """
    if not inputs:
        raise UserError(f"{key} is empty; name text files, folders or globs, or `stdlib`")
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if (folder := _walked(name)) in _NO_CORPUS:
            raise UserError(f"{key}={name} would read all below {folder}, which is no text; name a narrower folder")
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
            raise UserError(f"{key}={name} names no files; it takes text files, folders or globs, or `stdlib`")
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


def documents(files: Sequence[str], json_key: str = "text") -> Iterator[str]:
    """Yield the documents of all files in order, also empty ones; each is one of a file's `texts`.

    Args:
        files: paths of the files.
        json_key: key of the text in the objects of JSON, and name of its column in Parquet.

    Raises:
        UserError: a file cannot be read, or holds no texts, see `texts`.
    """
    for path in files:
        try:
            yield from texts(path, json_key)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents, some of which are held out for validation; `split` makes it.

    Attributes:
        files: paths of the files, see `documents`.
        json_key: key of the text in the objects of JSON, and name of its column in Parquet.
        held_out: indices of the documents that are held out.
        cut: character from which a single document is held out; 0 if there are several documents.
        characters: number of characters of all documents.
        documents: number of documents, without empty ones.
        empty: number of empty documents, which are left out.
        bytes: number of bytes of all documents.
        first: beginning of the first document.
    """

    files: Sequence[str]
    json_key: str
    held_out: frozenset[int]
    cut: int
    characters: int
    documents: int
    empty: int
    bytes: int
    first: str

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, held out) for each document."""
        for index, text in enumerate(filter(None, documents(self.files, self.json_key))):
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
        json_key: key of the text in the objects of JSON, and name of its column in Parquet.
        fraction: share that is held out, between 0 and 1: of the documents, or of the text of a single document.
        seed: seed of the choice.

    Raises:
        UserError: the input is unusable (see `documents`), or has fewer than two characters.
    """
    lengths, empty, size, first = [], 0, 0, ""
    for text in tqdm(documents(files, json_key), "reading", unit=" documents", disable=None):
        if not text:
            empty += 1
            continue
        first = first or text[:_SHOWN]
        lengths.append(len(text))
        size += len(text) if text.isascii() else len(text.encode("utf-8"))
    count, characters = len(lengths), sum(lengths)
    if characters < 2:
        raise UserError(f"--input has {characters} characters of text; training and validation need at least one each")
    share = round((characters if count == 1 else count) * fraction)
    cut, held_out = 0, frozenset[int]()
    if count == 1:
        cut = characters - min(max(share, 1), characters - 1)
    else:
        chosen = np.random.default_rng(seed).choice(count, min(max(share, 1), count - 1), replace=False)
        held_out = frozenset(chosen.tolist())
    return Corpus(files, json_key, held_out, cut, characters, count, empty, size, first)
