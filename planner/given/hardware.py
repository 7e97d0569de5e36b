"""What was given about a cluster, and its hardware from it: hosts, devices of a host, their kind, NICs."""

import dataclasses
import math
from collections.abc import Sequence

from paxtrain.devices import gpus
from paxtrain.errors import UserError, whole
from planner.cluster import hostlist
from planner.given import host_topology, links, units
from planner.given.host_topology import HostNics, HostTopology
from planner.given.links import FittedLog
from planner.given.slurm_topology import SlurmTopology

_NO_NICS = HostNics(0, rails=False, ports=1, bandwidth=0.0, said=())


@dataclasses.dataclass(frozen=True)
class Given:
    """What a user has.

    Attributes:
        logs: logs of nccl-tests with their lines.
        topologies: topologies of a host, from `nvidia-smi topo -m` or NCCL's XML.
        slurm: racks of the hosts; None: not given.
        hosts: number of hosts, or a hostlist; "": those of SLURM's topology or of the logs.
        device: device kind; "": as the logs name it.
        nics: NICs of a host; 0: as the topology or the logs tell.
        nic_gbit: Gbit/s of a NIC; 0: as NCCL's XML tells.
        name: the cluster's name.
    """

    logs: tuple[FittedLog, ...] = ()
    topologies: tuple[HostTopology, ...] = ()
    slurm: SlurmTopology | None = None
    hosts: str = ""
    device: str = ""
    nics: int = 0
    nic_gbit: float = 0.0
    name: str = "cluster"


@dataclasses.dataclass(frozen=True)
class Hardware:
    """The hardware of a cluster.

    Attributes:
        hosts: names of the hosts, or their number if they have none.
        devices: devices of a host.
        kind: their kind, a key of gpus.ALL.
        nics: NICs of a host.
        racks: rack of each host; (): there is one, or none is named.
        said: sentences on what was taken from flags, and on what nothing says.
    """

    hosts: int | tuple[str, ...]
    devices: int
    kind: str
    nics: HostNics
    racks: tuple[str, ...]
    said: tuple[str, ...]

    @property
    def count(self) -> int:
        """Return the number of hosts."""
        return self.hosts if isinstance(self.hosts, int) else len(self.hosts)


def find(given: Given, kinds: Sequence[str] = ()) -> Hardware:
    """Return the hardware that the files and the user tell.

    Args:
        given: what the user has.
        kinds: device kinds that traces are of.

    Raises:
        UserError: something needed is missing, or two files contradict each other.
    """
    hosts, devices = _hosts(given), _devices(given)
    reported = [name for fitted in given.logs for name in fitted.log.devices]
    kind = kind_of(given.device, [*reported, *kinds])
    racks = () if given.slurm is None or isinstance(hosts, int) else tuple(given.slurm.of(hosts))
    nics, said = _nics(given, devices)
    return Hardware(hosts, devices, kind, nics, racks if len(set(racks)) > 1 else (), said)


def kind_of(device: str, reported: Sequence[str]) -> str:
    """Return the device kind, by its name here.

    Args:
        device: name that the user gave, or "".
        reported: names that drivers reported in logs or traces.

    Raises:
        UserError: it is not known, or not the same everywhere.
    """
    if device:
        found = gpus.find(device)
        if found is None:
            raise UserError(f"--device={device} is not known; known are {', '.join(gpus.ALL)}")
        return found
    names = list(dict.fromkeys(reported))
    if not names:
        raise UserError("nothing given says which device it is; name it with --device, such as --device=h100")
    kinds = {name: gpus.find(name) for name in names}
    unknown = next((name for name, kind in kinds.items() if kind is None), None)
    if unknown is not None:
        raise UserError(f"the device {unknown!r} is not known; name one that is like it with --device, such as h100")
    if len(set(kinds.values())) > 1:
        raise UserError(f"the devices differ ({', '.join(names[:3])}); make a cluster's file for hosts of one kind")
    return str(kinds[names[0]])


def _hosts(given: Given) -> int | tuple[str, ...]:
    """Return the hosts' names, or their number if they have none."""
    if given.hosts:
        count = whole(given.hosts)
        if count == 0:
            raise UserError("--hosts=0 must be a number from 1 on, or names, such as node[01-16]")
        if count is None:
            return tuple(hostlist.expand([given.hosts]))
        if given.slurm is not None:
            raise UserError(f"--hosts={count} has no names to find in {given.slurm.path}; write them, as node[01-16]")
        return count
    if given.slurm is not None:
        return tuple(given.slurm.racks)
    names = list(dict.fromkeys(name for fitted in given.logs for name in fitted.log.names))
    if not names:
        raise UserError("nothing given names the hosts; say how many there are, such as --hosts=16")
    return tuple(names)


def _devices(given: Given) -> int:
    """Return the devices of a host."""
    most = max((fitted.devices for fitted in given.logs), default=0)
    for topology in given.topologies:
        if topology.devices != given.topologies[0].devices or topology.devices < most:
            raise UserError(
                f"{topology.path} has {topology.devices} devices, but "
                + (f"the logs {most} a host" if topology.devices < most else f"{given.topologies[0].path} differs")
                + "; give files of hosts of one kind"
            )
    if given.topologies:
        return given.topologies[0].devices
    if not most:
        raise UserError("nothing given says how many devices a host has; give --topo, --nccl_xml or --nccl_tests")
    return most


def _nics(given: Given, devices: int) -> tuple[HostNics, tuple[str, ...]]:
    """Return the NICs, which the user says or the topology or the logs tell, and sentences on them."""
    found = [host_topology.host_nics(topology) for topology in given.topologies]
    known = next((one for one in found if one.bandwidth), next((one for one in found if one.count), _NO_NICS))
    said: tuple[str, ...] = ()
    if given.nic_gbit:
        known = _of_rate(known, given.nic_gbit)
        said = (f"--nic_gbit: a flow has {units.rate(known.bandwidth)}, of {known.ports} NIC",)
    if given.nics:
        return dataclasses.replace(known, count=given.nics, rails=known.rails and known.count == given.nics), said
    if known.count:
        return known, said
    several = [fitted for fitted in given.logs if len(fitted.log.names) > 1]
    measured = links.nics(several)
    if measured is None and several:
        said += ("nothing says how many NICs a host has; one flow is taken to have all of them (--nics=N)",)
    return dataclasses.replace(known, count=min(measured or 1, devices)), said


def _of_rate(nics: HostNics, gbit: float) -> HostNics:
    """Return NICs with the rate that the user says, which must be the topology's, if that has one."""
    rate, found = units.nic_rate("--nic_gbit", gbit), nics.bandwidth / nics.ports
    if found and not math.isclose(found, rate):
        raise UserError(
            f"--nic_gbit={gbit:g}, but NCCL's topology has NICs of {units.rate(found)}; leave one of the two out"
        )
    return dataclasses.replace(nics, bandwidth=nics.ports * rate)
