import json

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.data.tokenizer import (
    alike,
    around,
    bytes_tokenizer,
    cuts,
    gpt2_tokenizer,
    load,
    pieces,
    put_in_front,
    train_bpe,
    vocabulary_size,
)
from paxtrain.errors import UserError
from tests.paxtrain.data.texts import TRICKY


def test_ids_of_bytes_are_the_bytes():
    tokenizer = bytes_tokenizer()
    every_character = TRICKY + "".join(map(chr, range(0x800))) + "\U0010ffff"
    assert tokenizer.encode(every_character).ids == np.frombuffer(every_character.encode(), np.uint8).tolist()
    assert sorted(tokenizer.get_vocab().values()) == list(range(257))
    assert tokenizer.token_to_id("<|endoftext|>") == 256


def test_a_token_across_words_is_never_cut():
    """A BPE without words joins "x" and " y", so it must encode documents whole."""
    vocab = {token: i for i, token in enumerate([*map(chr, range(256, 512)), "x", "xĠ"])}
    across = Tokenizer(models.BPE(vocab=vocab, merges=[("x", "Ġ")]))
    across.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    cut = [token for part in pieces("x x", 1) for token in across.encode(part).ids]
    assert cut != across.encode("x x").ids and not cuts(across)
    assert cuts(bytes_tokenizer()) and cuts(train_bpe(["x x"], 260))


@pytest.mark.parametrize("token", [AddedToken("one two"), AddedToken("two", rstrip=True), AddedToken("two\n ")])
def test_an_added_token_across_words_is_never_cut(token):
    tokenizer = train_bpe(["x x"], 260)
    assert cuts(tokenizer)
    tokenizer.add_tokens([token])
    text = "one two\n  three"
    cut = [i for part in pieces(text, 1) for i in tokenizer.encode(part).ids]
    assert cut != tokenizer.encode(text).ids and not cuts(tokenizer)


def test_a_bpe_trained_on_a_long_word_ends():
    """The time of training is that of the longest word times its tokens, so words are cut, as their tokens show."""
    tokenizer = train_bpe(["a" * 20_000 + " b"], 1000)
    assert max(map(len, tokenizer.get_vocab())) == 256
    # Other texts give the library's own tokens.
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=2, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet
    )
    plain.train_from_iterator([TRICKY * 5], trainer)
    assert json.loads(train_bpe([TRICKY * 5], 400).to_str())["model"] == json.loads(plain.to_str())["model"]


def test_one_tokenizer_in_two_spellings_is_one(cases):
    one, other = (cases / f"llama_style_tokenizer{end}.json" for end in ("", "_merges_as_strings"))
    assert one.read_bytes() != other.read_bytes() and alike(one, other)


def test_what_makes_two_tokenizers(tmp_path):
    """Other merges and normalizers give a text other ids; limits of prompts and tokens around a text do not."""
    first = train_bpe([TRICKY * 5], 400)
    first.save(str(tmp_path / "first.json"))

    def changed(change):
        tokenizer = Tokenizer.from_str(first.to_str())
        change(tokenizer)
        tokenizer.save(str(tmp_path / "other.json"))
        return alike(tmp_path / "first.json", tmp_path / "other.json")

    def fewer_merges(tokenizer):
        model = json.loads(tokenizer.to_str())["model"]
        tokenizer.model = models.BPE(model["vocab"], [tuple(merge) for merge in model["merges"][:-1]])

    assert changed(lambda tokenizer: put_in_front(tokenizer, "<|endoftext|>"))
    assert changed(lambda tokenizer: (tokenizer.enable_truncation(3), tokenizer.enable_padding()))
    assert not changed(fewer_merges)
    assert not changed(lambda tokenizer: setattr(tokenizer, "normalizer", normalizers.NFC()))
    assert not changed(lambda tokenizer: tokenizer.add_tokens(["one"]))


def test_tokens_around_a_text(tmp_path):
    tokenizer = bytes_tokenizer()
    assert around(tokenizer) == ([], [])
    template = [("<|endoftext|>", 256)]
    tokenizer.post_processor = processors.TemplateProcessing("<|endoftext|> $A <|endoftext|>", None, template)
    assert around(tokenizer) == ([256], [256])
    for token, front in (("<|endoftext|>", [256]), (None, [])):
        put_in_front(tokenizer, token)
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        assert around(tokenizer) == (front, []) == around(load(tmp_path / "tokenizer.json"))
        assert tokenizer.encode("ab").ids == [*front, 97, 98]


def test_gpt2_ids(gpt2_files):
    tokenizer = gpt2_tokenizer(*gpt2_files)
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.encode(" don't\n\n  x").ids == [836, 470, 628, 220, 2124]
    assert tokenizer.token_to_id("<|endoftext|>") == 50256
    assert vocabulary_size(tokenizer) == 50257
    assert 50256 not in tokenizer.encode(TRICKY).ids
    assert tokenizer.decode(tokenizer.encode(TRICKY).ids) == TRICKY


@pytest.mark.parametrize("characters", [1, 3, 20])
def test_pieces_encode_like_the_whole_text(characters):
    tokenizer = train_bpe([TRICKY * 5], 400)
    assert vocabulary_size(tokenizer) > 300
    cut = list(pieces(TRICKY, characters))
    assert len(cut) > 3 and "".join(cut) == TRICKY
    whole = tokenizer.encode(TRICKY).ids
    assert [i for piece in cut for i in tokenizer.encode(piece).ids] == whole
    careless = [TRICKY[i : i + 20] for i in range(0, len(TRICKY), 20)]
    assert [i for piece in careless for i in tokenizer.encode(piece).ids] != whole


def test_a_vocabulary_that_is_none(tmp_path):
    (tmp_path / "v.json").write_text("[]")
    (tmp_path / "m.txt").write_text("a b\n")
    with pytest.raises(UserError, match=r"v\.json and .*m\.txt are not a GPT-2 vocabulary and its merges"):
        gpt2_tokenizer(str(tmp_path / "v.json"), str(tmp_path / "m.txt"))


def test_a_pattern_that_takes_too_many_steps_is_a_sentence(tmp_path, capfd):
    """The library panics, its panics are no Exceptions, and it prints them."""
    tokenizer = bytes_tokenizer()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$b"), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("a" * 400 + "x")
    with pytest.raises(UserError, match=r"the tokenizer cannot encode the text: .*retry-limit-in-match"):
        prepare([str(tmp_path / "text.txt")], tmp_path / "out", PrepareOptions(str(tmp_path / "tokenizer.json")))
    assert not list((tmp_path / "out").iterdir())
    assert "panicked" not in capfd.readouterr().err


def test_an_expression_that_is_slow_at_every_character_is_bounded(tmp_path, monkeypatch):
    """Each run of a's takes a tenth of a second, below the library's limit of steps; all go on in a thread."""
    slow = Tokenizer(models.BPE(vocab={"a": 0, "b": 1, "<|endoftext|>": 2}, merges=[]))
    slow.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    slow.save(str(tmp_path / "slow.json"))
    options = PrepareOptions(tokenizer=str(tmp_path / "slow.json"))
    text = tmp_path / "text.txt"
    text.write_text("ab" * 20)
    assert prepare([str(text)], tmp_path / "out", options).vocab_size == 3
    monkeypatch.setattr("paxtrain.data.tokenizer._LIMIT", 0.02)
    text.write_text(("a" * 27 + "b") * 8)
    with pytest.raises(UserError, match=r"cannot encode the text: 2\d\d characters took more than 0 s of the proc"):
        prepare([str(text)], tmp_path / "again", options)
    assert not list(tmp_path.glob("again/*.idx"))
