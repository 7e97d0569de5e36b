"""Launch a run: python -m planner.launch slurm|kubernetes|local --config=configs/gpt_8b.py --plan=auto [...].

`slurm` and `kubernetes` print the job (a batch script, a JobSet) for you to read and submit. `local` runs it as
processes of this machine. Arguments after -- are flags of planner.run, such as overrides of the configuration.
"""

import pathlib
import sys
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import group, parse_flags, run
from paxtrain.files import find
from paxtrain.knobs import define, given
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
    return given(LaunchOptions, kind=kind, arguments=arguments)


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
    before = set(flags.FLAGS)
    define(LaunchOptions, "config", "plan", "out", "max_restarts")
    with group("SLURM and Kubernetes"):
        define(LaunchOptions, "name", "nodes", "gpus_per_node", "signal_ahead", "setup")
    with group("SLURM"):
        define(LaunchOptions, "min_nodes", "per_gpu", "time", "partition", "account", "sbatch")
    with group("Kubernetes"):
        define(LaunchOptions, "image", "volume", "mount", "rdma")
    with group("This machine"):
        define(LaunchOptions, "hosts", "cpu_devices")
    _own[:] = set(flags.FLAGS) - before


if __name__ == "__main__":
    run(main, define_flags)
