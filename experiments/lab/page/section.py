"""A part of the results page: words, figures, and targets beside results."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from matplotlib.figure import Figure

# --- Numbers in words -------------------------------------------------------------------------------------------------


def percent(x: float) -> str:
    """Return a share, such as 3.4%."""
    return f"{100 * x:.1f}%"


def signed(x: float) -> str:
    """Return a difference, such as +3.4%."""
    return f"{100 * x:+z.1f}%"


def factor(x: float) -> str:
    """Return a ratio, such as 1.32x."""
    return f"{x:.2f}x"


def seconds(x: float) -> str:
    """Return seconds, with milliseconds below 10 s."""
    return f"{x:.3f} s" if x < 10 else f"{x:.1f} s"


def rank(x: float) -> str:
    """Return a rank correlation, or "-" if there was nothing to rank."""
    return "-" if math.isnan(x) else f"{x:z.3f}"


def listed(words: Sequence[str]) -> str:
    """Return words as a list: a, b and c."""
    return " and ".join([", ".join(words[:-1]), *words[-1:]]) if len(words) > 1 else "".join(words)


def span(values: Iterable[float], show: Callable[[float], str] = str) -> str:
    """Return the range from the least to the greatest value."""
    least, most = show(min(found := list(values))), show(max(found))
    return least if least == most else f"{least} to {most}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Return a table in Markdown; the first `words` columns are text, the others figures."""
    marks = ["---" if i < words else "---:" for i in range(len(headings))]
    cells = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (headings, marks, *cells))


# --- What was wanted --------------------------------------------------------------------------------------------------

NOT_RUN = "not run"


@dataclasses.dataclass(frozen=True)
class Target:
    """A target of the lab, with the measured value.

    Attributes:
        wanted, seen: in words.
        met: whether the target is met; None if that cannot be said.
        limit: the wanted value; None: in words only. least: the value seen has to be so much, and not at most so much.
        show: says a value in words.
    """

    what: str
    wanted: str
    seen: str = NOT_RUN
    met: bool | None = None
    limit: float | None = None
    least: bool = False
    show: Callable[[float], str] = percent

    @classmethod
    def at_most(cls, what: str, limit: float, show: Callable[[float], str] = percent) -> "Target":
        return cls(what, f"at most {show(limit)}", limit=limit, show=show)

    @classmethod
    def at_least(cls, what: str, limit: float, show: Callable[[float], str] = percent) -> "Target":
        return cls(what, f"at least {show(limit)}", limit=limit, least=True, show=show)

    def judged(self, value: float, note: str = "") -> "Target":
        """Return the target with a measured value; NaN leaves it open."""
        words = self.show(value) + (f" ({note})" if note else "")
        if math.isnan(value):
            return self.said(words, None)
        return self.said(words, value >= self.limit if self.least else value <= self.limit)

    def said(self, seen: str, met: bool | None) -> "Target":
        """Return the target with what was seen, in words."""
        return dataclasses.replace(self, seen=seen, met=met)


# --- The parts of the page --------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Drawing:
    """A figure, the name of its file, and its caption."""

    name: str
    caption: str
    figure: Figure


@dataclasses.dataclass(frozen=True, eq=False)
class Section:
    """A part of the page.

    Attributes:
        command: that makes it. sources: the raw files it is made from, in the lab's folder.
        blocks: paragraphs, whose lines are broken anew, tables and drawings; empty as long as nothing was measured.
    """

    title: str
    command: str
    sources: tuple[str, ...]
    targets: tuple[Target, ...] = ()
    blocks: tuple[str | Drawing, ...] = ()

    @property
    def drawings(self) -> list[Drawing]:
        return [block for block in self.blocks if isinstance(block, Drawing)]


def lab(experiment: str) -> str:
    """Return the command of an experiment."""
    return f"python -m experiments.lab --experiments={experiment}"
