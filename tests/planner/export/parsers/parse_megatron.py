# /// script
# requires-python = ">=3.12"
# dependencies = ["megatron-core==0.19.2", "numpy", "torch==2.13.0"]
# ///
"""What Megatron-LM makes of flags: its own argparse, validate_args, TransformerConfig, layer split and rank order.

    python parse_megatron.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
No GPU is needed: the one question that Megatron-LM asks of it is its architecture, which is said to be Hopper's.
Beside a case's "arrays" the GPTModel that it builds of the flags has those weights, and computes loss and logits on the
CPU, of the layers that need neither Transformer Engine nor Apex.
"""

import contextlib
import io
import json
import os
import pathlib
import sys

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # activations are compiled for GPUs; on the CPU they run as they are written

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.datasets.gpt_dataset import _get_ltor_masks_and_position_ids
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import arguments
from megatron.training.argument_utils import gpt_config_from_args
from megatron.training.models import GPTModelBuilder
from torch.overrides import TorchFunctionMode

HOPPER = 9
OF_MODEL = ("kv_channels", "add_qkv_bias", "qk_layernorm", "window_size", "no_rope_freq")
SHARED = ("use_megatron_fsdp", "data_parallel_sharding_strategy", "num_distributed_optimizer_instances")
SHARED += ("context_parallel_size", "cp_comm_type")
OF_POSITIONS = ("rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
# What a plan says nothing about, and validate_args asks for; fused rotary positions would need Transformer Engine.
OTHERS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4 --train-iters 10 --no-rope-fusion"
# Layers of torch's own modules, which run on the CPU.
LOCAL = "--transformer-impl local --no-persist-layer-norm --no-gradient-accumulation-fusion --use-cpu-initialization"

# Names of a layer's parts, and transformers' names of them.
_LAYER = {
    "input_layernorm": "input_layernorm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
    "mlp.linear_fc1": "mlp.gate_up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}
_QKV = [f"self_attn.{letter}_proj.weight" for letter in "qkv"]
_NORMS = {f"self_attention.{letter}_layernorm": f"self_attn.{letter}_norm" for letter in "qk"}
_GPT2_LAYER = {
    "input_layernorm": "ln_1",
    "self_attention.linear_qkv": "attn.c_attn",
    "self_attention.linear_proj": "attn.c_proj",
    "pre_mlp_layernorm": "ln_2",
    "mlp.linear_fc1": "mlp.c_fc",
    "mlp.linear_fc2": "mlp.c_proj",
}


def parse(text: str, devices: int, more: str = ""):
    """Return Megatron-LM's arguments and its configuration of the model."""
    connections = "8" if "--use-megatron-fsdp" in text else "1"
    os.environ |= {"WORLD_SIZE": str(devices), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": connections}
    sys.argv = ["pretrain_gpt.py", *text.split(), *OTHERS.split(), *more.split()]
    arguments.get_device_arch_version = lambda: HOPPER
    args = arguments.validate_args(arguments.parse_args())
    return args, arguments.core_transformer_config_from_args(args)


def positions(args) -> list[list[int]]:
    """Return data, pipe and tensor of each rank, from the groups that initialize.py makes."""
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    sizes = {"tp": args.tensor_model_parallel_size, "dp": args.data_parallel_size, "cp": args.context_parallel_size}
    groups = parallel_state.RankGenerator(ep=1, pp=args.pipeline_model_parallel_size, order=order, **sizes)
    axes = ("dp", "pp", "cp", "tp") if args.context_parallel_size > 1 else ("dp", "pp", "tp")
    found = [[0] * len(axes) for _ in range(args.world_size)]
    for column, axis in enumerate(axes):
        for group in groups.get_ranks(axis):
            for place, rank in enumerate(group):
                found[rank][column] = place
    return found


def layers(args, config) -> list[list[int]]:
    """Return first layer and number of layers of each virtual stage, in the order of the model."""
    stages, chunks = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
    found = []
    for chunk in range(chunks or 1):
        for stage in range(stages):
            parallel_state.set_pipeline_model_parallel_rank(stage)  # layouts take no other rank
            where = {"vp_stage": chunk if chunks else None, "pp_rank": stage}
            found.append([get_transformer_layer_offset(config, **where), get_num_layers_to_build(config, **where)])
    return found


def _in_groups(arrays: list[np.ndarray], groups: int) -> np.ndarray:
    """Return rows of queries, of keys and of values as one array: those of a group's queries, its key and its value."""
    apart = [array.reshape(groups, -1, *array.shape[1:]) for array in arrays]
    return np.concatenate(apart, axis=1).reshape(-1, *arrays[0].shape[1:])


def _llama(arrays: dict[str, np.ndarray], args) -> dict[str, np.ndarray]:
    """Return the weights of a Llama or one of its kind by Megatron-LM's names, from those by transformers' names."""
    found = {
        "embedding.word_embeddings.weight": arrays["model.embed_tokens.weight"],
        "decoder.final_layernorm.weight": arrays["model.norm.weight"],
    }
    if "lm_head.weight" in arrays:
        found["output_layer.weight"] = arrays["lm_head.weight"]
    for layer in range(args.num_layers):
        first, here = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        of = {name.removeprefix(first): array for name, array in arrays.items() if name.startswith(first)}
        if "self_attn.qkv_proj.weight" in of:
            ends = args.kv_channels * np.cumsum([args.num_attention_heads, args.num_query_groups])
            of |= dict(zip(_QKV, np.split(of["self_attn.qkv_proj.weight"], ends)))
        else:
            of["mlp.gate_up_proj.weight"] = np.concatenate([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
        for part in ("weight", "bias") if args.add_qkv_bias else ("weight",):
            rows = [of[name.replace("weight", part)] for name in _QKV]
            found[f"{here}self_attention.linear_qkv.{part}"] = _in_groups(rows, args.num_query_groups)
        names = _LAYER | (_NORMS if args.qk_layernorm else {})
        found |= {f"{here}{name}.weight": of[f"{there}.weight"] for name, there in names.items()}
    return found


def _gpt2(arrays: dict[str, np.ndarray], args) -> dict[str, np.ndarray]:
    """Return the weights of a GPT-2 by Megatron-LM's names; transformers has kernels of it the other way round."""
    found = {
        "embedding.word_embeddings.weight": arrays["transformer.wte.weight"],
        "embedding.position_embeddings.weight": arrays["transformer.wpe.weight"],
        **{f"decoder.final_layernorm.{part}": arrays[f"transformer.ln_f.{part}"] for part in ("weight", "bias")},
    }
    if "lm_head.weight" in arrays:
        found["output_layer.weight"] = arrays["lm_head.weight"]
    for layer in range(args.num_layers):
        for name, there in _GPT2_LAYER.items():
            for part in ("weight", "bias"):
                array = arrays[f"transformer.h.{layer}.{there}.{part}"].T  # of vectors the same
                if there == "attn.c_attn":
                    array = _in_groups(np.split(array, 3), args.num_attention_heads)
                found[f"decoder.layers.{layer}.{name}.{part}"] = array
    return found


class _OnCpu(TorchFunctionMode):
    """Makes on the CPU what Megatron-LM makes on the GPU by name, as masks of windows."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def numbers(args, config, path: str) -> dict:
    """Return loss and logits of the model.

    Args:
        args: Megatron-LM's arguments.
        config: its configuration of the layers.
        path: an .npz of `tokens` [B, S + 1], `positions` [B, S] and the weights by transformers' names.
    """
    torch.cuda.current_device = lambda: "cpu"
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(inference_rng_tracker=True)  # the usual one asks the GPU for its state
    arrays = dict(np.load(path))
    tokens, positions = (torch.from_numpy(arrays.pop(name)) for name in ("tokens", "positions"))
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = GPTModelBuilder(gpt_config_from_args(args, config)).build_model(groups).eval()
    weights = (_llama if args.swiglu else _gpt2)(arrays, args)
    found = dict(model.named_parameters())
    assert set(found) == set(weights)
    inputs, labels, documents, mask = tokens[:, :-1], tokens[:, 1:], None, None
    if args.dataloader_inter_document_masking:
        inputs, labels, positions = (array.reshape(1, -1) for array in (inputs, labels, positions))
        bounds = torch.cat([torch.nonzero(positions[0] == 0)[:, 0], torch.tensor([positions.numel()])]).int()
        documents = PackedSeqParams("thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        documents.max_seqlen_q = documents.max_seqlen_kv = int((bounds[1:] - bounds[:-1]).max())
    else:
        mask, _, places = _get_ltor_masks_and_position_ids(inputs[0], -1, False, False, False, True)
        mask, positions = mask[None], places.expand_as(inputs)
    with torch.no_grad(), _OnCpu():
        for name, parameter in found.items():
            assert parameter.shape == weights[name].shape, (name, parameter.shape, weights[name].shape)
            parameter.copy_(torch.from_numpy(weights[name]))
        losses = model(inputs, positions, mask, labels=labels, packed_seq_params=documents)
        logits = model(inputs, positions, mask, packed_seq_params=documents)
    return {"loss": losses.float().mean().item(), "logits": logits.float().tolist()}


def understood(text: str, devices: int, arrays: str = "") -> dict:
    """Return what the flags mean to Megatron-LM, or with arrays what its model computes."""
    args, config = parse(text, devices, LOCAL if arrays else "")
    if arrays:
        return numbers(args, config, arrays)
    batches = ConstantNumMicroBatchesCalculator(
        args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 0
    )
    return {
        "positions": positions(args),
        "layers": layers(args, config),
        "micro_batches": batches.get(),
        "sequence_parallel": config.sequence_parallel,
        "zero1": args.use_distributed_optimizer,
        "shared": [getattr(args, name) for name in SHARED],
        "reduce_dtype": "float32" if args.accumulate_allreduce_grads_in_fp32 else "bfloat16",
        "recompute": [config.recompute_granularity, config.recompute_method, config.recompute_num_layers],
        "sizes": [config.num_layers, config.hidden_size, config.ffn_hidden_size, config.num_attention_heads],
        "kv_heads": config.num_query_groups,
        "gated": config.gated_linear_unit,
        "norm_epsilon": config.layernorm_epsilon,
        "tied": not args.untie_embeddings_and_output_weights,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "vocab": args.padded_vocab_size,
        "rotary": args.rotary_base if args.position_embedding_type == "rope" else None,
        "dropout": [config.hidden_dropout, config.attention_dropout],
        "documents_apart": args.dataloader_inter_document_masking,
        "own": {name: getattr(config, name) for name in OF_MODEL}
        | {name: getattr(args, name) for name in OF_POSITIONS},
    }


def answer(case: dict) -> dict:
    """Return what a case was understood as, or why it was refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return understood(**case)
    except (AssertionError, ValueError, RuntimeError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except SystemExit:
        return {"refused": said.getvalue().strip().splitlines()[-1]}


if __name__ == "__main__":
    cases, answers = map(pathlib.Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(case) for case in json.loads(cases.read_text())]))
