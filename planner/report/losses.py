"""Losses that the study or a probe saw for kinds of compression, for plans that compress and for those that could.

The study's figures are those of docs/study.md, which says on which model they were seen; a test compares them.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from paxtrain.config import ModelConfig
from paxtrain.study.loss_probe_file import WORDS, LossProbe, ProbedCodec, excess
from planner.cost.candidate import Candidate

SOURCE = "docs/study.md"
WIDTH = 64  # hidden size of the study's model, of which its ranks are a part
_EPILOGUE, _ALL, _FORWARD, _DATA, _BOTH = "epilogue", "all", "forward", "data", "epilogue+data"


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
    ("", _EPILOGUE): (SeenLoss("CB, epilogue", 16, 0.0010),),
    ("", _ALL): (
        SeenLoss("CB, all messages", 16, 0.0172),
        SeenLoss("CB, all messages, rank 8", 8, 0.043),
        SeenLoss("CB, all messages, rank 4", 4, 0.075),
    ),
    ("", _BOTH): (SeenLoss("CB epilogue + FE + SC", 16, 0.0015),),
    ("int8", _ALL): (SeenLoss("gradients between stages, int8", 0, 0.0016),),
    ("int4", _ALL): (SeenLoss("gradients between stages, int4", 0, 0.0010),),
    ("fp8", _ALL): (SeenLoss("gradients between stages, fp8 e4m3", 0, 0.0030),),
}


def words(candidate: Candidate) -> str:
    """Return what the study saw of a candidate's compression, with the source, or "" if it compresses nothing."""
    c = candidate
    between = c.backward if c.backward != "none" else ""
    there = _FORWARD if c.compresses_forward else ""
    what = "+".join(filter(None, (between, there, _DATA if c.data_rank else "")))
    if not what:
        return ""
    used = {"backward": bool(between), "forward": bool(there), "data": bool(c.data_rank)}
    codecs = [c.coded.name(place) for place, compressed in used.items() if compressed]
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
    names = {_EPILOGUE: "epilogues", _ALL: "all messages", _FORWARD: "activations", _DATA: "gradients over data"}
    return " and ".join(names[part] for part in what.split("+"))


# --- Of a probe -------------------------------------------------------------------------------------------------------


class Budgeted(NamedTuple):
    """A choice of codecs within a budget of loss.

    Attributes:
        probe: losses that were seen.
        path: file that has them.
        budget: most loss, as a share of dense training's.
        codecs: the chosen codecs, at most one of each place.
        tried: number of combinations that were compared.
    """

    probe: LossProbe
    path: str
    budget: float
    codecs: tuple[ProbedCodec, ...]
    tried: int


def probed_words(budgeted: Budgeted, candidate: Candidate, model: ModelConfig) -> str:
    """Return what the probe saw of a candidate's compression, in words.

    Args:
        budgeted: the choice that led to the candidate.
        candidate: plan.
        model: model that is planned for.
    """
    b, probe, c = budgeted, budgeted.probe, candidate
    used = {"backward": c.backward != "none", "forward": c.compresses_forward, "data": c.data_rank > 0}
    some = [one for one in b.codecs if used[one.place]]
    source = f"the probe {b.path} ({len(probe.seeds)} seeds, {probe.steps} steps"
    other = _differences(probe.model, model)
    source += f", of another model: {other})" if other else ")"
    if not some:
        return (
            f"nothing is compressed: no codec of {source} makes a step quicker within a budget of {b.budget:.2%} loss"
        )
    each = ", ".join(f"{one.label} of {WORDS[one.place]} {one.mean:+.2%} ± {one.noise:.2%}" for one in some)
    mean, noise = excess(some)
    together = f", {mean:+.2%} ± {noise:.2%} together" if len(some) > 1 else ""
    return f"{source} saw {each}{together}, of a budget of {b.budget:.2%} loss"


def _differences(there: Mapping[str, object], model: ModelConfig) -> str:
    """Return in what a probe's model differs from the one that is planned for; "" if it is the same."""
    here = {name: value for name, value in dataclasses.asdict(model).items() if name != "attention"}
    return ", ".join(
        f"{name}={there[name]} instead of {value}"
        for name, value in here.items()
        if name in there and there[name] != value
    )
