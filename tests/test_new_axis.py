"""An axis with a record in AXES, and a field for its size, works: here data ranks of a host beside those of data."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from paxtrain.config import Config, MeshConfig, from_dict, to_dict
from paxtrain.config import plan as plans
from paxtrain.config.axes import AXES, AxisSpec, in_words
from paxtrain.errors import UserError
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from planner.cost.candidate import Candidate, host_order
from planner.placement.place import slots_per_host
from planner.planning import to_plan
from planner.report import text
from tests.planner.examples import cluster

NAME = "replica"
REPLICA = AxisSpec(batch=True, sums=lambda mesh, names: True, inside=True)


@dataclasses.dataclass(frozen=True)
class ReplicaMesh(MeshConfig):
    """The section mesh with the new axis."""

    replica: int = 1


@pytest.fixture
def replica(monkeypatch):
    monkeypatch.setitem(AXES, NAME, REPLICA)
    monkeypatch.setattr(MeshConfig, NAME, 1, raising=False)
    monkeypatch.setitem(Config.__annotations__, "mesh", ReplicaMesh)
    monkeypatch.setitem(plans._SECTIONS, "mesh", ReplicaMesh)


def config(**mesh):
    return from_dict(
        {
            "model": {"layers": 2, "hidden": 16, "heads": 2, "sequence": 8, "vocab_size": 61, "dtype": "float32"},
            "mesh": mesh,
            "batch": {"global_batch": 8, "micro_batch": 1},
        }
    )


def test_without_a_record_there_is_no_such_axis():
    with pytest.raises(UserError, match=r"mesh\.replica"):
        config(replica=2)


def test_its_size_is_checked_and_splits_the_batch(replica):
    c = config(data=2, pipe=2, replica=2)
    assert (c.mesh.devices, c.mesh.ranks, c.rank_micro_batches) == (8, 4, (2, 2, 2, 2))
    assert make_mesh(c.mesh).shape == {"data": 2, "pipe": 2, "tensor": 1, "replica": 2}
    with pytest.raises(UserError, match=r"mesh\.replica must be"):
        config(replica=0)
    with pytest.raises(UserError, match=r"mesh\.data=2 x mesh\.replica=3 x batch\.micro_batch=1"):
        config(data=2, replica=3)


@pytest.mark.parametrize("zero1", [True, pytest.param(False, marks=pytest.mark.once)])
def test_its_gradients_are_those_of_one_device(replica, zero1):
    tokens, params, found = np.random.default_rng(0).integers(0, 61, (8, 9), dtype=np.int32), None, []
    for c in (config(), config(data=2, pipe=2, replica=2, zero1=zero1)):
        trainer = Trainer(c, make_mesh(c.mesh, devices=jax.devices()[: c.mesh.devices]))
        if params is None:
            params = trainer.layout.to_canonical(trainer.init(0).params)
        mine = jax.device_put(jax.jit(trainer.layout.from_canonical)(params), trainer.state_shardings.params)
        batch = jax.device_put(tokens, trainer.batch_sharding)
        loss, grads, *_ = jax.jit(trainer.loss_and_gradients)(mine, batch)
        norm = jax.jit(trainer.norm)(grads)
        found.append([loss, norm, *jax.tree.leaves(trainer.layout.to_canonical(grads))])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())


@dataclasses.dataclass(frozen=True)
class ReplicaCandidate(Candidate):
    """A candidate with the new axis."""

    replica: int = 1


def test_a_candidate_with_it_is_seated_told_and_planned(replica, monkeypatch):
    """Tensor groups of two replicas share a seat, so a host of 4 has 2 seats."""
    monkeypatch.setattr(to_plan, "MeshConfig", ReplicaMesh)
    c = ReplicaCandidate(4, 2, 1, micro_batch=1, micro_batches=2, schedule="1f1b", counts=(1, 1), replica=2)
    assert (c.seat, c.groups, slots_per_host(c, cluster())) == (2, 8, 2)
    hosts = host_order(c, 4)[0]
    assert hosts.tolist() == [[0, 0], [1, 1], [2, 2], [3, 3]]
    order = to_plan.device_order(hosts[::-1], 4, c.seat)
    assert order == (12, 13, 14, 15, 8, 9, 10, 11, 4, 5, 6, 7, 0, 1, 2, 3)
    assert text.mesh(c) == "4 x 2 x 1 x 2"
    assert in_words(c.sizes) == "data=4 pipe=2 tensor=1 replica=2"
    made = to_plan.sections(c, 2, 16, config().compress, np.zeros(2, bool))
    plan = plans.Plan(**made, device_order=order)
    values = plans.to_json(plan)
    assert values["mesh"]["replica"] == 2
    assert plans.from_json(json.loads(json.dumps(values))) == plan
    planned = plan.apply(to_dict(config()))
    assert planned.mesh.sizes == c.sizes
    assert planned.rank_micro_batches == (2,) * 8
