"""A cluster's file from what was given: logs of nccl-tests, a host's topology, SLURM's racks, rows of compute.

What a log shows goes before what a topology says, and that before data sheets. Everything that is assumed is said.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from paxtrain.devices import gpus
from paxtrain.errors import UserError, whole
from planner.cluster import cluster_file, hostlist
from planner.cluster.values import check_units
from planner.given import host_topology, links, slurm_topology, units
from planner.given.host_topology import HostNics, HostTopology
from planner.given.links import FittedLog, Link
from planner.given.slurm_topology import SlurmTopology

# Latencies of hops that nothing shows: those of configs/clusters, which are typical of NCCL.
_ALPHA_INSIDE, _ALPHA_BETWEEN = 4e-6, 1.2e-5
# Over the data sheet's link: above `most` it is another link's rate, or in bits; below `least` NVLink was off.
_MOST, _LEAST = 3.0, 1 / 6
_LIKE_PCIE = 60e9  # bytes/s; links above are NVLinks
_OVER_A_NIC = 1.1  # a flow's rate over its NIC's, up to which it may be measured or rounded

TableRows = list[tuple[str, str]]


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
class _Nics:
    """NICs of a host: their number, whether they are rails, and bytes/s of a flow's own one; 0: not known."""

    count: int
    rails: bool
    bandwidth: float


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


def _hosts(given: Given) -> int | list[str]:
    """Return the hosts' names, or their number if they have none."""
    if given.hosts:
        count = whole(given.hosts)
        if count == 0:
            raise UserError("--hosts=0 must be a number from 1 on, or names, such as node[01-16]")
        if count is None:
            return hostlist.expand([given.hosts])
        if given.slurm is not None:
            raise UserError(f"--hosts={count} has no names to find in {given.slurm.path}; write them, as node[01-16]")
        return count
    if given.slurm is not None:
        return list(given.slurm.racks)
    names = list(dict.fromkeys(name for fitted in given.logs for name in fitted.log.names))
    if not names:
        raise UserError("nothing given names the hosts; say how many there are, such as --hosts=16")
    return names


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


def _nics(given: Given, between: Sequence[FittedLog], devices: int, rows: TableRows) -> _Nics:
    """Return the NICs, which the user says or the topology or the logs tell."""
    found = [host_topology.host_nics(topology) for topology in given.topologies]
    known: HostNics | None = next((one for one in found if one.bandwidth), next((o for o in found if o.count), None))
    bandwidth = known.bandwidth if known else 0.0
    if given.nic_gbit:
        _check_nic(given.nic_gbit, known)
        bandwidth = units.nic_rate("--nic_gbit", given.nic_gbit) * (known.ports if known else 1)
        rows.append(
            ("--nic_gbit", units.rate(bandwidth) + (f" with {known.ports} NICs" if known and known.ports > 1 else ""))
        )
    if given.nics:
        rails = bool(known and known.rails and known.count == given.nics)
        return _Nics(given.nics, rails, bandwidth)
    if known and known.count:
        return _Nics(known.count, known.rails, bandwidth)
    measured = links.nics(between)
    if measured is None and between:
        rows.append(("", "nothing says how many NICs a host has; one flow is taken to have all of them (--nics=N)"))
    return _Nics(min(measured or 1, devices), False, bandwidth)


def _check_nic(gbit: float, known: HostNics | None) -> None:
    """Require that a NIC's rate is that of the topology, if it has one."""
    found = known.bandwidth / known.ports if known else 0.0
    if found and not math.isclose(found, units.of_gbit(gbit)):
        raise UserError(
            f"--nic_gbit={gbit:g}, but NCCL's topology has NICs of {units.rate(found)}; leave --nic_gbit out, or --nccl_xml"
        )


def _inside(given: Given, kind: str, rows: TableRows) -> Link:
    """Return the links inside hosts: from logs, the number of NVLinks, or the data sheet."""
    gpu = gpus.ALL[kind]
    found = links.inside(given.logs)
    if found is not None:
        share = found.bandwidth / gpu.link
        beside = f"{units.rate(found.bandwidth)} inside hosts, {share:.2g} of the {units.rate(gpu.link)} of {kind}"
        if share > _MOST:
            raise UserError(
                f"{beside}; no such link is on its data sheet, so see if the log is another device's (--device)"
            )
        if share < _LEAST:
            rows.append(("", f"warning: {beside}; the devices may exchange through the host, or figures are in bits"))
        return found
    topology = next((topology for topology in given.topologies), None)
    if topology is not None and topology.nvlinks:
        rate = topology.nvlink_rate(gpu.capability)
        if rate:
            return Link(None, rate, f"{topology.nvlinks} NVLinks of {units.rate(rate / topology.nvlinks)} each way")
    if topology is not None and gpu.link > _LIKE_PCIE and not topology.nvlinks and topology.devices > 1:
        raise UserError(
            f"{topology.path} has no NVLink between all devices, and nothing says how quick their PCIe is; give the "
            "log of all_reduce_perf on one host with --nccl_tests"
        )
    return Link(None, gpu.link, f"the data sheet of {kind}")


def _between(logs: Sequence[FittedLog], inner: float | None, nics: _Nics, rows: TableRows) -> Link:
    """Return the links between hosts, from logs, and never above what a flow's NICs do."""
    found = links.between(logs, inner, nics.count)
    if not nics.bandwidth:
        return found
    share = found.bandwidth / nics.bandwidth
    text = f"a flow of {units.rate(found.bandwidth)} beside a NIC of {units.rate(nics.bandwidth)}"
    if share < _LEAST:
        rows.append(("", f"warning: {text}: an eighth would be bits taken for bytes; see --nic_gbit and the NICs"))
    if share <= _OVER_A_NIC:
        return found
    if any(fitted.log.test == "sendrecv" for fitted in logs):
        raise UserError(
            f"{text}: it cannot be above; a NIC of {units.digits(found.bandwidth / 1e9)} GB/s is 8 times that in Gbit/s"
        )
    rows.append(("", f"warning: {text}: NCCL's trees or adding switches beat a ring, so the NIC's rate is taken"))
    return dataclasses.replace(found, bandwidth=nics.bandwidth, source=f"the NICs' rate, below {found.source}")


def join(given: Given, compute: Sequence[dict[str, Any]] = ()) -> tuple[dict[str, Any], TableRows]:
    """Return the values of a cluster's file, and what was taken from where, as rows of a table.

    Args:
        given: what the user has.
        compute: rows of a compute profile.

    Raises:
        UserError: something needed is missing, or two files contradict each other.
    """
    rows: TableRows = []
    hosts, devices = _hosts(given), _devices(given)
    reported = [name for fitted in given.logs for name in fitted.log.devices] + [row["kind"] for row in compute]
    kind = kind_of(given.device, reported)
    count = hosts if isinstance(hosts, int) else len(hosts)
    racks = None if given.slurm is None or isinstance(hosts, int) else given.slurm.of(tuple(hosts))
    near, across = links.split(given.logs, given.slurm.of if given.slurm is not None else None)
    nics = _nics(given, [*near, *across], devices, rows)
    inside = _inside(given, kind, rows)
    classes: dict[str, Link] = {"inside": inside}
    if count == 1:
        classes["between"] = dataclasses.replace(inside, source="none: there is one host")
    elif near or across:
        classes["between"] = _between(near or across, inside.alpha, nics, rows)
    elif nics.bandwidth:
        classes["between"] = Link(None, nics.bandwidth, "the NICs' rate")
    else:
        raise UserError(
            f"nothing says what the network between the {count} hosts does; give a log of nccl-tests over two hosts or "
            "more, NCCL's topology as XML, or --nic_gbit"
        )
    if racks is not None and len(set(racks)) > 1:
        classes["across"] = _between(across, inside.alpha, nics, rows) if across else classes["between"]
        if not (near and across):
            rows.append(("", "links across leaf switches or blocks are taken to be like those below one"))
    values = _values(given, hosts, devices, kind, nics, classes, rows)
    if racks is not None and len(set(racks)) > 1:
        values["links"]["racks"] = racks
    exceptions = _exceptions(near + across, inside.alpha, nics, hosts)
    if exceptions:
        values["links"]["exceptions"] = exceptions
        rows.append(("", f"{len(exceptions) // 2} pairs of hosts have links of their own"))
    if compute:
        values["compute"] = list(compute)
    _check(values)
    return values, rows


def _values(
    given: Given,
    hosts: int | list[str],
    devices: int,
    kind: str,
    nics: _Nics,
    classes: dict[str, Link],
    rows: TableRows,
) -> dict[str, Any]:
    """Return the file's values without racks, exceptions and compute."""
    written: dict[str, Any] = {}
    assumed = {"inside": _ALPHA_INSIDE}
    for name, link in classes.items():
        alpha = assumed.get(name, _ALPHA_BETWEEN) if link.alpha is None else link.alpha
        written[name] = {"alpha": alpha, "bandwidth": link.bandwidth}
        how = " (assumed: nothing shows it)" if link.alpha is None else ""
        if name == "between" and not isinstance(hosts, int) and len(hosts) == 1:
            continue
        rows.append((name, f"{units.rate(link.bandwidth)}, from {link.source}"))
        rows.append(("", f"latency of a hop {units.microseconds(alpha)}{how}"))
    number = hosts if isinstance(hosts, int) else len(hosts)
    rows.append(
        ("cluster", f"{number:,} hosts of {devices} x {kind}, {nics.count} NICs{' as rails' if nics.rails else ''}")
    )
    values = {
        "version": cluster_file.VERSION,
        "name": given.name,
        "source": "; ".join(f"{name}: {link.source}" for name, link in classes.items()),
        "hosts": hosts,
        "devices_per_host": devices,
        "device": kind,
        "nics": nics.count,
        "links": written,
    }
    return values | ({"rails": True} if nics.rails else {})


def _exceptions(
    logs: Sequence[FittedLog], inner: float | None, nics: _Nics, hosts: int | list[str]
) -> list[dict[str, Any]]:
    """Return the links of pairs of hosts that were measured apart, in both directions."""
    found = []
    for (a, b), link in links.pairs(logs, inner, nics.count).items():
        if isinstance(hosts, int) or not {a, b} <= set(hosts):
            continue
        figures = {"bandwidth": min(link.bandwidth, nics.bandwidth or link.bandwidth)}
        figures |= {} if link.alpha is None else {"alpha": link.alpha}
        found += [{"from": x, "to": y, **figures} for x, y in ((a, b), (b, a))]
    return found


def _check(values: dict[str, Any]) -> None:
    """Require that the planner takes the file."""
    found = cluster_file.parse(values)
    check_units(found["hosts"], found["alpha"], found["samples"], found["memory"], found["trunks"], found["sheets"])


def told(given: Given) -> TableRows:
    """Return what each file says, as rows of a table."""
    rows = [row for fitted in given.logs for row in links.told(fitted)]
    rows += [row for topology in given.topologies for row in host_topology.told(topology)]
    return rows + (slurm_topology.told(given.slurm) if given.slurm is not None else [])
