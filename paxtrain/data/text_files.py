"""Texts of one file: JSON lines, JSON, Parquet, or plain text, as it is or compressed by gzip or Zstandard."""

import codecs
import contextlib
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO

from backports import zstd

from paxtrain.errors import UserError, library

# Sequence sizes are int32 in token files, and a token is at least a byte.
_LARGEST_DOCUMENT = 2**31 - 2
# Names of files that hold JSON lines; others hold what their content says.
_LINES = (".jsonl", ".jsonlines", ".ndjson")
_GZIP, _ZSTD = (".gz", b"\x1f\x8b"), (".zst", b"\x28\xb5\x2f\xfd")  # ends of names, beginnings of content
_PARQUET = (".parquet", b"PAR1")
_ROWS = 1024  # of a Parquet file that are in memory at once
_NAME_IT = "name the one of the text with --json_key, or in a run with data.json_key"


def _is(path: str, kind: tuple[str, bytes]) -> bool:
    """Return whether the name or the content says that a file is of a kind."""
    suffix, magic = kind
    if path.lower().endswith(suffix):
        return True
    with open(path, "rb") as file:
        return file.read(len(magic)) == magic


@contextlib.contextmanager
def _open(path: str) -> Iterator[BinaryIO]:
    """Open a file, and decompress it if it is compressed.

    Raises:
        UserError: it is compressed, and damaged.
    """
    opened: Callable[..., Any] = gzip.open if _is(path, _GZIP) else zstd.open if _is(path, _ZSTD) else open
    if opened is not open and not os.path.getsize(path):
        raise UserError(f"{path} is empty, which no compressed file is; write it again, or leave it out")
    try:
        with opened(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error, zstd.ZstdError) as error:
        raise UserError(f"{path} is damaged or cut off: {error}; write it again, or leave it out") from error


def _decode(raw: bytes, path: str, offset: int) -> str:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset + error.start} "
            f"({error.reason}); convert the file or leave it out of --input"
        ) from error
    return text if offset else text.removeprefix("\ufeff")


def _json(text: str, where: str) -> object:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        raise UserError(f"{where} is JSON that cannot be read: {error}") from error


def _record_text(record: object, where: str, key: str) -> str:
    if not isinstance(record, dict) or key not in record:
        found = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where} has no key {key!r} but {found}; {_NAME_IT}")
    return _text(record[key], where, key)


def _text(text: object, where: str, key: str) -> str:
    if not isinstance(text, str):
        raise UserError(f"{where} has {type(text).__name__} under {key!r} instead of a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half of a surrogate pair in its text, which is not valid Unicode") from error
    return text


def _has_lines(path: str, key: str) -> bool:
    """Return whether a file holds JSON lines: its name says so, or its first lines are objects.

    A single line must have the key, since files of other programs are a line of JSON, too.
    """
    name = path.lower()
    for suffix, _ in (_GZIP, _ZSTD):
        name = name.removesuffix(suffix)
    if name.endswith(_LINES):
        return True
    found: list[dict[str, object]] = []
    with _open(path) as file:
        for line in file:
            start = line.removeprefix(codecs.BOM_UTF8).strip()
            if not start:
                continue
            try:
                record = json.loads(start) if start.startswith(b"{") else None
            except (ValueError, RecursionError):
                record = None
            if not isinstance(record, dict):
                break
            found.append(record)
            if key in record or len(found) == 2:
                return True
    return False


def _whole(text: str, path: str, key: str) -> Iterator[str]:
    """Yield the texts of a file that is one object or an array of objects with the key; otherwise its whole text."""
    try:
        value = json.loads(text) if text.lstrip()[:1] in ("[", "{") else None
    except (ValueError, RecursionError):
        value = None
    records = value if isinstance(value, list) else [value]
    if not records or not isinstance(records[0], dict) or key not in records[0]:
        yield text
        return
    for number, record in enumerate(records, 1):
        yield _record_text(record, f"{path}, object {number},", key)


def _rows(path: str, column: str) -> Iterator[str]:
    """Yield the texts of a column of a Parquet file."""
    arrow, parquet = (library(name, f"{path} is a Parquet file") for name in ("pyarrow", "pyarrow.parquet"))
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if column not in names:
                raise UserError(f"{path} has no column {column!r} but the columns {', '.join(names)}; {_NAME_IT}")
            number = 0
            for batch in file.iter_batches(_ROWS, columns=[column]):
                for value in batch.column(0).to_pylist():
                    number += 1
                    yield _text(value, f"{path}, row {number},", column)
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read as Parquet: {error}; write it again, or leave it out") from error


def texts(path: str, json_key: str) -> Iterator[str]:
    """Yield the texts of a file in order, also empty ones.

    The content decides: JSON lines, an array of objects, one object and a Parquet file give a text for each object or
    row, and any other file is one text. A byte order mark in front is no part of the text.

    Args:
        path: path of the file.
        json_key: key of the text in the objects of JSON, and name of its column in Parquet.

    Raises:
        UserError: the file is damaged, is not UTF-8, or an object or row has no text under `json_key`.
        OSError: the file cannot be read.
    """
    if _is(path, _PARQUET):
        yield from _rows(path, json_key)
        return
    lines = _has_lines(path, json_key)
    with _open(path) as file:
        if not lines:
            large = os.path.getsize(path) > _LARGEST_DOCUMENT
            if large or len(raw := file.read()) > _LARGEST_DOCUMENT:
                raise UserError(
                    f"{path} is larger than {_LARGEST_DOCUMENT} bytes, too large for one document; split it"
                )
            yield from _whole(_decode(raw, path, 0), path, json_key)
            return
        offset = 0
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset)
            offset += len(line)
            if text.strip():
                where = f"{path}, line {number},"
                yield _record_text(_json(text, where), where, json_key)
