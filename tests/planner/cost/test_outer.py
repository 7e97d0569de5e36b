"""Exchanges between groups: bytes are those of the trainer's collectives, and seconds those of the links."""

import dataclasses

import jax
import numpy as np
import pytest

import paxtrain
import planner
from paxtrain.outer.trainer import trainer_of
from paxtrain.parallel.mesh import make_mesh
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
        {"outer.fragments": 2, "mesh.zero1": False},
        {"outer.fragments": 2, "outer.groups": 4},
        {"outer.fragments": 2, "mesh.tensor": 2, "mesh.pipe": 1},
        {"outer.fragments": 2, "model.family": "llama", "model.tied_head": False, "mesh.pipe": 1, "mesh.tensor": 1},
        INT8,
        INT8 | {"outer.fragments": 3},
    ],
)
def test_fragments_have_the_bytes_that_the_trainer_sends(changes):
    c = config(changes)
    made = trainer_of(c, make_mesh(c.mesh, devices=jax.devices()[: c.mesh.devices]))
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
    overlapped = planner.simulate(config({"outer.fragments": 4, "outer.overlap": 2}), slow)
    assert overlapped.exchanges == parts.exchanges
    group = planner.simulate(config({}).of_group(), slow)
    assert overlapped.seconds == pytest.approx(group.seconds + parts.exchange / 12)  # as if it were not overlapped


def test_one_group_alone_exchanges_nothing():
    found = planner.simulate(config({"outer.groups": 1, "outer.fragments": 2}), cluster(4, 2, seed=None))
    assert found.exchange == 0 and [x.bytes for x in found.exchanges] == [0, 0]
