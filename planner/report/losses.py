"""Losses that the study saw for kinds of compression, for plans that compress and for those that could.

The figures are those of docs/study.md, which says on which model they were seen; a test compares them.
"""

from collections.abc import Mapping
from typing import NamedTuple

from planner.cost.step_time import Candidate

SOURCE = "docs/study.md"
WIDTH = 64  # hidden size of the study's model, of which its ranks are a part
_EPILOGUE, _ALL, _DATA, _BOTH = "epilogue", "all", "data", "epilogue+data"


class SeenLoss(NamedTuple):
    """A loss that the study saw.

    Attributes:
        run: name of the run on the page.
        rank: rank of the factors; 0 for codecs without one.
        share: by which share the validation loss was above dense training's.
    """

    run: str
    rank: int
    share: float


# By codec, "" for low rank, and by what is compressed: gradients between stages, over data, or both.
SEEN: Mapping[tuple[str, str], tuple[SeenLoss, ...]] = {
    ("", _EPILOGUE): (SeenLoss("CB, epilogue", 16, 0.0021),),
    ("", _ALL): (
        SeenLoss("CB, all messages", 16, 0.0170),
        SeenLoss("CB, all messages, rank 8", 8, 0.041),
        SeenLoss("CB, all messages, rank 4", 4, 0.089),
        SeenLoss("CB, all messages, rank 2", 2, 0.295),
    ),
    ("", _BOTH): (SeenLoss("CB epilogue + FE + SC", 16, 0.0024),),
    ("int8", _ALL): (SeenLoss("gradients between stages, int8", 0, 0.0006),),
    ("fp8", _ALL): (SeenLoss("gradients between stages, fp8 e4m3", 0, -0.0007),),
}


def words(candidate: Candidate) -> str:
    """Return what the study saw of a candidate's compression, with the source, or "" if it compresses nothing."""
    c = candidate
    between = c.backward if c.backward != "none" else ""
    what = "+".join(filter(None, (between, _DATA if c.data_rank else "")))
    if not what:
        return ""
    codecs = [c.coded.name("backward")] * bool(between) + [c.coded.name("data")] * bool(c.data_rank)
    names = " and ".join(dict.fromkeys(codec or "low rank" for codec in codecs))
    seen = SEEN.get((codecs[0], what), ()) if len(set(codecs)) == 1 else ()
    if not seen:
        return f"the study has no loss for {names} of {_name(what)} ({SOURCE}); make study measures one"
    rank = c.backward_rank if between else c.data_rank
    same = [one for one in seen if one.rank in (0, rank)]
    [near] = same or [min(seen, key=lambda one: abs(one.rank - rank))]
    at = f" at rank {near.rank} of a width of {WIDTH}" if near.rank else ""
    other = "" if same else f", and nothing at rank {rank}"
    return f"the study saw {100 * near.share:+.2f}% loss{at}{other} ({SOURCE})"


def _name(what: str) -> str:
    """Return what is compressed, in words."""
    names = {_EPILOGUE: "epilogues", _ALL: "all messages", _DATA: "gradients over data"}
    return " and ".join(names[part] for part in what.split("+"))
