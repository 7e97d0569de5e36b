"""Constants fitted to measured runs reach the plan's costs and links."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from paxtrain.config.axes import UNSPLIT
from paxtrain.errors import UserError
from paxtrain.model import parameters
from planner.cluster.cluster import between, merged
from planner.cost import compute
from planner.cost.link_seconds import fabric
from planner.cost.step_time import Problem
from planner.fit.applied import EXECUTED, fitted_links, priced, profile, recalibrated, run_by
from planner.fit.constants import NAMES
from planner.fit.fitting import fit
from planner.fit.trial_steps import TrialSteps, candidate, cluster_of
from planner.runs import published
from planner.runs.trials import Trial, parse
from tests.planner.examples import MODEL, cluster

ROW = {
    "cluster": "lab",
    "devices": 8,
    "devices_per_host": 8,
    "device_kinds": "A100",
    "host_gbit": "200",
    "intra_gbit": "2400",
    "hidden": 4096,
    "heads": 32,
    "layers": 8,
    "seq": 1024,
    "vocab": 50000,
    "global_batch": 32,
    "micro_batch": 2,
    "tp": 1,
    "dp": 1,
    "pp": 8,
    "stage_layers": "",
    "recompute": 0,
    "dtype": "fp16",
    "seconds": "",
}


def trial(**changes: int | str) -> Trial:
    return parse({name: str(value) for name, value in {**ROW, **changes}.items()})


def constants(**changes: float) -> dict:
    values = {
        "matmul": 0.5,
        "memory": 0.7,
        "layer_launch": 1e-4,
        "scores": 1.5,
        "head": 1.2,
        "chunk_seconds": 1e-3,
        "host_seconds": 2e-2,
        "backward": 2.2,
        "optimizer_bytes": 30.0,
        "intra_efficiency": 0.5,
        "intra_latency": 2e-5,
        "inter_efficiency": 0.25,
        "inter_latency": 6e-5,
        "attention": 1.0,
        "spread": 1e-9,  # none
    }
    return {"rows_fitted": 9, "constants": {name: {"value": x} for name, x in (values | changes).items()}}


@pytest.fixture
def write(tmp_path):
    def call(**clusters: dict) -> str:
        (tmp_path / "constants.json").write_text(json.dumps({"clusters": clusters}))
        return str(tmp_path / "constants.json")

    return call


def test_costs_and_links_are_scaled(write):
    some = cluster()
    found = recalibrated(some, write(lab=constants()))
    apart = between(some)
    np.testing.assert_allclose(found.bandwidth[apart], 0.25 * some.bandwidth[apart])
    np.testing.assert_allclose(found.bandwidth[~apart], 0.5 * some.bandwidth[~apart])
    assert set(found.alpha[apart]) == {6e-5} and set(found.alpha[~apart]) == {2e-5}
    big = dataclasses.replace(MODEL, hidden=8192, heads=64)  # most of its time is matrix products

    def forward(c) -> float:
        return compute.layer(c, "a100-80gb", big, UNSPLIT, 4, "residuals").forward

    faster = recalibrated(some, write(lab=constants(matmul=0.6)))
    assert forward(found) / forward(faster) == pytest.approx(0.6 / 0.5, rel=0.02)
    reached = 0.5 * 0.70 * 312e12  # 70% is what the largest reach on an A100
    product = 2 * 4 * 1024 * parameters.count(big, role="kernel") / reached
    assert product < forward(found) < 1.1 * product
    assert "fitted" in compute.source(found) and "9 runs of lab" in found.source


def test_farther_hosts_stay_farther(write):
    alpha = np.full((4, 4), 1e-5)
    alpha[:2, 2:] = alpha[2:, :2] = 1e-2
    far = dataclasses.replace(cluster(), alpha=alpha)
    found = recalibrated(far, write(lab=constants())).alpha
    assert found[0, 1] == pytest.approx(6e-5) and found[0, 2] == pytest.approx(1e-2 - 1e-5 + 6e-5)
    assert set(np.diagonal(found)) == {2e-5}


def test_which_constants_are_meant_is_told(write):
    path = write(a=constants(), b=constants(matmul=0.3))
    assert recalibrated(cluster(), path, "b").shares.matmul == 0.3
    with pytest.raises(UserError, match="one of a, b"):
        recalibrated(cluster(), path)
    lacking = constants()
    del lacking["constants"]["layer_launch"]
    with pytest.raises(UserError, match="lack 'layer_launch'"):
        recalibrated(cluster(), write(a=lacking))
    with pytest.raises(UserError, match="cannot read the constants"):
        recalibrated(cluster(), "nothing.json")
    with pytest.raises(UserError, match="must be above 0, got matmul=-1"):
        recalibrated(cluster(), write(a=constants(matmul=-1)))
    for wrong in ("0.5", True, 10**400, float("nan")):
        with pytest.raises(UserError, match="must be above 0, got matmul="):
            recalibrated(cluster(), write(a=constants(matmul=wrong)))
        with pytest.raises(UserError, match="must be above 0, got unused="):
            recalibrated(cluster(), write(a=constants(unused=wrong)))
    assert recalibrated(cluster(), write(a=constants(unused=0.0))).shares == recalibrated(cluster(), path, "a").shares
    repeated = dataclasses.replace(cluster(), samples=np.repeat(cluster().samples, 2, axis=0))
    for measured in (dataclasses.replace(cluster(), compute=({},)), repeated):
        with pytest.raises(UserError, match="was measured"):
            recalibrated(measured, path, "a")


@pytest.mark.parametrize("trainer", ["nanotron", "megatron-lm", "llm-foundry", "maxtext", "torchtitan"])
@pytest.mark.parametrize(
    "layout",
    [
        {"pp": 2, "tp": 2, "dp": 2},
        {"pp": 8, "tp": 2, "devices": 16},
        {"pp": 1, "dp": 8},
        {"pp": 2, "tp": 2, "context": 2},
        {"pp": 2, "tp": 4, "context": 4, "devices": 32},
    ],
)
def test_a_plan_of_another_trainer_takes_what_a_run_of_it_is_predicted_to(trainer, layout):
    """A plan is priced by a cluster, a run by a row of constants; the layers' messages, reductions and tables agree."""
    run = trial(trainer=trainer, sharding="zero1", micro_batch=1, **layout)
    known = profile(trainer)
    slots = np.ones((1, 1, 1))
    [[expected]] = TrialSteps([run]).seconds(np.array([[[known[name] for name in NAMES]]]), slots, slots)
    found = run_by(fitted_links(cluster_of(run), known), known, trainer)
    found = merged(found, run.seat // 8) if run.seat > 8 else found
    problem = Problem(found, run.model, candidate(run, own=False))
    hosts = (np.arange(run.dp * run.pp) * run.seat // max(run.seat, 8)).reshape(run.pp, run.dp).T
    assert float(problem.step(fabric(found), hosts[None]).total[0]) == pytest.approx(expected, rel=1e-12)
    found = fitted_links(cluster_of(run), known)
    found = merged(found, run.seat // 8) if run.seat > 8 else found
    plain = Problem(found, run.model, candidate(run, own=True))
    assert float(plain.step(fabric(found), hosts[None]).total[0]) != pytest.approx(expected, rel=1e-3)


def test_constants_have_owners(write):
    """Of a trainer's own runs a plan takes all constants; of others' runs those of devices and links."""
    own = constants(**dict.fromkeys((*EXECUTED, "stall_seconds"), 0.5)) | {"trainer": "nanotron"}
    path = write(lab=own)
    same = priced(recalibrated(cluster(), path, trainer="nanotron"), "nanotron")
    assert (same.execution.hop_ratio, same.execution.trainer, same.host_seconds) == (0.5, "nanotron", 2e-2)
    assert (same.shares.matmul, same.shares.backward) == (0.5, 2.2)
    other = priced(recalibrated(cluster(), path, trainer="megatron-lm"), "megatron-lm")
    known = profile("megatron-lm")
    assert (other.shares.matmul, other.shares.backward) == (0.5, known["backward"])
    assert other.execution.data_ratio == known["data_ratio"] != 0.5
    assert (other.bandwidth == same.bandwidth).all()
    here = recalibrated(cluster(), path)
    assert (here.shares.matmul, here.shares.backward, here.execution.rows) == (0.5, 2.0, True)
    with pytest.raises(UserError, match="--trainer=nanotron trains on GPUs"):
        priced(cluster(2, 4, device="cpu", memory=1e9), "nanotron")


def test_what_a_fit_writes_is_what_a_plan_uses(tmp_path):
    """A plan with fitted constants takes the seconds that the fit says, on the run's own cluster, model and layout."""
    run = trial(pp=2, tp=2, dp=2, micro_batch=2)
    path = tmp_path / "constants.json"
    fitted = fit([dataclasses.replace(run, seconds=3.0)])
    path.write_text(json.dumps(fitted.describe()))
    found = recalibrated(cluster_of(run), path)
    lab = dict(zip(NAMES, fitted.clusters["lab"]))
    assert 0 < found.deviations["backward"] < 0.3 and found.deviations.keys() >= {"inter_efficiency", "matmul"}
    assert found.shares.matmul == lab["matmul"] != 1 and found.host_seconds == lab["host_seconds"]
    # This trainer's rows, with the ratios and the layer-cost factor, which plans leave out, at 1, and no more buckets.
    plain = {name: 1.0 for name in NAMES if name.endswith("_ratio")} | {"buckets": 0.0}
    values = [[{**lab, **plain}[name] for name in NAMES]]
    slots = np.ones((1, 1, 1))
    [[expected]] = TrialSteps([run], "rows").seconds(np.array([values]), slots, slots)
    problem = Problem(found, run.model, candidate(run, own=True))
    [planned] = problem.step(fabric(found), np.zeros((1, 2, 2), int)).total
    assert planned == pytest.approx(expected, rel=1e-12)


RUNS = pathlib.Path(__file__).resolve().parents[4] / "shared/data/runs"


@pytest.mark.skipif(not RUNS.is_dir(), reason="published runs are not in this checkout")
@pytest.mark.parametrize(
    ("name", "mean", "median"),
    [("mpt_fsdp_a100", 0.05, 0.03), ("ultrascale_1b_8b", 0.19, 0.14), ("megatron_bridge", 0.15, 0.14)],
)
def test_constants_that_ship_predict_published_runs_without_any_fit(name, mean, median):
    """Rows within 3 times the best of their group, at the rates that links of plans reach and usual latencies."""
    links = {"intra_efficiency": 0.82, "inter_efficiency": 0.7, "spread": 0.0}
    links |= {"intra_latency": 4e-6, "inter_latency": 12e-6}
    rows = [run for run in published.read(RUNS / f"{name}.csv") if run.seconds and not (run.beyond or run.failed)]
    best = {run.group: min(other.seconds for other in rows if other.group == run.group) for run in rows}
    near = [run for run in rows if run.seconds < 3 * best[run.group]]
    steps, slots = TrialSteps(near), np.ones((1, len(near), 1))

    def errors(**changes: float) -> np.ndarray:
        known = [profile(run.trainer) | links | changes for run in near]
        values = np.array([[[one[constant] for constant in NAMES] for one in known]])
        return np.abs(steps.seconds(values, slots, slots)[0] / [run.seconds for run in near] - 1)

    found = errors()
    assert found.mean() < mean and np.median(found) < median
    assert errors(backward=4.0).mean() > 1.5 * mean  # a control
