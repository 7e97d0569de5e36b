"""A schedule that is only added to SPECS works, since everything else reads its ops and its spec."""

import ast
import dataclasses
import importlib.util

import jax
import numpy as np
import pytest

from experiments.gpu import correctness, many, options
from experiments.gpu.section import FULL
from paxtrain.errors import UserError
from paxtrain.schedule import buffers
from paxtrain.schedule.proof import validate
from paxtrain.schedule.row_layout import lay_out, warm_up_then_alternate
from paxtrain.schedule.schedules import SPECS, ScheduleSpec, build, code
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.memory import closed_form
from planner.pipeline import layer_split, rows
from planner.search import pruning
from planner.search.enumeration import enumerate_candidates
from planner.search.space import Choices, candidate_of
from tests import small
from tests.planner.examples import MODEL, cluster, placements
from tests.sources import ROOT

NAME = "late_1f1b"
# These modules may name schedules: they hold defaults, published rules and trials of 1F1B, the models whose memory
# is compiled, the schedules that other trainers have and run by, and benchmarks.
MAY_NAME_SCHEDULES = (
    "paxtrain/schedule/schedules.py",
    "paxtrain/config/parallel.py",
    "paxtrain/profiling/ledger.py",
    "paxtrain/testing/models.py",
    "planner/export/",
    "planner/search/baselines.py",
    "planner/runs/published.py",
    "planner/fit/trial_steps.py",
    "planner/runs/trials.py",
    "planner/cost/simulate.py",
    "planner/measure/compute_timing.py",
)


def _late_1f1b(stages, chunks, m, overlap):
    """Return 1F1B with one more forward ahead of the first backward."""
    forwards, backwards = ([(phase, mb, 0) for mb in range(m)] for phase in "FB")
    return lay_out([warm_up_then_alternate(forwards, backwards, stages - s) for s in range(stages)], 1, overlap)


LATE = ScheduleSpec(
    ops=_late_1f1b,
    order="alternating",
    in_flight=lambda s, p, v, m: p - s + 1,
    activation_slots=2,
    gradient_slots=lambda p, m: 2,
    settles=4,
)


@pytest.fixture
def late(monkeypatch):
    monkeypatch.setitem(SPECS, NAME, LATE)
    yield LATE
    build.cache_clear()


def config(schedule, pipe, data=1):
    return small.config((data, pipe), (10, 1), pipeline={"schedule": schedule})


def test_without_a_spec_there_is_no_such_schedule():
    with pytest.raises(UserError, match=NAME):
        config(NAME, 2)
    with pytest.raises(ValueError, match=NAME):
        build(NAME, 2, 4)


def test_its_table_is_proved_and_its_rings_are_as_deep_as_the_spec_says(late):
    for stages in (2, 3, 4):
        for m in (1, 2, 5, 9):
            for overlap in (True, False):
                table = build(NAME, stages, m, 1, overlap)
                found = buffers.assign(table)
                validate(table, found)
                assert found.residual_depth == late.residual_slots(0, stages, 1, m) == min(m, stages + 1)
                assert found.activation_depth <= late.activation_slots
                assert found.gradient_depth <= late.gradient_slots(stages, m)
    with pytest.raises(ValueError, match="lead nowhere"):
        lay_out([[("F", 0, 0), ("B", 1, 0)]], 1)  # B of a micro-batch without F


@pytest.mark.once
def test_its_gradients_are_those_of_one_device(late):
    found = []
    for c in (config("gpipe", 1), config(NAME, 2)):
        found.append(jax.tree.leaves(small.gradients(small.trainer(c), small.canonical(c.model), small.tokens(c))))
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 * np.abs(one).max())


def test_the_planner_plans_it(late):
    """Its memory follows from its ring, its bound is below every simulated step, and the search offers it."""
    shape = dataclasses.replace(closed_form.of(config(NAME, 4)), micro_batches=9)
    assert closed_form.ring_depths(shape)[0] == 5
    assert closed_form.ring_slots(shape) == 5  # no scrap slot, since idle stages skip
    for m in (3, 20, 41, 200):
        stretches = rows.runs(rows.Table(NAME, 3, m))
        assert sum(len(some) * repeats for some, repeats in stretches) == build(NAME, 3, m).rows
    some = cluster()
    space = enumerate_candidates(some, MODEL, 32, Choices(schedules=("1f1b", NAME), backward=(), data_ranks=()))
    bounds, links = pruning.lower_bound(some, MODEL, space), fabric(some)
    mine = np.flatnonzero((space.schedule == code(NAME)) & (space.pipe > 1))
    assert len(mine)
    for i in mine[:: max(len(mine) // 60, 1)]:
        even = layer_split.even(MODEL.layers, int(space.pipe[i]))
        problem = Problem(some, MODEL, candidate_of(space, i, even))
        c = problem.candidate
        hosts = placements(3, c.data, c.pipe, some.devices_per_host // c.tensor, seed=int(i))
        assert (problem.step(links, hosts).total >= bounds[i] * (1 - 1e-12)).all(), c


@pytest.mark.parametrize("module", [correctness, many, options], ids=lambda module: module.__name__)
def test_a_gpu_is_measured_with_it(late, module):
    """The control is the module as it was imported, without the schedule."""
    assert NAME not in repr(module.SECTION.parts[FULL])
    spec = importlib.util.find_spec(module.__name__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    assert NAME in repr(again.SECTION.parts[FULL])


def test_a_spec_that_settles_too_soon_is_refused(late, monkeypatch):
    monkeypatch.setitem(SPECS, NAME, dataclasses.replace(late, settles=1))
    with pytest.raises(ValueError, match="settles"):
        rows.runs(rows.Table(NAME, 4, 50))


def test_only_its_spec_knows_a_schedule_by_name():
    """In any other module a schedule's name would be a second home of a fact."""
    found = []
    for package in ("compress", "paxtrain", "planner"):
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
            if any(value in SPECS for value in constants if isinstance(value, str)):
                found.append(name)
    assert [name for name in found if not name.startswith(MAY_NAME_SCHEDULES)] == []
    assert "paxtrain/schedule/schedules.py" in found
