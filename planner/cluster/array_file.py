"""Matrices of links in an .npz, whose headers are checked before anything is allocated.

numpy allocates what a header says, whatever the file contains, and leaves a member's checksum unread if the header asks
for less than the member has.
"""

import math
import pathlib
import zipfile
import zlib
from typing import IO

import numpy as np

from paxtrain.errors import UserError

_MOST_BYTES = 8 << 30  # of all arrays
_MOST_HEADER = 1024  # bytes
# What zipfile, zlib and numpy raise on damaged files.
_DAMAGED = (OSError, ValueError, TypeError, EOFError, RuntimeError, SyntaxError, zipfile.BadZipFile, zlib.error)
_KINDS = "fiub"  # floating point numbers, integers and truth values


def _header(name: str, member: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Return shape, order and dtype of an array, and leave the file at its first number.

    Raises:
        ValueError: it is no array of numbers.
    """
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"{name} is of version {version} of numpy's format, known are 1.0 and 2.0")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(member, max_header_size=_MOST_HEADER)
    if dtype.kind not in _KINDS:
        raise ValueError(f"{name} holds {dtype}, and must hold numbers or truth values")
    return shape, fortran, dtype


def _array(archive: zipfile.ZipFile, info: zipfile.ZipInfo, hosts: int) -> np.ndarray:
    """Return the array of a member.

    Raises:
        ValueError: its shape is not one of a matrix of links, or its content is not that of its header.
    """
    name = info.filename.removesuffix(".npy")
    with archive.open(info) as member:
        shape, fortran, dtype = _header(name, member)
        if len(shape) > 3 or shape[-2:] not in ((), (hosts, hosts)):
            given = " x ".join(map(str, shape))
            raise ValueError(f"{name} must be a matrix of {hosts} x {hosts} for the {hosts} hosts, got {given}")
        size = math.prod(shape) * dtype.itemsize
        if size != info.file_size - member.tell():
            raise ValueError(f"the header of {name} says {size} bytes, but there are {info.file_size - member.tell()}")
        content = member.read()  # to the end, where its checksum is compared
    if len(content) != size:
        raise ValueError(f"{name} has {len(content)} bytes instead of {size}")
    return np.frombuffer(content, dtype).reshape(shape, order="F" if fortran else "C")


def read(path: pathlib.Path, hosts: int) -> dict[str, np.ndarray]:
    """Return the arrays of a file by name.

    Args:
        path: the .npz.
        hosts: number of hosts; arrays are numbers, matrices [hosts, hosts] or several of them.

    Raises:
        UserError: the file cannot be read, or an array is damaged, of another shape or too large.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            total = sum(info.file_size for info in members)
            if total > _MOST_BYTES:
                raise ValueError(f"its arrays have {total:,} bytes, at most {_MOST_BYTES:,} are read")
            return {info.filename.removesuffix(".npy"): _array(archive, info, hosts) for info in members}
    except _DAMAGED as error:
        raise UserError(f"cannot read links.npz={path} ({error}); it must hold alpha and bandwidth") from error
