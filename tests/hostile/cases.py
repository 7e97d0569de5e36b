"""The cases: command lines that work, with a value or two replaced in flags, in overrides or inside a file."""

import dataclasses
import functools
import pathlib
import random
from typing import Any

from tests.hostile.commands import MAINS, Main
from tests.hostile.corpus import HUGE, LOOKALIKES, NEGATIVE, NO_NUMBERS, TEXTS, damaged, refused


@dataclasses.dataclass
class Case:
    """A command line, the files that are changed for it, and whether it can mean nothing.

    Attributes:
        main: the main.
        arguments: its command line; {home} and {out} are replaced.
        files: content of the changed files, by name.
        nonsense: what must be refused; "" if the main may take it.
    """

    main: Main
    arguments: list[str]
    files: dict[str, bytes]
    nonsense: str = ""


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in values.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


@functools.cache
def keys() -> dict[str, Any]:
    """Return the keys of a configuration and their defaults."""
    from paxtrain.config import Config, to_dict

    return _flat(to_dict(Config()))


def _command(main: Main, arguments: dict[str, str]) -> list[str]:
    """Return a main's command line."""
    passed = [value for name, value in arguments.items() if name.startswith("--")]
    line = [f"--{name}={value}" for name, value in arguments.items() if not name.startswith("--")]
    tail = ["--", *passed] if passed else []
    if main.positional[:1] == ("--",):
        return [*line, *tail, *main.positional]
    return [*main.positional, *line, *tail]


def unchanged(main: Main) -> Case:
    """Return a main's command line as it works."""
    return Case(main, _command(main, main.arguments), {})


# Flags with an upper bound below 2**32, which must refuse whatever is above.
BOUNDED = ("cpu_devices", "num_processes", "process_id", "nodes", "gpus_per_node", "max_restarts", "signal_ahead")
BOUNDED += ("min_nodes", "port", "per_host", "global_batch", "vocab_size", "seeds", "workers", "repeats", "rounds")
PASSED = (
    "--no_such_flag=1",
    "--compress=foo",
    "--config.model.hiden=3",
    "--config.model.hidden=x",
    "--gpus=many",
    "--profile_seconds=nan",
    "--pipe=two",
)
LARGEST = HUGE[-1]  # which is above all floats, too


def _is_number(value: str) -> bool:
    """Return whether absl takes a value as a number in the digits 0 to 9."""
    return value not in (*NO_NUMBERS, *LOOKALIKES, LARGEST, "") or value == "0x10"


def _integer(rng: random.Random, name: str) -> tuple[str, bool]:
    """Return a value of a flag for whole numbers, and whether it can mean nothing."""
    value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, "1.5", ""])
    huge = name in BOUNDED and value in HUGE[1:]
    return value, huge or not _is_number(value) or value in ("1.5", "-0.5")


def _override(rng: random.Random, default: Any) -> tuple[str, bool]:
    """Return a value for a key of the configuration, and whether it can mean nothing."""
    value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, *TEXTS])
    if type(default) is int:
        return value, not _is_number(value) or value in ("18446744073709551616", "1.5", "-0.5")
    return value, type(default) is float and (not _is_number(value) or value == "0x10")


def _file(rng: random.Random, main: Main, home: pathlib.Path, hurt: dict[str, bytes]) -> str:
    """Change one of the files that a main reads, and return what must be refused in it, or ""."""
    found = sorted({p.relative_to(home).as_posix() for one in main.files for p in home.glob(one) if p.is_file()})
    name = rng.choice(found)
    content = (home / name).read_bytes()
    wrong = refused(rng, name, content) if rng.random() < 0.4 else None
    hurt[name], text = wrong or (damaged(rng, name, content), "")
    return text and f"{name}: {text}"


def _kinds(main: Main) -> list[str]:
    """Return what may be changed of a main, the more often the more of it there is."""
    kinds = [kind for kind in ("integers", "numbers", "texts") if getattr(main, kind)]
    kinds += ["files"] * (2 * bool(main.files)) + ["overrides"] * (4 * bool(main.overrides))
    return kinds + ["passed"] * (main.module == "planner.launch")


def case(number: int, home: pathlib.Path) -> Case:
    """Return the case of a number."""
    rng = random.Random(number)
    main = rng.choices(MAINS, [3 if main.overrides else 1 for main in MAINS])[0]
    arguments, files = dict(main.arguments), {}
    nonsense: dict[str, str] = {}  # by flag, by file or by argument that is passed on
    for _ in range(rng.choice([1, 1, 1, 2])):
        kind, wrong = rng.choice(_kinds(main)), False
        if kind == "files":
            before = set(files)
            text = _file(rng, main, home, files)
            if text:
                nonsense[text] = text
            if before:  # the second change of one file takes the place of the first
                nonsense = {name: each for name, each in nonsense.items() if each == text or ": " not in each}
            continue
        if kind == "passed":
            more = rng.choice(PASSED)
            arguments["--" if "--" in arguments else "-- "] = more
            if main.positional[0] != "kubernetes" or "config" not in more:
                nonsense[more] = more
            continue
        if kind == "integers":
            name = rng.choice(main.integers)
            value, wrong = _integer(rng, name)
        elif kind == "numbers":
            name = rng.choice(main.numbers)
            value = rng.choice([*HUGE, *NO_NUMBERS, *LOOKALIKES, *NEGATIVE, ""])
            wrong = not _is_number(value) or value == "0x10"
        elif kind == "texts":
            name, value = rng.choice(main.texts), rng.choice(TEXTS)
        else:
            key, default = rng.choice(sorted(keys().items(), key=lambda item: item[0]))
            name = f"{main.overrides}.{key}"
            value, wrong = _override(rng, default)
        arguments[name] = value
        nonsense.pop(name, None)
        if wrong:
            nonsense[name] = f"{name}={value}"
    return Case(main, _command(main, arguments), files, "; ".join(nonsense.values()))
