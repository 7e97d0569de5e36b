"""The parts of a job that may become slow: hosts' CPUs, devices, links between hosts, and the input."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import jax
import numpy as np

CPU, DEVICE, LINK, INPUT = "cpu", "device", "link", "input"


class Suspect(NamedTuple):
    """A part of the job that may become slow.

    Attributes:
        kind: CPU, DEVICE, LINK or INPUT.
        first: Number of the process; of a link the number of the host that sends.
        second: Of a device its place in its process; of a link the number of the host that receives; otherwise 0.
    """

    kind: str
    first: int
    second: int = 0


SuspectSeconds = dict[Suspect, float]


def to_text(seconds: Mapping[Suspect, float]) -> str:
    """Return seconds of parts as text, to travel between processes."""
    return json.dumps([[*part, value] for part, value in seconds.items()])


def from_texts(texts: Iterable[str]) -> SuspectSeconds:
    """Return the seconds of all processes' parts."""
    return {Suspect(*part): value for text in texts for *part, value in json.loads(text)}


HostPair = tuple[int, int]  # numbers of the host that sends and of the one that receives
DevicePair = tuple[int, int]  # positions in the mesh, flattened


def neighbors(devices: np.ndarray, host_of: Sequence[int]) -> dict[HostPair, DevicePair]:
    """Return a pair of devices for each link between hosts, in one direction, over which mesh neighbors send.

    Each axis is a ring in both directions. A link that several pairs of devices use has the first of them.

    Args:
        devices: Devices of the mesh [data, pipe, ...].
        host_of: Number of the host of each process.
    """
    host = np.vectorize(lambda device: host_of[device.process_index], otypes=[int])(devices)
    place = np.arange(devices.size).reshape(devices.shape)
    found: dict[HostPair, DevicePair] = {}
    for axis in range(devices.ndim):
        ends = [np.stack([x, np.roll(x, -1, axis)], -1).reshape(-1, 2).tolist() for x in (host, place)]
        for (a, b), (i, j) in zip(*ends):
            if a != b:
                found.setdefault((a, b), (i, j))
                found.setdefault((b, a), (j, i))
    return found


def rounds(links: Iterable[HostPair]) -> list[list[HostPair]]:
    """Return the links in rounds, in none of which a host takes part twice, so that each is timed by itself."""
    found: list[tuple[list[HostPair], set[int]]] = []
    for link in links:
        place = next((one for one in found if not one[1] & set(link)), None)
        if place is None:
            found.append(place := ([], set()))
        place[0].append(link)
        place[1].update(link)
    return [pairs for pairs, _ in found]


def numbered(names: Sequence[str]) -> tuple[list[str], list[int]]:
    """Return the hosts' names in order of their first process, and the number of the host of each process."""
    hosts = list(dict.fromkeys(names))
    return hosts, [hosts.index(name) for name in names]


def of_this_process(devices: Iterable[jax.Device]) -> list[jax.Device]:
    """Return this process's devices that can be slow by themselves: virtual ones on CPUs share its cores."""
    mine = sorted((d for d in devices if d.process_index == jax.process_index()), key=lambda d: d.id)
    return mine[:1] if mine and mine[0].platform == "cpu" else mine
