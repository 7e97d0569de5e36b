"""Bytes of a step by where they go, counted flow by flow."""

import dataclasses
import functools
import itertools
import types

import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.schedule import schedules
from paxtrain.study import measurements
from planner.cluster.cluster import Cluster
from planner.cost import compute as costs
from planner.cost.candidate import host_order
from planner.cost.link_seconds import fabric, ring_order
from planner.cost.simulate import candidate_of_config
from planner.cost.step_time import Problem
from planner.planning.to_plan import device_order
from planner.report import traffic
from tests import small
from tests.compress_settings import nested
from tests.planner.examples import cluster
from tests.planner.report.reports import made_report


@functools.cache
def spread_report(schedule: str, pipe: int):
    """Return a report on a plan whose links differ, with two tensor groups on each host."""
    return made_report(micro_batches=8, schedule=schedule, pipe=pipe, tensor=2)


def sent(report) -> list[tuple[int, int, float]]:
    """Return the sending host, the receiving host and the bytes of each flow of a step."""
    c, p, hosts = report.chosen.candidate, report.problem, report.chosen.placement.hosts
    found: list[tuple[int, int, float]] = []

    def send(a: int, b: int, size: float) -> None:
        found.append((int(a), int(b), size * c.tensor))

    virtual = c.pipe * c.chunks
    compressed = schedules.build(c.schedule, c.pipe, c.micro_batches, c.chunks, True).epilogue()
    compressed = compressed if c.backward == "epilogue" else ()
    links = c.backward_links or range(c.pipe)
    assert p.packed < p.message
    for d, mb, v in itertools.product(range(c.data), range(c.micro_batches), range(virtual - 1)):
        here, there = hosts[d, v % c.pipe], hosts[d, (v + 1) % c.pipe]
        send(here, there, p.message)
        send(there, here, p.packed if (v + 1, mb) in compressed and v % c.pipe in links else p.message)
    for stage in range(c.pipe):
        ring = ring_order(hosts[:, stage])
        parameters = p.layer_parameters + p.embedding_parameters * (stage in (0, c.pipe - 1))
        gradients = parameters * costs.ITEM[c.reduce_dtype] * (1 if c.zero1 else 2)
        weights = parameters * costs.ITEM[report.model.dtype] * c.zero1
        for a, b in zip(ring, np.roll(ring, -1)) if c.data > 1 else ():
            send(a, b, (gradients + weights) * (c.data - 1) / c.data)
    for d in range(c.data if p.swaps else 0):
        for ends in ((0, -1), (-1, 0)):
            send(*hosts[d, ends], p.embedding_parameters * 4 / c.data)
    return found


def counted(report) -> np.ndarray:
    """Return the bytes [levels] of a step, flow by flow."""
    sites, found = report.cluster.sites or (0,) * len(report.cluster.hosts), np.zeros(3)
    for a, b, size in sent(report):
        found[0 if a == b else 1 if sites[a] == sites[b] else 2] += size
    return found


@pytest.mark.parametrize(
    "schedule, pipe",
    [("interleaved_1f1b", 4), ("1f1b", 1), *(pytest.param("1f1b", n, marks=pytest.mark.slow) for n in (4, 8))],
)
def test_every_flow_is_counted_where_it_goes(schedule, pipe):
    report = spread_report(schedule, pipe)
    sites = dataclasses.replace(report.cluster, sites=(0, 1, 1, 0))
    found = report.chosen
    for shard in ("optimizer", "none"):
        chosen = dataclasses.replace(found, candidate=dataclasses.replace(found.candidate, shard=shard))
        report = dataclasses.replace(report, cluster=sites, chosen=chosen)
        levels = sum(traffic.traffic(report).values())
        assert levels == pytest.approx(counted(report)) and levels.sum() > 0
    assert report.chosen.candidate.backward == ("epilogue" if pipe > 1 else "none")


@pytest.mark.parametrize("group", [0, 2])
@pytest.mark.parametrize("shard", ["weights", "gradients"])
def test_what_is_in_shards_travels_with_each_micro_batch_inside_groups(shard, group):
    report = spread_report("1f1b", 1)
    c = dataclasses.replace(report.chosen.candidate, shard=shard, shard_group=group)
    p, hosts = report.problem, report.chosen.placement.hosts[:, 0]
    sets = hosts.reshape(-1, group or c.data)
    whole = c.tensor * (p.layer_parameters + p.embedding_parameters)
    weights = whole * costs.ITEM[report.model.dtype]
    gradients, gathers = whole * costs.ITEM[c.reduce_dtype], 2 * c.micro_batches if shard == "weights" else 0
    exchanges = [(ranks, c.micro_batches * gradients + gathers * weights) for ranks in sets]
    shares = (gradients + (weights if shard == "weights" else 0)) / sets.shape[1]
    exchanges += [(ranks, shares) for ranks in sets.T if group]
    exchanges += [(hosts, weights)] * (shard == "gradients")
    expected = np.zeros(3)
    for ranks, size in exchanges:
        ring = ring_order(ranks)
        for a, b in zip(ring, np.roll(ring, -1)):
            expected[int(a != b)] += size * (len(ranks) - 1) / len(ranks)
    one_site = dataclasses.replace(report.cluster, sites=())
    chosen = dataclasses.replace(report.chosen, candidate=c)
    found = traffic.traffic(dataclasses.replace(report, cluster=one_site, chosen=chosen))
    assert sum(found.values()) == pytest.approx(expected) and expected[:2].all()


def test_one_site_has_nothing_between_sites():
    assert all(sizes[2] == 0 for sizes in traffic.traffic(made_report()).values())


@pytest.mark.parametrize("pxn", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_what_leaves_by_each_nic_is_counted(pxn):
    some = cluster(4, 4, nics=2, rails={"pxn": pxn})
    report = made_report(micro_batches=8, schedule="1f1b", pipe=4, tensor=2, cluster=some)
    c, p, hosts = report.chosen.candidate, report.problem, report.chosen.placement.hosts
    devices = np.array(device_order(hosts, 4, c.sizes)).reshape(c.data, c.pipe, c.tensor)
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
        small = min(c.pipe - s - 1, 8)  # the last messages of a stage, by the definition of the epilogue
        send((d, s + 1), (d, s), (8 - small) * p.message + small * p.packed)
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


def test_what_leaves_by_a_trunk_is_counted():
    report = spread_report("1f1b", 4)
    names = report.cluster.hosts
    trunks = [{"hosts": [names[0], names[3]], "bandwidth": 1e9}, {"hosts": [names[1]], "bandwidth": 1e6}]
    behind = Cluster.parse({"version": 1, "hosts": list(names), "devices_per_host": 4, "device": "a100-80gb"} | {
        "links": {"inside": {"alpha": 0, "bandwidth": 1}, "between": {"alpha": 0, "bandwidth": 1}}, "trunks": trunks
    }).trunks  # fmt: skip
    shared = dataclasses.replace(report, cluster=dataclasses.replace(report.cluster, trunks=behind))
    found = traffic.through_trunks(shared)
    for number, some in enumerate(((0, 3), (1,))):
        leaving = sum(size for a, b, size in sent(report) if a in some and b not in some)
        coming = sum(size for a, b, size in sent(report) if b in some and a not in some)
        assert found[number] == pytest.approx([leaving, coming]) and leaving != coming


LOW_RANK = {"backward_messages": "epilogue", "backward_rank": 4, "data_stages": "all", "data_rank": 4}
CODED = {
    "backward_codec": "int8",
    "backward_links": "0",
    "forward_codec": "int4",
    "forward_links": "1",
    "data_codec": "int8",
    "embedding_codec": "int8",
    "weights_codec": "int8",
}


FURTHER = [
    (LOW_RANK | {"data_inside": 2}, {"data": 4, "pipe": 2}, 0.8),
    ({"data_stages": "all", "data_rank": 4, "min_ratio": 10.0}, {"data": 2, "pipe": 4}, 0.8),
    ({"data_codec": "int4", "data_options": {"block": 1000}, "min_ratio": 7.0}, {"data": 2, "pipe": 4}, 0.9),
]


@pytest.mark.once
@pytest.mark.parametrize(
    ("compress", "mesh", "fewer"),
    [
        (LOW_RANK, {"data": 2, "pipe": 4}, 0.7),
        (CODED, {"data": 2, "pipe": 4, "shard": "optimizer"}, 0.6),
        # A kernel of 64 x 64 would not shrink enough, and those of other shapes do.
        ({"data_stages": "all", "data_rank": 4, "data_inside": 2, "min_ratio": 6.0}, {"data": 4, "pipe": 2}, 0.9),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in FURTHER),
    ],
)
def test_compressed_bytes_are_those_that_the_trainers_step_asks_for(compress, mesh, fewer):
    """Within what is not modelled: scalars, and the positions and the last norm of stages without an embedding."""
    sections = {
        "model": {"layers": 4, "hidden": 64, "heads": 2, "sequence": 16, "vocab_size": 384, "dtype": "float32"},
        "batch": {"global_batch": 12 * mesh["data"], "micro_batch": 2},
        "mesh": {"shard": "none", **mesh},
        "optimizer": {"warmup_steps": 1},
        "run": {"steps": 2},
    }
    whole = {}
    for name, chosen in (("dense", {}), ("compressed", {"data_start": 0.0, "min_ratio": 1.5} | compress)):
        config = from_dict(sections | {"compress": nested(chosen)})
        trainer = small.trainer(config)
        asked = measurements.wire_bytes(trainer)
        some, candidate = cluster(8, 1), candidate_of_config(config)
        problem, hosts = Problem(some, config.model, candidate), host_order(candidate, 1)[0]
        found = types.SimpleNamespace(candidate=candidate, placement=types.SimpleNamespace(hosts=hosts))
        step = types.SimpleNamespace(compressed=np.full((1, candidate.pipe), candidate.data_rank > 0))
        report = types.SimpleNamespace(
            problem=problem, chosen=found, fabric=fabric(some), model=config.model, cluster=some, step=step
        )
        counted = {what: float(sizes.sum()) for what, sizes in traffic.traffic(report).items()}
        assert counted["messages between stages"] == asked["forward"] + asked["backward"]
        assert counted["tied embedding"] == asked["embedding"]
        over_data = counted["gradients over data"] + counted.get("weights over data", 0)
        assert over_data == pytest.approx(
            sum(asked[x] for x in ("all-reduce", "reduce-scatter", "all-gather")), rel=0.08
        )
        whole[name] = sum(counted.values())
    assert whole["compressed"] < fewer * whole["dense"]
