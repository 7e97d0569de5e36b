import csv
import json
import math
import pathlib

import numpy as np
import pytest
from scipy import stats

from paxtrain.errors import UserError
from planner import validate
from planner.fit import accuracy, validation
from planner.fit.accuracy import Scores
from planner.runs import trials
from planner.runs.published import amp, vtrain
from tests import mains

BASE = {
    "cluster": "lab",
    "devices": 4,
    "devices_per_host": 4,
    "device_kinds": "V100",
    "host_gbit": "",
    "intra_gbit": "",
    "hidden": 512,
    "heads": 8,
    "layers": 8,
    "seq": 256,
    "vocab": 32000,
    "global_batch": 16,
    "micro_batch": 1,
    "tp": 1,
    "dp": 4,
    "pp": 1,
    "stage_layers": "",
    "recompute": 0,
    "dtype": "fp16",
    "seconds": 0.1,
}
METHODS = ("simulate", "pipette", "amp")
KEYS = ["n", "n_fit", "mape", "median_ape", "spearman", "kendall", "regret_mean", "regret_max", "groups"]
KEYS += ["spearman_in_groups", "coverage"]


def _forecast(seconds, low=0.9, high=1.1, **changes):
    """Return a forecast of runs that fit, in an interval around their seconds."""
    seconds = np.array(seconds, float)
    some = {"seconds": seconds, "chosen_by": seconds, "low": low * seconds, "high": high * seconds}
    some |= {"memory": np.full(seconds.shape, 1e9), "fits": np.ones(seconds.shape)}
    some |= {"half": np.zeros(seconds.shape), "below": np.full(seconds.shape, 0.5)}
    return accuracy.Forecast(**{**some, **{name: np.array(x, float) for name, x in changes.items()}})


def _rows():
    """Return rows of two clusters, several batches and layouts; seconds follow the work, and one row was not run."""
    rows = []
    for cluster, slow in (("lab", 1.0), ("old", 2.5)):
        for batch, hidden in ((16, 512), (32, 512), (16, 1024)):
            for tp, dp, pp in ((1, 4, 1), (2, 2, 1), (1, 2, 2), (1, 1, 4), (2, 1, 2)):
                for micro in (1, 2):
                    m = batch // dp // micro
                    work = (m + pp - 1) / pp / tp * (0.4 + micro) * (hidden / 512) ** 2
                    layout = {
                        "tp": tp,
                        "dp": dp,
                        "pp": pp,
                        "micro_batch": micro,
                        "seconds": slow * (0.02 + 0.01 * work),
                    }
                    rows.append(BASE | {"cluster": cluster, "global_batch": batch, "hidden": hidden} | layout)
    rows[7]["seconds"] = "inf"
    return rows


def _parsed(rows=None):
    return [trials.parse({name: str(value) for name, value in row.items()}) for row in rows or _rows()]


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "trials.csv"
    trials.write(path, [{**row, "note": "kept"} for row in _rows()[5:35]])  # the third was not run
    return path


@pytest.fixture
def run(monkeypatch, capfd):
    """Return run(*flags), which gives exit code, stdout and stderr of planner.validate."""
    return lambda *arguments: (mains.run(monkeypatch, validate, *arguments), *capfd.readouterr())


def _predictions(out):
    with open(out / "predictions.csv", newline="") as file:
        return list(csv.DictReader(file))


# --- Splits and scores ------------------------------------------------------------------------------------------------


def test_splits_are_random_disjoint_and_of_measured_rows():
    rows = _parsed()
    ((fit, held),) = accuracy.splits(rows, 20, 0, "rows", 3)
    assert len(fit) == 20 and len(held) == 39 and set(fit).isdisjoint(held) and 7 not in {*fit, *held}
    assert not np.array_equal(fit, accuracy.splits(rows, 20, 0, "rows", 4)[0].fit)
    np.testing.assert_array_equal(fit, accuracy.splits(rows, 20, 0, "rows", 3)[0].fit)
    assert len(accuracy.splits(rows, None, 0, "rows", 0)[0].fit) == 29  # half: few rows


def test_folds_hold_every_measured_row_once():
    rows = _parsed()
    for what in accuracy.HOLD_OUT:
        found = accuracy.splits(rows, None, 3, what, 0)
        held = np.concatenate([split.held for split in found])
        assert sorted(held) == [i for i in range(60) if i != 7]
        for split in found:
            assert len(split.fit) + len(split.held) == 59 and set(split.fit).isdisjoint(split.held)


@pytest.mark.parametrize("folds", [0, 4])
def test_cells_are_held_out_whole(folds):
    def cell(row):
        return row.hidden, row.micro_batch, row.tp

    rows = _parsed()
    for split in accuracy.splits(rows, None if folds else 15, folds, "cells", 1):
        fitted = {cell(rows[i]) for i in split.fit}
        held = {cell(rows[i]) for i in split.held}
        assert fitted and held and fitted.isdisjoint(held)
        assert all(i in split.held for i, row in enumerate(rows) if cell(row) in held and row.seconds)


def test_meshes_are_held_out_whole():
    rows = _parsed()
    for split in accuracy.splits(rows, None, 5, "meshes", 1):
        meshes = [{(rows[i].tp, rows[i].dp, rows[i].pp) for i in part} for part in split]
        assert len(meshes[1]) == 1 and meshes[0].isdisjoint(meshes[1])


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((60, 0, "rows"), "--fit=60 is more than the 59 measured rows; choose at most 59"),
        ((None, 60, "rows"), "--folds=60 is more than the 59 measured rows"),
        ((None, 9, "cells"), "--folds=9 is more than the 8 measured cells"),
        ((55, 0, "cells"), "outside the cells held out; choose at most"),
    ],
)
def test_too_few_rows(arguments, message):
    with pytest.raises(UserError, match=message):
        accuracy.splits(_parsed(), *arguments, seed=0)
    with pytest.raises(UserError, match="needs two different"):
        accuracy.splits(_parsed([BASE, BASE]), 1, 0, "cells", 0)


def test_scores_by_hand():
    rows = _parsed(
        [
            BASE | {"seconds": 1.0},
            BASE | {"seconds": 2.0},
            BASE | {"seconds": 4.0},
            BASE | {"global_batch": 32, "seconds": 3.0},
            BASE | {"global_batch": 32, "seconds": 5.0},
            BASE | {"global_batch": 64, "seconds": 10.0},
        ]
    )
    predicted = np.array([1.5, 1.0, 4.4, 3.0, 4.0, 11.0])
    s = accuracy.score(rows, _forecast(predicted), 7)
    assert (s.n, s.n_fit, s.groups) == (6, 7, 2)
    np.testing.assert_allclose([s.mape, s.median_ape], [np.mean([0.5, 0.5, 0.1, 0, 0.2, 0.1]), 0.15])
    np.testing.assert_allclose([s.regret_mean, s.regret_max], [0.5, 1.0])  # chose 2.0 over 1.0; 3.0 rightly
    measured = [row.seconds for row in rows]
    assert s.spearman == pytest.approx(stats.spearmanr(predicted, measured)[0])
    assert s.kendall == pytest.approx(stats.kendalltau(predicted, measured)[0])
    assert s.spearman_in_groups == pytest.approx((0.5 + 1) / 2)
    assert s.kendall_in_groups == pytest.approx((1 / 3 + 1) / 2)
    assert s.coverage == pytest.approx(3 / 6)  # 4.4, 3.0 and 11.0
    # What is said not to fit is not chosen, however quick.
    full = _forecast(predicted, chosen_by=np.where([0, 1, 0, 0, 0, 0], np.inf, predicted))
    assert accuracy.score(rows, full, 7).regret_mean == 0
    assert accuracy.within(rows, 3) == [0, 1, 3, 4, 5]


def test_scores_of_memory_by_hand():
    changes = [{"memory_gb": 10}, {"memory_gb": 20}, *[{"seconds": "", "failed": 1}] * 3]
    rows = _parsed([BASE | {"device_kinds": "A100-40GB"} | more for more in changes])
    fits, half = [0.9, 0.4, 0.1, 0.6, 1.0], [0, 0, 0, 0.1, 0.9]
    forecast = _forecast(np.ones(5), memory=[11e9, 18e9, 50e9, 30e9, 5e9], fits=fits, half=half)
    found = accuracy.memory_scores(rows, forecast)
    assert (found.n, found.failed, found.elsewhere, found.broken, found.recall_of_memory) == (2, 3, 1, 0, 1 / 2)
    np.testing.assert_allclose(
        [found.mape, found.median_ape, found.recall, found.false_alarms], [0.1, 0.1, 1 / 3, 1 / 2]
    )
    assert accuracy.memory_scores(rows[2:], forecast.take([2, 3, 4])) is None


def test_scores_of_nothing_are_null():
    empty, one = accuracy.score([], _forecast([]), 5), accuracy.score(_parsed([BASE]), _forecast([0.2]), 5)
    assert empty.json() == dict.fromkeys(KEYS) | {"n": 0, "n_fit": 5, "groups": 0}
    assert one.json() == dict.fromkeys(KEYS) | {
        "n": 1, "n_fit": 5, "groups": 0, "mape": 1, "median_ape": 1, "coverage": 0
    }  # fmt: skip
    both = accuracy.mean([empty, one])
    assert both.n == 0.5 and both.mape == 1 and math.isnan(both.spearman)
    assert isinstance(both, Scores) and len(list(accuracy.table([("a", both)]))) == 2


# --- The program ------------------------------------------------------------------------------------------------------


def test_fits_predicts_scores_and_writes(tmp_path, run):
    trials.write(tmp_path / "whole.csv", [{**row, "note": "kept"} for row in _rows()])
    code, said, _ = run(f"--trials={tmp_path / 'whole.csv'}", "--fit=30", f"--out={tmp_path / 'out'}")
    assert code == 0
    result = json.loads(said.splitlines()[-1])
    assert (
        list(result) == [*KEYS, "near", "memory"]
        and list(result["near"]) == KEYS
        and result["n"] == 29
        and result["n_fit"] == 30
    )
    assert result["mape"] < 0.12 and result["spearman"] > 0.95 and 0 <= result["regret_mean"] <= result["regret_max"]
    rows = _predictions(tmp_path / "out")
    assert len(rows) == 60 and all(row["note"] == "kept" and float(row["predicted_seconds"]) > 0 for row in rows)
    roles = [row["role"] for row in rows]
    assert roles.count("fit") == 30 and roles.count("held") == 29 and roles[7] == "not_run"
    held = [(float(r["predicted_seconds"]), float(r["seconds"])) for r in rows if r["role"] == "held"]
    assert result["mape"] == pytest.approx(np.mean([abs(p / m - 1) for p, m in held]), abs=1e-5)
    constants = json.loads((tmp_path / "out" / "constants.json").read_text())
    assert set(constants["clusters"]) == {"lab", "old"} and constants["layer_cost_factors"]
    assert (tmp_path / "out" / "predicted_vs_measured.png").read_bytes().startswith(b"\x89PNG")
    assert "lab" in said and "old" in said


@pytest.mark.once
def test_other_methods_say_something_else(table, tmp_path, run):
    said = {m: run(f"--trials={table}", "--fit=10", f"--method={m}", f"--out={tmp_path / m}")[1] for m in METHODS}
    errors = {method: json.loads(text.splitlines()[-1])["mape"] for method, text in said.items()}
    # If transfers cost next to nothing, AMP's closed form equals the event simulation.
    assert abs(errors["simulate"] - errors["amp"]) < 1e-3 < abs(errors["simulate"] - errors["pipette"])


@pytest.mark.slow
def test_folds_and_seeds(table, tmp_path, run):
    code, said, _ = run(f"--trials={table}", "--folds=2", f"--out={tmp_path / 'out'}")
    result = json.loads(said.splitlines()[-1])
    assert code == 0 and result["n"] == 29 and result["n_fit"] == 14.5
    assert {row["role"] for row in _predictions(tmp_path / "out")} == {"held", "not_run"}
    few = (f"--trials={table}", "--fit=4", f"--out={tmp_path}")
    both, once, other = (
        json.loads(run(*few, *how)[1].splitlines()[-1])["mape"] for how in (["--seeds=2"], [], ["--seed=1"])
    )
    assert both == pytest.approx((once + other) / 2, abs=2e-6) and once != other


def test_one_table_is_fitted_and_another_one_judged(table, tmp_path, run):
    trials.write(tmp_path / "others.csv", [row for row in _rows() if row["cluster"] == "old"])
    beyond = [BASE | {"experts": 8, "seconds": 1.0}, *[row for row in _rows() if row["cluster"] == "lab"]]
    trials.write(tmp_path / "lab.csv", [{name: row.get(name, "") for name in trials.COLUMNS} for row in beyond])
    arguments = f"--trials={tmp_path / 'lab.csv'}", f"--fit_on={tmp_path / 'others.csv'}", f"--out={tmp_path / 'out'}"
    code, said, _ = run(*arguments)
    result = json.loads(said.splitlines()[-1])
    assert code == 0 and result["n"] == 29 and "left out: 1 rows with 8 experts" in said
    assert {row["role"] for row in _predictions(tmp_path / "out")} <= {"held", "not_run"}
    assert run(*arguments, "--fit=3")[2].startswith("error: --fit_on fits all rows of its table")


def test_all_rows_may_be_fitted_and_then_nothing_is_scored(table, tmp_path, run):
    code, said, _ = run(f"--trials={table}", "--fit=29", f"--out={tmp_path / 'out'}")
    assert code == 0 and json.loads(said.splitlines()[-1])["n"] == 0
    assert len(_predictions(tmp_path / "out")) == 30


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--fit=70"], "--fit=70 is more than the 29 measured rows"),
        (["--fit=20", "--folds=5"], "--folds fits all rows except those of a fold"),
        (["--method=guess"], "method"),
        (
            ["--method=amp", "--executor=paxtrain"],
            "--executor=paxtrain says how to simulate, but --method=amp does not",
        ),
        (["--fit=0"], "fit"),
        (["more.csv"], "unexpected argument 'more.csv'"),
        (["--trials=absent.csv"], "cannot read the trials absent.csv"),
        (["--fit=2", "--out=/dev/null/out"], "cannot write to --out=/dev/null/out"),
    ],
)
def test_bad_input(table, run, arguments, message):
    code, said, error = run(f"--trials={table}", *arguments)
    assert code == 2 and said == "" and error.startswith("error: ") and message in error
    assert len(error.strip().splitlines()) == 1


def test_no_trials(run):
    assert run()[2].startswith("error: no trials were given; name a table")


@pytest.mark.parametrize(("name", "measured", "rows"), [("amp_heterogeneous", 43, 53), ("bloom_layouts", 61, 61)])
def test_shipped_trials_name_their_source(name, measured, rows):
    found = trials.read(pathlib.Path(trials.__file__).parent / "data" / f"{name}.csv")
    assert len(found) == rows and sum(row.seconds is not None for row in found) == measured
    assert all(row.columns["source"] for row in found)


# --- Published trials -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def published(shared, tmp_path_factory):
    home = tmp_path_factory.mktemp("published")
    for name, rows in (("amp_homogeneous.json", amp), ("vtrain_single_node.csv", vtrain)):
        trials.write(home / f"{rows.__name__}.csv", rows((shared / "data" / "trials" / name).read_text()))
    return home


def _scores(path, **split):
    rows = trials.read(path)
    options = {"fit": None, "folds": 0, "hold_out": "rows", "seed": 0} | split
    return validation.repetition(rows, accuracy.splits(rows, **options), "simulate").scores["all"]


@pytest.mark.once
def test_amp_trials(published):
    s = _scores(published / "amp.csv", fit=30)
    assert s.mape <= 0.035 and s.spearman >= 0.99


@pytest.mark.once
def test_vtrain_rows(published):
    s = _scores(published / "vtrain.csv", fit=60)
    assert s.mape <= 0.05 and s.spearman >= 0.99 and s.regret_mean <= 0.02


@pytest.mark.once
def test_vtrain_cells(published):
    s = _scores(published / "vtrain.csv", fit=60, hold_out="cells")
    assert s.mape <= 0.12 and s.spearman >= 0.97
