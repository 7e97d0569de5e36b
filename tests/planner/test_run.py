"""The job's main as processes: it plans for its nodes and trains, and says in one sentence what is wrong."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import types

import pytest

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config import plan as plans
from paxtrain.errors import UserError
from paxtrain.run import metrics
from planner import run
from planner.runs import trials
from planner.start import run_record
from planner.start.environment import FILE
from tests import mains, small
from tests.planner.ports import free_ports

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODEL = {"vocab_size": 257, "layers": 2, "hidden": 16, "heads": 2, "sequence": 16, "dtype": "float32"}
SETTINGS = {
    **{f"model.{name}": value for name, value in MODEL.items()},
    "batch.global_batch": 8,
    "pipeline.scan_layers": "on",  # a smaller program, which compiles faster
    "optimizer.warmup_steps": 1,
    "optimizer.schedule": "constant",
    "run.eval_every": 0,
    "run.eval_batches": 1,
    "run.sample_tokens": 0,
}
# Short measurements, because their accuracy is not tested here.
MAIN = """
from paxtrain import command_line
from planner import run
from planner.measure import compute_timing
compute_timing._LEAST = 0.01
command_line.run(run.main, run.define_flags)
"""
# The same, except that it does not train: it prints each host's place in the mesh, and ends after two steps at most.
MESH = """
import types
from paxtrain.profiling import terms
from paxtrain.run import training
from planner import run

class Run:
    def __init__(self, config, mesh, *_):
        self.mesh, self.done = mesh, config.run.steps <= 2
    def train(self, predicted, *_):
        print("mesh", [d.process_index for d in self.mesh.devices.flat], flush=True)
        seconds = [predicted["step_seconds"]] * 5 if predicted else []
        return types.SimpleNamespace(finished=self.done, comparison=terms.compare(predicted or {}, seconds, {}))

training.Run = Run
"""


@pytest.fixture(scope="module")
def settings(tmp_path_factory) -> list[str]:
    home = tmp_path_factory.mktemp("data")
    small.corpus(home, 5000)
    data = {f"data.{name}": home / "data" / name for name in ("train", "validation")}
    return ["--config=" + str(ROOT / "configs/tiny.py")] + [
        f"--config.{name}={value}" for name, value in {**SETTINGS, **data}.items()
    ]


def variables() -> dict[str, str]:
    """Return the variables of this process without those of a launcher."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "PMI_"))}
    kept |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "1"}
    return kept


def job(names: str, *arguments: str, script: str = MAIN, folders=(), limit: float = 150) -> list:
    """Run a process for each letter of `names`, which is its host's name; return (code, output, errors) of each."""
    [port] = free_ports(1)
    among = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={len(names)}", "--coordinator_timeout=60"]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, *arguments, *among, f"--process_id={i}", f"--host_name={name}"],
            cwd=folders[i] if folders else ROOT,
            env=variables(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for i, name in enumerate(names)
    ]
    try:
        said = [process.communicate(timeout=limit) for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    return [(process.returncode, *texts) for process, texts in zip(started, said)]


def codes(done) -> list[int]:
    assert all(code in (0, 2) for code, _, _ in done), "\n".join(said for _, _, said in done)
    return [code for code, _, _ in done]


def placed(done, names: str) -> list[str]:
    """Return the hosts of the mesh, which all processes must print alike."""
    [line] = {line for _, said, _ in done for line in said.splitlines() if line.startswith("mesh ")}
    return [names[i] for i in json.loads(line.removeprefix("mesh "))]


@pytest.mark.once
def test_a_job_measures_plans_and_trains_and_the_next_starts_know_what_it_did(settings, tmp_path):
    out = tmp_path / "run"
    quick = ["--profile_seconds=4", "--compute_hosts=1", "--micro_batch=1", "--compress=none"]
    arguments = [*settings, f"--out={out}", *quick]
    done = job("ab", *arguments, "--config.run.steps=2", "--pipe=2", script=MESH + MAIN)
    assert codes(done) == [0, 0], done[0][2]
    assert "  nodes       2 x 1 cpu: a, b" in done[0][1] and "made now, the first one of this run" in done[0][1]
    assert "nodes" not in done[1][1]  # only one process prints it
    plan = plans.load(out / "plan.json")
    assert sorted(plan.hosts) == ["a", "b"] and plan.mesh.pipe == 2
    assert placed(done, "ab") == [plan.hosts[i] for i in plan.device_order]
    assert json.loads((out / run.FINISHED).read_text()) == {"steps": 2}
    # With the nodes in another order, and more steps, the plan is taken again.
    done = job("ba", *arguments, "--config.run.steps=3", "--pipe=2", script=MESH + MAIN)
    assert codes(done) == [0, 0], done[0][2]
    assert "plan.json again: same nodes" in done[0][1]
    assert placed(done, "ba") == [plan.hosts[i] for i in plan.device_order]
    assert not (out / run.FINISHED).exists()
    first, second = json.loads((out / FILE).read_text())
    assert first["nodes"]["hosts"] == ["a", "b"] and second["nodes"]["hosts"] == ["b", "a"]
    assert first["plan"]["mesh"] == second["plan"]["mesh"] and second["config"]["run"]["steps"] == 3
    assert first["packages"]["jax"] and first["flags"]["micro_batch"] == ["1"]
    # One of them is gone. The profile of both still covers the other, which trains.
    done = job("b", *arguments, "--config.run.steps=4", "--config.profile=2:4")
    assert codes(done) == [0], done[0][2]
    # Its prediction is told beside what it measured, in the log, the metrics and the record.
    assert "s predicted, " in done[0][1] and "most off" in done[0][1]
    [told] = [record for record in metrics.read(out / metrics.FILE) if "predicted_step" in record]
    assert told["measured_backward"] > 0 and told["predicted_backward"] > 0
    rows = trials.read(out / run_record.TRIALS)
    assert [row.devices for row in rows] == [2, 2, 1]
    assert float(rows[2].columns["measured_step"]) == pytest.approx(told["measured_step"], rel=1e-5)
    assert "made anew: the former one is for other nodes: a of it is not here" in done[0][1]
    assert "which is of 2 hosts" in done[0][1]
    steps = [record["step"] for record in metrics.read(out / metrics.FILE) if "loss" in record]
    assert steps == [1, 2, 3, 4] and json.loads((out / run.FINISHED).read_text()) == {"steps": 4}
    assert not list(out.glob(".shared*"))


def given_plan(path: pathlib.Path, *hosts: str) -> None:
    """Stages lie on the hosts b, c, a, in whatever order these start."""
    pipeline = PipelineConfig(pipe_layers="1,1,2")
    mesh, batch = MeshConfig(pipe=3), BatchConfig(global_batch=8, micro_batch=1)
    plan = plans.Plan(mesh, pipeline, batch, CompressConfig(), hosts, 1, (1, 2, 0))
    plans.save(plan, path)


@pytest.mark.slow
def test_nodes_in_another_order_give_the_same_placement(settings, tmp_path):
    given_plan(tmp_path / "plan.json", "a", "b", "c")
    # A plan that fits is taken, even if the planner could not make one and was asked to where none fits.
    other = ["--config.model.layers=4", "--replan", "--config.optimizer.name=muon"]
    arguments = [*settings, *other, f"--plan={tmp_path / 'plan.json'}", f"--out={tmp_path / 'run'}"]
    done = job("cab", *arguments, script=MESH + MAIN)
    assert codes(done) == [0, 0, 0], done[0][2]
    assert placed(done, "cab") == ["b", "c", "a"]


@pytest.mark.once
def test_a_plan_of_other_nodes_is_refused(settings, tmp_path):
    given_plan(tmp_path / "plan.json", "a", "b", "x")
    arguments = [*settings, f"--plan={tmp_path / 'plan.json'}", f"--out={tmp_path / 'run'}"]
    reason = "is not for these nodes: c is not in it, and b, x of it are not here"
    sentence = f"error: the plan {tmp_path / 'plan.json'} {reason}; start on its nodes, or plan anew with --replan"
    for code, _, said in job("ac", *arguments, "--config.model.layers=4"):
        assert code == 2
        assert said.splitlines()[0] == sentence


@pytest.mark.slow
def test_instead_of_a_plan_of_other_nodes_one_is_made_if_it_may(settings, tmp_path):
    """With --replan the job plans as without a plan, and says why."""
    given_plan(tmp_path / "plan.json", "a", "b", "x")
    arguments = [*settings, f"--plan={tmp_path / 'plan.json'}", f"--out={tmp_path / 'run'}"]
    quick = ["--replan", "--profile_seconds=2", "--micro_batch=1", "--compress=none"]
    [(code, said, wrong)] = job("a", *arguments, *quick, script=MESH + MAIN)
    assert code == 0, wrong
    assert f"made anew (--replan): {tmp_path / 'plan.json'} is not for these nodes: b, x of it are not here" in said
    [(code, _, wrong)] = job("a", *arguments, "--replan", "--config.optimizer.name=muon")
    assert code == 2 and "optimizer.name=muon is not planned for" in wrong


@pytest.mark.once
def test_a_folder_that_the_nodes_do_not_share(settings, tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    done = job("ab", *settings, "--out=run", "--answer_timeout=600", folders=folders)  # within the job's limit
    for code, _, said in done:
        assert code == 2
        assert said.startswith("error: --out=run is not the same folder on all nodes: what a writes there is not ")
        assert "seen on b; name a folder on a file system that they share" in said


def test_one_process_without_its_gpus_ends_all_of_them(settings, tmp_path):
    script = "import sys\nif '--process_id=1' in sys.argv: sys.argv.append('--gpus=8')\n" + MAIN
    # Within the job's limit, nobody waits for an answer.
    done = job("ab", *settings, f"--out={tmp_path / 'run'}", "--answer_timeout=600", script=script)
    for code, _, said in done:
        assert code == 2 and "error: jax finds no GPU on b, but --gpus=8 asks for 8; install " in said, said
    assert not (tmp_path / "run").exists()


@pytest.mark.once
def test_bad_input_that_needs_the_others_is_one_sentence_and_exit_code_2(settings, tmp_path):
    """These are found once the processes have met.

    Each job has one process and a folder of its own, since the first job in a folder locks it. All jobs run at once.
    """
    cases = {
        "--config.data.train=/no/such/data": "/no/such/data",
        "--plan=/no/such/plan.json": "cannot read the plan /no/such/plan.json",
        "--out=/proc/run": "cannot write to /proc/run",
        "--gpus=8": "jax finds no GPU on ",
        "--coordinator=nowhere": "--num_processes, --process_id missing; ",
    }
    command = [sys.executable, "-m", "planner.run", *settings]
    started = {}
    try:
        for folder, (case, words) in enumerate(cases.items()):
            among = [] if "missing" in words else ["--num_processes=1"]
            started[words] = subprocess.Popen(
                [*command, f"--out={tmp_path / str(folder)}", *among, case],
                cwd=ROOT,
                env=variables(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
        said = {words: process.communicate(timeout=100)[1] for words, process in started.items()}
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    for words, process in started.items():
        assert process.returncode == 2 and said[words].startswith("error: ") and words in said[words], said[words]
        assert len(said[words].splitlines()) == 1, said[words]


def test_a_record_that_cannot_be_written_costs_no_training(tmp_path, monkeypatch, capsys):
    def record(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(run_record, "record", record)
    run._record_times(tmp_path, None, None, None, None)
    said = capsys.readouterr().out
    assert said.startswith("the times of this start are not in ") and "Permission denied" in said
    monkeypatch.setattr(run_record, "record", lambda *_: "2 groups train apart")
    run._record_times(tmp_path, None, None, None, None)
    assert capsys.readouterr().out.endswith("trials.csv: 2 groups train apart\n")
    monkeypatch.setattr(run_record, "record", lambda *_: "")
    run._record_times(tmp_path, None, None, None, None)
    assert capsys.readouterr().out == ""


@pytest.fixture
def main(monkeypatch):
    """Run the main in this process, and return its exit code. It must end before it joins other processes."""

    def run_it(*arguments: str) -> int | str | None:
        return mains.run(monkeypatch, run, f"--config={ROOT / 'configs/tiny.py'}", *arguments)

    monkeypatch.setattr(run.launchers, "is_launched", lambda _: False)
    monkeypatch.setattr(run.distributed, "initialize", lambda *_: pytest.fail("joined the others"))
    return run_it


@pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")  # ml_collections uses it
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            [],
            "nothing says which processes take part: there are neither flags nor variables of SLURM, MPI, torchrun or ",
        ),
        (["--num_processes=1", "--tensor=two"], "--tensor must be positive integers"),
        (["--num_processes=1", "--schedules=zigzag"], "--schedules must be some of"),
        (["--num_processes=1", "--profile_seconds=nan"], "--profile_seconds must be a number of seconds, got nan"),
        (["--num_processes=1", "--config.compress.factors=int8"], "compress.factors=int8 is not planned for"),
        (["--num_processes=1", "--config.model.layers=0"], "model.layers must be positive"),
        (["--num_processes=1", "run"], "unexpected argument 'run'"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(main, capsys, arguments, words):
    assert main(*arguments) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ") and words in said and len(said.splitlines()) == 1, said


def test_a_launcher_may_start_one_process_alone(monkeypatch):
    given = types.SimpleNamespace(coordinator=None, num_processes=None, process_id=None, coordinator_timeout=9.0)
    monkeypatch.setattr(run.flags, "FLAGS", given)
    assert run._launch({"SLURM_PROCID": "0"}) == (None, None, None, 9.0)
    with pytest.raises(UserError):
        run._launch({})
    given.num_processes = 1
    assert run._launch({}) == (None, 1, None, 9.0)
