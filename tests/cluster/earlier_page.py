"""What the results page says of experiments whose records are lost: their sections and targets stay."""

import dataclasses
import pathlib
import re

from tests.cluster.section import NOT_RUN, Section, Target

NOT_YET = "Not run yet."
MET = {True: "yes", False: "**no**", None: "open"}
_CELLS = re.compile(r"(?<!\\)\|")


@dataclasses.dataclass(frozen=True)
class EarlierPage:
    """A page that was written before.

    Attributes:
        sections: text by title, headings included.
        targets: what was seen, and whether that met the target, by what was wanted of.
    """

    sections: dict[str, str]
    targets: dict[str, tuple[str, bool | None]]

    def keeps(self, section: Section) -> bool:
        """Return whether the section has nothing to say, but the page has."""
        return not section.blocks and NOT_YET not in self.sections.get(section.title, NOT_YET)

    def kept(self, section: Section) -> Section:
        """Return the section with the page's words, and with what it says of the targets."""
        targets = tuple(map(self._judged, section.targets))
        return dataclasses.replace(section, targets=targets, blocks=(self.sections[section.title],))

    def _judged(self, target: Target) -> Target:
        return target.said(*self.targets[target.what]) if target.what in self.targets else target


def read(page: pathlib.Path) -> EarlierPage:
    """Return what a page says, which is nothing if it has not been written."""
    parts = re.split(r"^(?=## )", page.read_text(), flags=re.MULTILINE) if page.exists() else [""]
    sections = {part.partition("\n")[0].removeprefix("## "): part.strip() for part in parts[1:]}
    rows = [[cell.strip() for cell in _CELLS.split(line)[1:-1]] for line in parts[0].splitlines() if line[:1] == "|"]
    met = {words: value for value, words in MET.items()}
    targets = {row[0]: (row[2], met[row[3]]) for row in rows if len(row) == 4 and row[3] in met and row[2] != NOT_RUN}
    return EarlierPage(sections, targets)
