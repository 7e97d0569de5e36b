"""Bad input: its error, one sentence for the user, whole numbers that users write, and libraries that are not there.

`command_line` prints the sentence and exits with code 2. `command` writes the commands that sentences name.
"""

import errno
import importlib
import os
import pathlib
import shlex
import shutil
import sys
from types import ModuleType

MOST_SECONDS = 1e9  # thirty years; timers and XLA's flags take little more
PREFIX = "error: "  # begins the sentence
_SCRIPTS = {"paxtrain": "paxtrain", "planner": "paxplan"}  # console scripts by package
# Their commands whose names are not those of the modules.
_COMMANDS = {"paxtrain.huggingface export": "export", "paxtrain.testing": "check"}


class UserError(Exception):
    """Bad input: the message is one sentence that says what is wrong, what was given and what would work."""


class LostError(Exception):
    """Another process that is missing or does not answer, in one sentence; a later start may succeed."""


def printable(text: str, most: int = 2000) -> str:
    """Return a text from elsewhere in one line and without control characters, which terminals would obey."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in text[:most])


def is_full(error: BaseException | None) -> bool:
    """Return whether an exception, or one that it follows from, says that a disk is full."""
    seen = 0
    while error is not None and seen < 20:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT)):  # in tensorstore's words
            return True
        error, seen = error.__cause__ or error.__context__, seen + 1
    return False


def told(error: Exception) -> tuple[str, int] | None:
    """Return what to tell the user of an error and the exit code; None if it is an error of the program.

    Bad input has code 2. A full disk and a lost process have 1: a later start may succeed.
    """
    if isinstance(error, UserError):
        return str(error), 2
    if isinstance(error, LostError):
        return str(error), 1
    if is_full(error):
        return f"the disk is full: {error}; make room, and start the same command again", 1
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        path = str(error.filename)
        return f"there is no file of a name of {len(path)} characters, {path[:40]!r}...; name a shorter path", 2
    return None


def whole(text: str, most: int = 2**31 - 1) -> int | None:
    """Return the number that a text of digits is; None if it is anything else or above `most`.

    Python's own int() also takes 1_0, +1, blanks and digits of all scripts.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= 19):
        return None
    number = int(text)
    return number if number <= most else None


def library(name: str, why: str) -> ModuleType:
    """Return a module of a library that only some runs need, and so is not among the requirements.

    Args:
        name: name of the module.
        why: what needs it, as the beginning of a sentence.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        needed = name.partition(".")[0]
        raise UserError(f"{why}, which needs {needed} ({error}); pip install {needed}") from error


def _typed(program: str) -> str:
    """Return a program as a shell finds it takes it here: its name, its path from this folder or its whole path."""
    found = shutil.which(os.path.basename(program))
    if not os.path.isabs(program) or (found and os.path.abspath(found) == program):
        return shlex.quote(program if not os.path.isabs(program) else os.path.basename(program))
    below = pathlib.Path(program).is_relative_to(pathlib.Path.cwd())
    return shlex.quote(os.path.relpath(program) if below else program)


def _script() -> str:
    """Return the path of the console script that has started this process; "" if `python -m` has."""
    return sys.argv[0] if os.path.basename(sys.argv[0]) in _SCRIPTS.values() else ""


def command(module: str) -> str:
    """Return how the user can start a main: by the console script or the interpreter that runs now.

    Args:
        module: module of the main, such as "paxtrain.sample", and what always follows it.
    """
    if not (script := _script()):
        return f"{_typed(sys.executable or 'python')} -m {module}"
    package, _, name = module.partition(".")
    return f"{_typed(os.path.join(os.path.dirname(script), _SCRIPTS[package]))} {_COMMANDS.get(module, name)}"


def started() -> str:
    """Return the command that has started this process, for the user to type again."""
    if script := _script():
        return f"{_typed(script)} {shlex.join(sys.argv[1:])}"
    return f"{_typed(sys.executable or 'python')} {shlex.join(sys.orig_argv[1:])}"
