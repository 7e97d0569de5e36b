"""Plans for a cluster that changes: the changes as one writes them, and the plan for each beside today's.

link A-B x 0.5              both directions of a link; A>B is one of them; A or B may be *
link A-B 10 Gbit/s          sets the rate of one flow
network x 2                 all links between hosts
network 100 Gbit/s more     or "less"; also without "network"
trunks x 2                  uplinks that hosts share; "network x 2" changes them, too
without A                   hosts that are gone, joined by commas
one host less               without the host whose links are slowest, or any if all are alike; the answer names it
devices h200                other devices in the same hosts
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, between, without
from planner.cluster.variants import with_devices, with_links, with_trunks
from planner.cost.step_time import Problem
from planner.memory import closed_form
from planner.planning.inputs import Values
from planner.planning.options import PlanOptions
from planner.planning.planning import Plans, plan_sections
from planner.report.further import WhatIf
from planner.search.budget import capability

_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_GBIT = 1e9 / 8
_ONE_LESS = r"one host (?:less|fewer)"
_KNOWN = (
    '"link A-B x 0.5", "link A-B 10 Gbit/s", "network x 2", "network 100 Gbit/s more" (or less), "trunks x 2", '
    '"without A,B", "one host less" or "devices h200"'
)


def changed(cluster: Cluster, text: str) -> Cluster:
    """Return the cluster with a change that is written as this module says.

    Args:
        cluster: cluster to change.
        text: the change.

    Raises:
        UserError: the change cannot be read, or names what the cluster does not have.
    """
    words = " ".join(text.split())
    forms: dict[str, Callable[..., Cluster]] = {
        rf"network x {_NUMBER}": lambda factor: with_trunks(
            _network(cluster, factor=float(factor)), float(factor), needed=False
        ),
        rf"trunks x {_NUMBER}": lambda factor: with_trunks(cluster, float(factor)),
        rf"(?:network )?{_NUMBER} Gbit/s (more|less)": lambda rate, way: _network(
            cluster, more=float(rate) * _GBIT * (1 if way == "more" else -1)
        ),
        rf"link (\S+) x {_NUMBER}": lambda pair, factor: _link(cluster, pair, float(factor), 0.0),
        rf"link (\S+) {_NUMBER} Gbit/s": lambda pair, rate: _link(cluster, pair, 0.0, float(rate) * _GBIT),
        r"without (?:hosts? )?(\S+)": lambda names: without(cluster, [names]),
        _ONE_LESS: lambda: without(cluster, [slowest_host(cluster)]),
        r"devices (\S+)": lambda kind: with_devices(cluster, kind),
    }
    for form, apply in forms.items():
        if found := re.fullmatch(form, words, re.IGNORECASE):
            try:
                return apply(*found.groups())
            except UserError as error:
                raise UserError(f"--what_if={words!r}: {error}") from error
    raise UserError(f"--what_if={words!r} cannot be read; write {_KNOWN}")


def slowest_host(cluster: Cluster) -> str:
    """Return the host whose links to and from all others are slowest by their mean; of several alike the last one."""
    rates = np.where(between(cluster), cluster.bandwidth, 0.0)
    of_host = rates.sum(axis=0) + rates.sum(axis=1)
    slowest = np.flatnonzero(of_host <= of_host.min() * (1 + 1e-9))  # sums of equal rates may differ by rounding
    return cluster.hosts[int(slowest[-1])]


def _named(cluster: Cluster, text: str) -> str:
    """Return a change as answers name it: as it was written, with the host that it leaves to the planner."""
    if re.fullmatch(_ONE_LESS, " ".join(text.split()), re.IGNORECASE):
        return f"{text} ({slowest_host(cluster)})"
    return text


def _network(cluster: Cluster, factor: float = 1.0, more: float = 0.0) -> Cluster:
    """Return the cluster with other rates of all links between hosts."""
    apart = between(cluster)
    return with_links(cluster, np.where(apart, factor, 1.0), np.where(apart, more, 0.0))


def _link(cluster: Cluster, pair: str, factor: float, more: float) -> Cluster:
    """Return the cluster with another rate of some links.

    Args:
        cluster: cluster to change.
        pair: "A-B" or "A>B".
        factor: factor on the rate.
        more: bytes/s added to it.
    """
    chosen = np.zeros((len(cluster.hosts),) * 2, bool)
    for a, b in _ends(cluster, pair):
        chosen[np.ix_(a, b)] = True
    chosen &= between(cluster)
    if not chosen.any():
        raise UserError(f"{pair} is no link between two hosts")
    return with_links(cluster, np.where(chosen, factor, 1.0), np.where(chosen, more, 0.0))


def _ends(cluster: Cluster, pair: str) -> list[tuple[list[int], list[int]]]:
    """Return the hosts at both ends of the links that a pair names, for each direction."""
    index = {name: [i] for i, name in enumerate(cluster.hosts)} | {"*": list(range(len(cluster.hosts)))}
    for sign in (">", "-"):  # names may have hyphens, too
        places = [i for i, character in enumerate(pair) if character == sign]
        found = [(pair[:i], pair[i + 1 :]) for i in places if pair[:i] in index and pair[i + 1 :] in index]
        if found:
            a, b = found[0]
            there = (index[a], index[b])
            return [there] if sign == ">" else [there, there[::-1]]
    known = ", ".join(cluster.hosts[:4]) + (", ..." if len(cluster.hosts) > 4 else "")
    raise UserError(f"{pair!r} names no two hosts joined by - or >; the cluster has {known}")


def what_ifs(
    values: Values,
    cluster: Cluster,
    options: PlanOptions,
    today: Plans,
    changes: Sequence[str],
    say: Callable[[str], None] = lambda _: None,
) -> Plans:
    """Return today's plan, whose report has the plan for each changed cluster.

    Args:
        values: sections of the configuration, nested.
        cluster: today's cluster.
        options: options with which today's plan was made.
        today: today's plan.
        changes: changes, as this module says.
        say: function that gets the name of each phase as it begins.

    Raises:
        UserError: a change cannot be read, or leaves no plan.
    """
    made, found = today.report, []
    quick = dataclasses.replace(options, nearby=False, oracle="no")
    for text, other in [(text, changed(cluster, text)) for text in changes]:
        say(f"what if {text}")
        try:
            plan = plan_sections(values, other, quick, global_batch=made.global_batch)
        except UserError as error:
            raise UserError(f"--what_if={text!r}: {error}") from error
        found.append(WhatIf(_named(cluster, text), plan.report.chosen, _kept(values, today, plan)))
    return dataclasses.replace(today, report=dataclasses.replace(made, what_ifs=tuple(found)))


def _kept(values: Values, today: Plans, plan: Plans) -> float | None:
    """Return the seconds that today's plan takes where another plan was made; None if it cannot run there."""
    made, other = today.report, plan.report
    chosen, config = made.chosen, today.plan.apply(values)

    def needed(cluster: Cluster) -> float:
        return float(np.max(closed_form.per_stage(config, capability(cluster)).total))

    # Other devices may keep more, since those without flash attention keep its scores.
    memory = chosen.memory * needed(other.cluster) / needed(made.cluster)
    if other.cluster.hosts != made.cluster.hosts or memory > other.limit:
        return None
    problem = Problem(other.cluster, other.model, chosen.candidate)
    step = problem.step(other.fabric, chosen.placement.hosts[None])
    return float(step.total[0])
