"""A plan as MaxText's settings, key=value as its pyconfig takes them.

The mesh's axes are data, stage and tensor, slowest first, so ranks count as the plan's positions do.

References:
    AI-Hypercomputer/maxtext, maxtext/configs/base.yml, maxtext/layers/embeddings.py and
    maxtext/models/{llama2,mistral,qwen2,qwen3}.py, 0.2.5.
"""

from paxtrain.config import ModelConfig
from paxtrain.config.axes import DATA, PIPE, TENSOR
from paxtrain.config.plan import Plan
from paxtrain.model.parameters import traits
from planner.export.exported import USUAL_LLAMA3, Exported, cannot, common, mesh_ranks, require_known

_DECODERS = {"gpt2": "gpt3", "llama": "llama2", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3"}
_LLAMA3 = {"factor": 8, **USUAL_LLAMA3}  # its constants
_REMAT = {"inputs": "full", "layer_inputs": "full", "dots": "minimal", "residuals": "none"}


def export(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> Exported:
    """Return a plan for MaxText.

    Args:
        plan: the plan.
        model: the model that it is for.
        layers: layers of each virtual stage, in the order of the model.

    Raises:
        UserError: MaxText cannot be told of the model.
    """
    where = mesh_ranks(plan, (DATA, PIPE, TENSOR))
    settings = {**_model(model), **_parallel(plan, layers)}
    text = "".join(f"{key}={_written(value)}\n" for key, value in settings.items())
    program = "python -m maxtext.trainers.pre_train.train $(cat maxtext.args) run_name=... dataset_path=..."
    start = where.mpirun(program)
    if where.follow:
        variables = f"JAX_COORDINATOR_IP={where.first} JAX_COORDINATOR_PORT=29500 NNODES={where.nodes} NODE_RANK=N"
        start = f"{variables} {program}, on each host; N is its line in hostfile, from 0 on"
    schedule = "" if plan.mesh.pipe > 1 else "1f1b"
    said = (*common(plan, model), *_inexpressible(plan, layers), *_otherwise(model))
    return Exported("MaxText 0.2.5", {"maxtext.args": text, **where.files()}, start, schedule, said)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _model(model: ModelConfig) -> dict[str, object]:
    """Return the settings of the model's shape."""
    require_known("MaxText", model, tuple(_DECODERS), ("default", "linear", "llama3"))
    gated, rotary = traits(model).gated, traits(model).rotary
    if window := model.options.get("sliding_window"):
        raise cannot("MaxText", f"model.options.sliding_window={window}", "0")
    return {
        "decoder_block": _DECODERS[model.family],
        "base_emb_dim": model.hidden,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.key_value_heads,
        "base_mlp_dim": model.ffn,
        "base_num_decoder_layers": model.layers,
        "head_dim": model.head_dim,
        "mlp_activations": '["silu","linear"]' if gated else '["gelu"]',
        "vocab_size": model.padded_vocab,
        "logits_via_embedding": model.tied_head,
        "normalize_embedding_logits": False,  # else a tied head's logits are divided by sqrt(hidden)
        "max_target_length": model.sequence,
        "normalization_layer_epsilon": model.norm_epsilon,
        **({"rope_max_timescale": round(model.rope_theta)} if rotary else {"trainable_position_size": model.sequence}),
        **_positions(model),
        **{"qwen2": {"attention_bias": True}, "qwen3": {"use_qk_norm": True}}.get(model.family, {}),
        "dtype": model.dtype,
        "reset_attention_mask": model.separator >= 0,
        **({"mmap_eod_id": model.separator, "packing_max_segments_per_sample": 0} if model.separator >= 0 else {}),
    }


def _positions(model: ModelConfig) -> dict[str, object]:
    """Return the settings of scaled positions.

    Raises:
        UserError: they are not MaxText's constants.
    """
    kind = model.rope_scaling.get("rope_type")
    if kind != "llama3":
        return {"rope_linear_scaling_factor": model.rope_scaling["factor"]} if kind else {}
    if other := [name for name, usual in _LLAMA3.items() if model.rope_scaling[name] != usual]:
        raise cannot("MaxText", f"model.rope_scaling.{other[0]}={model.rope_scaling[other[0]]}", str(_LLAMA3[other[0]]))
    return {"rope_type": "llama3.1"}


def _parallel(plan: Plan, layers: tuple[int, ...]) -> dict[str, object]:
    """Return the settings of the mesh, the batch and the layers of each stage."""
    mesh, batch = plan.mesh, plan.batch
    found: dict[str, object] = {
        "hardware": "gpu",
        "ici_data_parallelism": mesh.data,
        "ici_fsdp_parallelism": 1,
        "ici_pipeline_parallelism": mesh.pipe,
        "ici_tensor_parallelism": mesh.tensor,
        "dcn_data_parallelism": 1,
        "shard_optimizer_over_data": mesh.zero1 and mesh.data > 1,
        "remat_policy": _REMAT[plan.pipeline.save],
    }
    if mesh.sequence_parallel and mesh.tensor > 1:
        found |= {"ici_tensor_parallelism": 1, "ici_tensor_sequence_parallelism": mesh.tensor}
    micro_batches = batch.global_batch // mesh.data // batch.micro_batch
    if mesh.pipe > 1:
        return found | {
            "per_device_batch_size": batch.global_batch / mesh.devices,
            "num_pipeline_microbatches": micro_batches,
            "num_layers_per_pipeline_stage": sum(layers) // len(layers),
            "num_pipeline_repeats": plan.pipeline.virtual_stages,
            "pipeline_parallel_layers": sum(layers) // len(layers) * len(layers),
            "scan_layers": False,
        }
    return found | {
        "per_device_batch_size": batch.micro_batch / mesh.tensor,
        "gradient_accumulation_steps": micro_batches,
    }


def _inexpressible(plan: Plan, layers: tuple[int, ...]) -> list[str]:
    found = []
    if plan.mesh.pipe > 1:
        found.append(f"MaxText runs its circular pipeline, GPipe with repeats, instead of {plan.pipeline.schedule_key}")
        if len(set(layers)) > 1:
            each, rest = divmod(sum(layers), len(layers))
            outside = f", and runs {rest} of the {sum(layers)} layers outside of its pipeline" if rest else ""
            found.append(f"MaxText has {each} layers on every stage, not {','.join(map(str, layers))}{outside}")
        if plan.batch.global_batch // plan.mesh.data // plan.batch.micro_batch % plan.mesh.pipe:
            found.append(
                "MaxText refuses micro-batches that are no multiple of the stages; change micro_batch or the batch"
            )
    if plan.pipeline.save in ("inputs", "dots"):
        found.append(f"save={plan.pipeline.save} becomes remat_policy={_REMAT[plan.pipeline.save]}, which comes near")
    return found


def _otherwise(model: ModelConfig) -> list[str]:
    """Return what MaxText does otherwise than the model."""
    found = []
    if model.embedding_dropout or model.residual_dropout:
        found.append("MaxText drops the same values of all tokens, and at other places, so it trains without dropout")
    if model.tied_head and model.dtype == "float32":
        found.append("MaxText rounds the table of a tied head to bfloat16, in float32, too")
    if model.separator >= 0:
        found.append(f"documents are those of MaxText's data set; in those of type mmap {model.separator} ends them")
    else:
        found.append("MaxText keeps attention within the documents of its data set, unless that is of type mmap")
    if traits(model).rotary and model.rope_theta % 1:
        whole = round(model.rope_theta)
        found.append(f"rope_max_timescale is a whole number, so it is {whole}, not {model.rope_theta}")
    return found
