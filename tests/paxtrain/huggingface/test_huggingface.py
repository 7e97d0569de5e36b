"""Models from and to transformers' layout; what transformers computed is kept in *_reference.npz."""

import dataclasses
import json
import pathlib

import jax
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.config import ModelConfig, from_dict
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion, exporting
from paxtrain.huggingface.exporting import export
from paxtrain.huggingface.files import INDEX
from paxtrain.run import sampling
from paxtrain.run.checkpoint_reading import restore_params
from tests.paxtrain.huggingface.folders import (
    SHAPES,
    TOLERANCE,
    begin,
    folder_of,
    logits,
    loss,
    random_params,
    run_config,
    saved,
    theirs,
)


@pytest.mark.parametrize("shape", ["gpt2", "llama untied", "gpt_neox untied"])
def test_what_transformers_wrote_gives_its_logits_and_comes_back_bit_by_bit(shape, tmp_path):
    weights, results = theirs(shape)
    config = run_config(shape, tmp_path / "run")
    begin(folder_of(weights, config.model, tmp_path / "model"), config)
    params, loaded, _ = sampling.load(tmp_path / "run")
    assert loaded.model == config.model
    np.testing.assert_allclose(logits(params, results["ids"], config.model), results["logits"], atol=TOLERANCE)
    np.testing.assert_allclose(loss(params, results["ids"], config.model), results["loss"], atol=TOLERANCE)

    export(str(tmp_path / "run"), str(tmp_path / "back"))
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
    params = conversion.params(weights.__getitem__, ModelConfig(**SHAPES["llama untied"] | (change or {})))
    config = ModelConfig(**SHAPES["llama untied"] | (change or {}))
    assert np.abs(logits(params, results["ids"], config) - results["logits"]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("shape", SHAPES)
def test_out_and_in_again_is_the_same_model(shape, tmp_path, monkeypatch):
    config = run_config(shape, tmp_path / "run")
    params = random_params(config.model)
    saved(params, config)
    monkeypatch.setattr(exporting, "SHARD", "20KB")
    export(str(tmp_path / "run"), str(tmp_path / "model"), step=7)
    files = sorted(path.name for path in (tmp_path / "model").glob("*.safetensors"))
    assert len(files) > 2 and (tmp_path / "model" / INDEX).exists()
    (tmp_path / "mine").touch()  # with the mode that the umask says
    modes = {path.name: oct(path.stat().st_mode) for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {oct((tmp_path / "mine").stat().st_mode)}, modes
    names = set().union(*(safetensors.numpy.load_file(tmp_path / "model" / file) for file in files))
    assert bool({"lm_head.weight", "embed_out.weight"} & names) == ("untied" in shape)

    again = run_config(shape, tmp_path / "again")
    begin(tmp_path / "model", again)
    found, loaded, encoder = sampling.load(tmp_path / "again")
    assert loaded.model == again.model and encoder.encode("ab").ids == [97, 98]
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_float16_and_a_tied_head_that_is_there_twice(tmp_path):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    half = {name: x.astype(np.float16) for name, x in weights.items()}
    folder = folder_of(half | {"lm_head.weight": half["transformer.wte.weight"]}, config.model, tmp_path / "model")
    begin(folder, config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert back.keys() == half.keys()  # once
    assert all(np.array_equal(back[name], x.astype(np.float32)) for name, x in half.items())


def test_bfloat16_takes_half_and_rounds(tmp_path):
    config = run_config("llama untied", tmp_path / "run")
    params = random_params(config.model)
    saved(params, config)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        export(str(tmp_path / "run"), str(tmp_path / dtype), dtype=dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    begin(tmp_path / "bfloat16", run_config("llama untied", tmp_path / "again"))
    found, *_ = sampling.load(tmp_path / "again")
    rounded = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


def test_a_models_first_and_last_token_come_through(tmp_path):
    """Those that config.json and tokenizer_config.json name, which a harness and generation need."""
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    words = {"<s>": 1, "</s>": 2, "<|endoftext|>": 3}
    Tokenizer(WordLevel(words, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(values | {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 3})
    )
    settings = {"eos_token": {"content": "</s>"}, "chat_template": "...", "model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 2], "temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("a template")
    older = {"eos_token": "<|endoftext|>", "unk_token": {"content": "<s>", "lstrip": False}}
    (folder / "special_tokens_map.json").write_text(json.dumps(older))
    begin(folder, config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["bos_token_id"], back["eos_token_id"], back["pad_token_id"]) == (1, [2, 3], 3)
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": 3, "temperature": 0.6}
    kept = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    wanted = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24, "bos_token": "<s>"}
    wanted |= {"unk_token": "<s>", "pad_token": "<|endoftext|>"}
    assert kept == settings | wanted | {"chat_template": "a template"}
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_several_tokens_that_end_a_text_come_through_without_a_generation_config(tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": [98, 97]}))
    begin(folder, config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    assert json.loads((tmp_path / "back" / "config.json").read_text())["eos_token_id"] == [98, 97]
    settings = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "b"


def test_a_run_of_prepared_data_exports_what_ends_its_documents(tmp_path):
    """Also if it is another token than `<|endoftext|>`."""
    config = run_config("gpt2", tmp_path / "run")
    saved(random_params(config.model), config)
    words = {"<s>": 1, "</s>": 2}
    Tokenizer(WordLevel(words, unk_token="<s>")).save(str(tmp_path / "run" / "tokenizer.json"))
    settings = {"bos_token": "<s>", "add_bos_token": True, "eos_token": "</s>", "split_special_tokens": True}
    (tmp_path / "run" / "tokenizer_config.json").write_text(json.dumps(settings))
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (1, 2)
    # transformers' own rule for special tokens holds: chat templates spell them.
    assert "split_special_tokens" not in json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())


def changed(folder: pathlib.Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    "values",
    [
        {"bos_token_id": 50256, "eos_token_id": [2**40, 101]},
        {"max_position_embeddings": 2048},
    ],
)
def test_what_no_array_depends_on_is_imported(values, tmp_path):
    weights, results = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    changed(folder_of(weights, config.model, tmp_path / "model"), **values)
    begin(tmp_path / "model", config)
    params, *_ = sampling.load(tmp_path / "run")
    np.testing.assert_allclose(logits(params, results["ids"], config.model), results["logits"], atol=TOLERANCE)
    # A longer sequence and other angles go on from the same arrays.
    longer = dataclasses.replace(config.model, sequence=48, rope_theta=7000.0)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params)
    restore_params(tmp_path / "run" / "checkpoints", abstract, sampling.architecture(longer))
    with pytest.raises(UserError, match="of another model: norm_epsilon is"):
        other = dataclasses.replace(longer, norm_epsilon=1e-3)
        restore_params(tmp_path / "run" / "checkpoints", abstract, sampling.architecture(other))


def test_a_shorter_gpt2_has_the_first_positions_logits(tmp_path):
    weights, results = theirs("gpt2")
    folder = folder_of(weights, ModelConfig(**SHAPES["gpt2"]), tmp_path / "model")
    values = SHAPES["gpt2"] | {"sequence": 16}
    config = from_dict({"model": values, "run": {"out": str(tmp_path / "run")}})
    begin(folder, config)
    params, *_ = sampling.load(tmp_path / "run")
    found = logits(params, results["ids"][:, :16], config.model)
    np.testing.assert_allclose(found, results["logits"][:, :16], atol=TOLERANCE)
    longer = from_dict({"model": values | {"sequence": 32}, "run": {"out": str(tmp_path / "longer")}})
    with pytest.raises(UserError, match=r"which has sequence=32; add --config\.model\.sequence=24"):
        begin(folder, longer)


@pytest.mark.parametrize("shape", ["gpt2", "llama untied"])
def test_added_tokens_get_rows_and_change_no_others(shape, tmp_path):
    """The mean of the rows that were there, in both tables; the padding stays zero."""
    weights, results = theirs(shape)
    folder = folder_of(weights, ModelConfig(**SHAPES[shape]), tmp_path / "model")
    values = SHAPES[shape] | {"vocab_size": 104, "vocab_multiple": 16}
    config = from_dict({"model": values, "run": {"out": str(tmp_path / "run")}})
    begin(folder, config)
    params, *_ = sampling.load(tmp_path / "run")
    ids = results["ids"]
    np.testing.assert_allclose(logits(params, ids, config.model)[..., :101], results["logits"], atol=TOLERANCE)
    names = ["transformer.wte.weight"] if shape == "gpt2" else ["model.embed_tokens.weight", "lm_head.weight"]
    for name, table in zip(names, np.asarray(params["embedding"]["token"]).reshape(-1, 112, 32), strict=True):
        np.testing.assert_array_equal(table[:101], weights[name])
        np.testing.assert_allclose(table[101:104], np.tile(weights[name].mean(0), (3, 1)), atol=1e-6)
        assert not table[104:].any()


def test_a_tied_head_that_differs_is_not_dropped(tmp_path):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    head = weights["transformer.wte.weight"] + 1
    folder = folder_of(weights | {"lm_head.weight": head}, config.model, tmp_path / "model")
    with pytest.raises(UserError, match=r"lm_head\.weight that is not its transformer\.wte\.weight, though"):
        begin(folder, config)
    changed(folder, tie_word_embeddings=False)  # as it says
    begin(folder, run_config("gpt2 untied", tmp_path / "untied"))
    params, *_ = sampling.load(tmp_path / "untied")
    np.testing.assert_array_equal(np.asarray(params["embedding"]["token"])[1, :101], head)


def test_a_run_without_a_tokenizer_is_exported(tmp_path):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    (folder / sampling.TOKENIZER).unlink()
    begin(folder, config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(back[name], x) for name, x in weights.items())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]


def test_a_run_is_read_without_the_file_of_its_schedule(tmp_path, monkeypatch):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    begin(folder_of(weights, config.model, tmp_path / "model"), config)
    read = sampling.checkpoint_reading.read_meta

    def gone(*where):
        meta = read(*where)
        return meta | {"config": meta["config"] | {"pipeline": {"schedule": str(tmp_path / "gone.csv")}}}

    monkeypatch.setattr(sampling.checkpoint_reading, "read_meta", gone)
    with pytest.raises(UserError, match=r"gone\.csv"):
        from_dict(gone(tmp_path / "run" / "checkpoints", None)["config"])
    assert sampling.load(tmp_path / "run")[1].model == config.model


def test_nothing_is_overwritten(tmp_path):
    config = run_config("llama untied", tmp_path / "run")
    saved(random_params(config.model), config)
    export(str(tmp_path / "run"), str(tmp_path / "model"))
    with pytest.raises(UserError, match="holds a model already; name another folder"):
        export(str(tmp_path / "run"), str(tmp_path / "model"))
