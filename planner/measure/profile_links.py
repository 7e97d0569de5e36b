"""The link profile of all pairs of hosts and of each host inside, measured by timed messages until the time is up."""

import dataclasses
import time

import numpy as np
from tqdm import tqdm

from planner.cluster import link_fit
from planner.cluster.trunks import Trunks
from planner.cost.link_seconds import IN_TURN
from planner.measure import link_timing
from planner.measure.machines import Machines
from planner.measure.options import MIB, ProfileOptions
from planner.measure.process_group import ProcessGroup

_PROBE = 16 * 1024  # bytes of the first messages, which show how slow the links are
_LARGEST = 16 * MIB  # bytes
_EXPLAINED = 1.5  # how much longer than a trunk's bytes an all-to-all takes at most, if the trunk is what it waits for
_FAN_OUT = (0.04, 0.16)  # seconds on the slowest link of the messages of the two all-to-alls that tell the fan-out

# MessageTimes as JSON holds them: a tiny message, there and back.
_SavedTimes = tuple[float, list[float], list[float]]


def affordable(
    group: ProcessGroup, machines: Machines, rounds: list[link_timing.Round], repeats: int, until: float
) -> tuple[int, int]:
    """Return two message sizes, one four times the other, as large as half of the remaining time allows.

    Every pair sends a small message first, which shows how slow the links are.

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        rounds: rounds to run.
        repeats: how often they will run.
        until: time.monotonic() at which to stop; process 0's clock counts.
    """
    me = machines.hosts[machines.of_process[group.process]]
    exchange = link_timing.Exchange(machines.devices, rounds, (_PROBE,))
    group.meet("the first link programs are compiled")
    with group.watch(me, "the other hosts in the first round of links"):
        times = [exchange(number) for number in range(len(rounds))]

    def verdict(values: list[list[_SavedTimes]]) -> int:
        # The slowest pair of each round, in both directions.
        slowest = [max(there[0] + back[0] for _, there, back in of_round) for of_round in zip(*values)]
        messages = repeats * link_timing.CALLS * link_timing.BACK_TO_BACK
        seconds = sum(slowest) * messages / _PROBE  # per byte
        size = _PROBE
        while size < _LARGEST and 4 * size * 1.25 * seconds < (until - time.monotonic()) / 2:
            size *= 4
        return size

    size = group.gather([dataclasses.astuple(t) for t in times], verdict)
    return size // 4, size


def profile_links(
    group: ProcessGroup,
    machines: Machines,
    options: ProfileOptions,
    until: float,
    trunks: Trunks | None = None,
) -> tuple[link_timing.LinkTimes, str]:
    """Run all rounds, repeat after repeat, until they are done or the time is up.

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        options: message sizes, repeats and rounds.
        until: time.monotonic() at which to stop; process 0's clock counts.
        trunks: uplinks that hosts share, in each of which one pair sends at a time; None: there are none.

    Returns:
        The times, complete on process 0 only, and a sentence on the rounds that were left out, empty if none was.
    """
    rounds = link_timing.plan_rounds(len(machines.hosts), machines.per_host, options.rounds, trunks)
    sizes = options.sizes
    if rounds and not sizes:
        sizes = affordable(group, machines, rounds, options.repeats, until)
    collected = link_timing.LinkTimes(rounds, len(machines.hosts), machines.per_host, sizes, options.repeats)
    if not rounds:
        return collected, ""
    mine = machines.of_process[group.process]
    me = machines.hosts[mine]
    exchange = link_timing.Exchange(machines.devices, rounds, sizes)
    group.meet("the link programs are compiled")
    total = options.repeats * len(rounds)
    with tqdm(total=total, desc="links", unit="round", disable=group.process > 0 or None) as progress:
        for done in range(total):
            repeat, number = divmod(done, len(rounds))
            partner = next((b if a == mine else a for a, b in rounds[number].hosts if mine in (a, b)), mine)
            with group.watch(me, machines.hosts[partner]):
                times = exchange(number)

            def verdict(values: list[_SavedTimes], repeat: int = repeat, number: int = number) -> bool:
                seen: dict[int, list[link_timing.MessageTimes]] = {}
                for process, value in enumerate(values):
                    seen.setdefault(machines.of_process[process], []).append(link_timing.MessageTimes(*value))
                collected.enter(repeat, number, seen)
                return time.monotonic() < until

            go_on = group.gather(dataclasses.astuple(times), verdict)
            progress.update()
            if not go_on and done + 1 < total:
                progress.total = done + 1  # so that the bar does not look as if it had stopped on the way
                return collected, f"{total - done - 1} of {total} rounds of links: the time limit came"
    return collected, ""


def fan_out(slowness: float, flows: tuple[int, int], nics: int) -> float:
    """Return with how many hosts a host exchanges data at once at full speed, from the times of all-to-alls.

    It is below 1 if a NIC is the limit and waits in one direction for pairs of ranks whose messages take turns.

    Args:
        slowness: seconds per byte of a message in an all-to-all, over those of the slowest link for one flow.
        flows: flows between two hosts, and flows that leave a host.
        nics: flows that the link of two hosts carries at full speed.
    """
    between, leaving = flows
    # The flows of a single pair take as long as this, however many pairs there are; less is the timing's noise.
    least = max(between / nics, 1.0)
    return max(leaving / (nics * max(slowness, least)), 1 / IN_TURN)


def time_fan_out(
    group: ProcessGroup,
    machines: Machines,
    filled: link_fit.Filled,
    nics: int,
    largest: int,
    trunks: Trunks | None = None,
) -> float:
    """Return with how many hosts a host exchanges data at once at full speed, timed by an all-to-all.

    If an all-to-all takes as long as trunks alone explain, it does not show what hosts could do. The answer is then
    half of the others, the least of hosts whose links are their own (gloo may send the two messages of a pair in turn).

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        filled: the measured links.
        nics: NICs per host.
        largest: bytes of the largest messages that the links were measured with.
        trunks: uplinks that hosts share; None: there are none.
    """
    count, per_host = len(machines.hosts), machines.per_host
    apart = ~np.eye(count, dtype=bool)
    per_byte = 1 / np.median(filled.samples, axis=0)[apart].min()
    mine = machines.of_process[group.process]
    sizes = [min(int(seconds / per_byte), largest) // 4 * 4 for seconds in _FAN_OUT]
    took = []
    for size in sizes:
        last = size * per_byte / 2
        pause = float(last * mine / (count - 1))
        timed = link_timing.all_to_all(machines.devices, per_host, size, pause)
        group.meet("an all-to-all is compiled")
        with group.watch(machines.hosts[mine], "the others in an all-to-all over the hosts"):
            own = timed()
        took.append(group.gather(own, max) - last)
    # Small messages take longer than their bytes do, so the slope counts.
    slope = (took[1] - took[0]) / (sizes[1] - sizes[0]) if sizes[0] < sizes[1] else took[1] / sizes[1]
    for behind, rate in trunks or ():
        if slope <= _EXPLAINED * per_host * behind.sum() * (~behind).sum() / rate:
            return max((count - 1) / 2, 1.0)
    return fan_out(slope / per_byte, (per_host, per_host * (count - 1)), nics)
