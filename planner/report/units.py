"""Seconds in the unit in which they read well."""


def unit(seconds: float) -> tuple[float, str]:
    """Return the factor and the name of the unit in which a number of seconds reads well."""
    return next(((f, name) for f, name in ((1.0, "s"), (1e3, "ms")) if seconds * f >= 1), (1e6, "µs"))


def duration(seconds: float) -> str:
    """Return seconds as words with four digits: "1.866 s", "12.4 ms"."""
    factor, name = unit(seconds)
    return f"{seconds * factor:.4g} {name}" if seconds else "0"
