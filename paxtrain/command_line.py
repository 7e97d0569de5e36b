"""The command line of every main: bad flags and bad input become one sentence on stderr and exit code 2.

A main whose output nobody reads any more, as with `| head`, ends quietly, as SIGPIPE would end it.
`--help` lists the flags that the main defines, in groups, and not those of the libraries; `--helpfull` lists all.
"""

import contextlib
import difflib
import os
import re
import select
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from absl import app, flags, logging
from ml_collections import ConfigDict, config_flags

from paxtrain.config.load import JSON, close, errors_of, recorded, require_names
from paxtrain.errors import PREFIX, UserError, printable, told
from paxtrain.files import find
from paxtrain.process import setup

OVERRIDES = "overrides are written --config.section.key=value"
_SUGGESTED = 3  # keys of the configuration that stand for a wrong flag
UNREAD = 141  # exit code of a process that SIGPIPE ends
_COLUMN = 26  # at which `--help` begins to describe a flag
# What Python and absl say of a flag's value, and what is said instead.
_PLAINLY = {
    r"invalid literal for int\(\) with base 10: (.*)": r"\1 is no integer",
    r"could not convert string to float: (.*)": r"\1 is no number",
    r"flag (--\w+)=None: Flag --\w+ must have a value other than None\.": r"\1 is missing; --help says what it is",
    r"Found (.*) in argv before a value for (--\w+) was specified": r"\1 changes what \2 names; put \2=FILE first",
    r"\('Non-boolean argument to boolean flag', (.*)\)": r"\1 is neither True nor False",
}
_titles: dict[str, str] = {}  # of the groups in `--help`, by the names of flags
_configurations: list[str] = []  # names of the flags that `define_config` has defined


def sentence(error: Exception | str) -> str:
    """Return an error or its text in one line, without control characters and with long words cut."""
    text = re.sub(r"\S{200,}", lambda found: f"{found[0][:60]}... ({len(found[0])} characters)", str(error))
    return printable(" ".join(text.split()), 2000)


def fail(error: Exception) -> NoReturn:
    """Print the error's sentence and exit with code 2."""
    print(f"{PREFIX}{sentence(error)}", file=sys.stderr, flush=True)
    sys.exit(2)


@contextlib.contextmanager
def group(title: str) -> Iterator[None]:
    """List the flags that the block defines under a title in `--help`, unless they have one already."""
    before = set(flags.FLAGS)
    yield
    for name in set(flags.FLAGS) - before:
        _titles.setdefault(name, title)


def _described(flag: flags.Flag) -> str:
    """Return the lines about a flag in `--help`."""
    name = f"  --[no]{flag.name}" if flag.boolean else f"  --{flag.name}"
    text = " ".join((flag.help or "").split())
    if flag.default not in (None, "", [], False):
        text += f" (default: {(flag.default_as_str or '').strip(chr(39))})"
    width = max(60, min(100, shutil.get_terminal_size().columns))
    lines = textwrap.wrap(text, width - _COLUMN) or [""]
    first = f"{name:<{_COLUMN}}{lines[0]}" if len(name) < _COLUMN else f"{name}\n{' ' * _COLUMN}{lines[0]}"
    return "\n".join([first, *(" " * _COLUMN + line for line in lines[1:])])


def _help(about: str, names: Sequence[str]) -> str:
    """Return what `--help` prints."""
    by_title: dict[str, list[str]] = {"Flags": []}
    for name in names:
        by_title.setdefault(_titles.get(name, "Flags"), []).append(_described(flags.FLAGS[name]))
    groups = ["\n".join([f"{title}:", *lines]) for title, lines in by_title.items() if lines]
    return "\n\n".join([about.strip(), *groups, "--helpfull lists the flags of the libraries, too."])


class _HelpFlag(flags.BooleanFlag):
    """The flag --help, instead of absl's, which knows only the flags of the main's own file."""

    def __init__(self, name: str, about: str, names: Sequence[str]) -> None:
        super().__init__(name, False, "show the program's own flags", allow_override=True)
        self._about, self._names = about, names

    def parse(self, argument: str | bool) -> None:
        super().parse(argument)
        if self.value:
            print(_help(self._about, self._names))
            sys.exit(0)


def _check_numbers(argv: Sequence[str]) -> None:
    """Require that numbers are written with ASCII digits; int() and float() take those of all scripts, and 1_0.

    Raises:
        UserError: the value of a flag is not.
    """
    for argument, after in zip(argv[1:], [*argv[2:], ""]):
        if argument == "--":
            return
        name, equals, value = argument.lstrip("-").partition("=")
        value = value if equals else after
        flag = flags.FLAGS[name] if argument.startswith("-") and name in flags.FLAGS else None
        if flag is not None and flag.flag_type() in ("int", "float") and not (value.isascii() and "_" not in value):
            raise UserError(f"--{name}={value} is no number; write it with the digits 0 to 9 alone")


def _configuration() -> str:
    """Return the name of the flag for the configuration; "" if the program has none."""
    return _configurations[0] if _configurations else ""


def _instead(name: str, own: Sequence[str]) -> str:
    """Return what a flag that does not exist may stand for, in words.

    Args:
        name: the flag.
        own: the program's own flags.
    """
    section, like = _configuration(), [f"--{each}" for each in difflib.get_close_matches(name, own, cutoff=0.8)]
    if section and not like:
        like = [f"--{section}.{key}" for key in close(name.removeprefix(f"{section}."))[:_SUGGESTED]]
    return f"did you mean {' or '.join(like)}?" if like else "--help lists the flags"


def _positional(argument: str) -> str:
    """Return which flag an argument without one may be the value of, in words, with a stop; "" if none."""
    section = _configuration()
    if not section:
        return ""
    if "=" in argument:
        return f"write --{section}.{argument} if it is an override; "
    return f"write --{section}={argument} if it is the {'model' if section == 'model' else 'configuration'}; "


def parse_flags(argv: Sequence[str], define_flags: Callable[[], None], about: str = "") -> list[str]:
    """Define flags, parse a command line and return its other arguments; a mistake in it ends the process.

    Args:
        argv: command line, with the program's name.
        define_flags: function that defines the flags.
        about: what `--help` prints above them.
    """
    # config_flags loads the configuration file while flags are defined or parsed, so these errors concern the
    # command line. If the file is missing, the last line of its message names the file and the reason.
    for argument in argv:
        if any("\ud800" <= character <= "\udfff" for character in argument):
            fail(UserError(f"the argument {argument!r} is not UTF-8 text; write it in UTF-8"))
    before = set(flags.FLAGS)
    _configurations.clear()
    try:
        define_flags()
        names = [name for name in flags.FLAGS if name not in before and "." not in name]
        for name in ("help", "helpshort"):
            flags.DEFINE_flag(_HelpFlag(name, about, names))
        others = flags.FLAGS(argv)
        _check_numbers(argv)
        return others
    except UserError as error:
        fail(error)
    except BrokenPipeError:  # of --help
        raise
    except OSError as error:
        reason = str(error).splitlines()[-1].strip()
        fail(UserError(f"cannot load the configuration file ({reason}); name one such as configs/tiny.py or tiny"))
    except (AttributeError, KeyError) as error:
        key = re.sub(r"\nDid you mean (.*) instead of.*", r" (did you mean \1?)", str(error.args[0]))
        key = key.rpartition("lookup: ")[2]
        fail(UserError(f"no such configuration key: {key}; write --{_configuration()}.section.key=value"))
    except flags.UnrecognizedFlagError as error:
        fail(UserError(f"{str(error).partition('. Did')[0]}; {_instead(error.flagname, names)}"))
    except flags.Error as error:
        text = str(error)
        for pattern, plain in _PLAINLY.items():
            text = re.sub(pattern, plain, text)
        fail(UserError(text))
    except (TypeError, ValueError, ImportError, SyntaxError) as error:
        fail(error)


def define_config(name: str, default: str | None, description: str) -> None:
    """Define a flag for a configuration file, given by its path or by the name of a shipped one.

    Overrides of unknown keys are accepted, so that `from_dict` can name the valid ones.

    Args:
        name: name of the flag; `--name.section.key=value` overrides a value.
        default: name of a shipped file; None if the flag may be left out.
        description: help text of the flag.
    """
    _configurations.append(name)
    config_flags.DEFINE_config_file(
        name, default and find(default), description, lock_config=False, accept_new_attributes=True
    )
    parser = flags.FLAGS[name].parser
    load: Callable[[Any], Any] = parser.parse

    def parse(path: Any) -> Any:
        if not isinstance(path, str):
            return load(path)
        resolved = _resolved(path)
        file = resolved.partition(":")[0]
        if file.endswith(JSON):
            return ConfigDict(recorded(file))
        with errors_of(file), _no_bytecode():
            loaded = load(resolved)
        if loaded is None:
            raise UserError(f"get_config() of {file} returns None; it must return a ConfigDict, as in configs/tiny.py")
        require_names(loaded, file)
        return ConfigDict(loaded) if isinstance(loaded, dict) else loaded

    parser.parse = parse  # type: ignore[method-assign,assignment]  # ml_collections has no hook for paths
    if default is not None:
        # A file that cannot be loaded raises when it is first used, which is here, while flags are parsed.
        requirement = "get_config() must return a ConfigDict"
        flags.register_validator(name, lambda config: hasattr(config, "items"), requirement)


@contextlib.contextmanager
def _no_bytecode() -> Iterator[None]:
    """Keep Python from writing what it compiles beside a configuration, into a folder of the user's."""
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        yield
    finally:
        sys.dont_write_bytecode = before


def _resolved(path: str) -> str:
    file, colon, argument = path.partition(":")
    return find(file) + colon + argument


def _unread(failed: bool) -> bool:
    """Return whether stdout or stderr is a pipe that nobody reads; nothing reaches it any more.

    Args:
        failed: whether a write has failed; its stream may have nothing left to write, so the pipe itself is asked.
    """
    found = False
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
            pipe = select.poll()
            pipe.register(stream.fileno(), 0)
            lost = failed and any(event & select.POLLERR for _, event in pipe.poll(0))
        except BrokenPipeError:
            lost = True
        except OSError:  # a disk is full, which Python says at its end
            lost = False
        if lost:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        found |= lost
    return found


@contextlib.contextmanager
def ends_with_its_reader() -> Iterator[None]:
    """End the process quietly, with exit code 141, if the block prints to a pipe that nobody reads any more."""
    try:
        yield
    except (BrokenPipeError, SystemExit) as end:
        if not _unread(isinstance(end, BrokenPipeError)):
            raise
    else:
        if not _unread(failed=False):
            return
    sys.exit(UNREAD)


def run(
    main: Callable[[Sequence[str]], None],
    define_flags: Callable[[], None] = lambda: None,
    hint: str | None = None,
    argv: list[str] | None = None,
) -> None:
    """Run an absl main; bad flags and any UserError become one sentence on stderr and exit code 2.

    Args:
        main: function of the command line without its flags; its module's docstring is part of `--help`.
        define_flags: function that defines the flags.
        hint: what to write instead of a positional argument; None allows positional arguments.
        argv: command line, with the program's name; None: that of the process.
    """
    logging.set_verbosity(logging.WARNING)
    setup.use_one_blas_thread()

    def guarded(argv: Sequence[str]) -> None:
        try:
            if hint is not None and len(argv) > 1:
                raise UserError(f"unexpected argument {argv[1]!r}; {_positional(argv[1])}{hint}")
            main(argv)
        except Exception as error:
            found = told(error)
            if found is None:
                raise
            text, code = found
            print(f"{PREFIX}{sentence(text)}", file=sys.stderr, flush=True)
            sys.exit(code)

    with ends_with_its_reader(), setup.quiet_orbax():
        about = getattr(main, "__globals__", {}).get("__doc__") or ""
        app.run(guarded, argv, flags_parser=lambda argv: parse_flags(argv, define_flags, about))
