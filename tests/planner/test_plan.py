"""The main: a dry run writes a page and a plan that the trainer takes; bad input is one sentence and exit code 2."""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

from paxtrain.config import from_dict
from paxtrain.config import plan as plans
from tests import mains
from tests.planner.examples import cluster

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = ["--model=configs/gpt2_125m.py", "--nomemory_margin", "--oracle=no", "--global_batch=32"]


def planned(*arguments: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "planner.plan", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


@pytest.fixture
def cluster_file(tmp_path) -> pathlib.Path:
    path = tmp_path / "cluster.json"
    cluster(2, 4).save(path)
    return path


def test_a_dry_run_leaves_a_plan_and_a_page(cluster_file, tmp_path):
    out = tmp_path / "plan"
    flags = ("--explain", "--top=3", "--placed=1", "--sequence_parallel=both", "--png")
    run = planned(*MODEL, f"--cluster={cluster_file}", f"--out={out}", *flags)
    assert run.returncode == 0, run.stderr
    assert "sequence_parallel=" in run.stdout
    assert "step" in run.stdout and "not     " in run.stdout and str(out / "plan.json") in run.stdout
    plan = plans.load(out / "plan.json")
    assert sorted(plan.device_order) == list(range(8))
    assert plan.predicted["step_seconds"] >= plan.predicted["lower_bound_seconds"] > 0
    assert plan.predicted["memory_bytes"] <= plan.predicted["memory_limit_bytes"]
    seconds, low, high = (plan.predicted[f"step_seconds{name}"] for name in ("", "_low", "_high"))
    assert low < seconds < high and seconds == plan.predicted["expected_seconds"]
    assert 0.5 < plan.predicted["fits"] <= 1 and plan.predicted["trainer"] == "paxtrain"
    assert "assumes times assume paxtrain's constants" in run.stdout and "with 80%" in run.stdout
    for name in ("memory_source", "step_seconds_source"):
        assert plan.predicted[name]
    [(schedule, ideal)] = plan.predicted["ideal_step_seconds"].items()
    assert schedule == ("interleaved_1f1b" if plan.pipeline.virtual_stages > 1 else "1f1b") and ideal > 0
    from configs.gpt2_125m import get_config

    config = plan.apply(get_config())
    assert config.batch.global_batch == 32 and config.mesh.devices == 8
    assert from_dict(get_config()).model == config.model
    html = (out / "report.html").read_text()
    assert html.startswith("<!DOCTYPE html>") and "http" not in html.split("<body")[1].split("<script")[0]
    charts = set(re.findall(r'data-chart="(\w+)"', html))
    assert {path.stem for path in out.glob("*.png")} == charts >= {"step", "memory", "candidates", "links_before"}
    for path in out.glob("*.png"):
        assert path.read_bytes().startswith(b"\x89PNG")
        picture = matplotlib.image.imread(path)[..., :3]
        assert abs(picture.shape[1] - 2160) <= 2 and 200 < picture.shape[0] < 2160, path
        colored = np.ptp(picture, axis=-1) > 0.15  # without its data a chart has at most 0.5% of these
        assert 8e-3 < colored.mean() < 0.9, path


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_the_plan_and_the_report_name_the_model(tmp_path, monkeypatch, capsys):
    (tmp_path / "mine").mkdir()
    shape = json.loads((ROOT / "configs" / "models" / "Qwen3-8B" / "config.json").read_text())
    (tmp_path / "mine" / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": 4}))
    for model, name in (
        (tmp_path / "mine", "mine"),
        ("gpt2_125m", "gpt2_125m"),
        (ROOT / "configs" / "tiny.py", "tiny"),
    ):
        given = [
            f"--model={model}",
            "--devices=8",
            f"--out={tmp_path / 'plan'}",
            "--top=1",
            "--placed=1",
            "--oracle=no",
        ]
        assert mains.run(monkeypatch, mains.load("planner.plan"), *given) == 0
        assert capsys.readouterr().out.startswith(f"{name}: ")
        kept = json.loads((tmp_path / "plan" / "plan.json").read_text())["predicted"]["model"]
        assert kept["name"] == name and (kept["layers"] == 4 or name == "gpt2_125m")
        assert mains.run(monkeypatch, mains.load("planner.memory.__main__"), *given[:2]) == 0
        assert f"model   {name}, " in capsys.readouterr().out


def test_the_whole_ranking_as_json(cluster_file, tmp_path):
    flags = ("--json", "--top=4", "--placed=1", "--data=2,4", "--shard=none", "--compress=none")
    run = planned(*MODEL, f"--cluster={cluster_file}", f"--out={tmp_path / 'plan'}", *flags)
    assert run.returncode == 0, run.stderr
    searched, known = r"searching [\d,]+ candidates for 8 devices on 2 host\(s\)", "pricing the plans .*"
    assert re.fullmatch(rf"({searched}|{known}) \.\.\.\n", run.stderr)  # known if this machine has planned it before
    found = json.loads(run.stdout)
    assert len(found["ranked"]) == 4 and found["chosen"] == 0
    for row in found["ranked"]:
        assert row["data"] in (2, 4) and row["shard"] == "none"
        assert row["tokens_per_second"] == pytest.approx(32 * 1024 / row["step_seconds"])
        assert (
            found["bound_seconds"] <= row["placement_bound_seconds"] * (1 + 1e-9) and len(row["hosts"]) == row["data"]
        )
    plan = plans.load(tmp_path / "plan" / "plan.json")
    assert plan.predicted["step_seconds"] == found["ranked"][0]["step_seconds"]


def test_a_plan_for_the_hosts_that_are_left(tmp_path):
    file, out = tmp_path / "cluster.json", tmp_path / "plan"
    dataclasses.replace(cluster(3, 4), hosts=("a", "b", "c"), named=True).save(file)
    run = planned(
        *MODEL, f"--cluster={file}", "--without=b", f"--out={out}", "--top=1", "--placed=1", "--compress=none"
    )
    assert run.returncode == 0, run.stderr
    plan = plans.load(out / "plan.json")
    assert sorted(plan.hosts) == ["a", "c"] and sorted(plan.device_order) == list(range(8))


def test_one_stage_has_no_copies_of_the_embedding_to_synchronise(cluster_file, tmp_path):
    for pipe, embedding in ((1, "auto"), (2, "fused")):
        out = tmp_path / str(pipe)
        chosen = [f"--pipe={pipe}", "--model.compress.embedding.sync=fused", "--top=1", "--placed=1", "--compress=none"]
        run = planned(*MODEL, f"--cluster={cluster_file}", f"--out={out}", *chosen)
        assert run.returncode == 0, run.stderr
        assert plans.load(out / "plan.json").compress.embedding.sync == embedding


# What makes a place's codec send something.
REMAINDER = {
    "backward": [],
    "forward": ["--pipe=2"],
    "data": [],
    "weights": ["--shard=optimizer", "--data=2"],
    "outer": ["--model.outer.every=50"],
}


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # of ml_collections
def test_what_is_wrong_is_one_sentence_and_exit_code_2(cluster_file, tmp_path, monkeypatch, capfd, snapshot):
    broken = tmp_path / "broken.json"
    values = json.loads(cluster_file.read_text())
    values["links"]["bandwidth"][0][0][1] = -1
    broken.write_text(json.dumps(values))
    cluster_flag, plan = f"--cluster={cluster_file}", mains.load("planner.plan")
    cases = [
        ["--usable_memory=0.05", "--model.model.hidden=12288", "--pipe=1"],
        ["--global_batch=31", "--pipe=1", "--tensor=1"],
        [f"--global_batch={2**63 - 1}"],
        ["--compress=everything"],
        ["--schedules=zigzag"],
        ["--schedules=zb_h1", "--saves=inputs"],
        ["--trainer=deepspeed"],
        ["--trainer=megatron-lm", "--schedules=zb_h1"],
        ["--trainer=megatron-lm", "--compress=auto"],
        ["--trainer=torchtitan", "--model.compress.backward.codec=int8"],
        ["--data=8", "--what_if=one host less"],
        ["--tensor=two"],
        ["--sequence_parallel=maybe"],
        ["--model=configs/none.py"],
        ["--gain=nan"],
        ["--model.compress.factors=int8"],
        ["--model.compress.forward.messages=all", "--model.compress.forward.rank=1000", "--pipe=2"],
        ["--compress=all", "--backward_ranks=100000"],
        ["--compress=auto", "--data_ranks=100000"],
        *(
            [f"--model.compress.{place}.codec=remainder", f"--model.compress.{place}.options.rank=100001", *more]
            for place, more in REMAINDER.items()
        ),
        ["--compress=auto", "--probe=none.json"],
        ["--probe=none.json"],
        ["--loss_budget=0.01"],
        ["--model.compress.embedding.sync=fused", "--model.model.tied_head=False"],
        ["--model.optimizer.name=muon"],
        ["--model.mesh.pipe=2"],
        ["--model.mesh.shard=none"],
        ["--model.pipeline.pipe_layers=7,5"],
        ["--model.batch.data_micro_batches=4,4,2,2"],
        ["--model.pipeline.in_flight=6"],
        ["--model.compress.backward.messages=epilogue"],
        ["--model.compress.data.rank=64"],
        ["--model.pipeline.idle=skip"],
        ["--global_batch=32", "--model.batch.global_batch=64"],
        ["--hosts=1,2", "--tokens=inf"],
        ["--hosts=1,2", "--price=nan"],
        ["--hosts=000000001999999"],
        ["--data=none"],
        ["--model.foo=3"],
        ["--model.model.layer=3"],
        ["--layers=3"],
        ["--schedule=1f1b"],
        ["tiny"],
        ["--model.compress.foo=3"],
        ["--model.compress.backward.codec=int8", "--model.compress.backward.options.blok=3"],
        ["--constants_of=lab"],
        ["--model.batch.global_batch=-4"],
        ["--model.optimizer.muon_momentum=-inf"],
        ["--tensor_hosts=3"],
        ["--without=host0,pax3"],
        ["--model.outer.every=30"],
        ["--model.outer.every=50", "--model.outer.groups=3"],
        ["--groups=sites"],
        ["--without=host0,host1"],
    ]
    said = []
    for some, given in [([], []), ([f"--cluster={broken}"], []), *(([cluster_flag], given) for given in cases)]:
        assert mains.run(monkeypatch, plan, *MODEL, f"--out={tmp_path / 'plan'}", *some, *given) == 2, given
        printed = capfd.readouterr().err
        assert printed.startswith("error: ") and len(printed.strip().splitlines()) == 1, printed
        said += [" ".join(given) or "no flags", f"    {printed.removeprefix('error: ').strip()}"]
    assert not (tmp_path / "plan" / "plan.json").exists()
    snapshot("bad_plans.txt", "\n".join(said).replace(str(tmp_path), "FOLDER"))


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # ml_collections uses it
def test_a_value_on_which_no_plan_depends_is_a_note(monkeypatch, capfd, cluster_file):
    unused = "--model.optimizer.learning_rate=0.1", "--model.data.train=corpus", "--model.outer.momentum=0.5"
    ends = "--model.outer.every=50", f"--cluster={cluster_file}", "--without=host0,host1"
    assert mains.run(monkeypatch, mains.load("planner.plan"), *MODEL, *unused, *ends) == 2
    note, error = capfd.readouterr().err.splitlines()
    assert error.startswith("error: all 2 hosts are left out")
    keys, told = note.removeprefix("note: no plan depends on ").split("; ")
    assert set(keys.split(", ")) == {"optimizer.learning_rate", "data.train", "outer.momentum"}
    assert told == f"train with the same, such as --config.{keys.partition(',')[0]}"


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
@pytest.mark.parametrize("given", [f"data.prefetch={2**64}", "checkpoint.keep=-1", "run.steps=-1", "optimizer.beta2=5"])
def test_a_value_that_training_refuses_is_refused_before_the_search(monkeypatch, capfd, cluster_file, given):
    plan = mains.load("planner.plan")
    monkeypatch.setattr("planner.search.search.Search.run", lambda *_, **__: pytest.fail("it searches"))
    assert mains.run(monkeypatch, plan, *MODEL, f"--cluster={cluster_file}", f"--model.{given}") == 2
    error = capfd.readouterr().err
    assert error.startswith(f"error: {given.partition('=')[0]} ") and error.count("\n") == 1
