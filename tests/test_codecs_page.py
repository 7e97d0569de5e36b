"""The codec of docs/codecs.md: checked, trained on both axes of eight devices, and resumed, by flags alone."""

import csv
import os
import pathlib
import subprocess
import sys

import pytest

import compress
from compress.codecs import named
from paxtrain.config import plan
from paxtrain.run import metrics
from tests import small
from tests.planner.examples import cluster
from tests.sources import ROOT
from tests.test_docs import snippets

PAGE = ROOT / "docs" / "codecs.md"
pytestmark = pytest.mark.once
FLAGS = [
    *("model.layers=4", "model.hidden=32", "model.heads=2", "model.sequence=32", "mesh.tensor=1", "mesh.data=4"),
    *("batch.global_batch=8", "batch.micro_batch=1", "run.eval_batches=1", "run.sample_tokens=0", "checkpoint.every=4"),
    *("optimizer.warmup_steps=2", "optimizer.schedule=constant", "compress.data.start=0.0"),
    *("compress.backward.codec=sparse:TopK", "compress.backward.options.share=0.2", "compress.data.codec=sparse:TopK"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory) -> pathlib.Path:
    """Return a folder with the page's module and with data."""
    folder = tmp_path_factory.mktemp("codecs")
    module, _ = snippets(PAGE)
    (folder / "sparse.py").write_text(module)
    return small.corpus(folder, 20_000, "runs/data")


def train(home: pathlib.Path, out: str, steps: int, *flags: str) -> subprocess.CompletedProcess:
    given = [f"--config.{flag}" for flag in (*FLAGS, f"run.steps={steps}", f"run.out=runs/{out}", *flags)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{home}", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "paxtrain.train", *given]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)


def losses(home: pathlib.Path, out: str) -> list[float]:
    return [record["loss"] for record in metrics.read(home / "runs" / out / metrics.FILE) if "loss" in record]


def test_the_page_s_codec_is_short_and_has_all_properties(home):
    module, check = snippets(PAGE)
    assert len(module.splitlines()) <= 32
    names: dict = {"__name__": "sparse"}
    exec(compile(module, "sparse.py", "exec"), names)
    exec(compile(check, PAGE.name, "exec"), names)
    assert compress.wire_bytes(names["TopK"](0.1), (4, 10, 10), "float32") == 40 * (4 + 4)


@pytest.mark.slow
def test_the_page_s_codec_trains_on_both_axes_and_continues_by_flags_alone(home):
    whole = train(home, "whole", 8)
    assert whole.returncode == 0, whole.stderr
    assert "gradients between stages  all: TopK(share=0.2)," in whole.stdout
    assert "gradients over data       all: TopK(share=0.1) of down, out, qkv, up" in whole.stdout
    assert "rank" not in whole.stdout.partition("gradients between")[2].partition("per device")[0].replace("ranks", "")
    found = losses(home, "whole")
    assert len(found) == 8
    assert found[-1] < found[0] - 0.2
    assert train(home, "parts", 4).returncode == 0
    again = train(home, "parts", 8)
    assert "resumed from step 4" in again.stdout, again.stderr
    assert losses(home, "parts") == found
    other = train(home, "parts", 9, "compress.backward.options.share=0.3")
    assert other.returncode == 2
    assert "codec is TopK(share=0.2) there and TopK(share=0.3) here" in other.stderr


def test_the_page_s_codec_is_planned_by_flags_alone(home):
    links = {"inside": {"alpha": 1e-6, "bandwidth": 3e11}, "between": {"alpha": 1e-6, "bandwidth": 1e9}}
    cluster(8, 1, links=links).save(home / "cluster.json")
    given = ["--model=gpt2_125m", "--cluster=cluster.json", "--out=runs/plan", "--nomemory_margin", "--oracle=no"]
    given += ["--global_batch=32", "--top=1", "--placed=1", "--gain=0", "--pipe=4", "--tensor=1"]
    codecs = [flag for flag in FLAGS if ".codec" in flag or ".options" in flag]
    command = [sys.executable, "-m", "planner.plan", *given, *(f"--model.{flag}" for flag in codecs)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{home}", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = plan.load(home / "runs" / "plan" / "plan.json").compress
    backward = found.backward
    assert (backward.messages, backward.codec, backward.options) == ("epilogue", "sparse:TopK", {"share": 0.2})
    assert found.data.codec == "sparse:TopK" and found.data.stages_of(4)
    assert "epiTopK+dataTopK" in run.stdout


@pytest.mark.slow
def test_the_page_s_codec_is_placed_on_the_frontier(home):
    sizes = [flag for flag in FLAGS if flag.startswith(("model", "batch", "run"))]
    options = [flag for flag in FLAGS if flag.startswith("compress.backward")]
    given = ["--frontier", "--codecs=sparse:TopK", "--steps=2", "--seeds=1", "--out=runs/frontier"]
    command = [sys.executable, "-m", "paxtrain.study", *given, *(f"--config.{flag}" for flag in (*sizes, *options))]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{home}", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    rows = list(csv.DictReader((home / "runs" / "frontier" / "frontier.csv").read_text().splitlines()))
    found = {(row["axis"], row["codec"]): float(row["bytes_share"]) for row in rows}
    assert found.keys() == {("between", "sparse:TopK (share=0.2)"), ("data", "sparse:TopK")}
    assert found["between", "sparse:TopK (share=0.2)"] == pytest.approx(0.2 * (4 + 4) / 4, rel=1e-2)
    assert 0.1 * (4 + 4) / 4 < found["data", "sparse:TopK"] < 1  # the embedding travels as it is
    assert all(abs(float(row["percent_above_dense"])) < 5 for row in rows)


def test_the_page_names_every_codec_of_the_library():
    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in (*named.NAMES, named.LOW_RANK))


def test_every_method_is_on_the_page_or_says_itself_what_it_returns():
    """The page lists a codec's methods, and refers to the docstrings of a reducer's."""
    text = PAGE.read_text()
    names = {
        kind: [name for name in vars(kind) if not name.startswith("_")] for kind in (compress.Codec, compress.Reducer)
    }
    assert not [name for name in names[compress.Codec] if f"`{name}" not in text]
    assert not [name for name in names[compress.Reducer] if not vars(compress.Reducer)[name].__doc__]
