"""Launch a run: python -m planner.launch slurm|kubernetes|local --config=configs/gpt_8b.py --plan=auto [...].

`slurm` and `kubernetes` print the job (a batch script, a JobSet) for you to read and submit. `local` runs it as
processes of this machine. Arguments after -- are flags of planner.run, such as overrides of the configuration.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import group, parse_flags, run
from paxtrain.config.shipped import find
from planner import run as planner_run
from planner.jobs import launching
from planner.jobs.job import Job
from planner.jobs.launching import LaunchOptions
from planner.jobs.local import Local

_own: list[str] = []  # names of this main's flags


def _options(argv: Sequence[str]) -> LaunchOptions:
    """Return the options that the command line gives."""
    f = flags.FLAGS
    kind, arguments = argv[1] if len(argv) > 1 else "", tuple(argv[2:])
    launching.check_kind(kind, arguments, {name for name in f if f[name].present})
    return LaunchOptions(
        kind=kind,
        arguments=arguments,
        config=f.config,
        plan=f.plan,
        out=f.out or "",
        max_restarts=f.max_restarts,
        link_timeout=f.link_timeout,
        name=f.name,
        nodes=f.nodes,
        gpus_per_node=f.gpus_per_node,
        signal_ahead=f.signal_ahead,
        setup=tuple(f.setup),
        min_nodes=f.min_nodes,
        per_gpu=f.per_gpu,
        time=f.time,
        partition=f.partition,
        account=f.account,
        sbatch=tuple(f.sbatch),
        image=f.image,
        volume=f.volume,
        mount=f.mount,
        rdma=tuple(f.rdma),
        hosts=f.hosts,
        cpu_devices=f.cpu_devices,
    )


def _check_run(job: Job, kind: str) -> None:
    """Parse planner.run's arguments as the job will, so that what it would refuse is refused now.

    A container image may have other configurations than this machine; of those only the flags are parsed.

    Raises:
        UserError: planner.run would refuse an argument.
    """
    arguments = job.run()[2:]
    elsewhere = kind == "kubernetes" and not pathlib.Path(find(job.config.partition(":")[0])).is_file()
    if elsewhere:
        arguments = [each for each in arguments if not each.startswith(("--config=", "--plan="))]
    for name in _own:  # the flags of this main, whose values are no longer needed
        delattr(flags.FLAGS, name)
    parse_flags(["planner.run", *arguments], planner_run.define_flags)
    if not elsewhere:
        planner_run.given()


def main(argv: Sequence[str]) -> None:
    """Print the job, or run it on this machine."""
    options = _options(argv)
    job = launching.job_of(options)
    text = launching.text(options, job)
    _check_run(job, options.kind)
    if options.kind == "local":
        sys.exit(Local(job, options.cpu_devices).run())
    print(text, end="")


def define_flags() -> None:
    """Define the flags of this main."""
    f, before = flags, set(flags.FLAGS)
    f.DEFINE_string("config", None, "Configuration: a path, or the name of a shipped one; overrides of it follow --.")
    f.DEFINE_string("plan", "auto", "Path of a plan.json; auto: plan for the nodes that the job gets.")
    f.DEFINE_string("out", None, "Folder of the run, shared by all nodes; default: runs/job, or run in --mount.")
    f.DEFINE_integer("max_restarts", 10, "Largest number of restarts after faults.", 0, 1_000_000)
    f.DEFINE_float(
        "link_timeout",
        60.0,
        "Seconds for which a link or a host may be silent before it counts as lost.",
        lower_bound=1,
    )
    with group("SLURM and Kubernetes"):
        f.DEFINE_string("name", "paxtrain", "Name of the job.")
        f.DEFINE_integer("nodes", None, "Number of nodes that the job asks for.", 1, 16_384)
        f.DEFINE_integer("gpus_per_node", 8, "Number of GPUs of each node; 0: train on CPUs.", 0, 1024)
        f.DEFINE_integer(
            "signal_ahead", 300, "Seconds from SIGTERM to the end of the job, for a last checkpoint.", 1, 65_535
        )
        f.DEFINE_multi_string(
            "setup", [], "Shell line before all others, such as one that enters an environment; repeatable."
        )
    with group("SLURM"):
        f.DEFINE_integer("min_nodes", None, "Smallest number of nodes; default: all of --nodes.", 1, 16_384)
        f.DEFINE_bool("per_gpu", False, "One process per GPU; default: one per node, with all its GPUs.")
        f.DEFINE_string("time", "", "Time limit in SLURM's notation; default: the partition's.")
        f.DEFINE_string("partition", "", "SLURM partition.")
        f.DEFINE_string("account", "", "SLURM account.")
        f.DEFINE_multi_string("sbatch", [], "Further option of sbatch, such as --sbatch=--qos=high; repeatable.")
    with group("Kubernetes"):
        f.DEFINE_string("image", "", "Container image, such as one built from the Dockerfile.")
        f.DEFINE_string("volume", "paxtrain", "Persistent volume claim that holds --out; all pods write to it.")
        f.DEFINE_string("mount", "/data", "Path of the volume in the pods.")
        f.DEFINE_multi_string(
            "rdma",
            [],
            "Resource that gives a pod its RDMA devices, such as rdma/hca=8; repeatable. Without, NCCL uses TCP.",
        )
    with group("This machine"):
        f.DEFINE_integer("hosts", 4, "Number of hosts, each a process of this machine.", 1, 1024)
        f.DEFINE_integer("cpu_devices", 1, "Number of virtual CPU devices of each host.", 1, 1024)
    _own[:] = set(flags.FLAGS) - before


if __name__ == "__main__":
    run(main, define_flags)
