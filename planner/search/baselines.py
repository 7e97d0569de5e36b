"""Gains of the chosen plan over the plans of others' rules on the same cluster."""

import dataclasses

import numpy as np

from paxtrain.schedule.schedules import code
from planner.cluster.cluster import between
from planner.cost import closed_forms
from planner.cost.candidate import Candidate
from planner.cost.sizes import MASTER
from planner.cost.step_time import Problem
from planner.pipeline import layer_split
from planner.placement.rules import amp_rule, pipette_rule
from planner.search import pruning
from planner.search.search import Search
from planner.search.tried import Found

NO_COMPRESSION = "no compression"  # name of the comparison with the quickest plan that compresses nothing


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Another way to plan, and the simulated step time of the plan that it leads to.

    Attributes:
        name: name of the rule.
        what: plan that it chooses.
        seconds: simulated step time.
    """

    name: str
    what: str
    seconds: float


def _shape(c: Candidate) -> str:
    return f"{c.data} x {c.pipe} x {c.tensor}, micro-batch {c.micro_batch}, {c.schedule}, {c.save}"


def _chosen_by(search: Search, rule: str) -> int:
    """Return the candidate that a published rule ranks first: 1F1B without compression, layers spread evenly.

    Both rules know one bandwidth between hosts and one inside; here they are the medians. Neither knows ZeRO-1 or save
    modes, so each mesh takes the quickest save mode that fits.
    """
    space, cluster, model = search.space, search.cluster, search.model
    plain = (space.schedule == code("1f1b")) | (space.pipe == 1)
    plain &= (space.backward == 0) & (space.data_rank == 0) & ~space.uneven_data.astype(bool)
    some = np.flatnonzero(plain & np.isfinite(search.bounds))
    if not len(some):
        return -1
    taken = space.take(some)
    costs = pruning.compute(cluster, model, taken)
    f, b = (costs[name] * taken.slots for name in ("forward", "backward"))
    apart = cluster.bandwidth[between(cluster)]
    groups = cluster.devices_per_host // taken.seat
    outside = float(np.median(apart)) if apart.size else np.inf
    inside = float(np.median(np.diagonal(cluster.bandwidth)))
    message = taken.micro_batch * model.sequence // taken.parts * model.hidden * pruning.item(model)
    hops = 2 * message / np.where(groups >= taken.data * taken.pipe, inside, outside)
    parameters = pruning.parameters(model, taken)
    ranks = taken.together
    reduce = closed_forms.ring(parameters * MASTER, ranks, np.where(groups >= ranks, inside, outside))
    stages = int(taken.pipe.max())
    on = np.arange(stages) < taken.pipe[:, None]
    hop_rows = np.where(np.arange(stages - 1) < taken.pipe[:, None] - 1, hops[:, None], 0.0)
    forward, backward = (np.where(on, x[:, None], 0.0) for x in (f, b))
    if rule == "pipette":
        m, pp = taken.micro_batches, taken.pipe
        seconds = closed_forms.pipette(forward, backward, hop_rows, reduce, m, pp, as_published=True)
    else:
        seconds = closed_forms.amp(forward, backward, hop_rows, reduce, taken.micro_batches)
    return int(some[np.argmin(seconds)])


def comparisons(search: Search, chosen: Found) -> list[Comparison]:
    """Return what other rules would choose, each simulated on the same links."""
    found = [
        Comparison("host order", "the same plan on devices in order", chosen.plain),
        Comparison(
            "better host order",
            "devices in order, pipelines or data ranks side by side",
            chosen.layout,
        ),
    ]
    rules = {"Pipette's own rule": ("pipette", pipette_rule), "AMP's rule": ("amp", amp_rule)}
    for name, (rule, placed) in rules.items():
        i = _chosen_by(search, rule)
        if i < 0:
            continue
        even = layer_split.even(search.model.layers, int(search.space.pipe[i]))
        problem = Problem(search.cluster, search.model, search.candidate(i, even))
        hosts = placed(problem, seed=search.options.seed)
        seconds = float(problem.step(search.fabric, hosts[None]).total[0])
        found.append(Comparison(name, _shape(problem.candidate), seconds))
    dense = search.without_compression(chosen)
    if dense is not chosen:
        found.append(Comparison(NO_COMPRESSION, _shape(dense.candidate), dense.seconds))
    return found
