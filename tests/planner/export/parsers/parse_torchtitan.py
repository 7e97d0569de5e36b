# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "torchtitan==0.3.0"]
# ///
"""What torchtitan makes of a configuration: its own ConfigManager, mesh, split of the model and pipeline schedule.

    python parse_torchtitan.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
Neither GPUs nor other processes are needed: ranks are those of a fake process group, and the model has no storage.
Beside a case's "arrays" its model has those weights, and computes loss and logits on the CPU.
"""

import contextlib
import importlib.util
import io
import json
import os
import pathlib
import re
import sys
import tempfile
import types

os.environ["TORCHDYNAMO_DISABLE"] = "1"  # attention is compiled for GPUs; on the CPU it runs as it is written
if not importlib.util.find_spec("triton"):
    # torch for CPUs has no Triton, a gigabyte; torchtitan imports kernels in it, which only experts would run.
    kernels = types.ModuleType("torchtitan.distributed.minimal_async_ep.kernels")
    kernels.__getattr__ = lambda name: None
    sys.modules[kernels.__name__] = kernels

import numpy as np
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import TORCH_DTYPE_MAP, ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping, _split_module

MODULE = "torchtitan_plan"
SCALED = ("scaling_factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def parse(text: str):
    """Return torchtitan's configuration."""
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, f"{MODULE}.py").write_text(text)
        sys.path.insert(0, folder)
        sys.modules.pop(MODULE, None)
        importlib.invalidate_caches()
        try:
            return ConfigManager().parse_args(["--module", MODULE, "--config", "planned"])
        finally:
            sys.path.remove(folder)


def positions(dims: ParallelDims) -> list[list[int]]:
    """Return data, pipe and tensor of each rank, from the mesh that torchtitan builds."""
    torch.distributed.init_process_group("fake", rank=0, world_size=dims.world_size)
    try:
        dims.build_mesh()
        sizes = {"batch": dims.dp_replicate * dims.dp_shard, "pp": dims.pp, "cp": dims.cp, "tp": dims.tp}
        axes = [axis for axis in sizes if axis != "cp" or dims.cp > 1]
        found = [[0] * len(axes) for _ in range(dims.world_size)]
        for column, axis in enumerate(axes):
            if sizes[axis] == 1:
                continue
            layout = dims.get_mesh(axis)._layout
            for group in layout.remap_to_tensor(torch.arange(dims.world_size)).reshape(-1, layout.numel()).tolist():
                for place, rank in enumerate(group):
                    found[rank][column] = place
        return found
    finally:
        torch.distributed.destroy_process_group()


def layers(config) -> list[list[int]]:
    """Return first layer and number of layers of each virtual stage, from the split of a model without storage.

    Raises:
        ValueError: stages do not fit the schedule, or a part of the model is on none or on several of them.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return [[0, len(config.model_spec.model.layers)]]
    with torch.device("meta"):
        model = config.model_spec.model.build()
    names = parallelism.module_fqns_per_model_part
    single = issubclass(get_schedule_class(parallelism.pipeline_parallel_schedule), PipelineScheduleSingle)
    sizes = (parallelism.pipeline_parallel_degree, parallelism.pipeline_parallel_schedule, len(names))
    mine = [_get_pp_rank_to_stage_indices_mapping(rank, *sizes) for rank in range(sizes[0])]
    if single != all(len(stages) == 1 for stages in mine):
        raise ValueError(f"{sizes[1]} does not run {len(names)} stages on {sizes[0]} ranks")
    parts = [_split_module(model, each) for each in names]
    held = [name for part in parts for name, _ in part.named_parameters()]
    if sorted(held) != sorted(name for name, _ in model.named_parameters()):
        raise ValueError("stages hold other parameters than the model")
    found = [sorted(int(key) for key in part.layers) for part in parts]
    return [[min(each), len(each)] for each in found]


def shape(config) -> dict:
    """Return the sizes of a model, what its layers have in common, its head and its dtype."""
    model = config.model_spec.model
    layer = model.layers[0]
    feed_forward, rope = layer.feed_forward.w1.out_features, layer.attention.rope
    heads = [layer.attention.n_heads, layer.attention.n_kv_heads]
    return {
        "sizes": [len(model.layers), model.dim, feed_forward, *heads, model.vocab_size],
        "rope": [rope.theta, rope.scaling],
        "own": {
            "kind": type(rope).__qualname__,
            "head_dim": layer.attention.head_dim,
            "qk_norm": layer.attention.qk_norm and layer.attention.qk_norm.eps,
            "scaled": [getattr(rope, name) for name in SCALED] if rope.scaling == "llama" else None,
        },
        "norm_epsilon": sorted({norm.eps for each in model.layers for norm in (each.attention_norm, each.ffn_norm)}),
        "tied": model.enable_weight_tying,
        "dtype": config.training.mixed_precision_param,
    }


def apart(arrays: dict[str, torch.Tensor], model) -> dict[str, torch.Tensor]:
    """Return weights by transformers' names, those of a Phi 3 that are one array in its files apart."""
    attention, found = model.layers[0].attention, {}
    heads, groups = attention.n_heads, attention.n_kv_heads
    for name, array in arrays.items():
        first, _, last = name.rpartition("self_attn.qkv_proj")
        if first:
            parts = array.split([n * len(array) // (heads + 2 * groups) for n in (heads, groups, groups)])
            found |= {f"{first}self_attn.{letter}_proj{last}": part for letter, part in zip("qkv", parts)}
        elif "gate_up_proj" in name:
            parts = zip(("gate_proj", "up_proj"), array.chunk(2))
            found |= {name.replace("gate_up_proj", kind): part for kind, part in parts}
        else:
            found[name] = array
    return found


def numbers(config, path: str) -> dict:
    """Return loss and logits of the model, with its parameters in the dtype in which FSDP gathers them.

    Args:
        config: torchtitan's configuration.
        path: an .npz of `tokens` [B, S + 1], `positions` [B, S] and the weights by transformers' names.
    """
    arrays = {name: torch.from_numpy(array) for name, array in np.load(path).items()}
    tokens, positions, spec = arrays.pop("tokens"), arrays.pop("positions"), config.model_spec
    model = spec.model.build()
    adapter = spec.state_dict_adapter(spec.model, None)
    model.load_state_dict(adapter.from_hf(apart(arrays, spec.model)))
    for parameter in model.parameters():  # Module.to would take the imaginary part of the rotary angles, too
        parameter.data = parameter.data.to(TORCH_DTYPE_MAP[config.training.mixed_precision_param])
    with torch.no_grad():
        masks = model.get_attention_masks(positions=positions)
        logits = model(tokens[:, :-1], positions=positions, attention_masks=masks)
        loss, _ = config.loss.loss_fn.build()(logits, tokens[:, 1:], torch.tensor(positions.numel()))
    return {"loss": loss.item(), "logits": logits.float().tolist()}


def understood(text: str, devices: int, arrays: str = "") -> dict:
    """Return what the configuration means to torchtitan, or with arrays what its model computes."""
    config = parse(text)
    config.model_spec.model.update_from_config(config=config)  # as the trainer does, which refuses what does not fit
    if arrays:
        return numbers(config, arrays)
    parallelism, training = config.parallelism, config.training
    dims = ParallelDims.from_config(parallelism, devices)
    data = dims.dp_replicate * dims.dp_shard
    steps, rest = divmod(training.global_batch_size, training.local_batch_size * data)
    if rest:
        raise ValueError("the global batch is no multiple of the local one times data, as the trainer asks for")
    split = training.local_batch_size // parallelism.pipeline_parallel_microbatch_size if dims.pp > 1 else 1
    ac = config.activation_checkpoint
    return {
        "positions": positions(dims),
        "layers": layers(config),
        "micro_batches": steps * split,
        "sequence_parallel": parallelism.enable_sequence_parallel,
        "zero1": dims.dp_shard > 1,
        "shared": [dims.dp_replicate, dims.dp_shard, parallelism.fsdp_reshard_after_forward, dims.cp],
        "recompute": type(ac).__qualname__ if ac else None,
        "sequence": training.seq_len,
        "schedule": parallelism.pipeline_parallel_schedule,
        **shape(config),
    }


def answer(case: dict) -> dict:
    """Return what a case was understood as, or why it was refused."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return understood(**case)
    except (AssertionError, AttributeError, ImportError, TypeError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except SystemExit:  # of tyro, which draws its message in a box
        return {"refused": " ".join(re.findall(r"[^\s│╭╮╰╯─]+", said.getvalue()))}


if __name__ == "__main__":
    cases, answers = map(pathlib.Path, sys.argv[1:])
    answers.write_text(json.dumps([answer(case) for case in json.loads(cases.read_text())]))
