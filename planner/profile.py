"""Measure the cluster that it runs on, and write the planner's cluster file. Start it as training is started.

    srun python -m planner.profile --out=cluster.json --config=configs/gpt_8b.py

The flag --config names the model whose compute is measured.
"""

import pathlib
from collections.abc import Sequence

import jax
from absl import flags

from paxtrain import tables
from paxtrain.command_line import OVERRIDES, define_config, group, run
from paxtrain.config import from_dict
from paxtrain.errors import MOST_SECONDS, UserError, whole
from paxtrain.knobs import define, given
from paxtrain.parallel.mesh import MOST_CPU_DEVICES
from paxtrain.process import distributed
from planner.measure import flags as measure_flags
from planner.measure import profile_cluster
from planner.measure.machines import find_machines
from planner.measure.options import MIB, ProfileOptions
from planner.measure.process_group import ProcessGroup

HINT = OVERRIDES


def define_flags() -> None:
    """Define the flags of this main."""
    default = ProfileOptions()
    flags.DEFINE_string(
        "out", "cluster.json", "The cluster file to write, with a file beside it if there are many hosts."
    )
    flags.DEFINE_string("name", "cluster", "The cluster's name.")
    with group("What is measured"):
        flags.DEFINE_list(
            "sizes",
            [f"{size // MIB}" for size in default.sizes],
            "Sizes of the messages in MiB; use less than 1 for slow links.",
        )
        define(ProfileOptions, "repeats", "rounds")
        flags.DEFINE_list("micro_batches", [str(b) for b in default.micro_batches], "Sequences per micro-batch.")
        flags.DEFINE_bool("links_only", False, "Measure no compute; the planner then uses the devices' data sheets.")
        measure_flags.define_flags()
        define(ProfileOptions, "tensor", "time_limit")
    with group("Several processes"):
        flags.DEFINE_integer("cpu_devices", 1, "Virtual CPU devices per process.", 1, MOST_CPU_DEVICES)
        flags.DEFINE_float("answer_timeout", 60, "Seconds after which a silent process counts as lost.", lower_bound=1)
        distributed.define_flags()
    define_config("config", "tiny", "The model to measure: a file, or the name of one in configs/.")


def _positive(flag: str, values: Sequence[str]) -> tuple[int, ...]:
    if not all(whole(value.strip()) for value in values):
        raise UserError(f"--{flag} must be positive integers joined by commas, got {','.join(values)!r}")
    return tuple(sorted({int(value) for value in values}))


def _sizes(values: Sequence[str]) -> tuple[int, ...]:
    """Return the message sizes in bytes, as multiples of a float32, in rising order.

    Raises:
        UserError: a value is not a number of MiB from 0.001 to 1024.
    """
    try:
        sizes = sorted({round(float(value) * MIB / 4) * 4 for value in values})
    except (ValueError, OverflowError):
        sizes = [0]
    if sizes and not 1024 <= sizes[0] <= sizes[-1] <= 1024 * MIB:
        raise UserError(f"--sizes must be MiB from 0.001 to 1024 joined by commas, got {','.join(values)!r}")
    return tuple(sizes)


def _options(f: flags.FlagValues) -> ProfileOptions:
    options = given(
        ProfileOptions,
        sizes=_sizes(f.sizes),
        micro_batches=() if f.links_only else _positive("micro_batches", f.micro_batches),
        tensor=_positive("tensor", f.tensor),
    )
    if not options.sizes or not (options.micro_batches or f.links_only):
        raise UserError("--sizes and --micro_batches must name at least one size, got none; give one, such as 1")
    if f.time_limit is not None and not f.time_limit <= MOST_SECONDS:
        raise UserError(
            f"--time_limit must be finite, at most {MOST_SECONDS:,.0f} s, got {f.time_limit}; leave it out for no limit"
        )
    if not f.answer_timeout <= MOST_SECONDS:
        raise UserError(
            f"--answer_timeout must be a number of seconds, got {f.answer_timeout}; {MOST_SECONDS:,.0f} is the most"
        )
    return options


def _output(name: str) -> pathlib.Path:
    out = pathlib.Path(name)
    if out.is_dir():
        raise UserError(f"--out={out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise UserError(f"--out={out} must lie in an existing folder, but {out.parent} is no folder; create it first")
    return out


def main(argv: Sequence[str]) -> None:
    """Join the other processes, measure, and write the cluster file."""
    f = flags.FLAGS
    options, out = _options(f), _output(f.out)
    config = from_dict(f.config)
    jax.config.update("jax_num_cpu_devices", f.cpu_devices)
    launched = (f.coordinator, f.num_processes, f.process_id, f.coordinator_timeout)
    distributed.initialize(*launched, f.lost_timeout)
    group = ProcessGroup(f.answer_timeout)
    with group.ends_together():
        machines = find_machines(group, f.rack, site=f.site, peak=f.peak)
        cluster, said = profile_cluster.profile(group, machines, config, options, f.name)
        if group.process == 0:
            cluster.save(out)
            print(tables.table([*profile_cluster.describe(cluster), *said, ("written", str(out))]), flush=True)
        group.gather(None)


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
