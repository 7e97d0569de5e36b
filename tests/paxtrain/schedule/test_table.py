"""Schedules: the closed forms of the literature, and time by an independent simulation.

That every op runs once, behind what it needs, `test_buffers.py` shows by acting the tables out.
"""

import itertools

import numpy as np
import pytest

from paxtrain.schedule.schedules import build, forward_only
from paxtrain.schedule.stage_map import folded, in_turn
from tests.schedules import FOLDED, SIMPLE, busy, in_flight, virtual_of

# (name, stages, chunks); every number of micro-batches from 1 to 20 is tried for each.
SHAPES = [(name, stages, 1) for name in (*SIMPLE, "zb_h1") for stages in range(1, 9)]
SHAPES += [("interleaved_1f1b", stages, chunks) for stages in range(2, 9) for chunks in (2, 3, 4)]
SHAPES += [(name, stages, 2) for name in FOLDED for stages in (2, 3, 4)]
MICRO_BATCHES = range(1, 21)
shapes = pytest.mark.parametrize(("name", "stages", "chunks"), SHAPES)
both = pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])


def crossings(name, stages, chunks):
    """Return how many messages of a micro-batch cross links: at a fold they stay on their stage."""
    return 2 * (stages * chunks - 1 - (chunks - 1 if name in FOLDED else 0))


def makespan(schedule, forward, backward, transfer=0, weights=0):
    """Time of a step when each stage runs its ops in the table's order as soon as their messages have come.

    Rows do not bind here, and transfers do not occupy anybody: an event simulation by repeated relaxation.
    """
    last = schedule.virtual_stages - 1
    orders, seconds = [[] for _ in range(schedule.stages)], (forward, backward, weights)
    for place, (turn, phase) in enumerate([(0, "forward"), (2, "weights"), (1, "backward")]):
        for row, stage, mb, chunk in schedule.ops(phase):
            orders[stage].append((row, place, turn, virtual_of(schedule, stage, chunk), mb))
    queues, clock, end = [sorted(order)[::-1] for order in orders], [0] * schedule.stages, {}
    while any(queues):
        before = len(end)
        for stage, queue in enumerate(queues):
            while queue:
                *_, turn, virtual, mb = queue[-1]
                source = virtual + (-1, 1, 0)[turn]
                if source < 0 or turn == 2:  # W comes after its B by the order
                    ready = 0
                elif source > last:
                    ready = end.get((0, last, mb))
                else:
                    ready = end.get((turn, source, mb))
                    ready = None if ready is None else ready + transfer
                if ready is None:
                    break
                clock[stage] = max(clock[stage], ready) + seconds[turn]
                end[turn, virtual, mb] = clock[stage]
                queue.pop()
        assert len(end) > before, "the stages wait for one another"
    return max(clock)


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zb_h1"])
def test_one_op_a_row_where_stages_differ(name):
    schedule = build(name, 4, 9, 3 if name == "interleaved_1f1b" else 1, overlap=False)
    assert sum(busy(schedule, phase).astype(int) for phase in ("forward", "backward", "weights")).max() == 1


@shapes
def test_rows_and_the_bubble(name, stages, chunks):
    for m in MICRO_BATCHES:
        schedule = build(name, stages, m, chunks, overlap=False)
        work, bubble = m * chunks, 2 * (stages - 1)
        if name == "eager_1f1b":
            assert schedule.rows == work + bubble
        elif name == "zb_h1":  # with rows of one length its bubble is half as long; or, drained at once, no longer
            assert schedule.rows == (3 * work + stages - 1 if m >= stages else 2 * (m + stages - 1) + 1)
            continue
        elif name in FOLDED:  # see `test_no_stage_of_a_v_idles`
            continue
        elif m % stages == 0 or chunks == 1:
            assert schedule.rows == 2 * work + bubble
        else:
            assert schedule.rows >= 2 * work + bubble
        ops_a_row = 2 if name == "eager_1f1b" else 1
        used = busy(schedule, "forward").sum(axis=0) + busy(schedule, "backward").sum(axis=0)
        np.testing.assert_array_equal(used, 2 * work)
        idle = ops_a_row * schedule.rows - used
        if m % stages == 0 or chunks == 1:
            np.testing.assert_array_equal(idle, ops_a_row * bubble)


@both
@shapes
def test_micro_batches_in_flight(name, stages, chunks, overlap):
    for m in MICRO_BATCHES:
        found = in_flight(build(name, stages, m, chunks, overlap))
        after = stages - 1 - np.arange(stages)
        if name == "gpipe":
            expected = np.full(stages, m)
        elif name == "eager_1f1b":
            expected = np.minimum(m, 2 * after + 1)
        elif name == "1f1b":
            expected = np.minimum(m, after + 1)
        elif name == "zb_h1":
            expected = np.full(stages, min(m, stages))  # 1f1b's most
        elif name == "zb_v":  # the same, of chunks of half a stage
            assert found.max() == 2 * min(m, stages)
            continue
        elif name == "dualpipe_v":  # and one more
            assert found.max() == min(2 * m, 2 * stages + 1)
            continue
        elif m % stages == 0:
            expected = np.minimum(m * chunks, 2 * after + (chunks - 1) * stages + 1)
        else:
            continue
        np.testing.assert_array_equal(found, expected)


@both
@shapes
def test_messages_join_neighbours_right_after_they_are_made(name, stages, chunks, overlap):
    for m in (1, 5, 8):
        schedule = build(name, stages, m, chunks, overlap)
        assert schedule.messages() == m * crossings(name, stages, chunks)
        for pairs, step in ((schedule.activation_pairs, 1), (schedule.gradient_pairs, -1)):
            if name in FOLDED:
                assert all(abs(to - s) == (s != to or s != stages - 1) for row in pairs for s, to in row)
                continue
            assert all(to == (s + step) % stages for row in pairs for s, to in row)
            assert all(len({to for _, to in row}) == len(row) for row in pairs)
        row, last = schedule.row_of, schedule.virtual_stages - 1
        sent = [("forward", v, mb) for v in range(last) for mb in range(m)]
        assert sorted(row[op] + schedule.activations_wait for op in sent) == [
            r for r, pairs in enumerate(schedule.activation_pairs) for _ in pairs
        ]
        sent = [("backward", v, mb) for v in range(1, last + 1) for mb in range(m)]
        assert sorted(row[op] + 1 for op in sent) == [
            r for r, pairs in enumerate(schedule.gradient_pairs) for _ in pairs
        ]


@pytest.mark.parametrize("name", SIMPLE)
@pytest.mark.parametrize(("forward", "backward"), [(1, 1), (1, 2), (3, 5), (2, 1)])
def test_time_without_transfers(name, forward, backward):
    """(m + P - 1)(F + B): all three spend the same bubble, they differ in memory and in what transfers cost."""
    for stages, m in itertools.product(range(1, 9), (1, 2, 3, 7, 8, 20)):
        assert makespan(build(name, stages, m), forward, backward) == (m + stages - 1) * (forward + backward)


@pytest.mark.parametrize("chunks", [2, 3, 4])
def test_chunks_divide_the_bubble(chunks):
    """m(F + B) + (P - 1)(F + B)/v, with ops of F/v and B/v: Narayanan et al. 2021."""
    for stages, groups in itertools.product(range(2, 9), (1, 2, 3)):
        m = stages * groups
        assert makespan(build("interleaved_1f1b", stages, m, chunks), 1, 2) == (m * chunks + stages - 1) * 3


def test_eager_hides_transfers_that_1f1b_shows():
    """A micro-batch more costs F + B however long transfers up to F take; 1f1b waits for two of them in each round."""
    forward, backward, transfer, stages = 2, 4, 2, 4

    def per_micro_batch(name):
        short, long = (makespan(build(name, stages, m), forward, backward, transfer) for m in (20, 40))
        return (long - short) / 20

    assert per_micro_batch("eager_1f1b") == forward + backward
    assert per_micro_batch("gpipe") == forward + backward
    assert per_micro_batch("1f1b") > forward + backward


@shapes
def test_evaluation_runs_the_forwards_alone(name, stages, chunks):
    for m in (1, stages, 2 * stages + 1):
        schedule = forward_only(stages, m, chunks, folded if name in FOLDED else in_turn)
        assert not busy(schedule, "backward").any()
        assert schedule.messages() == m * crossings(name, stages, chunks) // 2
        row = schedule.row_of
        assert sorted(row) == [("forward", v, mb) for v in range(stages * chunks) for mb in range(m)]
        assert all(row["forward", v, mb] < row["forward", v + 1, mb] for _, v, mb in row if v + 1 < stages * chunks)
        if (m % stages == 0 or chunks == 1) and name not in FOLDED:
            assert schedule.rows == m * chunks + stages - 1


@pytest.mark.parametrize(("forward", "backward", "weights"), [(1, 1, 1), (4, 5, 3), (2, 2, 2), (3, 3, 1), (5, 6, 5)])
def test_weight_gradients_fill_the_bubble(forward, backward, weights):
    """m(F+B+W) + (P-1)(F+B-W) of Qi et al. 2023, where 1f1b takes (m+P-1)(F+B+W)."""
    for stages, more in itertools.product(range(1, 9), (0, 1, 5, 12)):
        m, bubble = stages + more, (stages - 1) * (forward + backward - weights)
        work = forward + backward + weights
        assert makespan(build("zb_h1", stages, m), forward, backward, weights=weights) == m * work + bubble
        assert makespan(build("1f1b", stages, m), forward, backward + weights) == (m + stages - 1) * work


@pytest.mark.parametrize("stages", range(2, 9))
def test_no_stage_of_a_v_idles(stages):
    """Zero bubble (Qi et al. 2023, section 6): with F=B=W a stage is busy from its first op to its last one."""
    for m in (2 * stages - 1, 2 * stages, 2 * stages + 5):
        schedule = build("zb_v", stages, m, 2, overlap=False)  # a row is a unit of time
        ops = sum(busy(schedule, phase).astype(int) for phase in ("forward", "backward", "weights"))
        rows = np.arange(schedule.rows)[:, None]
        first, last = np.where(ops, rows, schedule.rows).min(axis=0), np.where(ops, rows, -1).max(axis=0)
        np.testing.assert_array_equal(last + 1 - first, 6 * m)
        np.testing.assert_array_equal(first, np.arange(stages))
        assert makespan(build("zb_v", stages, m, 2), 1, 1, weights=1) == 6 * m + stages - 1


@pytest.mark.parametrize(("forward", "backward", "weights"), [(1, 1, 1), (4, 5, 3), (2, 2, 2), (3, 3, 1), (5, 6, 5)])
def test_the_bubble_of_dualpipe_v(forward, backward, weights):
    """(P-1)(F&B+B-3W) of DeepSeek's with F&B = F+B and B whole, less the W before which a gradient leaves here."""
    work = 2 * (forward + backward + weights)
    for stages in (2, 3, 4):
        found = makespan(build("dualpipe_v", stages, 3 * stages, 2), forward, backward, weights=weights)
        assert found - 3 * stages * work == (stages - 1) * (forward + backward - weights)
        whole = backward + weights
        assert found - 3 * stages * work <= (stages - 1) * (forward + whole + whole - 3 * weights)
