"""A trace becomes a row of a cluster's compute that predicts the traced layer's seconds."""

import dataclasses

import pytest

from paxtrain.config.axes import TENSOR, layer_sizes
from paxtrain.config.load import load_config
from paxtrain.errors import UserError
from planner.cluster.cluster import Cluster
from planner.cost import compute
from planner.traces import compute_row
from planner.traces.compute_row import TraceOptions
from tests import mains
from tests.planner.given.logs import DATA
from tests.planner.traces.runs import Run, write

# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")


@pytest.fixture
def config():
    """Return a configuration with the three layers that runs have."""
    found = load_config("tiny")
    return dataclasses.replace(found, model=dataclasses.replace(found.model, layers=3))


@pytest.fixture
def made(tmp_path, config):
    """Return a function of a run, of how its trace is written and of options; it returns the row and what it says."""

    def make(run, how=None, kind="torch", **options):
        path = tmp_path / "trace"
        write(path, getattr(run, kind)(**(how or {})))
        row, told = compute_row.row(compute_row.read(path), TraceOptions(config, 2, **options))
        return row, " ".join(text for _, text in told)

    return make


def cluster(row):
    links = {"alpha": 4e-6, "bandwidth": 4e11}
    return Cluster.parse(
        {
            "version": 1,
            "hosts": 1,
            "devices_per_host": 8,
            "device": "h100",
            "links": {"inside": links, "between": links},
            "compute": [row],
        }
    )


def test_the_planner_predicts_the_traced_seconds(made, config):
    run = Run()
    row, said = made(run)
    found = compute.layer(cluster(row), "h100", config.model, layer_sizes({TENSOR: 1}), 2, "residuals")
    assert found.forward == pytest.approx(run.forward, rel=1e-3)
    assert found.backward == pytest.approx(run.backward, rel=1e-3)
    assert found.head == pytest.approx(3 * run.logits + 2e-4, rel=1e-3)
    assert (row["kind"], row["tensor"], row["micro_batch"], row["save"]) == ("h100", 1, 2, "residuals")
    assert "a layer's F 1 ms, its B 2.2 ms" in said and "200,000 a second" in said and "data sheet" not in said


def test_the_update_is_that_of_a_parameter(made, config):
    """Of two layers the device has fewer parameters, whose update took as long."""
    from paxtrain.model import parameters

    row, _ = made(Run())
    assert row["optimizer"] == pytest.approx(7e-4 / parameters.whole(config.model), rel=1e-3)
    fewer, _ = made(Run(layers=2), layers=2)
    assert fewer["optimizer"] > 1.2 * row["optimizer"] and fewer["forward"] == pytest.approx(1e-3, rel=1e-3)


def test_what_a_trace_does_not_tell_is_the_data_sheets(made):
    row, said = made(Run(head=False), layers_only=True)
    assert row["head"] > 0 and row["embedding"] > 0
    assert "head: the data sheet's" in said and "embedding: the data sheet's" in said


def test_what_b_runs_again_says_the_save_mode(made):
    row, said = made(Run(again=("aten::linear",)))
    assert row["save"] == "layer_inputs" and "B runs whole layers again" in said
    with pytest.raises(UserError, match="attention or norms again in B, but not its products"):
        made(Run(again=("aten::native_layer_norm",)))


def test_a_jax_trace_needs_the_passes_and_the_device(made):
    for options, reason in (
        ({}, "names no device"),
        ({"device": "h100"}, "with --passes"),
    ):
        with pytest.raises(UserError, match=reason):
            made(Run(), kind="xla", **options)
    row, said = made(Run(), kind="xla", device="h100", passes=4)
    assert row["save"] == "dots" and row["forward"] == pytest.approx(1e-3, rel=1e-3)
    assert "optimizer: the data sheet's" in said and "an unknown part again" in said


def test_waits_are_told(made):
    _, said = made(Run(every=2e-3))
    assert "warning: the device waits for launches" in said
    assert "warning" not in made(Run())[1]


@pytest.mark.parametrize(
    ("run", "how", "options", "reason"),
    [
        (Run(head=False), None, {}, "does not tell the head from the layers"),
        (Run(), None, {"passes": 3}, "has 4 F with their B, not 3"),
        (Run(), None, {"tensor": 3}, "--tensor=3 must divide"),
        (Run(), {"device": "NVIDIA X1"}, {}, "'NVIDIA X1', which is not known"),
    ],
)
def test_what_makes_no_row_is_one_sentence(made, run, how, options, reason):
    with pytest.raises(UserError, match=reason):
        made(run, how, **options)


@pytest.fixture
def run_main(monkeypatch, tmp_path, capsys):
    module = mains.load("planner.cluster_of")
    out = tmp_path / "out.json"

    def call(code, **flags):
        given = {"topo": DATA / "h100_12_nics.topo", "hosts": 2, "nic_gbit": 400, "out": out} | flags
        assert mains.run(monkeypatch, module, *(f"--{name}={value}" for name, value in given.items())) == code
        printed = capsys.readouterr()
        return printed.err if code else (printed.out, Cluster.load(out))

    return call


def test_traces_make_the_compute_of_a_cluster(run_main, tmp_path):
    """The device's name, too; rows of two micro-batches."""
    for name, run in (("one", Run(layers=4)), ("two", Run(layers=4, forward=2e-3))):
        write(tmp_path / name, run.torch())
    flags = {"trace": f"{tmp_path / 'one'},{tmp_path / 'two'}", "config": "tiny", "config.model.layers": 4}
    said, cluster = run_main(0, **flags, micro_batch="1,2")
    assert [(row["micro_batch"], round(row["forward"] * 1e3, 2)) for row in cluster.compute] == [(1, 1.0), (2, 2.0)]
    assert cluster.kinds == ("h100", "h100") and "launches every 5 us" in said
    assert "micro_batch must be" in run_main(2, **flags, micro_batch="1,2,3")
    assert "micro_batch must be" in run_main(2, **flags)
    assert "compute rows 0 and 1 measure the same" in run_main(2, **flags, micro_batch=1)
    assert "name it with --config" in run_main(2, trace=tmp_path / "one", micro_batch=1)
