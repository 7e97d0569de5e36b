"""The cases: command lines that work, with a value or two replaced in flags, in overrides or inside a file."""

import dataclasses
import functools
import pathlib
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.hostile.commands import Main
from tests.hostile.corpus import HUGE, LOOKALIKES, NEGATIVE, NO_NUMBERS, TEXTS, changed, either

NUMBERS = ["", *NEGATIVE, *NO_NUMBERS, *LOOKALIKES, *HUGE]
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


class Change(NamedTuple):
    """A change of a command line that works.

    Attributes:
        place: a flag, a file, or "--" for an argument that is passed on.
        value: the flag's value, the file's content, or the argument.
        nonsense: what must be refused; "" if a main may take it.
    """

    place: str
    value: str | bytes
    nonsense: str


@dataclasses.dataclass(frozen=True)
class Case:
    """A main and the changes of its command line and files."""

    main: Main
    changes: tuple[Change, ...] = ()

    @property
    def files(self) -> dict[str, bytes]:
        return {change.place: change.value for change in self.changes if isinstance(change.value, bytes)}

    @property
    def nonsense(self) -> str:
        return "; ".join(change.nonsense for change in self.changes if change.nonsense and not self._unnamed(change))

    def _unnamed(self, change: Change) -> bool:
        """Return whether a change is of a file that no flag names any more, since another change replaced its flag."""
        replaced = ",".join(self.main.arguments.get(other.place, "") for other in self.changes if other is not change)
        names = [word.removeprefix("{home}/") for word in replaced.split(",") if word.startswith("{home}/")]
        return isinstance(change.value, bytes) and change.place.startswith(tuple(names))

    def arguments(self, home: pathlib.Path, out: pathlib.Path) -> list[str]:
        """Return the command line, with the folder of the files and the one for what the main writes."""
        changed = {change.place: change.value for change in self.changes if isinstance(change.value, str)}
        passed = ["--", changed.pop("--")] if "--" in changed else []
        flags = [f"--{name}={value}" for name, value in (self.main.arguments | changed).items()]
        positional = self.main.positional
        line = [*flags, *positional] if positional[:1] == ("--",) else [*positional, *flags, *passed]
        return [argument.replace("{home}", str(home)).replace("{out}", str(out)) for argument in line]

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:  # Hypothesis would print all fields
        changes = [f"{change.place}={change.value[:200]!r}" for change in self.changes]
        printer.text(f"{' '.join([self.main.module, *self.main.positional])} with {', '.join(changes)}")


@functools.cache
def keys() -> dict[str, Any]:
    """Return the keys of a configuration and their defaults."""
    from paxtrain.config import Config, to_dict

    def flat(values: dict[str, Any], prefix: str) -> dict[str, Any]:
        found = {}
        for key, value in values.items():
            found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
        return found

    return flat(to_dict(Config()), "")


def _is_number(value: str) -> bool:
    """Return whether absl takes a value as a number in the digits 0 to 9; the largest is above all floats, too."""
    return value not in (*NO_NUMBERS, *LOOKALIKES, HUGE[-1], "") or value == "0x10"


def _is_whole(value: str) -> bool:
    return _is_number(value) and "." not in value


def _flag(name: str, value: str, wrong: bool) -> Change:
    return Change(name, value, f"{name}={value}" if wrong else "")


def _integer(name: str) -> st.SearchStrategy[Change]:
    huge = HUGE[1:] if name in BOUNDED else ()
    return st.sampled_from([*NUMBERS, "1.5"]).map(
        lambda value: _flag(name, value, value in huge or not _is_whole(value))
    )


def _number(name: str) -> st.SearchStrategy[Change]:
    return st.sampled_from(NUMBERS).map(lambda value: _flag(name, value, not _is_number(value) or value == "0x10"))


def _text(name: str) -> st.SearchStrategy[Change]:
    return st.sampled_from(TEXTS).map(lambda value: _flag(name, value, False))


def _override(name: str, default: Any) -> st.SearchStrategy[Change]:
    """Return values for a key of the configuration."""

    def change(value: str) -> Change:
        if type(default) is int:
            return _flag(name, value, not _is_whole(value) or value == "18446744073709551616")
        return _flag(name, value, type(default) is float and (not _is_number(value) or value == "0x10"))

    return st.sampled_from([*NUMBERS, *TEXTS]).map(change)


def _passed(main: Main) -> st.SearchStrategy[Change]:
    """Return arguments that a launcher passes on; a job on Kubernetes may have its configuration in its image."""
    unread = "config" if main.positional[0] == "kubernetes" else "\0"
    return st.sampled_from(PASSED).map(lambda value: Change("--", value, "" if unread in value else value))


@st.composite
def _file(draw: st.DrawFn, main: Main, home: pathlib.Path) -> Change:
    found = sorted(
        {p.relative_to(home).as_posix() for one in main.files.split() for p in home.glob(one) if p.is_file()}
    )
    name = draw(st.sampled_from(found))
    content, nonsense = draw(changed(name, (home / name).read_bytes()))
    return Change(name, content, nonsense and f"{name}: {nonsense}")


def _changes(main: Main, home: pathlib.Path) -> st.SearchStrategy[Change]:
    """Return changes of a main, of each kind the more often the more of it there is."""
    kinds: list[st.SearchStrategy[Change]] = []
    for names, make in ((main.integers, _integer), (main.numbers, _number), (main.texts, _text)):
        kinds += [st.sampled_from(names.split()).flatmap(make)] if names else []
    kinds += [_file(main, home)] * 2 if main.files else []
    overrides = st.sampled_from(sorted(keys().items(), key=lambda item: item[0]))
    change = overrides.flatmap(lambda item: _override(f"{main.overrides}.{item[0]}", item[1]))
    kinds += [change] * 4 if main.overrides else []
    kinds += [_passed(main)] if main.module == "planner.launch" else []
    return either(*kinds)


@st.composite
def cases(draw: st.DrawFn, mains: tuple[Main, ...], home: pathlib.Path) -> Case:
    """Return cases of these mains, one or two changes each; those with overrides have more to try."""
    main = draw(st.sampled_from([main for main in mains for _ in range(3 if main.overrides else 1)]))
    places = st.lists(_changes(main, home), min_size=1, max_size=2, unique_by=lambda change: change.place)
    return Case(main, tuple(draw(places)))
