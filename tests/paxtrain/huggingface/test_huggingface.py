"""Models from and to transformers' layout; what transformers computed is kept in *_reference.npz."""

import dataclasses
import json
import pathlib
import re
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.config import CheckpointConfig, Config, ModelConfig, from_dict, to_dict
from paxtrain.data import token_files, tokenizer
from paxtrain.errors import UserError
from paxtrain.huggingface import architectures, exporting
from paxtrain.huggingface.exporting import export
from paxtrain.huggingface.files import INDEX, ModelArrays
from paxtrain.huggingface.importing import import_model
from paxtrain.model import transformer
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run import sampling
from paxtrain.run.checkpoint import Checkpoints
from paxtrain.run.checkpoint_reading import restore_params
from paxtrain.run.run import Run

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
    (folder / "config.json").write_text(json.dumps(architectures.to_config(config, "float32")))
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


@pytest.mark.parametrize("shape", ["gpt2", "llama untied", "gpt_neox untied"])
def test_what_transformers_wrote_gives_its_logits_and_comes_back_bit_by_bit(shape, tmp_path):
    weights, results = theirs(shape)
    config = run_config(shape, tmp_path / "run")
    import_model(str(folder_of(weights, config.model, tmp_path / "model")), config)
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
    params = architectures.params(weights.__getitem__, ModelConfig(**SHAPES["llama untied"] | (change or {})))
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
    import_model(str(tmp_path / "model"), again)
    found, loaded, encoder = sampling.load(tmp_path / "again", 0)
    assert loaded.model == again.model and encoder.encode("ab").ids == [97, 98]
    jax.tree.map(np.testing.assert_array_equal, found, params)


def test_bfloat16_takes_half_and_rounds(tmp_path):
    config = run_config("llama untied", tmp_path / "run")
    params = random_params(config.model)
    saved(params, config)
    sizes = {}
    for dtype in ("float32", "bfloat16"):
        export(str(tmp_path / "run"), str(tmp_path / dtype), dtype=dtype)
        sizes[dtype] = (tmp_path / dtype / "model.safetensors").stat().st_size
    assert sizes["bfloat16"] < 0.6 * sizes["float32"]
    import_model(str(tmp_path / "bfloat16"), run_config("llama untied", tmp_path / "again"))
    found, *_ = sampling.load(tmp_path / "again")
    rounded = jax.tree.map(lambda x: np.asarray(jax.numpy.asarray(x, "bfloat16"), np.float32), params)
    jax.tree.map(np.testing.assert_array_equal, found, rounded)


def test_training_goes_on_from_an_imported_model(tmp_path):
    """On a mesh, from the first step: its first loss is the imported model's, and nothing but weights was there."""
    weights, _ = theirs("llama")
    for name in ("train", "validation"):
        with token_files.TokenWriter(tmp_path / name, 101) as writer:
            writer.extend(np.arange(3000) % 101)
            writer.end_document()
    config = run_config(
        "llama untied",
        tmp_path / "run",
        mesh={"data": 2, "pipe": 2, "tensor": 2},
        batch={"global_batch": 8, "micro_batch": 2},
        data={"train": str(tmp_path / "train"), "validation": str(tmp_path / "validation")},
    )
    folder = folder_of(weights, config.model, tmp_path / "model")
    # What begins and ends documents is the data's after training; the model's other settings stay.
    words = {"<s>": 1, "</s>": 2, "<|im_end|>": 3}
    Tokenizer(WordLevel(words, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"bos_token": "<s>", "eos_token": "<|im_end|>", "chat_template": "t"}'
    )
    shutil.copy(folder / "tokenizer.json", tmp_path)
    ours = {"bos_token": "</s>", "add_bos_token": False, "eos_token": "</s>", "split_special_tokens": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(ours | {"tokenizer_class": "another"}))
    import_model(str(folder), config)
    assert Run(config, make_mesh(config.mesh)).train().finished
    kept = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert kept == ours | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "t"}
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (2, 2)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    params = architectures.params(weights.__getitem__, config.model)
    validation = token_files.load(config.data.validation, vocab_size=101, sequence=24)
    rows = np.stack([validation.read(24 * i, 24 * i + 25) for i in range(8)])
    [first] = [r["validation_loss"] for r in records if r["step"] == 0 and "validation_loss" in r]
    assert first == pytest.approx(float(loss(params, rows, config.model)), rel=1e-4)
    assert [r["step"] for r in records if "loss" in r] == [1, 2]


def test_a_models_first_and_last_token_come_through(tmp_path):
    """Those that config.json and tokenizer_config.json name, which a harness and generation need."""
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    words = {"<s>": 1, "</s>": 2, "<|endoftext|>": 3}
    Tokenizer(WordLevel(words, unk_token="<s>")).save(str(folder / "tokenizer.json"))
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"bos_token_id": 1, "eos_token_id": [2, 3]}))
    settings = {"eos_token": {"content": "</s>"}, "chat_template": "...", "model_max_length": 10**30}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 2], "temperature": 0.6}')
    (folder / "chat_template.jinja").write_text("a template")
    import_model(str(folder), config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (back["bos_token_id"], back["eos_token_id"]) == (1, [2, 3])
    generation = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert generation == {"bos_token_id": 1, "eos_token_id": [2, 3], "temperature": 0.6}
    kept = json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())
    wanted = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 24, "bos_token": "<s>"}
    assert kept == settings | wanted | {"chat_template": "a template"}
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


def test_several_tokens_that_end_a_text_come_through_without_a_generation_config(tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"eos_token_id": [98, 97]}))
    import_model(str(folder), config)
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


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "bert"},
            [
                "model_type 'bert'",
                "gemma2, gemma3_text, gpt2, gpt_neox, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3 can",
            ],
        ),
        ({"hidden_size": None}, ["lacks hidden_size"]),
        ({"hidden_size": "32"}, ["model.hidden must be of type int, got '32'"]),
        (
            {"rope_parameters": {"rope_theta": 10**400}},
            ["model.rope_theta must be a finite number", "about 400 digits"],
        ),
        ({"rope_parameters": {"rope_theta": "7"}}, ["model.rope_theta must be of type float, got '7'"]),
        ({"eos_token_id": -1}, ["eos_token_id=-1", "an id of the vocabulary, or null"]),
        ({"eos_token_id": [2, "3"]}, ["eos_token_id='3'", "or null"]),
        (
            {"model_type": "mistral"},
            ["which has family=llama", "add --config.model.family=mistral --config.model.options.sliding_window=4096"],
        ),
        ({"num_attention_heads": 0}, ["model.heads must be positive, got 0"]),
        ({"rope_parameters": "linear"}, ["has values that no llama model has"]),
        ({"num_hidden_layers": "3"}, ["config.json: model.layers must be of type int, got '3'"]),
        ({"hidden_act": "gelu"}, ["hidden_act='gelu'", "'silu' would work"]),
        ({"attention_bias": True}, ["attention_bias=True", "False would work"]),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, ["rope_type='dynamic'", "linear, llama3, yarn"]),
        ({"rope_parameters": {"rope_type": "linear"}}, ["of the type linear needs factor, and lacks factor"]),
        ({"quantization_config": {"quant_method": "gptq"}}, ["quantized model (gptq)", "that it was made of"]),
        ({"head_dim": 16}, ["which has head_size=0", "add --config.model.head_size=16"]),
        ({"num_hidden_layers": 4}, ["which has layers=3", "add --config.model.layers=4"]),
        ({"rms_norm_eps": 1e-6}, ["norm_epsilon=0.0001", "add --config.model.norm_epsilon=1e-06"]),
    ],
)
def test_another_architecture_is_named(change, words, tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    values = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    with pytest.raises(UserError) as error:
        import_model(str(folder), config)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


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
    import_model(str(tmp_path / "model"), config)
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
    import_model(str(folder), config)
    params, *_ = sampling.load(tmp_path / "run")
    found = logits(params, results["ids"][:, :16], config.model)
    np.testing.assert_allclose(found, results["logits"][:, :16], atol=TOLERANCE)
    longer = from_dict({"model": values | {"sequence": 32}, "run": {"out": str(tmp_path / "longer")}})
    with pytest.raises(UserError, match=r"which has sequence=32; add --config\.model\.sequence=24"):
        import_model(str(folder), longer)


@pytest.mark.parametrize("shape", ["gpt2", "llama untied"])
def test_added_tokens_get_rows_and_change_no_others(shape, tmp_path):
    """The mean of the rows that were there, in both tables; the padding stays zero."""
    weights, results = theirs(shape)
    folder = folder_of(weights, ModelConfig(**SHAPES[shape]), tmp_path / "model")
    values = SHAPES[shape] | {"vocab_size": 104, "vocab_multiple": 16}
    config = from_dict({"model": values, "run": {"out": str(tmp_path / "run")}})
    import_model(str(folder), config)
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
        import_model(str(folder), config)
    changed(folder, tie_word_embeddings=False)  # as it says
    import_model(str(folder), run_config("gpt2 untied", tmp_path / "untied"))
    params, *_ = sampling.load(tmp_path / "untied")
    np.testing.assert_array_equal(np.asarray(params["embedding"]["token"])[1, :101], head)


def test_a_run_without_a_tokenizer_is_exported(tmp_path):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    (folder / sampling.TOKENIZER).unlink()
    import_model(str(folder), config)
    export(str(tmp_path / "run"), str(tmp_path / "back"))
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert all(np.array_equal(back[name], x) for name, x in weights.items())
    assert sorted(path.name for path in (tmp_path / "back").iterdir()) == ["config.json", "model.safetensors"]


def test_broken_files_are_named(tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    file = folder / "model.safetensors"

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            import_model(str(folder), config)
        assert not (tmp_path / "run").exists()

    whole = file.read_bytes()
    file.write_bytes(whole[:1000])
    refused(r"model\.safetensors cannot be read")
    some = {name: x for name, x in weights.items() if name != "model.norm.weight"}
    safetensors.numpy.save_file(some, file)
    refused(r"has no array model\.norm\.weight")
    safetensors.numpy.save_file(some | {"model.norm.weight": np.ones(31, np.float32)}, file)
    refused(r"array model\.norm\.weight is \[31\]; a llama model of these sizes has \[32\]")
    turned = {name: np.ascontiguousarray(x.T) if "gate_proj" in name else x for name, x in weights.items()}
    safetensors.numpy.save_file(turned, file)
    refused(r"gate_proj\.weight is \[32, 56\]; a llama model of these sizes has \[56, 32\]")
    bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(32, np.float32)}
    safetensors.numpy.save_file(weights | bias, file)
    refused(r"does not account for, model\.layers\.0\.self_attn\.q_proj\.bias first of 1")
    for wrong in (np.nan, np.inf):
        safetensors.numpy.save_file(weights | {"model.norm.weight": np.full(32, wrong, np.float32)}, file)
        refused(r"array model\.norm\.weight has numbers that are not finite")
    codes = {name: x.astype(np.int8) if "q_proj" in name else x for name, x in weights.items()}
    safetensors.numpy.save_file(codes, file)
    refused(r"q_proj\.weight is of int8; float64, float32, float16, bfloat16 can be imported")
    harmless = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    safetensors.numpy.save_file(weights | harmless, file)
    architectures.params(ModelArrays(folder), config.model)
    file.unlink()
    refused("needs all of a model's")
    (folder / "pytorch_model.bin").touch()
    refused(r"has its arrays in pytorch_model\.bin, which is not read .*; save the model again with transformers'")
    (folder / "model.safetensors.index.json").write_text('{"weight_map": []}')
    refused("must have a weight_map from names to files")


def test_weights_that_lie_the_other_way_round_are_no_gpt2(tmp_path):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    weights = {name: np.ascontiguousarray(x.T) if "c_fc.weight" in name else x for name, x in weights.items()}
    folder = folder_of(weights, config.model, tmp_path / "model")
    with pytest.raises(UserError, match=r"c_fc\.weight is \[128, 32\]; a gpt2 model of these sizes has \[32, 128\]"):
        import_model(str(folder), config)


def test_the_flags_that_another_architecture_needs_are_named(tmp_path):
    weights, _ = theirs("gpt2")
    folder = folder_of(weights, ModelConfig(**SHAPES["gpt2"]), tmp_path / "model")
    with pytest.raises(UserError) as error:
        import_model(str(folder), run_config("llama", tmp_path / "run"))
    named = dict(re.findall(r"--config\.model\.(\w+)=(\S+)", str(error.value)))
    values = {name: type(getattr(ModelConfig(), name))(value) for name, value in named.items()}
    shape = SHAPES["llama"] | values | {"vocab_multiple": 8}
    import_model(str(folder), from_dict({"model": shape, "run": {"out": str(tmp_path / "run")}}))


def test_an_import_that_was_killed_can_be_repeated(tmp_path, monkeypatch):
    """As the checkpoint is written, the rest is there: a run with a checkpoint has its tokenizer."""
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")

    def killed(self, *_):
        (tmp_path / "run/checkpoints/0.orbax-checkpoint-tmp").mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Checkpoints, "save", killed)
        import_model(str(folder), config)
    assert (tmp_path / "run" / sampling.TOKENIZER).read_bytes() == (folder / sampling.TOKENIZER).read_bytes()
    import_model(str(folder), config)
    assert sampling.load(tmp_path / "run")[1].model == config.model


def test_a_run_is_read_without_the_file_of_its_schedule(tmp_path, monkeypatch):
    weights, _ = theirs("gpt2")
    config = run_config("gpt2", tmp_path / "run")
    import_model(str(folder_of(weights, config.model, tmp_path / "model")), config)
    read = sampling.checkpoint_reading.read_meta

    def gone(*where):
        meta = read(*where)
        return meta | {"config": meta["config"] | {"pipeline": {"schedule": str(tmp_path / "gone.csv")}}}

    monkeypatch.setattr(sampling.checkpoint_reading, "read_meta", gone)
    with pytest.raises(UserError, match=r"gone\.csv"):
        from_dict(gone(tmp_path / "run" / "checkpoints", None)["config"])
    assert sampling.load(tmp_path / "run")[1].model == config.model


def test_nothing_is_overwritten(tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    import_model(str(folder), config)
    with pytest.raises(UserError, match="holds checkpoints already; name another folder with --config"):
        import_model(str(folder), config)
    with pytest.raises(UserError, match="holds a model already; name another folder"):
        export(str(tmp_path / "run"), str(folder))
