"""A plan as Megatron-LM's flags.

Ranks count tensor fastest, then data, then pipe; with --use-tp-pp-dp-mapping tensor, pipe, data.

References:
    NVIDIA/Megatron-LM, megatron/training/{arguments,argument_utils}.py and, for positions, norms of heads and windows,
    megatron/core/{models/common/embeddings/rotary_pos_embedding,transformer/attention,transformer/utils}.py,
    core_v0.19.2.
"""

from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, DATA, PIPE, TENSOR
from paxtrain.config.plan import Plan
from paxtrain.model.parameters import traits
from paxtrain.schedule.schedules import spec_of
from planner.export.exported import Exported, best_order, cannot, common, option, require_known, require_llama3, runs

_FAMILIES = ("gpt2", "llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
_ORDERS = {"": (PIPE, DATA, CONTEXT, TENSOR), "--use-tp-pp-dp-mapping": (DATA, PIPE, CONTEXT, TENSOR)}
_EXCHANGES = {"ring": "p2p", "gather": "allgather", "heads": "a2a"}  # of keys and values
_SHARDED = {"gradients": "optim_grads", "weights": "optim_grads_params"}
_SAVES = {
    "inputs": "keeps only what a stage begins with; --recompute-num-layers of a whole stage comes near",
    "dots": "keeps matrix products; selective recomputation keeps all but attention, which takes more memory",
}


def export(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> Exported:
    """Return a plan for Megatron-LM.

    Args:
        plan: the plan.
        model: the model that it is for.
        layers: layers of each virtual stage, in the order of the model.

    Raises:
        UserError: Megatron-LM cannot be told of the model.
    """
    mapping, where = best_order(plan, _ORDERS)
    lines = [*_model(model), *_parallel(plan, layers), *_memory(plan, layers), *([mapping] if mapping else [])]
    files = {"megatron.args": "\n".join(lines) + "\n", **where.files()}
    # Its validate_args refuses tensor and context parallelism without on GPUs before Blackwell, and FSDP with it.
    several = plan.mesh.tensor * plan.mesh.context > 1 and not _fsdp(plan)
    variables = "CUDA_DEVICE_MAX_CONNECTIONS=1" if several else ""
    start = where.torchrun("pretrain_gpt.py $(cat megatron.args) ...", variables)
    schedule = "interleaved_1f1b" if plan.pipeline.virtual_stages > 1 else "1f1b"
    said = (*common(plan, model), *_inexpressible(plan, model))
    return Exported("Megatron-LM core_v0.19.2", files, start, schedule, said)


def _model(model: ModelConfig) -> list[str]:
    """Return the flags of the model's shape."""
    require_known("Megatron-LM", model, _FAMILIES, ("default", "linear", "llama3"))
    facts = traits(model)
    lines = [
        f"--num-layers {model.layers}",
        f"--hidden-size {model.hidden}",
        f"--ffn-hidden-size {model.ffn}",
        f"--num-attention-heads {model.heads}",
        f"--seq-length {model.sequence}",
        f"--max-position-embeddings {model.sequence}",
        f"--norm-epsilon {model.norm_epsilon:g}",
        f"--padded-vocab-size {model.padded_vocab}",
        "--attention-dropout 0.0",
        f"--hidden-dropout {model.residual_dropout}",
    ]
    if model.key_value_heads != model.heads:
        lines += ["--group-query-attention", f"--num-query-groups {model.key_value_heads}"]
    if model.head_size:
        lines.append(f"--kv-channels {model.head_size}")
    if model.family != "gpt2":
        lines += ["--swiglu", "--normalization RMSNorm", "--disable-bias-linear"]
    if facts.rotary:
        lines += ["--position-embedding-type rope", f"--rotary-base {round(model.rope_theta)}", *_positions(model)]
    lines += {"qwen2": ["--add-qkv-bias"], "qwen3": ["--qk-layernorm"]}.get(model.family, [])
    if window := option(model, "sliding_window", 0):
        lines.append(f"--window-size {window - 1},0")  # tokens before and after the one that looks
    if model.separator >= 0:
        lines.append("--dataloader-inter-document-masking")
    if not model.tied_head:
        lines.append("--untie-embeddings-and-output-weights")
    return [*lines, *(["--bf16"] if model.dtype == "bfloat16" else [])]


def _positions(model: ModelConfig) -> list[str]:
    """Return the flags of scaled positions, of those on a part of a head, and of layers without.

    Raises:
        UserError: the flags cannot say them.
    """
    kind, lines = model.rope_scaling.get("rope_type", "default"), []
    factor = model.rope_scaling.get("factor", 1)
    if kind == "linear":
        if factor % 1:
            raise cannot("Megatron-LM", f"model.rope_scaling.factor={factor}", "a whole number")
        lines.append(f"--rotary-seq-len-interpolation-factor {int(factor)}")
    if kind == "llama3":
        require_llama3("Megatron-LM", model)  # its gpt_config_from_args drops --rope-scaling-factor
        lines.append("--use-rope-scaling")
    if (share := option(model, "partial_rotary_factor", 1.0)) < 1:
        lines.append(f"--rotary-percent {share}")
    if interval := option(model, "no_rope_layer_interval", 0):
        if model.layers % interval:
            what = f"model.options.no_rope_layer_interval={interval} with model.layers={model.layers}"
            raise cannot("Megatron-LM", what, "a divisor of the layers")
        lines.append(f"--no-rope-freq {interval}")
    return lines


def _parallel(plan: Plan, layers: tuple[int, ...]) -> list[str]:
    """Return the flags of the mesh, the batch and the layers of each stage."""
    mesh, chunks = plan.mesh, plan.pipeline.virtual_stages
    lines = [
        f"--tensor-model-parallel-size {mesh.tensor}",
        f"--pipeline-model-parallel-size {mesh.pipe}",
        f"--micro-batch-size {plan.batch.micro_batch}",
        f"--global-batch-size {plan.batch.global_batch}",
    ]
    if len(set(layers)) > 1:
        stages = runs(layers, lambda value, times: "|".join([f"t*{value}"] * times) + "|").rstrip("|").split("|")
        stages[0], stages[-1] = f"E{stages[0]}", f"{stages[-1]}L"
        lines.append(f"--pipeline-model-parallel-layout {'|'.join(stages)}")
    elif chunks > 1:
        lines.append(f"--num-layers-per-virtual-pipeline-stage {layers[0]}")
    if mesh.sequence_parallel and mesh.tensor > 1:
        lines.append("--sequence-parallel")
    if mesh.context > 1:
        lines += [f"--context-parallel-size {mesh.context}", f"--cp-comm-type {_EXCHANGES[mesh.context_form]}"]
    if mesh.zero1 and mesh.data > 1:
        lines.append("--use-distributed-optimizer")
    if _fsdp(plan):
        lines += ["--use-megatron-fsdp", "--ckpt-format fsdp_dtensor", "--no-gradient-accumulation-fusion"]
        lines.append(f"--data-parallel-sharding-strategy {_SHARDED[mesh.shard]}")
    if _fsdp(plan) and mesh.copies > 1:
        lines.append(f"--num-distributed-optimizer-instances {mesh.copies}")
        lines += ["--outer-dp-sharding-strategy optim"] * (mesh.shard == "weights")
    lines.append("--grad-reduce-in-bf16" if mesh.reduce_dtype == "bfloat16" else "--accumulate-allreduce-grads-in-fp32")
    return lines


def _fsdp(plan: Plan) -> bool:
    """Return whether more than the optimizer's state is in shards, which Megatron-FSDP has."""
    return plan.mesh.shard in _SHARDED and plan.mesh.data > 1


def _memory(plan: Plan, layers: tuple[int, ...]) -> list[str]:
    """Return the flags of what is recomputed."""
    whole = ["--recompute-granularity full", "--recompute-method uniform"]
    return {
        "inputs": [*whole, f"--recompute-num-layers {max(layers)}"],
        "layer_inputs": [*whole, "--recompute-num-layers 1"],
        "dots": ["--recompute-granularity selective"],
        "residuals": [],
    }[plan.pipeline.save]


def _inexpressible(plan: Plan, model: ModelConfig) -> list[str]:
    found = []
    spec = spec_of(plan.pipeline.schedule_key)
    own, runs = plan.pipeline.schedule_key, "interleaved 1F1B" if spec.interleaves else "1F1B"
    if plan.mesh.pipe > 1 and own != "1f1b" and (spec.folds(plan.pipeline.virtual_stages) or not spec.interleaves):
        found.append(f"Megatron-LM runs {runs} instead of {own}, so its transfers are exposed differently")
    if plan.pipeline.save in _SAVES:
        found.append(f"save={plan.pipeline.save} {_SAVES[plan.pipeline.save]}")
    if model.embedding_dropout != model.residual_dropout:
        found.append("there is one --hidden-dropout for the embedding and the residual branches")
    if model.separator >= 0:
        found.append(f"documents are those of Megatron-LM's data set, whether or not {model.separator} begins them")
    if traits(model).rotary and model.rope_theta % 1:
        found.append(f"--rotary-base is a whole number, so it is {round(model.rope_theta)}, not {model.rope_theta}")
    return found
