"""A plan as a configuration for torchtitan, in Python as torchtitan 0.3 takes it.

Ranks count tensor fastest, then context, data and pipe. torchtitan's own configurations have sizes, rotary angles and a
head of their own, so the model is written out; everything else is that of its Llama 3 of 8B, or its Qwen 3 of 14B.

References:
    pytorch/torchtitan, torchtitan/config/configs.py, torchtitan/models/{llama3,qwen3}/__init__.py,
    torchtitan/models/common/rope.py and torchtitan/distributed/pipeline_parallel.py, 0.3.0.
"""

from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, DATA, PIPE, TENSOR
from paxtrain.config.plan import Plan
from planner.export.exported import Exported, cannot, common, mesh_ranks, require_all_seen, require_known

_SCHEDULES = {
    "1f1b": "1F1B",
    "gpipe": "GPipe",
    "interleaved_1f1b": "Interleaved1F1B",
    "zb_v": "ZBVZeroBubble",
    "dualpipe_v": "DualPipeV",
}
_RECOMPUTED = {"inputs": "FullAC", "layer_inputs": "FullAC", "dots": "SelectiveAC", "residuals": None}
_MODEL = """

def model():
    layers = {package}._build_{package}_layers(
        n_layers={model.layers},
        dim={model.hidden},
        n_heads={model.heads},
        n_kv_heads={model.key_value_heads},{head}
        hidden_dim={model.ffn},
        rope={rope}.Config(dim={model.head_dim}, max_seq_len={model.sequence}, theta={model.rope_theta}{scaling}),
        attn_backend="flex",
    )
    for layer in layers:
        layer.attention_norm.eps = layer.ffn_norm.eps = {model.norm_epsilon}{head_norms}
    dim, vocab = {model.hidden}, {model.padded_vocab}
    return {package}.{kind}.Config(
        dim=dim,
        vocab_size=vocab,
        enable_weight_tying={tied},
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init={package}.{init}),
        norm=RMSNorm.Config(normalized_shape=dim, eps={model.norm_epsilon}, param_init={package}._NORM_INIT),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init={package}.{head_init}),
        layers=layers,
    )
"""
# Of each family: package, class, positions, first values of the head, and the trainer's own configuration.
_LLAMA = ("llama3", "Llama3Model", "ComplexRoPE", "_output_linear_init(dim)", "llama3_8b")
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "phi3": _LLAMA,
    "qwen3": ("qwen3", "Qwen3Model", "CosSinRoPE", "_LINEAR_INIT", "qwen3_14b"),
}


def export(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> Exported:
    """Return a plan for torchtitan.

    Args:
        plan: the plan.
        model: the model that it is for.
        layers: layers of each virtual stage, in the order of the model.

    Raises:
        UserError: torchtitan cannot be told of the model.
    """
    positions = ("default",) if model.family == "qwen3" else ("default", "llama3")
    require_known("torchtitan", model, tuple(_FAMILIES), positions)
    require_all_seen("torchtitan", model)
    if model.head_size and model.family != "qwen3":
        what = f"a {model.family} with model.head_size={model.head_size}"
        raise cannot("torchtitan", what, "0, or model.family=qwen3")
    where = mesh_ranks(plan, (PIPE, DATA, CONTEXT, TENSOR))
    files = {"torchtitan_plan.py": _configuration(plan, model, layers), **where.files()}
    program = "-m torchtitan.train --module torchtitan_plan --config planned --hf_assets_path=..."
    start = where.torchrun(program, "PYTHONPATH=.")
    schedule = plan.pipeline.schedule_key if plan.mesh.pipe > 1 and plan.pipeline.schedule_key in _SCHEDULES else "1f1b"
    return Exported("torchtitan 0.3.0", files, start, schedule, (*common(plan, model), *_inexpressible(plan, model)))


def modules(layers: tuple[int, ...]) -> list[list[str]]:
    """Return the names of the modules of each virtual stage."""
    found, first = [], 0
    for count in layers:
        found.append([f"layers.{n}" for n in range(first, first + count)])
        first += count
    found[0] = ["tok_embeddings", *found[0]]
    found[-1] = [*found[-1], "norm", "lm_head"]
    return found


def _tied(plan: Plan, model: ModelConfig) -> bool:
    """Return whether the head uses the embedding's table, which torchtitan refuses with stages."""
    return model.tied_head and plan.mesh.pipe == 1


def _model(model: ModelConfig, tied: bool) -> list[str]:
    """Return the lines that make the model."""
    package, kind, rope, head_init, _ = _FAMILIES[model.family]
    names = {"factor": "scaling_factor"}  # the others have Hugging Face's
    scaling = [f"{names.get(name, name)}={value}" for name, value in model.rope_scaling.items() if name != "rope_type"]
    own = model.family == "qwen3"
    norms = "layer.attention.qk_norm.eps"
    return _MODEL.format(
        model=model,
        package=package,
        kind=kind,
        rope=rope,
        scaling="".join(f", {one}" for one in ['scaling="llama"', *scaling]) if scaling else "",
        head=f"\n        head_dim={model.head_dim}," if own else "",
        head_norms=f"\n        {norms} = {model.norm_epsilon}" if own else "",
        tied=tied,
        init=f"_EMBEDDING_{'SKIP_' * tied}INIT",
        head_init=head_init,
    ).splitlines()


def _configuration(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> str:
    """Return the Python file that torchtitan imports."""
    mesh, batch, tied = plan.mesh, plan.batch, _tied(plan, model)
    package, _, rope, _, whole = _FAMILIES[model.family]
    shard, replicate = (mesh.data // mesh.copies, mesh.copies) if mesh.zero1 else (1, mesh.data)
    reshard = "always" if mesh.shard == "weights" else "never"
    recomputed = _RECOMPUTED[plan.pipeline.save]
    local = batch.global_batch // mesh.data if mesh.pipe > 1 else batch.micro_batch
    lines = [
        '"""A plan of paxtrain\'s planner: --module torchtitan_plan --config planned."""',
        "",
        "from torchtitan.config import ParallelismConfig",
        *([f"from torchtitan.distributed.activation_checkpoint import {recomputed}"] if recomputed else []),
        f"from torchtitan.models import {package}",
        f"from torchtitan.models.common import {rope}, Embedding, Linear, RMSNorm",
        f"from torchtitan.models.{package}.config_registry import {whole}",
        *_model(model, tied),
        "",
        "",
        "def planned():",
        f"    config = {whole}()",
        '    config.model_spec.flavor, config.model_spec.model = "planned", model()',
        f"    config.loss.loss_fn.global_vocab_size = {model.padded_vocab}",
        f"    config.training.local_batch_size = {local}",
        f"    config.training.global_batch_size = {batch.global_batch}",
        f"    config.training.seq_len = {model.sequence}",
        f'    config.training.mixed_precision_param = "{model.dtype}"',
        *(["    config.training.disable_cuda_graphs = True"] if mesh.pipe > 1 else []),  # pipelines need it
        "    config.parallelism = ParallelismConfig(",
        f"        data_parallel_replicate_degree={replicate},",
        f"        data_parallel_shard_degree={shard},",
        f'        fsdp_reshard_after_forward="{reshard}",',
        f"        tensor_parallel_degree={mesh.tensor},",
        f"        enable_sequence_parallel={mesh.sequence_parallel},",
        f"        pipeline_parallel_degree={mesh.pipe},",
    ]
    if mesh.context > 1:  # the balancer of masks of FlexAttention's blocks
        lines += [f"        context_parallel_degree={mesh.context},", '        context_parallel_load_balancer="ptrr",']
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


def _inexpressible(plan: Plan, model: ModelConfig) -> list[str]:
    found = []
    if model.tied_head and not _tied(plan, model):
        found.append("torchtitan ties no head to the embedding with stages, so the head has a table of its own")
    if model.embedding_dropout or model.residual_dropout:
        found.append("torchtitan has no dropout, so it trains without")
    if model.separator < 0:
        found.append("torchtitan keeps attention within the documents of its data set, not within whole samples")
    asked = plan.pipeline.schedule_key
    if plan.mesh.pipe > 1 and asked not in _SCHEDULES:
        found.append(f"torchtitan runs 1F1B instead of {asked}, so its transfers are exposed differently")
    if plan.mesh.zero1 and plan.mesh.data > 1 and plan.mesh.shard != "weights":
        found.append("parameters are split over data as well (FSDP), and gathered layer by layer instead of at once")
    if plan.mesh.copies > 1:
        held = f"inside groups of {plan.mesh.shard_group} data ranks"
        found.append(f"the optimizer's state is split {held} alone, so it takes {plan.mesh.copies} times the memory")
    if plan.mesh.context > 1:
        found.append("torchtitan gives devices blocks of the sequence by their work, and gathers keys and values")
    if plan.pipeline.save in ("inputs", "dots"):
        found.append(f"save={plan.pipeline.save} becomes {_RECOMPUTED[plan.pipeline.save]}, which keeps something else")
    if plan.mesh.reduce_dtype == "bfloat16":
        found.append("torchtitan reduces gradients in float32 alone, so reductions take twice as long as in bfloat16")
    return found
