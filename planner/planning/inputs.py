"""Input of planning: the sections of a configuration that the planner reads, and the search that they ask for."""

import dataclasses
from collections.abc import Mapping

from paxtrain.config import (
    BatchConfig,
    CheckpointConfig,
    CompressConfig,
    Config,
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    OuterConfig,
    PipelineConfig,
    RunConfig,
    read_section,
)
from paxtrain.config.config import check_groups
from paxtrain.errors import UserError
from paxtrain.model import parameters
from planner.cluster import cluster as clusters
from planner.cluster.cluster import PAXTRAIN, Cluster
from planner.cost.coded import coded
from planner.cost.link_seconds import fabric
from planner.fit.applied import priced
from planner.placement.climb import racks_of
from planner.planning.options import PlanOptions
from planner.planning.spans import search_over
from planner.runs.trainers import TRAINERS
from planner.search.search import Search
from planner.search.space import Choices

# Sections of a configuration, nested.
Values = Mapping[str, Mapping[str, object]]
_SECTIONS = ("model", "pipeline", "batch", "compress")


def search_for(values: Values, cluster: Cluster, options: PlanOptions, global_batch: int = 0) -> Search:
    """Return the search for a configuration on a cluster, which has bounded all candidates and simulated none.

    Args:
        values: sections of the configuration, nested.
        cluster: cluster to plan for.
        options: options of the choice and of the search.
        global_batch: sequences per step; 0 for the configuration's.

    Raises:
        UserError: the planner does not support the configuration, or no mesh divides the model and the batch.
    """
    if options.probe:
        raise UserError(f"--probe={options.probe} chooses codecs for a plan, which is not asked for here; leave it out")
    model, pipeline, batch, compress = sections(values)
    if global_batch:
        batch = dataclasses.replace(batch, global_batch=global_batch)  # which has bounds
    cluster = priced(clusters.attained(cluster), options.trainer)
    codecs = coded(compress, model.tied_head)
    outer = groups(values, cluster, options)
    reduce_dtype = _reduce_dtype(values)
    if options.trainer != PAXTRAIN.trainer:
        reduce_dtype = "float32" if TRAINERS[options.trainer].float32 else model.dtype
    choices = options.choices(compress.min_ratio, reduce_dtype, codecs, outer, pipeline.scan_layers)
    limits = options.budget(compress.error, pipeline.scan_layers, codecs, outer, compress.min_ratio)

    def search(some: Cluster, among: Choices) -> Search:
        return Search(some, model, batch.global_batch, among, limits, options.search())

    if options.tensor_hosts > 1:
        return search(clusters.merged(cluster, options.tensor_hosts), choices)
    return search_over(cluster, choices, search)


def groups(values: Values, cluster: Cluster, options: PlanOptions) -> OuterConfig:
    """Return the groups of data ranks that train apart, as the configuration and the options have them.

    Args:
        values: sections of the configuration, nested.
        cluster: cluster to plan for.
        options: options of the choice and of the search.

    Raises:
        UserError: there is to be a group on each site, but there are no groups, another number of them, or one site.
    """
    outer = read_section(OuterConfig, values.get("outer", {}), "outer")
    if options.groups != "sites":
        return outer
    if not outer.every:
        raise UserError(
            "--groups=sites needs groups that train apart; --model.outer.every=50 makes them exchange every 50 steps"
        )
    sites = len(set(cluster.sites)) if cluster.sites else int(racks_of(fabric(cluster)).max()) + 1
    if sites == 1:
        raise UserError(
            f"--groups=sites, but {cluster.name} has one site: its file names no others, and no hosts are joined by "
            "links that are slow beside the rest; --model.outer.groups=2 makes two groups wherever they are"
        )
    if outer.groups not in (0, sites):
        raise UserError(
            f"--groups=sites makes {sites} groups on this cluster, but outer.groups={outer.groups}; leave one out"
        )
    return dataclasses.replace(outer, groups=sites)


def _reduce_dtype(values: Values) -> str:
    """Return the configuration's mesh.reduce_dtype; the planner decides all else of the mesh.

    Raises:
        UserError: it is none of MeshConfig's.
    """
    mesh = values.get("mesh", {})
    given = {key: mesh[key] for key in ("reduce_dtype",) if isinstance(mesh, dict) and key in mesh}
    return read_section(MeshConfig, given, "mesh").reduce_dtype


def sections(values: Values) -> tuple[ModelConfig, PipelineConfig, BatchConfig, CompressConfig]:
    """Return the sections of a configuration that the planner reads.

    Raises:
        UserError: a section is missing or wrong, or the planner does not support its compression or optimizer.
    """
    every = [field.name for field in dataclasses.fields(Config)]
    if unknown := [name for name in values if name not in every]:
        raise UserError(f"unknown configuration key {unknown[0]}; known here: {', '.join(sorted(every))}")
    for name in _SECTIONS:
        if name not in values:
            raise UserError(f"the configuration has no section {name}; build it on configs/base.py")
    model = read_section(ModelConfig, values["model"], "model")
    parameters.kinds(model)  # refused here if it cannot be laid out
    pipeline = read_section(PipelineConfig, values["pipeline"], "pipeline")
    batch = read_section(BatchConfig, values["batch"], "batch")
    compress = read_section(CompressConfig, values["compress"], "compress")
    _reduce_dtype(values)
    for name, value, known in (
        ("embedding.sync", compress.embedding.sync, ("auto", "fused")),
        ("factors", compress.factors, ("auto",)),
    ):
        if value not in known:
            raise UserError(
                f"compress.{name}={value} is not planned for; plan with {known[0]}, and change it afterwards"
            )
    outer = read_section(OuterConfig, values.get("outer", {}), "outer")
    steps = read_section(RunConfig, values.get("run", {}), "run").steps
    check_groups(outer, steps, model.layers, batch, compress)
    if compress.embedding.sync == "fused" and not model.tied_head:
        raise UserError(
            "compress.embedding.sync=fused is about the embedding's tied copies, but model.tied_head=False; "
            "compress.embedding.sync=auto would fit"
        )
    if (optimizer := read_section(OptimizerConfig, values.get("optimizer", {}), "optimizer").name) != "adamw":
        raise UserError(
            f"optimizer.name={optimizer} is not planned for, since its memory and time differ from AdamW's; "
            "plan with adamw, and train with --plan=plan.json and the optimizer of your choice"
        )
    # No plan depends on these, but the chosen plan's configuration is made with them, behind the search.
    read_section(DataConfig, values.get("data", {}), "data")
    read_section(CheckpointConfig, values.get("checkpoint", {}), "checkpoint")
    return model, pipeline, batch, compress
