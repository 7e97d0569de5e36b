"""Configurations load by path and by name, from any folder."""

import json

import pytest

from paxtrain.config import from_dict, to_dict
from paxtrain.config.load import load_config
from paxtrain.errors import UserError
from paxtrain.files import find, shipped_folder, shipped_names
from paxtrain.model import parameters

QWEN3 = {
    "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 12288, "max_position_embeddings": 40960, "num_attention_heads": 32, "num_hidden_layers": 36,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "tie_word_embeddings": False, "use_sliding_window": False, "vocab_size": 151936,
}  # fmt: skip


def test_a_name_is_the_shipped_file_from_any_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert load_config("gpt_8b") == load_config(str(shipped_folder() / "gpt_8b.py"))
    assert load_config("gpt_8b").model.layers == 72
    assert find("h100_16x8", "clusters", ".json") == str(shipped_folder() / "clusters" / "h100_16x8.json")
    assert find("Qwen3-8B") == str(shipped_folder() / "models" / "Qwen3-8B" / "config.json")


def test_a_file_comes_before_a_shipped_one_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").write_text("")
    assert find("tiny") == "tiny"
    assert find("nowhere/tiny") == "nowhere/tiny"


def test_every_shipped_configuration_loads():
    assert {"tiny", "gpt_8b", "llama_7b"} <= set(shipped_names("", ".py")) and "base" not in shipped_names("", ".py")
    for name in shipped_names("", ".py"):
        load_config(name)


def test_overrides_are_values_by_dotted_key():
    found = load_config("tiny", {"mesh.pipe": 4, "mesh.tensor": 1, "model.layers": 8})
    assert (found.mesh.pipe, found.mesh.tensor, found.model.layers) == (4, 1, 8)
    assert found.batch == load_config("tiny").batch


def test_a_recorded_configuration_is_the_same_again(tmp_path):
    changed = {"mesh.pipe": 2, "model.rope_theta": 1e-7, "compress.backward.codec": "int8"}
    changed |= {"compress.backward.messages": "all", "compress.backward.options": {"block": 32}}
    config = load_config("tiny", changed)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(to_dict(config)))
    assert load_config(str(path)) == config
    assert load_config(str(path), {"run.steps": 70}) == load_config("tiny", changed | {"run.steps": 70})


@pytest.mark.parametrize(("zero1", "shard"), [(True, "optimizer"), (False, "none")])
def test_a_configuration_recorded_by_an_earlier_version_says_zero1(tmp_path, zero1, shard):
    values = to_dict(load_config("tiny"))
    del values["mesh"]["shard"]
    values["mesh"]["zero1"] = zero1
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert load_config(str(tmp_path / "config.json")) == load_config("tiny", {"mesh.shard": shard})
    assert load_config(str(tmp_path / "config.json"), {"mesh.shard": "weights"}).mesh.shard == "weights"
    for wrong, words in (
        ({"zero1": True, "shard": "none"}, "mesh.zero1=True, .*mesh.shard=none"),
        ({"zero1": 1}, "bool"),
    ):
        with pytest.raises(UserError, match=words):
            from_dict({"mesh": wrong})


def test_a_models_file_is_a_configuration(tmp_path):
    """The config.json of Qwen3-8B, whose files hold 8,190,735,360 parameters (Hugging Face, 2025)."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    found = load_config(str(tmp_path), {"batch.micro_batch": 2})
    assert found == load_config(str(tmp_path / "config.json"), {"batch.micro_batch": 2})
    assert parameters.published(found.model) == 8_190_735_360
    assert (found.model.family, found.model.head_dim, found.model.rope_theta) == ("qwen3", 128, 1e6)
    assert (found.model.sequence, found.batch.global_batch, found.batch.micro_batch) == (4096, 1024, 2)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"model_type": "mamba"}))
    with pytest.raises(
        UserError, match=r"is of model_type 'mamba', which is not implemented; gemma2, .* qwen3, .* are"
    ):
        load_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot read the configuration .*none.json .*; name the config.json of a run's folder"),
        ("{", "cannot read the configuration .*none.json .*; name the config.json"),
        ("[3]", r"none.json: must be an object of sections, got \[3\]"),
        ('{"mesh": 3}', "mesh must be a mapping, got 3"),
    ],
)
def test_another_file_of_json_is_one_sentence(tmp_path, text, words):
    path = tmp_path / "none.json"
    if text:
        path.write_text(text)
    with pytest.raises(UserError, match=words):
        load_config(str(path))


@pytest.mark.parametrize(
    ("name", "overrides", "words"),
    [
        ("gpt_8", {}, ["no shipped file 'gpt_8'", "did you mean gpt_8b", "tiny"]),
        ("nowhere.py", {}, ["cannot load the configuration nowhere.py", "configs/tiny.py"]),
        ("tiny", {"mesh.foo": 1}, ["unknown configuration key mesh.foo", "known here: context"]),
        ("tiny", {"mesh.data.x": 1}, ["unknown configuration key mesh.data.x", "data is a value"]),
        ("tiny", {"mesh.pipe": "two"}, ["mesh.pipe must be of type int, got 'two'"]),
        ("tiny", {"model.rope_theta": 10**400}, ["model.rope_theta must be a finite number", "about 400 digits"]),
        ("tiny", {"model.dtype": 10**5000}, ["model.dtype must be of type str", "about 5000 digits"]),
        ("tiny", {"model.dtype": [10**5000]}, ["model.dtype must be of type str, got a list that is too large"]),
    ],
)
def test_what_does_not_fit_is_one_sentence(name, overrides, words):
    with pytest.raises(UserError) as error:
        load_config(name, overrides)
    assert all(word in str(error.value) for word in words), error.value


def test_a_file_without_get_config_is_named(tmp_path):
    (tmp_path / "none.py").write_text("get_config = 3\n")
    with pytest.raises(UserError, match=r"none.py defines no get_config\(\)"):
        load_config(str(tmp_path / "none.py"))
    (tmp_path / "some.py").write_text(
        "import types\ndef get_config():\n    return types.SimpleNamespace(to_dict=dict)\n"
    )
    assert load_config(str(tmp_path / "some.py")) == from_dict({})


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("found[1] = 2", "keys in get_config.* must be strings, .*, got 1"),
        ("found.model = {1: 2, 'layers': 4}", "must be strings, .*, got keys of several types"),
        ("found.model = found", "unknown configuration key model.model"),  # it has no end
    ],
)
def test_keys_of_a_file_are_strings(tmp_path, line, words):
    path = tmp_path / "keys.py"
    lines = ["from ml_collections import ConfigDict", "def get_config():", "    found = ConfigDict()", f"    {line}"]
    path.write_text("\n".join([*lines, "    return found\n"]))
    with pytest.raises(UserError, match=words):
        load_config(str(path))
