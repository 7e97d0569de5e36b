"""Slots and row kinds: what `validate` proves is proved again by acting the executor out with names for values."""

import collections
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from paxtrain.schedule.buffers import COLUMNS, OWN, assign
from paxtrain.schedule.proof import validate
from paxtrain.schedule.schedules import SPECS, build, forward_only
from paxtrain.schedule.stage_map import folded, in_turn
from paxtrain.schedule.table import ALONG, BETWEEN, UNDER
from tests.schedules import FOLDED, SIMPLE, in_flight, virtual_of

SHAPES = [(name, stages, 1) for name in (*SIMPLE, "zb_h1") for stages in range(1, 9)]
SHAPES += [("interleaved_1f1b", stages, chunks) for stages in range(2, 9) for chunks in (2, 3, 4)]
SHAPES += [(name, stages, 2) for name in FOLDED for stages in range(2, 9)]
QUICK = [x for x in SHAPES if x[2] < 4 and (x[1] < 4 or (x[1] == 8 and x[2] < 3 and x[0] not in FOLDED))]
SHAPES = [shape if shape in QUICK else pytest.param(*shape, marks=pytest.mark.slow) for shape in SHAPES]


def shapes(test):
    """Run a test on all shapes, with transfers under compute and without."""
    shaped = pytest.mark.parametrize(("name", "stages", "chunks"), SHAPES)(test)
    return pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "blocking"])(shaped)


# Small ones for corrupting: (name, stages, micro-batches, chunks, overlap).
SMALL = [
    ("eager_1f1b", 3, 7, 1, True),
    ("gpipe", 3, 4, 1, True),
    ("gpipe", 3, 4, 1, False),
    ("1f1b", 4, 6, 1, True),
    ("1f1b", 3, 5, 1, False),
    ("interleaved_1f1b", 2, 3, 2, True),
    ("interleaved_1f1b", 2, 3, 2, False),
    ("zb_h1", 3, 5, 1, True),
    ("zb_h1", 3, 5, 1, False),
    *[(name, 3, 6, 2, True) for name in FOLDED],
    *[(name, 2, 4, 2, False) for name in FOLDED],
]
FURTHER = [SMALL[i] for i in (1, 4, 6, 7, 10, 11)]  # each schedule stays, and some without transfers under compute
SMALL = [pytest.param(shape, marks=pytest.mark.slow) if shape in FURTHER else shape for shape in SMALL]
small = pytest.mark.parametrize("shape", SMALL, ids=lambda shape: f"{shape[0]}-{'overlap' if shape[4] else 'blocking'}")

# Slots that idle stages write as well: there they must be the scrap slot.
ARRIVALS, GRADIENT_ARRIVALS = ([f"{kind}arrival_slot{lane}" for lane in ("", "_1")] for kind in ("", "gradient_"))
WRITTEN = ("forward_slot", *ARRIVALS, *GRADIENT_ARRIVALS, "head_slot")
UNSET = "whatever was in memory"


def lanes(schedule, pairs):
    """Return the pairs to a later stage, and those to one before or to the same; without a fold all at once."""
    if schedule.name not in FOLDED:
        return [pairs]
    return [[(a, b) for a, b in pairs if a < b], [(a, b) for a, b in pairs if a >= b]]


def replay(schedule, buffers):
    """Does what the executor does, stage by stage, with names for values; idle stages' writes are done too.

    An activation is ("x", the virtual stage that takes it, micro-batch), a gradient is ("g", the virtual stage that
    takes it, micro-batch), residuals are ("r", virtual stage, micro-batch), and ("w", ...) what B leaves of them for W;
    None is a value that must not count.
    """
    stages, last, masked = schedule.stages, schedule.virtual_stages - 1, schedule.masked

    def ring(depth):
        return [[UNSET] * (depth + 1) for _ in range(stages)]

    residuals = ring(buffers.residual_depth)
    inbox, gradients = (
        ring(depth) if depth else [[None] for _ in range(stages)]
        for depth in (buffers.activation_depth, buffers.gradient_depth)
    )
    output, gradient_out, done = [None] * stages, [None] * stages, collections.Counter()
    for row, kind in zip(buffers.table, buffers.kinds):
        cells = [dict(zip(buffers.columns, map(int, cell))) for cell in row]
        runs = {op: any(cell[f"{op}_valid"] for cell in cells) for op in ("forward", "backward")}
        received, arrived = [], []  # by lane
        # The state that a codec keeps is the chunk's that made the message: a gradient that v takes was made by v+1.
        for pairs in lanes(schedule, kind.receive + kind.receive_compressed):
            received.append([None] * stages if pairs else None)
            assert buffers.joined or len({receiver for _, receiver in pairs}) == len(pairs)
            for sender, receiver in pairs:
                message, chunk = gradient_out[sender], cells[sender]["message_chunk"]
                received[-1][receiver] = message if message and (message[1] + 1) // stages == chunk else None

        def gradients_arrive(cells=cells, received=received):
            for column, lane in zip(GRADIENT_ARRIVALS, received):
                for s, cell in enumerate(cells):
                    if lane and buffers.gradient_depth:
                        gradients[s][cell[column]] = lane[s]

        def activations_leave(kind=kind, cells=cells, arrived=arrived):
            for pairs in lanes(schedule, kind.send):
                arrived.append([None] * stages if pairs else None)
                assert len({receiver for _, receiver in pairs}) == len(pairs)
                for sender, receiver in pairs:
                    message, chunk = output[sender], cells[sender]["output_chunk"]
                    arrived[-1][receiver] = message if message and (message[1] - 1) // stages == chunk else None

        def activations_arrive(cells=cells, arrived=arrived):
            for column, lane in zip(ARRIVALS, arrived):
                for s, cell in enumerate(cells):
                    if lane:
                        inbox[s][cell[column] if buffers.activation_depth else 0] = lane[s]

        if buffers.travel != UNDER:
            activations_leave()
        if buffers.travel == BETWEEN:
            gradients_arrive()
            activations_arrive()
        for chunk, (s, cell) in itertools.product(kind.forward, enumerate(cells)):
            virtual, mb = virtual_of(schedule, s, chunk), cell["forward"]
            active = cell["forward_valid"] == 1 and cell["forward_chunk"] == chunk
            if active or (masked and runs["forward"] and not kind.tail):
                x = inbox[s][cell["input_slot"] if buffers.activation_depth else 0]
                if kind.first and virtual == 0:
                    x = ("x", 0, mb)
                assert x is not UNSET, "uninitialized memory may be no number"
                good = active and x == ("x", virtual, mb)
                output[s] = ("x", virtual + 1, mb) if good else None
                residuals[s][cell["forward_slot"]] = ("r", virtual, mb) if good else None
            if active and kind.head and virtual == last:
                good = output[s] == ("x", last + 1, mb)
                done["loss", mb] += good
                gradients[s][cell["head_slot"] if buffers.gradient_depth else 0] = ("g", last, mb) if good else None
        if buffers.travel == UNDER:
            activations_leave()
            activations_arrive()
        for chunk, (s, cell) in itertools.product(kind.weights, enumerate(cells)):
            if cell["weights_valid"] == 1 and cell["weights_chunk"] == chunk:
                left = residuals[s][cell["weights_slot"]]
                assert left is not UNSET
                if left and left[:2] == ("w", virtual_of(schedule, s, chunk)):
                    done["weights", *left[1:]] += 1
        if buffers.travel == UNDER:
            gradients_arrive()
        for chunk, (s, cell) in itertools.product(kind.backward, enumerate(cells)):
            virtual, mb = virtual_of(schedule, s, chunk), cell["backward"]
            active = cell["backward_valid"] == 1 and cell["backward_chunk"] == chunk
            if active or (masked and runs["backward"] and not kind.tail):
                if buffers.gradient_depth:
                    g = gradients[s][cell["gradient_slot"]]
                else:
                    travels = kind.receive + kind.receive_compressed
                    g = received[0][s] if travels and s < stages - 1 else gradients[s][0]
                kept = residuals[s][cell["backward_slot"]]
                assert kept is not UNSET, "uninitialized memory may be no number, and so is zero times it"
                good = active and kept == ("r", virtual, mb) and g == ("g", virtual, mb)
                gradient_out[s] = ("g", virtual - 1, mb) if good else None
                done["backward", virtual, mb] += good
                done["embedding", mb] += good and kind.first_backward and virtual == 0
                if schedule.splits:
                    residuals[s][cell["backward_slot"]] = ("w", virtual, mb) if good else None
        if buffers.travel == ALONG:
            activations_arrive()
            gradients_arrive()
    phases = ("backward", "weights") if schedule.splits else ("backward",)
    everything = [(p, v, mb) for p in phases for v in range(last + 1) for mb in range(schedule.micro_batches)]
    everything += [(what, mb) for what in ("loss", "embedding") for mb in range(schedule.micro_batches)]
    assert +done == collections.Counter(everything)


def refuses(check, schedule, buffers):
    try:
        check(schedule, buffers)
    except (AssertionError, IndexError):
        return True
    return False


def small_case(shape):
    schedule = build(*shape)
    return schedule, assign(schedule)


def with_cell(buffers, row, stage, name, value):
    table = buffers.table.copy()
    table[row, stage, COLUMNS.index(name)] = value
    return dataclasses.replace(buffers, table=table)


def with_kind(buffers, row, **changes):
    kinds = [dataclasses.replace(kind, **changes) if i == row else kind for i, kind in enumerate(buffers.kinds)]
    return dataclasses.replace(buffers, kinds=kinds)


@shapes
def test_every_value_is_found_where_it_is_looked_for(name, stages, chunks, overlap):
    for m in range(1, 21):
        schedule = build(name, stages, m, chunks, overlap)
        buffers = assign(schedule)
        validate(schedule, buffers)
        replay(schedule, buffers)


@hypothesis.settings(max_examples=30, deadline=None, derandomize=True)
@hypothesis.given(
    st.one_of(
        st.tuples(
            st.sampled_from((*SIMPLE, "zb_h1")), st.integers(1, 12), st.integers(1, 40), st.just(1), st.booleans()
        ),
        st.tuples(
            st.just("interleaved_1f1b"), st.integers(2, 12), st.integers(1, 40), st.integers(2, 5), st.booleans()
        ),
        st.tuples(st.sampled_from(FOLDED), st.integers(2, 12), st.integers(1, 40), st.just(2), st.booleans()),
    )
)
def test_any_size(shape):
    schedule = build(*shape)
    buffers = assign(schedule)
    validate(schedule, buffers)
    replay(schedule, buffers)


@pytest.mark.parametrize(("name", "stages", "chunks"), SHAPES)
def test_evaluation(name, stages, chunks):
    for m in (1, 2, 7, 16):
        schedule = forward_only(stages, m, chunks, folded if name in FOLDED else in_turn)
        buffers = assign(schedule)
        validate(schedule, buffers)
        assert (buffers.residual_depth, buffers.gradient_depth) == (0, 0)
        assert not any(kind.backward or kind.receive for kind in buffers.kinds)


@shapes
def test_depths(name, stages, chunks, overlap):
    """The residual ring is as deep as micro-batches are in flight, whose literature has `test_table.py`."""
    for m in range(1, 21):
        schedule = build(name, stages, m, chunks, overlap)
        buffers = assign(schedule)
        assert buffers.residual_depth == in_flight(schedule).max()
        if name == "eager_1f1b":
            assert (buffers.activation_depth, buffers.gradient_depth) == (0, 0)
        elif name in ("1f1b", "zb_h1"):
            assert max(buffers.activation_depth, buffers.gradient_depth) <= 1


@shapes
def test_the_epilogue_is_the_drain_phase(name, stages, chunks, overlap):
    """min(P-1-k, m) compressed messages on the link k+1 -> k, the last ones; every other gradient travels as it is."""
    for m in () if name in FOLDED else (1, 2, 3, 8, 13):  # folded schedules compress nothing
        schedule = build(name, stages, m, chunks, overlap)
        compressed = schedule.epilogue()
        buffers = assign(schedule, compressed)
        validate(schedule, buffers)
        replay(schedule, buffers)
        plain = [pair for kind in buffers.kinds for pair in kind.receive]
        packed = collections.Counter(pair for kind in buffers.kinds for pair in kind.receive_compressed)
        assert len(plain) + packed.total() == sum(map(len, schedule.gradient_pairs))
        if chunks == 1:
            assert packed == {(k + 1, k): min(stages - 1 - k, m) for k in range(stages - 1)}
            assert compressed <= schedule.gradient_messages()
        else:
            for stage in range(stages):  # behind a stage's last F, and only there
                last = max(row for row, s, *_ in schedule.ops("forward") if s == stage)
                late = {
                    (chunk * stages + s, mb)
                    for row, s, mb, chunk in schedule.ops("backward")
                    if row > last and s == stage
                }
                assert {c for c in compressed if c[0] % stages == stage} == {c for c in late if c[0]}


@shapes
def test_runs_cover_all_rows_in_order_and_repeat_equal_kinds(name, stages, chunks, overlap):
    for m in (1, 2, 5, 16):
        buffers = assign(build(name, stages, m, chunks, overlap))
        unrolled, expected_start = [], 0
        for start, period, repeats in buffers.runs():
            assert start == expected_start
            assert period >= 1
            assert repeats >= 1
            expected_start += period * repeats
            unrolled += buffers.kinds[start : start + period] * repeats
        assert unrolled == buffers.kinds


def compiled_rows(buffers):
    return sum(period for _, period, _ in buffers.runs())


@shapes
def test_emulated_rows_run_the_same_ops_on_the_same_values(name, stages, chunks, overlap):
    """Every message is due when it was, and those that are not due reach no op: also if idle stages compute."""
    for m, masked in itertools.product((1, 2, 5, 16), {False, SPECS[name].masked}):
        schedule = dataclasses.replace(build(name, stages, m, chunks, overlap), masked=masked)
        compressing = () if name in FOLDED else (schedule.epilogue(), schedule.gradient_messages())
        for compressed in (frozenset(), *compressing):
            buffers = assign(schedule, compressed)
            emulated = buffers.emulated()
            replay(schedule, emulated)
            due = {field: set() for field in OWN}
            for row, kind in enumerate(buffers.kinds):
                for sender, receiver in kind.receive_compressed:
                    due["message_leaves"].add((row, sender))
                    due["message_comes"].add((row, receiver))
                due["output_leaves"] |= {(row, sender) for sender, _ in kind.send}
            for field, expected in due.items():
                column = emulated.table[..., emulated.columns.index(field)]
                assert set(map(tuple, np.argwhere(column).tolist())) == expected
            assert len(set(emulated.kinds)) <= (1 if compressed in (frozenset(), schedule.gradient_messages()) else 2)


@pytest.mark.parametrize("stages", [2, 3, 4, 8])
def test_a_step_that_is_emulated_is_one_loop(stages):
    """If the epilogue is compressed, its rows are another one; on a real mesh their number grows with the stages."""
    schedule = dataclasses.replace(build("eager_1f1b", stages, 2 * stages, 1, False), masked=True)
    for compressed, loops in ((frozenset(), 1), (schedule.epilogue(), 2), (schedule.gradient_messages(), 1)):
        buffers = assign(schedule, compressed)
        assert compiled_rows(buffers.emulated()) == loops < 3 * stages - 1 <= compiled_rows(buffers)


def test_emulated_rows_that_forget_an_end_are_refused():
    schedule = dataclasses.replace(build("eager_1f1b", 4, 8, 1, False), masked=True)
    emulated = assign(schedule).emulated()
    for field in ("first", "head", "first_backward"):
        rows = [row for row, kind in enumerate(emulated.kinds) if getattr(kind, field)]
        assert rows
        assert any(refuses(replay, schedule, with_kind(emulated, row, **{field: False})) for row in rows)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", (*SIMPLE, "zb_h1"))
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
def test_compiled_rows_do_not_grow_with_micro_batches(name, stages, overlap):
    """With overlap rows of 1f1b repeat after P micro-batches, in 2P-1 rows."""
    tables = [assign(build(name, stages, n * stages, 1, overlap)) for n in (8, 16, 32)]
    compiled = [compiled_rows(table) for table in tables]
    assert compiled[0] == compiled[1] == compiled[2] <= (7 if overlap or name == "zb_h1" else 4) * stages


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", FOLDED)
def test_compiled_rows_of_a_v_do_not_grow_with_micro_batches(name, overlap):
    """Every micro-batch more repeats a few rows."""
    compiled = {compiled_rows(assign(build(name, 4, m, 2, overlap))) for m in (24, 25, 38)}
    assert len(compiled) == 1


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_compiled_rows_do_not_grow_with_groups_of_interleaved_micro_batches(stages, chunks, overlap):
    tables = {m: assign(build("interleaved_1f1b", stages, m, chunks, overlap)) for m in (32, 64)}
    compiled = {m: compiled_rows(table) for m, table in tables.items()}
    assert compiled[32] == compiled[64]


# --- Negative controls ------------------------------------------------------------------------------------------------


@small
@pytest.mark.parametrize("name", COLUMNS)
def test_a_wrong_number_is_refused_if_the_executor_would_stumble_over_it(shape, name):
    """Every cell of every column, one changed at a time; slots of idle stages are looked at below."""
    schedule, buffers = small_case(shape)
    harmful = 0
    for row, stage in itertools.product(range(schedule.rows), range(schedule.stages)):
        value = int(buffers.table[row, stage, COLUMNS.index(name)])
        idle = name in WRITTEN and value == scrap(buffers, name)
        idle |= name == "backward_slot" and not buffers.table[row, stage, COLUMNS.index("backward_valid")]
        others = (1 - value,) if name.endswith("valid") else (value - 1, value + 1)
        for other in () if idle else (other for other in others if other >= 0):
            corrupt = with_cell(buffers, row, stage, name, other)
            if refuses(replay, schedule, corrupt):
                harmful += 1
                with pytest.raises(AssertionError, match=schedule.name):
                    validate(schedule, corrupt)
    assert harmful or not matters(schedule, buffers, name)


def scrap(buffers, name):
    depths = {"forward_slot": buffers.residual_depth, **dict.fromkeys(ARRIVALS, buffers.activation_depth)}
    return depths.get(name, buffers.gradient_depth)


def matters(schedule, buffers, name):
    """Return whether the executor reads a column: rings of depth 0 have no slots, and one chunk has no number."""
    if name.startswith("weights"):
        return schedule.splits
    if name.endswith("_1"):
        return schedule.name in FOLDED
    if name in ("input_slot", "arrival_slot"):
        return buffers.activation_depth > 0
    if name in ("gradient_slot", "gradient_arrival_slot", "head_slot"):
        return buffers.gradient_depth > 0
    return True


@small
def test_swapped_micro_batches_are_refused(shape):
    schedule, buffers = small_case(shape)
    for name in ("forward", "backward"):
        column = buffers.table[:, 0, COLUMNS.index(name)]
        first, second = (int(np.flatnonzero((column == mb) & (getattr(schedule, name)[:, 0] >= 0))[0]) for mb in (0, 1))
        swapped = with_cell(buffers, first, 0, name, 1)
        swapped = with_cell(swapped, second, 0, name, 0)
        with pytest.raises(AssertionError, match=schedule.name):
            validate(schedule, swapped)


@small
def test_a_dropped_op_is_refused(shape):
    """Also the last one, which no other op waits for."""
    schedule, buffers = small_case(shape)
    for phase in ("forward", "backward", *(["weights"] if schedule.splits else [])):
        row, stage, *_ = list(schedule.ops(phase))[-1]
        with pytest.raises(AssertionError, match=schedule.name):
            validate(schedule, with_cell(buffers, row, stage, phase + "_valid", 0))


@small
def test_a_missing_pair_and_one_too_many_are_refused(shape):
    schedule, buffers = small_case(shape)
    for row, kind in enumerate(buffers.kinds):
        for name in ("send", "receive"):
            pairs = getattr(kind, name)
            step = 1 if name == "send" else -1
            circle = {(s, (s + step) % schedule.stages) for s in range(schedule.stages)}
            changed = [pairs[:i] + pairs[i + 1 :] for i in range(len(pairs))]
            changed += [(*pairs, pair) for pair in circle - set(pairs)]
            assert changed
            for other in changed:
                with pytest.raises(AssertionError, match="pairs"):
                    validate(schedule, with_kind(buffers, row, **{name: other}))


@small
def test_a_residual_ring_too_small_is_refused(shape):
    schedule, buffers = small_case(shape)
    with pytest.raises(AssertionError, match=schedule.name):
        validate(schedule, dataclasses.replace(buffers, residual_depth=buffers.residual_depth - 1))


@pytest.mark.parametrize("check", [replay, validate])
@small
def test_an_idle_stage_that_writes_into_a_live_slot_is_refused(shape, check):
    schedule, buffers = small_case(shape)
    corrupted = [
        with_cell(buffers, row, stage, name, slot)
        for name in WRITTEN
        for row, stage in itertools.product(range(schedule.rows), range(schedule.stages))
        for slot in range(scrap(buffers, name))
        if buffers.table[row, stage, COLUMNS.index(name)] == scrap(buffers, name)
    ]
    harmful = [corrupt for corrupt in corrupted if refuses(replay, schedule, corrupt)]
    assert harmful
    for corrupt in harmful:
        with pytest.raises(AssertionError):
            check(schedule, corrupt)


@pytest.mark.parametrize("check", [replay, validate])
@pytest.mark.parametrize(
    ("shape", "ring"),
    [
        (("gpipe", 3, 4, 1), "gradient_depth"),
        (("1f1b", 4, 6, 1), "activation_depth"),
        (("interleaved_1f1b", 2, 4, 2), "activation_depth"),
        (("interleaved_1f1b", 2, 4, 2), "gradient_depth"),
    ],
)
def test_a_message_ring_too_small_is_refused(shape, ring, check):
    schedule, buffers = small_case(shape)
    smaller = dataclasses.replace(buffers, **{ring: getattr(buffers, ring) - 1})
    with pytest.raises((AssertionError, IndexError)):
        check(schedule, smaller)


@pytest.mark.parametrize("check", [replay, validate])
@pytest.mark.parametrize("field", ["forward", "backward", "weights", "first", "head", "first_backward"])
@small
def test_a_kind_that_leaves_out_an_op_is_refused(shape, field, check):
    schedule, buffers = small_case(shape)
    rows = [row for row, kind in enumerate(buffers.kinds) if getattr(kind, field)]
    assert rows or field == "weights"
    for row in rows:
        nothing = () if field in ("forward", "backward", "weights") else False
        with pytest.raises(AssertionError):
            check(schedule, with_kind(buffers, row, **{field: nothing}))
