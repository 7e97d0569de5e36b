"""The profile of a cluster, measured by its own processes.

Links between all pairs of hosts, and inside hosts, come from timed messages. Compute comes from the trainer's own
functions. At the time limit, the profile keeps all measurements and reports what was left out.
"""

import time

import jax
import numpy as np

from paxtrain import tables
from paxtrain.config import Config
from planner.cluster import cluster as clusters
from planner.cluster import link_fit
from planner.cluster.cluster import Cluster
from planner.cost import compute
from planner.measure import alike_links, compute_timing
from planner.measure.link_timing import LinkTimes
from planner.measure.machines import Machines
from planner.measure.options import ProfileOptions
from planner.measure.process_group import ProcessGroup
from planner.measure.profile_compute import profile_compute
from planner.measure.profile_links import profile_links, time_fan_out
from planner.measure.profile_trunks import profile_trunks


def _filled_links(group: ProcessGroup, machines: Machines, times: LinkTimes) -> tuple[link_fit.Filled, int]:
    """Return all links, those not measured fitted from the others, and the NICs per host, on every process."""
    alpha, samples = times.links()
    samples = alike_links.pooled(samples)
    if len(machines.devices) == 1:  # there is no link, but the cluster file needs one
        alpha, samples = np.zeros((1, 1)), np.full((1, 1, 1), 1e12)
    # Racks of different sites differ, whatever their names: what is between sites is unlike what is within one.
    numbers = {place: i for i, place in enumerate(dict.fromkeys(machines.locations))}

    def fill(_: object) -> tuple[list, list, list, float, int]:
        filled = link_fit.fill(alpha, samples, [numbers[place] for place in machines.locations])
        return filled.alpha.tolist(), filled.samples.tolist(), filled.measured.tolist(), filled.error, times.nics()

    alphas, bandwidths, measured, error, nics = group.gather(None, fill)
    return link_fit.Filled(np.array(alphas), np.array(bandwidths), np.array(measured), error), nics


def profile(
    group: ProcessGroup, machines: Machines, config: Config, options: ProfileOptions, name: str
) -> tuple[Cluster, list[tuple[str, str]]]:
    """Measure a cluster.

    Args:
        group: the processes of the run.
        machines: their hosts and devices.
        config: the model whose compute is measured.
        options: the links and the compute to measure.
        name: the cluster's name.

    Returns:
        The cluster, on every process, and pairs of a name and a sentence to print about the measurement.

    Raises:
        UserError: a process was lost.
    """
    began = time.monotonic()
    limit = np.inf if options.time_limit is None else options.time_limit
    # Links may take half of the time, so that there is always some for compute.
    trunks, uplinks = profile_trunks(group, machines, options, began + limit / 4)
    times, missing = profile_links(group, machines, options, began + limit / 2, trunks)
    if not uplinks and not missing:  # nobody has said where hosts are
        trunks, uplinks = profile_trunks(group, machines, options, began + limit / 2, times.links()[1])
        if trunks:  # in which the pairs of a round were together
            times, missing = profile_links(group, machines, options, began + limit * 3 / 4, trunks)
    rows, left_out = profile_compute(group, machines, config, options, began + limit)
    filled, nics = _filled_links(group, machines, times)
    said, fan_out = [("shared uplinks", uplinks)] if uplinks else [], 1.0
    # With two hosts each has one other, and rings on GPUs send to one at a time.
    if len(machines.hosts) > 2 and "cpu" in machines.kinds:
        fan_out = time_fan_out(group, machines, filled, nics, int(times.sizes.max()), trunks)
    fitted = int((~filled.measured & ~np.eye(len(machines.hosts), dtype=bool)).sum())
    if fitted:
        words = f"{fitted}, fitted from the others by sender, receiver, sites and racks"
        said.append(("links not measured", f"{words}; median error on links held out {filled.error:.1%}"))
    said += [("left out", text) for text in (missing, *left_out) if text]
    for kind, sheet in machines.sheets.items():
        rates = (
            f"{tables.size(sheet.peak_flops, 'FLOP/s')} as --peak says, {tables.size(sheet.bandwidth, 'B/s')} of memory"
        )
        said.append(("not listed", f"{kind}: {rates}, as measured"))
    source = f"python -m planner.profile on {time.strftime('%Y-%m-%d')}, jax {jax.__version__}"
    if fitted:
        source += f"; {fitted} links fitted, not measured"
    cluster = Cluster(
        name=name,
        source=source,
        hosts=machines.hosts,
        devices_per_host=machines.per_host,
        kinds=machines.kinds,
        memory=np.array(machines.memory),
        nics=nics,
        fan_out=fan_out,
        alpha=filled.alpha,
        samples=filled.samples,
        measured=filled.measured if fitted else None,
        compute=tuple(rows),
        sites=machines.site_numbers,
        trunks=trunks,
        sheets=machines.sheets,
    )
    return cluster, said


def describe(cluster: Cluster) -> list[tuple[str, str]]:
    """Return rows of a name and words that sum up a measured cluster: its hosts, links and compute times."""
    words = f"{len(cluster.hosts)} hosts x {cluster.devices_per_host} devices, {cluster.nics} NIC(s)"
    if cluster.fan_out > 1:
        words += f", each exchanges data with {cluster.fan_out:.1f} others at full speed"
    if cluster.fan_out < 1:
        words += f", which are full for {cluster.fan_out:.0%} of an all-to-all"
    said = [("cluster", words)]
    between = clusters.between(cluster)
    for name, pairs in (("links between hosts", between), ("inside hosts", ~between)):
        if pairs.any() and (name != "inside hosts" or cluster.devices_per_host > 1):
            b, a = cluster.bandwidth[pairs], cluster.alpha[pairs]
            rates = f"{tables.size(b.min(), 'B/s')} to {tables.size(b.max(), 'B/s')}"
            said.append((name, f"{rates}, {a.min() * 1e6:.0f} to {a.max() * 1e6:.0f} us"))
    for row in cluster.compute:
        kinds = (kind for kind in (*compute_timing.KINDS, *compute.PARTS) if kind in row)
        times = ", ".join(f"{kind} {row[kind] * 1e3:.3g} ms" for kind in kinds)
        case = f"{row['kind']}, tensor={row['tensor']}, micro_batch={row['micro_batch']}"
        said.append((case, f"{times}, optimizer {row['optimizer'] * 1e9:.3g} ns per parameter"))
    return said
