"""Plans that were not asked for: on fewer hosts, or for a global batch near by that the devices divide better.

A mesh uses all devices, and its data ranks divide the batch. So a batch of 512 on 42 devices leaves few meshes, and a
slow host may cost more than it adds. The report names what is found here, but nothing is chosen: the batch belongs to
training, and whoever starts the job decides on its hosts.

It is looked for only if the batch divides badly, or if hosts differ. What is tried are meshes of all sizes, with the
schedules and compression of the plans that were ranked. Their placement is quick.
"""

import dataclasses
import math

import numpy as np

from paxtrain.config.axes import AXES
from paxtrain.config.checks import divisors
from paxtrain.errors import UserError
from paxtrain.schedule.schedules import parts
from planner.cluster.cluster import Cluster, of_hosts
from planner.cost import compute
from planner.placement.climb import racks_of
from planner.search.search import Search
from planner.search.space import Choices
from planner.search.tried import Found

Array = np.ndarray

_HOSTS = 64  # hosts up to which fewer are tried
_DIFFERENT = 1.5  # how much slower the slowest host's links are than the quickest host's if hosts differ
_NEAR = 0.07  # share of the batch by which one near by differs at most
_GAIN = 0.02  # least gain that the report names
_BOUNDED, _SEARCHES = 8, 2  # most sets of hosts, or batches, that are bounded, and that are searched
_PLACED = 2  # most meshes with schedules that are placed quickly


@dataclasses.dataclass(frozen=True)
class Nearby:
    """A plan near by.

    Attributes:
        found: the plan.
        global_batch: its sequences of an optimizer step.
        left_out: names of the hosts that it does not use.
        gain: by which share more tokens a second it trains.
    """

    found: Found
    global_batch: int
    left_out: tuple[str, ...]
    gain: float


def divides_badly(devices: int, global_batch: int) -> bool:
    """Return whether some size of the data axis does not divide the batch."""
    return any(global_batch % data for data in divisors(devices) if data <= global_batch)


def most_sequences(search: Search) -> Array:
    """Return the sequences a second that no plan exceeds on each host, [H]."""
    cluster, model = search.cluster, search.model
    (sizes, where), quickest = search.space.layer_sizes, {}
    devices = [math.prod(n for axis, n in mesh.items() if not AXES[axis].batch) for mesh in sizes]
    pairs = set(zip(where.tolist(), search.space.micro_batch.tolist()))
    for kind in set(cluster.kinds):
        costs = [(i, b, compute.layer(cluster, kind, model, sizes[i], b, "residuals")) for i, b in pairs]
        quickest[kind] = min((x.forward + x.backward) * model.layers * devices[i] / b for i, b, x in costs)
    return cluster.devices_per_host / np.array([quickest[kind] for kind in cluster.kinds])


def _seconds_per_byte(search: Search) -> Array:
    """Return the seconds per byte between each two hosts, both ways together, [H, H]; 0 on the diagonal."""
    slowness = search.fabric.slowness
    return np.where(np.eye(len(slowness), dtype=bool), 0.0, slowness + slowness.T)


def hosts_differ(search: Search) -> bool:
    """Return whether hosts differ in kind, lie in racks, or have links of different speed."""
    links = np.median(_seconds_per_byte(search), axis=1)
    several = len(set(search.cluster.kinds)) > 1 or bool(racks_of(search.fabric).max())
    return several or bool(links.max() > _DIFFERENT * links.min())


def _worst_first(links: Array, speed: Array) -> Array:
    """Return the hosts in the order in which they are left out: by slow devices, then by slow links to the rest."""
    left, order = list(range(len(links))), []
    while len(left) > 1:
        slowness = np.median(links[np.ix_(left, left)], axis=1)
        worst = max(range(len(left)), key=lambda i: (-speed[left[i]], slowness[i]))
        order.append(left.pop(worst))
    return np.array(order)


def _subsets(search: Search) -> list[list[int]]:
    """Return sets of hosts to leave out, smallest first."""
    hosts = len(search.cluster.hosts)
    order = _worst_first(_seconds_per_byte(search), most_sequences(search))
    found = [sorted(order[:count].tolist()) for count in range(1, hosts // 2 + 1)]
    rack = racks_of(search.fabric)
    sizes = np.bincount(rack)
    by_rack = np.lexsort((np.arange(hosts), rack, sizes[rack]))  # those in small racks first
    if len(sizes) > 1:
        found += [sorted(by_rack[:count].tolist()) for count in range(1, hosts // 2 + 1)]
    return sorted({tuple(some): some for some in found}.values(), key=len)


def _whole_racks(search: Search, speed: Array) -> list[list[int]]:
    """Return sets of hosts to leave out so that whole racks or sites stay: one of them, two, and so on.

    No link between racks may be worth its hosts, and as long as two racks are left that shows nowhere.

    Args:
        search: search on all hosts.
        speed: sequences a second of each host.
    """
    rack = racks_of(search.fabric)
    quickest = np.argsort(-np.bincount(rack, weights=speed), kind="stable")
    return [np.flatnonzero(~np.isin(rack, quickest[:kept])).tolist() for kept in range(1, len(quickest))]


def _like(search: Search, ranked: list[Found], cluster: Cluster, global_batch: int) -> Search | None:
    """Return a search on other hosts or for another batch, with the choices of some plans besides mesh and micro-batch.

    Args:
        search: search that ranked the plans.
        ranked: the plans.
        cluster: hosts to search on.
        global_batch: batch to search for.
    """
    some = [found.candidate for found in ranked]
    choices: Choices = dataclasses.replace(
        search.choices,
        schedules=tuple(dict.fromkeys(parts(c.schedule)[0] for c in some)),
        virtual_stages=tuple({c.chunks for c in some} - {1}) or search.choices.virtual_stages,
        shards=tuple(dict.fromkeys(c.shard for c in some)),
        backward=tuple(dict.fromkeys(c.backward for c in some)),
        data_ranks=tuple({c.data_rank for c in some} - {0}),
    )
    try:
        found = Search(cluster, search.model, global_batch, choices, search.budget, search.options)
    except UserError:
        return None
    return found if np.isfinite(found.scores).any() else None


def _best(search: Search) -> Found:
    """Return the best plan of a search, placed quickly."""
    return search.run(top=1, placed=0, quick=_PLACED).ranked[0]


def fewer_hosts(search: Search, ranked: list[Found]) -> list[Nearby]:
    """Return plans that are quicker than the best one on all hosts, the quickest first.

    Args:
        search: search on all hosts.
        ranked: its best plans, the best first.
    """
    cluster, batch = search.cluster, search.global_batch
    if not 1 < len(cluster.hosts) <= _HOSTS or cluster.parts:
        return []
    if not hosts_differ(search) and not divides_badly(cluster.devices, batch):
        return []
    best, speed = ranked[0].score(search.options.gain), most_sequences(search)
    found, racks = [], _whole_racks(search, speed)
    few, whole = (_bounded(search, ranked, sets, speed) for sets in (_subsets(search), racks))
    # The least bound is that of many hosts, so one rack alone would hardly ever have its turn.
    alone = [one for one in whole if one[1] == racks[0]]
    for least, some, other in [*few[:_SEARCHES], *alone, *[one for one in whole if one not in alone][:1]]:
        if least >= best / (1 + _GAIN):
            continue
        plan = _best(other)
        if plan.score(search.options.gain) < best / (1 + _GAIN):
            left_out = tuple(cluster.hosts[i] for i in some)
            found.append(Nearby(plan, batch, left_out, ranked[0].seconds / plan.seconds - 1))
    return sorted(found, key=lambda one: one.found.seconds)


def _bounded(
    search: Search, ranked: list[Found], sets: list[list[int]], speed: Array
) -> list[tuple[float, list[int], Search]]:
    """Return searches without some sets of hosts, each with seconds that no plan is below and its set, least first.

    Args:
        search: search on all hosts.
        ranked: its best plans, the best first.
        sets: sets of hosts to leave out.
        speed: sequences a second that no plan exceeds on each host, [H].
    """
    best, hosts = ranked[0].score(search.options.gain), np.arange(len(speed))
    tried: list[tuple[float, list[int], Search]] = []
    for some in sets:
        left = np.setdiff1d(hosts, some)
        if len(tried) == _BOUNDED or search.global_batch / speed[left].sum() >= best / (1 + _GAIN):
            continue
        cluster = of_hosts(search.cluster, [search.cluster.hosts[i] for i in left])
        other = _like(search, ranked, cluster, search.global_batch)
        if other is not None:
            tried.append((float(other.scores.min()), some, other))
    return sorted(tried, key=lambda one: one[0])


def batches(search: Search, ranked: list[Found]) -> list[Nearby]:
    """Return plans for batches near by that train more tokens a second, the best first.

    Args:
        search: search for the batch that was asked for.
        ranked: its best plans, the best first.
    """
    batch, sizes = search.global_batch, divisors(search.cluster.devices)
    if not divides_badly(search.cluster.devices, batch):
        return []
    near = {around for data in sizes for around in (batch // data * data, -(-batch // data) * data)}
    near = {b for b in near if b != batch and abs(b - batch) <= _NEAR * batch and b > 0}
    seconds, found, tried = ranked[0].seconds / batch, [], []
    for size in sorted(near, key=lambda b: (-sum(b % data == 0 for data in sizes), abs(b - batch)))[:_BOUNDED]:
        other = _like(search, ranked, search.cluster, size)
        if other is not None:
            tried.append((float(other.scores.min()) / size, size, other))
    for least, size, other in sorted(tried, key=lambda one: one[:2])[:_SEARCHES]:
        if least * (1 + _GAIN) >= seconds:
            break
        plan = _best(other)
        gain = seconds / (plan.seconds / size) - 1
        if gain >= _GAIN:
            found.append(Nearby(plan, size, (), gain))
    return sorted(found, key=lambda one: -one.gain)
