"""The steps of measured runs by the planner's own model, against hand arithmetic, and the fit of its constants."""

import dataclasses
import itertools

import numpy as np
import pytest

from paxtrain.errors import UserError
from planner.cost.link_seconds import fabric, paths
from planner.fit import fitting, trial_steps
from planner.fit.constants import CONSTANTS, NAMES
from planner.fit.trial_steps import TrialSteps
from planner.runs import trials
from planner.runs.trainers import TRAINERS

ROW = {
    "cluster": "lab",
    "devices": 16,
    "devices_per_host": 4,
    "device_kinds": "T4",
    "host_gbit": "100",
    "intra_gbit": "2400",
    "hidden": 2048,
    "heads": 16,
    "layers": 16,
    "seq": 1024,
    "vocab": 50000,
    "global_batch": 64,
    "micro_batch": 2,
    "tp": 1,
    "dp": 1,
    "pp": 16,
    "stage_layers": "",
    "recompute": 0,
    "dtype": "fp16",
    "seconds": "",
}
# Constants of what these runs' messages and kernels need not do, for sums by hand.
NONE = dict.fromkeys(("spread", "message_seconds", "crossing_launch", "buckets"), 0.0)
TYPICAL = {c.name: c.typical for c in CONSTANTS} | NONE
# A T4 has 65 TFLOP/s and 300 GB/s. Of an unknown number of multiprocessors the largest products reach 65%, and others
# 88% of that. The typical shares are 0.8 of this and 0.6 of the memory's bandwidth.
PEAK, MEMORY = 0.8 * 0.65 * 0.88 * 65e12, 0.6 * 300e9
LAYER, TABLE = 12 * 2048**2 + 13 * 2048, 50000 * 2048  # parameters
MESSAGE = 2 * 1024 * 2048 * 2  # bytes of two sequences' activations
RATE = 0.6 * 12.5e9  # bytes/s between hosts


def trial(**changes):
    return trials.parse({name: str(value) for name, value in {**ROW, **changes}.items()})


def seconds(rows, method="simulate", speed=1.0, factor=1.0, **changes):
    """Return the predicted seconds of trials with typical constants, except for `changes`."""
    model = TrialSteps(rows, method)
    constants = np.array([{**TYPICAL, **changes}[name] for name in NAMES])
    slots = np.ones((1, len(rows), model.slots))
    return model.seconds(np.broadcast_to(constants, (1, len(rows), len(NAMES))), slots * speed, slots * factor)[0]


def changed(row, by, method="simulate", **constants):
    """Return by how much the step grows if constants grow by a factor."""
    larger = {name: by * TYPICAL[name] for name in constants}
    before, after = (seconds([row], method, **x)[0] for x in ({}, larger))
    return after - before


@pytest.mark.parametrize("recompute", [0, 1])
def test_one_device_by_hand(recompute):
    row = trial(devices=1, pp=1, global_batch=6, recompute=recompute)
    tokens, h, heads = 2 * 1024, 2048, 2 * 16
    products = 2 * tokens * 12 * h**2 / PEAK
    # The products of scores wait for memory: operands of 128 a token, and the scores.
    scores = 2 * heads * 2 * (2 * 1024 * 128 + 1024**2) / MEMORY
    score_pass, one_pass = 1.3 * heads * 1024**2 * 2 / MEMORY, tokens * h * 2 / MEMORY
    kernels = products + scores + 4.5 * score_pass + 22 * one_pass
    forward = (kernels**8 + 3e-4**8) ** (1 / 8)
    backward = ((2 * products + 2 * scores + 5.5 * score_pass + 44 * one_pass) ** 8 + 6e-4**8) ** (1 / 8)
    head = 6 * tokens * TABLE / PEAK + 8 * tokens * 50000 * 2 / MEMORY + 20 * 5e-6
    table = 6 * one_pass + 4 * 5e-6
    micro_batch = 16 * (forward + backward + recompute * forward) + head + table + 2 * 5e-4
    expected = 3 * micro_batch + 40 * (16 * LAYER + TABLE) / MEMORY + 5e-3
    assert seconds([row])[0] == pytest.approx(expected, rel=1e-12)


def test_messages_by_hand():
    """What a constant of the links adds to one micro-batch on two stages, or to one reduction of two data ranks."""
    two = trial(devices=2, devices_per_host=1, pp=2, global_batch=2)
    assert changed(two, 3, hop_ratio=1) == pytest.approx(2 * 2 * MESSAGE / RATE, rel=1e-6)
    assert changed(two, 3, tied_ratio=1) == pytest.approx(2 * TABLE * 2 / RATE, rel=1e-6)
    assert changed(two, 2, host_seconds=1) == pytest.approx(5e-3, rel=1e-6)
    # F and B of each stage, there and back again, and the exchange, which waits for two ranks at once.
    assert changed(two, 3, chunk_seconds=1) == pytest.approx(4 * 2 * 5e-4, rel=1e-6)
    assert changed(two, 3, inter_latency=1) == pytest.approx(3 * 2 * 5e-5, rel=1e-6)
    # A ring of two sends each byte of the gradients once, in two turns.
    ring = trial(devices=2, devices_per_host=1, pp=1, dp=2, global_batch=4)
    assert changed(ring, 3, data_ratio=1) == pytest.approx(2 * 2 * (16 * LAYER + TABLE) / RATE, rel=1e-6)
    assert changed(ring, 3, inter_latency=1) == pytest.approx(2 * 2 * 2 * 5e-5, rel=1e-6)
    # Stage 0 is host 0: its 4 data ranks share the network, and each sends its message there and back.
    four = trial(devices=8, dp=4, pp=2, global_batch=8)
    assert changed(four, 3, hop_ratio=1) == pytest.approx(2 * 2 * 4 * MESSAGE / RATE, rel=1e-6)


def test_tensor_groups_over_hosts_are_as_slow_as_the_network():
    """The ring of an all-reduce crosses the network: 4 all-reduces a layer, 2 of the head, 1 of the table."""
    row = trial(devices=8, tp=8, pp=1, global_batch=2)
    reduce = 2 * 7 / 8 * MESSAGE / RATE
    # A launch of no time, because kernels hide it if they and the collectives take longer.
    slow = {"inter_efficiency": 0.5 * TYPICAL["inter_efficiency"]}
    found = float(np.diff([seconds([row], layer_launch=0.0, **x)[0] for x in ({}, slow)])[0])
    assert found == pytest.approx((16 * 4 + 2 + 1) * reduce, rel=1e-6)
    kinds = trial(devices=8, tp=8, pp=1, device_kinds="A100;T4")
    assert trial_steps.cluster_of(kinds).kinds == ("T4", "T4")  # a group waits for its slowest device


FLAT = dict.fromkeys(("layer_launch", "host_seconds", "chunk_seconds", "head", "intra_latency", "inter_latency"), 0.0)
FLAT |= dict.fromkeys(("hop_ratio", "data_ratio", "tied_ratio"), 0.0) | {"optimizer_bytes": 1e-9}


@pytest.mark.parametrize("method", ["simulate", "rows"])
def test_a_run_takes_what_its_schedule_takes(method):
    """Nearly equal stages have the bubbles of Narayanan et al. 2021 and of Qi et al. 2023; one has the embedding."""

    def of(schedule, **changes):
        """Return F and B of a micro-batch, and the bubble over these."""
        row = {"vocab": 1, "layers": 64, "devices": 4, "pp": 4, "micro_batch": 1, "schedule": schedule} | changes
        few, many = seconds([trial(**row, global_batch=m) for m in (64, 128)], method, **FLAT)
        both = (many - few) / 64
        return both, (few - 64 * both) / both

    names = ("1f1b", "1f1b:6", "eager_1f1b", "gpipe")
    assert [of(name)[1] for name in names] == pytest.approx([3.0] * 4, rel=1e-2)
    assert [of("interleaved_1f1b", virtual_stages=v)[1] for v in (2, 4)] == pytest.approx([3 / 2, 3 / 4], rel=3e-2)
    # W, nearly a third of F and B, lies in the bubble twice.
    assert 0.8 < of("zb_h1")[1] < 2.0


def test_chunks_have_whole_layers():
    row = trial(devices=4, pp=4, layers=14, schedule="interleaved_1f1b", virtual_stages=2)
    assert row.stage_layers == (4, 4, 3, 3)
    assert trial_steps.candidate(row, own=False).counts == (2, 2, 2, 2, 2, 2, 1, 1)


def test_data_ranks_with_fewer_micro_batches():
    """Of equal devices the rank with most counts. A rank of slow ones takes what all would with as few."""

    def of(kinds, **batch):
        mesh = {"devices": 8, "dp": 2, "pp": 4, "placement": "0;1;0;1;0;1;0;1"}
        return seconds([trial(**mesh, device_kinds=kinds, **batch)])[0]

    uneven = {"global_batch": 14, "data_micro_batches": "5;2"}
    mixed, slow = of("A100;T4", **uneven), of("T4", global_batch=8)
    assert of("A100", **uneven) == pytest.approx(of("A100", global_batch=20), rel=1e-9)
    assert mixed == pytest.approx(slow, rel=1e-9)
    assert mixed < of("A100;T4", global_batch=14, data_micro_batches="4;3")


@pytest.mark.parametrize("method", trial_steps.METHODS)
def test_time_grows_with_every_cost_and_falls_with_every_rate(method):
    mesh = {"device_kinds": "V100"}  # without flash attention
    rows = [trial(tp=2, dp=4, pp=2, **mesh), trial(tp=2, dp=2, pp=4, recompute=1, **mesh)]
    rows.append(trial(tp=8, dp=1, pp=2, **mesh))
    rows.append(trial(tp=2, dp=4, pp=2, trainer="nanotron", sharding="zero1", device_kinds="A100"))  # flash attention
    base = seconds(rows, method)
    for name in NAMES:
        if name == "stall_seconds":  # no part of what a run takes that does not stall
            continue
        moved = seconds(rows, method, **{name: 1.3 * TYPICAL[name] or 0.01})
        sign = -1 if name.endswith("efficiency") or name in ("matmul", "memory") else 1
        assert np.all(sign * (moved - base) >= 0) and np.any(moved != base), name
    assert np.all(seconds(rows, method, factor=1.2) > base) and np.all(seconds(rows, method, speed=1.2) < base)


def test_closed_forms_count_transfers_as_they_say():
    """AMP's form counts each hop once, Pipette's once for every 4 of 32 micro-batches; of the slower ends all wait."""
    deep = trial(devices=4, devices_per_host=1, pp=4, seq=16384)
    once = 3 * 2 * 8 * 2 * MESSAGE * 2 / RATE  # three hops there and back, of 16 times the tokens, twice as much more
    assert changed(deep, 3, "amp", hop_ratio=1) == pytest.approx(once, rel=1e-6)
    assert changed(deep, 3, "pipette", hop_ratio=1) == pytest.approx(8 * once, rel=1e-6)
    single = [trial(devices=1, pp=1)]
    assert np.ptp([seconds(single, method)[0] for method in trial_steps.METHODS if method != "rows"]) < 1e-12


def test_this_trainers_runs_gather_their_weights_and_hide_their_gradients():
    """Each of two ranks gathers half of the bfloat16 weights, and sends half of the float32 gradients, some under B."""
    row = trial(devices=2, devices_per_host=1, pp=1, dp=2, global_batch=4)
    gather, reduce = (16 * LAYER + TABLE) / RATE, 2 * (16 * LAYER + TABLE) / RATE
    last = 2 * (LAYER + TABLE) / RATE  # what nothing is left to hide
    assert gather + last < changed(row, 2, "rows", data_ratio=1) < gather + reduce


def test_tensor_groups_are_where_the_run_says():
    mesh = {"devices": 8, "tp": 2, "dp": 2, "pp": 2, "devices_per_host": 4}
    far = dataclasses.replace(trial_steps.cluster_of(trial(**mesh)), alpha=1.0 - np.eye(2))
    for placement, expected in (("", [True, False]), ("0;0;1;1", [True, False]), ("0;1;0;1", [False, True])):
        run = TrialSteps([trial(**mesh, placement=placement)]).runs[0]
        found = paths(fabric(far), run.hosts[None], 2)
        assert [bool(found.forward[0][0, 0, 0]), bool(found.ring[0][0, 0])] == expected


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 8, "pp": 2, "devices_per_host": 3}, "tp=8 must divide devices_per_host=3 or be a multiple of it"),
        ({"heads": 15}, "is not divisible by model.heads=15"),
    ],
)
def test_runs_that_no_model_or_host_fits(changes, message):
    with pytest.raises(UserError, match=message):
        trial(**changes)


# --- The fit ----------------------------------------------------------------------------------------------------------


def _grid(cluster="lab", kinds="A100", **changes):
    """Return some layouts of two model sizes on 16 devices."""
    rows = []
    for hidden, tp, pp, micro in itertools.product((1024, 2048), (1, 2), (1, 4), (1, 2, 4)):
        mesh = {"tp": tp, "pp": pp, "dp": 16 // (tp * pp), "micro_batch": micro}
        rows.append(trial(cluster=cluster, device_kinds=kinds, hidden=hidden, **mesh, **changes))
    return rows


def _measured(rows, noise, seed, factor_spread=0.0, **changes):
    """Return the rows as a cluster with atypical constants would measure them, its constants and its factors."""
    random = np.random.default_rng(seed)
    # What these runs' messages and kernels need not do, and what none of them shows, is typical.
    drawn = [c.name not in {*NONE, "attention", "stall_seconds"} for c in CONSTANTS]
    constants = np.array(
        [c.typical * (np.exp(0.8 * c.spread * random.normal()) if x else 1.0) for c, x in zip(CONSTANTS, drawn)]
    )
    constants = np.clip(constants, [c.low for c in CONSTANTS], [c.high for c in CONSTANTS])
    for name, value in changes.items():
        constants[NAMES.index(name)] = value
    model = TrialSteps(rows)
    cells = sorted({fitting.cells(row)[0] for row in rows})
    drawn = dict(zip(cells, np.exp(factor_spread * random.normal(size=len(cells)))))
    factor = np.array([[[drawn[fitting.cells(row)[0]]] * model.slots for row in rows]])
    exact = model.seconds(np.broadcast_to(constants, (1, len(rows), len(NAMES))), np.ones_like(factor), factor)[0]
    measured = exact * np.exp(noise * random.normal(size=len(rows)))
    return [dataclasses.replace(row, seconds=float(s)) for row, s in zip(rows, measured)], drawn


def _error(calibration, rows):
    measured = np.array([row.seconds for row in rows])
    return float(np.mean(np.abs(calibration.predict(rows) / measured - 1)))


def _halves(rows, count, seed=0):
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order[:count]], [rows[i] for i in order[count:]]


def test_predicts_a_cluster_of_its_own_kind_and_an_outlier_changes_little():
    rows, _ = _measured(_grid(), 0.01, 2)
    fitted, held = _halves(rows, 19, 2)
    error = _error(fitting.fit(fitted), held)
    assert error < 0.03
    # Control: typical constants predict this cluster far less well.
    assert np.mean(np.abs(seconds(held) / [row.seconds for row in held] - 1)) > 0.06
    spoiled = [dataclasses.replace(fitted[0], seconds=8 * fitted[0].seconds), *fitted[1:]]
    assert _error(fitting.fit(spoiled), held) < error + 0.03


def test_settings_together_are_each_by_itself():
    kinds = {"device_kinds": "T4;A100;A100;T4"}
    rows = [
        trial(devices=8, tp=8, pp=1, device_kinds="T4;A100"),
        trial(tp=2, dp=4, pp=2, **kinds),
        trial(pp=4, dp=4, trainer="nanotron", **kinds),
    ]
    model, random = TrialSteps(rows), np.random.default_rng(0)
    constants = np.array([TYPICAL[name] for name in NAMES]) * np.exp(0.2 * random.normal(size=(4, 3, len(NAMES))))
    speed, factor = np.exp(0.2 * random.normal(size=(2, 4, 3, model.slots)))
    each = [model.seconds(*(x[i : i + 1] for x in (constants, speed, factor)))[0] for i in range(4)]
    np.testing.assert_allclose(model.seconds(constants, speed, factor), each, rtol=1e-12)


def _cell(row):
    """Return what a layer's cost factor is for."""
    return row.hidden, row.micro_batch, row.tp


@pytest.mark.once
def test_layer_cost_factors_are_found_bounded_and_one_without_data():
    whole, drawn = _measured(_grid(), 0.002, 1, factor_spread=0.15)
    wild, missing = (2048, 2, 2), (1024, 2, 2)
    kept = [row for row in whole if _cell(row) != missing]
    rows = [dataclasses.replace(r, seconds=r.seconds * (2.5 if _cell(r) == wild else 1)) for r in kept]
    factors = fitting.fit(rows).factors
    assert ("A100", *reversed_cell(missing)) not in factors and len(factors) == len(drawn) - 1
    assert factors.pop(("A100", *reversed_cell(wild))) == pytest.approx(fitting.FACTOR_RANGE[1], rel=1e-3)
    factors = fitting.fit(whole).factors
    found = np.log([[factors[cell], drawn[cell]] for cell in factors])
    assert np.corrcoef(found.T)[0, 1] > 0.75 and np.std(found[:, 0] - found[:, 1]) < 0.1


def reversed_cell(cell):
    """Return (hidden, micro-batch, tensor) as (hidden, tensor, micro-batch), the order of factors."""
    return cell[0], cell[2], cell[1]


def test_clusters_keep_constants_of_their_own_and_one_without_rows_gets_what_others_say():
    fast, _ = _measured(_grid("fast"), 0.005, 4, matmul=1.1)
    slow, _ = _measured(_grid("slow"), 0.005, 4, matmul=0.3)
    calibration = fitting.fit(fast + slow, _grid("none"))
    at = NAMES.index("matmul")
    assert calibration.clusters["fast"][at] > 2 * calibration.clusters["slow"][at]
    assert _error(calibration, fast + slow) < 0.02
    assert calibration.fitted == {"fast": len(fast), "slow": len(slow), "none": 0}
    np.testing.assert_allclose(calibration.clusters["none"], calibration.shared, rtol=0.02)
    later = [dataclasses.replace(row, cluster="unknown") for row in slow[:5]]
    assert np.all(np.isfinite(calibration.predict(later)))


def test_hosts_of_different_kinds():
    rows, _ = _measured(_grid(kinds="T4;A100;A100;T4"), 0.0, 5)
    assert [kind for kind, *_ in fitting.cells(rows[0])] == ["A100", "T4"]
    fitted, held = _halves(rows, 16)
    calibration = fitting.fit(fitted)
    assert set(calibration.speeds) == {"A100", "T4"} and _error(calibration, held) < 0.03


def test_devices_and_links_that_no_datasheet_knows():
    """The cluster is 300 times slower than the stand-in for unknown devices."""
    rows, _ = _measured(_grid(kinds="", host_gbit="", intra_gbit=""), 0.01, 6)
    rows = [dataclasses.replace(row, seconds=row.seconds * 300) for row in rows]
    fitted, held = _halves(rows, 20)
    assert _error(fitting.fit(fitted), held) < 0.06


@pytest.mark.parametrize("count", [1, 4])
def test_few_rows_move_the_whole_scale(count):
    rows, _ = _measured(_grid(), 0.0, 7, matmul=0.2)
    fitted, held = _halves(rows, count)
    errors = _error(fitting.fit(fitted), held)
    assert errors < 0.35 and errors < 0.6 * np.mean(np.abs(seconds(held) / [row.seconds for row in held] - 1))


def test_description_names_units_ranges_and_ends():
    rows, _ = _measured(_grid(), 0.0, 8)
    rows = [dataclasses.replace(row, seconds=row.seconds / 40) for row in rows]  # faster than the datasheet allows
    description = fitting.fit(rows).describe()
    lab = description["clusters"]["lab"]
    assert lab["rows_fitted"] == len(rows) and list(lab["constants"]) == list(NAMES)
    for entry in lab["constants"].values():
        assert 0 < entry["low"] <= entry["value"] * (1 + 1e-9) and entry["value"] <= entry["high"] * (1 + 1e-9)
        assert entry["unit"] and entry["meaning"]
    assert lab["constants"]["matmul"]["at_bound"] == "high"
    assert {tuple(e[k] for k in ("hidden", "tp", "micro_batch")) for e in description["layer_cost_factors"]} == {
        (row.hidden, row.tp, row.micro_batch) for row in rows
    }


# --- Runs that stall --------------------------------------------------------------------------------------------------


def _piped():
    """Return layouts of nanotron's runs with pipelines on 4, 8 and 16 hosts, of two model sizes."""
    rows = []
    for hosts, hidden, tp, pp, micro in itertools.product((4, 8, 16), (1024, 2048), (1, 2), (2, 4), (1, 4)):
        mesh = {"devices": 4 * hosts, "tp": tp, "pp": pp, "dp": 4 * hosts // (tp * pp), "micro_batch": micro}
        more = {"global_batch": 512, "trainer": "nanotron", "device_kinds": "A100", "host_gbit": "400"}
        rows.append(trial(hidden=hidden, **mesh, **more))
    return rows


def _stalled(rows, rate, waits, seed):
    """Return measured rows of which some wait for each message, and which of them do."""
    random = np.random.default_rng(seed)
    known = TRAINERS["nanotron"].typical
    typical = np.array([known.get(c.name, c.typical) * np.exp(0.1 * random.normal()) for c in CONSTANTS])
    model = TrialSteps(rows)
    slots = np.ones((1, len(rows), model.slots))
    plain = model.seconds(np.broadcast_to(typical, (1, len(rows), len(NAMES))), slots, slots)[0]
    plain = plain * np.exp(0.02 * random.normal(size=len(rows)))
    ill = random.uniform(size=len(rows)) < 1 - np.exp(-rate * np.array([row.hosts for row in rows]))
    messages = np.array([run.stalls for run in model.runs])
    return [dataclasses.replace(r, seconds=float(x)) for r, x in zip(rows, plain + ill * messages * waits)], ill


def test_a_stage_in_the_middle_has_four_messages_a_micro_batch():
    of = [TrialSteps([trial(devices=4 * pp, pp=pp, dp=4, global_batch=64)]).runs[0].stalls for pp in (2, 4)]
    assert of == [2 * 8, 4 * 8]


def test_runs_that_stall_are_told_and_their_time_and_number_found():
    rows, ill = _stalled(_piped(), 0.03, 0.3, 11)
    assert 5 < ill.sum() < 30
    found = fitting.fit(rows)
    lab = dict(zip(NAMES, found.clusters["lab"]))
    assert lab["stall_seconds"] == pytest.approx(0.3, rel=0.15)
    assert found.rates["lab"].piped == pytest.approx(ill.sum() / sum(row.hosts for row in rows), rel=0.5)
    predicted = found.predictions(rows)
    measured = np.array([row.seconds for row in rows])
    assert np.median(np.abs(predicted.plain / measured - 1)[~ill]) < 0.03
    assert np.median(np.abs(predicted.stalled / measured - 1)[ill]) < 0.1
    # On more hosts a stall is likelier, and what is chosen by is the time that includes it.
    chance = {hosts: predicted.probability[[r.hosts == hosts for r in rows]].mean() for hosts in (4, 8, 16)}
    assert chance[4] < chance[8] < chance[16]
    assert np.all(predicted.expected > predicted.plain)


@pytest.mark.once
def test_intervals_hold_what_they_say():
    rows, _ = _stalled(_piped(), 0.03, 0.3, 12)
    fitted, held = _halves(rows, 24, 3)
    forecast = fitting.fit(fitted).forecast(held)
    measured = np.array([row.seconds for row in held])
    inside = np.mean((forecast.low <= measured) & (measured <= forecast.high))
    assert inside > 0.6 and np.all(forecast.low <= forecast.seconds) and np.all(forecast.seconds <= forecast.high)
    # Control: intervals half as wide hold fewer.
    low, high = (np.sqrt(x * forecast.seconds) for x in (forecast.low, forecast.high))
    assert np.mean((low <= measured) & (measured <= high)) < inside


@pytest.mark.once
def test_a_model_without_fitted_runs_is_less_certain():
    rows, _ = _stalled(_piped(), 0.0, 0.0, 14)
    small, large = ([row for row in rows if row.hidden == hidden] for hidden in (1024, 2048))
    one, both = (fitting.fit(some).predictions(large).noise for some in (small, rows))
    assert np.all(one > 0.04) and np.all(one > both)


@pytest.mark.once
def test_errors_of_a_model_that_is_left_out_widen_intervals_of_others():
    rows, _ = _stalled(_piped(), 0.0, 0.0, 14)
    slow = [dataclasses.replace(r, seconds=r.seconds * (1.5 if r.hidden == 2048 else 1)) for r in rows]
    alike, different = (fitting.fit(some).other_model for some in (rows, slow))
    assert alike < 0.04 < 0.12 < different
    assert fitting.fit([row for row in rows if row.hidden == 1024]).other_model == 0.04  # of one model


def test_a_step_over_nvlink_takes_microseconds():
    """That of a trainer which is not named has its launches in it, too."""
    at, whole = NAMES.index("intra_latency"), CONSTANTS[NAMES.index("intra_latency")].high
    cases = {("nanotron", "A100", ""): 1e-5, ("", "A100", ""): whole}
    cases |= {("nanotron", "T4", ""): whole, ("nanotron", "A100", "100"): whole}
    for (trainer, kind, rate), high in cases.items():
        row = trial(trainer=trainer, device_kinds=kind, intra_gbit=rate)
        assert fitting.ranges([row])[at, 1] == high


def test_many_rows_begin_with_few(monkeypatch):
    rows, _ = _measured([row for row in _grid() for _ in range(3)], 0.01, 2)
    whole = fitting.fit(rows).predict(rows)
    monkeypatch.setattr(fitting, "_FEW", 30)
    np.testing.assert_allclose(fitting.fit(rows).predict(rows), whole, rtol=0.03)


@pytest.mark.once
def test_trainers_own_constants_and_have_no_factors():
    rows, _ = _stalled(_piped(), 0.0, 0.0, 13)
    other = [dataclasses.replace(row, cluster="other") for row in rows]
    found = fitting.fit([*rows, *other])
    for name, lab, more in zip(NAMES, found.clusters["lab"], found.clusters["other"]):
        if CONSTANTS[NAMES.index(name)].owner == "trainer":
            assert lab == more, name
    assert not found.factors
