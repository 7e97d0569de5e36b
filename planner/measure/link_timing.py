"""Timed messages between all pairs of hosts: the rounds of pairs, the programs that send, and links from the times.

Hosts are paired as in a round-robin tournament (the circle method). Disjoint pairs measure at once, and every ordered
pair has its turn. All rounds are branches of one compiled program per message size, since compiling takes longer than
measuring. Each process times its own part; a pair's time is that of the end that took longer.

    latency     half the round trip of tiny messages; only synchronized clocks could tell the two directions apart
    bandwidth   large messages sent back to back, measured in each direction

Each is timed a few times in a row, and the quickest time counts, except where pairs share an uplink. The others may
show a machine that was busy with something else, not the link. Repeats are further apart, so they differ as the link
itself does.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from planner.cluster.link_fit import fit_line
from planner.cluster.trunks import Trunks

DevicePairs = list[tuple[int, int]]
Branch = Callable[[int], None]  # runs the branch of that number and waits for it

_AXIS = "device"
_TINY = 8  # bytes
_ECHOES = 16  # round trips of tiny messages per measurement
BACK_TO_BACK = 2  # large messages per measurement
CALLS = 3  # measurements in a row; the quickest one counts


def tournament(count: int) -> list[DevicePairs]:
    """Return rounds of disjoint pairs in which every two of `count` meet once; if it is odd, one rests per round."""
    seats = [*range(count), *[None] * (count % 2)]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        rounds.append(
            [(min(a, b), max(a, b)) for a, b in zip(seats[:half], reversed(seats[half:])) if None not in (a, b)]
        )
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def sampled(rounds: list[DevicePairs], most: int, seed: int = 0) -> list[DevicePairs]:
    """Return a random sample of the rounds, of those with the most pairs first.

    Args:
        rounds: rounds of pairs.
        most: largest number of rounds to return.
        seed: seed of the sample.
    """
    if len(rounds) <= most:
        return rounds
    order = np.random.default_rng(seed).permutation(len(rounds))
    chosen = sorted(order, key=lambda i: len(rounds[i]), reverse=True)[:most]
    return [rounds[i] for i in sorted(chosen)]


def one_by_one(rounds: list[DevicePairs], trunks: Trunks) -> list[DevicePairs]:
    """Return the rounds taken apart, so that in none two pairs send through the same trunk.

    Args:
        rounds: rounds of disjoint pairs.
        trunks: uplinks that hosts share.
    """
    found = []
    for number, pairs in enumerate(rounds):
        parts: list[tuple[DevicePairs, set[int]]] = [([], set())]  # pairs, and the trunks that they take
        # The first part is the largest, so a sample has it. Its pair through a trunk should not always be host 0's.
        first = number % len(pairs)
        for a, b in (*pairs[first:], *pairs[:first]):
            taken = set(np.flatnonzero(trunks.behind[:, a] != trunks.behind[:, b]).tolist())
            part = next((part for part in parts if not taken & part[1]), None)
            if part is None:
                part = ([], set())
                parts.append(part)
            part[0].append((a, b))
            part[1].update(taken)
        found += [of_part for of_part, _ in parts if of_part]
    return found


@dataclasses.dataclass(frozen=True)
class Round:
    """Pairs that measure at once.

    Attributes:
        kind: "between" for one device of each host, "inside" for two devices of the same host, "crowd" for all devices
            of both hosts, or "trunk" for one device of each of some hosts that may share an uplink. A crowd shows how
            many flows a host's NICs carry at full speed.
        hosts: pairs of hosts; (h, h) inside a host.
        devices: pairs of devices, numbered host after host.
    """

    kind: str
    hosts: DevicePairs
    devices: DevicePairs


def plan_rounds(hosts: int, per_host: int, most: int, trunks: Trunks | None = None) -> list[Round]:
    """Return the rounds of one repeat.

    Args:
        hosts: number of hosts.
        per_host: devices per host.
        most: largest number of rounds between hosts. If there are more, a random sample is taken.
        trunks: uplinks that hosts share, in each of which one pair sends at a time; None: there are none.
    """
    every = tournament(hosts) if hosts > 1 else []
    between = sampled(one_by_one(every, trunks) if trunks else every, most)
    rounds = []
    if per_host > 1:
        ends = [(h * per_host, h * per_host + 1) for h in range(hosts)]
        rounds.append(Round("inside", [(h, h) for h in range(hosts)], ends))
        if between:
            crowd = [(a * per_host + i, b * per_host + i) for a, b in between[0] for i in range(per_host)]
            rounds.append(Round("crowd", between[0], crowd))
    return [Round("between", pairs, [(a * per_host, b * per_host) for a, b in pairs]) for pairs in between] + rounds


@dataclasses.dataclass(frozen=True)
class MessageTimes:
    """Times of one round on one process, in seconds per message.

    Attributes:
        echo: half the round trip of a tiny message.
        there: seconds per message size, from the first host of the pair to the second.
        back: seconds per message size in the other direction.
    """

    echo: float
    there: list[float]
    back: list[float]


def _flipped(pairs: DevicePairs) -> DevicePairs:
    return [(b, a) for a, b in pairs]


class Exchange:
    """The compiled programs of all rounds on all devices, host after host."""

    def __init__(self, devices: Sequence[jax.Device], rounds: list[Round], sizes: Sequence[int]) -> None:
        self.rounds, self.sizes = rounds, tuple(sizes)
        mesh = Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))
        pairs = [r.devices for r in rounds]
        self._echo = _program(mesh, [(p, _flipped(p)) for p in pairs], _ECHOES, _TINY)
        both = [(p,) for p in pairs] + [(_flipped(p),) for p in pairs]
        self._send = [_program(mesh, both, BACK_TO_BACK, size) for size in self.sizes]
        self._meet = _meeting(mesh) if any(r.kind == "trunk" for r in rounds) else None

    def __call__(self, number: int) -> MessageTimes:
        """Run one round.

        Before a timed call the pairs exchange tiny messages, so that both ends start together. Pairs that may share an
        uplink start when all processes have met, and send without a break, which would leave the uplink to the others.
        """
        echo = min(_seconds(self._echo, number) for _ in range(CALLS)) / (2 * _ECHOES)

        def call(send: Branch, branch: int) -> float:
            self._echo(number)
            return _seconds(send, branch) / BACK_TO_BACK

        def typical(send: Branch, branch: int) -> float:
            if self.rounds[number].kind != "trunk":
                return min(call(send, branch) for _ in range(CALLS))
            assert self._meet is not None
            self._meet()
            return sum(_seconds(send, branch) for _ in range(CALLS)) / (CALLS * BACK_TO_BACK)

        there, back = ([typical(s, number + offset) for s in self._send] for offset in (0, len(self.rounds)))
        return MessageTimes(echo, there, back)


def _seconds(run: Branch, branch: int) -> float:
    began = time.perf_counter()
    run(branch)
    return time.perf_counter() - began


def _program(mesh: Mesh, branches: Sequence[tuple[DevicePairs, ...]], turns: int, size: int) -> Branch:
    """Compile a program that runs the permutes of a branch in order, `turns` times, on `size` bytes per device."""

    def branch(permutes: tuple[DevicePairs, ...]) -> Callable[[jax.Array], jax.Array]:
        def turn(_: int, x: jax.Array) -> jax.Array:
            for pairs in permutes:
                x = lax.ppermute(x, _AXIS, pairs)
            return x

        return lambda x: lax.fori_loop(0, turns, turn, x)

    def local(x: jax.Array, number: jax.Array) -> jax.Array:
        return lax.switch(number, [branch(permutes) for permutes in branches], x)

    spec = PartitionSpec(_AXIS)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False)
    shape = (mesh.size, size // 4)
    make = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=NamedSharding(mesh, spec))
    number = jax.ShapeDtypeStruct((), np.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    x = make()
    compiled = jax.jit(mapped).lower(x, number).compile()

    def run(number: int) -> None:
        jax.block_until_ready(compiled(x, np.int32(number)))

    return run


def _meeting(mesh: Mesh) -> Callable[[], None]:
    """Compile a program that ends once all processes run it."""
    spec = PartitionSpec(mesh.axis_names)
    ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=NamedSharding(mesh, spec))()
    added = jax.shard_map(lambda x: lax.psum(x, mesh.axis_names), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    compiled = jax.jit(added).lower(ones).compile()
    return lambda: jax.block_until_ready(compiled(ones))


def _hosts_mesh(devices: Sequence[jax.Device], per_host: int) -> Mesh:
    return Mesh(np.array(devices).reshape(-1, per_host), ("host", "device"), axis_types=(AxisType.Auto,) * 2)


def all_to_all(
    devices: Sequence[jax.Device], per_host: int, size: int, pause: float, repeats: int = 5
) -> Callable[[], float]:
    """Compile an all-to-all over the hosts, and return a function that returns its seconds.

    These are the quickest of some calls, from the first host's start on. Hosts start a little apart, as they do in
    training. gloo then sends the two messages of a pair one after the other. All processes call the function together.

    Args:
        devices: all devices, host after host.
        per_host: devices per host, all of which take part.
        size: bytes that each device sends to each of the other hosts.
        pause: seconds that this process waits before it starts; hosts should differ.
        repeats: number of timed calls.
    """
    mesh = _hosts_mesh(devices, per_host)
    spec, hosts = PartitionSpec(("host", "device")), mesh.shape["host"]

    def local(x: jax.Array) -> jax.Array:
        return lax.all_to_all(x, "host", 1, 1)

    sharding = NamedSharding(mesh, spec)
    make = jax.jit(lambda: jnp.zeros((mesh.size, hosts, size // 4), jnp.float32), out_shardings=sharding)
    x = make()
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    run, meet = jax.jit(mapped).lower(x).compile(), _meeting(mesh)

    def call(_: int) -> None:
        time.sleep(pause)
        jax.block_until_ready(run(x))

    def quickest() -> float:
        seconds = []
        for _ in range(repeats + 1):  # the first call makes the connections
            meet()
            seconds.append(_seconds(call, 0))
        return min(seconds[1:])

    return quickest


# --- From times to links ----------------------------------------------------------------------------------------------


class LinkTimes:
    """The times of all rounds, as process 0 collects them.

    Attributes:
        rounds: the rounds of one repeat.
        sizes: [K] bytes of the messages.
        per_host: devices per host.
        echo: [R, H, H] seconds of a tiny message, NaN if not measured. The diagonal is for links inside hosts.
        sends: [R, H, H, K] seconds of one message of each size, NaN if not measured.
    """

    def __init__(self, rounds: list[Round], hosts: int, per_host: int, sizes: Sequence[int], repeats: int) -> None:
        self.rounds, self.sizes, self.per_host = rounds, np.array(sizes, float), per_host
        self.echo = np.full((repeats, hosts, hosts), np.nan)
        self.sends = np.full((repeats, hosts, hosts, len(sizes)), np.nan)
        self._crowded: list[tuple[int, int, int, np.ndarray]] = []  # repeat, sender, receiver, seconds per size

    def enter(self, repeat: int, number: int, times: dict[int, list[MessageTimes]]) -> None:
        """Enter the times of one round.

        Args:
            repeat: index of the repeat.
            number: index of the round in `rounds`.
            times: times of each host's processes, by host.
        """
        worst = {
            host: [np.max([getattr(t, name) for t in seen], axis=0) for name in ("echo", "there", "back")]
            for host, seen in times.items()
        }
        kind = self.rounds[number].kind
        for a, b in self.rounds[number].hosts:
            echo, there, back = (np.maximum(x, y) for x, y in zip(worst[a], worst[b]))
            if kind == "crowd":
                self._crowded += [(repeat, a, b, there), (repeat, b, a, back)]
                continue
            if kind == "inside":
                there = back = (there + back) / 2
            self.echo[repeat, a, b] = self.echo[repeat, b, a] = echo
            self.sends[repeat, a, b], self.sends[repeat, b, a] = there, back

    def links(self) -> tuple[np.ndarray, np.ndarray]:
        """Return latencies [H, H] in seconds and bandwidths [R, H, H] in bytes/s, NaN if not measured."""
        known = ~np.isnan(self.echo)
        alpha, samples = np.full(self.echo.shape[1:], np.nan), np.full(self.echo.shape, np.nan)
        samples[known] = 1 / fit_line(self.sizes, self.sends[known])[1]
        any_ = known.any(axis=0)
        alpha[any_] = np.nanmedian(self.echo[:, any_], axis=0)
        return alpha, samples

    def nics(self) -> int:
        """Return the flows that a host sends at full speed: the bandwidth of all its devices over that of one."""
        _, samples = self.links()
        ratios = [
            self.per_host / (fit_line(self.sizes, seconds)[1] * samples[repeat, a, b])
            for repeat, a, b, seconds in self._crowded
            if not np.isnan(samples[repeat, a, b])
        ]
        return int(np.clip(round(float(np.median(ratios))), 1, self.per_host)) if ratios else 1
