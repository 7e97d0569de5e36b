"""Chooses the plan for a model on a cluster: python -m planner.plan --model=configs/gpt_8b.py --cluster=CLUSTER.json.

A dry run: it needs no GPU and no process on the cluster. It prints the ranked plans, and writes plan.json, which
paxtrain.train takes with --plan, and report.html.
"""

import dataclasses
import pathlib
import sys
from collections.abc import Sequence

from absl import flags
from tqdm import tqdm

from paxtrain import flags as shared_flags
from paxtrain.config import plan as plans
from paxtrain.errors import UserError, run
from planner.cluster import cluster as clusters
from planner.fit.recalibrate import recalibrated
from planner.planning import flags as search_flags
from planner.planning.recommend import Planner, predicted
from planner.report import page, text

HINT = "overrides are written --model.section.key=value"


def main(argv: Sequence[str]) -> None:
    """Reads model and cluster, searches, reports."""
    f = flags.FLAGS
    model, pipeline, batch, compress = search_flags.sections(f.model.to_dict())
    if not f.cluster:
        raise UserError("--cluster is missing; name a file such as configs/clusters/a100_16x8.json")
    cluster = clusters.load(f.cluster)
    if f.constants:
        cluster = recalibrated(cluster, f.constants, f.constants_of)
    elif f.constants_of:
        raise UserError(f"--constants_of={f.constants_of} needs --constants, the file that has them")
    if f.without:
        cluster = clusters.without(cluster, f.without)
    if f.tensor_hosts > 1:
        cluster = clusters.merged(cluster, f.tensor_hosts)
    out = pathlib.Path(f.out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write to --out={out} ({error}); name a folder") from error
    for name in ("plan.json", "report.html"):
        if (out / name).is_dir():
            raise UserError(f"{out / name} is a folder, and the plan is to be written there; choose another --out")
    global_batch = f.global_batch or batch.global_batch
    search = search_flags.search(cluster, model, pipeline, compress, global_batch)
    with tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False) as bar:
        planner = Planner(search, compress, f.model.to_dict(), global_batch, bar.set_description_str)
        outcome = search.run(progress=planner.say)
        chosen, rows = outcome.ranked[0], ()
        if _compiles(f.oracle, cluster):
            chosen, rows = planner.recheck(outcome)
            ranked = [chosen if found.index == chosen.index else found for found in outcome.ranked]
            outcome = dataclasses.replace(outcome, ranked=ranked)
        planner.say("comparing")
        made = planner.tell(outcome, chosen, rows, f.explain)
    plans.save(planner.plan(chosen, predicted(made)), out / "plan.json")
    (out / "report.html").write_text(page.page(made))
    print(text.text(made))
    for line in made.explained:
        print(f"not     {line}")
    print(f"wrote   {out / 'plan.json'} and {out / 'report.html'}")


def _compiles(wanted: str, cluster: clusters.Cluster) -> bool:
    """Whether the chosen plans are compiled to check their memory.

    Raises:
        UserError: that is demanded and impossible.
    """
    if wanted == "no" or "cpu" in cluster.kinds:
        return False
    from planner.memory import compiled

    if compiled.cuda():
        return True
    if wanted == "yes":
        raise UserError("--oracle=yes needs jax's CUDA plugin; pip install -r requirements-gpu.txt, or --oracle=auto")
    return False


def define_flags() -> None:
    """Defines this main's flags."""
    shared_flags.define_config("model", "gpt_8b", "The configuration whose model is planned for.", unknown_keys=False)
    flags.DEFINE_string("cluster", None, "The cluster's file, see planner/cluster/cluster.py.")
    flags.DEFINE_list("without", [], "Hosts of the cluster's file to leave out, as they are named there.")
    flags.DEFINE_string("constants", None, "Constants fitted to measured runs: constants.json of planner.validate.")
    flags.DEFINE_string("constants_of", "", "The cluster in it, where it has several.")
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", lower_bound=0)
    flags.DEFINE_string("out", "runs/plan", "Folder for plan.json and report.html.")
    search_flags.define_flags()
    flags.DEFINE_enum("oracle", "auto", ["auto", "yes", "no"], "Compile the best plans to check their memory.")
    flags.DEFINE_bool("explain", False, "Say of each neighbour of the plan why it is not the one.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
