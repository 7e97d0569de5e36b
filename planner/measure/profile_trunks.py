"""The uplinks that hosts share, found by messages that several pairs of hosts send alone and then at once.

Hosts of a site, or of a rack, may share an uplink. Pairs of one host inside and one outside send one after the other,
and then together. If they take longer together, their flows share what they take then. If nobody says which hosts are
at a site or in a rack, the measured links do: hosts that are near each other and all far from the others.
"""

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from scipy import sparse
from tqdm import tqdm

from planner.cluster.trunks import Trunks
from planner.measure import link_timing
from planner.measure.link_timing import DevicePairs, MessageTimes, Round
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup
from planner.measure.profile_links import affordable

_SHARED = 1.25  # how much longer the messages of pairs take together, at least, if they share an uplink
_MOST = 8  # pairs that send at once
_REPEATS = 3

Array = np.ndarray


class UplinkGroup(NamedTuple):
    """Hosts that may share an uplink, and those to which they send over it.

    Attributes:
        inside: hosts of a site or of a rack.
        outside: of a site, all other hosts; of a rack, those of the same site, since the way to another site takes the
            site's uplink as well.
    """

    inside: list[int]
    outside: list[int]


def groups_of(locations: Sequence[tuple[str, str]]) -> list[UplinkGroup]:
    """Return the groups of two hosts or more that may share an uplink, each once.

    Args:
        locations: site and rack of each host; empty ones are not known.
    """
    found: dict[tuple[int, ...], UplinkGroup] = {}
    for among in ([("", site) for site, _ in locations], list(locations)):
        for where, name in dict.fromkeys(among):
            inside = [i for i, place in enumerate(among) if place == (where, name)]
            outside = [i for i, place in enumerate(among) if place[0] == where and place[1] != name]
            if name and len(inside) > 1 and outside:
                found.setdefault(tuple(inside), UplinkGroup(inside, outside))
    return list(found.values())


def groups_of_links(samples: Array) -> list[UplinkGroup]:
    """Return the groups of two hosts or more among which links are quick, while all links to other groups are slow.

    Quick links are those above the widest gap between rates, if the rates there differ by a quarter at least.

    Args:
        samples: [R, H, H] rate of each link in each repeat, in any unit, NaN if unknown; the diagonal means nothing.
    """
    hosts = samples.shape[1]
    apart, rates = ~np.eye(hosts, dtype=bool), np.full((hosts, hosts), np.nan)
    seen = apart & ~np.isnan(samples).all(axis=0)
    rates[seen] = np.nanmedian(samples[:, seen], axis=0)
    known = np.sort(rates[seen])
    if len(known) < 2:
        return []
    steps = known[1:] / known[:-1]
    place = int(steps.argmax())
    if steps[place] < _SHARED:
        return []
    quick = (rates > known[place]) & apart
    _, group = sparse.csgraph.connected_components(quick, directed=False)
    alike = group[:, None] == group
    if (alike & apart & (rates <= known[place])).any():  # some links inside are slow, too
        return []
    members = [np.flatnonzero(group == number).tolist() for number in range(group.max() + 1)]
    some = [UplinkGroup(inside, [i for i in range(hosts) if group[i] != group[inside[0]]]) for inside in members]
    return [one for one in some if min(map(len, one)) > 1]


def crossing(some: UplinkGroup) -> DevicePairs:
    """Return disjoint pairs of a host inside a group and one outside, spread over both."""
    inside, outside = some
    count = min(len(inside), len(outside), _MOST)
    return [(inside[i * len(inside) // count], outside[i * len(outside) // count]) for i in range(count)]


def affordable_groups(groups: Sequence[UplinkGroup], rounds: int) -> list[UplinkGroup]:
    """Return the groups that `rounds` are enough for, the largest first; at least one, if there are any.

    All rounds are branches of one program, and hundreds of them would compile for minutes.

    Args:
        groups: the groups.
        rounds: largest number of rounds.
    """
    found: list[UplinkGroup] = []
    for some in sorted(groups, key=lambda some: len(some.inside), reverse=True):
        rounds -= len(crossing(some)) + 1
        if rounds < 0 and found:
            break
        found.append(some)
    return found


def plan(groups: Sequence[UplinkGroup], per_host: int) -> list[Round]:
    """Return the rounds: for each group its crossing pairs one by one, and then all of them.

    Args:
        groups: the groups.
        per_host: devices per host.
    """
    rounds = []
    for some in groups:
        pairs = crossing(some)
        for at_once in [*([pair] for pair in pairs), pairs]:
            rounds.append(Round("trunk", at_once, [(a * per_host, b * per_host) for a, b in at_once]))
    return rounds


def shared_rate(alone: Array, together: Array, size: int) -> float | None:
    """Return the bytes/s of an uplink that flows share; None if they do not share one.

    Args:
        alone: [n] seconds of a message of each pair that sends alone.
        together: [n] seconds of a message of each while all send.
        size: bytes of a message.
    """
    slower = together > _SHARED * alone
    if len(alone) < 2 or not slower.any():
        return None
    # Until the last of them is done the uplink is full. Pairs whose own links are slower sent a part by then.
    until = float(together[slower].max())
    return float(size * np.minimum(1.0, until / together).sum() / until)


def trunks_of(groups: Sequence[UplinkGroup], hosts: int, times: Sequence[Array], size: int) -> Trunks | None:
    """Return the uplinks that the times of all rounds show; None if there are none.

    Args:
        groups: the groups.
        hosts: number of hosts.
        times: for each group seconds [repeats, 2, 2, n] of a message: alone, then with the others; there and back; of
            each of n pairs. Groups without repeats show nothing.
        size: bytes of a message.
    """
    behind, bandwidth = [], []
    for some, seconds in zip(groups, times):
        if not len(seconds):
            continue
        alone = np.median(seconds[:, 0], axis=0)
        # The pair that is done last is another one each time, so times are not averaged over repeats, but rates are.
        every = [[shared_rate(*both, size) for both in zip(alone, one)] for one in seconds[:, 1]]
        told = [[rate for rate in way if rate is not None] for way in zip(*every)]
        rates = [statistics.median(way) for way in told if len(way) > len(seconds) / 2]
        if rates:
            behind.append(np.isin(np.arange(hosts), some.inside))
            bandwidth.append(min(rates))
    return Trunks(np.array(behind), np.array(bandwidth)) if behind else None


def by_group(groups: Sequence[UplinkGroup], taken: Sequence[Array]) -> list[Array]:
    """Return the times of each group as `trunks_of` takes them, of the repeats in which all its rounds were run.

    Args:
        groups: the groups.
        taken: seconds [2, pairs] of each round that was run, there and back, in the order of `plan`, repeat after
            repeat; the time limit may come in the midst of one.
    """
    counts = [len(crossing(some)) for some in groups]
    every, first = sum(counts) + len(counts), 0
    found: list[Array] = []
    for count in counts:
        begins = range(first, len(taken) - count, every)
        seconds = [[np.hstack(taken[begin : begin + count]), taken[begin + count]] for begin in begins]
        found.append(np.array(seconds).reshape(-1, 2, 2, count))
        first += count + 1
    return found


def profile_trunks(
    group: ProcessGroup,
    machines: Machines,
    options: ProfileOptions,
    until: float,
    samples: Array | None = None,
) -> tuple[Trunks | None, str]:
    """Measure the uplinks that sites and racks share, or the groups of hosts that links show.

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        options: message sizes, repeats and rounds.
        until: time.monotonic() at which to stop; process 0's clock counts.
        samples: [R, H, H] rates of the links, if nobody says where hosts are; process 0's count.

    Returns:
        The uplinks, on every process, and a sentence about what was found, empty if there was nothing to measure.
    """
    if samples is None:
        every = groups_of(machines.locations)
    else:
        every = [UplinkGroup(*some) for some in group.gather(None, lambda _: groups_of_links(samples))]
    groups = affordable_groups(every, options.rounds)
    rounds = plan(groups, machines.per_host)
    if not rounds:
        return None, ""
    repeats = min(options.repeats, _REPEATS)
    size = max(options.sizes) if options.sizes else affordable(group, machines, rounds, repeats, until)[1]
    me = machines.hosts[machines.of_process[group.process]]
    exchange = link_timing.Exchange(machines.devices, rounds, (size,))
    group.meet("the programs for shared uplinks are compiled")
    taken: list[Array] = []
    total = repeats * len(rounds)
    with tqdm(total=total, desc="uplinks", unit="round", disable=group.process > 0 or None) as progress:
        for done in range(total):
            number = done % len(rounds)
            with group.watch(me, "the other hosts that send at once"):
                times = exchange(number)

            def verdict(values: list[tuple], number: int = number) -> bool:
                taken.append(_of_pairs(rounds[number], machines.of_process, values))
                # Sizes that were chosen for the time let the first repeat end, which compiling may have delayed.
                first = not options.sizes and len(taken) < len(rounds)
                return first or time.monotonic() < until

            go_on = group.gather(dataclasses.astuple(times), verdict)
            progress.update()
            if not go_on:
                break

    def shown(_: object) -> tuple[list[tuple[list[bool], float]], int]:
        times = by_group(groups, taken)
        trunks = trunks_of(groups, len(machines.hosts), times, size)
        return [(behind.tolist(), rate) for behind, rate in trunks or ()], sum(len(some) > 0 for some in times)

    told, measured = group.gather(None, shown)
    among = f"{measured} " + f"of {len(every)} " * (measured < len(every)) + "sites and racks"
    among = among if samples is None else f"{measured} groups of hosts that are near each other"
    among += ", since the time limit came" * (measured < len(groups))
    if not told:
        return None, f"no shared uplink was found among {among}"
    trunks = Trunks(np.array([behind for behind, _ in told]), np.array([rate for _, rate in told]))
    rates = ", ".join(f"{8e-6 * rate:,.4g} Mbit/s for {int(behind.sum())} hosts" for behind, rate in trunks)
    return trunks, f"{len(trunks)} found among {among}: {rates}"


def _of_pairs(one: Round, of_process: Sequence[int], values: list[tuple]) -> Array:
    """Return the seconds [2, pairs] of a message of a round's pairs, there and back.

    Args:
        one: the round.
        of_process: host of each process.
        values: fields of MessageTimes by process.
    """
    times, found = [MessageTimes(*fields) for fields in values], []
    for pair in one.hosts:
        # A process that drives all devices times them all.
        ends = [t for host, t in zip(of_process, times) if host in pair] or times
        found.append([max(t.there[0] for t in ends), max(t.back[0] for t in ends)])
    return np.array(found).T
