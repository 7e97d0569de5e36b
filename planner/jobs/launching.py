"""Options of a launch, their checks, and the job that they describe."""

import dataclasses
import pathlib
import re
from collections.abc import Collection

from paxtrain.errors import UserError, whole
from paxtrain.files import find
from paxtrain.knobs import knob
from planner.jobs import jobset, slurm
from planner.jobs.job import Job, seconds

KINDS = ("slurm", "kubernetes", "local")
# Options that only some kinds of launch know.
_ONLY = {
    **dict.fromkeys(("time", "partition", "account", "sbatch"), ("slurm",)),
    **dict.fromkeys(("image", "volume", "mount", "rdma"), ("kubernetes",)),
    **dict.fromkeys(("hosts", "cpu_devices"), ("local",)),
    **dict.fromkeys(("nodes", "gpus_per_node", "signal_ahead", "setup", "name"), ("slurm", "kubernetes")),
    **dict.fromkeys(("min_nodes", "per_gpu"), ("slurm",)),
}
# As Kubernetes and the image's registry take them.
_DOMAIN = r"[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?(\.[a-zA-Z0-9]([-a-zA-Z0-9]*[a-zA-Z0-9])?)*"
_PART = r"[a-z0-9]+((\.|__?|-+)[a-z0-9]+)*"
_IMAGE = rf"({_DOMAIN}(:[0-9]{{1,5}})?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@sha256:[0-9a-f]{{64}})?"
_CLAIM = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
_RESOURCE = rf"{_CLAIM}/[A-Za-z0-9]([-\w.]{{0,61}}[A-Za-z0-9])?"
_UNLIMITED = ("0", "UNLIMITED", "INFINITE")  # SLURM's words for a job without a time limit


@dataclasses.dataclass(frozen=True)
class LaunchOptions:
    """Options of planner.launch, in the words of its flags.

    Attributes:
        kind: one of `KINDS`.
        arguments: further flags of planner.run.
        config: configuration: a path, or the name of a shipped one; overrides of it follow --.
        plan: path of a plan.json; auto: plan for the nodes that the job gets.
        out: folder of the run, shared by all nodes; default: runs/job, or run in --mount.
        max_restarts: largest number of restarts after faults.
        name: name of the job.
        nodes: number of nodes that the job asks for.
        gpus_per_node: number of GPUs of each node; 0: train on CPUs.
        signal_ahead: seconds from SIGTERM to the end of the job, for a last checkpoint.
        setup: shell line before all others, such as one that enters an environment; repeatable.
        min_nodes: smallest number of nodes; default: all of --nodes.
        per_gpu: one process per GPU; default: one per node, with all its GPUs.
        time: time limit in SLURM's notation; default: the partition's.
        partition: SLURM partition.
        account: SLURM account.
        sbatch: further option of sbatch, such as --sbatch=--qos=high; repeatable.
        image: container image, such as one built from the Dockerfile.
        volume: persistent volume claim that holds --out; all pods write to it.
        mount: path of the volume in the pods.
        rdma: resource that gives a pod its RDMA devices, such as rdma/hca=8; repeatable. Without, NCCL uses TCP.
        hosts: number of hosts of a local run, each a process of this machine.
        cpu_devices: number of virtual CPU devices of each host of a local run.
    """

    kind: str
    arguments: tuple[str, ...]
    config: str | None = knob(None)
    plan: str = knob("auto")
    out: str = knob("")
    max_restarts: int = knob(10, least=0, most=1_000_000)
    name: str = knob("paxtrain")
    nodes: int | None = knob(None, least=1, most=16_384)
    gpus_per_node: int = knob(8, least=0, most=1024)
    signal_ahead: int = knob(300, least=1, most=65_535)
    setup: tuple[str, ...] = knob((), repeat=True)
    min_nodes: int | None = knob(None, least=1, most=16_384)
    per_gpu: bool = knob(False)
    time: str = knob("")
    partition: str = knob("")
    account: str = knob("")
    sbatch: tuple[str, ...] = knob((), repeat=True)
    image: str = knob("")
    volume: str = knob("paxtrain")
    mount: str = knob("/data")
    rdma: tuple[str, ...] = knob((), repeat=True)
    hosts: int = knob(4, least=1, most=1024)
    cpu_devices: int = knob(1, least=1, most=1024)


def check_kind(kind: str, arguments: tuple[str, ...], given: Collection[str]) -> None:
    """Check what is launched, planner.run's arguments, and that every given option belongs to this kind.

    Args:
        kind: first argument of the command, or "".
        arguments: other arguments of the command, which are flags of planner.run.
        given: names of the options that the user gave.

    Raises:
        UserError: if one of them does not fit.
    """
    if kind not in KINDS:
        said = f"got {kind!r}" if kind else "got none"
        raise UserError(f"the first argument must be {', '.join(KINDS[:-1])} or {KINDS[-1]}, {said}")
    for name, kinds in _ONLY.items():
        if name in given and kind not in kinds:
            pods = kind == "kubernetes" and name == "min_nodes"
            instead = "; a JobSet has as many pods as --nodes says" if pods else ""
            raise UserError(f"--{name} is for {' and '.join(kinds)}, not for {kind}{instead}")
    for argument in arguments:
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; what follows -- are flags of planner.run, --flag=value")
        if argument.split("=")[0] in ("--config", "--plan", "--out"):
            raise UserError(f"{argument} comes before the --, where the job's other files are named as well")
        if argument.split("=")[0] == "--config.run.out":
            raise UserError(f"{argument} would give way to the job's folder; name that before the --, with --out")


def job_of(options: LaunchOptions) -> Job:
    """Return the job that the options describe.

    Raises:
        UserError: if options are missing or do not fit each other.
    """
    o = options
    for flag in ("config", "plan", "out", "mount"):
        if not (getattr(o, flag) or "").isprintable():
            raise UserError(f"--{flag} must be a path without line breaks and the like, got {getattr(o, flag)!r}")
    if not all(line.isprintable() or line.replace("\t", "").isprintable() for line in o.setup):
        raise UserError(f"--setup must be one shell line each, got {o.setup!r}; repeat it for more")
    if not o.config:
        raise UserError("--config is missing; name a file such as configs/tiny.py")
    nodes = o.hosts if o.kind == "local" else o.nodes
    if nodes is None:
        raise UserError("--nodes is missing; say how many nodes the job asks for")
    least = o.min_nodes or nodes
    if least > nodes:
        raise UserError(f"--min_nodes={least} is above --nodes={nodes}; it may be at most as many")
    if o.per_gpu and not o.gpus_per_node:
        raise UserError("--per_gpu needs --gpus_per_node of at least 1")
    if o.kind != "kubernetes":  # a container image may have other files than this machine
        _check_file("config", find(o.config.partition(":")[0]), o.config)
        if o.plan != "auto":
            _check_file("plan", o.plan, o.plan)
    return Job(
        config=o.config,
        plan=o.plan,
        out=o.out or (f"{o.mount}/run" if o.kind == "kubernetes" else "runs/job"),
        nodes=nodes,
        min_nodes=least,
        gpus_per_node=0 if o.kind == "local" else o.gpus_per_node,
        per_gpu=o.per_gpu,
        max_restarts=o.max_restarts,
        signal_ahead=o.signal_ahead,
        arguments=o.arguments,
    )


def _check_file(flag: str, path: str, given: str) -> None:
    if path and not pathlib.Path(path).is_file():
        file = given.partition(":")[0] if flag == "config" else given
        raise UserError(f"there is no file --{flag}={file}; it is looked for from the folder where you launch")


def slurm_script(options: LaunchOptions, job: Job) -> str:
    """Return the batch script of a job.

    Raises:
        UserError: if an option of SLURM is not valid.
    """
    o = options
    for flag, value in (("name", o.name), ("partition", o.partition), ("account", o.account)):
        # They are part of #SBATCH lines, which sbatch splits at blanks; the name is also part of the log's name.
        if not re.fullmatch(r"[\w.,+@=-]*" if flag != "name" else r"\w[\w.-]*", value, re.ASCII):
            raise UserError(f"--{flag} must be one word, of letters, digits, '.', '_' and '-', got {value!r}")
    if o.time and o.time.upper() not in _UNLIMITED:
        limit = seconds(o.time)
        if limit is None:
            raise UserError(
                f"--time must be as SLURM writes it, as 90 (minutes), 12:00:00 or 2-00:00:00, got {o.time!r}"
            )
        if limit <= job.signal_ahead:
            raise UserError(
                f"--time={o.time} leaves nothing beside --signal_ahead={job.signal_ahead}; "
                "a checkpoint is written so long before the time limit"
            )
    for option in o.sbatch:
        if not option.startswith("-") or not option.isprintable():
            raise UserError(f"--sbatch must be one option of sbatch, as --sbatch=--qos=high, got {option!r}")
    return slurm.script(job, slurm.SlurmOptions(o.name, o.time, o.partition, o.account, o.sbatch, o.setup))


def jobset_manifest(options: LaunchOptions, job: Job) -> str:
    """Return the JobSet of a job as YAML.

    Raises:
        UserError: if an option of Kubernetes is missing or not valid.
    """
    o = options
    if not o.image:
        raise UserError("--image is missing; name the container image that has paxtrain in it, REGISTRY/NAME:TAG")
    out, mount = pathlib.PurePosixPath(job.out), pathlib.PurePosixPath(o.mount)
    if not mount.is_absolute() or mount not in (out, *out.parents):
        raise UserError(f"--out={job.out} must lie in the volume, below --mount={o.mount}; say --out={mount / 'run'}")
    if not re.fullmatch(_IMAGE, o.image, re.ASCII) or len(o.image) > 500:
        raise UserError(f"--image must be REGISTRY/NAME:TAG or NAME@sha256:DIGEST, got {o.image!r}")
    if not re.fullmatch(_CLAIM, o.volume, re.ASCII) or len(o.volume) > 253:
        raise UserError(
            f"--volume must be the name of a claim, of a-z, 0-9, - and ., got {o.volume!r}; kubectl get pvc lists them"
        )
    if ":" in o.mount or ".." in mount.parts:
        raise UserError(f"--mount must be an absolute path without ':' and '..', such as /data, got {o.mount!r}")
    if not jobset.is_name(o.name):
        raise UserError(f"--name must be at most 40 of a-z, 0-9 and -, beginning with a letter, got {o.name!r}")
    rdma = {}
    for resource in o.rdma:
        name, _, count = resource.partition("=")
        if not re.fullmatch(_RESOURCE, name, re.ASCII) or len(name) > 253 or not whole(count or "1"):
            raise UserError(
                f"--rdma must be a resource of the nodes, DOMAIN/NAME or DOMAIN/NAME=COUNT, got {resource!r}"
            )
        rdma[name] = int(count or 1)
    return jobset.text(job, jobset.JobSetOptions(o.name, o.image, o.volume, o.mount, o.setup, rdma))


def text(options: LaunchOptions, job: Job) -> str:
    """Return the job of a cluster as the scheduler takes it; "" for a local one.

    Raises:
        UserError: if an option of the scheduler is missing or not valid.
    """
    if options.kind == "local":
        return ""
    return {"slurm": slurm_script, "kubernetes": jobset_manifest}[options.kind](options, job)
