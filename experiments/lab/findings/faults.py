"""Faults, and how training ends."""

import collections
import pathlib
from typing import Any

from experiments.lab.page.section import Section, lab, table
from experiments.lab.records import Records

TITLE, SOURCE = "Faults", "faults.jsonl"
_WORDS = ("key", "fault", "sentence")
_SECONDS = "_seconds"


def _heading(name: str) -> str:
    words = name.removesuffix(_SECONDS).replace("_", " ")
    return f"{words}, s" if name.endswith(_SECONDS) else words


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def section(folder: pathlib.Path) -> Section:
    """Return a table of the faults: figures that several faults share are columns, the others are listed by name."""
    lines = [line for line in Records(folder / SOURCE) if "fault" in line]
    if not lines:
        return Section(TITLE, lab("faults"), (SOURCE,))
    counts = collections.Counter(name for line in lines for name in line if name not in _WORDS)
    columns = [name for name, count in counts.items() if count > 1 or len(lines) == 1]
    rows = []
    for line in lines:
        rest = [f"{_heading(n)} {_value(line[n])}" for n in counts if n in line and n not in columns]
        figures = [_value(line[name]) if name in line else "" for name in columns]
        rows.append((line["fault"], line.get("sentence", ""), "; ".join(rest), *figures))
    headings = ("fault", "what is said", "also", *map(_heading, columns))
    words = """A run on three hosts under srun --kill-on-bad-exit=1 with --lost_timeout=30; docs/faults.md says
    what is promised."""
    return Section(TITLE, lab("faults"), (SOURCE,), (), (words, table(headings, rows, words=3)))
