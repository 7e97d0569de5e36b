"""Predictions of published runs added up by hand, their fit, and how near they come."""

import dataclasses
import pathlib
import shutil

import numpy as np
import pytest

from experiments.published import comparison, halves, prediction, runs
from experiments.published.prediction import PublishedConstants, predicted
from paxtrain.config.axes import UNSPLIT, layer_sizes
from paxtrain.errors import UserError
from paxtrain.model.parameters import of_mean_layer
from planner.cost import compute as costs
from planner.cost.step_time import Problem
from tests import mains

RUNS = runs.read()
NAMED = {run.name: run for run in RUNS}
PAGE = pathlib.Path(__file__).parents[3] / "docs" / "accuracy.md"


def layer(run: runs.PublishedRun, save: str) -> costs.LayerCosts:
    cluster = prediction.cluster_of(run, PublishedConstants())
    mesh = layer_sizes({"tensor": run.tensor})
    return costs.layer(cluster, run.device, run.model, mesh, run.micro_batch, save, run.sequence_parallel)


def test_one_host_is_compute_and_optimizer():
    run = NAMED["Korthikanti 22B full"]
    one, model = layer(run, "layers"), run.model
    mesh = layer_sizes({"tensor": 8})
    held = 48 * of_mean_layer(model, mesh) + costs.embedding_parameters(model, mesh, 1)
    expected = 48 * (one.forward + one.backward) + one.embedding + one.head + held * one.optimizer
    host = prediction.cluster_of(run, PublishedConstants()).host_seconds + 2 * one.chunk
    assert predicted(run) == pytest.approx(expected + host) and 0 < host < 0.01


def test_scores_in_memory_cost_time_and_are_what_selective_recomputation_runs_again():
    run = NAMED["Korthikanti 175B selective"]
    stored, flash = layer(run, "residuals"), layer(dataclasses.replace(run, flash=True), "residuals")
    assert stored.forward > 1.05 * flash.forward
    again = layer(run, "scores").backward - stored.backward
    assert 0 < again < 0.5 * (layer(run, "layers").backward - stored.backward)


def test_sharded_weights_lie_under_the_layers_unless_the_links_are_slow():
    run = NAMED["torchtitan 8B on 128 H100"]
    one, held = layer(run, "half_products"), 32 * of_mean_layer(run.model, UNSPLIT) + 2 * 128256 * 4096
    compute = 32 * (one.forward + one.backward) + one.embedding + one.head + held / 128 * one.optimizer
    assert compute < predicted(run) < 1.15 * compute
    slow = dataclasses.replace(run, host_bytes=1e9)
    moved = held * (2 + 2 + 4) * 127 / 128 / (0.8 * 1e9)  # gathered twice in bfloat16, reduced once in float32
    assert predicted(slow, PublishedConstants(between=0.8)) == pytest.approx(moved, rel=0.05)


def test_other_trainers_wait_less_than_the_executors_rows():
    run = dataclasses.replace(NAMED["MegaScale 175B on 1024"], overlap=True)
    cluster = prediction.cluster_of(run, PublishedConstants())
    by_row = dataclasses.replace(cluster, execution=dataclasses.replace(cluster.execution, rows=True))
    problem = Problem(by_row, run.model, prediction._candidate(run))
    hosts = np.arange(run.data * run.pipe).reshape(1, run.pipe, run.data).swapaxes(1, 2)
    ours = problem.step(prediction.fabric(cluster), hosts)
    assert predicted(run) < float(ours.total[0])


def test_messages_in_parts_are_quicker():
    run = NAMED["BLOOM 70x14336 t8 p12 b2 a64"]
    assert predicted(run) < predicted(dataclasses.replace(run, split_messages=False))


@pytest.mark.parametrize(("heads", "before", "after"), [(96, 112.69, 118.79), (64, 110.96, 116.54)])
def test_adding_up_gradients_in_float32_costs_what_blooms_team_saw(heads, before, after):
    """On 02-27 and 02-28 it timed the same layouts, before and after gradients were added up in float32."""
    run = NAMED[f"BLOOM 106x12288 t4 p12 b2 a{heads}"]
    assert (run.seconds, run.accumulate) == (after, 18)
    # In 16 bits it is 6 bytes: a gradient and a sum are read, and a sum is written.
    slower = predicted(run) - predicted(dataclasses.replace(run, accumulate=6))
    assert 0.5 * (after - before) < slower < 1.1 * (after - before)
    rate = PublishedConstants().memory * run.sheet.bandwidth
    each = 9 * of_mean_layer(run.model, layer_sizes({"tensor": 4})) * 12 / rate
    assert slower == pytest.approx((128 + 11) * each, rel=0.1)


def test_hosts_that_wait_for_kernels_lose_the_same_on_each_layer_and_micro_batch():
    run = NAMED["BLOOM 106x12288 t4 p12 b2 a96"]
    slower = predicted(run, PublishedConstants(waiting=2e-3)) - predicted(dataclasses.replace(run, waits=False))
    assert slower == pytest.approx((128 + 11) * 9 * 4 * 2e-3, rel=0.1)  # F, F again, and B as two of them
    other = NAMED["MegaScale 175B on 256"]
    assert predicted(other, PublishedConstants(waiting=2e-3)) == predicted(other)


@pytest.mark.once
def test_a_fit_finds_the_constants_that_made_the_runs():
    truth = PublishedConstants(a100=0.66, h100=0.5, limited=0.45, memory=0.65, inside=0.6, between=0.6)
    few = [run for run in RUNS if run.devices <= 1024][::3]
    made = [dataclasses.replace(run, seconds=predicted(run, truth)) for run in few]
    found = halves.fit(made)
    assert found.a100 == pytest.approx(0.66, rel=0.06) and found.limited == pytest.approx(0.45, rel=0.06)
    error = np.abs(comparison.compare(made, found).ratio - 1)
    assert error.mean() < 0.02
    assert np.abs(comparison.compare(made, PublishedConstants()).ratio - 1).mean() > 3 * error.mean()


@pytest.fixture(scope="module")
def compared():
    return comparison.compare(RUNS, PublishedConstants())


def test_the_judged_half_is_near_what_was_published(compared):
    fitted = halves.is_fitted(len(RUNS))
    assert fitted.sum() == 34
    error = np.abs(compared.ratio - 1)[~fitted]
    assert error.mean() < 0.06
    assert error.max() < 0.15


def test_the_page_has_this_table(compared, tmp_path):
    copy = tmp_path / "accuracy.md"
    shutil.copy(PAGE, copy)
    comparison.write_page(copy, compared)
    assert copy.read_text() == PAGE.read_text(), "python -m experiments.published --page=docs/accuracy.md"


def test_a_page_without_the_comments_is_refused(tmp_path, compared):
    page = tmp_path / "page.md"
    page.write_text("# Nothing\n")
    with pytest.raises(UserError, match="lacks the comments"):
        comparison.write_page(page, compared)
    with pytest.raises(UserError, match="cannot read the page"):
        comparison.write_page(tmp_path / "absent.md", compared)


def test_a_wrong_page_is_told_before_anything_is_predicted(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(runs, "read", lambda: pytest.fail("the runs were read first"))
    main = mains.load("experiments.published.__main__")
    assert mains.run(monkeypatch, main, "--fit", f"--page={tmp_path / 'absent.md'}") == 2
    assert capfd.readouterr().err.startswith(f"error: cannot read the page {tmp_path / 'absent.md'}")


def test_the_command_takes_flags_only(monkeypatch, capfd):
    assert mains.run(monkeypatch, mains.load("experiments.published.__main__"), "runs.csv") == 2
    assert "unexpected argument 'runs.csv'" in capfd.readouterr().err
