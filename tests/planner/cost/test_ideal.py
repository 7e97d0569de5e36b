"""The limits of schedules against a replay of single events, published figures and the executor's rows."""

import numpy as np
import pytest

from paxtrain.schedule import schedules
from planner.cost import ideal, simulator
from planner.cost.rows import Table
from planner.cost.simulator import Seconds

SIZES = ((1, 3), (2, 5), (4, 3), (4, 40), (3, 200))
TABLES = [
    *[Table(name, p, m) for name in ("eager_1f1b", "gpipe", "1f1b", "zb_h1") for p, m in SIZES],
    *[Table("interleaved_1f1b", p, m, 2) for p, m in ((2, 5), (4, 8), (3, 29))],
]


def drawn(table: Table, seed: int = 0) -> Seconds:
    rng, stages, virtual = np.random.default_rng(seed), table.stages, table.stages * table.chunks
    times = lambda size: rng.uniform(0.2, 2, (2, size))  # noqa: E731
    durations = times(virtual), times(virtual), times(stages), times(stages), rng.uniform(0, 1, 2), times(stages)
    return Seconds(*durations, weights=times(virtual))


def one_at_a_time(table: Table, s: Seconds, i: int) -> list[float]:
    """Replay candidate i: each stage begins its ops in order, once it is free and the message has come."""
    schedule = schedules.build(table.schedule, table.stages, table.micro_batches, table.chunks)
    last, free, arrived = table.stages * table.chunks - 1, list(s.start[i]), {}
    ops = [(row, 0, "F", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("forward")]
    ops += [(row, 1, "B", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("backward")]
    ops += [(row, 2, "W", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("weights")]
    for _, _, phase, stage, mb, chunk in sorted(ops):
        q = chunk * table.stages + stage
        begin = max(free[stage], arrived.get((phase, q, mb), 0.0))
        if phase == "F":
            free[stage] = begin + s.forward[i, q] + (s.head[i] if q == last else 0.0)
            if q < last:
                arrived["F", q + 1, mb] = free[stage] + s.activation[i, stage]
        elif phase == "W":
            free[stage] += s.weights[i, q]
        else:
            free[stage] = begin + s.backward[i, q]
            if q:
                arrived["B", q - 1, mb] = free[stage] + s.gradient[i, stage]
    return free


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_equals_one_event_at_a_time(table):
    s = drawn(table)
    np.testing.assert_allclose(ideal.pipeline(table, s), [one_at_a_time(table, s, i) for i in (0, 1)], rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "expected"), [("1f1b", (57, 71, 85)), ("gpipe", (57, 60, 63)), ("eager_1f1b", (57, 60, 63))]
)
def test_four_equal_stages_with_16_micro_batches(schedule, expected):
    """The times are F=1, B=2 and transfers of 0, 0.5 and 1 on every hop."""
    one, table = np.ones((1, 4)), Table(schedule, 4, 16)
    found = [ideal.pipeline(table, Seconds(one, 2 * one, c, c)).max() for c in (0, 0.5, 1)]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("table", [t for t in TABLES if t.stages > 1], ids=str)
def test_the_executors_rows_take_longer(table):
    s = drawn(table, seed=1)
    assert (simulator.pipeline(table, s).max(axis=1) >= ideal.pipeline(table, s).max(axis=1) - 1e-9).all()
