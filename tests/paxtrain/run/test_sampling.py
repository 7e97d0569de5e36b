"""Text from a model whose draws are known, so that nothing is compiled."""

import json
import types

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, processors
from tokenizers.models import WordLevel

from paxtrain.config import ModelConfig
from paxtrain.run import sampling

WORDS = ["<s>", "</s>", "<|im_end|>", "▁Once", "▁upon", "▁a", "▁time", "▁a<|im_end|>"]


@pytest.fixture
def sample(tmp_path, monkeypatch):
    """Return a function that draws given ids, and returns the prompt's ids, the text and the number of draws."""
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, "<s>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A </s>", None, [("<s>", 0), ("</s>", 1)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = types.SimpleNamespace(model=ModelConfig(vocab_size=8, hidden=8, heads=1, sequence=16))
    monkeypatch.setattr(sampling, "from_dict", lambda _: config)
    monkeypatch.setattr(sampling.checkpoint_reading, "read_meta", lambda *_: {"config": {"model": {}}})
    monkeypatch.setattr(sampling.checkpoint_reading, "restore_params", lambda *_: (None, None))

    def sample(prompt, draws, settings=None, generation=None):
        for name, values in (("tokenizer_config", settings), ("generation_config", generation)):
            if values is not None:
                (tmp_path / f"{name}.json").write_text(json.dumps(values))
        left, seen = iter(draws), []

        def drawn(params, window, length, *_):
            seen.append(window[0, :length].tolist())
            return next(left)

        monkeypatch.setattr(sampling, "_next", drawn)
        text = sampling.sample(tmp_path, prompt, len(draws))
        return seen[0], text, len(seen)

    return sample


def test_the_space_before_the_first_word_stays(sample):
    assert sample("Once upon a", [6, 3]) == ([0, 3, 4, 5], " time Once", 2)


def test_a_text_ends_where_its_document_does(sample):
    """Other special tokens are shown; those of a chat model's generation_config.json end a text, too."""
    settings = {"eos_token": {"content": "</s>"}}
    assert sample("Once", [4, 2, 1, 5], settings) == ([0, 3], " upon<|im_end|>", 3)
    assert sample("Once", [4, 2, 1, 5], settings, {"eos_token_id": [1, 2]}) == ([0, 3], " upon", 2)
    assert sample("Once", [1, 5], settings, {"eos_token_id": 2}) == ([0, 3], "", 1)
    assert sample("Once", [1, 2], {"bos_token": "<s>"}, {"eos_token_id": 2}) == ([0, 3], "</s>", 2)


def test_special_tokens_in_a_prompt_are_read_as_in_the_data(sample):
    assert sample("a<|im_end|>", [6])[0] == [0, 5, 2]
    assert sample("a<|im_end|>", [6], {"split_special_tokens": False})[0] == [0, 5, 2]
    assert sample("a<|im_end|>", [6], {"split_special_tokens": True})[0] == [0, 7]


def test_a_terminal_is_given_no_control_characters():
    text = "a\x1b[31mred\x07\x9b\n\tb\u00e9\u4e16\u202e"
    assert sampling.printable(text) == "a\\x1b[31mred\\x07\\x9b\n\tb\u00e9\u4e16\\u202e"
