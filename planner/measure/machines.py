"""The hosts of a run, their processes and their devices."""

import dataclasses
import os
import pathlib
import socket
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from paxtrain.devices import gpus, host
from paxtrain.errors import UserError
from planner.cluster.cluster import ASSUMED
from planner.cluster.cluster_file import site_numbers
from planner.cluster.device_sheets import DeviceSheet
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
        kinds: device kind of each host: a key of gpus.ALL, or "cpu", or the driver's name of a GPU that is in `sheets`.
        memory: bytes of one device, per host.
        racks: rack of each host, as the launcher or --rack says.
        sites: site of each host, as --site says; all empty: there is one.
        crowded: for each process the number of processes that compute on its computer's cores, and the number of
            these cores, if there are fewer of them; else None. Empty: no process shares its cores.
        sheets: what --peak and a measurement say of GPUs that are not listed, by kind.
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
    sheets: Mapping[str, DeviceSheet] = dataclasses.field(default_factory=dict)

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
        sheet: values of a DeviceSheet if the device is not listed.
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
    sheet: dict[str, Any] | None = None


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


def _memory_rate(floats: int = 1 << 28) -> float:
    """Return the bytes/s of passes over memory, the best of a few, each of which reads and writes so many floats."""
    x = jnp.zeros(floats, jnp.float32)
    more = jax.jit(lambda x: x + 1, donate_argnums=0)
    best = np.inf
    for _ in range(5):
        x = jax.block_until_ready(more(x))
        began = time.perf_counter()
        x = jax.block_until_ready(more(x))
        best = min(best, time.perf_counter() - began)
    return 8 * floats / best


def _unlisted(device: jax.Device, peak: float) -> DeviceSheet:
    """Return the sheet of a GPU that is not listed, of its runtime's figures and a measurement.

    Args:
        device: the GPU.
        peak: its dense bfloat16 FLOP/s.
    """
    share = os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION") or os.environ.get("XLA_CLIENT_MEM_FRACTION") or 0.75
    major, minor = map(int, str(device.compute_capability).split("."))
    return DeviceSheet(
        peak_flops=peak,
        single_flops=peak / 2,
        bandwidth=_memory_rate() / ASSUMED.memory,  # plans take that share of a data sheet's bandwidth
        memory=round((device.memory_stats() or {})["bytes_limit"] / float(share)),
        capability=(major, minor),
        sms=device.core_count,
    )


def _local_kind(peak: float) -> tuple[str, float, DeviceSheet | None]:
    """Return this process's device kind, the bytes of one device's memory, and its sheet if the kind is not listed.

    Args:
        peak: dense bfloat16 FLOP/s of one device, if it is not listed; 0: not known.

    Raises:
        UserError: the device is not listed, and its peak is not given.
    """
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return "cpu", host.memory() / jax.local_device_count(), None
    if kind := gpus.find(device.device_kind):
        return kind, float(gpus.ALL[kind].memory), None
    if not peak:
        raise UserError(
            f"{socket.gethostname()} has {device.device_kind}, which paxtrain/devices/gpus.py does not list; give "
            "--peak, its data sheet's FLOP/s of dense bfloat16 products (1.25e14 for an A10); the rest is measured"
        )
    sheet = _unlisted(device, peak)
    return device.device_kind, sheet.memory, sheet


def _sheet(values: Mapping[str, Any]) -> DeviceSheet:
    """Return the sheet of values that came as JSON, which knows no tuples."""
    return DeviceSheet(**{**values, "capability": tuple(values["capability"])})


def find_machines(group: ProcessGroup, rack: str, name: str = "", site: str = "", peak: float = 0.0) -> Machines:
    """Collect every process's host and devices, and name the processes after their hosts.

    Args:
        group: the processes of the run; their names are set.
        rack: this host's rack.
        name: this host's name; empty: the name that the operating system gives it.
        site: this host's site.
        peak: dense bfloat16 FLOP/s of a device of this host that is not listed; 0: it is.

    Raises:
        UserError: hosts have different numbers of devices, a device is unknown, or a process cannot be reached.
    """
    problem, sheet = "", None
    try:
        kind, memory, sheet = _local_kind(peak)
    except UserError as error:
        kind, memory, problem = "", 0.0, str(error)
    name = name or socket.gethostname()

    def verdict(values: list[_Entry]) -> list[_Entry]:
        entries = [_Entry(*value) for value in values]
        if problem := next((entry.problem for entry in entries if entry.problem), ""):
            raise UserError(problem)
        return entries

    cores = len(os.sched_getaffinity(0)) if kind == "cpu" else 0
    mine = _Entry(
        name,
        jax.local_device_count(),
        kind,
        memory,
        rack,
        site,
        problem,
        _computer(),
        cores,
        dataclasses.asdict(sheet) if sheet else None,
    )
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
        sheets={entry.kind: _sheet(entry.sheet) for entry in reversed(roster) if entry.sheet},
    )
