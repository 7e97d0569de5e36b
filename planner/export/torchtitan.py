"""A plan as a configuration for torchtitan, in Python as torchtitan 0.3 takes it.

Ranks count tensor fastest, then data, then pipe.

References:
    pytorch/torchtitan, torchtitan/config/configs.py and torchtitan/distributed/pipeline_parallel.py, 0.3.0.
"""

from paxtrain.config import ModelConfig
from paxtrain.config.plan import Plan
from planner.export.exported import Exported, common, mesh_ranks

# Layers, hidden size, feed-forward part, heads and those of keys of torchtitan's models, and their configurations.
_FLAVORS = {
    (32, 4096, 14336, 32, 8): "llama3_8b",
    (80, 8192, 28672, 64, 8): "llama3_70b",
    (126, 16384, 53248, 128, 8): "llama3_405b",
}
_VOCABULARY = 128256  # of all of them
_SCHEDULES = {"1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B"}
_RECOMPUTED = {"inputs": "FullAC", "layer_inputs": "FullAC", "dots": "SelectiveAC", "residuals": None}


def export(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> Exported:
    """Return a plan for torchtitan.

    Args:
        plan: the plan.
        model: the model that it is for.
        layers: layers of each virtual stage, in the order of the model.
    """
    where = mesh_ranks(plan, ("pipe", "data", "tensor"))
    files = {"torchtitan_plan.py": _configuration(plan, model, layers), **where.files()}
    start = where.torchrun("-m torchtitan.train --module torchtitan_plan --config planned", "PYTHONPATH=.")
    schedule = plan.pipeline.schedule_key if plan.mesh.pipe > 1 and plan.pipeline.schedule_key in _SCHEDULES else "1f1b"
    return Exported("torchtitan 0.3.0", files, start, schedule, (*common(plan), *_inexpressible(plan, model)))


def modules(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the modules of each virtual stage."""
    found, first = [], 0
    for count in layers:
        found.append([f"layers.{n}" for n in range(first, first + count)])
        first += count
    found[0] = ["tok_embeddings", *found[0]]
    found[-1] = [*found[-1], "norm", "lm_head"]
    return found


def _configuration(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> str:
    """Return the Python file that torchtitan imports."""
    mesh, batch = plan.mesh, plan.batch
    flavor = _flavor(model) or "llama3_8b"
    shard, replicate = (mesh.data, 1) if mesh.zero1 else (1, mesh.data)
    recomputed = _RECOMPUTED[plan.pipeline.save]
    local = batch.global_batch // mesh.data if mesh.pipe > 1 else batch.micro_batch
    lines = [
        '"""A plan of paxtrain\'s planner: --module torchtitan_plan --config planned."""',
        "",
        "from torchtitan.config import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {recomputed}"] if recomputed else []),
        f"from torchtitan.models.llama3.config_registry import {flavor}",
        "",
        "",
        "def planned():",
        f"    config = {flavor}()",
        f"    config.training.local_batch_size = {local}",
        f"    config.training.global_batch_size = {batch.global_batch}",
        f"    config.training.seq_len = {model.sequence}",
        *(["    config.training.disable_cuda_graphs = True"] if mesh.pipe > 1 else []),  # pipelines need it
        "    config.parallelism = ParallelismConfig(",
        f"        data_parallel_replicate_degree={replicate},",
        f"        data_parallel_shard_degree={shard},",
        '        fsdp_reshard_after_forward="never",',
        f"        tensor_parallel_degree={mesh.tensor},",
        f"        enable_sequence_parallel={mesh.sequence_parallel},",
        f"        pipeline_parallel_degree={mesh.pipe},",
    ]
    if mesh.pipe > 1:
        lines += [
            f'        pipeline_parallel_schedule="{_SCHEDULES.get(plan.pipeline.schedule_key, "1F1B")}",',
            f"        pipeline_parallel_microbatch_size={batch.micro_batch},",
            "        module_fqns_per_model_part=[",
            *(f"            {names!r}," for names in modules(layers)),
            "        ],",
        ]
    kept = f"{recomputed}.Config()" if recomputed else "None"
    return "\n".join([*lines, "    )", f"    config.activation_checkpoint = {kept}", "    return config", ""])


def _flavor(model: ModelConfig) -> str | None:
    """Return the name of torchtitan's configuration of a model, or None if it has none."""
    sizes = (model.layers, model.hidden, model.ffn, model.heads, model.key_value_heads)
    return _FLAVORS.get(sizes) if model.family == "llama" and not model.tied_head else None


def _inexpressible(plan: Plan, model: ModelConfig) -> list[str]:
    found = []
    if _flavor(model) is None:
        found.append(
            f"torchtitan has no model of {model.layers} layers of size {model.hidden} ({model.family}) with these "
            "heads and this feed-forward part; add its flavor, and put its configuration in the place of llama3_8b"
        )
    elif model.vocab_size != _VOCABULARY:
        found.append(f"torchtitan's model has a vocabulary of {_VOCABULARY}, not {model.vocab_size}")
    if _flavor(model) == "llama3_405b":
        found.append("torchtitan's llama3_405b multiplies in float8 by torchao, and steps take less than the plan says")
    asked = plan.pipeline.schedule_key
    if plan.mesh.pipe > 1 and asked not in _SCHEDULES:
        found.append(f"torchtitan runs 1F1B instead of {asked}, so its transfers are exposed differently")
    if plan.mesh.zero1 and plan.mesh.data > 1:
        found.append("parameters are split over data as well (FSDP), and gathered layer by layer instead of at once")
    if plan.pipeline.save in ("inputs", "dots"):
        found.append(f"save={plan.pipeline.save} becomes {_RECOMPUTED[plan.pipeline.save]}, which keeps something else")
    if plan.mesh.reduce_dtype == "bfloat16":
        found.append("torchtitan reduces gradients in float32 alone, so reductions take twice as long as in bfloat16")
    return found
