"""The findings of a search, kept on disk under a name that stands for everything that it follows from.

Planning the same again searches nothing: the kept plans are priced anew, and if a price differs nothing counts as kept.
"""

import dataclasses
import functools
import hashlib
import importlib.metadata
import math
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np

from paxtrain import files
from paxtrain.schedule.schedules import FILE
from planner.cluster.cluster import Cluster, of_hosts
from planner.cost.candidate import Candidate
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.placement.place import Placement
from planner.report.contents import Noise, Offer
from planner.search.baselines import Comparison
from planner.search.nearby import Nearby
from planner.search.search import Found, Outcome, Search

FOLDER = "plans"  # in the user's cache
_PACKAGES = ("compress", "paxtrain", "planner")
_LIBRARIES = ("jax", "numpy", "scipy")
_SAME = 1e-9  # share by which a price may differ, since sums of another batch are rounded otherwise


@dataclasses.dataclass(frozen=True, eq=False)
class Findings:
    """The findings that take long.

    Attributes:
        outcome: the ranked plans and the statistics of the search.
        chosen: index of the plan that all else is about.
        nearby: plans on fewer hosts and for other batches.
        offers: plans with each kind of compression that could be quicker; None: some kind was asked for.
        comparisons: step times of other ways to plan.
        noise: noise of the placement's gain; None if the links were measured once.
    """

    outcome: Outcome
    chosen: int
    nearby: tuple[Nearby, ...]
    offers: tuple[Offer, ...] | None
    comparisons: list[Comparison]
    noise: Noise | None


def keep(search: Search, asked: object, findings: Findings) -> None:
    """Keep what a search has found, unless that follows from code or files that are not this project's.

    Args:
        search: the search, which has run.
        asked: JSON values that say what was looked for besides the ranked plans.
        findings: what was found.
    """
    if (key := _key(search, asked)) is None:
        return
    outcome, offers = findings.outcome, findings.offers
    value = {
        "ranked": list(map(_packed, outcome.ranked)),
        "points": outcome.points.tolist(),
        "leaders": list(map(_packed, outcome.leaders)),
        **{name: getattr(outcome, name) for name in ("placed", "seconds", "bound")},
        "chosen": findings.chosen,
        "nearby": [{**_fields(near), "found": _packed(near.found)} for near in findings.nearby],
        "offers": None if offers is None else [[offer.compress, _packed(offer.found)] for offer in offers],
        "comparisons": [_fields(one) for one in findings.comparisons],
        "noise": findings.noise,
        "placements": [[mesh, np.array(some).tolist()] for mesh, some in search.tried.pools.found.items()],
        "splits": list(search.tried.splits.found.items()),
    }
    files.keep(files.kept_file(FOLDER, key), value)


def recall(search: Search, asked: object) -> Findings | None:
    """Return what a search like this one has found, and give it the placements and splits; None if nothing is kept.

    Args:
        search: a search that has not run.
        asked: see `keep`.
    """
    if (key := _key(search, asked)) is None or (value := files.kept(files.kept_file(FOLDER, key))) is None:
        return None
    try:
        return _recalled(search, value)
    except (ValueError, TypeError, KeyError, IndexError):  # somebody else's value
        return None


def _recalled(search: Search, value: dict[str, Any]) -> Findings | None:
    outcome = Outcome(
        ranked=[_unpacked(search, found) for found in value["ranked"]],
        enumerated=len(search.space),
        fitting=int(np.isfinite(search.bounds).sum()),
        simulated=len(value["points"]),
        **{name: value[name] for name in ("placed", "seconds", "bound")},
        space=search.space,
        bytes=search.bytes,
        bounds=search.every_bound,
        points=np.array(value["points"]),
        leaders=tuple(_unpacked(search, found) for found in value["leaders"]),
    )
    nearby = tuple(
        Nearby(_unpacked(search, near["found"]), near["global_batch"], tuple(near["left_out"]), near["gain"])
        for near in value["nearby"]
    )
    offers = value["offers"]
    if offers is not None:
        offers = tuple(Offer(flag, _unpacked(search, found)) for flag, found in offers)
    comparisons = [Comparison(**one) for one in value["comparisons"]]
    noise = None if value["noise"] is None else Noise(*value["noise"])
    priced = [(found, search.cluster) for found in (*outcome.ranked, *(offer.found for offer in offers or ()))]
    priced += [(near.found, _without(search.cluster, near.left_out)) for near in nearby]
    if not all(_has_its_price(search, found, cluster) for found, cluster in priced):
        return None
    search.tried.pools.found = {tuple(mesh): list(np.array(some)) for mesh, some in value["placements"]}
    search.tried.splits.found = {tuple(stages): list(map(tuple, some)) for stages, some in value["splits"]}
    return Findings(outcome, value["chosen"], nearby, offers, comparisons, noise)


def _key(search: Search, asked: object) -> list[Any] | None:
    """Return what findings depend on, as JSON values; None if that is more than this project and the libraries."""
    if search.model.module or any(name.endswith(FILE) for name in search.choices.schedules):
        return None
    versions = [platform.python_version(), *map(importlib.metadata.version, _LIBRARIES)]
    parts = search.cluster, search.model, search.global_batch, search.choices, search.budget, search.options
    try:
        return [_plain(parts), asked, versions, _fingerprint()]
    except TypeError:
        return None


@functools.cache
def _fingerprint() -> str:
    return files.fingerprint(*_PACKAGES)


def _plain(value: Any) -> Any:
    """Return a value as JSON values from which nothing is left out.

    Raises:
        TypeError: it is of a class that is not this project's, whose code may change unseen.
    """
    if isinstance(value, np.ndarray):
        return [str(value.dtype), value.shape, hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()]
    if dataclasses.is_dataclass(value) and type(value).__module__.partition(".")[0] in _PACKAGES:
        return [type(value).__module__, type(value).__qualname__, _plain(_fields(value))]
    if isinstance(value, Mapping):
        return [[name, _plain(one)] for name, one in sorted(value.items())]
    if isinstance(value, (tuple, list)):
        return list(map(_plain, value))
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"{type(value)} is not known")


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _packed(found: Found) -> dict[str, Any]:
    """Return a plan as JSON values, without what all plans of a search share."""
    candidate = {name: x for name, x in _fields(found.candidate).items() if name not in ("coded", "outer")}
    placement = {**_fields(found.placement), "hosts": found.placement.hosts.tolist()}
    return {**_fields(found), "candidate": candidate, "placement": placement}


def _unpacked(search: Search, value: dict[str, Any]) -> Found:
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in value["candidate"].items()}
    candidate = Candidate(**fields, coded=search.coded, outer=search.choices.outer)
    placement = Placement(**{**value["placement"], "hosts": np.array(value["placement"]["hosts"])})
    return Found(**{**value, "candidate": candidate, "placement": placement})


def _without(cluster: Cluster, left_out: tuple[str, ...]) -> Cluster:
    return of_hosts(cluster, [host for host in cluster.hosts if host not in left_out]) if left_out else cluster


def _has_its_price(search: Search, found: Found, cluster: Cluster) -> bool:
    problem = Problem(cluster, search.model, found.candidate)
    links = search.fabric if cluster is search.cluster else fabric(cluster, search.options.quantile)
    seconds = float(problem.step(links, found.placement.hosts[None]).total[0])
    return math.isclose(seconds, found.seconds, rel_tol=_SAME)
