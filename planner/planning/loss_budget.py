"""The choice of codecs within a budget of loss, by a probe of the user's own model (`paxtrain.study --probe`).

A combination has at most one probed codec at each place. Each combination whose estimated loss is within the budget is
a configuration, and is searched like one. The quickest wins, and then gets a full search with placements of its own.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from paxtrain.config import CompressConfig, read_section
from paxtrain.config.compress import LOW_RANK
from paxtrain.config.options import LINKED, NO_OPTIONS, PROBED, OptionValues
from paxtrain.errors import UserError
from paxtrain.study import loss_probe_file
from paxtrain.study.loss_probe_file import LossProbe, ProbedCodec, excess
from planner.cluster.cluster import Cluster
from planner.cost.coded import coded
from planner.planning.inputs import Values, search_for, sections
from planner.planning.options import PlanOptions
from planner.report.losses import Budgeted
from planner.search.search import Search

Combination = tuple[ProbedCodec, ...]  # at most one codec of each place
_SEARCHED = ("backward", "data")  # places at which a search also looks at candidates without their codec
_PLACED = 2  # meshes with schedules that are placed quickly before the combinations are compared
_SAME = 1e-9  # share of a step that counts as none


def read(options: PlanOptions) -> LossProbe:
    """Return the probe that options name.

    Raises:
        UserError: it cannot be read, or a codec of it cannot be made.
    """
    probe = loss_probe_file.load(options.probe)
    for one in probe.codecs:
        part: dict[str, Any] = {"codec": one.codec, "options": one.options}
        if one.rank:
            part = {"rank": one.rank, "rank_min": 1} if one.place == "data" else {"rank": one.rank}
        coded(read_section(CompressConfig, {one.place: part}, "compress"))
    return probe


def estimate(combination: Combination) -> float:
    """Return the loss that a combination is counted with, as a share of dense's: the mean and one standard error."""
    return sum(excess(combination))


def combinations(probe: LossProbe, budget: float) -> list[Combination]:
    """Return the combinations within a budget, without those that the search of another one covers.

    Args:
        probe: losses of the codecs.
        budget: most loss, as a share of dense training's.
    """
    choices = [((), *((one,) for one in probe.at(place))) for place in PROBED]
    every: list[Combination] = [tuple(itertools.chain(*some)) for some in itertools.product(*choices)]
    within = [some for some in every if estimate(some) <= budget]

    def covered(some: Combination) -> bool:
        there = {one.place for one in some}
        more = [one for place in _SEARCHED if place not in there for one in probe.at(place)]
        return any(estimate((*some, one)) <= budget for one in more)

    return [some for some in within if not covered(some)]


def configured(values: Values, combination: Combination) -> Values:
    """Return the sections of a configuration with a combination's codecs.

    Args:
        values: sections of the user's configuration, nested.
        combination: codecs of the places; other places are dense.
    """
    compress = read_section(CompressConfig, values["compress"], "compress")
    dense: dict[str, Any] = {"codec": "", "options": NO_OPTIONS}
    parts = {place: {**dense, "messages": "none", "links": ""} for place in LINKED} | {"embedding": dense}
    parts |= {"data": {**dense, "stages": "none", "adapt_every": 0}, "backward": {**parts["backward"], "ranks": ""}}
    for one in combination:
        parts[one.place] = parts[one.place] | ({"messages": "all"} if one.place == "forward" else {})
        if one.codec != LOW_RANK:
            parts[one.place] |= {"codec": one.codec, "options": OptionValues(one.options)}
        elif one.place == "data":
            parts["data"] |= {"rank": one.rank, "rank_min": min(one.rank, compress.data.rank_min)}
        else:
            parts[one.place] |= {"rank": one.rank}
    return {**values, "compress": dataclasses.asdict(compress.changed(**parts))}


def allowed(options: PlanOptions, combination: Combination) -> PlanOptions:
    """Return options that allow a combination's codecs and nothing else to compress."""
    by_place = {one.place: one for one in combination}
    kinds = (("epilogue", "all") if "backward" in by_place else ()) + (("data",) if "data" in by_place else ())
    ranks: dict[str, Any] = {
        f"{place}_ranks": (by_place[place].rank,) for place in _SEARCHED if place in by_place and by_place[place].rank
    }
    return dataclasses.replace(options, compress=kinds, probe="", **ranks)


def choose(
    values: Values,
    cluster: Cluster,
    options: PlanOptions,
    global_batch: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> tuple[Values, PlanOptions, Budgeted]:
    """Return the configuration and the options of the quickest combination within the budget, and what was chosen.

    Args:
        values: sections of the configuration, nested.
        cluster: cluster to plan for.
        options: options with a probe and a budget.
        global_batch: sequences per step; 0 for the configuration's.
        say: function that gets the name of each phase as it begins.

    Raises:
        UserError: the probe cannot be read, a codec of it cannot be made, or no plan fits.
    """
    probe = read(options)
    _require_undecided(values)
    some = combinations(probe, options.loss_budget)
    dense = search_for(configured(values, ()), cluster, allowed(options, ()), global_batch)
    if np.isfinite(dense.bounds).any():
        say("placing dense plans")
        dense.run(top=1, placed=0, quick=_PLACED)
    searches: list[tuple[float, int, Search]] = []
    for n, combination in enumerate(some):
        search = _search(values, cluster, options, global_batch, combination)
        if search is not None:
            search.tried.pools = dense.tried.pools
            searches.append((float(search.scores.min()), n, search))
    say(f"comparing {len(searches)} combinations of codecs")
    best = np.inf
    chosen: Combination = ()
    for least, n, search in sorted(searches, key=lambda one: one[:2]):
        if least >= best:
            break
        found = search.run(top=1, placed=0).ranked[0]
        if (score := found.score(options.gain)) < best * (1 - _SAME):
            best, chosen = score, some[n]
    budgeted = Budgeted(probe, options.probe, options.loss_budget, chosen)
    return configured(values, chosen), allowed(options, chosen), budgeted


def _search(
    values: Values, cluster: Cluster, options: PlanOptions, global_batch: int, combination: Combination
) -> Search | None:
    """Return the search of a combination; None if it has no candidate, or none that fits."""
    try:
        search = search_for(configured(values, combination), cluster, allowed(options, combination), global_batch)
    except UserError:
        return None
    return search if np.isfinite(search.bounds).any() else None


def _require_undecided(values: Values) -> None:
    """Require that the configuration leaves to the probe what is compressed.

    Raises:
        UserError: it names a codec, or compresses activations.
    """
    compress = sections(values)[-1]
    for place in PROBED:
        codec, messages = compress.at(place).codec, compress.forward.messages
        if codec or (place == "forward" and messages != "none"):
            setting = f"compress.{place}.codec={codec}" if codec else f"compress.forward.messages={messages}"
            raise UserError(f"--probe decides what is compressed, but the configuration has {setting}; leave it out")
