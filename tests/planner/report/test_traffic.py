"""Bytes of a step by where they go, counted flow by flow."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost.link_seconds import ring_order
from planner.planning.to_plan import device_order
from planner.report import page, text, traffic
from tests.planner.examples import cluster
from tests.planner.report.reports import made_report


def counted(report) -> np.ndarray:
    """Return the bytes [levels] of a step, flow by flow."""
    c, p, hosts = report.chosen.candidate, report.problem, report.chosen.placement.hosts
    sites, found = report.cluster.sites or (0,) * len(report.cluster.hosts), np.zeros(3)

    def send(a: int, b: int, size: float) -> None:
        found[0 if a == b else 1 if sites[a] == sites[b] else 2] += size * c.tensor

    virtual = c.pipe * c.chunks
    for d, _, v in itertools.product(range(c.data), range(c.micro_batches), range(virtual - 1)):
        here, there = hosts[d, v % c.pipe], hosts[d, (v + 1) % c.pipe]
        send(here, there, p.message)
        send(there, here, p.message)
    for stage in range(c.pipe):
        ring = ring_order(hosts[:, stage])
        parameters = p.layer_parameters + p.embedding_parameters * (stage in (0, c.pipe - 1))
        gradients = parameters * costs.ITEM[c.reduce_dtype] * (1 if c.zero1 else 2)
        weights = parameters * costs.ITEM[report.model.dtype] * c.zero1
        for a, b in zip(ring, np.roll(ring, -1)) if c.data > 1 else ():
            send(a, b, (gradients + weights) * (c.data - 1) / c.data)
    for d in range(c.data if p.swaps else 0):
        send(hosts[d, 0], hosts[d, -1], 2 * p.embedding_parameters * 4 / c.data)
    return found


@pytest.mark.parametrize("schedule, pipe", [("1f1b", 4), ("interleaved_1f1b", 4), ("1f1b", 1), ("1f1b", 8)])
@pytest.mark.parametrize("zero1", [True, False])
def test_every_flow_is_counted_where_it_goes(schedule, pipe, zero1):
    report = made_report(micro_batches=8, schedule=schedule, pipe=pipe)
    sites = dataclasses.replace(report.cluster, sites=(0, 1, 1, 0))
    found = report.chosen
    chosen = dataclasses.replace(found, candidate=dataclasses.replace(found.candidate, zero1=zero1))
    report = dataclasses.replace(report, cluster=sites, chosen=chosen)
    levels = sum(traffic.traffic(report).values())
    assert levels == pytest.approx(counted(report)) and levels.sum() > 0


def test_one_site_has_nothing_between_sites_and_the_report_says_what_is_sent():
    report = made_report()
    assert all(sizes[2] == 0 for sizes in traffic.traffic(report).values())
    assert "a step sends" not in text.text(report) and "messages between stages" in page.page(report)
    two = dataclasses.replace(report, cluster=dataclasses.replace(cluster(4, 4), sites=(0, 0, 1, 1)))
    said = " ".join(text.text(two).split())
    assert "a step sends" in said and "between sites" in said


@pytest.mark.parametrize("pxn", [True, False])
def test_what_leaves_by_each_nic_is_counted_and_said(pxn):
    some = cluster(4, 4, nics=2, rails={"pxn": pxn})
    report = made_report(micro_batches=8, schedule="1f1b", pipe=4, cluster=some)
    c, p, hosts = report.chosen.candidate, report.problem, report.chosen.placement.hosts
    devices = np.array(device_order(hosts, 4, c.tensor)).reshape(c.data, c.pipe, c.tensor)
    leaving, changed = np.zeros((4, 2)), 0.0

    def send(one: tuple[int, int], other: tuple[int, int], size: float) -> None:
        nonlocal changed
        for a, b in zip(devices[one], devices[other]):
            if a // 4 != b // 4:
                rails = a % 4 // 2, b % 4 // 2
                leaving[a // 4, rails[1] if pxn else rails[0]] += size
                changed += size * (rails[0] != rails[1])

    for d, s in itertools.product(range(c.data), range(c.pipe - 1)):
        send((d, s), (d, s + 1), 8 * p.message)
        send((d, s + 1), (d, s), 8 * p.message)
    for s in range(c.pipe):
        first = sorted({int(hosts[d, s]): (d, s) for d in reversed(range(c.data))}.values())
        parameters = p.layer_parameters + p.embedding_parameters * (s in (0, c.pipe - 1))
        size = (
            costs.ITEM[c.reduce_dtype] + costs.ITEM[report.model.dtype] if c.zero1 else 2 * costs.ITEM[c.reduce_dtype]
        )
        for a, b in zip(first, first[1:] + first[:1]) if c.data > 1 else ():
            send(a, b, parameters * size * (c.data - 1) / c.data)
    for d in range(c.data if p.swaps else 0):
        for ends in ((0, c.pipe - 1), (c.pipe - 1, 0)):
            send((d, ends[0]), (d, ends[1]), p.embedding_parameters * 4 / c.data)
    found, crossing = traffic.by_nics(report)
    np.testing.assert_allclose(found, leaving)
    assert crossing == pytest.approx(changed) and leaving.any()
    said = " ".join(text.text(report).split())
    assert "rails 2 rails; " in said and ("over the spine" in said) != pxn and "rails" not in text.text(made_report())


def test_what_leaves_by_a_trunk_is_counted_and_said():
    report = made_report(micro_batches=8, schedule="1f1b", pipe=4)
    names = report.cluster.hosts
    trunks = [{"hosts": [names[0], names[3]], "bandwidth": 1e9}, {"hosts": [names[1]], "bandwidth": 1e6}]
    behind = Cluster.parse({"version": 1, "hosts": list(names), "devices_per_host": 4, "device": "a100-80gb"} | {
        "links": {"inside": {"alpha": 0, "bandwidth": 1}, "between": {"alpha": 0, "bandwidth": 1}}, "trunks": trunks
    }).trunks  # fmt: skip
    shared = dataclasses.replace(report, cluster=dataclasses.replace(report.cluster, trunks=behind))
    found = traffic.through_trunks(shared)
    for number, some in enumerate(((0, 3), (1,))):
        sites = tuple(int(i in some) for i in range(4))
        apart = dataclasses.replace(report, cluster=dataclasses.replace(report.cluster, sites=sites))
        assert found[number] == pytest.approx(counted(apart)[2] / 2)
    said = " ".join(text.text(shared).split())
    assert "trunks 2 trunks; by the busiest, that of 1 host, 0.008 Gbit/s" in said and "trunks" not in text.text(report)
