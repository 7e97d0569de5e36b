"""Flags of the model, of the cluster and of `PlanOptions`, for the mains that plan."""

import dataclasses
from typing import Any

from absl import flags

from paxtrain.config.parallel import MOST_SEQUENCES
from paxtrain.errors import UserError, whole
from paxtrain.flags import define_config
from paxtrain.schedule.schedules import names
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.fit.recalibrate import recalibrated
from planner.planning.inputs import sections
from planner.planning.loss_budget import read
from planner.planning.options import AUTO, AUTOMATIC, GROUPS, KINDS, SEQUENCE, UNEVEN_DATA, ZERO1, PlanOptions

_INTEGERS = ("backward_ranks", "data_ranks", "data", "tensor", "pipe", "micro_batch", "virtual_stages")
# What the planner decides, and the flags that narrow it to a value.
_DECIDED = {
    "mesh.data": "--data={}",
    "mesh.pipe": "--pipe={}",
    "mesh.tensor": "--tensor={}",
    "mesh.zero1": "--zero1={}",
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
# What a plan sets to what suits its schedule and its links, without a flag.
_SET = (
    "pipeline.idle",
    "compress.backward.links",
    "compress.forward.links",
    "compress.data.stage_seconds",
    "compress.data.reduce_seconds",
    "compress.data.compressed_seconds",
)
# What neither a plan nor its prediction has: whole sections, of which some keys are read all the same, and single keys.
_TRAINED = ("optimizer", "data", "checkpoint", "run", "profile")
_READ = ("optimizer.name", "run.steps")
_UNUSED = ("model.rope_theta", "model.norm_epsilon", "outer.lr", "outer.momentum", "outer.mix")


def define_inputs() -> None:
    """Define the flags of the model and of the cluster."""
    define_config("model", "gpt_8b", "The configuration whose model is planned for.")
    flags.DEFINE_string("cluster", None, "The cluster: a file, or the name of one in configs/clusters.")
    flags.DEFINE_list("without", [], "Hosts of the cluster's file to leave out, as they are named there.")
    flags.DEFINE_string(
        "constants", None, "Constants fitted to measured runs: a constants.json written by planner.validate."
    )
    flags.DEFINE_string("constants_of", "", "The cluster in --constants to take them from, if the file has several.")
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", 0, MOST_SEQUENCES)


def define_flags() -> None:
    """Define a flag for each option except `oracle`."""
    d = PlanOptions()

    def define_list(name: str, description: str) -> None:
        flags.DEFINE_list(name, [str(value) for value in getattr(d, name)], description)

    known = f"none, {AUTO} ({' and '.join(AUTOMATIC)}), or some of {', '.join(KINDS)}"
    description = f"Messages that may be compressed, which changes training: {known}."
    flags.DEFINE_list("compress", list(d.compress) or ["none"], description)
    define_list("backward_ranks", "Ranks allowed for gradients between stages.")
    define_list("data_ranks", "Ranks allowed for gradients over data.")
    description = f"Losses of codecs on this model, from paxtrain.study --probe; --compress={AUTO} chooses among them."
    flags.DEFINE_string("probe", d.probe, description)
    description = "Most loss that the codecs of --probe may cost together, as a share of dense training's."
    flags.DEFINE_float("loss_budget", d.loss_budget, description, lower_bound=0)
    description = "Share of the step that each kind of compression must gain at least."
    flags.DEFINE_float("gain", d.gain, description, lower_bound=0)
    define_list("data", "Sizes of the data axis to try; all that divide if empty.")
    define_list("tensor", "Sizes of the tensor axis to try; likewise.")
    define_list("pipe", "Sizes of the pipe axis to try; likewise.")
    define_list("micro_batch", "Micro-batches to try; likewise.")
    define_list("virtual_stages", "Chunks per stage of interleaved schedules to try.")
    flags.DEFINE_enum("zero1", d.zero1, list(ZERO1), "Split the optimizer's state over data.")
    description = "Split the sequence wherever tensor is above 1."
    flags.DEFINE_enum("sequence_parallel", d.sequence_parallel, list(SEQUENCE), description)
    define_list("schedules", f"Schedules to try, of {', '.join(names())}; or CSV files.")
    define_list("saves", "What a forward may keep for its backward.")
    flags.DEFINE_bool("uneven", d.uneven, "Also split layers unevenly over the stages.")
    description = "Give data ranks on slow devices fewer micro-batches, if there are several kinds of devices."
    flags.DEFINE_enum("uneven_data", d.uneven_data, list(UNEVEN_DATA), description)
    description = "Number of groups, if --model.outer.every: as configured, or one on each site of the cluster."
    flags.DEFINE_enum("groups", d.groups, list(GROUPS), description)
    flags.DEFINE_integer("tensor_hosts", d.tensor_hosts, "Hosts in a row that each tensor group spans.", lower_bound=1)
    flags.DEFINE_float("usable_memory", d.usable_memory, "Share of a device's memory to use.", 0.05, 1.0)
    flags.DEFINE_bool("memory_margin", d.memory_margin, "Add the safety margin to the closed form's memory.")
    description = "Quantile of the link samples for which placements are optimized."
    flags.DEFINE_float("quantile", d.quantile, description, 0.0, 1.0)
    flags.DEFINE_integer("top", d.top, "Plans to rank.", lower_bound=1)
    flags.DEFINE_integer("placed", d.placed, "Most meshes and schedules to place thoroughly.", lower_bound=1)
    flags.DEFINE_bool("nearby", d.nearby, "Tell of quicker plans on fewer hosts and for batches near by.")
    flags.DEFINE_integer("seed", d.seed, "Seed of the annealing.", lower_bound=0)


def options(**more: str) -> PlanOptions:
    """Return the options that the flags give.

    Args:
        more: options that have no flag here.

    Raises:
        UserError: a flag is out of its range.
    """
    names = [field.name for field in dataclasses.fields(PlanOptions) if field.name != "oracle"]
    given = {name: getattr(flags.FLAGS, name) for name in names}
    for name, value in given.items():
        if name in _INTEGERS:
            if not all(whole(word.strip()) for word in value):
                raise UserError(f"--{name} must be positive integers joined by commas, got {','.join(value)}")
            given[name] = tuple(map(int, value))
        elif isinstance(value, list):
            given[name] = tuple(value)
    if flags.FLAGS["loss_budget"].present and not given["probe"]:
        raise UserError("--loss_budget needs --probe, a probe.json of python -m paxtrain.study --probe")
    given["compress"] = tuple(kind for kind in given["compress"] if kind != "none")
    found = PlanOptions(**{**given, **more})
    if found.probe:
        read(found)  # what is wrong with it is told before anything is measured
    return found


def decided_values() -> dict[str, Any]:
    """Return the sections of the configuration that --model gives.

    Raises:
        UserError: an override sets what the planner decides or what no plan depends on, or the planner does not support
            the configuration.
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
    given = [name.removeprefix("model.") for name in f if name.startswith("model.") and f[name].present]
    for key in given:
        if key in _SET:
            raise UserError(f"--model.{key} has no effect, since each plan sets {key} itself; leave it out")
        if key in _UNUSED or (key.split(".")[0] in _TRAINED and key not in _READ):
            raise UserError(
                f"--model.{key} has no effect, since no plan depends on it; give it to paxtrain.train as --config.{key}"
            )
    if f.global_batch and "batch.global_batch" in given and values["batch"]["global_batch"] != f.global_batch:
        raise UserError(
            f"--global_batch={f.global_batch} and --model.batch.global_batch={values['batch']['global_batch']} "
            "contradict each other; leave one of them out"
        )
    return values


def cluster() -> Cluster:
    """Return the cluster that the flags describe.

    Raises:
        UserError: a flag is missing, or it names something that does not exist.
    """
    f = flags.FLAGS
    if not f.cluster:
        raise UserError("--cluster is missing; name a file such as configs/clusters/a100_16x8.json")
    found = Cluster.load(f.cluster)
    if f.constants:
        found = recalibrated(found, f.constants, f.constants_of)
    elif f.constants_of:
        raise UserError(f"--constants_of={f.constants_of} needs --constants; name a constants.json of planner.validate")
    return clusters.without(found, f.without) if f.without else found
