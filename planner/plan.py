"""Chooses the plan for a model on a cluster: python -m planner.plan --model=configs/gpt_8b.py --cluster=CLUSTER.json.

A dry run: it needs no GPU and no process on the cluster. It prints the ranked plans, and writes plan.json, which
paxtrain.train takes with --plan, and report.html.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import config_flags
from tqdm import tqdm

from paxtrain import plan as plans
from paxtrain.config import (
    SAVE_MODES,
    SCHEDULES,
    BatchConfig,
    CompressConfig,
    ModelConfig,
    PipelineConfig,
    read_section,
)
from paxtrain.errors import UserError, run
from planner import budget, memory, page, report
from planner import cluster as clusters
from planner.recalibrate import recalibrated
from planner.recommend import Planner, predicted
from planner.search import Options, Search
from planner.space import BACKWARD, Choices

_KINDS = ("epilogue", "all", "data")


def _integers(name: str) -> tuple[int, ...]:
    """A list flag of positive integers."""
    values = getattr(flags.FLAGS, name)
    if not all(value.strip().isdecimal() and int(value) > 0 for value in values):
        raise UserError(f"--{name} must be positive integers joined by commas, got {','.join(values)}")
    return tuple(int(value) for value in values)


def _choices(min_ratio: float) -> Choices:
    f = flags.FLAGS
    kinds = [kind for kind in f.compress if kind != "none"]
    for kind in kinds:
        if kind not in _KINDS:
            raise UserError(f"--compress must be none or some of {', '.join(_KINDS)}, got {kind!r}")
    return Choices(
        tensor=_integers("tensor"),
        pipe=_integers("pipe"),
        micro_batch=_integers("micro_batch"),
        virtual_stages=_integers("virtual_stages"),
        schedules=tuple(_known("schedules", SCHEDULES)),
        saves=tuple(_known("saves", SAVE_MODES)),
        backward=tuple(kind for kind in kinds if kind in BACKWARD),
        backward_ranks=_integers("backward_ranks"),
        data_ranks=_integers("data_ranks") if "data" in kinds else (),
        min_ratio=min_ratio,
    )


def _known(name: str, known: Sequence[str]) -> list[str]:
    values = getattr(flags.FLAGS, name)
    if not values:
        raise UserError(f"--{name} must be some of {', '.join(known)}, got none")
    for value in values:
        if value not in known:
            raise UserError(f"--{name} must be some of {', '.join(known)}, got {value!r}")
    return values


def _sections(values: Any) -> tuple[ModelConfig, PipelineConfig, BatchConfig, CompressConfig]:
    """What the planner takes of a configuration.

    Raises:
        UserError: a section is missing or wrong, or asks for compression that the planner does not know.
    """
    values, kinds = values.to_dict(), (ModelConfig, PipelineConfig, BatchConfig, CompressConfig)
    names = ("model", "pipeline", "batch", "compress")
    for name in names:
        if name not in values:
            raise UserError(f"the configuration has no section {name}; build it on configs/base.py")
    sections = tuple(read_section(kind, values[name], name) for kind, name in zip(kinds, names))
    compress = sections[-1]
    for name, value, known in (
        ("forward", compress.forward, ("none",)),
        ("embedding", compress.embedding, ("auto", "fused")),
        ("factors", compress.factors, ("auto",)),
    ):
        if value not in known:
            raise UserError(
                f"compress.{name}={value} is not planned for; plan with {known[0]}, and change it afterwards"
            )
    return sections


def _finite(name: str) -> float:
    value = getattr(flags.FLAGS, name)
    if not math.isfinite(value):
        raise UserError(f"--{name} must be a number, got {value}")
    return value


def main(argv: Sequence[str]) -> None:
    """Reads model and cluster, searches, reports."""
    f = flags.FLAGS
    if len(argv) > 1:
        raise UserError(f"unexpected argument {argv[1]!r}; overrides are written --model.section.key=value")
    model, pipeline, batch, compress = _sections(f.model)
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
    quantile, gain, usable = (_finite(name) for name in ("quantile", "gain", "usable_memory"))
    options = Options(top=f.top, placed=f.placed, quantile=quantile, seed=f.seed, uneven=f.uneven, gain=gain)
    limits = budget.Budget(usable, compress.error, pipeline.scan_layers, learned=f.memory == "learned")
    global_batch = f.global_batch or batch.global_batch
    search = Search(cluster, model, global_batch, _choices(compress.min_ratio), limits, options)
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
    print(report.text(made))
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
    from planner import oracle

    if oracle.cuda():
        return True
    if wanted == "yes":
        raise UserError("--oracle=yes needs jax's CUDA plugin; pip install -r requirements-gpu.txt, or --oracle=auto")
    return False


def define_flags() -> None:
    """Defines this main's flags."""
    config_flags.DEFINE_config_file("model", "configs/gpt_8b.py", "The configuration whose model is planned for.")
    # A file that could not be loaded raises when it is first used: here, while flags are parsed.
    flags.register_validator("model", lambda config: hasattr(config, "items"), "get_config() must return a ConfigDict")
    flags.DEFINE_string("cluster", None, "The cluster's file, see planner/cluster.py.")
    flags.DEFINE_list("without", [], "Hosts of the cluster's file to leave out, as they are named there.")
    flags.DEFINE_string("constants", None, "Constants fitted to measured runs: constants.json of planner.validate.")
    flags.DEFINE_string("constants_of", "", "The cluster in it, where it has several.")
    flags.DEFINE_integer("global_batch", 0, "Sequences per step; 0: as configured.", lower_bound=0)
    flags.DEFINE_string("out", "runs/plan", "Folder for plan.json and report.html.")
    flags.DEFINE_list(
        "compress", ["epilogue", "data"], f"What may be compressed: none, or some of {', '.join(_KINDS)}."
    )
    flags.DEFINE_list("backward_ranks", ["16"], "Ranks allowed for gradients between stages.")
    flags.DEFINE_list("data_ranks", ["128"], "Ranks allowed for gradients over data.")
    flags.DEFINE_float("gain", 0.01, "What each kind of compression must gain at least, of the step.", lower_bound=0)
    flags.DEFINE_list("tensor", [], "Sizes of the tensor axis to try; all that divide if empty.")
    flags.DEFINE_list("pipe", [], "Sizes of the pipe axis to try; likewise.")
    flags.DEFINE_list("micro_batch", [], "Micro-batches to try; likewise.")
    flags.DEFINE_list("virtual_stages", ["2", "4"], "Chunks per stage of interleaved schedules to try.")
    flags.DEFINE_list("schedules", list(SCHEDULES), "Schedules to try.")
    flags.DEFINE_list("saves", list(SAVE_MODES), "What a forward may keep for its backward.")
    flags.DEFINE_bool("uneven", True, "Also split layers unevenly over the stages.")
    flags.DEFINE_integer("tensor_hosts", 1, "Hosts in a row that each tensor group spans.", lower_bound=1)
    flags.DEFINE_float("usable_memory", memory.USABLE, "Share of a device's memory to use.", 0.05, 1.0)
    flags.DEFINE_enum("memory", "learned", ["learned", "analytic"], "The memory estimate to search by.")
    flags.DEFINE_float("quantile", 0.5, "Of the link samples, for which placements are optimized.", 0.0, 1.0)
    flags.DEFINE_integer("top", 10, "Plans to rank.", lower_bound=1)
    flags.DEFINE_integer("placed", 4, "Plans to place at most.", lower_bound=1)
    flags.DEFINE_integer("seed", 0, "Of the annealing.", lower_bound=0)
    flags.DEFINE_enum("oracle", "auto", ["auto", "yes", "no"], "Compile the best plans to check their memory.")
    flags.DEFINE_bool("explain", False, "Say of each neighbour of the plan why it is not the one.")


if __name__ == "__main__":
    run(main, define_flags)
