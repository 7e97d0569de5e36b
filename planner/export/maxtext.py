"""A plan as MaxText's settings, key=value as its pyconfig takes them.

The mesh's axes are data, stage, fsdp, context and tensor, slowest first, so ranks count as the plan's positions do,
except that data ranks which share all weights in shards follow the stages.

References:
    AI-Hypercomputer/maxtext, maxtext/configs/base.yml, maxtext/layers/embeddings.py and
    maxtext/models/{llama2,mistral,qwen2,qwen3,gemma2,gemma3,olmo3}.py, 0.2.5.
"""

from paxtrain.config import ModelConfig
from paxtrain.config.axes import CONTEXT, DATA, PIPE, TENSOR
from paxtrain.config.plan import Plan
from paxtrain.model.parameters import architecture, traits
from planner.export.exported import (
    Exported,
    cannot,
    common,
    mesh_ranks,
    option,
    require_all_seen,
    require_known,
    require_llama3,
)

_DECODERS = {
    "gpt2": "gpt3",
    "llama": "llama2",
    "mistral": "mistral",
    "phi3": "llama2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "olmo2": "olmo3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
}
_BY_NAME = ("olmo2", "gemma3")  # their decoders ask model_name, and each of their layers which one it is
_EXCHANGES = {"ring": "ring", "gather": "all_gather", "heads": "all_gather"}  # "ulysses" is for TPUs
_SEGMENTS = 64
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
    where = mesh_ranks(plan, (*((PIPE, DATA) if _groups(plan) == 1 else (DATA, PIPE)), CONTEXT, TENSOR))
    settings = {**_model(model), **_own(model), **_parallel(plan, model, layers)}
    text = "".join(f"{key}={_written(value)}\n" for key, value in settings.items())
    program = "python -m maxtext.trainers.pre_train.train $(cat maxtext.args) run_name=... dataset_path=..."
    start = where.mpirun(program)
    if where.follow:
        variables = f"JAX_COORDINATOR_IP={where.first} JAX_COORDINATOR_PORT=29500 NNODES={where.nodes} NODE_RANK=N"
        start = f"{variables} {program}, on each host; N is its line in hostfile, from 0 on"
    schedule = "" if plan.mesh.pipe > 1 else "1f1b"
    said = (*common(plan, model), *_inexpressible(plan, model, layers), *_otherwise(model))
    return Exported("MaxText 0.2.5", {"maxtext.args": text, **where.files()}, start, schedule, said)


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value).replace(" ", "")


def _model(model: ModelConfig) -> dict[str, object]:
    """Return the settings of the model's shape."""
    turned = ("default", "linear") if model.family in ("olmo2", "gemma2", "gemma3") else ("default", "linear", "llama3")
    require_known("MaxText", model, tuple(_DECODERS), turned)
    gated, rotary = traits(model).gated, traits(model).rotary
    return {
        "decoder_block": _DECODERS[model.family],
        "base_emb_dim": model.hidden,
        "base_num_query_heads": model.heads,
        "base_num_kv_heads": model.key_value_heads,
        "base_mlp_dim": model.ffn,
        "base_num_decoder_layers": model.layers // _block(model),
        "head_dim": model.head_dim,
        "mlp_activations": '["silu","linear"]' if gated else '["gelu"]',
        "vocab_size": model.padded_vocab,
        "logits_via_embedding": model.tied_head,
        "normalize_embedding_logits": False,  # else a tied head's logits are divided by sqrt(hidden)
        "max_target_length": model.sequence,
        "normalization_layer_epsilon": model.norm_epsilon,
        **({"rope_max_timescale": round(model.rope_theta)} if rotary else {"trainable_position_size": model.sequence}),
        **_positions(model),
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
    require_llama3("MaxText", model)
    return {"rope_type": "llama3.1"}


def _block(model: ModelConfig) -> int:
    """Return the layers in one of a decoder's blocks; those of Gemma 2 have a layer with a window and one without."""
    return 2 if model.family == "gemma2" else 1


def _own(model: ModelConfig) -> dict[str, object]:
    """Return the settings that only a family has.

    Raises:
        UserError: MaxText cannot be told of its options.
    """
    if model.family in ("gemma2", "gemma3"):
        return _gemma(model)
    require_all_seen("MaxText", model)
    found: dict[str, dict[str, object]] = {
        "qwen2": {"attention_bias": True},
        "qwen3": {"use_qk_norm": True},
        # The decoder of OLMo 3 with windows that reach over the whole sample, so the layers are all alike.
        "olmo2": {
            **_named("olmo3-7b-pt", model),
            "use_qk_norm": True,
            "sliding_window_size": model.sequence,
            "inhomogeneous_layer_cycle_interval": 1,
        },
    }
    return found.get(model.family, {})


def _named(name: str, model: ModelConfig) -> dict[str, object]:
    """Return the settings of a model with a name, whose own settings do not count."""
    return {
        "model_name": name,
        "override_model_config": True,
        "rope_type": "default",
        "rope_linear_scaling_factor": model.rope_scaling.get("factor", 1.0),
    }


def _gemma(model: ModelConfig) -> dict[str, object]:
    """Return the settings that only a Gemma has.

    Raises:
        UserError: it has other numbers than MaxText's constants.
    """
    options = {name: option(model, name, 0) for name in architecture(model).options}
    cap, scale = options["final_logit_softcapping"], options["query_pre_attn_scalar"]
    names: dict[float, str] = {model.head_dim: "gemma3-4b"}  # what each divides scores by the root of
    if model.family == "gemma3":
        names = {model.hidden // model.heads: "gemma3-27b", **names}
    for right, what, fits in (
        (model.norm_epsilon == 1e-6, f"model.norm_epsilon={model.norm_epsilon} of a Gemma", "1e-06"),
        (scale in names, f"model.options.query_pre_attn_scalar={scale}", " or ".join(map(str, names))),
        (not cap or model.tied_head, f"model.options.final_logit_softcapping={cap} with a head of its own", "0"),
        (
            options.get("sliding_window_pattern", 6) == 6,
            f"model.options.sliding_window_pattern={options.get('sliding_window_pattern')}",
            "6",
        ),
        (model.layers % _block(model) == 0, f"model.layers={model.layers} of a Gemma 2", "an even number"),
    ):
        if not right:
            raise cannot("MaxText", what, fits)
    return {
        **(_named(names[scale], model) if model.family == "gemma3" else {}),
        "normalize_embedding_logits": True,  # the table is that of the embedding times sqrt(hidden)
        "use_post_attn_norm": True,
        "use_post_ffw_norm": True,
        "mlp_activations": '["gelu","linear"]',
        "attn_logits_soft_cap": options.get("attn_logit_softcapping", 0.0),
        "final_logits_soft_cap": cap,
        "sliding_window_size": options["sliding_window"] or model.sequence,
        "local_rope_max_timescale": round(options.get("rope_local_base_freq", -1)),
    }


def _groups(plan: Plan) -> int:
    """Return the number of groups of data ranks that have whole weights; each has them in shards."""
    return plan.mesh.copies if plan.mesh.shard == "weights" and plan.mesh.data > 1 else plan.mesh.data


def _parallel(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> dict[str, object]:
    """Return the settings of the mesh, the batch and the layers of each stage.

    Raises:
        UserError: stages would have other layers.
    """
    mesh, batch = plan.mesh, plan.batch
    each = sum(layers) // _block(model) // len(layers)
    if mesh.pipe > 1 and model.family in _BY_NAME:
        raise cannot("MaxText", f"model.family={model.family} with mesh.pipe={mesh.pipe}", "mesh.pipe=1")
    if not each:
        raise cannot("MaxText", f"{len(layers)} stages of {sum(layers)} layers in pairs", "fewer stages")
    groups = _groups(plan)
    if mesh.pipe > 1 and 1 < groups < mesh.data:
        raise cannot("MaxText", f"mesh.shard_group={mesh.shard_group} with mesh.pipe={mesh.pipe}", "mesh.shard_group=0")
    found: dict[str, object] = {
        "hardware": "gpu",
        "ici_data_parallelism": groups,
        "ici_fsdp_parallelism": mesh.data // groups,
        "ici_pipeline_parallelism": mesh.pipe,
        "ici_tensor_parallelism": mesh.tensor,
        "dcn_data_parallelism": 1,
        "shard_optimizer_over_data": mesh.zero1 and groups == mesh.data > 1,
        "remat_policy": _REMAT[plan.pipeline.save],
    }
    if mesh.sequence_parallel and mesh.tensor > 1:
        found |= {"ici_tensor_parallelism": 1, "ici_tensor_sequence_parallelism": mesh.tensor}
    if mesh.context > 1:
        found |= {"ici_context_parallelism": mesh.context, "context_parallel_strategy": _EXCHANGES[mesh.context_form]}
        # Transformer Engine's attention, which alone has this on GPUs, asks for a number of documents.
        found |= {"attention": "cudnn_flash_te", "max_segments_per_seq": _SEGMENTS}
    micro_batches = batch.global_batch // mesh.data // batch.micro_batch
    if mesh.pipe > 1:
        return found | {
            "per_device_batch_size": batch.global_batch / mesh.devices,
            "num_pipeline_microbatches": micro_batches,
            "num_layers_per_pipeline_stage": each,
            "num_pipeline_repeats": plan.pipeline.virtual_stages,
            "pipeline_parallel_layers": each * len(layers),
            "scan_layers": False,
        }
    return found | {
        "per_device_batch_size": batch.micro_batch * mesh.data / mesh.devices,
        "gradient_accumulation_steps": micro_batches,
    }


def _inexpressible(plan: Plan, model: ModelConfig, layers: tuple[int, ...]) -> list[str]:
    found = []
    if plan.mesh.pipe > 1:
        found.append(f"MaxText runs its circular pipeline, GPipe with repeats, instead of {plan.pipeline.schedule_key}")
        each = sum(layers) // _block(model) // len(layers) * _block(model)
        if set(layers) != {each}:
            rest = sum(layers) - each * len(layers)
            outside = f", and runs {rest} of the {sum(layers)} layers outside of its pipeline" if rest else ""
            found.append(f"MaxText has {each} layers on every stage, not {','.join(map(str, layers))}{outside}")
        if plan.batch.global_batch // plan.mesh.data // plan.batch.micro_batch % plan.mesh.pipe:
            found.append(
                "MaxText refuses micro-batches that are no multiple of the stages; change micro_batch or the batch"
            )
    if plan.mesh.context > 1:
        found.append(f"a sequence has {_SEGMENTS} documents at most (max_segments_per_seq); write what your data need")
    if plan.mesh.context > 1 and plan.mesh.context_form == "heads":
        found.append("MaxText gathers keys and values on GPUs instead of exchanging tokens for heads")
    if plan.mesh.shard == "gradients" and plan.mesh.data > 1:
        found.append(
            "MaxText keeps whole sums of gradients (ZeRO-1), so it takes more memory than mesh.shard=gradients"
        )
    if 1 < (groups := _groups(plan)) < plan.mesh.data:
        found.append(f"the optimizer's state is split inside groups alone, so it takes {groups} times the memory")
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
    if (base := option(model, "rope_local_base_freq", 0)) % 1:
        found.append(f"local_rope_max_timescale is a whole number, so it is {round(base)}, not {base}")
    return found
