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
#     "sentencepiece==0.2.3",
#     "sympy==1.14.0",
#     "tiktoken==0.14.0",
#     "tokamax==0.0.17",
#     "transformers==5.24.0",
# ]
# ///
"""What MaxText makes of settings: its own pyconfig, and the mesh that it makes of the devices.

    python parse_maxtext.py CASES ANSWERS

CASES is a JSON list of {"text", "devices"}; ANSWERS becomes a list of what each was understood as, or {"refused"}.
All cases have the same number of devices, which are virtual ones of the CPU. Beside a case's "arrays" its model has
those weights, and computes loss and logits. The dependencies are what pyconfig, the mesh and the model import, which
is a part of what training needs.
"""

import json
import os
import pathlib
import sys

import numpy as np

# What a plan says nothing about. MaxText would wait for other processes.
OTHERS = ["run_name=checked", "dataset_type=synthetic", "skip_jax_distributed_system=true", "log_config=false"]
_LLAMA_NORMS = {
    "pre_self_attention_layer_norm": "input_layernorm",
    "post_self_attention_layer_norm": "post_attention_layernorm",
}
_GEMMA_NORMS = {
    "pre_self_attention_norm": "input_layernorm",
    "post_self_attention_norm": "post_attention_layernorm",
    "pre_ffw_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_NORMS = {
    "gemma2": _GEMMA_NORMS,
    "gemma3": _GEMMA_NORMS,
    "olmo3": {
        "post_self_attention_layer_norm": "post_attention_layernorm",
        "post_mlp_layer_norm": "post_feedforward_layernorm",
    },
}
AXES = ("data", "stage", "fsdp", "context", "tensor", "tensor_sequence")
_MATRICES = {"wi_0": "mlp.gate_proj", "wi_1": "mlp.up_proj", "wo": "mlp.down_proj"}
OF_MODEL = ("attention_bias", "use_qk_norm", "rope_type", "rope_linear_scaling_factor", "rope_max_timescale")
OF_LAYERS = ("attn_logits_soft_cap", "final_logits_soft_cap", "sliding_window_size", "local_rope_max_timescale")


def _heads(kernel: np.ndarray, heads: int) -> np.ndarray:
    """Return a kernel [H, N * D], or a bias [N * D], with its heads apart."""
    return kernel.reshape(*kernel.shape[:-1], heads, -1)


def _turned(array: np.ndarray) -> np.ndarray:
    """Return queries or keys [..., N, D] with dims i and i + D / 2, which turn together, side by side."""
    return array.reshape(*array.shape[:-1], 2, -1).swapaxes(-1, -2).reshape(array.shape)


def _projection(of: dict[str, np.ndarray], name: str, config) -> dict[str, np.ndarray]:
    """Return the kernel of queries, keys or values, and what else they have, by what follows their path."""
    letter, heads = name[0], config.num_query_heads if name == "query" else config.num_kv_heads
    turned = _turned if config.rope_type == "llama3.1" and name != "value" else lambda array: array
    found = {"kernel": turned(_heads(of[f"self_attn.{letter}_proj.weight"].T, heads))}
    if name == "query" and config.decoder_block.value in ("llama2", "mistral", "gemma2"):
        found["kernel"] = found["kernel"] / np.sqrt(config.head_dim)  # there the root lies in the query's weights
    if config.attention_bias:
        found["bias"] = turned(_heads(of[f"self_attn.{letter}_proj.bias"], heads))
    norm = f"self_attn.{letter}_norm.weight"
    return {f"{name}/{part}": array for part, array in found.items()} | (
        {f"{name}_norm/scale": of[norm]} if norm in of else {}
    )


def _apart(of: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Return the arrays of a layer, those of a Phi 3 that are one in its files apart."""
    if "self_attn.qkv_proj.weight" not in of:
        return of
    ends = config.head_dim * np.cumsum([config.num_query_heads, config.num_kv_heads])
    parts = np.split(of["self_attn.qkv_proj.weight"], ends)
    gate, up = np.split(of["mlp.gate_up_proj.weight"], 2)
    return {
        **of,
        **{f"self_attn.{letter}_proj.weight": part for letter, part in zip("qkv", parts)},
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
    }


def _llama(arrays: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Return the weights of a Llama or one of its kind by MaxText's paths, from those by transformers' names."""
    decoder = config.decoder_block.value
    if decoder.startswith("gemma"):  # as MaxText's converter does
        arrays = {name: array + 1 if name.endswith("norm.weight") else array for name, array in arrays.items()}
        arrays["model.embed_tokens.weight"] = arrays["model.embed_tokens.weight"] * np.sqrt(config.emb_dim)
    found = {
        "token_embedder/embedding": arrays["model.embed_tokens.weight"],
        "decoder/decoder_norm/scale": arrays["model.norm.weight"],
    }
    if "lm_head.weight" in arrays:
        found["decoder/logits_dense/kernel"] = arrays["lm_head.weight"].T
    attention, pairs = "attention" if decoder == "olmo3" else "self_attention", decoder == "gemma2"
    for layer in range(config.num_decoder_layers * (2 if pairs else 1)):
        first, here = f"model.layers.{layer}.", f"decoder/layers_{layer // 2 if pairs else layer}"
        last = ("_local", "_global")[layer % 2] if pairs else ""
        of = {name.removeprefix(first): array for name, array in arrays.items() if name.startswith(first)}
        of = _apart(of, config)
        norms = _NORMS.get(decoder, _LLAMA_NORMS)
        found |= {f"{here}/{path}{last}/scale": of[f"{name}.weight"] for path, name in norms.items()}
        found |= {f"{here}/mlp{last}/{path}/kernel": of[f"{name}.weight"].T for path, name in _MATRICES.items()}
        out = of["self_attn.o_proj.weight"].T
        found[f"{here}/{attention}{last}/out/kernel"] = out.reshape(config.num_query_heads, -1, config.emb_dim)
        for name in ("query", "key", "value"):
            projection = _projection(of, name, config)
            found |= {f"{here}/{attention}{last}/{path}": array for path, array in projection.items()}
    return found


def _gpt3(arrays: dict[str, np.ndarray], config) -> dict[str, np.ndarray]:
    """Return the weights of a GPT-2 by MaxText's paths; scales of its norms are stored less 1."""
    heads = config.num_query_heads
    found = {
        "token_embedder/embedding": arrays["transformer.wte.weight"],
        "decoder/position_embedder/embedding": arrays["transformer.wpe.weight"],
        "decoder/decoder_norm/scale": arrays["transformer.ln_f.weight"] - 1,
        "decoder/decoder_norm/bias": arrays["transformer.ln_f.bias"],
    }
    if "lm_head.weight" in arrays:
        found["decoder/logits_dense/kernel"] = arrays["lm_head.weight"].T
    for layer in range(config.num_decoder_layers):
        here, there = f"transformer.h.{layer}", f"decoder/layers_{layer}"
        norms = {"ln_1": "pre_self_attention_norm", "ln_2": "mlp/mlp_layer_norm"}
        for part, name in (("weight", "kernel"), ("bias", "bias")):
            for norm, path in norms.items():
                found[f"{there}/{path}/{'scale' if part == 'weight' else part}"] = arrays[f"{here}.{norm}.{part}"] - (
                    part == "weight"
                )
            queries_keys_values = np.split(arrays[f"{here}.attn.c_attn.{part}"], 3, axis=-1)
            for path, array in zip(("query", "key", "value"), queries_keys_values, strict=True):
                found[f"{there}/self_attention/{path}/{name}"] = _heads(array, heads)
            out = arrays[f"{here}.attn.c_proj.{part}"]
            found[f"{there}/self_attention/out/{name}"] = out if out.ndim == 1 else out.reshape(heads, -1, out.shape[1])
            found[f"{there}/mlp/wi/{name}"] = arrays[f"{here}.mlp.c_fc.{part}"]
            found[f"{there}/mlp/wo/{name}"] = arrays[f"{here}.mlp.c_proj.{part}"]
    return found


def numbers(config, mesh, path: str) -> dict:
    """Return loss and logits of the model.

    Args:
        config: MaxText's configuration.
        mesh: mesh of one device.
        path: an .npz of `tokens` [B, S + 1], `positions` [B, S] and the weights by transformers' names.
    """
    import jax
    from flax import nnx
    from maxtext.models.models import Transformer
    from maxtext.utils import max_utils

    arrays = dict(np.load(path))
    tokens, positions = arrays.pop("tokens"), arrays.pop("positions")
    weights = (_gpt3 if config.decoder_block.value == "gpt3" else _llama)(arrays, config)
    with mesh:
        model = Transformer(config, mesh, quant=None, rngs=nnx.Rngs(params=0, dropout=1))
        found = nnx.to_flat_state(nnx.state(model, nnx.Param))
        assert {"/".join(map(str, path)) for path, _ in found} == set(weights)
        for path, parameter in found:
            array = weights["/".join(map(str, path))]
            assert parameter.shape == array.shape, (path, parameter.shape, array.shape)
            parameter[...] = array.astype(np.float32)
        segments = np.cumsum(positions == 0, axis=1)
        logits = model(tokens[:, :-1], positions, segments, enable_dropout=config.enable_dropout)
        one_hot = jax.nn.one_hot(tokens[:, 1:], config.vocab_size)
        loss, _ = max_utils.cross_entropy_with_logits(logits, one_hot, z_loss=config.z_loss_multiplier)
    return {"loss": float(loss.mean()), "logits": np.asarray(logits, np.float32).tolist()}


def understood(text: str, devices: int, arrays: str = "") -> dict:
    """Return what the settings mean to MaxText, or with arrays what its model computes."""
    import jax
    from maxtext.configs import pyconfig
    from maxtext.utils.globals import MAXTEXT_PKG_DIR
    from maxtext.utils.maxtext_utils import create_device_mesh

    assert len(jax.devices()) == devices
    program = os.path.join(MAXTEXT_PKG_DIR, "trainers", "pre_train", "train.py")
    more = [*OTHERS, "scan_layers=false"] if arrays else OTHERS  # a layer's weights have names of their own
    config = pyconfig._initialize_pydantic([program, *text.split(), *more])
    mesh = create_device_mesh(pyconfig.HyperParameters(config))
    if arrays:
        return numbers(pyconfig.HyperParameters(config), jax.sharding.Mesh(mesh, config.mesh_axes), arrays)
    sizes = dict(zip(config.mesh_axes, mesh.shape))
    parts = [sizes[axis] for axis in ("data", "stage", "fsdp", "context")]
    ids = np.vectorize(lambda device: device.id)(mesh).reshape(*parts, -1)
    found = [[0, 0, 0, 0] for _ in range(devices)]
    for group, stage, shard, part, tensor in np.ndindex(ids.shape):
        shared = [part] if sizes["context"] > 1 else []
        found[ids[group, stage, shard, part, tensor]] = [group * sizes["fsdp"] + shard, stage, *shared, tensor]
    per_pass = config.num_pipeline_microbatches if config.using_pipeline_parallelism else 1
    return {
        "positions": found,
        "others": [size for axis, size in sizes.items() if axis not in AXES],
        "shared": [sizes["data"], sizes["fsdp"], sizes["context"], config.context_parallel_strategy, config.attention],
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
        "own": {name: getattr(config, name) for name in OF_MODEL},
        "of_layers": {name: getattr(config, name) for name in OF_LAYERS},
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
