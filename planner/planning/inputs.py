"""Input of planning: the sections of a configuration that the planner reads, and the search that they ask for."""

import dataclasses
from collections.abc import Mapping

from paxtrain.config import (
    BatchConfig,
    CompressConfig,
    Config,
    MeshConfig,
    ModelConfig,
    OuterConfig,
    PipelineConfig,
    read_section,
)
from paxtrain.errors import UserError
from planner.cluster import cluster as clusters
from planner.cluster.cluster import Cluster
from planner.cost.coded import coded
from planner.planning.options import PlanOptions
from planner.search.search import Search

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
    if options.tensor_hosts > 1:
        cluster = clusters.merged(cluster, options.tensor_hosts)
    codecs = coded(compress)
    choices = options.choices(compress.min_ratio, _reduce_dtype(values), codecs)
    limits = options.budget(compress.error, pipeline.scan_layers, codecs)
    return Search(cluster, model, global_batch or batch.global_batch, choices, limits, options.search())


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
    pipeline = read_section(PipelineConfig, values["pipeline"], "pipeline")
    batch = read_section(BatchConfig, values["batch"], "batch")
    compress = read_section(CompressConfig, values["compress"], "compress")
    _reduce_dtype(values)
    for name, value, known in (
        ("embedding", compress.embedding, ("auto", "fused")),
        ("factors", compress.factors, ("auto",)),
    ):
        if value not in known:
            raise UserError(
                f"compress.{name}={value} is not planned for; plan with {known[0]}, and change it afterwards"
            )
    if (outer := read_section(OuterConfig, values.get("outer", {}), "outer")).every:
        raise UserError(
            f"outer.every={outer.every} is not planned for: plan one group on its hosts (--without, --global_batch), "
            "and train with that plan's mesh times the groups; planner.simulate predicts the whole"
        )
    if compress.embedding == "fused" and not model.tied_head:
        raise UserError(
            "compress.embedding=fused is about the embedding's tied copies, but model.tied_head=False; choose auto"
        )
    if (optimizer := values.get("optimizer", {}).get("name", "adamw")) != "adamw":
        raise UserError(
            f"optimizer.name={optimizer} is not planned for, since its memory and time differ from AdamW's; "
            "plan with adamw, and train with --plan=plan.json and the optimizer of your choice"
        )
    return model, pipeline, batch, compress
