"""The hosts of a run, their processes and their devices."""

import dataclasses
import os
import pathlib
import socket
from collections.abc import Sequence
from typing import NamedTuple

import jax

from paxtrain.devices import gpus
from paxtrain.errors import UserError
from planner.cluster.cluster_file import site_numbers
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
        kinds: device kind of each host: a key of GPUS, or "cpu".
        memory: bytes of one device, per host.
        racks: rack of each host, as the launcher or --rack says.
        sites: site of each host, as --site says; all empty: there is one.
        crowded: for each process the number of processes that compute on its computer's cores, and the number of
            these cores, if there are fewer of them; else None. Empty: no process shares its cores.
    """

    hosts: tuple[str, ...]
    of_process: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    per_host: int
    kinds: tuple[str, ...]
    memory: tuple[float, ...]
    racks: tuple[str, ...]
    sites: tuple[str, ...] = ()
    crowded: tuple[tuple[int, int] | None, ...] = ()

    @property
    def site_numbers(self) -> tuple[int, ...]:
        """Site of each host, numbered from 0; empty: all are at one."""
        return site_numbers(self.sites)

    @property
    def locations(self) -> list[tuple[str, str]]:
        """Site and rack of each host."""
        return list(zip(self.sites or ("",) * len(self.hosts), self.racks, strict=True))

    @property
    def most_crowded(self) -> tuple[int, int] | None:
        """The entry of `crowded` with the most processes for each core; None if all have cores to themselves."""
        return max(filter(None, self.crowded), key=lambda found: found[0] / found[1], default=None)

    def processes_per_core(self, process: int) -> float:
        """Return the processes for each core of a process's computer; 0 if it has cores to itself."""
        processes, cores = (self.crowded[process] if self.crowded else None) or (0, 1)
        return processes / cores


class _Entry(NamedTuple):
    """The facts that a process gives process 0. They travel as JSON, which makes a list of them.

    Attributes:
        host: name of its host.
        devices: number of its devices.
        kind: device kind.
        memory: bytes of one device.
        rack: rack of its host.
        site: site of its host.
        problem: reason why its devices cannot be used; empty: none.
        computer: name of the computer, which hosts may share.
        cores: number of its cores that the process may use; 0: it computes on a GPU.
    """

    host: str
    devices: int
    kind: str
    memory: float
    rack: str
    site: str
    problem: str
    computer: str
    cores: int


_BOOT_ID = pathlib.Path("/proc/sys/kernel/random/boot_id")  # which containers of a computer share


def _computer() -> str:
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def crowded_cores(roster: Sequence[_Entry]) -> tuple[tuple[int, int] | None, ...]:
    """Return `Machines.crowded`.

    Args:
        roster: what every process says of itself.
    """
    on: dict[str, list[int]] = {}
    for entry in roster:
        if entry.cores:
            on.setdefault(entry.computer, []).append(entry.cores)
    crowded = {computer: (len(cores), max(cores)) for computer, cores in on.items() if len(cores) > max(cores)}
    return tuple(crowded.get(entry.computer) if entry.cores else None for entry in roster)


def _local_kind() -> tuple[str, float]:
    """Return this process's device kind and the bytes of one device's memory.

    Raises:
        UserError: the device is not listed in GPUS.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return "cpu", total / jax.local_device_count()
    kind = gpus.find(device.device_kind)
    if kind is None:
        raise UserError(
            f"{socket.gethostname()} has {device.device_kind}, which paxtrain/devices/gpus.py does not list; it lists "
            f"{', '.join(gpu.name for gpu in gpus.GPUS.values())}; add yours there"
        )
    return kind, float(gpus.GPUS[kind].memory)


def find_machines(group: ProcessGroup, rack: str, name: str = "", site: str = "") -> Machines:
    """Collect every process's host and devices, and name the processes after their hosts.

    Args:
        group: the processes of the run; their names are set.
        rack: this host's rack.
        name: this host's name; empty: the name that the operating system gives it.
        site: this host's site.

    Raises:
        UserError: hosts have different numbers of devices, a device is unknown, or a process cannot be reached.
    """
    problem = ""
    try:
        kind, memory = _local_kind()
    except UserError as error:
        kind, memory, problem = "", 0.0, str(error)
    name = name or socket.gethostname()

    def verdict(values: list[_Entry]) -> list[_Entry]:
        entries = [_Entry(*value) for value in values]
        if problem := next((entry.problem for entry in entries if entry.problem), ""):
            raise UserError(problem)
        return entries

    cores = len(os.sched_getaffinity(0)) if kind == "cpu" else 0
    mine = _Entry(name, jax.local_device_count(), kind, memory, rack, site, problem, _computer(), cores)
    roster = [_Entry(*value) for value in group.gather(mine, verdict)]
    hosts = tuple(dict.fromkeys(entry.host for entry in roster))
    alone = len(hosts) == len(roster)
    group.names = [entry.host if alone else f"{entry.host} (process {i})" for i, entry in enumerate(roster)]
    of_process = tuple(hosts.index(entry.host) for entry in roster)
    counts = [sum(entry.devices for entry in roster if entry.host == host) for host in hosts]
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
        kinds=tuple(entry.kind for entry in first),
        memory=tuple(entry.memory for entry in first),
        racks=tuple(entry.rack for entry in first),
        sites=tuple(entry.site for entry in first),
        crowded=crowded_cores(roster),
    )
