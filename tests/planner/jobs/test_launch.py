"""The jobs that planner.launch writes. The batch script runs here in bash, over stand-ins for SLURM's commands."""

import dataclasses
import json
import pathlib
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import yaml

from paxtrain.config import BatchConfig, CompressConfig, MeshConfig, PipelineConfig
from paxtrain.config import plan as plans
from paxtrain.process.progress import FAULT, STOPPED
from planner import launch as main
from planner.jobs import job as jobs
from planner.jobs import jobset, slurm
from tests import mains
from tests.planner.jobs.generated import (
    JOB,
    JOB_SPEC,
    POD_SPEC,
    Batch,
    as_kubernetes_expands,
    assert_valid,
    at,
)

ROOT = pathlib.Path(__file__).resolve().parents[3]
ODD = "a b'c\"$HOME`id`"
# ml_collections loads configuration files with it.
pytestmark = pytest.mark.filterwarnings("ignore:the load_module:DeprecationWarning")
POD = jobset.JobSetOptions("tiny", "registry/paxtrain:1", "claim")


# --- SLURM ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def batch(tmp_path):
    return Batch(tmp_path)


def test_the_script_starts_a_run_on_every_node(tmp_path):
    job = dataclasses.replace(JOB, arguments=(f"--config.data.train={ODD}", "--compress=none"))
    batch = Batch(tmp_path, job)
    code, said = batch.run("finished")
    assert code == 0 and said.splitlines()[-1].endswith(" finished") and batch.requeued == 0
    [given] = batch.given
    srun, run = given[: given.index("python")], given[given.index("python") :]
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} <= set(srun)
    assert run[:3] == ["python", "-m", "planner.run"]
    assert {"--plan=auto", f"--out={batch.job.out}", f"--config.data.train={ODD}", "--compress=none"} <= set(run)


def test_setup_comes_before_all_else(tmp_path):
    """Setup lines may read variables that are not set, and set variables that the script uses too."""
    batch = Batch(tmp_path, own=slurm.SlurmOptions(setup=("echo entered$UNSET", "out=/elsewhere restarts=0")))
    code, said = batch.run("1")
    assert code == 0 and "entered\n" in said and "fault 1 of 2; the job is requeued" in said
    assert f"--out={batch.job.out}" in batch.given[0] and (tmp_path / "run" / "faults.7").exists()


@pytest.mark.parametrize("gpus, per_gpu, wanted", [(8, False, 8), (8, True, 1), (0, False, 0)])
def test_a_process_is_told_how_many_gpus_it_must_find(tmp_path, gpus, per_gpu, wanted):
    job = dataclasses.replace(JOB, gpus_per_node=gpus, per_gpu=per_gpu)
    batch = Batch(tmp_path, job)
    batch.script.write_text(batch.script.read_text().replace("step &", 'echo "platforms=${JAX_PLATFORMS-any}"\nstep &'))
    code, said = batch.run("0", JAX_PLATFORMS="cuda,cpu")
    assert code == 0 and f"--gpus={wanted}" in batch.given[0]
    assert f"platforms={'cuda,cpu' if gpus else 'cpu'}\n" in said
    container = at(jobset.manifest(job, POD), *POD_SPEC)["containers"][0]
    assert ({"name": "JAX_PLATFORMS", "value": "cpu"} in container["env"]) == (gpus == 0)


def test_on_fewer_nodes_a_plan_from_a_file_is_made_anew():
    fewer = dataclasses.replace(JOB, plan="plan.json")
    assert "--replan" in fewer.run()
    assert "--replan" not in dataclasses.replace(fewer, min_nodes=4).run()
    assert "--replan" not in JOB.run()  # --plan=auto plans anew in any case


def test_one_process_per_gpu(tmp_path):
    batch = Batch(tmp_path, dataclasses.replace(JOB, per_gpu=True))
    assert batch.run("0")[0] == 0
    assert {"--ntasks=24", "--ntasks-per-node=8", "--distribution=block"} <= set(batch.given[0])


def test_a_fault_is_tried_again_and_only_so_often(batch):
    sentence = "error: process 1 on n2: another process has ended or hangs, after step 9"
    for start in (1, 2):
        code, said = batch.run("1,137,1", SAYS=sentence)
        assert code == 0 and f"fault {start} of 2; the job is requeued" in said and batch.requeued == start
        assert said.count(sentence) == 1  # it came on stdout and on stderr, as from two nodes
    code, said = batch.run("1,137,1")
    assert code == FAULT and batch.requeued == 2 and "--max_restarts" in said


def test_bad_input_is_not_tried_again(batch):
    code, said = batch.run("2", SAYS="error: no such file")
    assert code == 2 and batch.requeued == 0 and "error: no such file" in said
    assert "bad input with 3 of 4 nodes; if only so few do not fit, sbatch it again for more" in said
    code, said = batch.run("2,2", SLURM_JOB_NUM_NODES="4")
    assert code == 2 and "to start again would not help" in said and " of 4 nodes" not in said


@pytest.mark.parametrize("content", ["a[$(touch canary)]", "$(touch canary)", "`touch canary`", "1;touch canary", "08"])
def test_the_count_of_faults_is_a_number_and_no_program(batch, tmp_path, content):
    """bash's arithmetic runs commands that are in a variable's subscript."""
    out, canary = pathlib.Path(batch.job.out), tmp_path / "canary"
    out.mkdir()
    (out / "faults.7").write_text(content.replace("canary", str(canary)) + "\n")
    code, said = batch.run("1")
    first = 9 if content == "08" else 1
    assert (f"the last of {first} faults" if content == "08" else f"fault {first} of 2") in said
    assert code == (FAULT if content == "08" else 0) and not canary.exists()
    hostile = shlex.quote(f"a[$(touch {canary})]")
    subprocess.run(["bash", "-c", f"faults={hostile}; echo $((faults + 1))"], capture_output=True, check=False)
    assert canary.exists()  # the control


def test_where_faults_cannot_be_counted_it_ends(batch):
    (pathlib.Path(batch.job.out) / "faults.7").mkdir(parents=True)
    code, said = batch.run("1")
    assert code == FAULT and batch.requeued == 0 and "cannot write" in said


def test_stopped_by_the_user_it_stays_so_and_preempted_it_comes_back(batch):
    code, said = batch.run("0,0")
    assert code == 0 and batch.requeued == 0 and "scontrol requeue 7 (within minutes) or sbatch continues" in said
    code, said = batch.run("0,0", PREEMPTED="2026-01-02T03:04:05")
    assert code == 0 and batch.requeued == 1 and "preempted" in said


def test_ahead_of_the_time_limit_the_step_is_stopped_and_the_job_requeued(batch):
    popen = batch.start("wait")
    until = time.monotonic() + 20
    while not (batch.folder / "srun").exists() and time.monotonic() < until:
        time.sleep(0.02)
    popen.send_signal(signal.SIGUSR1)
    said, _ = popen.communicate(timeout=30)
    assert popen.returncode == 0 and batch.requeued == 1 and "ahead of the time limit" in said
    assert "scancel --signal=TERM 7" in (batch.folder / "asked").read_text()
    assert not list(pathlib.Path(batch.job.out).iterdir())  # it counts as no fault


def test_options_of_sbatch():
    own = slurm.SlurmOptions("gpt", "2-00:00:00", "big", "me", ("--qos=high", "--exclude=n9"), ("source env/activate",))
    lines = slurm.script(dataclasses.replace(JOB, signal_ahead=600), own).splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    wanted = {
        "--nodes=2-4",
        "--gpus-per-node=8",
        "--time=2-00:00:00",
        "--partition=big",
        "--account=me",
        "--requeue",
        "--qos=high",
        "--exclude=n9",
        "--signal=B:USR1@600",
        "--open-mode=append",
    }
    assert wanted <= set(options)
    assert not [option for option in options if "ntasks" in option]  # SLURM would give two nodes, though four are idle
    # SLURM reads no option behind the first command.
    commands = [number for number, line in enumerate(lines) if line and not line.startswith("#")]
    assert max(number for number, line in enumerate(lines) if line.startswith("#SBATCH")) < commands[0]
    assert lines.index("source env/activate") < lines.index("step &")
    on_cpus = slurm.script(dataclasses.replace(JOB, gpus_per_node=0, min_nodes=4), own)
    assert "--nodes=4\n" in on_cpus and "--gpus-per-node" not in on_cpus and "NCCL" not in on_cpus


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="shellcheck is not installed")
@pytest.mark.parametrize("gpus", [0, 8])
def test_shellcheck_finds_nothing(tmp_path, gpus):
    job = dataclasses.replace(JOB, out="a run", gpus_per_node=gpus, per_gpu=gpus > 0, arguments=("--saves=a b",))
    file = tmp_path / "job.sbatch"
    file.write_text(slurm.script(job, slurm.SlurmOptions()))
    found = subprocess.run(["shellcheck", str(file)], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
    file.write_text(file.read_text() + "echo $out\n")  # a control: unquoted
    assert subprocess.run(["shellcheck", str(file)], capture_output=True, check=False).returncode == 1


@pytest.mark.parametrize(
    "time, seconds",
    [
        ("90", 5400),
        ("1:30", 90),
        ("12:00:00", 43_200),
        ("2-00:00:00", 172_800),
        ("1-2", 93_600),
        ("1-2:30", 95_400),
        ("soon", None),
        ("1h", None),
        ("", None),
        ("1:2:3:4", None),
        ("9" * 5000, None),
        ("\u0661\u0662", None),
    ],
)
def test_times_as_slurm_writes_them(time, seconds):
    assert jobs.seconds(time) == seconds


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def test_the_manifest_is_a_jobset():
    manifest = yaml.safe_load(jobset.text(dataclasses.replace(JOB, out="/data/run"), POD))
    assert_valid(manifest)
    spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = spec["template"]["spec"]
    assert spec["parallelism"] == spec["completions"] == 4 and spec["completionMode"] == "Indexed"
    assert manifest["spec"]["failurePolicy"]["maxRestarts"] == 2
    assert pod["terminationGracePeriodSeconds"] == JOB.signal_ahead
    [container] = pod["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == {"out": "/data", "shared-memory": "/dev/shm"}
    [apart] = pod["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart["topologyKey"] == "kubernetes.io/hostname"
    assert apart["labelSelector"] == {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": "tiny"}}


def test_rdma_resources_are_named_or_said_to_be_missing():
    without = jobset.text(JOB, POD)
    assert "so NCCL will use TCP between nodes" in without.split("apiVersion")[0]
    text = jobset.text(JOB, dataclasses.replace(POD, rdma={"rdma/hca": 8}))
    assert "TCP" not in text.split("apiVersion")[0]
    manifest = yaml.safe_load(text)
    assert_valid(manifest)
    [container] = at(manifest, *POD_SPEC)["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/hca": "8"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert "TCP" not in jobset.text(dataclasses.replace(JOB, nodes=1), POD).split("apiVersion")[0]


@pytest.mark.parametrize(
    "where, key, value",
    [
        (("spec",), "failurepolicy", {"maxRestarts": 1}),
        (("spec", "failurePolicy"), "restartStrategy", "Again"),
        (("spec", "failurePolicy", "rules", 0), "action", "GiveUp"),
        (JOB_SPEC, "completions", "4"),
        ((*JOB_SPEC, "podFailurePolicy", "rules", 0, "onExitCodes"), "values", ["two"]),
        (POD_SPEC, "containers", {}),
        ((*POD_SPEC, "affinity"), "podAntiAfinity", {}),
    ],
)
def test_a_broken_manifest_is_refused(where, key, value):
    manifest = yaml.safe_load(jobset.text(JOB, POD))
    assert_valid(manifest)
    at(manifest, *where)[key] = value
    with pytest.raises((ValueError, AssertionError, TypeError)):
        assert_valid(manifest)


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_what_a_pod_runs(tmp_path, shell):
    """Its command runs in an image with and without bash, with a `python` that prints its arguments."""
    dollars = "--names=$(NODE_NAME) $$(NODE_NAME) $$$x$"
    job = dataclasses.replace(JOB, out="/data/run", arguments=(f"--saves={ODD}", dollars))
    (tmp_path / "enter").write_text("export FROM_SETUP=1$UNSET\n")
    pod = dataclasses.replace(POD, setup=(f"{'source' if shell == 'bash' else '.'} {tmp_path}/enter",))
    manifest = yaml.safe_load(jobset.text(job, pod))
    [container] = at(manifest, *POD_SPEC)["containers"]
    say = "import json, os, sys\nassert os.environ['FROM_SETUP'] == '1'\nprint(json.dumps(sys.argv[1:]))\n"
    (tmp_path / "python").write_text(f"#!{sys.executable}\n{say}")
    (tmp_path / "python").chmod(0o755)
    for name in {"sh", shell}:
        (tmp_path / name).symlink_to(shutil.which(name))
    given = {"JOB_COMPLETION_INDEX": "3", "NODE_NAME": "gpu-17", "PATH": str(tmp_path)}
    command = [*container["command"], *(as_kubernetes_expands(text, given) for text in container["args"])]
    done = subprocess.run(command, env=given, capture_output=True, text=True, check=True)
    said = json.loads(done.stdout)
    assert said[:2] == ["-m", "planner.run"]
    assert {"--coordinator=tiny-node-0-0.tiny:9101", "--num_processes=4", "--process_id=3"} <= set(said)
    assert {"--host_name=gpu-17", "--out=/data/run", f"--saves={ODD}", dollars} <= set(said)
    timeout = f"--coordinator_timeout={jobset.START_TIMEOUT}"
    assert {timeout, f"--stopped_code={STOPPED}"} <= set(said) and jobset.START_TIMEOUT > 3600  # images are large


# --- Bad input --------------------------------------------------------------------------------------------------------

_SLURM = ("slurm", "--config=configs/tiny.py", "--nodes=4")
_PODS = ("kubernetes", "--config=configs/tiny.py", "--nodes=4", "--image=registry/paxtrain:1")


@pytest.fixture
def launch(monkeypatch, capsys):
    """Run the main inside this process, and return its exit code, stdout and stderr."""
    monkeypatch.chdir(ROOT)
    return lambda *arguments: (mains.run(monkeypatch, main, *arguments), *capsys.readouterr())


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ((), "the first argument must be slurm, kubernetes or local, got none"),
        (("pbs",), "got 'pbs'"),
        (("slurm", "--nodes=4"), "--config is missing"),
        (("slurm", "--config=configs/tiny.py"), "--nodes is missing"),
        (("slurm", "--config=configs/none.py", "--nodes=4"), "there is no file --config=configs/none.py"),
        ((*_SLURM, "--plan=none.json"), "there is no file --plan=none.json"),
        ((*_SLURM, "--plan=README.md"), "cannot read the plan README.md"),
        ((*_PODS, "--plan=README.md"), "cannot read the plan README.md"),
        (("local", "--config=configs/tiny.py", "--plan=README.md"), "cannot read the plan README.md"),
        ((*_SLURM, "--min_nodes=5"), "--min_nodes=5 is above --nodes=4"),
        ((*_SLURM, "--image=x"), "--image is for kubernetes, not for slurm"),
        ((*_SLURM, "--time=soon"), "--time must be as SLURM writes it"),
        ((*_SLURM, "--time=5"), "leaves nothing beside --signal_ahead=300"),
        ((*_SLURM, "--", "--lost_timeout=inf"), "lost_timeout"),
        ((*_SLURM, "--name=gpt 8b"), "--name must be one word"),
        ((*_SLURM, "--name=team/gpt"), "--name must be one word"),
        ((*_SLURM, "--partition=big --hold"), "--partition must be one word"),
        ((*_SLURM, "--sbatch=qos=high"), "--sbatch must be one option of sbatch"),
        ((*_SLURM, "--sbatch=--qos=high\n#SBATCH --uid=root"), "--sbatch must be one option of sbatch"),
        ((*_SLURM, "--nodes=1000000"), "nodes"),
        ((*_SLURM, "--", "--no_such_flag=1"), "no_such_flag"),
        ((*_SLURM, "--", "--compress=foo"), "'foo'"),
        ((*_SLURM, "--", "--profile_seconds=nan"), "--profile_seconds must be a number of seconds"),
        ((*_SLURM, "--", "--config.model.hiden=64"), "unknown configuration key model.hiden"),
        ((*_SLURM, "--", "--config.model.hidden=x"), "model.hidden"),
        (("local", "--config=configs/tiny.py", "--", "--gpus=many"), "gpus"),
        ((*_SLURM, "--gpus_per_node=0", "--per_gpu"), "--per_gpu needs --gpus_per_node"),
        ((*_SLURM, "extra"), "unexpected argument 'extra'"),
        ((*_SLURM, "--", "--out=elsewhere"), "--out=elsewhere comes before the --"),
        ((*_SLURM, "--", "--config.run.out=elsewhere"), "name that before the --, with --out"),
        ((*_PODS[:-1],), "--image is missing"),
        ((*_PODS, "--out=run"), "--out=run must lie in the volume"),
        ((*_PODS, "--rdma=hca"), "--rdma must be a resource of the nodes"),
        ((*_PODS, "--rdma=rdma/hca=none"), "--rdma must be a resource of the nodes"),
        ((*_SLURM, "--rdma=rdma/hca=8"), "--rdma is for kubernetes, not for slurm"),
        ((*_PODS, "--min_nodes=2"), "--min_nodes is for slurm, not for kubernetes"),
        ((*_PODS, "--name=My_Job"), "--name must be"),
        ((*_PODS, "--image=a b"), "--image must be REGISTRY/NAME:TAG"),
        ((*_PODS, "--image=$(x)"), "--image must be REGISTRY/NAME:TAG"),
        ((*_PODS, "--volume="), "--volume must be the name of a claim"),
        ((*_PODS, "--volume=A_B"), "--volume must be the name of a claim"),
        ((*_PODS, "--mount=/da:ta", "--out=/da:ta/run"), "--mount must be an absolute path"),
        ((*_PODS, "--", "--compress=foo"), "'foo'"),
        (("local", "--config=configs/tiny.py", "--nodes=4"), "--nodes is for slurm and kubernetes, not for local"),
    ],
)
def test_bad_input_is_one_sentence(launch, arguments, sentence):
    code, out, said = launch(*arguments)
    assert code == 2 and out == "" and said.count("\n") == 1 and said.startswith("error: ") and sentence in said


@pytest.mark.parametrize("config", ["gpt_8b", "configs/gpt_8b.py"])
def test_names_of_shipped_configurations_and_paths_are_passed_on_unchanged(launch, config):
    """planner.run finds a shipped file by its name on the nodes, where the folder may be another one."""
    slurm_command = [argument for argument in _SLURM if not argument.startswith("--config")]
    pods_command = [argument for argument in _PODS if not argument.startswith("--config")]
    for command in (slurm_command, pods_command):
        code, out, _ = launch(*command, f"--config={config}")
        assert code == 0 and f"--config={config} " in out.replace("\n", " ")
    code, _, said = launch(*slurm_command, "--config=gpt_8bb")
    assert code == 2 and "there is no shipped file 'gpt_8bb'; did you mean gpt_8b" in said


def test_a_plan_must_fit_the_configuration_before_the_job_is_printed(launch, tmp_path):
    path = tmp_path / "plan.json"
    plans.save(plans.Plan(MeshConfig(pipe=2), PipelineConfig(), BatchConfig(), CompressConfig()), path)
    assert launch(*_SLURM, f"--plan={path}", "--", "--config.model.layers=4")[0] == 0
    code, out, said = launch(*_SLURM, f"--plan={path}", "--", "--config.model.layers=1")
    assert (code, out, said.count("\n")) == (2, "", 1) and "layers" in said
    # The nodes of the job may be others than the plan's, for which the job then plans anew.
    assert launch(*_SLURM, f"--plan={path}", "--", "--config.model.layers=1", "--replan")[0] == 0


def test_what_the_readme_says_works(launch):
    code, out, said = launch(*_SLURM, "--gpus_per_node=8", "--plan=auto", "--out=run/", "--", "--config.run.steps=90")
    assert (code, said) == (0, "") and out.startswith("#!/bin/bash\n") and "--config.run.steps=90" in out
    assert subprocess.run(["bash", "-n"], input=out, text=True, check=False).returncode == 0
    assert launch(*_SLURM, "--time=0")[0] == launch(*_SLURM, "--time=UNLIMITED", "--partition=a,b")[0] == 0
    code, out, said = launch(*_PODS, "--plan=auto")
    assert (code, said) == (0, "")
    assert_valid(yaml.safe_load(out))
