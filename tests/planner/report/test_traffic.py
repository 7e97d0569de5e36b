"""Bytes of a step by where they go, counted flow by flow."""

import dataclasses
import itertools

import numpy as np
import pytest

from planner.cost import compute as costs
from planner.cost.link_seconds import ring_order
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
