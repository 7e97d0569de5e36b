# /// script
# requires-python = ">=3.11"
# dependencies = ["torch==2.13.0", "torchtitan==0.3.0", "triton"]
# ///
"""What torchtitan makes of a configuration: its own ConfigManager, mesh, split of the model and pipeline schedule.

    python parse_torchtitan.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
Neither GPUs nor other processes are needed: ranks are those of a fake process group, and the model has no storage.
"""

import contextlib
import functools
import importlib
import io
import json
import pathlib
import re
import sys
import tempfile

import torch
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.pipeline_parallel import _get_pp_rank_to_stage_indices_mapping, _split_module
from torchtitan.models import llama3

MODULE = "torchtitan_plan"


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
        found = [[0, 0, 0] for _ in range(dims.world_size)]
        for column, axis in enumerate(("batch", "pp", "tp")):
            if (dims.dp_replicate * dims.dp_shard, dims.pp, dims.tp)[column] == 1:
                continue
            layout = dims.get_mesh(axis)._layout
            for group in layout.remap_to_tensor(torch.arange(dims.world_size)).reshape(-1, layout.numel()).tolist():
                for place, rank in enumerate(group):
                    found[rank][column] = place
        return found
    finally:
        torch.distributed.destroy_process_group()


@functools.cache
def build(flavor: str) -> torch.nn.Module:
    """Return a model without storage."""
    with torch.device("meta"):
        return llama3.model_registry(flavor).model.build()


def layers(config) -> list[list[int]]:
    """Return first layer and number of layers of each virtual stage, from the split of a model without storage.

    Raises:
        ValueError: stages do not fit the schedule, or a part of the model is on none or on several of them.
    """
    parallelism = config.parallelism
    if parallelism.pipeline_parallel_degree == 1:
        return [[0, len(config.model_spec.model.layers)]]
    model = build(config.model_spec.flavor)
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


def sizes(model) -> list[int]:
    """Return layers, hidden size, feed-forward part, heads, those of keys and values, and the vocabulary of a model."""
    layer = model.layers[0]
    heads = [layer.attention.n_heads, layer.attention.n_kv_heads]
    return [len(model.layers), model.dim, layer.feed_forward.w1.out_features, *heads, model.vocab_size]


def understood(text: str, devices: int) -> dict:
    """Return what the configuration means to torchtitan."""
    config = parse(text)
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
        "recompute": type(ac).__qualname__ if ac else None,
        "sequence": training.seq_len,
        "schedule": parallelism.pipeline_parallel_schedule,
        "sizes": sizes(config.model_spec.model),
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
