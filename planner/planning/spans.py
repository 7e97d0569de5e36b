"""The search for devices that share sequences over several hosts: if it is asked for, or nothing fits otherwise."""

import dataclasses
from collections.abc import Callable

import numpy as np

from paxtrain.config.axes import AXES
from paxtrain.config.checks import divisors
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, merged
from planner.placement.host_rings import host_rings
from planner.search.search import Search
from planner.search.space import Choices


def search_over(cluster: Cluster, choices: Choices, make: Callable[[Cluster, Choices], Search]) -> Search:
    """Return the search on single hosts, or on hosts taken together, over which devices share sequences.

    The latter is made if sizes of such an axis that are asked for fit no host, with as many hosts as have the quickest
    plan; or if no plan fits on single hosts, with the fewest hosts on which one does.

    Args:
        cluster: cluster of single hosts.
        choices: what plans may choose.
        make: makes the search on a cluster among some choices.

    Raises:
        UserError: no mesh divides the model and the batch.
    """
    asked = {(name, size) for name, some in choices.sizes.items() if AXES[name].sequence for size in some}
    single, problem = _made(cluster, choices, make)
    inside = {(name, size) for name, _ in asked if single for size in single.space.column(name).tolist()}
    if single and np.isfinite(single.bounds).any() and asked <= inside:
        return single
    per_host = cluster.devices_per_host
    tensor = tuple(size for size in choices.tensor or divisors(per_host) if per_host % size == 0)
    found = [single] if single and np.isfinite(single.bounds).any() else []
    for together in divisors(len(cluster.hosts))[1:] if tensor else ():
        try:
            hosts = merged(cluster, together, host_rings(cluster, together))
        except UserError:  # they differ
            continue
        one, _ = _made(hosts, dataclasses.replace(choices, tensor=tensor), make)
        if one and np.isfinite(one.bounds).any():
            found.append(one)
            if not asked:
                break
    if found:
        return _quickest(found)
    if problem:
        raise problem
    assert single is not None
    return single


def _made(
    cluster: Cluster, choices: Choices, make: Callable[[Cluster, Choices], Search]
) -> tuple[Search | None, UserError | None]:
    """Return a search, or why there is none."""
    try:
        return make(cluster, choices), None
    except UserError as error:
        return None, error


def _quickest(searches: list[Search]) -> Search:
    """Return the search that finds the quickest plan; of those whose bounds are above it none is run."""
    if len(searches) == 1:
        return searches[0]
    best, least = searches[0], np.inf
    for one in sorted(searches, key=lambda one: float(one.scores.min())):
        if float(one.scores.min()) >= least:
            break
        score = one.run(top=1, placed=1).ranked[0].score(one.options.gain)
        if score < least:
            best, least = one, score
    return best
