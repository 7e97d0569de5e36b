"""Runs that begin with the weights of a model, and folders that are refused."""

import dataclasses
import json
import re
import shutil

import numpy as np
import pytest
import safetensors.numpy
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from paxtrain.config import CheckpointConfig, ModelConfig, from_dict, to_dict
from paxtrain.config.options import OptionValues
from paxtrain.data import token_files, tokenizer
from paxtrain.errors import UserError
from paxtrain.huggingface import conversion, importing
from paxtrain.huggingface.exporting import export
from paxtrain.huggingface.files import ModelArrays
from paxtrain.parallel.mesh import make_mesh
from paxtrain.run.run import Run
from tests.paxtrain.huggingface.folders import SHAPES, begin, folder_of, loss, run_config, theirs
from tests.processes import run_processes


@pytest.mark.once
def test_a_run_begins_with_the_weights_of_a_model(tmp_path, capsys, monkeypatch):
    """On a mesh, from the first step: its first loss is the model's."""
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
        init=str(tmp_path / "model"),
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
    other = folder / "another.json"
    tokenizer.bytes_tokenizer().save(str(other))
    with (
        monkeypatch.context() as patched,
        pytest.raises(UserError, match=r"another\.json of the model and .* different"),
    ):
        patched.setattr(importing, "TOKENIZER", other.name)
        Run(config, make_mesh(config.mesh))
    assert Run(config, make_mesh(config.mesh)).train().finished
    assert f"the run begins with the weights of {folder}" in capsys.readouterr().out
    kept = json.loads((tmp_path / "run" / "tokenizer_config.json").read_text())
    assert kept == ours | {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "t"}
    export(str(tmp_path / "run"), str(tmp_path / "out"))
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["bos_token_id"], exported["eos_token_id"]) == (2, 2)
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    params = conversion.params(weights.__getitem__, config.model)
    validation = token_files.load(config.data.validation, vocab_size=101, sequence=24)
    rows = np.stack([validation.read(24 * i, 24 * i + 25) for i in range(8)])
    [first] = [r["validation_loss"] for r in records if r["step"] == 0 and "validation_loss" in r]
    assert first == pytest.approx(float(loss(params, rows, config.model)), rel=1e-4)
    assert [r["step"] for r in records if "loss" in r] == [1, 2]
    shutil.rmtree(folder)
    model = dataclasses.replace(config.model, sequence=48, rope_scaling=OptionValues(rope_type="linear", factor=2.0))
    longer = dataclasses.replace(config, model=model, run=dataclasses.replace(config.run, steps=3))
    assert Run(longer, make_mesh(config.mesh)).train().step == 3
    said = capsys.readouterr().out
    assert f"resumed from step 2, 16 samples consumed\ninit={folder} is not read, since the run has checkpoints" in said
    [changed] = [line for line in said.splitlines() if line.startswith("settings have changed: ")]
    assert "model.sequence was 24 and is 48" in changed
    assert "model.rope_scaling was {} and is {'rope_type': 'linear', 'factor': 2.0}" in changed
    with pytest.raises(UserError, match=r"cannot read the file .*model/config\.json .*; init names a folder with"):
        anew = dataclasses.replace(config, checkpoint=CheckpointConfig(resume=False))
        Run(anew, make_mesh(config.mesh))


BEGIN = """
import json
import paxtrain
from paxtrain.config import from_dict

values, folders = json.loads(sys.argv[1]), sys.argv[2:]
try:
    result = paxtrain.train(from_dict(values | {"init": folders[jax.process_index() % len(folders)]}), quiet=True)
    print(json.dumps(result.untrained["validation_loss"]))
except paxtrain.UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_processes_begin_with_one_model(tmp_path):
    """Each keeps its part of the weights, and a model that differs on one of them is refused by all."""
    weights, _ = theirs("llama")
    with token_files.TokenWriter(tmp_path / "train", 101) as writer:
        writer.extend(np.arange(3000) % 101)
        writer.end_document()
    data = {"train": str(tmp_path / "train"), "validation": str(tmp_path / "train")}
    parts = {"mesh": {"data": 2}, "batch": {"global_batch": 8, "micro_batch": 4}, "data": data}
    config = run_config("llama untied", tmp_path / "run", **parts)
    folder = folder_of(weights, config.model, tmp_path / "model")
    rows = np.stack([np.arange(24 * i, 24 * i + 25) % 101 for i in range(8)])
    expected = float(loss(conversion.params(weights.__getitem__, config.model), rows, config.model))
    for output in run_processes(BEGIN, json.dumps(to_dict(config)), folder, devices=1, limit=600):
        assert json.loads(output.splitlines()[-1]) == pytest.approx(expected, rel=1e-4)

    other = folder_of(weights | {"model.norm.weight": np.ones(32, np.float32)}, config.model, tmp_path / "other")
    values = to_dict(dataclasses.replace(config, run=dataclasses.replace(config.run, out=str(tmp_path / "new"))))
    for output in run_processes(BEGIN, json.dumps(values), folder, other, devices=1, limit=600):
        assert "is another model on process 1 than on process 0" in output.splitlines()[-1]


# --- Bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"model_type": "bert"},
            [
                "model_type 'bert'",
                "gemma2, gemma3_text, gpt2, gpt_neox, granite, llama, mistral, olmo2, phi3, qwen2, qwen3, smollm3 are",
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
        begin(folder, config)
    assert all(word in str(error.value) for word in words), error.value
    assert not (tmp_path / "run").exists()


def test_broken_files_are_named(tmp_path):
    weights, _ = theirs("llama")
    config = run_config("llama untied", tmp_path / "run")
    folder = folder_of(weights, config.model, tmp_path / "model")
    file = folder / "model.safetensors"

    def refused(words: str) -> None:
        with pytest.raises(UserError, match=words):
            begin(folder, config)
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
    conversion.params(ModelArrays(folder), config.model)
    file.unlink()
    refused(r"all of a model's .* are needed")
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
        begin(folder, config)


def test_the_flags_that_another_architecture_needs_are_named(tmp_path):
    weights, _ = theirs("gpt2")
    folder = folder_of(weights, ModelConfig(**SHAPES["gpt2"]), tmp_path / "model")
    with pytest.raises(UserError) as error:
        begin(folder, run_config("llama", tmp_path / "run"))
    named = dict(re.findall(r"--config\.model\.(\w+)=(\S+)", str(error.value)))
    values = {name: type(getattr(ModelConfig(), name))(value) for name, value in named.items()}
    shape = SHAPES["llama"] | values | {"vocab_multiple": 8}
    begin(folder, from_dict({"model": shape, "run": {"out": str(tmp_path / "run")}}))
