"""Programs of a study: made once, shared by variants that run the same step, and right when they are shared."""

import concurrent.futures
import dataclasses
import threading

import jax
import numpy as np
import pytest

from paxtrain.config import MeshConfig
from paxtrain.parallel.mesh import make_mesh
from paxtrain.parallel.step import Trainer
from paxtrain.study import programs, variants
from tests.paxtrain.study.test_study import QUICK, configuration

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


def test_threads_that_ask_together_wait_for_one_value():
    made, go = [], threading.Event()

    def make(key):
        go.wait(10)
        made.append(key)
        if key == "bad":
            raise ValueError("this one cannot be made")
        return f"value of {key}"

    get = programs.once(make)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(get, key) for key in ("good", "bad") * 4]
        go.set()
    assert [job.result() for job in asked[::2]] == ["value of good"] * 4
    for job in asked[1::2]:
        with pytest.raises(ValueError, match="cannot be made"):
            job.result()
    assert sorted(made) == ["bad", "good"]


def trainers(config):
    """Return the trainers of the variants on one device, by name."""
    mesh = make_mesh(MeshConfig(), devices=jax.devices()[:1])
    found = variants.variants(variants.settled(config), [1])
    return {variant.name: Trainer(variant.config, mesh, record=3, virtual=True) for variant in found}


def test_variants_that_begin_alike_share_their_dense_step():
    found = trainers(configuration())
    dense = {name: programs.at_ranks(trainer, (0, 0)) for name, trainer in found.items()}
    assert dense["cb_fe_sc"] == dense["cb_fe"] != dense["cb_epilogue"]
    assert len(set(dense.values())) == len(found) - 1
    assert {name for name in found if any(found[name].ranks)} == {"cb_fe_sc", "everything"}
    assert programs.at_ranks(found["cb_fe_sc"], (2, 0)) != dense["cb_fe_sc"]
    # Groups of data ranks, which are of compression over data, are not of a step without it.
    groups = trainers(configuration(mesh={"data": 4}, batch={"global_batch": 24}, compress={"data_inside": 2}))
    assert programs.at_ranks(groups["cb_fe_sc"], (0, 0)) == programs.at_ranks(groups["cb_fe"], (0, 0))


@pytest.mark.slow
def test_a_shared_dense_step_is_that_of_the_run_and_leaves_its_state_over_data():
    """It is compared with the step of the run itself, whose program carries the state through."""
    trainer = trainers(configuration())["cb_fe_sc"]
    batch = np.random.default_rng(0).integers(0, 257, trainer.abstract_batch().shape, dtype=np.int32)

    def compiled(one):
        return one.step.lower(one.abstract_state(), one.abstract_batch()).compile(QUICK)

    own = compiled(dataclasses.replace(trainer, stage_ranks=(0, 0)))
    shared = programs.on_dense(compiled(programs.at_ranks(trainer, (0, 0))))
    first, states = jax.device_get(trainer.init(0)), []
    for step in (own, shared):
        state = jax.device_put(first, trainer.state_shardings)
        for _ in range(2):
            state, values = step(state, batch)
        assert float(values["loss"]) > 1
        states.append(jax.device_get(state))
    for mine, right in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5, atol=1e-6)
    kept = jax.tree.leaves(first.codec["data"])
    assert kept
    for before, after in zip(kept, jax.tree.leaves(states[1].codec["data"]), strict=True):
        np.testing.assert_array_equal(before, after)
    moved = [np.any(a != b) for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(states[1].params))]
    assert all(moved)
