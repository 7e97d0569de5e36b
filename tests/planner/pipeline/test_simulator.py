"""The simulator replays the executor's tables: against a plain replay, closed forms, and invariants for any times."""

import collections
import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paxtrain.schedule.table import ALONG, BETWEEN, IDLE
from planner.pipeline import ideal, simulator
from planner.pipeline.rows import Table
from planner.pipeline.simulator import Seconds, concatenate, pipeline, take, timeline
from tests.schedules import FOLDED, virtual_of

TABLES = [
    *[
        Table(name, p, m)
        for name in ("eager_1f1b", "gpipe", "1f1b", "zb_h1")
        for p, m in ((1, 3), (2, 5), (4, 3), (4, 17), (5, 40))
    ],
    *[Table("interleaved_1f1b", p, m, 2) for p, m in ((2, 5), (4, 8), (3, 29), (4, 50))],
    *[Table(name, 3, 11, 1, kind) for name in ("eager_1f1b", "1f1b", "zb_h1") for kind in ("epilogue", "all")],
    Table("interleaved_1f1b", 3, 31, 2, "epilogue"),
    *[Table("zb_v", p, m, 2) for p, m in ((2, 4), (3, 7), (4, 50))],
    *[Table("dualpipe_v", p, m, 2) for p, m in ((2, 5), (3, 40))],
    Table("zb_v", 3, 41, 2, first=13),
    # Links of which some compress.
    Table("1f1b", 3, 11, 1, "all", (1,)),
    Table("interleaved_1f1b", 3, 14, 2, "all", (0, 2)),
    # Data ranks that lack the first micro-batches.
    Table("eager_1f1b", 3, 9, skips=True),
    *[
        Table(name, p, m, first=first, skips=True)
        for name in ("eager_1f1b", "gpipe", "1f1b", "zb_h1", "1f1b:5")
        for p, m, first in ((3, 11, 4), (4, 90, 40))
    ],
    *[Table("interleaved_1f1b", p, m, 2, first=first) for p, m, first in ((2, 7, 4), (3, 71, 37))],
    Table("1f1b", 3, 31, 1, "epilogue", first=12),
]


def drawn(table: Table, batch: int = 3, seed: int = 0) -> Seconds:
    rng, stages, virtual = np.random.default_rng(seed), table.stages, table.stages * table.chunks
    times = lambda size, most: rng.uniform(0, most, (batch, size))  # noqa: E731
    return Seconds(
        forward=times(virtual, 1) + 0.5,
        backward=times(virtual, 2) + 1,
        activation=times(stages, 1.5),
        gradient=times(stages, 1.5),
        head=rng.uniform(0, 1, batch),
        start=times(stages, 1),
        packed=times(stages, 0.5),
        encode=times(stages, 0.2),
        decode=times(stages, 0.2),
        weights=times(virtual, 1.5),
    )


def way(a: int, b: int, schedule, s: Seconds, kind: str) -> np.ndarray:
    """Return the seconds [batch] of a message of stage a to b; those to the next stage are as long for both kinds."""
    if schedule.name in FOLDED:
        return 0 * s.head if a == b else (s.activation if b == a + 1 else s.gradient)[:, a]
    return getattr(s, kind)[:, a]


def packed_messages(schedule, compressed: str, links: tuple[int, ...]) -> set:
    found = {"none": set, "epilogue": schedule.epilogue, "all": schedule.gradient_messages}[compressed]()
    return {(sender, mb) for sender, mb in found if not links or (sender - 1) % schedule.stages in links}


def computing(schedule, what: str, t: int) -> list[tuple[int, int]]:
    """Return each (stage, virtual stage) that computes in row t."""
    busy = getattr(schedule, what)[t] != IDLE
    chunk = getattr(schedule, what + "_chunk")[t]
    return [
        (stage, virtual_of(schedule, stage, int(chunk[stage])))
        for stage in range(schedule.stages)
        if busy[stage] or (schedule.masked and busy.any() and t <= min(schedule.last_rows))
    ]


def gradient_messages(schedule, t: int, packed: set) -> list[tuple[int, int, bool]]:
    """Return (sender, receiver, compressed) of each gradient of row t."""
    virtual = lambda a: virtual_of(schedule, a, int(schedule.backward_chunk[t - 1, a]))  # noqa: E731
    return [(a, b, (virtual(a), int(schedule.backward[t - 1, a])) in packed) for a, b in schedule.gradient_pairs[t]]


def has_head(schedule, t: int) -> bool:
    last = loss_stage(schedule)
    return schedule.forward[t, last] != IDLE and schedule.forward_chunk[t, last] == schedule.chunks - 1


def loss_stage(schedule) -> int:
    return 0 if schedule.name in FOLDED else schedule.stages - 1


def replayed(table: Table, s: Seconds, i: int) -> list[float]:
    """Replay candidate i with overlap, one event at a time in Python floats, from the schedule's table."""
    schedule = table.plan(overlap=True)
    packed = packed_messages(schedule, table.compressed, table.links)
    now = list(s.start[i])

    def compute(phase: str, seconds: np.ndarray, t: int) -> None:
        for stage, virtual in computing(schedule, phase, t):
            now[stage] += seconds[i, virtual]

    def await_all(arrivals: list[tuple[int, int, float]]) -> None:
        for a, b, done in arrivals:
            now[a], now[b] = max(now[a], done), max(now[b], done)

    for t in range(schedule.rows):
        messages = gradient_messages(schedule, t, packed)
        for a, _, small in messages:
            now[a] += s.encode[i, a] if small else 0
        ready = list(now)
        gradients = [
            (a, b, max(ready[a], ready[b]) + (s.packed[:, a] if small else way(a, b, schedule, s, "gradient"))[i])
            for a, b, small in messages
            if a != b
        ]
        compute("forward", s.forward, t)
        if has_head(schedule, t):
            now[loss_stage(schedule)] += s.head[i]
        posted = ready if schedule.travel == ALONG else list(now)
        # What a stage's NIC has sent, and what it has got, before the activation has its turn.
        sizes = {a: done - max(ready[a], ready[b]) for a, b, done in gradients}
        got = collections.Counter()
        for a, b, _ in gradients:
            got[b] += sizes[a]
        activations = [
            (a, b, max(posted[a], posted[b], ready[a] + sizes.get(a, 0), ready[b] + got[b]) + seconds[i])
            for a, b in schedule.activation_pairs[t]
            for seconds in [way(a, b, schedule, s, "activation")]
            if a != b
        ]
        compute("weights", s.weights, t)
        if schedule.travel == ALONG:
            compute("backward", s.backward, t)
        await_all(gradients)
        for _, b, small in messages:
            now[b] += s.decode[i, b] if small else 0
        if schedule.travel != ALONG:
            compute("backward", s.backward, t)
        await_all(activations)
    return now


def order_of_blocking_ops(schedule) -> list[tuple[str, int]]:
    """(op, row): row by row; messages before the ops if they travel between rows, else compressed gradients late."""
    ops = ("encode", "plain", "F", "send", "head", "packed", "decode", "W", "B")
    if schedule.travel == BETWEEN:
        ops = ("encode", "plain", "packed", "decode", "send", "F", "head", "W", "B")
    return [(op, t) for t in range(schedule.rows) for op in ops]


def each_way(schedule, pairs: list[tuple[int, int]], first: int) -> list[list[tuple[int, int]]]:
    """Return pairs that one transfer each moves: folded, first those of the way that chunks in turn take."""
    if schedule.name not in FOLDED:
        return [pairs]
    return [[(a, b) for a, b in pairs if b - a == first], [(a, b) for a, b in pairs if b - a == -first]]


def replayed_blocking(table: Table, s: Seconds, i: int) -> list[float]:
    """Replay candidate i on a backend whose receivers wait for transfers, and whose senders wait until they begin."""
    schedule = table.plan(overlap=False)
    packed = packed_messages(schedule, table.compressed, table.links)
    now = list(s.start[i])

    def transfers(messages: list[tuple[int, int, float]]) -> None:
        begun = [(a, b, max(now[a], now[b]), seconds) for a, b, seconds in messages]
        for a, b, begin, seconds in begun:
            now[a], now[b] = max(now[a], begin), max(now[b], begin + seconds)

    for op, t in order_of_blocking_ops(schedule):
        messages = gradient_messages(schedule, t, packed)
        if op == "encode":
            for a, _, small in messages:
                now[a] += s.encode[i, a] if small else 0
        elif op in ("plain", "packed"):
            sent = [(a, b) for a, b, small in messages if small == (op == "packed") and a != b]
            for some in each_way(schedule, sent, -1):
                transfers(
                    [
                        (a, b, s.packed[i, a] if op == "packed" else way(a, b, schedule, s, "gradient")[i])
                        for a, b in some
                    ]
                )
        elif op == "send":
            for some in each_way(schedule, [(a, b) for a, b in schedule.activation_pairs[t] if a != b], 1):
                transfers([(a, b, way(a, b, schedule, s, "activation")[i]) for a, b in some])
        elif op == "head":
            now[loss_stage(schedule)] += s.head[i] if has_head(schedule, t) else 0
        elif op == "decode":
            for _, b, small in messages:
                now[b] += s.decode[i, b] if small else 0
        else:
            what = {"F": "forward", "B": "backward", "W": "weights"}[op]
            for stage, virtual in computing(schedule, what, t):
                now[stage] += getattr(s, what)[i, virtual]
    return now


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("table", TABLES, ids=str)
def test_equals_a_plain_replay_of_the_schedule(table, overlap):
    s = drawn(table)
    expected = [(replayed if overlap else replayed_blocking)(table, s, i) for i in range(3)]
    np.testing.assert_allclose(pipeline(table, s, overlap), expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", ["eager_1f1b", "gpipe", "1f1b"])
@pytest.mark.parametrize(("p", "m"), [(1, 1), (1, 7), (2, 2), (4, 16), (8, 100), (3, 1000)])
def test_equal_stages_without_transfers_take_the_closed_form(schedule, p, m):
    found = pipeline(Table(schedule, p, m), Seconds(np.full((1, p), 1.0), np.full((1, p), 2.0)))
    np.testing.assert_allclose(found.max(), (m + p - 1) * 3.0, rtol=1e-12)


@pytest.mark.parametrize("times", [(1, 1, 1), (4, 5, 3), (3, 3, 1), (1, 2, 1)])
@pytest.mark.parametrize(("p", "m"), [(1, 7), (2, 2), (2, 9), (4, 16), (8, 8), (8, 100), (3, 1000)])
def test_weight_gradients_fill_the_bubble(p, m, times):
    """The bubble of ZB-H1 (Qi et al. 2023) is (P-1)(F+B-W); that of 1f1b is (P-1)(F+B+W)."""
    f, b, w = (np.full((1, p), float(x)) for x in times)
    work, bubble = m * sum(times), (p - 1) * (times[0] + times[1] - times[2])
    found = pipeline(Table("zb_h1", p, m), Seconds(f, b, weights=w)).max()
    # A W shorter than F leaves its difference open, once in a step.
    assert (work + bubble) * (1 - 1e-12) <= found <= (work + bubble + max(times[0] - times[2], 0)) * (1 + 1e-12)
    found = ideal.pipeline(Table("zb_h1", p, m), Seconds(f, b, weights=w)).max()
    np.testing.assert_allclose(found, work + bubble, rtol=1e-12)
    whole = pipeline(Table("1f1b", p, m), Seconds(f, b + w)).max()
    np.testing.assert_allclose(whole - found, 2 * (p - 1) * times[2], atol=1e-9)


@pytest.mark.parametrize(("p", "m"), [(2, 3), (2, 9), (4, 16), (8, 15), (8, 100), (3, 1000)])
def test_a_v_has_no_bubble_if_f_b_and_w_are_equal(p, m):
    """ZB-V (Qi et al. 2024): the last stage begins P-1 forwards of a chunk later, and all end as much later."""
    one = np.full((1, 2 * p), 0.5)
    found = pipeline(Table("zb_v", p, m, 2), Seconds(one, one, weights=one))[0]
    np.testing.assert_allclose(found, 3 * m + 0.5 * np.arange(p), rtol=1e-12)
    np.testing.assert_allclose(ideal.pipeline(Table("zb_v", p, m, 2), Seconds(one, one, weights=one))[0], found)


def test_transfers_hide_in_eager_1f1b_and_gpipe_and_1f1b_waits_for_two_on_each_round():
    def slope(schedule: str, transfer: float) -> float:
        times = Seconds(np.full((1, 4), 1.0), np.full((1, 4), 2.0), transfer, transfer)
        few, many = (pipeline(Table(schedule, 4, m), times).max() for m in (100, 140))
        return (many - few) / 40

    assert slope("eager_1f1b", 1.0) == pytest.approx(3.0)
    assert slope("gpipe", 1.0) == pytest.approx(3.0)
    assert slope("1f1b", 1.0) == pytest.approx(3.0 + 2 * 3 / 4)
    # Longer than what they lie under. Stages in the middle send an activation and a gradient in each round.
    assert slope("eager_1f1b", 4.0) == pytest.approx(2 * 4.0)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(TABLES), st.booleans(), st.integers(0, 10**6))
def test_monotone_in_every_duration_and_above_every_stages_work(table, overlap, seed):
    s = drawn(table, batch=1, seed=seed)
    base = pipeline(table, s, overlap)
    rng = np.random.default_rng(seed)
    for name, value in vars(s).items():
        longer = value.copy()
        longer.flat[rng.integers(longer.size)] += 0.3
        more = pipeline(table, Seconds(**{**vars(s), name: longer}), overlap)
        assert (more >= base - 1e-12 * base).all(), name
    each = (s.forward + s.backward + s.weights * (table.schedule in ("zb_h1", *FOLDED)))[0]
    on = [[virtual_of(table.plan(overlap), p, v) for p in range(table.stages)] for v in range(table.chunks)]
    work = (table.micro_batches - table.first) * each[np.array(on)].sum(axis=0)
    assert (base[0] >= work + s.start[0] - 1e-9).all()
    once = (s.forward + s.backward).sum() + s.head[0]
    assert base.max() >= once - 1e-9


@pytest.mark.parametrize("table", [TABLES[3], TABLES[18], TABLES[22], Table("zb_v", 3, 7, 2), TABLES[-1]], ids=str)
def test_the_timeline_is_the_same_run(table):
    s = drawn(table, batch=1)
    events, finish = timeline(table, s), pipeline(table, s)
    assert max(e.end for e in events) <= finish.max() + 1e-9
    for stage in range(table.stages):
        mine = [e for e in events if e.stage == stage and e.what in "FBWH"]
        assert all(a.end <= b.begin + 1e-12 for a, b in zip(mine, mine[1:]))
    real = [e for e in events if e.what == "H"]
    assert len(real) == table.micro_batches - table.first
    for what in "FBW" if table.schedule in ("zb_h1", *FOLDED) else "FB":
        virtual = {e.virtual_stage for e in events if e.what == what}
        assert virtual == set(range(table.stages * table.chunks))


def test_equal_candidates_are_replayed_once_and_remembered(monkeypatch):
    """Nor is a candidate taken for another that differs from it by one rounding of one duration (negative control)."""
    table, replayed_now = Table("1f1b", 3, 7), []
    plain = simulator._Replay.run
    monkeypatch.setattr(
        simulator._Replay, "run", lambda self, *how: (replayed_now.append(self.now.shape[1]), plain(self, *how))[1]
    )
    monkeypatch.setattr(simulator, "_KNOWN", {})
    durations = drawn(table, batch=4, seed=11)
    twice = take(durations, np.array([0, 1, 0, 2, 1]))
    expected = [replayed(table, twice, i) for i in range(5)]
    for _ in range(2):
        np.testing.assert_allclose(pipeline(table, twice), expected, rtol=1e-12)
    assert replayed_now == [3]
    other = dataclasses.replace(twice, forward=twice.forward.copy())
    other.forward[0, 2] = np.nextafter(other.forward[0, 2], 9)
    pipeline(table, other)
    pipeline(table, twice, overlap=False)
    assert replayed_now == [3, 1, 3]


def test_a_batch_of_batches_is_each_of_them():
    table = Table("1f1b", 3, 7)
    parts = [drawn(table, 2, seed=1), Seconds(np.ones((1, 3)), np.ones((1, 3)), 0.5, 0.25)]
    expected = np.concatenate([pipeline(table, part) for part in parts])
    np.testing.assert_array_equal(pipeline(table, concatenate(parts)), expected)
