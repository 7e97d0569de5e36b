import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.normalizers import Prepend

from paxtrain.data import checksums, preparation, token_files
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.data.tokenizer import vocabulary_size
from paxtrain.errors import UserError
from tests.paxtrain.data.texts import TRICKY


def read_documents(prefix, tokenizer):
    """Return the texts of a data set, split at <|endoftext|>, and its number of documents."""
    file = token_files.TokenFile(prefix)
    ids = file.read(0, len(file))
    ends = np.flatnonzero(ids == tokenizer.token_to_id("<|endoftext|>"))
    assert ends[-1] == len(ids) - 1
    starts = [0, *(ends[:-1] + 1)]
    assert len(ends) == file.documents
    return [tokenizer.decode(ids[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_comes_back_once(texts, tmp_path, tokenizer):
    folder, contents = texts
    options = {"vocab_size": 300} if tokenizer == "bpe" else {}
    prepared = prepare(
        [str(folder)], tmp_path / "out", PrepareOptions(tokenizer=tokenizer, validation_fraction=0.3, **options)
    )
    saved = Tokenizer.from_file(prepared.tokenizer)
    training, validation = (read_documents(prefix, saved) for prefix in prepared.prefixes)
    assert sorted(training + validation) == sorted(contents)
    assert prepared.documents == (7, 3)
    assert prepared.tokens == tuple(len(token_files.TokenFile(prefix)) for prefix in prepared.prefixes)
    assert prepared.vocab_size == vocabulary_size(saved) == (300 if tokenizer == "bpe" else 257)
    assert sorted(os.listdir(tmp_path / "out")) == sorted(
        ["lengths.csv", "tokenizer.json", "tokenizer_config.json"]
        + [*(f"{name}.{end}" for name in ("train", "validation") for end in ("bin", "idx", "sha256"))]
    )


def test_what_is_held_out_depends_on_the_seed_only(texts, tmp_path):
    folder, _ = texts
    runs = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        prepared = prepare([str(folder)], tmp_path / name, PrepareOptions(tokenizer="bpe", vocab_size=270, seed=seed))
        runs[name] = [Path(path).read_bytes() for path in (f"{prepared.prefixes[1]}.bin", prepared.tokenizer)]
    assert runs["a"] == runs["b"]
    assert runs["a"][0] != runs["c"][0]


def test_another_data_set_with_the_same_tokenizer(texts, tmp_path):
    """Mixing needs the same ids and the same tokenizer.json for any text."""
    folder, contents = texts
    first = prepare([str(folder / "z.jsonl")], tmp_path / "a", PrepareOptions(tokenizer="bpe", vocab_size=300))
    second = prepare([str(folder)], tmp_path / "b", PrepareOptions(tokenizer=first.tokenizer))
    assert Path(second.tokenizer).read_bytes() == Path(first.tokenizer).read_bytes()
    saved = Tokenizer.from_file(first.tokenizer)
    assert sorted(text for prefix in second.prefixes for text in read_documents(prefix, saved)) == sorted(contents)
    with pytest.raises(UserError, match=r"z\.jsonl is not a valid tokenizer\.json: "):
        prepare([str(folder)], tmp_path / "c", PrepareOptions(tokenizer=str(folder / "z.jsonl")))
    foreign = json.loads(Path(first.tokenizer).read_text().replace("<|endoftext|>", "<eos>"))
    (tmp_path / "foreign.json").write_text(json.dumps(foreign))
    with pytest.raises(UserError, match=r"foreign\.json has no token <\|endoftext\|>; .* --end_of_text"):
        prepare([str(folder)], tmp_path / "c", PrepareOptions(tokenizer=str(tmp_path / "foreign.json")))
    third = prepare(
        [str(folder)], tmp_path / "c", PrepareOptions(tokenizer=str(tmp_path / "foreign.json"), end_of_text="<eos>")
    )
    for prefix, other in zip(third.prefixes, second.prefixes):
        assert Path(f"{prefix}.bin").read_bytes() == Path(f"{other}.bin").read_bytes()
    with pytest.raises(UserError, match=r"--end_of_text=<eos> goes with a tokenizer\.json only"):
        prepare([str(folder)], tmp_path / "d", PrepareOptions(end_of_text="<eos>"))


# Ids of the first document of chat.jsonl by transformers 5.23, with add_special_tokens=False.
CHAT = [
    386, 289, 341, 280, 13, 86, 314, 289, 51, 387, 289, 13, 386,
    292, 281, 281, 271, 338, 263, 276, 282, 13, 51, 387,
]  # fmt: skip


def test_special_tokens_in_the_text_and_around_it(cases, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    shutil.copy(cases / "llama_style_tokenizer_chat.json", model / "tokenizer.json")
    (model / "tokenizer_config.json").write_text('{"eos_token": {"content": "</s>"}, "bos_token": "<s>", "more": 1}')
    (model / "chat_template.jinja").write_text("a template")

    def made(name, tokenizer=model / "tokenizer.json", **options):
        options = {"validation_fraction": 0.01, "seed": 3} | options
        done = prepare([str(cases / "chat.jsonl")], tmp_path / name, PrepareOptions(str(tokenizer), **options))
        assert done.special == {"<|im_start|>": 8, "<|im_end|>": 8}
        file = token_files.TokenFile(done.prefixes[0])
        first = file.read(0, file.first_document).tolist()
        settings = json.loads((tmp_path / name / "tokenizer_config.json").read_text())
        assert (settings["chat_template"], settings["more"]) == ("a template", 1)
        return first, [settings[key] for key in ("bos_token", "add_bos_token", "eos_token", "split_special_tokens")]

    assert made("ids", special_tokens=True) == ([1, *CHAT, 2], ["<s>", True, "</s>", False])
    first, settings = made("text")
    assert settings == ["<s>", True, "</s>", True]
    assert (first[0], first[-1]) == (1, 2) and not {386, 387} & {*first} and len(first) > len(CHAT) + 2
    bare = ([*CHAT, 387], ["<|im_end|>", False, "<|im_end|>", False])
    assert made("bare", begin_of_text="", end_of_text="<|im_end|>", special_tokens=True) == bare
    # What begins and ends documents is that of the first set, if a second one is prepared with its tokenizer.
    assert made("again", tmp_path / "bare" / "tokenizer.json", special_tokens=True) == bare


def test_documents_begin_with_the_token_that_is_named(texts, tmp_path):
    prepared = prepare([str(texts[0])], tmp_path / "out", PrepareOptions(begin_of_text="<|endoftext|>"))
    file = token_files.TokenFile(prepared.prefixes[0])
    ids = file.read(0, len(file))
    ends = np.flatnonzero(ids == 256)
    assert len(ends) == 2 * file.documents and ids[0] == 256 and (np.diff(ends)[1::2] == 1).all()
    assert Tokenizer.from_file(prepared.tokenizer).encode("ab").ids == [256, 97, 98]
    with pytest.raises(UserError, match=r"bytes has no token <s>; name the one that begins its documents"):
        prepare([str(texts[0])], tmp_path / "out", PrepareOptions(begin_of_text="<s>"))
    with pytest.raises(UserError, match=r"--end_of_text must name a token"):
        prepare([str(texts[0])], tmp_path / "out", PrepareOptions(prepared.tokenizer, end_of_text=""))


def test_a_models_tokenizer_gives_whole_documents_its_ids(tmp_path):
    """Its file has a limit and padding for prompts and a token before every text, none of which applies here."""
    words = " ".join(str(i) for i in range(30_000))
    for i, text in enumerate((words, "a short one")):
        (tmp_path / f"{i}.txt").write_text(text)
    first = prepare([str(tmp_path / "*.txt")], tmp_path / "a", PrepareOptions(tokenizer="bpe", vocab_size=300))
    model = Tokenizer.from_file(first.tokenizer)
    model.normalizer = Prepend("_")
    ids = {len(model.encode(text).ids) + 1 for text in (words, "a short one")}
    model.enable_truncation(8)
    model.enable_padding()
    model.save(str(tmp_path / "model.json"))
    found = prepare([str(tmp_path / "*.txt")], tmp_path / "b", PrepareOptions(tokenizer=str(tmp_path / "model.json")))
    assert set(found.tokens) == ids


def test_bpe_learns_nothing_from_held_out_text(tmp_path):
    words = ["alpha", "omega"]
    for word in words:
        (tmp_path / f"{word}.txt").write_text(f" {word}" * 20)
    prepared = prepare([str(tmp_path / "*.txt")], tmp_path / "out", PrepareOptions(tokenizer="bpe", vocab_size=300))
    saved = Tokenizer.from_file(prepared.tokenizer)
    [training] = read_documents(prepared.prefixes[0], saved)
    lengths = {word: len(saved.encode(f" {word}").ids) for word in words}
    assert sorted(lengths.values()) == [1, 6] and lengths[training.split()[0]] == 1


@pytest.mark.parametrize(("fraction", "held_out"), [(0.001, 1), (0.25, 2), (0.999, 9)])
def test_at_least_one_document_on_each_side(texts, tmp_path, fraction, held_out):
    prepared = prepare([str(texts[0])], tmp_path / "out", PrepareOptions(validation_fraction=fraction))
    assert prepared.documents == (10 - held_out, held_out)


@pytest.mark.parametrize(("fraction", "held_out"), [(0.25, 10), (0.001, 1), (0.999, 39)])
def test_the_end_of_a_single_document_is_held_out(tmp_path, fraction, held_out):
    text = "0123456789" * 4
    (tmp_path / "one.txt").write_text(text)
    prepared = prepare([str(tmp_path / "one.txt")], tmp_path / "out", PrepareOptions(validation_fraction=fraction))
    saved = Tokenizer.from_file(prepared.tokenizer)
    assert read_documents(prepared.prefixes[0], saved) == [text[:-held_out]]
    assert read_documents(prepared.prefixes[1], saved) == [text[-held_out:]]


def test_bytes_of_a_prepared_file_are_its_bytes(tmp_path):
    raw = (TRICKY * 3000).encode()
    (tmp_path / "a.txt").write_bytes(raw)
    (tmp_path / "b.txt").write_bytes(b"b")
    prepared = prepare([str(tmp_path / "*.txt")], tmp_path / "out", PrepareOptions(seed=1))
    larger = token_files.TokenFile(prepared.prefixes[int(np.argmax(prepared.tokens))])
    np.testing.assert_array_equal(larger.read(0, len(larger) - 1), np.frombuffer(raw, np.uint8))


def test_gpt2_prepare_round_trip(gpt2_files, texts, tmp_path):
    folder, contents = texts
    vocab, merges = gpt2_files
    prepared = prepare([str(folder)], tmp_path / "out", PrepareOptions(tokenizer="gpt2", vocab=vocab, merges=merges))
    saved = Tokenizer.from_file(prepared.tokenizer)
    assert prepared.vocab_size == 50257
    assert sorted(text for prefix in prepared.prefixes for text in read_documents(prefix, saved)) == sorted(contents)
    assert saved.encode("Hello world").ids == [15496, 995]


def bad_utf8(folder):
    (folder / "1.txt").write_bytes(b"\xc3\xa9ab\xffcd")


def jsonl(*lines):
    return lambda folder: (folder / "1.jsonl").write_bytes(b"\n".join(lines))


GOOD = b'{"text": "caf\xc3\xa9"}'


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (bad_utf8, r"1\.txt is not UTF-8 text: byte 0xff at offset 4"),
        (jsonl(GOOD, b'{"text": "\xff"}'), rf"1\.jsonl is not UTF-8 text: byte 0xff at offset {len(GOOD) + 11}"),
        (jsonl(GOOD, b"", b'{"text": '), r"1\.jsonl, line 3, is not JSON: .* column"),
        (jsonl(GOOD, b'{"body": "x", "id": 3}'), r"line 2, has no key 'text' but the keys body, id; .*--json_key"),
        (jsonl(b'["text"]'), r"line 1, has no key 'text' but a list"),
        (jsonl(b'{"text": 3}'), r"line 1, has int under 'text'"),
        (jsonl(b"[" * 100_000), r"line 1, is JSON that cannot be read"),
        (jsonl(b'{"text": "x", "id": ' + b"9" * 5000 + b"}"), r"line 1, is JSON that cannot be read"),
        (jsonl(b'{"text": "\\ud800"}'), r"line 1, has half of a surrogate pair"),
    ],
)
def test_bad_text_is_told_with_its_place(texts, tmp_path, change, message):
    folder, _ = texts
    change(folder)
    with pytest.raises(UserError, match=message) as caught:
        prepare([str(folder)], tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert os.listdir(tmp_path / "out") == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokenizer": "words"}, r"--tokenizer=words must be one of bytes, bpe, gpt2, or the tokenizer\.json"),
        ({"vocab_size": 300}, r"--vocab_size=300 goes with --tokenizer=bpe only"),
        ({"tokenizer": "bpe", "vocab_size": 256}, r"--vocab_size=256 is too small: .* need 257"),
        ({"tokenizer": "gpt2"}, r"needs both .* got neither"),
        ({"tokenizer": "gpt2", "vocab": "v.json"}, r"needs both .* got only --vocab"),
        ({"tokenizer": "gpt2", "merges": "m.txt"}, r"needs both .* got only --merges"),
        ({"tokenizer": "gpt2", "vocab": "v.json", "merges": "m.txt"}, r"there is no file v\.json"),
        ({"vocab": "v.json", "merges": "m.txt"}, r"go with --tokenizer=gpt2 only, got --tokenizer=bytes"),
        ({"validation_fraction": 0.0}, r"--validation_fraction must be between 0 and 1, got 0\.0"),
        ({"validation_fraction": 1.0}, r"--validation_fraction must be between 0 and 1, got 1\.0"),
        ({"seed": -1}, r"--seed must not be negative"),
    ],
)
def test_bad_options(texts, tmp_path, options, message):
    with pytest.raises(UserError, match=message):
        prepare([str(texts[0])], tmp_path / "out", PrepareOptions(**options))


@pytest.mark.parametrize("text", ["", "x"])
def test_too_little_text(tmp_path, text):
    (tmp_path / "a.txt").write_text(text)
    with pytest.raises(UserError, match=f"--input has {len(text)} characters"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out")
    (tmp_path / "b.txt").write_text("yz")
    assert prepare([str(tmp_path / "*.txt")], tmp_path / "out").documents == (1, 1)


def test_a_full_disk_is_no_bad_input(texts, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(preparation, "_publish", full)
    with pytest.raises(OSError, match="No space left"):
        prepare([str(texts[0])], tmp_path / "out")
    assert not list((tmp_path / "out").iterdir())


def snapshot(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_stopped_while_encoding_changes_nothing(texts, tmp_path, monkeypatch):
    folder, _ = texts
    prepare([str(folder)], tmp_path / "out")
    before = snapshot(tmp_path / "out")

    def stop(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation.TokenWriter, "end_document", stop)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(folder)], tmp_path / "out", PrepareOptions(seed=1))
    assert snapshot(tmp_path / "out") == before


@pytest.mark.parametrize("stopped_at", range(11))
def test_a_run_stopped_while_publishing_leaves_no_mixture_that_loads(texts, tmp_path, monkeypatch, stopped_at):
    folder, _ = texts
    out = tmp_path / "out"
    prepare([str(folder)], out)
    old = snapshot(out)
    prepare([str(folder)], tmp_path / "new", PrepareOptions(tokenizer="bpe", vocab_size=280, seed=1))
    new = snapshot(tmp_path / "new")
    left = iter(range(stopped_at))

    def stopping(function):
        def call(*arguments, **keywords):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return function(*arguments, **keywords)

        return call

    monkeypatch.setattr(os, "replace", stopping(os.replace))
    monkeypatch.setattr(Path, "unlink", stopping(Path.unlink))
    with pytest.raises(KeyboardInterrupt):
        prepare([str(folder)], out, PrepareOptions(tokenizer="bpe", vocab_size=280, seed=1))
    monkeypatch.undo()
    after = snapshot(out)
    if stopped_at == 0:
        assert after == old
        return
    with pytest.raises(UserError, match="no token file"):
        token_files.TokenFile(out / "train")
    loads = {1: old, 10: new}.get(stopped_at)
    assert ("validation.idx" in after) == (loads is not None)
    if loads:
        assert all(after[name] == loads[name] for name in ("validation.idx", "validation.bin", "tokenizer.json"))
        assert checksums.verify(str(out / "validation"))
