"""The hosts of a run, their processes and their devices."""

import dataclasses
import os
import socket
from typing import Any

import jax

from paxtrain.devices.gpus import GPUS
from paxtrain.errors import UserError
from planner.measure.process_group import ProcessGroup
from planner.measure.reachability import check_reachable


@dataclasses.dataclass(frozen=True)
class Machines:
    """The hosts of a run, their processes and their devices.

    Attributes:
        hosts: host names.
        of_process: index of the host, per process.
        devices: devices of all hosts, host after host.
        per_host: devices per host.
        kinds: device kind of each host, a key of GPUS or "cpu".
        memory: bytes of one device, per host.
        racks: rack of each host, as the launcher or --rack says.
    """

    hosts: tuple[str, ...]
    of_process: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    per_host: int
    kinds: tuple[str, ...]
    memory: tuple[float, ...]
    racks: tuple[str, ...]


def _local_kind() -> tuple[str, float]:
    """Return this process's device kind and the bytes of one device's memory."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "cpu", total / jax.local_device_count()
    for kind, gpu in GPUS.items():
        if gpu.name == device.device_kind:
            return kind, float(gpu.memory)
    raise UserError(
        f"{socket.gethostname()} has {device.device_kind}, which paxtrain/devices/gpus.py does not list; add it there"
    )


def find_machines(group: ProcessGroup, rack: str, name: str = "") -> Machines:
    """Collect every process's host and devices, and name the processes after their hosts.

    Args:
        group: the processes of the run. Its `names` are set.
        rack: this host's rack.
        name: this host's name; empty: the name that the operating system gives it.

    Raises:
        UserError: hosts have different numbers of devices, a device is unknown, or a process cannot be reached.
    """
    problem = ""
    try:
        kind, memory = _local_kind()
    except UserError as error:
        kind, memory, problem = "", 0.0, str(error)
    name = name or socket.gethostname()

    def verdict(values: list[Any]) -> list[Any]:
        if problem := next((value[-1] for value in values if value[-1]), ""):
            raise UserError(problem)
        return values

    roster = group.gather([name, jax.local_device_count(), kind, memory, rack, problem], verdict)
    hosts = tuple(dict.fromkeys(row[0] for row in roster))
    group.names = [row[0] if len(hosts) == len(roster) else f"{row[0]} (process {i})" for i, row in enumerate(roster)]
    of_process = tuple(hosts.index(row[0]) for row in roster)
    counts = [sum(row[1] for row in roster if row[0] == host) for host in hosts]
    odd = next((i for i, count in enumerate(counts) if count != counts[0]), None)
    if odd is not None:
        raise UserError(
            f"{hosts[0]} has {counts[0]} devices, but {hosts[odd]} has {counts[odd]}; give every host the same number"
        )
    first = [roster[of_process.index(h)] for h in range(len(hosts))]
    check_reachable(group)
    return Machines(
        hosts=hosts,
        of_process=of_process,
        devices=tuple(sorted(jax.devices(), key=lambda d: (of_process[d.process_index], d.process_index, d.id))),
        per_host=counts[0],
        kinds=tuple(row[2] for row in first),
        memory=tuple(row[3] for row in first),
        racks=tuple(row[4] for row in first),
    )
