"""The limits of schedules against a replay of single events, published figures and the executor's rows."""

import dataclasses
import itertools

import numpy as np
import pytest

from paxtrain.schedule import schedules
from paxtrain.schedule.table import UNDER
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table, runs
from planner.pipeline.simulator import Seconds

SIZES = ((1, 3), (2, 5), (4, 3), (4, 40), (3, 200))
TABLES = [
    *[Table(name, p, m) for name in ("eager_1f1b", "gpipe", "1f1b", "zb_h1") for p, m in SIZES],
    *[Table("interleaved_1f1b", p, m, 2) for p, m in ((2, 5), (4, 8), (3, 29))],
    *[Table("zb_v", p, m, 2) for p, m in ((2, 5), (4, 8), (3, 29))],
]


def drawn(table: Table, seed: int = 0) -> Seconds:
    rng, stages, virtual = np.random.default_rng(seed), table.stages, table.stages * table.chunks
    times = lambda size: rng.uniform(0.2, 2, (2, size))  # noqa: E731
    durations = times(virtual), times(virtual), times(stages), times(stages), rng.uniform(0, 1, 2), times(stages)
    return Seconds(*durations, weights=times(virtual))


def one_at_a_time(table: Table, s: Seconds, i: int) -> list[float]:
    """Replay candidate i: each stage begins its ops in order, once it is free and the message has come."""
    schedule = schedules.build(table.schedule, table.stages, table.micro_batches, table.chunks, overlap=False)
    last, free, arrived = table.stages * table.chunks - 1, list(s.start[i]), {}
    folded = table.schedule == "zb_v"  # its second half runs back, and at the fold nothing travels
    numbers = [
        [c * table.stages + p for p in range(table.stages)][:: -1 if folded and c else 1] for c in range(table.chunks)
    ]
    fold = {(table.stages - 1, table.stages), (table.stages, table.stages - 1)} if folded else set()
    ops = [(row, 0, "F", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("forward")]
    ops += [(row, 1, "B", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("backward")]
    ops += [(row, 2, "W", stage, mb, chunk) for row, stage, mb, chunk in schedule.ops("weights")]
    for _, _, phase, stage, mb, chunk in sorted(ops):
        q = numbers[chunk][stage]
        begin = max(free[stage], arrived.get((phase, q, mb), 0.0))
        if phase == "F":
            free[stage] = begin + s.forward[i, q] + (s.head[i] if q == last else 0.0)
            if q < last:
                arrived["F", q + 1, mb] = free[stage] + ((q, q + 1) not in fold) * s.activation[i, stage]
        elif phase == "W":
            free[stage] += s.weights[i, q]
        else:
            free[stage] = begin + s.backward[i, q]
            if q:
                arrived["B", q - 1, mb] = free[stage] + ((q, q - 1) not in fold) * s.gradient[i, stage]
    return free


@pytest.mark.parametrize("table", TABLES, ids=str)
def test_equals_one_event_at_a_time(table):
    s = drawn(table)
    np.testing.assert_allclose(ideal.pipeline(table, s), [one_at_a_time(table, s, i) for i in (0, 1)], rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("1f1b", (57, 71, 85)),
        ("gpipe", (57, 60, 63)),
        ("eager_1f1b", (57, 60, 63)),
        ("interleaved_1f1b", (105, 112, 119)),
        ("zb_h1", (51, 57, 71)),
    ],
)
@pytest.mark.parametrize("replay", [ideal.pipeline, simulator.pipeline], ids=["ideal", "rows"])
def test_four_equal_stages_with_16_micro_batches(schedule, expected, replay):
    """The times are F=1, B=2 (of zb_h1 B=1, W=1) and transfers of 0, 0.5 and 1 on every hop."""
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    one, table = np.ones((1, 4 * chunks)), Table(schedule, 4, 16, chunks)
    backward = one if schedule == "zb_h1" else 2 * one
    found = [replay(table, Seconds(one, backward, c, c, weights=one)).max() for c in (0, 0.5, 1)]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("schedule", ["eager_1f1b", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (3, 21), (4, 48), (8, 64)])
def test_the_executors_rows_cost_nothing_if_transfers_are_no_longer_than_f(schedule, stages, micro_batches):
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    one, table = np.ones((1, stages * chunks)), Table(schedule, stages, micro_batches, chunks)
    for c in (0.1, 0.5, 0.9, 1):
        times = Seconds(one, one if schedule == "zb_h1" else 2 * one, c, c, weights=one)
        np.testing.assert_allclose(simulator.pipeline(table, times).max(), ideal.pipeline(table, times).max())


@pytest.mark.parametrize("table", [t for t in TABLES if t.stages > 1], ids=str)
def test_events_end_when_the_stages_do(table):
    drawn_once = simulator.take(drawn(table, seed=2), slice(0, 1))
    events, [ends] = ideal.timeline(table, drawn_once), ideal.pipeline(table, drawn_once)
    ops = [event for event in events if event.what in ("F", "B", "W", "H")]
    for stage in range(table.stages):
        own = sorted((event.begin, event.end) for event in ops if event.stage == stage)
        assert own[-1][1] == pytest.approx(ends[stage])
        assert all(end <= begin + 1e-9 for (_, end), (begin, _) in itertools.pairwise(own))  # one after another
    assert sum(event.what == "H" for event in ops) == table.micro_batches


def test_one_op_a_row_would_cost_waits(monkeypatch):
    """Negative control: with one op a row, as for devices that wait for transfers, stages wait for each other."""
    for schedule in ("1f1b", "interleaved_1f1b"):
        chunks = 2 if schedule == "interleaved_1f1b" else 1
        one = np.ones((1, 4 * chunks))
        table, times = Table(schedule, 4, 16, chunks), Seconds(one, 2 * one, 1.0, 1.0, weights=one)
        rows = runs(table, overlap=False)
        under = [(tuple(dataclasses.replace(row, travel=UNDER) for row in some), n) for some, n in rows]
        with monkeypatch.context() as patched:
            patched.setattr(simulator, "runs", lambda table, overlap, under=under: under)
            patched.setattr(simulator, "_KNOWN", {})  # else the times of other rows would be remembered
            found = simulator.pipeline(table, times).max()
        assert found > 1.05 * ideal.pipeline(table, times).max()


@pytest.mark.parametrize("table", [t for t in TABLES if t.stages > 1], ids=str)
def test_the_executors_rows_take_longer(table):
    s = drawn(table, seed=1)
    assert (simulator.pipeline(table, s).max(axis=1) >= ideal.pipeline(table, s).max(axis=1) - 1e-9).all()
