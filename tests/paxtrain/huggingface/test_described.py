"""A model's config.json whose sizes do not fit each other is refused by its name and in its own words."""

import pytest

from paxtrain.errors import UserError
from paxtrain.huggingface.described import configuration, in_its_words

LLAMA = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
}
GPT2 = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128}


def test_sizes_that_fit_are_taken():
    assert configuration(LLAMA, "config.json")["model"]["kv_heads"] == 4
    assert configuration(GPT2, "config.json")["model"]["sequence"] == 128


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            LLAMA | {"num_attention_heads": 23, "head_dim": 8},
            "num_key_value_heads=4 does not divide num_attention_heads=23; num_key_value_heads=1 or 23 would fit",
        ),
        (GPT2 | {"n_head": 5}, "n_embd=64 is not divisible by n_head=5; n_head=4 or 8 would fit"),
        (LLAMA | {"num_hidden_layers": -1}, "num_hidden_layers must be positive, got -1"),
    ],
)
def test_the_file_and_its_own_keys_are_named(values, said):
    with pytest.raises(UserError) as error:
        configuration(values, "models/one/config.json")
    assert str(error.value) == f"models/one/config.json: {said}"


def test_fields_that_the_file_leaves_out_have_its_first_name_for_them():
    assert in_its_words("model.kv_heads=32, model.dtype=x", LLAMA) == "num_key_value_heads=32, model.dtype=x"
    assert in_its_words("model.vocab_size=3", LLAMA) == "vocab_size=3"
