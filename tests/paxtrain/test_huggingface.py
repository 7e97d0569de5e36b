"""Models from and to transformers' layout; what transformers computed is kept in *_reference.npz."""

import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from absl import flags

from paxtrain import data, errors, huggingface, huggingface_model, model, sample, tokenizer, train
from paxtrain.config import Config, DataConfig, ModelConfig, RunConfig, from_dict, to_dict
from paxtrain.checkpoint import CheckpointConfig, Checkpoints

HERE = pathlib.Path(__file__).parent
TOLERANCE = 1e-4
COMMON = {"vocab_size": 101, "layers": 3, "hidden": 32, "heads": 4, "sequence": 24, "dtype": "float32"}
LLAMA = {"family": "llama", "kv_heads": 2, "intermediate": 56, "tied_head": False}
LLAMA |= {"rope_theta": 500.0, "norm_epsilon": 1e-4}
SHAPES = {
    "gpt2": COMMON,
    "gpt2 untied": COMMON | {"tied_head": False},
    "llama": COMMON | LLAMA | {"tied_head": True},
    "llama untied": COMMON | LLAMA,
}


def run_config(shape: str, out: pathlib.Path, **sections) -> Config:
    model_values = SHAPES[shape] | {"vocab_multiple": 8}
    return from_dict({"model": model_values, "run": {"out": str(out), "steps": 2}, "optimizer": {"warmup_steps": 0}} | sections)


def theirs(shape: str) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """(weights by transformers' names, what it computed with them)."""
    with np.load(HERE / f"{shape.split()[0]}_reference.npz") as file:
        arrays = dict(file)
    return arrays, {name: arrays.pop(name) for name in ("ids", "logits", "loss")}


def folder_of(weights: dict[str, np.ndarray], config: ModelConfig, folder: pathlib.Path) -> pathlib.Path:
    """A folder as transformers leaves it."""
    folder.mkdir()
    safetensors.numpy.save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_model.to_config(config, "float32", None)))
    tokenizer.bytes_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def random_params(config: ModelConfig) -> model.Params:
    params = model.init(config, jax.random.key(0))
    noise = lambda x: x + 0.1 * jax.random.normal(jax.random.key(x.size), x.shape)  # noqa: E731
    params = jax.device_get(jax.tree.map(noise, params))
    token = params["embedding"]["token"]
    token[..., config.vocab_size :, :] = 0
    return params


def saved(params: model.Params, config: Config) -> None:
    """A run with a checkpoint of these parameters."""
    out = pathlib.Path(config.run.out)
    meta = {"step": 7, "model": sample.architecture(config.model), "config": to_dict(config)}
    with Checkpoints(out / sample.CHECKPOINTS, CheckpointConfig()) as checkpoints:
        checkpoints.save(7, {"params": jax.tree.map(jax.numpy.asarray, params)}, meta)
    tokenizer.bytes_tokenizer().save(str(out / sample.TOKENIZER))


@pytest.mark.parametrize("shape", ["gpt2", "llama untied"])
def test_what_transformers_wrote_gives_its_logits_and_comes_back_bit_by_bit(shape, tmp_path):
    weights, results = theirs(shape)
    config = run_config(shape, tmp_path / "run")
    huggingface.import_model(str(folder_of(weights, config.model, tmp_path / "model")), config)
    params, loaded, _ = sample.load(tmp_path / "run")
    assert loaded == config
    np.testing.assert_allclose(model.logits(params, results["ids"], config.model), results["logits"], atol=TOLERANCE)
    np.testing.assert_allclose(model.loss(params, results["ids"], config.model), results["loss"], atol=TOLERANCE)

    huggingface.export(str(tmp_path / "run"), None, str(tmp_path / "back"), "float32")
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == weights.keys()
    for name, x in back.items():
        np.testing.assert_array_equal(x, weights[name], err_msg=name)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("rope_theta", {"rope_theta": 1000.0}),
        ("norm_epsilon", {"norm_epsilon": 1e-2}),
        ("kv_heads", None),
    ],
)
def test_another_llama_would_show(name, change):
    """Controls: other angles, another epsilon, keys' heads exchanged."""
    weights, results = theirs("llama")
    config = ModelConfig(**SHAPES["llama untied"])
    if change is None:
        for layer in range(config.layers):
            key = f"model.layers.{layer}.self_attn.k_proj.weight"
            weights[key] = np.roll(weights[key], config.head_dim, axis=0)
    params = huggingface_model.params(weights.__getitem__, ModelConfig(**SHAPES["llama untied"] | (change or {})))
    config = ModelConfig(**SHAPES["llama untied"] | (change or {}))
    assert np.abs(model.logits(params, results["ids"], config) - results["logits"]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_out_and_in_again_is_the_same_model(shape, tmp_path, monkeypatch):
    config = run_config(shape, tmp_path / "run")
    params = random_params(config.model)
    saved(params, config)
    monkeypatch.setattr(huggingface, "SHARD", "20KB")
    huggingface.export(str(tmp_path / "run"), 7, str(tmp_path / "model"), "float32")
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and (tmp_path / "model" / huggingface.INDEX).exists()
    names = set().union(*(safetensors.numpy.load_file(tmp_path / "model" / file) for file in files))
    assert ("lm_head.weight" in names) == ("untied" in shape)

    again = run_config(shape, tmp_path / "again")
    huggingface.import_model(str(tmp_path / "model"), again)
    found, loaded, encoder = sample.load(tmp_path / "again", 0)
    assert loaded == again and encoder.encode("ab").ids == [97, 98]
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_bfloat16_takes_half_and_rounds(tmp_path):
    config = run_config("llama untied", tmp_path / "run")
    params = random_params(config.model)
    saved(params, config)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        huggingface.export(str(tmp_path / "run"), None, str(tmp_path / dtype), dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    huggingface.import_model(str(tmp_path / "bfloat16"), run_config("llama untied", tmp_path / "again"))
    found, *_ = sample.load(tmp_path / "again")
    rounded = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)
