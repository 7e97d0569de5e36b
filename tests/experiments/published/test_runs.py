"""Published figures agree with one another, so a slip in the table shows."""

import collections
import datetime

import pytest

from experiments.published.runs import model_flops, read
from paxtrain.model import parameters

RUNS = read()
NAMED = {run.name: run for run in RUNS}


def test_every_run_has_its_source_and_a_mesh_that_fits():
    assert len(RUNS) == len(NAMED) > 60
    for run in RUNS:
        assert all(run.columns[name] for name in ("trainer", "source", "place", "url", "read_at")), run.name
        assert run.columns["url"].startswith("https://")
        assert datetime.date.fromisoformat(run.columns["checked"]) >= datetime.date(2026, 11, 26)
        assert run.data * run.pipe * run.tensor == run.devices and run.devices % 8 == 0, run.name
        assert run.micro_batches * run.data * run.micro_batch == run.global_batch, run.name
        assert len(run.stage_layers) == run.pipe * run.chunks and sum(run.stage_layers) == run.model.layers, run.name
        assert run.chunks == 1 or run.micro_batches % run.pipe == 0, run.name
        assert (
            0.15 < model_flops(run.model, run.global_batch) / (run.seconds * run.devices * run.sheet.peak_flops) < 0.7
        )
    sources = collections.Counter(run.columns["source"].split(",")[0] for run in RUNS)
    assert min(sources.values()) >= 2, sources


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("SC'21 7.5B", 7.5),
        ("SC'21 18B", 18.4),
        ("SC'21 39B", 39.1),
        ("SC'21 1T", 1008.0),
        ("MegaScale 530B on 2240", 530),
        ("BLOOM 70x14336 t4 p12 b2 a112", 176.2),
        ("Llama 3 405B on 8192", 405),
        ("torchtitan 8B on 8 H100", 8.03),
        ("torchtitan Llama 2 13B no on 64 A100", 13.0),
    ],
)
def test_models_have_the_parameters_that_are_published(name, billions):
    assert parameters.published(NAMED[name].model) / 1e9 == pytest.approx(billions, rel=0.012)


@pytest.mark.parametrize(
    ("devices", "mfu"),
    [(256, 53.0), (512, 49.9), (768, 46.7), (1024, 44.7), (3072, 48.7), (6144, 47.8), (8192, 43.3), (12288, 41.2)],
)
def test_megascales_times_are_its_utilisations(devices, mfu):
    """Table 2 prints both; they check the formula by which utilisations become seconds."""
    run = NAMED[f"MegaScale 175B on {devices}"]
    flops = model_flops(run.model, run.global_batch)
    assert 100 * flops / (run.seconds * devices * 312e12) == pytest.approx(mfu, rel=0.01)


@pytest.mark.parametrize(
    ("name", "petaflops"), [("SC'21 3.6B", 8.8), ("SC'21 76B", 143.8), ("SC'21 310B", 297.4), ("SC'21 1T", 502.0)]
)
def test_sc21_aggregates_are_those_of_its_devices(name, petaflops):
    run = NAMED[name]
    assert float(run.columns["published"]) * run.devices / 1000 == pytest.approx(petaflops, rel=0.005)


@pytest.mark.parametrize(
    ("name", "tflops"), [("BLOOM 70x14336 t4 p12 b2 a112", 150.05), ("BLOOM 106x12288 t4 p12 b2 a64", 149.75)]
)
def test_blooms_times_are_its_tflops(name, tflops):
    """Its log counts with recomputation, as Narayanan et al. do."""
    run = NAMED[name]
    h, s, layers, vocab = run.model.hidden, 2048, run.model.layers, 250880
    flops = 2048 * s * (4 * layers * (24 * h * h + 4 * s * h) + 6 * h * vocab)
    assert flops / (run.seconds * 384 * 1e12) == pytest.approx(tflops, rel=0.01)


@pytest.mark.parametrize(("size", "gain", "mfu"), [("175B", 31.8, 51.4), ("530B", 29.7, 56.0), ("1T", 32.1, 56.3)])
def test_korthikantis_times_are_its_utilisations(size, gain, mfu):
    """Table 5 prints the gain and the utilisation of the quicker run as well."""
    slow, quick = NAMED[f"Korthikanti {size} full"], NAMED[f"Korthikanti {size} selective"]
    assert 100 * (slow.seconds / quick.seconds - 1) == pytest.approx(gain, abs=0.1)
    flops = model_flops(quick.model, quick.global_batch)
    assert 100 * flops / (quick.seconds * quick.devices * 312e12) == pytest.approx(mfu, abs=0.3)


def test_llamas_two_meshes_train_the_same_batch():
    few, many = NAMED["Llama 3 405B on 8192"], NAMED["Llama 3 405B on 16384"]
    assert few.global_batch * 8192 == many.global_batch * 8192 == 2**24
    assert few.seconds / many.seconds == pytest.approx(2 * 400 / 430)
