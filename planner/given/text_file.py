"""Text that users copied from a terminal or a file: any encoding, any line ends, with colors; gzipped or not."""

import codecs
import gzip
import pathlib
import re
import zlib

from paxtrain.errors import UserError

MOST = 256 << 20  # bytes that are read of a file, after it is unpacked
_BYTE_ORDER_MARKS = {codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
_COLOR = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def read(path: str | pathlib.Path, kind: str, most: int = MOST) -> str:
    """Return the text of a file, without the codes of colors.

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
