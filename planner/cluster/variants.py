"""Clusters like a given one: more or fewer hosts, other links, other devices."""

import dataclasses

import numpy as np

from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster, between, of_hosts
from planner.cluster.cluster_file import MOST_HOSTS
from planner.cluster.device_sheets import SHEETS


def alike(cluster: Cluster) -> bool:
    """Return whether all hosts have the same devices and all links between hosts the same rate and latency.

    Hosts that share uplinks are not alike.
    """
    if cluster.trunks:
        return False
    apart = between(cluster)

    def one(values: np.ndarray) -> bool:
        return values.size == 0 or float(np.ptp(values)) <= 1e-9 * float(np.abs(values).max())

    links = (cluster.alpha, cluster.samples.max(axis=0), cluster.samples.min(axis=0))
    inside = all(one(np.diagonal(x)) for x in links)
    pairs = np.concatenate([x[apart] for x in links[1:]])
    return len(set(cluster.kinds)) == 1 and one(cluster.memory) and inside and one(cluster.alpha[apart]) and one(pairs)


def check_size(cluster: Cluster, hosts: int) -> None:
    """Require that a cluster can have that many hosts, before its links are laid out.

    Args:
        cluster: cluster that is not merged.
        hosts: number of hosts, from 1 on.

    Raises:
        UserError: it has fewer, which differ or have no link to go by, or there are more than a cluster may have.
    """
    count = len(cluster.hosts)
    if hosts <= count:
        return
    if hosts > MOST_HOSTS:
        raise UserError(f"a cluster may have {MOST_HOSTS:,} hosts, got {hosts:,}; plan for a part of them")
    if count == 1 or not alike(cluster):
        differ = "has hosts or links that differ, or shared uplinks"
        why = "has one host and so no link between hosts" if count == 1 else differ
        raise UserError(f"{hosts} hosts cannot be told from {cluster.name}, which {why}; name at most {count}")


def resized(cluster: Cluster, hosts: int) -> Cluster:
    """Return the cluster with `hosts` hosts: its first ones, or more that are like them.

    Args:
        cluster: cluster that is not merged.
        hosts: number of hosts, from 1 on.

    Raises:
        UserError: the cluster cannot have so many; see `check_size`.
    """
    check_size(cluster, hosts)
    count = len(cluster.hosts)
    if hosts <= count:
        return cluster if hosts == count else of_hosts(cluster, cluster.hosts[:hosts])
    names = (*cluster.hosts, *(f"like-{cluster.hosts[0]}-{n}" for n in range(1, hosts - count + 1)))
    here = np.eye(hosts, dtype=bool)

    def grown(x: np.ndarray) -> np.ndarray:
        return np.where(here, x[..., :1, :1], x[..., :1, 1:2])

    return dataclasses.replace(
        cluster,
        name=f"{cluster.name}, as {hosts} hosts",
        hosts=names,
        kinds=cluster.kinds[:1] * hosts,
        memory=np.repeat(cluster.memory[:1], hosts),
        alpha=grown(cluster.alpha),
        samples=grown(cluster.samples),
        measured=None,
        sites=(),
        named=False,
    )


def of_devices(cluster: Cluster, devices: int) -> Cluster:
    """Return the cluster with some number of devices: whole hosts, or a part of one.

    Args:
        cluster: cluster that is not merged.
        devices: number of devices, from 1 on.

    Raises:
        UserError: they are no whole hosts, or the cluster cannot have so many; see `check_size`.
    """
    each = cluster.devices_per_host
    hosts, rest = divmod(devices, each)
    name = f"{cluster.name}, {devices} of its devices"
    if devices < each:
        return dataclasses.replace(parts_of_a_host(cluster, devices), name=name)
    if rest:
        raise UserError(
            f"--devices={devices} is no multiple of the {each} devices of a host of {cluster.name}; "
            f"{hosts * each} or {(hosts + 1) * each} would work"
        )
    found = resized(cluster, hosts)
    return dataclasses.replace(found, name=name) if hosts < len(cluster.hosts) else found


def parts_of_a_host(cluster: Cluster, devices: int) -> Cluster:
    """Return the host with the most memory alone, with some of its devices."""
    best = int(np.argmax(cluster.memory))
    return dataclasses.replace(of_hosts(cluster, [cluster.hosts[best]]), devices_per_host=devices)


def with_links(cluster: Cluster, factor: np.ndarray | float = 1.0, more: np.ndarray | float = 0.0) -> Cluster:
    """Return the cluster with other rates of its links.

    Args:
        cluster: cluster to change.
        factor: factor on the bandwidths, a number or [H, H].
        more: bytes/s added to them afterwards, likewise.

    Raises:
        UserError: nothing would be left of a link.
    """
    samples = cluster.samples * factor + more
    if not (samples > 0).all():
        least = cluster.samples[samples <= 0].min() * 8e-9
        raise UserError(f"nothing would be left of a link of {least:.4g} Gbit/s; take less from the links")
    return dataclasses.replace(cluster, samples=samples)


def with_trunks(cluster: Cluster, factor: float, needed: bool = True) -> Cluster:
    """Return the cluster with other rates of the uplinks that hosts share.

    Args:
        cluster: cluster to change.
        factor: factor on the bandwidths.
        needed: whether there have to be such uplinks.

    Raises:
        UserError: there are none, or nothing would be left of them.
    """
    if not cluster.trunks:
        if needed:
            raise UserError(
                f"{cluster.name} has no trunks; its file would name them, as planner/cluster/cluster_file.py says"
            )
        return cluster
    if factor <= 0:
        raise UserError(f"nothing would be left of a trunk with a factor of {factor:g}; take one above 0")
    trunks = dataclasses.replace(cluster.trunks, bandwidth=cluster.trunks.bandwidth * factor)
    return dataclasses.replace(cluster, trunks=trunks)


def with_devices(cluster: Cluster, kind: str) -> Cluster:
    """Return the cluster with other devices in the same hosts and on the same links.

    Args:
        cluster: cluster to change.
        kind: a device of device_sheets.py or of the cluster's file.

    Raises:
        UserError: the kind is unknown, or the cluster's devices were measured, so that data sheets are no comparison.
    """
    sheet = cluster.sheet(kind)
    if sheet is None:
        raise UserError(f"{kind!r} is no known device; take one of {', '.join((*cluster.sheets, *SHEETS))}")
    if cluster.compute:
        raise UserError(
            f"the devices of {cluster.name} were measured, and a data sheet's {kind} would be no fair comparison; "
            "take a cluster's file without a compute profile"
        )
    count = len(cluster.hosts)
    return dataclasses.replace(cluster, kinds=(kind,) * count, memory=np.full(count, float(sheet.memory)))
