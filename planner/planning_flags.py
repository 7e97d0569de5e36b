"""Flags of the model, of the cluster and of `PlanOptions`, for the mains that plan.

The options themselves, with their checks, are in planning/options.py.
"""

import dataclasses
import pathlib
import sys
from typing import Any

from absl import flags
from ml_collections import config_flags

from paxtrain.command_line import define_config
from paxtrain.config.axes import AXES, more_axes
from paxtrain.config.load import described
from paxtrain.config.parallel import MOST_SEQUENCES
from paxtrain.errors import UserError, printable
from paxtrain.files import find
from paxtrain.knobs import define, given, integers
from planner.cluster import cluster as clusters
from planner.cluster.cluster import PAXTRAIN, Cluster
from planner.cluster.variants import of_devices
from planner.fit.applied import recalibrated
from planner.planning.inputs import sections
from planner.planning.loss_budget import read
from planner.planning.options import PlanOptions

_H100S = "h100_16x8"  # cluster whose devices --devices means if there is no --cluster
_OPTIONS = [f.name for f in dataclasses.fields(PlanOptions) if f.name not in ("oracle", "others", "trainer")]
SEARCH = (*_OPTIONS, *more_axes())  # the flags that `define_flags` defines
# What the planner decides, and the flags that narrow it to a value.
_DECIDED = {
    **{f"mesh.{name}": f"--{name}={{}}" for name in AXES},
    "mesh.shard": "--shard={}",
    "mesh.sequence_parallel": "--sequence_parallel={}",
    "pipeline.schedule": "--schedules={}",
    "pipeline.in_flight": "--schedules=1f1b",
    "pipeline.virtual_stages": "--virtual_stages={}",
    "pipeline.pipe_layers": "--nouneven",
    "pipeline.save": "--saves={}",
    "batch.micro_batch": "--micro_batch={}",
    "batch.data_micro_batches": "--uneven_data=yes",
    "compress.backward.messages": "--compress={}",
    "compress.backward.rank": "--backward_ranks={}",
    "compress.backward.ranks": "--backward_ranks=16",
    "compress.data.stages": "--compress=data",
    "compress.data.rank": "--data_ranks={}",
}
# What a plan sets to what suits its hosts, its schedule and its links, without a flag.
_SET = (
    "mesh.shard_group",
    "pipeline.idle",
    "compress.backward.links",
    "compress.forward.links",
    "compress.data.stage_seconds",
    "compress.data.reduce_seconds",
    "compress.data.compressed_seconds",
)
# What neither a plan nor its prediction has: whole sections, of which some keys are read all the same, and single keys.
_TRAINED = ("optimizer", "data", "checkpoint", "run", "init", "profile")
_READ = ("optimizer.name", "run.steps")
_UNUSED = ("model.rope_theta", "model.norm_epsilon", "outer.lr", "outer.momentum", "outer.mix")


def define_inputs() -> None:
    """Define the flags of the model and of the cluster."""
    define_config("model", "gpt_8b", "The configuration whose model is planned for, or a model's config.json.")
    flags.DEFINE_string("cluster", None, "The cluster: a file, or the name of one in configs/clusters.")
    flags.DEFINE_integer(
        "devices", 0, "Devices to plan for: some of the cluster's, or more like them; without --cluster H100s.", 0
    )
    flags.DEFINE_list("without", [], "Hosts of the cluster's file to leave out, as they are named there.")
    flags.DEFINE_string(
        "constants", None, "Constants fitted to measured runs: a constants.json written by planner.validate."
    )
    flags.DEFINE_string("constants_of", "", "The cluster in --constants to take them from, if the file has several.")
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", 0, MOST_SEQUENCES)


def define_flags() -> None:
    """Define a flag for each option except `oracle`, and `trainer`, which is for plans of other trainers alone."""
    define(PlanOptions, *_OPTIONS, compress=["none"])
    for name in more_axes():
        flags.DEFINE_list(name, [], f"Sizes of the {name} axis to try; empty for all that divide.")


def options(**more: Any) -> PlanOptions:
    """Return the options that the flags give.

    Args:
        more: options that have no flag here.

    Raises:
        UserError: a flag is out of its range.
    """
    f = flags.FLAGS
    others = tuple((name, integers(name, getattr(f, name))) for name in more_axes() if getattr(f, name))
    kinds = tuple(kind for kind in f.compress if kind != "none")
    found = given(PlanOptions, compress=kinds, others=others, **more)
    if f["loss_budget"].present and not found.probe:
        raise UserError("--loss_budget needs --probe, a probe.json of paxtrain.study --probe")
    if found.probe:
        read(found)  # what is wrong with it is told before anything is measured
    return found


def decided_values() -> dict[str, Any]:
    """Return the sections of the configuration that --model gives, and say which overrides no plan depends on.

    Raises:
        UserError: an override sets what the planner decides, or the planner does not support the configuration.
    """
    f = flags.FLAGS
    for key, flag in _DECIDED.items():
        name = f"model.{key}"
        if name in f and f[name].present:
            value = "yes" if f[name].value is True else "no" if f[name].value is False else f[name].value
            raise UserError(
                f"--{name} has no effect, since the planner decides it; {flag.format(value)} narrows the choice"
            )
    values = f.model.to_dict()
    sections(values)
    keys = [name.removeprefix("model.") for name in f if name.startswith("model.") and f[name].present]
    _say_defaults(values, keys)
    for key in keys:
        if key in _SET:
            raise UserError(f"--model.{key} has no effect, since each plan sets {key} itself; leave it out")
    unused = [key for key in keys if key in _UNUSED or (key.split(".")[0] in _TRAINED and key not in _READ)]
    if unused:
        told = f"no plan depends on {', '.join(unused)}; train with the same, such as --config.{unused[0]}"
        print(f"note: {told}", file=sys.stderr, flush=True)
    if f.global_batch and "batch.global_batch" in keys and values["batch"]["global_batch"] != f.global_batch:
        raise UserError(
            f"--global_batch={f.global_batch} and --model.batch.global_batch={values['batch']['global_batch']} "
            "contradict each other; leave one of them out"
        )
    return values


def model_name() -> str:
    """Return the name of the model that --model gives: its file's, or that of the folder of a config.json."""
    file = find((config_flags.get_config_filename(flags.FLAGS["model"]) or "").partition(":")[0])
    path = pathlib.Path(file).absolute()
    return printable(path.parent.name if path.name == "config.json" else path.stem, 80)


def _say_defaults(values: dict[str, Any], keys: list[str]) -> None:
    """Say what a model's config.json does not, if no flag says it."""
    f = flags.FLAGS
    if not described(config_flags.get_config_filename(f["model"]) or ""):
        return
    sequence, batch = values["model"]["sequence"], f.global_batch or values["batch"]["global_batch"]
    taken = [] if "model.sequence" in keys else [f"{sequence:,} tokens a sample (--model.model.sequence)"]
    if not f.global_batch and "batch.global_batch" not in keys:
        taken.append(f"{batch:,} samples a step (--global_batch)")
    if taken:
        print(
            f"note: the model's file does not say what it is trained with; taken are {' and '.join(taken)}",
            file=sys.stderr,
            flush=True,
        )


def cluster() -> Cluster:
    """Return the cluster that the flags describe.

    Raises:
        UserError: a flag is missing, or it names something that does not exist.
    """
    f = flags.FLAGS
    if not f.cluster and not f.devices:
        raise UserError(
            "--cluster is missing; name a file such as configs/clusters/a100_16x8.json, or say --devices=8 for H100s"
        )
    found = Cluster.load(f.cluster or _H100S)
    if f.devices:
        found = of_devices(found, f.devices)
    if f.constants:
        found = recalibrated(found, f.constants, f.constants_of, f.trainer if "trainer" in f else PAXTRAIN.trainer)
    elif f.constants_of:
        raise UserError(f"--constants_of={f.constants_of} needs --constants; name a constants.json of planner.validate")
    return clusters.without(found, f.without) if f.without else found
