"""Lists of hosts as SLURM and ClusterShell write them: n[001-003,7],login; rack[1-2]n[01-16]."""

import itertools
import re
from collections.abc import Sequence

from paxtrain.errors import UserError, whole

_MOST = 100_000  # names of a list


def _numbers(ranges: str, name: str) -> list[str]:
    """Return the numbers of a bracket, as wide as the first of each range is written."""
    found: list[str] = []
    for each in ranges.split(","):
        low, dash, high = each.strip().partition("-")
        first, last = whole(low), whole(high if dash else low)
        if first is None or last is None or not first <= last < first + _MOST:
            raise UserError(f"the hosts {name!r} have {each!r} where numbers or ranges should be, as in n[001-004,7]")
        found += [f"{number:0{len(low)}}" for number in range(first, last + 1)]
    return found


def expand(names: Sequence[str]) -> list[str]:
    """Return the single names of hosts.

    Args:
        names: names, or lists of them with brackets and commas.

    Raises:
        UserError: a bracket holds no numbers, or there are too many names.
    """
    found: list[str] = []
    for name in re.findall(r"(?:\[[^]]*\]|[^,])+", ",".join(names)):
        parts = re.split(r"\[([^]]*)\]", name.strip())
        choices = [_numbers(part, name) if i % 2 else [part] for i, part in enumerate(parts)]
        if any("[" in part for part in parts[::2]):
            raise UserError(f"the hosts {name!r} lack a ]; write them as in n[001-004,7]")
        found += itertools.islice(map("".join, itertools.product(*choices)), _MOST + 1)
        if len(found) > _MOST:
            raise UserError(f"the hosts {name[:40]!r} are more than {_MOST:,}; name fewer")
    return found
