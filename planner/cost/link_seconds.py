"""Latency and seconds per byte of messages between stages and of collectives over data, for a batch of placements.

A placement says on which host each tensor group lies: int [batch, D, P], D data ranks, P stages. All devices of a
group send to their counterparts alike, so a group of T devices sends T flows at once. A flow alone has the link's
bandwidth. If more flows enter or leave a host than it has NICs, they share the NICs. Those that enter or leave by the
same trunk share that, too.

If the cluster has rails, each device uses the NIC of its own rail, and flows share NICs one by one. Then it matters
which devices of its host a group has. So functions that count flows take seats: a group's seat is its host's number
plus, with rails, the number of hosts times the group's slot on its host (`Fabric.seats`).

On GPUs all collectives over data are rings. Over gloo a reduce-scatter is an all-to-all (compress.collectives), whose
messages use all links of a host at once.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import numpy as np

from planner.cluster.cluster import Cluster
from planner.cluster.rails import Rails
from planner.cluster.trunks import Trunks

Array = np.ndarray

# The part of a message's time for which each other message between stages is in the same trunk. On GPUs all stages run
# a row, and with it its transfers, at once. Processes on CPUs send when they are ready. The part was fitted to runs
# of the lab on two sites (docs/cost.md).
_OTHERS = 0.3
# Number of messages that take as long as an exchange of two ranks in an all-to-all over gloo. gloo sends them in turn,
# because "ready to receive" waits in the connection behind what is being sent.
IN_TURN = 2.0
_PAIRS = 16  # ranks of a ring up to which comparing all pairs of them is quicker than sorting


@dataclasses.dataclass(frozen=True, eq=False)
class Fabric:
    """The links of a cluster as one evaluation sees them.

    Attributes:
        alpha: [H, H] seconds.
        per_byte: [H, H] seconds per byte of a flow alone, 1 / bandwidth.
        nics: flows that leave or enter a host at full speed.
        fan_out: hosts with which a host can exchange data at once, each at the full speed of their link.
        rings: whether a reduce-scatter runs around a ring; otherwise it is an all-to-all.
        trunks: uplinks that several hosts share; None: there are none.
        rails: how flows that change rails travel; None: a host's flows share its NICs equally.
        devices: devices of a host, by which rails number them.
    """

    alpha: Array
    per_byte: Array
    nics: int
    fan_out: float = 1.0
    rings: bool = True
    trunks: Trunks | None = None
    rails: Rails | None = None
    devices: int = 1

    @functools.cached_property
    def slowness(self) -> Array:
        """Seconds per byte [H, H] of a flow while trunks are full, by which the search tells near hosts from far."""
        return np.maximum(self.per_byte, self.trunks.slowness()) if self.trunks else self.per_byte

    def seats(self, hosts: Array) -> Array:
        """Return the seats of the groups of placements [batch, D, P]; without rails these are their hosts."""
        return hosts + len(self.alpha) * host_slots(hosts) if self.rails else hosts

    def hosts(self, seats: Array) -> Array:
        """Return the host of each seat."""
        return seats % len(self.alpha) if self.rails else seats

    def rail_of(self, seats: Array, tensor: int) -> Array:
        """Return the rail of each device [..., T] of groups at some seats [...]; there are rails."""
        device = (seats // len(self.alpha))[..., None] * tensor + np.arange(tensor)
        return device * self.nics // self.devices


def fabric(cluster: Cluster, quantile: float | None = None, sample: int | None = None) -> Fabric:
    """Return the cluster's links: the median over the samples, a quantile of them, or one sample.

    Args:
        cluster: cluster with samples of its links.
        quantile: quantile of the bandwidths, in [0, 1]; None: the median.
        sample: number of the sample to take alone.
    """
    if sample is not None:
        bandwidth = cluster.samples[sample]
    else:
        bandwidth = cluster.bandwidth if quantile is None else cluster.quantile(quantile)
    alpha = np.ascontiguousarray(cluster.alpha)
    shared = cluster.trunks, cluster.rails, cluster.devices_per_host
    return Fabric(alpha, 1 / bandwidth, cluster.nics, cluster.fan_out, cluster.overlaps, *shared)


def _counted(hosts: Array, crossing: Array, size: int, count: int) -> tuple[Array, Array]:
    """Return how many flows leave (or enter) by each host or NIC [batch * count], and each group's place in them.

    Args:
        hosts: [batch, ...] host or NIC of each group.
        crossing: bool [batch, ...] groups whose flows count, `size` of each.
        size: flows of a group.
        count: number of hosts or NICs.
    """
    batch = len(hosts)
    place = np.arange(batch).reshape(-1, *[1] * (hosts.ndim - 1)) * count + hosts
    return np.bincount(place.ravel(), weights=crossing.ravel() * float(size), minlength=batch * count), place


def _on_rails(fabric: Fabric, seats: Array, onward: Array, counted: Array, tensor: int) -> tuple[Array, Array]:
    """Return the factor by which the busiest NIC or spine slows down each group's flows, and whether some change rails.

    With PXN a flow leaves by the NIC of its receiver's rail, and without it by that of its sender's.

    Args:
        fabric: links of the cluster.
        seats: [batch, ...] seat of each sender.
        onward: [batch, ...] seat of its receiver.
        counted: bool [batch, ...] which of them are sent at the same time.
        tensor: T, flows of a group.

    Returns:
        Factors [batch, ...] from 1 on, and bool [batch, ...].
    """
    assert fabric.rails is not None
    count, leaving, entering = len(fabric.alpha), fabric.rail_of(seats, tensor), fabric.rail_of(onward, tensor)
    changes = leaving != entering
    every = np.ones_like(changes)

    def flows(way: Array, taken: Array, ways: int) -> Array:
        """Return how many flows [..., T] are in the way of each: the counted ones, but at least those of its group."""
        own = ((way[..., None] == way[..., None, :]) & taken[..., None, :]).sum(axis=-1)
        total, place = _counted(way, taken & counted[..., None], 1, ways)
        return np.maximum(total[place], own)

    ends = (fabric.hosts(seats), entering if fabric.rails.pxn else leaving), (fabric.hosts(onward), entering)
    share = np.maximum(*(flows(at[..., None] * fabric.nics + rail, every, count * fabric.nics) for at, rail in ends))
    if not fabric.rails.pxn:
        spine = np.maximum(*(flows(rail, changes, fabric.nics) for rail in (leaving, entering)))
        share = np.where(changes, np.maximum(share, spine * fabric.rails.oversubscription / count), share)
    return share.max(axis=-1), changes.any(axis=-1)


def _over_links(
    fabric: Fabric, seats: Array, onward: Array, counted: Array, tensor: int, shares: Array | None = None
) -> tuple[Array, Array]:
    """Return latency and seconds per byte [batch, ...] of flows as their links and their hosts' NICs have them.

    Args:
        fabric: links of the cluster.
        seats: [batch, ...] seat of each sender.
        onward: [batch, ...] seat of its receiver.
        counted: bool [batch, ...] which of them are sent at the same time; others share with those and their own group.
        tensor: T, flows that each stands for.
        shares: what `_shares` returns, if it is known.
    """
    here, there = fabric.hosts(seats), fabric.hosts(onward)
    link = here * len(fabric.alpha) + there  # of the matrices laid flat, in which numpy finds entries sooner
    latency, slowness = fabric.alpha.ravel().take(link), fabric.per_byte.ravel().take(link)
    if fabric.rails:
        apart = here != there
        share, changes = _on_rails(fabric, seats, onward, counted, tensor)
        slowness = slowness * np.where(apart, share, 1.0)
        if fabric.rails.pxn:
            moved = changes & apart
            latency = latency + np.where(moved, fabric.alpha[here, here], 0.0)
            slowness = np.where(moved, np.maximum(slowness, fabric.per_byte[here, here]), slowness)
        return latency, slowness
    return latency, slowness * (_shares(fabric, here, there, counted, tensor) if shares is None else shares)


def _shares(fabric: Fabric, here: Array, there: Array, counted: Array, tensor: int, closed: bool = False) -> Array:
    """Return the factor [batch, ...] by which flows slow down on their hosts' shared NICs, without rails.

    The factors of flows the other way, from `there` to `here`, are the same. In closed rings as many flows enter each
    host as leave it.
    """
    if fabric.devices <= fabric.nics:  # each device, which sends one flow at a time, has a NIC's rate
        return np.ones(1)
    count = len(fabric.alpha)
    leaving, place = _counted(here, counted, tensor, count)
    entering = leaving if closed else _counted(there, counted, tensor, count)[0]
    crowd = np.maximum(leaving[place], entering[place + (there - here)])
    return np.where(here != there, np.maximum(np.maximum(crowd, tensor) / fabric.nics, 1.0), 1.0)


def _in_trunks(
    fabric: Fabric, slowness: Array, here: Array, there: Array, size: int,
    counted: Array | None = None, others: float = 1.0, answered: bool = False,
) -> Array:  # fmt: skip
    """Return the seconds per byte of flows that may share trunks.

    Args:
        fabric: links of the cluster.
        slowness: [batch, ...] seconds per byte of each flow as its link and its hosts' NICs have it.
        here: [batch, ...] sender of each.
        there: [batch, ...] receiver of each.
        size: flows that each stands for.
        counted: bool [batch, ...] which of them are sent at the same time; None: all.
        others: share of a flow's time for which each of the others is in the trunk.
        answered: with each flow another one goes the opposite way.
    """
    if not fabric.trunks:
        return slowness
    axes = tuple(range(1, here.ndim))
    for behind, rate in fabric.trunks:
        sender, receiver = behind[here], behind[there]
        for way in (sender & ~receiver, receiver & ~sender):
            at_once = sender ^ receiver if answered else way
            at_once = at_once if counted is None else at_once & counted
            flows = size * (1 + others * np.maximum(at_once.sum(axis=axes, keepdims=True) - 1, 0))
            slowness = np.where(way, np.maximum(slowness, flows / rate), slowness)
    return slowness


def hops(fabric: Fabric, seats: Array, tensor: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return what messages take from every stage to the next one in the ring of stages, and to the one before.

    Only interleaved schedules send between the last and the first stage, one message in P. The model ignores what these
    messages take of other groups' NICs: they share bandwidth only with the flows of their own tensor group.

    Args:
        fabric: links of the cluster.
        seats: int [batch, D, P].
        tensor: T, flows per group.

    Returns:
        Seconds of latency and seconds per byte, [batch, D, P] by sender, of messages forward and of those back.
    """
    onward = np.concatenate([seats[:, :, 1:], seats[:, :, :1]], axis=2)
    here, there = fabric.hosts(seats), fabric.hosts(onward)
    crossing = here != there
    crossing[:, :, -1] = False
    others, found = 1.0 if fabric.rings else _OTHERS, []
    shares = None if fabric.rails else _shares(fabric, here, there, crossing, tensor)
    for ends, hosts in (((seats, onward), (here, there)), ((onward, seats), (there, here))):
        latency, slowness = _over_links(fabric, *ends, crossing, tensor, shares)
        # On GPUs a row's activations leave while its gradients are on their way, if links are what it waits for.
        found.append((latency, _in_trunks(fabric, slowness, *hosts, tensor, crossing, others, answered=fabric.rings)))
    back = tuple(np.concatenate([x[:, :, -1:], x[:, :, :-1]], axis=2) for x in found[1])  # by the sender of each
    return found[0], (back[0], back[1])


def _by_host(hosts: Array) -> tuple[Array, Array]:
    """Return the order that sorts hosts [..., N], and for each place in it the first place with the same host."""
    order = np.argsort(hosts, axis=-1, kind="stable")
    by_host = np.take_along_axis(hosts, order, -1)
    starts = np.concatenate([np.ones_like(by_host[..., :1], bool), by_host[..., 1:] != by_host[..., :-1]], -1)
    # The first position of each run, carried along the run.
    return order, np.maximum.accumulate(np.where(starts, np.arange(hosts.shape[-1]), 0), -1)


def host_slots(hosts: Array) -> Array:
    """Return the slot on its host of each group of placements int [..., D, P]: groups take them in mesh order."""
    flat = hosts.reshape(*hosts.shape[:-2], -1)
    order, first = _by_host(flat)
    found = np.empty_like(order)
    np.put_along_axis(found, order, np.arange(flat.shape[-1]) - first, -1)
    return found.reshape(hosts.shape)


def ring_leads(hosts: Array) -> Array:
    """Return the way of rings over ranks on hosts [..., D]: for each position the first rank on the position's host.

    Ranks on one host are brought together, in the order in which each host first comes. So a ring crosses into each
    host once, as NCCL's rings do.
    """
    if hosts.shape[-1] <= _PAIRS:
        return np.sort((hosts[..., :, None] == hosts[..., None, :]).argmax(axis=-1), axis=-1)
    order, first = _by_host(hosts)
    return np.sort(np.take_along_axis(order, first, -1), axis=-1)


def ring_order(hosts: Array) -> Array:
    """Return hosts [..., D] in the order in which a ring visits them; see `ring_leads`."""
    return np.take_along_axis(hosts, ring_leads(hosts), -1)


def rings(fabric: Fabric, seats: Array, tensor: int) -> tuple[Array, Array]:
    """Return what a turn of each stage's data-parallel ring takes while all stages' and tensor ranks' rings run.

    With rails a ring enters and leaves a host by the rail of its first rank there, as NCCL's rings keep to a NIC.

    Args:
        fabric: links of the cluster.
        seats: int [batch, D, P].
        tensor: T, rings per stage.

    Returns:
        Seconds of latency of a whole turn (D-1 hops, each as slow as the slowest) and seconds per byte of its slowest
        link, [batch, P].
    """
    ranks = seats.shape[1]
    if ranks == 1:
        zero = np.zeros((len(seats), seats.shape[2]))
        return zero, zero
    lanes = np.ascontiguousarray(np.swapaxes(seats, 1, 2))  # [batch, P, D]
    around, axis = np.take_along_axis(lanes, ring_leads(fabric.hosts(lanes)), -1), 2
    if ranks < seats.shape[2]:  # numpy is quick along the last axis if that is the longer one
        around, axis = np.ascontiguousarray(np.swapaxes(around, 1, 2)), 1
    onward = np.roll(around, -1, axis=axis)
    here, there = fabric.hosts(around), fabric.hosts(onward)
    shares = None if fabric.rails else _shares(fabric, here, there, here != there, tensor, closed=True)
    latency, slowness = _over_links(fabric, around, onward, here != there, tensor, shares)
    return (ranks - 1) * latency.max(axis=axis), _in_trunks(fabric, slowness, here, there, tensor).max(axis=axis)


def all_to_all(fabric: Fabric, hosts: Array, tensor: int) -> tuple[Array, Array]:
    """Return what all-to-alls over each stage's data ranks take while all stages and tensor ranks run theirs.

    Two data ranks exchange a D-th of a rank's array, all pairs at once, and the two messages of a pair take turns. The
    flows between two hosts share `nics` flows of full speed, those of a host `nics * fan_out`.

    Args:
        fabric: links of the cluster.
        hosts: int [batch, D, P].
        tensor: T, all-to-alls per stage.

    Returns:
        Seconds of latency, and seconds per byte of a rank's array, [batch, P].
    """
    batch, ranks, stages = hosts.shape
    latency, per_byte = np.zeros((2, batch, stages))
    count = len(fabric.alpha)
    for b in range(batch if ranks > 1 else 0):
        held = np.zeros((stages, count))  # data ranks of each stage on each host
        np.add.at(held, (np.arange(stages), hosts[b]), 1)
        between = tensor * held.T @ held
        leaving = tensor * (held * (ranks - held)).sum(axis=0)
        busier = np.maximum(leaving[:, None], leaving)
        share = np.maximum(np.maximum(IN_TURN * between, busier / fabric.fan_out) / fabric.nics, IN_TURN)
        np.fill_diagonal(share, 1.0)
        slowness = fabric.per_byte * share
        for behind, rate in fabric.trunks or ():
            flows = between[np.ix_(behind, ~behind)].sum()  # as many each way
            slowness = np.where(behind[:, None] != behind, np.maximum(slowness, flows / rate), slowness)
        for p in range(stages):
            # A host sends to itself only if several ranks are there.
            senders, receivers = np.nonzero(np.outer(held[p], held[p]) - np.diag(held[p] == 1))
            latency[b, p] = fabric.alpha[senders, receivers].max()
            per_byte[b, p] = slowness[senders, receivers].max() / ranks
    return latency, per_byte


def _reduce_scatters(fabric: Fabric, seats: Array, tensor: int, ring: tuple[Array, Array]) -> tuple[Array, Array]:
    """Return latency, and seconds per byte of a rank's array, [batch, P], of reduce-scatters over data."""
    if not fabric.rings:
        return all_to_all(fabric, fabric.hosts(seats), tensor)
    ranks = seats.shape[1]
    return ring[0], (ranks - 1) / ranks * ring[1]


@dataclasses.dataclass(frozen=True, eq=False)
class Paths:
    """Latency in seconds, and seconds per byte, of the links that placements use, whatever is sent.

    With G groups that train apart, each has data-parallel rings of its own: [batch, G * P], group after group.

    Attributes:
        forward: [batch, D, P] of a message to the next stage, by sender.
        backward: [batch, D, P] of a message to the previous stage, by sender.
        ring: [batch, G * P] of a turn of each stage's data-parallel ring.
        scatter: [batch, G * P] of each stage's reduce-scatter over data, per byte of a rank's whole array.
        swap: [batch, D, 2] of the exchange between the first and the last stage, there and back.
        inside: [batch, G * P] of a ring's turn, and of a reduce-scatter, inside the slowest of each stage's sets of
            data ranks that exchange first (compress.data.inside, mesh.shard_group); empty without them.
        between: the same of the ranks with one place in their sets.
        outer: [batch, D / G * P] of a turn of the rings over groups, each of ranks with one place in their groups;
            empty if all ranks train together.
    """

    forward: tuple[Array, Array]
    backward: tuple[Array, Array]
    ring: tuple[Array, Array]
    scatter: tuple[Array, Array]
    swap: tuple[Array, Array]
    inside: tuple[Array, ...] = ()
    between: tuple[Array, ...] = ()
    outer: tuple[Array, ...] = ()

    def take(self, batch: slice | Array) -> "Paths":
        """Return the paths of some of the placements."""
        fields = (field.name for field in dataclasses.fields(self))
        taken: dict[str, Any] = {name: tuple(x[batch] for x in getattr(self, name)) for name in fields}
        return Paths(**taken)

    def join(self, more: "Paths") -> "Paths":
        """Return the paths of these placements and of others as one batch."""
        names = (field.name for field in dataclasses.fields(self))
        parts = {name: zip(getattr(self, name), getattr(more, name)) for name in names}
        joined: dict[str, Any] = {name: tuple(map(np.concatenate, both)) for name, both in parts.items()}
        return Paths(**joined)


def _swap(fabric: Fabric, first: Array, last: Array, tensor: int) -> tuple[Array, Array]:
    """Return latency and seconds per byte [batch, D, 2] between the ends of all pipelines at once, there and back."""
    both = np.stack([first, last], 1)  # [batch, 2, D]
    # The ways are apart, as if they were placements of their own, because NICs work both ways at once.
    seats, onward = both.reshape(-1, both.shape[2]), both[:, ::-1].reshape(-1, both.shape[2])
    here, there = fabric.hosts(seats), fabric.hosts(onward)
    found = _over_links(fabric, seats, onward, here != there, tensor)
    latency, slowness, here, there = (np.swapaxes(x.reshape(both.shape), 1, 2) for x in (*found, here, there))
    return latency, _in_trunks(fabric, slowness, here, there, tensor)


def _in_sets(
    fabric: Fabric, seats: Array, tensor: int, inside: int, apart: int
) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
    """Return `Paths.inside` and `Paths.between` of groups at seats [batch, D, P]; see `paths` for the other arguments.

    All sets of a stage exchange at once, as all stages do. So they are priced as stages of fewer ranks.
    """
    batch, data, stages = seats.shape
    sets = seats.reshape(batch, apart, data // apart // inside, inside, stages)
    found = []
    for ranks in (np.moveaxis(sets, 3, 1), np.moveaxis(sets, 2, 1)):  # [batch, ranks that exchange, G, sets, P]
        alike = ranks.reshape(batch, ranks.shape[1], -1)
        ring = rings(fabric, alike, tensor)
        both = (*ring, *_reduce_scatters(fabric, alike, tensor, ring))
        found.append(tuple(x.reshape(batch, apart, -1, stages).max(axis=2).reshape(batch, -1) for x in both))
    return found[0], found[1]


def paths(fabric: Fabric, hosts: Array, tensor: int, inside: int = 1, apart: int = 1) -> Paths:
    """Return the paths of placements.

    Args:
        fabric: links of the cluster.
        hosts: int [batch, D, P].
        tensor: T, devices of a group.
        inside: K, neighbouring data ranks that exchange before such sets do; 1: none.
        apart: G, groups of neighbouring data ranks that train apart. Their rings run at once, like those of stages.
    """
    batch, data, stages = hosts.shape
    seats = fabric.seats(hosts)
    groups = seats.reshape(batch, apart, data // apart, stages)
    alike = np.swapaxes(groups, 1, 2).reshape(batch, data // apart, -1)  # [batch, D / G, G * P]
    ring = rings(fabric, alike, tensor)
    sets = _in_sets(fabric, seats, tensor, inside, apart) if inside > 1 else ((), ())
    forward, backward = hops(fabric, seats, tensor)
    return Paths(
        forward=forward,
        backward=backward,
        ring=ring,
        scatter=_reduce_scatters(fabric, alike, tensor, ring),
        swap=_swap(fabric, seats[:, :, 0], seats[:, :, -1], tensor),
        inside=sets[0],
        between=sets[1],
        outer=rings(fabric, groups.reshape(batch, apart, -1), tensor) if apart > 1 else (),
    )


class DataLinks(NamedTuple):
    """Seconds of collectives among data ranks of each stage, [rows, P]; see `LinkSeconds`."""

    ring_latency: Array
    ring_per_byte: Array
    scatter_latency: Array
    scatter_per_byte: Array


@dataclasses.dataclass(frozen=True, eq=False)
class LinkSeconds:
    """Seconds of a candidate's messages on a batch of placements.

    There is a row for each placement or, of groups that train apart, for each group of each placement.

    Attributes:
        activation: [rows, D / G, P] of a message with activations, by sender.
        gradient: [rows, D / G, P] of a message with a gradient, by sender.
        packed: [rows, D / G, P] of a compressed gradient, by sender.
        ring_latency: [rows, P] latency of one turn of a stage's data-parallel ring.
        ring_per_byte: [rows, P] seconds per byte of that turn.
        scatter_latency: [rows, P] latency of a stage's reduce-scatter over data.
        scatter_per_byte: [rows, P] its seconds per byte of a rank's whole array.
        swap: [rows] of the exchange of the tied embedding's gradients; 0 if it is not tied.
        inside: the same four inside sets of data ranks that exchange first; None without them.
        between: the same four between these sets.
        outer: [batch, fragments] of the exchange of each fragment between groups; None if all ranks train together.
    """

    activation: Array
    gradient: Array
    packed: Array
    ring_latency: Array
    ring_per_byte: Array
    scatter_latency: Array
    scatter_per_byte: Array
    swap: Array
    inside: DataLinks | None = None
    between: DataLinks | None = None
    outer: Array | None = None

    @property
    def every(self) -> DataLinks:
        """Links among all data ranks."""
        return DataLinks(self.ring_latency, self.ring_per_byte, self.scatter_latency, self.scatter_per_byte)
