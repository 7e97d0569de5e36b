# /// script
# requires-python = ">=3.12"
# dependencies = ["megatron-core==0.19.2", "numpy", "torch==2.13.0"]
# ///
"""What Megatron-LM makes of flags: its own argparse, validate_args, TransformerConfig, layer split and rank order.

    python parse_megatron.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
No GPU is needed: the one question that Megatron-LM asks of it is its architecture, which is said to be Hopper's.
"""

import contextlib
import io
import json
import os
import pathlib
import sys

from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.training import arguments

HOPPER = 9
OF_MODEL = ("kv_channels", "add_qkv_bias", "qk_layernorm", "window_size", "no_rope_freq")
OF_POSITIONS = ("rotary_percent", "rotary_seq_len_interpolation_factor", "use_rope_scaling")
# What a plan says nothing about, and validate_args asks for; fused rotary positions would need Transformer Engine.
OTHERS = "--mock-data --tokenizer-type NullTokenizer --vocab-size 50256 --lr 1e-4 --train-iters 10 --no-rope-fusion"


def parse(text: str, devices: int):
    """Return Megatron-LM's arguments and its configuration of the model."""
    os.environ |= {"WORLD_SIZE": str(devices), "RANK": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    sys.argv = ["pretrain_gpt.py", *text.split(), *OTHERS.split()]
    arguments.get_device_arch_version = lambda: HOPPER
    args = arguments.validate_args(arguments.parse_args())
    return args, arguments.core_transformer_config_from_args(args)


def positions(args) -> list[list[int]]:
    """Return data, pipe and tensor of each rank, from the groups that initialize.py makes."""
    order = "tp-cp-ep-pp-dp" if args.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp"
    sizes = {"tp": args.tensor_model_parallel_size, "dp": args.data_parallel_size}
    groups = parallel_state.RankGenerator(ep=1, cp=1, pp=args.pipeline_model_parallel_size, order=order, **sizes)
    found = [[0, 0, 0] for _ in range(args.world_size)]
    for column, axis in enumerate(("dp", "pp", "tp")):
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


def understood(text: str, devices: int) -> dict:
    """Return what the flags mean to Megatron-LM."""
    args, config = parse(text, devices)
    batches = ConstantNumMicroBatchesCalculator(
        args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False, 0
    )
    return {
        "positions": positions(args),
        "layers": layers(args, config),
        "micro_batches": batches.get(),
        "sequence_parallel": config.sequence_parallel,
        "zero1": args.use_distributed_optimizer,
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
