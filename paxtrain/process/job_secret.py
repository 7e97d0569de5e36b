"""The secret that all processes of a job share, by which they know each other on ports that anybody can reach.

Launchers make it. It travels in the environment, or in a file that only its owner can read; never on a command line,
which every user of a host can see.
"""

import os
import pathlib
import re
import secrets
import stat
from collections.abc import Mapping

from paxtrain.errors import UserError

VARIABLE = "PAXTRAIN_JOB_SECRET"
FILE_VARIABLE = "PAXTRAIN_JOB_SECRET_FILE"
HOW = f"export {VARIABLE}=$(openssl rand -hex 32) before all of them are started"
_BYTES = 32
_LEAST = 16  # characters


def make() -> str:
    """Return a new secret as text."""
    return secrets.token_hex(_BYTES)


def _read(path: pathlib.Path) -> str:
    try:
        with path.open(encoding="ascii", errors="strict") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                raise UserError(
                    f"others can read the job's secret, {FILE_VARIABLE}={path} (mode {mode:03o}); say chmod 600 {path}"
                )
            return file.read(4096)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no plain text"
        raise UserError(
            f"cannot read the job's secret, {FILE_VARIABLE}={path} ({why}); name a file of mode 0600 with at least "
            f"{_LEAST} characters"
        ) from error


def find(environment: Mapping[str, str]) -> bytes | None:
    """Return the job's secret, or None if the environment has none.

    Raises:
        UserError: The secret is short, or its file cannot be read or can be read by others.
    """
    text, where = environment.get(VARIABLE, ""), VARIABLE
    if not text and (path := environment.get(FILE_VARIABLE, "")):
        text, where = _read(pathlib.Path(path)), f"{FILE_VARIABLE}={path}"
    text = text.strip()
    if not text:
        return None
    if not re.fullmatch(rf"[!-~]{{{_LEAST},}}", text):
        raise UserError(
            f"the job's secret in {where} must be at least {_LEAST} letters and digits in one line, got {len(text)} "
            f"characters; {HOW}"
        )
    return text.encode()
