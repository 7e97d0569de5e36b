"""Schedules between 1f1b and eager_1f1b: order, slots, gradients, and time against memory."""

import jax
import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.errors import UserError
from paxtrain.model import transformer
from paxtrain.schedule import buffers
from paxtrain.schedule.proof import validate
from paxtrain.schedule.schedules import between_ends, build, spec_of
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table, runs
from planner.pipeline.simulator import Seconds
from tests import small


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8])
def test_tables_are_proved_and_repeat(stages, overlap):
    for most in range(stages, 2 * stages):
        name = between_ends(most)
        for m in (1, 3, stages, 2 * stages + 1, 41):
            table = build(name, stages, m, 1, overlap)
            found = buffers.assign(table)
            validate(table, found)
            spec = spec_of(name)
            assert found.residual_depth == spec.residual_slots(0, stages, 1, m) == min(m, most)
            assert found.activation_depth <= spec.activation_slots
            assert found.gradient_depth <= spec.gradient_slots(stages, m)
        for m in (90, 201):
            stretches = runs(Table(name, stages, m), overlap=overlap)
            assert sum(len(some) * n for some, n in stretches) == build(name, stages, m, 1, overlap).rows


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_more_in_flight_takes_less_time_from_1f1b_to_eager(stages):
    one, m = np.ones((1, stages)), 96
    for c in (0.25, 0.5, 1.0):
        times = Seconds(one, 2 * one, c, c)
        found = [simulator.pipeline(Table(between_ends(k), stages, m), times).max() for k in range(stages, 2 * stages)]
        ends = [simulator.pipeline(Table(name, stages, m), times).max() for name in ("1f1b", "eager_1f1b")]
        assert [found[0], found[-1]] == pytest.approx(ends)
        assert all(more < less for less, more in zip(found, found[1:]))
        lower = [ideal.pipeline(Table(between_ends(k), stages, m), times).max() for k in range(stages, 2 * stages)]
        assert found == pytest.approx(lower)


@pytest.mark.slow
def test_gradients_of_a_value_between_are_those_of_autodiff():
    """Four micro-batches in flight on three stages; the plain model on one device is the reference."""
    c = small.config((1, 3), (5, 1), model={"layers": 3}, pipeline={"schedule": "1f1b", "in_flight": 4})
    params, tokens = small.canonical(c.model), small.tokens(c)
    right = jax.jit(jax.value_and_grad(transformer.loss), static_argnums=2)(params, tokens, c.model)
    loss, _, grads = small.gradients(small.trainer(c, overlap=True), params, tokens)
    for one, other in zip(*map(jax.tree.leaves, (jax.device_get(right), (loss, grads))), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(one).max())


@pytest.mark.parametrize(
    ("schedule", "in_flight", "what"),
    [
        ("1f1b", 3, "in_flight=4 or 0 would fit"),
        ("1f1b", 8, "in_flight=7 or 0 would fit"),
        ("gpipe", 5, "needs pipeline.schedule=1f1b"),
        ("1f1b", -1, "0 or more"),
    ],
)
def test_bad_values_are_refused(schedule, in_flight, what):
    with pytest.raises(UserError, match=what):
        from_dict(
            {
                "mesh": {"pipe": 4},
                "batch": {"global_batch": 16, "micro_batch": 2},
                "pipeline": {"schedule": schedule, "in_flight": in_flight},
            }
        )
