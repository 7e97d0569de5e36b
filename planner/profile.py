"""Measures the cluster it runs on and writes the planner's cluster file; start it as training is started.

    srun python -m planner.profile --out=cluster.json --config=configs/gpt_8b.py

The model of --config says whose compute is measured.
"""

import math
import pathlib
from collections.abc import Sequence

import jax
from absl import flags

from paxtrain import flags as shared_flags
from paxtrain import tables
from paxtrain.config import from_dict
from paxtrain.errors import OVERRIDES, UserError, run
from paxtrain.process import distributed
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.cost import compute
from planner.measure import compute_timing, profile_cluster
from planner.measure.profile_cluster import MIB, Options
from planner.measure.process_group import Meeting
from planner.start import rendezvous

HINT = OVERRIDES


def _describe(cluster: Cluster) -> list[tuple[str, str]]:
    said = [("cluster", f"{len(cluster.hosts)} hosts x {cluster.devices_per_host} devices, {cluster.nics} NIC(s)")]
    between = clusters.between(cluster)
    ways = {"links between hosts": between, "inside hosts": ~between}
    for name, where in ways.items():
        if where.any() and (name != "inside hosts" or cluster.devices_per_host > 1):
            b, a = cluster.bandwidth[where], cluster.alpha[where]
            said.append((name, f"{tables.size(b.min(), 'B/s')} to {tables.size(b.max(), 'B/s')}, "
                               f"{a.min() * 1e6:.0f} to {a.max() * 1e6:.0f} us"))  # fmt: skip
    for row in cluster.compute:
        kinds = (kind for kind in (*compute_timing.KINDS, *compute.PARTS) if kind in row)
        times = ", ".join(f"{kind} {row[kind] * 1e3:.3g} ms" for kind in kinds)
        said.append((f"{row['kind']}, tensor={row['tensor']}, micro_batch={row['micro_batch']}",
                     f"{times}, optimizer {row['optimizer'] * 1e9:.3g} ns per parameter"))  # fmt: skip
    return said


def define_flags() -> None:
    """Defines this main's flags."""
    default = Options()
    flags.DEFINE_string("out", "cluster.json", "Where the cluster file goes; links of many hosts beside it.")
    flags.DEFINE_string("name", "cluster", "The cluster's name.")
    flags.DEFINE_list(
        "sizes", [f"{size // MIB}" for size in default.sizes], "MiB of the messages; less than 1 suits slow links."
    )
    flags.DEFINE_integer("repeats", default.repeats, "Samples of every link and compute time.", lower_bound=1)
    flags.DEFINE_integer("rounds", default.rounds, "Rounds of pairs of hosts; beyond, a sample.", lower_bound=1)
    flags.DEFINE_list("micro_batches", [str(b) for b in default.micro_batches], "Sequences per micro-batch.")
    flags.DEFINE_bool("links_only", False, "Leave the compute unmeasured: the planner then goes by the data sheet.")
    profile_cluster.define_flags()
    flags.DEFINE_list("tensor", [], "Tensor sizes; default: all that divide the devices of a host and the model.")
    flags.DEFINE_float("time_limit", None, "Seconds for all of it; what is measured by then is kept.", lower_bound=1)
    flags.DEFINE_integer("cpu_devices", 1, "Virtual CPU devices per process.", lower_bound=1)
    flags.DEFINE_float("answer_timeout", 60, "Seconds after which a silent process is lost.", lower_bound=1)
    distributed.define_flags()
    shared_flags.define_config("config", "tiny", "The model to measure: a file, or the name of one in configs/.")


def _positive(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    if not all(value.strip().isdecimal() and int(value) > 0 for value in values):
        raise UserError(f"--{flag} must be positive integers joined by commas, got {','.join(values)!r}")
    return tuple(sorted({int(value) for value in values}))


def _sizes(values: Sequence[str]) -> tuple[int, ...]:
    """Bytes, whole float32 numbers, rising.

    Raises:
        UserError: something else than positive numbers of MiB, or one below a kilobyte.
    """
    try:
        sizes = sorted({round(float(value) * MIB / 4) * 4 for value in values})
    except (ValueError, OverflowError):
        sizes = [0]
    if sizes and not 1024 <= sizes[0] <= sizes[-1] <= 1024 * MIB:
        raise UserError(f"--sizes must be MiB from 0.001 to 1024 joined by commas, got {','.join(values)!r}")
    return tuple(sizes)


def main(argv: Sequence[str]) -> None:
    """Joins the other processes, measures, and writes the file."""
    f = flags.FLAGS
    options = Options(
        sizes=_sizes(f.sizes),
        repeats=f.repeats,
        rounds=f.rounds,
        micro_batches=() if f.links_only else _positive("micro_batches", f.micro_batches),
        tensor=_positive("tensor", f.tensor),
        time_limit=f.time_limit,
        compute_hosts=f.compute_hosts,
    )
    if not options.sizes or not (options.micro_batches or f.links_only):
        raise UserError("--sizes and --micro_batches must name one size or more, got none")
    if f.time_limit is not None and not math.isfinite(f.time_limit):
        raise UserError(f"--time_limit must be a number of seconds, got {f.time_limit}")
    out = pathlib.Path(f.out)
    if out.is_dir():
        raise UserError(f"--out={out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise UserError(f"--out={out} is to be in {out.parent}, which is no folder; make it first")
    config = from_dict(f.config)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices)
    launched = (f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout)
    rendezvous.call(*launched)
    distributed.initialize(*launched)
    meeting = Meeting(f.answer_timeout)
    with meeting.ends_together():
        machines = profile_cluster.meet(meeting, f.rack)
        cluster, said = profile_cluster.profile(meeting, machines, config, options, f.name)
        if meeting.process == 0:
            clusters.save(cluster, out)
            print(tables.table([*_describe(cluster), *said, ("written", str(out))]), flush=True)
        meeting.gather(None)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
