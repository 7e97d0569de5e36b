"""Exchanges between groups: bytes are those of the trainer's collectives, and seconds those of the links."""

import dataclasses

import numpy as np
import pytest

import paxtrain
import planner
from planner.cluster.cluster import Cluster
from tests import small
from tests.planner.examples import cluster

SMALL = {"model.layers": 8, "model.hidden": 64, "model.heads": 4, "mesh.pipe": 2, "mesh.tensor": 1, "mesh.data": 4}
GROUPS = {"outer.groups": 2, "outer.every": 12}
INT8 = {"compress.outer.codec": "int8"}


def config(changes):
    return paxtrain.load_config("tiny", SMALL | GROUPS | {"run.steps": 120} | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outer.fragments": 2},
        {"outer.fragments": 3},  # stages have up to two layers of a fragment, and send as many of it
        {"outer.fragments": 4, "outer.overlap": 1},
        {"outer.fragments": 3, "model.layers": 7},
        {"outer.fragments": 2, "mesh.shard": "none"},
        {"outer.fragments": 2, "outer.groups": 4},
        {"outer.fragments": 2, "mesh.tensor": 2, "mesh.pipe": 1},
        {"outer.fragments": 2, "model.family": "llama", "model.tied_head": False, "mesh.pipe": 1, "mesh.tensor": 1},
        INT8,
        INT8 | {"outer.fragments": 3},
    ],
)
def test_fragments_have_the_bytes_that_the_trainer_sends(changes):
    c = config(changes)
    made = small.trainer(c)
    found = planner.simulate(c, cluster(4, 2, seed=None)).exchanges
    assert [x.bytes for x in found] == pytest.approx(made.sent(), rel=1e-12)


def test_fragments_share_the_seconds_of_an_exchange_of_all():
    """Between two sites links are a thousandth as quick. So all seconds are those of bytes on them."""
    some = cluster(4, 2, seed=None)
    apart = np.abs(np.subtract.outer(np.arange(4) // 2, np.arange(4) // 2)) == 1
    slow = dataclasses.replace(some, samples=np.where(apart, some.samples / 1e3, some.samples))
    whole, parts = (planner.simulate(config({"outer.fragments": n}), slow) for n in (1, 4))
    per_byte = whole.exchange / whole.exchanges[0].bytes
    assert per_byte > 0.99 / slow.samples[0].min()  # the links' own, or more where rings share a host's NICs
    assert [x.seconds / x.bytes for x in parts.exchanges] == pytest.approx([per_byte] * 4, rel=0.05)
    assert parts.exchange == pytest.approx(whole.exchange, rel=0.05) and parts.exchange > whole.exchange
    assert max(x.seconds for x in parts.exchanges) < 0.6 * whole.exchange
    group = planner.simulate(config({}).of_group(), slow)
    assert parts.waits == parts.exchange / 12
    assert parts.seconds == pytest.approx(group.seconds + parts.waits)


OVERLAPPED = {"outer.fragments": 4, "outer.overlap": 2}


@pytest.mark.parametrize(
    ("changes", "hidden"),
    [
        ({"pipeline.schedule": "eager_1f1b"}, True),
        ({"mesh.pipe": 1, "mesh.data": 8}, True),
        ({"pipeline.schedule": "1f1b"}, False),  # all its compute is in loops with transfers of their own
        ({"pipeline.schedule": "interleaved_1f1b", "pipeline.virtual_stages": 2}, False),
        ({"pipeline.schedule": "eager_1f1b", "outer.overlap": 0}, False),
    ],
)
def test_a_step_waits_for_what_its_rows_do_not_hide(changes, hidden):
    """The largest fragment, with the tables, takes longer than a step's rows, which hide the others."""
    some = cluster(4, 2, seed=None)
    step = planner.simulate(config(OVERLAPPED | changes), some)
    group = step.seconds - step.waits
    rows = float((step.finish - step.gather).min())
    taken = np.array([x.seconds for x in step.exchanges])
    scale = 2 * rows / (taken.max() + taken.min())
    # Only the rings over groups become slow: those between hosts 0, 1 and hosts 2, 3.
    apart = np.abs(np.subtract.outer(np.arange(4) // 2, np.arange(4) // 2)) == 1
    samples, alpha = np.where(apart, some.samples / scale, some.samples), np.where(apart, scale, 1) * some.alpha
    slow = dataclasses.replace(some, samples=samples, alpha=alpha)
    slower = planner.simulate(config(OVERLAPPED | changes), slow)
    taken = np.array([x.seconds for x in slower.exchanges])
    assert taken.max() > 1.01 * rows and taken.min() < 0.99 * rows
    assert slower.seconds - slower.waits == pytest.approx(group)
    exposed = np.maximum(taken - rows, 0) if hidden else taken
    assert slower.waits == pytest.approx(exposed.sum() / 12)


class OverGloo(Cluster):
    """The same devices, but no transfer runs beside compute, as on CPUs."""

    overlaps = False


def test_on_cpus_exchanges_are_waited_for():
    some = cluster(4, 2, seed=None)
    slow = OverGloo(**{f.name: getattr(some, f.name) for f in dataclasses.fields(Cluster)})
    waits, flies = (planner.simulate(config(OVERLAPPED | {"outer.overlap": n}), slow) for n in (0, 1))
    assert flies.waits == waits.waits > 0 and flies.seconds == waits.seconds


def test_groups_that_share_a_hosts_nic_slow_each_other_down():
    """Two groups of two data ranks on two hosts: each host has one rank of either, or one group."""
    some = cluster(2, 2, seed=None)
    c = config({"mesh.pipe": 1, "outer.every": 120})
    mixed, apart = (planner.simulate(c, some, np.array(hosts)[:, None]) for hosts in ([0, 1, 0, 1], [0, 0, 1, 1]))
    alone = planner.simulate(c.of_group(), some, np.array([[0], [1]]))
    assert apart.seconds < alone.seconds < mixed.seconds


def test_one_group_alone_exchanges_nothing():
    found = planner.simulate(config({"outer.groups": 1, "outer.fragments": 2}), cluster(4, 2, seed=None))
    assert found.exchange == 0 and [x.bytes for x in found.exchanges] == [0, 0]
