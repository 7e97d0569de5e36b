"""Folders of models in Hugging Face's layout and runs that begin with them, for tests."""

import json
import pathlib

import jax
import numpy as np
import safetensors.numpy

from paxtrain.config import CheckpointConfig, Config, ModelConfig, from_dict, to_dict
from paxtrain.data import tokenizer
from paxtrain.huggingface import conversion
from paxtrain.huggingface.importing import Model
from paxtrain.model import transformer
from paxtrain.run import sampling
from paxtrain.run.checkpoint import Checkpoints

REFERENCES = pathlib.Path(__file__).parents[1] / "model"
TOLERANCE = 1e-4
COMMON = {"vocab_size": 101, "layers": 3, "hidden": 32, "heads": 4, "sequence": 24, "dtype": "float32"}
LLAMA = {"family": "llama", "kv_heads": 2, "intermediate": 56, "tied_head": False}
LLAMA |= {"rope_theta": 500.0, "norm_epsilon": 1e-4}
logits, loss = (jax.jit(function, static_argnums=2) for function in (transformer.logits, transformer.loss))
SHAPES = {
    "gpt2": COMMON,
    "gpt2 untied": COMMON | {"tied_head": False},
    "llama": COMMON | LLAMA | {"tied_head": True},
    "llama untied": COMMON | LLAMA,
    "gpt_neox untied": COMMON | LLAMA | {"family": "gpt_neox", "kv_heads": 0, "heads": 2},
}


def run_config(shape: str, out: pathlib.Path, **sections) -> Config:
    model_values = SHAPES[shape] | {"vocab_multiple": 8}
    run = {"out": str(out), "steps": 2, "eval_batches": 1, "sample_tokens": 0}
    return from_dict({"model": model_values, "run": run, "optimizer": {"warmup_steps": 0}} | sections)


def theirs(shape: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights by transformers' names, what it computed with them)."""
    with np.load(REFERENCES / f"{shape.split()[0]}_reference.npz") as file:
        arrays = dict(file)
    return arrays, {name: arrays.pop(name) for name in ("ids", "logits", "loss")}


def folder_of(weights: dict[str, np.ndarray], config: ModelConfig, folder: pathlib.Path) -> pathlib.Path:
    """A folder as transformers leaves it."""
    folder.mkdir()
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(conversion.to_config(config, "float32")))
    tokenizer.bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def random_params(config: ModelConfig) -> transformer.Params:
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: rng.normal(0, 0.1, x.shape).astype(x.dtype), transformer.shapes(config))
    params["embedding"]["token"][..., config.vocab_size :, :] = 0
    return params


def saved(params: transformer.Params, config: Config) -> None:
    """A run with a checkpoint of these parameters."""
    out = pathlib.Path(config.run.out)
    meta = {"step": 7, "model": sampling.architecture(config.model), "config": to_dict(config)}
    with Checkpoints(out / sampling.CHECKPOINTS, CheckpointConfig()) as checkpoints:
        checkpoints.save(7, {"params": jax.tree.map(jax.numpy.asarray, params)}, meta)
    tokenizer.bytes_tokenizer().save(str(out / sampling.TOKENIZER))


def begin(folder: pathlib.Path, config: Config) -> None:
    """A run that has begun with the weights of a folder."""
    model, out = Model(folder, config.model), pathlib.Path(config.run.out)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), transformer.shapes(config.model)
    )
    params, _ = model.params(like)
    saved(params, config)
    (out / sampling.TOKENIZER).unlink()
    model.keep(out)
