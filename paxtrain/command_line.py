"""The command line of every main: bad flags and bad input become one sentence on stderr and exit code 2."""

import re
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from absl import app, flags, logging

from paxtrain.errors import PREFIX, UserError
from paxtrain.process import sealed, setup

OVERRIDES = "overrides are written --config.section.key=value"


def sentence(error: Exception) -> str:
    """Return an error's text in one line, without control characters and with long words cut."""
    text = re.sub(r"\S{200,}", lambda found: f"{found[0][:60]}... ({len(found[0])} characters)", str(error))
    return sealed.printable(" ".join(text.split()), 2000)


def fail(error: Exception) -> NoReturn:
    """Print the error's sentence and exit with code 2."""
    print(f"{PREFIX}{sentence(error)}", file=sys.stderr, flush=True)
    sys.exit(2)


def parse_flags(argv: Sequence[str], define_flags: Callable[[], None]) -> list[str]:
    """Define flags, parse a command line and return its other arguments; a mistake in it ends the process.

    Args:
        argv: command line, with the program's name.
        define_flags: function that defines the flags.
    """
    # config_flags loads the configuration file while flags are defined or parsed, so these errors concern the
    # command line. If the file is missing, the last line of its message names the file and the reason.
    for argument in argv:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            fail(UserError(f"the argument {argument!r} is not UTF-8 text; write it in UTF-8"))
    try:
        define_flags()
        return flags.FLAGS(argv)
    except UserError as error:
        fail(error)
    except OSError as error:
        reason = str(error).splitlines()[-1].strip()
        fail(UserError(f"cannot load the configuration file ({reason}); name one such as configs/tiny.py"))
    except (AttributeError, KeyError) as error:
        fail(UserError(f"no such configuration key: {error.args[0]}; write --config.section.key=value"))
    except (flags.Error, TypeError, ValueError, ImportError, SyntaxError) as error:
        fail(error)


def run(
    main: Callable[[Sequence[str]], None], define_flags: Callable[[], None] = lambda: None, hint: str | None = None
) -> None:
    """Run an absl main; bad flags and any UserError become one sentence on stderr and exit code 2.

    Args:
        main: function of the command line without its flags.
        define_flags: function that defines the flags whose definition can fail, such as a configuration file's.
        hint: what to write instead of a positional argument; None allows positional arguments.
    """
    logging.set_verbosity(logging.WARNING)
    setup.use_one_blas_thread()

    def guarded(argv: Sequence[str]) -> None:
        try:
            if hint is not None and len(argv) > 1:
                raise UserError(f"unexpected argument {argv[1]!r}; {hint}")
            main(argv)
        except UserError as error:
            fail(error)

    if any(".compress." in argument for argument in sys.argv):
        from paxtrain.config.options import flat_argument  # it needs numpy, and supervisors start without

        sys.argv[1:] = map(flat_argument, sys.argv[1:])
    with setup.quiet_orbax():
        app.run(guarded, flags_parser=lambda argv: parse_flags(argv, define_flags))
