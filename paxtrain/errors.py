"""What a user did wrong, said in one sentence, and the exit code that goes with it."""

import sys
from collections.abc import Callable, Sequence

from absl import app, flags, logging


class UserError(Exception):
    """Bad input: the message is one sentence that says what is wrong, what was given and what would work."""


def fail(error: Exception) -> None:
    """Prints the sentence and leaves with exit code 2."""
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(2)


def _parse_flags(argv: Sequence[str]) -> list[str]:
    try:
        return flags.FLAGS(argv)
    except (flags.Error, AttributeError, KeyError, TypeError, ValueError, OSError, ImportError, SyntaxError) as error:
        # config_flags loads the configuration file while absl parses, so any of these is about the command line.
        fail(UserError(" ".join(str(error).split())))


def run(main: Callable[[Sequence[str]], None]) -> None:
    """Runs an absl main; bad flags and any UserError become one sentence on stderr and exit code 2."""

    logging.set_verbosity(logging.WARNING)

    def guarded(argv: Sequence[str]) -> None:
        try:
            main(argv)
        except UserError as error:
            fail(error)

    app.run(guarded, flags_parser=_parse_flags)
