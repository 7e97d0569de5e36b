"""Names that shells, sbatch, YAML and Kubernetes could misread: each arrives as it was given, or is refused.

The batch script runs in bash over stand-ins for SLURM's commands, the pod's command in sh. Had a name been read as a
command, there would be a file of the name CANARY.
"""

import dataclasses
import json
import pathlib
import random
import re
import shutil
import subprocess
import sys

import pytest
import yaml

from paxtrain import command_line
from paxtrain.errors import UserError
from planner.jobs import launching
from planner.jobs.launching import LaunchOptions
from tests.planner.jobs.generated import POD_SPEC, Batch, as_kubernetes_expands, assert_valid, at

ROOT = pathlib.Path(__file__).resolve().parents[3]
CANARY = "canary"
COMMAND = f"touch {CANARY}"
# Of each kind of misreading one name or two.
NAMES = [
    "a b",
    " a",
    "'",
    '"',
    "a'b\"c",
    f"a;{COMMAND}",
    f"$({COMMAND})",
    f"`{COMMAND}`",
    f"a && {COMMAND}",
    f"a | {COMMAND}",
    f"a > {CANARY}",
    f"a\n{COMMAND}",
    f"a'; {COMMAND}; '",
    f'"$({COMMAND})"',
    f"$$({COMMAND})",
    f"a\r\n{COMMAND}",
    "$HOME",
    "${IFS}",
    "$(NODE_NAME)",
    "$$$x$",
    "$$",
    f"a[$({COMMAND})]",
    "-rf",
    "--out=x",
    "- a",
    "*",
    "[a-z]",
    "~",
    "a #b",
    "!!",
    "{a,b}",
    "\\",
    "a\\",
    "%s%n",
    "a\tb",
    "{out}",
    "é",
    "\x1b[31m",
    "- a: b",
    "&a",
    "*a",
    "|",
    "!!python/object:os.system",
    "true",
    "1e3",
    "",
    "x" * 200,
    f"\u2028{COMMAND}",
    f"a\x85{COMMAND}",
    "EOF\n)\n",
    "\ufeff",
]
DEFAULTS = LaunchOptions(
    kind="slurm",
    arguments=(),
    config=str(ROOT / "configs/tiny.py"),
    plan="auto",
    out="",
    max_restarts=2,
    name="job",
    nodes=4,
    gpus_per_node=8,
    signal_ahead=300,
    setup=(),
    min_nodes=None,
    per_gpu=False,
    time="",
    partition="",
    account="",
    sbatch=(),
    image="",
    volume="claim",
    mount="/data",
    rdma=(),
    hosts=4,
    cpu_devices=1,
)


def launched(kind, **changes):
    """Return a job's text, or None if it is refused in one sentence that can be printed."""
    needed = {"image": "registry/paxtrain:1"} if kind == "kubernetes" else {}
    options = dataclasses.replace(DEFAULTS, kind=kind, **(needed | changes))
    try:
        return launching.text(options, launching.job_of(options))
    except UserError as error:
        assert str(error) and all(c.isprintable() for c in command_line.sentence(error))
        return None


def started(folder, text):
    """Return the arguments of srun when the script runs, which reads no name as a command."""
    batch = Batch(folder)
    batch.script.write_text(text)
    assert subprocess.run(["bash", "-n", str(batch.script)], capture_output=True, check=False).returncode == 0
    code, said = batch.run("0")
    assert code == 0, said
    assert not list(folder.rglob(CANARY)) and not (ROOT / CANARY).exists()
    [given] = batch.given
    return given


def in_pod(folder, manifest):
    """Return the arguments of `python` when a pod's command runs, which reads no name as a command."""
    [container] = at(manifest, *POD_SPEC)["containers"]
    (folder / "bin").mkdir()
    say = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    (folder / "bin" / "python").write_text(f"#!{sys.executable}\n{say}")
    (folder / "bin" / "python").chmod(0o755)
    for name in ("sh", "bash", "touch"):
        (folder / "bin" / name).symlink_to(shutil.which(name))
    given = {"JOB_COMPLETION_INDEX": "3", "NODE_NAME": "gpu-17", "PATH": str(folder / "bin"), "HOME": "/root"}
    command = [*container["command"], *(as_kubernetes_expands(text, given) for text in container["args"])]
    done = subprocess.run(command, env=given, cwd=folder, capture_output=True, text=True, check=True)
    assert not list(folder.rglob(CANARY))
    return json.loads(done.stdout)


def file_of(folder, name):
    """Return the path of a file whose name ends with a name; what follows a colon is the configuration's argument."""
    path = folder / f"a{name}.py"
    real = pathlib.Path(str(path).partition(":")[0])
    real.parent.mkdir(exist_ok=True)
    real.touch()
    return str(path)


def ends(given, wanted):
    """Return how often an argument is given."""
    return sum(argument == wanted for argument in given)


ARGUMENTS = tuple(f"--rack={name}" for name in NAMES)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:40])
def test_paths_arrive_in_a_batch_job(tmp_path, name):
    config, out = file_of(tmp_path, name), str(tmp_path / "in" / name)
    text = launched("slurm", config=config, out=out)
    if text is None:  # it would break a line of a script that people read
        assert not name.isprintable()
        return
    given = started(tmp_path, text)
    assert (ends(given, f"--config={config}"), ends(given, f"--out={out}")) == (1, 1), given


def test_flags_arrive_in_a_batch_job(tmp_path):
    given = started(tmp_path, launched("slurm", out=str(tmp_path / "run"), arguments=ARGUMENTS))
    assert given[-len(ARGUMENTS) :] == list(ARGUMENTS)


@pytest.mark.parametrize("name", NAMES, ids=lambda name: repr(name)[:40])
def test_paths_arrive_in_a_pod(tmp_path, name):
    config, out = f"/configs/{name}.py", f"/data/{name}"
    text = launched("kubernetes", config=config, out=out)
    if text is None:
        assert not name.isprintable()
        return
    manifest = yaml.safe_load(text)
    assert_valid(manifest)
    given = in_pod(tmp_path, manifest)
    assert (ends(given, f"--config={config}"), ends(given, f"--out={out}")) == (1, 1), given


def test_flags_arrive_in_a_pod(tmp_path):
    manifest = yaml.safe_load(launched("kubernetes", arguments=ARGUMENTS))
    assert_valid(manifest)
    given = in_pod(tmp_path, manifest)
    begin = given.index(ARGUMENTS[0])
    assert given[begin : begin + len(ARGUMENTS)] == list(ARGUMENTS)


@pytest.mark.parametrize("flag", ["name", "partition", "account", "sbatch"])
def test_options_of_sbatch_stay_in_their_lines(tmp_path, flag):
    accepted = 0

    def of(name):
        value = (f"--comment={name}",) if flag == "sbatch" else name
        return launched("slurm", out=str(tmp_path / "run"), **{flag: value})

    like = of("x").splitlines()
    for number, name in enumerate(NAMES):
        text = of(name)
        if text is None:
            continue
        accepted += 1
        lines = text.splitlines()
        empty = name == "" and flag in ("partition", "account")  # the default, without a line
        assert len(lines) == len(like) - empty
        options = [line for line in lines if line.startswith("#SBATCH ")]
        assert len(options) == sum(line.startswith("#SBATCH ") for line in like) - empty
        assert [x for x in lines if x not in options] == [x for x in like if not x.startswith("#SBATCH ")]
        if flag != "sbatch":
            assert all(len(option.split()) == 2 for option in options), options
        elif CANARY in name:
            folder = tmp_path / str(number)
            folder.mkdir()
            started(folder, text)
    assert accepted >= 2


# --- What Kubernetes takes --------------------------------------------------------------------------------------------

# By the API's documentation, https://kubernetes.io/docs/concepts/overview/working-with-objects/names/ and
# .../reference/kubernetes-api/common-definitions/quantity/, and github.com/distribution/reference.
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = rf"{_LABEL}(\.{_LABEL})*"
_QUALIFIED = r"([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]"
_DOMAIN = r"([a-zA-Z0-9]|[a-zA-Z0-9][-a-zA-Z0-9]*[a-zA-Z0-9])"
_PATH = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_REFERENCE = rf"({_DOMAIN}(\.{_DOMAIN})*(:[0-9]+)?/)?{_PATH}(/{_PATH})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
_QUANTITY = r"[0-9]+(\.[0-9]*)?([KMGTPE]i|[mkMGTPE]|[eE][-+]?[0-9]+)?"


def matches(pattern, text, most):
    return re.fullmatch(pattern, text, re.ASCII) is not None and len(text) <= most


def assert_accepted(manifest):
    """Require what the API server and the kubelet check of names, quantities, paths and images."""
    assert_valid(manifest)
    name, pod = manifest["metadata"]["name"], at(manifest, *POD_SPEC)
    [container] = pod["containers"]
    assert matches(_SUBDOMAIN, name, 253)
    workers = at(manifest, "spec", "replicatedJobs", 0, "name")
    assert matches(_LABEL, f"{name}-{workers}-0-16383-abcde", 63)  # the longest pod's name is also a host's
    assert matches(_REFERENCE, container["image"], 4096)
    for volume in pod["volumes"]:
        assert matches(_LABEL, volume["name"], 63)
        if claim := volume.get("persistentVolumeClaim"):
            assert matches(_SUBDOMAIN, claim["claimName"], 253)
    for mount in container["volumeMounts"]:
        path = mount["mountPath"]
        assert path.startswith("/") and ":" not in path and ".." not in path.split("/")
    for entry in container["env"]:
        assert matches(r"[-._a-zA-Z][-._a-zA-Z0-9]*", entry["name"], 1000)
    for resource, amount in container.get("resources", {}).get("limits", {}).items():
        domain, slash, own = resource.rpartition("/")
        assert (not slash or matches(_SUBDOMAIN, domain, 253)) and matches(_QUALIFIED, own, 63), resource
        assert matches(_QUANTITY, amount, 100)
        assert re.fullmatch("[0-9]+", amount) and int(amount) < 2**63  # extended resources are whole


def made_up():
    """Return names that are almost right."""
    draw, alphabet = random.Random(0), "aB0-_./:@=$ é\n"
    right = ["registry/paxtrain:1", "a/b=8", "claim", "tiny", "/data", "docker.io/a/b@sha256:" + "0" * 64, "a.b/c=2"]
    for _ in range(250):
        text = draw.choice(right)
        for _ in range(draw.randrange(1, 4)):
            at = draw.randrange(len(text) + 1)
            text = text[:at] + draw.choice(alphabet) + text[at + draw.randrange(2) :]
        yield text


@pytest.mark.parametrize("flag", ["name", "image", "volume", "mount", "rdma"])
def test_what_is_accepted_the_api_takes(flag):
    accepted = 0
    for name in [*NAMES, *made_up(), "a--b", "1a", "a-", "a..b", "a/b=0", "a/b=" + "9" * 30, "a/" + "b" * 64, "x" * 41]:
        more = {"out": f"{name}/run"} if flag == "mount" else {}
        text = launched("kubernetes", **more, **{flag: (name,) if flag == "rdma" else name})
        if text is not None:
            accepted += 1
            assert_accepted(yaml.safe_load(text))
    assert accepted > 5
