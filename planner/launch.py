"""Launches a run: python -m planner.launch slurm|kubernetes|local --config=configs/gpt_8b.py --plan=auto [...].

`slurm` and `kubernetes` print the job (a batch script, a JobSet), to be read and then submitted; `local` runs it as
processes of this machine. What follows -- are flags of planner.run: overrides of the configuration, what is searched.
"""

import math
import pathlib
import re
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.errors import UserError, run
from planner.jobs import job as jobs
from planner.jobs import jobset, slurm
from planner.jobs.job import Job
from planner.jobs.local import Local

# Flags that some kinds of launch alone know.
_ONLY = {
    **dict.fromkeys(("time", "partition", "account", "sbatch"), ("slurm",)),
    **dict.fromkeys(("image", "volume", "mount"), ("kubernetes",)),
    **dict.fromkeys(("hosts", "cpu_devices"), ("local",)),
    **dict.fromkeys(("nodes", "gpus_per_node", "signal_ahead", "setup", "name"), ("slurm", "kubernetes")),
    **dict.fromkeys(("min_nodes", "per_gpu"), ("slurm",)),
}
_KINDS = ("slurm", "kubernetes", "local")
_UNLIMITED = ("0", "UNLIMITED", "INFINITE")  # as SLURM writes a job without a time limit


def _kind(argv: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    """What is launched, and planner.run's arguments."""
    f, kind = flags.FLAGS, argv[1] if len(argv) > 1 else ""
    if kind not in _KINDS:
        said = f"got {kind!r}" if kind else "got none"
        raise UserError(f"the first argument must be {', '.join(_KINDS[:-1])} or {_KINDS[-1]}, {said}")
    for name, kinds in _ONLY.items():
        if f[name].present and kind not in kinds:
            instead = {"min_nodes": "; a JobSet has as many pods as --nodes says"} if kind == "kubernetes" else {}
            raise UserError(f"--{name} is for {' and '.join(kinds)}, not for {kind}{instead.get(name, '')}")
    for argument in argv[2:]:
        if not argument.startswith("--"):
            raise UserError(f"unexpected argument {argument!r}; what follows -- are flags of planner.run, --flag=value")
        if argument.split("=")[0] in ("--config", "--plan", "--out"):
            raise UserError(f"{argument} comes before the --, where the job's other files are named as well")
    return kind, tuple(argv[2:])


def _job(kind: str, arguments: tuple[str, ...]) -> Job:
    """The job that the flags describe.

    Raises:
        UserError: flags are missing, or do not fit each other.
    """
    f = flags.FLAGS
    if not f.config:
        raise UserError("--config is missing; name a file such as configs/tiny.py")
    nodes = f.hosts if kind == "local" else f.nodes
    if nodes is None:
        raise UserError("--nodes is missing; say how many nodes the job asks for")
    least = f.min_nodes or nodes
    if least > nodes:
        raise UserError(f"--min_nodes={least} is above --nodes={nodes}; it may be at most as many")
    if not math.isfinite(f.link_timeout):
        raise UserError(f"--link_timeout must be a number of seconds, got {f.link_timeout}")
    if f.per_gpu and not f.gpus_per_node:
        raise UserError("--per_gpu needs --gpus_per_node of at least 1")
    # In the image of a container there may be other files than here.
    for name, path in (("config", f.config.partition(":")[0]), ("plan", "" if f.plan == "auto" else f.plan)):
        if kind != "kubernetes" and path and not pathlib.Path(path).is_file():
            raise UserError(f"there is no file --{name}={path}; it is looked for from the folder where you launch")
    return Job(
        config=f.config,
        plan=f.plan,
        out=f.out or (f"{f.mount}/run" if kind == "kubernetes" else "runs/job"),
        nodes=nodes,
        min_nodes=least,
        gpus_per_node=0 if kind == "local" else f.gpus_per_node,
        per_gpu=f.per_gpu,
        max_restarts=f.max_restarts,
        signal_ahead=f.signal_ahead,
        link_timeout=f.link_timeout,
        arguments=arguments,
    )


def _slurm(job: Job) -> str:
    f = flags.FLAGS
    for name, value in (("name", f.name), ("partition", f.partition), ("account", f.account)):
        # They stand in #SBATCH lines, which sbatch splits at blanks, and the name also in that of the job's log.
        if not re.fullmatch(r"[\w.,+@=-]*" if name != "name" else r"\w[\w.-]*", value, re.ASCII):
            raise UserError(f"--{name} must be one word, of letters, digits, '.', '_' and '-', got {value!r}")
    if f.time and f.time.upper() not in _UNLIMITED:
        limit = jobs.seconds(f.time)
        if limit is None:
            raise UserError(
                f"--time must be as SLURM writes it, as 90 (minutes), 12:00:00 or 2-00:00:00, got {f.time!r}"
            )
        if limit <= job.signal_ahead:
            raise UserError(
                f"--time={f.time} leaves nothing beside --signal_ahead={job.signal_ahead}; "
                "a checkpoint is written so long before the time limit"
            )
    for option in f.sbatch:
        if not option.startswith("-"):
            raise UserError(f"--sbatch must be an option of sbatch, as --sbatch=--qos=high, got {option!r}")
    own = slurm.Slurm(f.name, f.time, f.partition, f.account, tuple(f.sbatch), tuple(f.setup))
    return slurm.script(job, own)


def _kubernetes(job: Job) -> str:
    f = flags.FLAGS
    if not f.image:
        raise UserError("--image is missing; name the container image that has paxtrain in it, REGISTRY/NAME:TAG")
    out, mount = pathlib.PurePosixPath(job.out), pathlib.PurePosixPath(f.mount)
    if not mount.is_absolute() or mount not in (out, *out.parents):
        raise UserError(f"--out={job.out} must lie in the volume, below --mount={f.mount}; say --out={mount / 'run'}")
    if not jobset.is_name(f.name):
        raise UserError(f"--name must be at most 40 of a-z, 0-9 and -, beginning with a letter, got {f.name!r}")
    return jobset.text(job, jobset.Kubernetes(f.name, f.image, f.volume, f.mount, tuple(f.setup)))


def main(argv: Sequence[str]) -> None:
    """Prints the job, or runs it here."""
    kind, arguments = _kind(argv)
    job = _job(kind, arguments)
    if kind == "local":
        sys.exit(Local(job, flags.FLAGS.cpu_devices).run())
    print({"slurm": _slurm, "kubernetes": _kubernetes}[kind](job), end="")


def define_flags() -> None:
    """Defines this main's flags."""
    f = flags
    f.DEFINE_string("config", None, "The configuration file; overrides of it follow --.")
    f.DEFINE_string("plan", "auto", "A plan.json; auto: one is made for the nodes that the job gets.")
    f.DEFINE_string("out", None, "The run's folder, which all nodes share; default: runs/job, or run in --mount.")
    f.DEFINE_integer("max_restarts", 10, "After faults, so often at most.", lower_bound=0)
    f.DEFINE_float("link_timeout", 60.0, "Seconds for which a link or a host may be silent.", lower_bound=1)
    # SLURM and Kubernetes.
    f.DEFINE_string("name", "paxtrain", "The job's name.")
    f.DEFINE_integer("nodes", None, "Nodes that the job asks for.", lower_bound=1)
    f.DEFINE_integer("gpus_per_node", 8, "GPUs of each; 0: it trains on CPUs.", lower_bound=0)
    f.DEFINE_integer("signal_ahead", 300, "What a last checkpoint may take, from SIGTERM to the end.", 1, 65_535)
    f.DEFINE_multi_string("setup", [], "A shell line before all else, as to enter an environment; may be repeated.")
    # SLURM.
    f.DEFINE_integer("min_nodes", None, "With how many it makes do; default: all of --nodes.", lower_bound=1)
    f.DEFINE_bool("per_gpu", False, "One process per GPU; default: one per node, with all its GPUs.")
    f.DEFINE_string("time", "", "Time limit as SLURM writes it; default: the partition's.")
    f.DEFINE_string("partition", "", "SLURM's partition.")
    f.DEFINE_string("account", "", "SLURM's account.")
    f.DEFINE_multi_string("sbatch", [], "A further option of sbatch, as --sbatch=--qos=high; may be repeated.")
    # Kubernetes.
    f.DEFINE_string("image", "", "The container image.")
    f.DEFINE_string("volume", "paxtrain", "The persistent volume claim that holds --out; all pods write to it.")
    f.DEFINE_string("mount", "/data", "Where the pods see it.")
    # This machine.
    f.DEFINE_integer("hosts", 4, "Hosts, each a process of this machine.", lower_bound=1)
    f.DEFINE_integer("cpu_devices", 1, "Virtual CPU devices of each.", lower_bound=1)


if __name__ == "__main__":
    run(main, define_flags)
