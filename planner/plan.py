"""Choose the plan for a model on a cluster: python -m planner.plan --model=gpt_8b --cluster=CLUSTER.json.

This is a dry run, which needs no GPU and no process on the cluster. It prints the ranked plans. It writes plan.json,
which paxtrain.train takes with --plan, and report.html.
"""

import dataclasses
import json
import pathlib
import sys
import threading
from collections.abc import Callable, Sequence

from absl import flags
from tqdm import tqdm

from paxtrain.command_line import group, run
from paxtrain.errors import UserError
from paxtrain.knobs import define
from paxtrain.process import setup
from planner import planning_flags
from planner.answers import free_choice, hosts, what_if
from planner.cluster.cluster import Cluster
from planner.planning.inputs import Values, search_for
from planner.planning.options import PlanOptions
from planner.planning.planning import PLAN, REPORT, Plans, plan_sections
from planner.report import page

HINT = "overrides are written --model.section.key=value"


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
    setup.collect_seldom()
    f = flags.FLAGS
    values, out = planning_flags.decided_values(), pathlib.Path(f.out)
    cluster, options = planning_flags.cluster(), planning_flags.options(oracle=f.oracle)
    _check_writable(out)
    threading.Thread(target=page.library).start()  # what a machine's first page waits for, beside the search
    with tqdm(bar_format="{desc}", disable=not sys.stderr.isatty(), leave=False) as bar:
        bar.set_description_str("reading the model and bounding the candidates")
        told: list[str] = []

        def say(phase: str) -> None:
            if not told:  # the first phase stays, and is told wherever stderr goes
                bar.write(f"{phase} ...", file=sys.stderr)
            told.append(phase)
            bar.set_description_str(phase)

        found = _plans(values, cluster, options, say)
    found = found.named(planning_flags.model_name())
    found.save(out, pictures=f.png)
    if f.json:
        print(json.dumps(found.json()))
        return
    print(found.text())
    for line in found.explain():
        print(f"not     {line}")
    print(f"wrote   {out / PLAN} and {out / REPORT}")


def _plans(values: Values, cluster: Cluster, options: PlanOptions, say: Callable[[str], None]) -> Plans:
    """Return the plan, with the answers to what else the flags ask.

    Raises:
        UserError: nothing fits, or flags contradict each other.
    """
    f = flags.FLAGS
    if f.hosts:
        for name in ("what_if", "against_free", "explain"):
            if f[name].value:
                raise UserError(f"--hosts plans for several clusters, and --{name} needs one; leave one of them out")
        wanted = hosts.ScalingOptions(hosts.counts(f.hosts), f.tokens, f.price)
        return hosts.scaling(values, cluster, options, wanted, f.global_batch, say)
    if f.price or f["tokens"].present:
        raise UserError("--price and --tokens need --hosts; name numbers of hosts, as --hosts=2,4,8")
    for change in f.what_if:  # what is wrong is told before anything is searched
        other = what_if.changed(cluster, change)
        if not options.probe:  # which decides what is searched
            try:
                search_for(values, other, options, f.global_batch).require_one()
            except UserError as error:
                raise UserError(f"--what_if={change!r}: {error}") from error
    found = plan_sections(values, cluster, options, global_batch=f.global_batch, explained=f.explain, say=say)
    if f.against_free:
        say("searching without the flags that narrow the choice")
        free = free_choice.free_choice(values, cluster, options, found, f.global_batch)
        found = dataclasses.replace(found, report=dataclasses.replace(found.report, free_choice=free))
    return what_if.what_ifs(values, cluster, options, found, f.what_if, say) if f.what_if else found


def define_flags() -> None:
    """Define the flags of this main."""
    planning_flags.define_inputs()
    flags.DEFINE_string("out", "runs/plan", "Folder for plan.json and report.html.")
    define(PlanOptions, "trainer")
    with group("What a plan may choose"):
        planning_flags.define_flags()
    flags.DEFINE_enum(
        "oracle",
        "auto",
        ["auto", "yes", "no"],
        "Whether to compile the best plans to check their memory; auto: if jax has its CUDA plugin.",
    )
    flags.DEFINE_list(
        "hosts", [], "Numbers of hosts to plan for, as 2,4,8: what more hosts bring, and where the knee is."
    )
    flags.DEFINE_float("price", 0, "Price of a device for an hour, for the costs that --hosts tells.", lower_bound=0)
    flags.DEFINE_float("tokens", 1e9, "Tokens for which --hosts tells device hours and costs.", lower_bound=1)
    description = "A change of the cluster to plan for, too, as 'network x 2' (planner/answers/what_if.py); repeatable."
    flags.DEFINE_multi_string("what_if", [], description)
    flags.DEFINE_bool(
        "against_free", False, "Also search without the flags that narrow the choice, and tell their price."
    )
    flags.DEFINE_bool("png", False, "Also write each chart of the report as a picture, OUT/NAME.png.")
    flags.DEFINE_bool("json", False, "Print the whole ranking as one JSON object instead of the report.")
    flags.DEFINE_bool("explain", False, "Explain why each neighbor of the plan is not the recommended one.")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
