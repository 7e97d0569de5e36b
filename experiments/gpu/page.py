"""The page made of all records: in the folder of the records, and as the measured part of docs/gpu.md."""

import pathlib
import re
import shutil
from collections.abc import Sequence

from experiments.gpu import section as sections
from experiments.gpu.section import DONE, TOY, Section, SectionRecord, Setting
from paxtrain.errors import UserError

PAGE = "gpu.md"
BEGIN, END = "<!-- measured: begin -->", "<!-- measured: end -->"


def _setting(setting: Setting) -> str:
    """Return a sentence on where a record was measured."""
    many = f"{setting.count} x " if setting.count > 1 else ""
    toy = "; toy size, whose figures say only that everything runs" if setting.size == TOY else ""
    return f"{many}{setting.device}, jax {setting.jax}, commit {setting.commit}{toy}"


def _section(section: Section, record: SectionRecord, pictures: pathlib.Path) -> str:
    """Return the text of a section, with what it lacks."""
    lines = [f"### {section.title}", "", f"{record.date}, {_setting(record.setting)}.", ""]
    if results := record.results():
        lines += [section.describe(results, pictures), ""]
    missing: dict[str, list[str]] = {}
    for name, part in record.parts.items():
        if part.status != DONE:
            missing.setdefault(f"{part.status}, {part.reason}", []).append(name)
    for why, names in missing.items():
        lines += [f"Not measured ({why}): {'; '.join(names)}.", ""]
    return "\n".join(lines)


def text(table: Sequence[Section], out: pathlib.Path) -> str:
    """Return the page of all records in a folder, and draw its pictures there.

    Args:
        table: the sections, in the order of the page.
        out: folder of the records.
    """
    found = [(section, sections.load(out, section.name)) for section in table]
    return "\n".join(_section(section, record, out) for section, record in found if record)


def write(table: Sequence[Section], out: pathlib.Path) -> pathlib.Path:
    """Write the page of all records in a folder beside them, and return its path.

    Args:
        table: the sections, in the order of the page.
        out: folder of the records.
    """
    page = out / PAGE
    page.write_text(f"# Measured on a GPU\n\n    make gpu\n\n{text(table, out)}")
    return page


def publish(page: pathlib.Path, docs: pathlib.Path) -> None:
    """Put the sections of a page, and its pictures, into a page of the documentation.

    Args:
        page: the page that `write` wrote.
        docs: page of the documentation, with the lines BEGIN and END.

    Raises:
        UserError: the documentation has no place for it.
    """
    whole = docs.read_text()
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise UserError(f"{docs} has no place for measurements; it needs a line {BEGIN} and a line {END}")
    body = page.read_text().partition("\n###")
    measured = f"###{body[2]}" if body[1] else ""
    folder = docs.parent / "gpu"
    for name in re.findall(r"\]\(([\w.-]+\.png)\)", measured):
        folder.mkdir(exist_ok=True)
        shutil.copy(page.parent / name, folder / name)
    measured = re.sub(r"\]\(([\w.-]+\.png)\)", r"](gpu/\1)", measured)
    docs.write_text(f"{before}{BEGIN}\n\n{measured.strip()}\n\n{END}{after}")
