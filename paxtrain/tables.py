"""Figures and tables as text, for what programs print."""

from collections.abc import Sequence


def size(count: float, unit: str = "") -> str:
    """Return a count with three digits and a prefix: 12,345,678 -> "12.3 M"."""
    for prefix, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= factor:
            return f"{count / factor:.3g} {prefix}{unit}"
    return f"{count:.3g} {unit}"


def some(texts: Sequence[str], most: int = 8) -> str:
    """Return texts joined by commas, and how many more there are if they are many."""
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return ", ".join(texts[:most]) + more


def times(ratio: float) -> str:
    """Return a ratio with three digits: 22.06 -> "22.1 times"."""
    return f"{ratio:.3g} times" if ratio < 999.5 else f"{ratio:,.0f} times"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of (label, figure) as two aligned columns."""
    width = max(len(what) for what, _ in rows)
    return "\n".join(f"  {what:<{width}}  {figure}" for what, figure in rows)
