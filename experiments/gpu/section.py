"""Parts and sections of the measurements, and their records on disk: one JSON file for each section."""

import dataclasses
import json
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from paxtrain import files

FULL, TOY = "full", "toy"
DONE, FAILED, SKIPPED = "done", "failed", "skipped"

Result = dict[str, Any]  # what a part has measured, as JSON values


@dataclasses.dataclass(frozen=True)
class SectionPart:
    """A measurement that runs in one process, or in several that work together.

    Attributes:
        name: name of the part, which stands in tables.
        measure: function (folder, **arguments) -> result; the folder is the section's, for files besides the record.
        arguments: its arguments, JSON values: models, sizes, repeats.
        environment: variables that are set before jax starts, such as XLA_FLAGS.
        devices: devices that it needs, of all its processes; on CPUs it gets as many virtual ones.
        processes: processes that work together, each with an equal share of the devices.
    """

    name: str
    measure: Callable[..., Result]
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    devices: int = 1
    processes: int = 1


@dataclasses.dataclass(frozen=True)
class Section:
    """A subject of the measurements.

    Attributes:
        name: name of the record's file and of the flag's value.
        title: heading on the page.
        seconds: budget at full size; what a section leaves goes to those behind it.
        parts: parts by size, FULL and TOY, the most valuable ones first.
        describe: function (results by part, folder for pictures) -> text of the page.
        several: whether the section is about several GPUs, so that its budget counts only where there are some.
        timed: whether the parts measure time or memory; those of other sections share the devices and run side by side.
    """

    name: str
    title: str
    seconds: int
    parts: Mapping[str, tuple[SectionPart, ...]]
    describe: Callable[[dict[str, Result], pathlib.Path], str]
    several: bool = False
    timed: bool = True

    def part(self, size: str, name: str) -> SectionPart:
        """Return a part by its name."""
        return next(part for part in self.parts[size] if part.name == name)


@dataclasses.dataclass(frozen=True)
class Setting:
    """Machine, code and size of a measurement; a part is not measured again in an equal setting.

    Attributes:
        commit: commit of the code, with a fingerprint of uncommitted changes if there are any.
        device: kind of the devices, as the driver reports it.
        platform: "gpu" or "cpu".
        count: number of devices.
        size: FULL or TOY.
        jax: version of jax.
    """

    commit: str
    device: str
    platform: str
    count: int
    size: str
    jax: str


@dataclasses.dataclass
class PartOutcome:
    """Outcome of a part.

    Attributes:
        status: DONE, FAILED or SKIPPED.
        seconds: seconds that it took.
        result: what it has measured, if it is done.
        reason: why it failed or was skipped, one sentence.
        traceback: the exception's traceback, if there was one.
    """

    status: str
    seconds: float = 0.0
    result: Result = dataclasses.field(default_factory=dict)
    reason: str = ""
    traceback: str = ""


@dataclasses.dataclass
class SectionRecord:
    """The record of a section: where it was measured, and what became of each part.

    Attributes:
        section: name of the section.
        setting: where it was measured.
        date: day of the last part, as YYYY-MM-DD.
        parts: outcomes by the parts' names.
    """

    section: str
    setting: Setting
    date: str = ""
    parts: dict[str, PartOutcome] = dataclasses.field(default_factory=dict)

    def results(self) -> dict[str, Result]:
        """Return the results of the parts that are done, by name."""
        return {name: part.result for name, part in self.parts.items() if part.status == DONE}

    def enter(self, part: str, outcome: PartOutcome) -> None:
        """Keep what became of a part."""
        self.parts[part], self.date = outcome, time.strftime("%Y-%m-%d")


def file_of(out: pathlib.Path, section: str) -> pathlib.Path:
    """Return the file of a section's record."""
    return out / f"{section}.json"


def write_json(path: pathlib.Path, value: object) -> None:
    """Write a file whole or not at all, since a measurement may be stopped at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write(path, json.dumps(value, indent=1))


def save(out: pathlib.Path, record: SectionRecord) -> None:
    """Write a section's record."""
    write_json(file_of(out, record.section), dataclasses.asdict(record))


def load(out: pathlib.Path, section: str) -> SectionRecord | None:
    """Return a section's record, or None if there is none or the file is of another version."""
    try:
        values = json.loads(file_of(out, section).read_text())
        parts = {name: PartOutcome(**part) for name, part in values["parts"].items()}
        return SectionRecord(values["section"], Setting(**values["setting"]), values["date"], parts)
    except (OSError, ValueError, TypeError, KeyError):
        return None
