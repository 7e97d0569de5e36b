"""The gain of each kind of compression that is not asked for."""

import dataclasses

from planner.report.contents import Offer
from planner.search.search import Found, Search
from planner.search.space import BACKWARD

# Kinds of messages by the value of --compress that allows them: gradients between stages, and whether over data.
_KINDS = {"epilogue": ("epilogue", False), "all": ("all", False), "data": ("none", True), "auto": ("epilogue", True)}


def offers(search: Search, data_ranks: tuple[int, ...], chosen: Found) -> tuple[Offer, ...]:
    """Return the quickest plan with each kind of compression, on the placements that a search without any has found.

    Kinds of which no plan can be quicker than the chosen one, as their bounds say, are left out.

    Args:
        search: the search, which has run.
        data_ranks: ranks to try for gradients over data.
        chosen: the plan that is chosen, which compresses nothing.
    """
    choices = dataclasses.replace(search.choices, backward=("epilogue", "all"), data_ranks=data_ranks)
    wider, found = search.among(choices), []
    space = wider.space
    for flag, (between, data) in _KINDS.items():
        some = (space.backward == BACKWARD.index(between)) & ((space.data_rank > 0) == data)
        some &= wider.bounds < chosen.seconds
        if some.any():
            found.append(Offer(flag, wider.run(some, top=1, placed=0, limit=chosen.seconds).ranked[0]))
    return tuple(found)
