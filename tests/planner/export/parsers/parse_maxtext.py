# /// script
# requires-python = ">=3.12"
# dependencies = [
#     "aqtp==0.9.0",
#     "drjax==0.2.1",
#     "flax==0.12.12",
#     "grain==0.2.18",
#     "huggingface-hub==2.4.0",
#     "jax==0.12.0.1",
#     "jaxtyping==0.3.11",
#     "jinja2==3.1.6",
#     "maxtext==0.2.5",
#     "omegaconf==2.4.0",
#     "pathwaysutils==0.1.13",
#     "pillow==13.0.0",
#     "pydantic==2.14.4",
#     "qwix==0.1.8",
#     "transformers==5.24.0",
# ]
# ///
"""What MaxText makes of settings: its own pyconfig, and the mesh that it makes of the devices.

    python parse_maxtext.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
All cases have the same number of devices, which are virtual ones of the CPU. The dependencies are what pyconfig and the
mesh import, a part of what training needs.
"""

import json
import os
import pathlib
import sys

# What a plan says nothing about. MaxText would wait for other processes.
OTHERS = ["run_name=checked", "dataset_type=synthetic", "skip_jax_distributed_system=true", "log_config=false"]


def understood(text: str, devices: int) -> dict:
    """Return what the settings mean to MaxText."""
    import jax
    import numpy as np
    from maxtext.configs import pyconfig
    from maxtext.utils.globals import MAXTEXT_PKG_DIR
    from maxtext.utils.maxtext_utils import create_device_mesh

    assert len(jax.devices()) == devices
    program = os.path.join(MAXTEXT_PKG_DIR, "trainers", "pre_train", "train.py")
    config = pyconfig._initialize_pydantic([program, *text.split(), *OTHERS])
    mesh = create_device_mesh(pyconfig.HyperParameters(config))
    sizes = dict(zip(config.mesh_axes, mesh.shape))
    ids = np.vectorize(lambda device: device.id)(mesh).reshape(sizes["data"], sizes["stage"], -1)
    found = [[0, 0, 0] for _ in range(devices)]
    for position in np.ndindex(ids.shape):
        found[ids[position]] = list(position)
    per_pass = config.num_pipeline_microbatches if config.using_pipeline_parallelism else 1
    return {
        "positions": found,
        "others": [size for axis, size in sizes.items() if axis not in ("data", "stage", "tensor", "tensor_sequence")],
        "stages": [config.num_layers_per_pipeline_stage, config.num_pipeline_repeats, config.pipeline_parallel_layers],
        "micro_batches": per_pass * config.gradient_accumulation_steps,
        "global_batch": config.global_batch_size_to_train_on,
        "sequence_parallel": sizes["tensor_sequence"] > 1,
        "zero1": config.shard_optimizer_over_data,
        "recompute": config.remat_policy,
        "sizes": [config.num_decoder_layers, config.emb_dim, config.mlp_dim, config.num_query_heads],
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab": config.vocab_size,
        "sequence": config.max_target_length,
        "activations": list(config.mlp_activations),
        "decoder": str(getattr(config.decoder_block, "value", config.decoder_block)),
        "norm_epsilon": config.normalization_layer_epsilon,
        "tied": config.logits_via_embedding,
        "dtype": str(getattr(config.dtype, "value", config.dtype)),
    }


def answer(case: dict) -> dict:
    """Return what a case was understood as, or why it was refused."""
    try:
        return understood(**case)
    except (AssertionError, ValueError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    cases, answers = map(pathlib.Path, sys.argv[1:])
    given = json.loads(cases.read_text())
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={given[0]['devices']}"
    answers.write_text(json.dumps([answer(case) for case in given]))
