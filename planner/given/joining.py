"""A cluster's file from what was given: logs of nccl-tests, a host's topology, SLURM's racks, rows of compute.

What a log shows goes before what a topology says, and that before data sheets. Everything that is assumed is said.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from paxtrain.devices import gpus
from paxtrain.errors import UserError
from planner.cluster import cluster_file
from planner.cluster.link_values import NOMINAL
from planner.cluster.values import check_units
from planner.given import hardware, host_topology, links, slurm_topology, units
from planner.given.hardware import Given, Hardware
from planner.given.links import FittedLog, Link

# Latencies of hops that nothing shows: those of configs/clusters, which are typical of NCCL.
_ALPHA_INSIDE, _ALPHA_BETWEEN = 4e-6, 1.2e-5
# A link over the data sheet's: above `most` it is another device's, or in bits; below `least` it is not used.
_MOST, _LEAST = 3.0, 1 / 6
_LIKE_PCIE = 60e9  # bytes/s; links above are NVLinks
_OVER_A_NIC = 1.1  # a flow's rate over its NIC's, up to which it may be measured or rounded

TableRows = list[tuple[str, str]]


def _inside(given: Given, kind: str) -> tuple[Link, TableRows]:
    """Return the links inside hosts: from logs, the number of NVLinks, or the data sheet."""
    gpu = gpus.ALL[kind]
    found = links.inside(given.logs)
    if found is not None:
        return found, _beside_the_sheet(found, kind)
    topology = next(iter(given.topologies), None)
    if topology is not None and topology.nvlinks:
        rate = topology.nvlink_rate(gpu.capability)
        if rate:
            each = units.rate(rate / topology.nvlinks)
            return Link(None, rate, f"{topology.nvlinks} NVLinks of {each} each way", nominal=True), []
    if topology is not None and topology.devices > 1 and not topology.nvlinks and gpu.link > _LIKE_PCIE:
        raise UserError(
            f"{topology.path} has no NVLink between all devices, and nothing says how quick their PCIe is; give the "
            "log of all_reduce_perf on one host with --nccl_tests"
        )
    return Link(None, gpu.link, f"the data sheet of {kind}", nominal=True), []


def _beside_the_sheet(link: Link, kind: str) -> TableRows:
    """Return a warning of links far below the data sheet's, and refuse those far above it."""
    share = link.bandwidth / gpus.ALL[kind].link
    sheet = units.rate(gpus.ALL[kind].link)
    text = f"{units.rate(link.bandwidth)} inside hosts, {share:.2g} of the {sheet} of {kind}"
    if share > _MOST:
        raise UserError(f"{text}; its data sheet has no such link, so see if the log is another device's (--device)")
    if share < _LEAST:
        return [("", f"warning: {text}; devices may exchange through the host's memory, or figures are in bits")]
    return []


def _between(logs: Sequence[FittedLog], inner: float | None, found: Hardware) -> tuple[Link, TableRows]:
    """Return the links between hosts, from logs, and never above what a flow's NICs do."""
    link, most = links.between(logs, inner, found.nics.count), found.nics.bandwidth
    if not most:
        return link, []
    text = f"a flow of {units.rate(link.bandwidth)} beside a NIC of {units.rate(most)}"
    if link.bandwidth < _LEAST * most:
        return link, [("", f"warning: {text}; an eighth would be bits taken for bytes, so see --nic_gbit")]
    if link.bandwidth <= _OVER_A_NIC * most:
        return link, []
    if any(fitted.log.test == "sendrecv" for fitted in logs):
        rate = units.digits(link.bandwidth / units.GIGA)
        raise UserError(f"{text}: it cannot be above; a NIC of {rate} GB/s is 8 times that in Gbit/s")
    told = f"warning: {text}; NCCL's trees or adding switches beat a ring, so the NIC's rate is taken"
    source = f"the NICs' rate, below {link.source}"
    return dataclasses.replace(link, bandwidth=most, source=source), [("", told)]


def _classes(
    given: Given, found: Hardware, near: Sequence[FittedLog], across: Sequence[FittedLog]
) -> tuple[dict[str, Link], TableRows]:
    """Return the links inside hosts, between them and across racks.

    Args:
        given: what the user has.
        found: the cluster's hardware.
        near: logs between hosts of one rack.
        across: logs across racks.
    """
    inside, told = _inside(given, found.kind)
    classes = {"inside": inside}
    if found.count == 1:
        classes["between"] = inside  # which nothing uses
    elif near or across:
        classes["between"], more = _between(near or across, inside.alpha, found)
        told += more
    elif found.nics.bandwidth:
        classes["between"] = Link(None, found.nics.bandwidth, "the NICs' rate", nominal=True)
    else:
        raise UserError(
            f"nothing says what the network between the {found.count} hosts does; give a log of nccl-tests over two "
            "hosts or more, NCCL's topology as XML, or --nic_gbit"
        )
    if found.racks:
        classes["across"] = classes["between"]
        if near and across:
            classes["across"], more = _between(across, inside.alpha, found)
            told += more
        else:
            told.append(("", "links across leaf switches or blocks are taken to be like those below one"))
    return classes, told


def _exceptions(logs: Sequence[FittedLog], inner: float | None, found: Hardware) -> list[dict[str, Any]]:
    """Return the links of pairs of hosts that were measured apart, in both directions."""
    exceptions = []
    for (a, b), link in links.pairs(logs, inner, found.nics.count).items():
        if isinstance(found.hosts, int) or not {a, b} <= set(found.hosts):
            continue
        figures = {"bandwidth": min(link.bandwidth, found.nics.bandwidth or link.bandwidth)}
        figures |= {} if link.alpha is None else {"alpha": link.alpha}
        exceptions += [{"from": x, "to": y, **figures} for x, y in ((a, b), (b, a))]
    return exceptions


def join(given: Given, compute: Sequence[dict[str, Any]] = ()) -> tuple[dict[str, Any], TableRows]:
    """Return the values of a cluster's file, and what was taken from where, as rows of a table.

    Args:
        given: what the user has.
        compute: rows of a compute profile.

    Raises:
        UserError: something needed is missing, or two files contradict each other.
    """
    found = hardware.find(given, [row["kind"] for row in compute])
    near, across = links.split(given.logs, given.slurm.of if given.slurm is not None else None)
    classes, told = _classes(given, found, near, across)
    written: dict[str, Any] = {}
    for name, link in classes.items():
        assumed = _ALPHA_INSIDE if name == "inside" else _ALPHA_BETWEEN
        written[name] = {"alpha": assumed if link.alpha is None else link.alpha, "bandwidth": link.bandwidth}
    exceptions = _exceptions([*near, *across], classes["inside"].alpha, found)
    values = {
        "version": cluster_file.VERSION,
        "name": given.name,
        "source": "; ".join(f"{name}: {link.source}" for name, link in classes.items()),
        "hosts": found.hosts if isinstance(found.hosts, int) else list(found.hosts),
        "devices_per_host": found.devices,
        "device": found.kind,
        "nics": found.nics.count,
        "links": {**written, "nominal": [name for name in NOMINAL if classes[name].nominal]}
        | ({"racks": list(found.racks)} if found.racks else {})
        | ({"exceptions": exceptions} if exceptions else {}),
    }
    values |= ({"rails": True} if found.nics.rails else {}) | ({"compute": list(compute)} if compute else {})
    _check(values)
    if exceptions:
        told.append(("", f"{len(exceptions) // 2} pairs of hosts have links of their own"))
    return values, [*told, *_summary(found, classes, written)]


def _summary(found: Hardware, classes: dict[str, Link], written: dict[str, Any]) -> TableRows:
    """Return the cluster in words."""
    rows: TableRows = []
    for name, link in classes.items():
        if found.count > 1 or name == "inside":
            how = " (assumed: nothing shows it)" if link.alpha is None else ""
            rows.append((name, f"{units.rate(link.bandwidth)}, from {link.source}"))
            rows.append(("", f"latency of a hop {units.microseconds(written[name]['alpha'])}{how}"))
    rails = " as rails" if found.nics.rails else ""
    rows.append(("hosts", f"{found.count:,} of {found.devices} x {found.kind}, {found.nics.count} NICs{rails}"))
    return rows + [("", text) for text in found.said]


def _check(values: dict[str, Any]) -> None:
    """Require that the planner takes the file."""
    found = cluster_file.parse(values)
    check_units(found["hosts"], found["alpha"], found["samples"], found["memory"], found["trunks"], found["sheets"])


def told(given: Given) -> TableRows:
    """Return what each file says, as rows of a table."""
    rows = [row for fitted in given.logs for row in links.told(fitted)]
    rows += [row for topology in given.topologies for row in host_topology.told(topology)]
    return rows + (slurm_topology.told(given.slurm) if given.slurm is not None else [])
