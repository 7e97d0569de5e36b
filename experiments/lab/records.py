"""The measurements of an experiment as lines of JSON, so that an interrupted experiment continues."""

import json
import pathlib
import shutil
from collections.abc import Iterator
from typing import Any

ENVIRONMENTS, TIMES = "environments", "times"  # records by experiment: where it was run, and how long it took


class Records:
    """The lines of one file; each has a key, and only the last line of a key counts."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._lines: dict[str, dict[str, Any]] = {}
        text = path.read_text() if path.exists() else ""
        if text and not text.endswith("\n"):
            with path.open("a") as file:
                file.write("\n")
        for line in text.splitlines():
            try:
                values = json.loads(line)
            except ValueError:  # cut off while it was written
                continue
            self._lines[values["key"]] = values

    def __contains__(self, key: str) -> bool:
        return key in self._lines

    def __getitem__(self, key: str) -> dict[str, Any]:
        return self._lines[key]

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self._lines.values())

    def __len__(self) -> int:
        return len(self._lines)

    def add(self, key: str, **values: Any) -> dict[str, Any]:
        """Write a line."""
        line = {"key": key, **values}
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._lines[key] = line
        return line


def publish(made: pathlib.Path, published: pathlib.Path) -> None:
    """Copy an experiment's records over those that were published before; what was not made anew stays.

    Args:
        made: the lab's folder. published: folder of the records that a page is written from.
    """
    published.mkdir(parents=True, exist_ok=True)
    for path in sorted(made.glob("*.jsonl")):
        if path.stem not in (ENVIRONMENTS, TIMES):
            shutil.copy(path, published)
    for name in (ENVIRONMENTS, TIMES):
        ours = Records(published / f"{name}.jsonl")
        for line in Records(made / f"{name}.jsonl"):
            if line["key"] not in ours or ours[line["key"]] != line:
                ours.add(**line)
