import dataclasses
import itertools

import numpy as np
import pytest

from paxtrain.devices import datasheets
from planner.fit import calibrate, trial_model, trials
from planner.fit.constants import CONSTANTS, NAMES
from planner.fit.pipelines import pipeline_batches
from planner.fit.trial_model import TrialModel

ROW = {
    "cluster": "lab",
    "devices": 16,
    "devices_per_host": 4,
    "device_kinds": "A100",
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
TYPICAL = {c.name: c.typical for c in CONSTANTS}
FREE = {"micro_batch_seconds": 0.0, "intra_latency": 0.0, "inter_latency": 0.0, "step_seconds": 0.0}


def trial(**changes):
    return trials.parse({name: str(value) for name, value in {**ROW, **changes}.items()})


def seconds(rows, method="simulate", speed=1.0, factor=1.0, **changes):
    """Return the predicted seconds of trials with typical constants, except for `changes`."""
    model = TrialModel(rows, method)
    constants = np.array([{**TYPICAL, **changes}[name] for name in NAMES])
    slots = np.ones((1, len(rows), model.slots))
    return model.seconds(np.broadcast_to(constants, (1, len(rows), len(NAMES))), slots * speed, slots * factor)[0]


def test_one_device_by_hand():
    row = trial(devices=1, pp=1, global_batch=6, recompute=1)
    sheet, tokens, h = datasheets.datasheet("A100"), 2 * 1024, 2048
    kernels = tokens * (24 * h**2 + 4 * h * 1024) / (0.45 * sheet.half)
    kernels += 2 * (12 * h**2 + tokens * h * 34 + 6 * tokens * 1024 * 16) / (0.6 * sheet.memory_bandwidth)
    forward = 16 * (kernels**4 + 3e-4**4) ** 0.25
    backward = 16 * ((2 * kernels) ** 4 + 3e-4**4) ** 0.25 + forward
    head = 2 * tokens * h * 50000 / (0.45 * sheet.half) + 24 * tokens * 50000 / (0.6 * sheet.memory_bandwidth)
    optimizer = 40 * (16 * 12 * h**2 + 50000 * h) / (0.6 * sheet.memory_bandwidth)
    expected = 3 * (forward + backward + 3 * head + 2 * 5e-4) + optimizer + 5e-3
    assert seconds([row])[0] == pytest.approx(expected, rel=1e-12)


def test_equal_stages_take_m_plus_p_minus_1_rows():
    rows = [trial(vocab=1, micro_batch=1, global_batch=m) for m in (16, 40)]
    few, many = seconds(rows, **FREE, hop_ratio=0.0, head_ratio=0.0, optimizer_bytes=0.0)
    assert many / few == pytest.approx((40 + 15) / (16 + 15), rel=1e-5)


FLAT = dict.fromkeys(("hop_ratio", "head_ratio", "optimizer_bytes", "tied_ratio", "layer_launch"), 0.0)


@pytest.mark.parametrize("method", ["simulate", "rows"])
def test_a_run_takes_what_its_schedule_takes(method):
    """Equal stages have the bubbles of Narayanan et al. 2021 and of Qi et al. 2023; B and W are halves of it."""

    def of(schedule, m=64, **changes):
        row = trial(vocab=1, devices=4, pp=4, micro_batch=1, global_batch=m, schedule=schedule, **changes)
        return seconds([row], method, **FREE, **FLAT)[0]

    both = (of("1f1b", m=128) - of("1f1b")) / 64  # F and B of a micro-batch
    forward = both / (1 + TYPICAL["backward_ratio"])
    bubble = {name: (of(name) - 64 * both) / 3 for name in ("1f1b", "1f1b:6", "eager_1f1b", "gpipe", "zb_h1")}
    assert bubble == pytest.approx(dict.fromkeys(bubble, both) | {"zb_h1": forward}, rel=1e-4)
    for chunks in (2, 4):
        found = of("interleaved_1f1b", virtual_stages=chunks) - 64 * both
        assert found == pytest.approx(3 * both / chunks, rel=1e-4)


def test_transfers_lie_under_compute_where_the_schedule_puts_them():
    """With four in flight on two stages a transfer has the time of a micro-batch, in 1f1b none."""
    rows = [trial(devices=8, tp=4, pp=2, schedule=name) for name in ("1f1b", "1f1b:3", "eager_1f1b")]
    plain, more, eager = seconds(rows, "rows", hop_ratio=10.0)
    assert eager < plain and more < plain
    chunked = trial(devices=8, tp=4, pp=2, schedule="interleaved_1f1b")
    # Chunks send from the last stage to the first, too.
    none, some = (seconds([chunked], hop_ratio=ratio)[0] for ratio in (0.0, 10.0))
    assert some - none > seconds([rows[0]], hop_ratio=10.0)[0] - seconds([rows[0]], hop_ratio=0.0)[0] > 0


@pytest.mark.parametrize("schedule", ["1f1b", "eager_1f1b"])
@pytest.mark.parametrize("method", trial_model.METHODS)
def test_data_ranks_with_fewer_micro_batches(method, schedule):
    """Of equal devices the rank with most counts. A rank of slow ones takes what all would with as few.

    This trainer's rows are those of the rank with most, in which another one may wait for a moment.
    """

    def of(kinds, **batch):
        mesh = {"devices": 8, "dp": 2, "pp": 4, "placement": "0;1;0;1;0;1;0;1", "schedule": schedule}
        return seconds([trial(**mesh, device_kinds=kinds, **batch)], method)[0]

    uneven = {"global_batch": 14, "data_micro_batches": "5;2"}
    mixed, slow = of("A100;T4", **uneven), of("T4", global_batch=8)
    if schedule == "1f1b":
        close = 1e-3 if method == "rows" else 1e-9
        assert of("A100", **uneven) == pytest.approx(of("A100", global_batch=20), rel=close)
        assert mixed == pytest.approx(slow, rel=close)
    assert of("A100", **uneven) < mixed < of("T4;A100", **uneven)
    assert mixed < of("A100;T4", global_batch=14, data_micro_batches="4;3")


@pytest.mark.parametrize("method", trial_model.METHODS)
def test_time_grows_with_every_cost_and_falls_with_every_rate(method):
    rows = [trial(tp=2, dp=4, pp=2), trial(tp=2, dp=2, pp=4, recompute=1), trial(tp=8, dp=1, pp=2)]
    base = seconds(rows, method)
    for name in NAMES:
        moved = seconds(rows, method, **{name: 1.3 * TYPICAL[name]})
        sign = -1 if name.endswith("efficiency") else 1
        assert np.all(sign * (moved - base) >= 0) and np.any(moved != base), name
    assert np.all(seconds(rows, method, factor=1.2) > base) and np.all(seconds(rows, method, speed=1.2) < base)


def test_methods_agree_on_one_stage_and_order_as_they_should_with_transfers():
    single = [trial(pp=1, dp=16)]
    assert np.ptp([seconds(single, method)[0] for method in trial_model.METHODS]) < 1e-12
    deep = [trial(pp=16, global_batch=256)]
    names = ("amp", "pipette", "simulate", "rows")
    amp, pipette, simulated, rows = (seconds(deep, method, hop_ratio=10.0)[0] for method in names)
    assert amp < min(pipette, simulated)  # only AMP's form counts transfers once
    assert simulated <= rows < 1.5 * simulated  # what a schedule allows, and what stages that wait for each other take


def test_messages_share_a_hosts_network():
    # Stage 0 is host 0: 4 tensor ranks send at once, each as much as a host's only rank would.
    four = trial(devices=8, tp=4, pp=2, layers=2)
    one = trial(devices=8, devices_per_host=4, tp=1, dp=4, pp=2, layers=2, global_batch=256)
    alone = trial(devices=2, devices_per_host=1, pp=2, layers=2)
    hops = []
    for row in (four, one, alone):
        (runs,) = pipeline_batches([row]).values()
        hops.append(runs.hop[0, 0])
    assert hops == [12.5e9 / 4, 12.5e9 / 4, 12.5e9]


def test_tensor_groups_are_where_the_run_says():
    mesh = {"devices": 8, "tp": 2, "dp": 2, "pp": 2, "devices_per_host": 4}
    (default,) = pipeline_batches([trial(**mesh)]).values()
    (same,) = pipeline_batches([trial(**mesh, placement="0;0;1;1")]).values()
    for name in ("hop", "hop_inter", "ring_intra", "ring_inter", "embedding", "tensor"):
        np.testing.assert_array_equal(getattr(default, name), getattr(same, name))
    assert default.hop_inter.all() and np.isinf(default.ring_inter).all()
    (turned,) = pipeline_batches([trial(**mesh, placement="0;1;0;1")]).values()
    assert not turned.hop_inter.any() and np.isfinite(turned.ring_inter).all()
    (kinds,) = pipeline_batches([trial(**mesh, placement="1;0;1;0", device_kinds="A100;T4")]).values()
    # Of the kinds by name, the first data rank has the second host's.
    assert sorted(kinds.slot.tolist()) == [[0, 0], [1, 1]]


def test_rings_run_over_their_hosts():
    def rates(**changes):
        (runs,) = pipeline_batches([trial(**changes)]).values()
        return runs.ring_intra[0], runs.ring_inter[0]

    intra, inter = rates(tp=4, dp=4, pp=1)  # 4 rings over 4 hosts, one device of each
    assert np.isinf(intra) and inter == pytest.approx(12.5e9 / 4)
    intra, inter = rates(tp=1, dp=16, pp=1)  # one ring, once in and out of each host
    assert intra == 300e9 and inter == pytest.approx(12.5e9)
    intra, inter = rates(tp=1, dp=4, pp=4)
    assert np.all(intra == 300e9) and np.all(np.isinf(inter))
    intra, inter = rates(tp=1, dp=8, pp=2, host_gbit="100;100;10;100")  # the slow host is the second stage's
    np.testing.assert_allclose(inter, [12.5e9, 1.25e9])
    ours, none = seconds([trial(tp=1, dp=8, pp=2), trial(tp=1, dp=8, pp=2, host_gbit="100;100;10;100")])
    assert none > ours


def test_the_slowest_pipeline_and_device_count():
    kinds = "A100;A100;T4;A100"
    mixed = seconds([trial(tp=4, dp=4, pp=1, device_kinds=kinds), trial(tp=2, dp=2, pp=4, device_kinds=kinds)])
    slow = seconds([trial(tp=4, dp=4, pp=1, device_kinds="T4"), trial(tp=2, dp=2, pp=4, device_kinds="T4")])
    fast = seconds([trial(tp=4, dp=4, pp=1), trial(tp=2, dp=2, pp=4)])
    assert mixed[0] == pytest.approx(slow[0], rel=1e-12)
    assert fast[1] < mixed[1] < slow[1]


# --- The fit ----------------------------------------------------------------------------------------------------------


def _grid(cluster="lab", kinds="A100", **changes):
    """Return all layouts of two model sizes on 16 devices."""
    rows = []
    for hidden, tp, pp, micro in itertools.product((1024, 2048), (1, 2, 4), (1, 2, 4), (1, 2, 4)):
        rows.append(
            trial(
                cluster=cluster,
                device_kinds=kinds,
                hidden=hidden,
                tp=tp,
                pp=pp,
                dp=16 // (tp * pp),
                micro_batch=micro,
                **changes,
            )
        )
    return rows


def _measured(rows, noise, seed, factor_spread=0.0, **changes):
    """Return the rows as a cluster with atypical constants would measure them, its constants and its factors."""
    random = np.random.default_rng(seed)
    constants = np.array([c.typical * np.exp(0.8 * c.spread * random.normal()) for c in CONSTANTS])
    constants = np.clip(constants, [c.low for c in CONSTANTS], [c.high for c in CONSTANTS])
    for name, value in changes.items():
        constants[NAMES.index(name)] = value
    model = TrialModel(rows)
    cells = sorted({calibrate.cells(row)[0] for row in rows})
    drawn = dict(zip(cells, np.exp(factor_spread * random.normal(size=len(cells)))))
    factor = np.array([[[drawn[calibrate.cells(row)[0]]] * model.slots for row in rows]])
    exact = model.seconds(np.broadcast_to(constants, (1, len(rows), len(NAMES))), np.ones_like(factor), factor)[0]
    measured = exact * np.exp(noise * random.normal(size=len(rows)))
    return (
        [dataclasses.replace(row, seconds=float(s)) for row, s in zip(rows, measured)],
        dict(zip(NAMES, constants)),
        drawn,
    )


def _error(calibration, rows):
    measured = np.array([row.seconds for row in rows])
    return float(np.mean(np.abs(calibration.predict(rows) / measured - 1)))


def _halves(rows, count, seed=0):
    order = np.random.default_rng(seed).permutation(len(rows))
    return [rows[i] for i in order[:count]], [rows[i] for i in order[count:]]


@pytest.mark.parametrize("seed", range(3))
def test_predicts_a_cluster_of_its_own_kind(seed):
    rows, _, _ = _measured(_grid(), 0.01, seed)
    fitted, held = _halves(rows, 27, seed)
    calibration = calibrate.fit(fitted)
    assert _error(calibration, held) < 0.03
    # Control: typical constants predict this cluster far less well.
    assert np.mean(np.abs(seconds(held) / [row.seconds for row in held] - 1)) > 0.06


def test_finds_the_constant_that_decides():
    rows, truth, _ = _measured(_grid(seq=4096), 0.0, 0, compute_efficiency=0.25, score_passes=0.1)
    found = calibrate.fit(rows).clusters["lab"][NAMES.index("compute_efficiency")]
    assert found == pytest.approx(truth["compute_efficiency"], rel=0.15)


def test_layer_cost_factors_are_found_bounded_and_one_without_data():
    rows, _, drawn = _measured(_grid(), 0.002, 1, factor_spread=0.15)
    calibration = calibrate.fit([row for row in rows if row.cell != (1024, 2, 2)])
    assert ("A100", 1024, 2, 2) not in calibration.factors and len(calibration.factors) == len(drawn) - 1
    found = np.log([[calibration.factors[cell], drawn[cell]] for cell in calibration.factors])
    assert np.corrcoef(found.T)[0, 1] > 0.75 and np.std(found[:, 0] - found[:, 1]) < 0.1
    wild = [dataclasses.replace(r, seconds=r.seconds * (10 if r.cell == (2048, 2, 2) else 1.0)) for r in rows]
    factors = calibrate.fit(wild).factors.values()
    assert calibrate.FACTOR_RANGE[0] <= min(factors) and max(factors) <= calibrate.FACTOR_RANGE[1]


def test_factors_shrink_to_one_where_the_model_says_it_all():
    rows, _, _ = _measured(_grid(), 0.02, 1)
    assert np.std(np.log(list(calibrate.fit(rows).factors.values()))) < 0.03


def test_an_outlier_changes_little():
    rows, _, _ = _measured(_grid(), 0.01, 2)
    fitted, held = _halves(rows, 30)
    spoiled = [dataclasses.replace(fitted[0], seconds=8 * fitted[0].seconds), *fitted[1:]]
    assert _error(calibrate.fit(spoiled), held) < _error(calibrate.fit(fitted), held) + 0.03


def test_a_cluster_without_rows_gets_what_others_say():
    truth = {"micro_batch_seconds": 4e-3, "compute_efficiency": 0.2}
    one, _, _ = _measured(_grid("one"), 0.005, 3, **truth)
    two, _, _ = _measured(_grid("two"), 0.005, 3, **truth)
    calibration = calibrate.fit(one, two)
    assert calibration.fitted == {"one": len(one), "two": 0}
    alone = np.mean(np.abs(seconds(two) / [row.seconds for row in two] - 1))
    assert _error(calibration, two) < 0.5 * alone
    np.testing.assert_allclose(calibration.clusters["two"], calibration.shared, rtol=0.02)
    later = [dataclasses.replace(row, cluster="three") for row in two[:5]]  # an unknown cluster
    assert np.all(np.isfinite(calibration.predict(later)))


def test_clusters_keep_constants_of_their_own():
    fast, _, _ = _measured(_grid("fast"), 0.005, 4, compute_efficiency=0.7)
    slow, _, _ = _measured(_grid("slow"), 0.005, 4, compute_efficiency=0.15)
    calibration = calibrate.fit(fast + slow)
    at = NAMES.index("compute_efficiency")
    assert calibration.clusters["fast"][at] > 2 * calibration.clusters["slow"][at]
    assert _error(calibration, fast + slow) < 0.02


def test_hosts_of_different_kinds():
    rows, _, _ = _measured(_grid(kinds="T4;A100;A100;T4"), 0.0, 5)
    kinds = [kind for kind, *_ in calibrate.cells(rows[0])]
    assert kinds == ["A100", "T4"]
    fitted, held = _halves(rows, 30)
    calibration = calibrate.fit(fitted)
    assert set(calibration.speeds) == {"A100", "T4"} and _error(calibration, held) < 0.03


@pytest.mark.parametrize("scale", [0.1, 1, 300])
def test_devices_and_links_that_no_datasheet_knows(scale):
    """The cluster is ten times faster, or hundreds of times slower, than the stand-in for unknown devices."""
    rows, _, _ = _measured(_grid(kinds="", host_gbit="", intra_gbit=""), 0.01, 6)
    rows = [dataclasses.replace(row, seconds=row.seconds * scale) for row in rows]
    fitted, held = _halves(rows, 30)
    assert _error(calibrate.fit(fitted), held) < 0.06


@pytest.mark.parametrize("count", [1, 2, 5])
def test_few_rows_move_the_whole_scale(count):
    rows, _, _ = _measured(_grid(), 0.0, 7, compute_efficiency=0.1)
    fitted, held = _halves(rows, count)
    errors = _error(calibrate.fit(fitted), held)
    assert errors < 0.35 and errors < 0.6 * np.mean(np.abs(seconds(held) / [row.seconds for row in held] - 1))


def test_description_names_units_ranges_and_ends():
    rows, _, _ = _measured(_grid(), 0.0, 8)
    rows = [dataclasses.replace(row, seconds=row.seconds / 40) for row in rows]  # faster than the datasheet allows
    description = calibrate.fit(rows).describe()
    lab = description["clusters"]["lab"]
    assert lab["rows_fitted"] == len(rows) and list(lab["constants"]) == list(NAMES)
    for entry in lab["constants"].values():
        assert 0 < entry["low"] <= entry["value"] * (1 + 1e-9) and entry["value"] <= entry["high"] * (1 + 1e-9)
        assert entry["unit"] and entry["meaning"]
    assert lab["constants"]["compute_efficiency"]["at_bound"] == "high"
    assert {tuple(e[k] for k in ("hidden", "tp", "micro_batch")) for e in description["layer_cost_factors"]} == {
        (row.hidden, row.tp, row.micro_batch) for row in rows
    }
