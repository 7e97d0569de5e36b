"""Choose the plan for a model on a cluster: python -m planner.plan --model=gpt_8b --cluster=CLUSTER.json.

This is a dry run, which needs no GPU and no process on the cluster. It prints the ranked plans. It writes plan.json,
which paxtrain.train takes with --plan, and report.html.
"""

import json
import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from tqdm import tqdm

from paxtrain.command_line import run
from paxtrain.errors import UserError
from paxtrain.flags import define_config
from planner import planning_flags
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.fit.recalibrate import recalibrated
from planner.planning.planning import PLAN, REPORT, plan_sections, sections

HINT = "overrides are written --model.section.key=value"
# What the planner decides, and the flags that narrow it.
_DECIDED = {
    "mesh.data": "data",
    "mesh.pipe": "pipe",
    "mesh.tensor": "tensor",
    "mesh.zero1": "zero1",
    "mesh.sequence_parallel": "sequence_parallel",
    "pipeline.schedule": "schedules",
    "pipeline.virtual_stages": "virtual_stages",
    "pipeline.save": "saves",
    "batch.micro_batch": "micro_batch",
}


def _check_overrides() -> None:
    """Require that no override sets what the planner decides.

    Raises:
        UserError: one does.
    """
    f = flags.FLAGS
    for key, flag in _DECIDED.items():
        name = f"model.{key}"
        if name in f and f[name].present:
            value = "yes" if f[name].value is True else "no" if f[name].value is False else f[name].value
            raise UserError(
                f"--{name} has no effect, since the planner decides it; --{flag}={value} narrows the choice"
            )


def _cluster() -> Cluster:
    """Return the cluster that the flags describe.

    Raises:
        UserError: a flag is missing, or it names something that does not exist.
    """
    f = flags.FLAGS
    if not f.cluster:
        raise UserError("--cluster is missing; name a file such as configs/clusters/a100_16x8.json")
    cluster = Cluster.load(f.cluster)
    if f.constants:
        cluster = recalibrated(cluster, f.constants, f.constants_of)
    elif f.constants_of:
        raise UserError(f"--constants_of={f.constants_of} needs --constants; name a constants.json of planner.validate")
    return clusters.without(cluster, f.without) if f.without else cluster


def _check_writable(out: pathlib.Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out={out} ({error}); name a folder that can be written") from error
    for name in (PLAN, REPORT):
        if (out / name).is_dir():
            raise UserError(f"{out / name} is a folder, but must be a file; remove it or choose another --out")


def main(argv: Sequence[str]) -> None:
    """Read the model and the cluster, search, and write the plan and the report."""
    f = flags.FLAGS
    values, out = f.model.to_dict(), pathlib.Path(f.out)
    _check_overrides()
    sections(values)
    cluster, options = _cluster(), planning_flags.options(oracle=f.oracle)
    _check_writable(out)
    with tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False) as bar:
        found = plan_sections(
            values,
            cluster,
            options,
            global_batch=f.global_batch,
            explained=f.explain,
            say=bar.set_description_str,
        )
    found.save(out)
    if f.json:
        print(json.dumps(found.json()))
        return
    print(found.text())
    for line in found.explain():
        print(f"not     {line}")
    print(f"wrote   {out / PLAN} and {out / REPORT}")


def define_flags() -> None:
    """Define the flags of this main."""
    define_config("model", "gpt_8b", "The configuration whose model is planned for.")
    flags.DEFINE_string("cluster", None, "The cluster: a file, or the name of one in configs/clusters.")
    flags.DEFINE_list("without", [], "Hosts of the cluster's file to leave out, as they are named there.")
    flags.DEFINE_string(
        "constants", None, "Constants fitted to measured runs: a constants.json written by planner.validate."
    )
    flags.DEFINE_string("constants_of", "", "The cluster in --constants to take them from, if the file has several.")
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", lower_bound=0)
    flags.DEFINE_string("out", "runs/plan", "Folder for plan.json and report.html.")
    planning_flags.define_flags()
    flags.DEFINE_enum(
        "oracle",
        "auto",
        ["auto", "yes", "no"],
        "Whether to compile the best plans to check their memory; auto: if jax has its CUDA plugin.",
    )
    flags.DEFINE_bool("json", False, "Print the whole ranking as one JSON object instead of the report.")
    flags.DEFINE_bool("explain", False, "Explain why each neighbor of the plan is not the recommended one.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
