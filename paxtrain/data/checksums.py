"""SHA-256 of token files: PREFIX.sha256 holds those of PREFIX.bin and PREFIX.idx, in the format of `sha256sum`.

`sha256sum --check train.sha256` in the folder of the data verifies them, too.
"""

import hashlib
import os
import re
from collections.abc import Iterable

from paxtrain.errors import UserError

_LINE = re.compile(r"([0-9a-f]{64}) [ *](\S.*)")
_AGAIN = "prepare the data set again, or remove the .sha256 if you have changed its files"


def sidecar(prefix: str) -> str:
    """Return the path of the checksums of a data set."""
    return f"{prefix}.sha256"


def text(sums: Iterable[tuple[str, str]]) -> str:
    """Return the content of a file of checksums, from pairs of a checksum and a file's name."""
    return "".join(f"{digest}  {name}\n" for digest, name in sums)


def digest(path: str) -> str:
    """Return the SHA-256 of a file in hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(prefix: str) -> dict[str, str]:
    """Return the checksums of a data set by the suffixes of its files, which may have been renamed with it.

    Raises:
        UserError: The file of checksums is damaged.
    """
    path = sidecar(prefix)
    try:
        with open(path) as file:
            lines = [_LINE.fullmatch(line.rstrip("\n")) for line in file.read(1 << 16).splitlines()]
    except UnicodeDecodeError:
        lines = [None]
    found = {os.path.splitext(line[2])[1]: line[1] for line in lines if line}
    if None in lines or len(lines) != 2 or found.keys() != {".bin", ".idx"}:
        raise UserError(f"{path} is damaged: it must hold the SHA-256 of a .bin and of its .idx; {_AGAIN}")
    return found


def verify(prefix: str, *, most: int | None = None) -> bool:
    """Compare the files of a data set with their checksums.

    Args:
        prefix: path without ".bin" and ".idx".
        most: most bytes to read; a larger data set is not verified. None: any number.

    Returns:
        Whether the files were verified; False if there are no checksums or too many bytes.

    Raises:
        UserError: A file differs from its checksum, or the checksums are damaged.
        OSError: A file cannot be read.
    """
    paths = [f"{prefix}.bin", f"{prefix}.idx"]
    if not os.path.isfile(sidecar(prefix)) or (most is not None and sum(map(os.path.getsize, paths)) > most):
        return False
    known = _read(prefix)
    for path in paths:
        if digest(path) != known[os.path.splitext(path)[1]]:
            raise UserError(f"{path} is damaged: its SHA-256 is not the one in {sidecar(prefix)}; {_AGAIN}")
    return True


def require(prefix: str) -> None:
    """Compare the files of a data set with their checksums.

    Raises:
        UserError: A file differs from its checksum, the checksums are damaged, or there are none.
        OSError: A file cannot be read.
    """
    if not verify(prefix):
        raise UserError(f"there is no {sidecar(prefix)} to verify {prefix}.bin and .idx with; prepare the data again")
