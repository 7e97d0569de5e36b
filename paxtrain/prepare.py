"""Turn text into token files: DIR/train.{bin,idx}, DIR/validation.{bin,idx} and DIR/tokenizer.json.

    python -m paxtrain.prepare --out=runs/data                                # Python's standard library, as bytes
    python -m paxtrain.prepare --input=books/,web.jsonl --out=runs/books --tokenizer=bpe --vocab_size=8192
    python -m paxtrain.prepare --input=code/ --out=runs/code --tokenizer=runs/books/tokenizer.json      # to mix both

A document is one file, or one line of a .jsonl file; every document ends with `<|endoftext|>`, or --end_of_text.
"""

import dataclasses
import glob
import json
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from absl import flags
from tokenizers import Tokenizer
from tqdm import tqdm

from paxtrain.data.token_files import TokenWriter
from paxtrain.data.tokenizer import (
    END_OF_TEXT,
    FILE,
    SMALLEST_BPE_VOCABULARY,
    bytes_tokenizer,
    cuts,
    gpt2_tokenizer,
    kept_tokenizer,
    pieces,
    train_bpe,
    vocabulary_size,
)
from paxtrain.errors import UserError, run

HINT = "name text files with --input="

TOKENIZERS = ("bytes", "bpe", "gpt2")
DEFAULT_BPE_VOCABULARY = 8192

# Third-party code, tests, and tables of code points: what is left is some 10 MB of prose and code.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings"}
# Sequence sizes are int32 in the format, and a token is at least a byte.
_LARGEST_DOCUMENT = 2**31 - 2
_BATCH_CHARACTERS = 2**20


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The files that `prepare` wrote; pairs are (training, validation).

    Attributes:
        prefixes: paths of the data sets without suffix, as data.train and data.validation take them.
        tokenizer: path of tokenizer.json.
    """

    prefixes: tuple[str, str]
    documents: tuple[int, int]
    tokens: tuple[int, int]
    vocab_size: int
    tokenizer: str


def stdlib_files() -> list[str]:
    """Return the files of this Python's standard library without its tests: about 10 MB of text, no download."""
    root = Path(sysconfig.get_path("stdlib"))
    return [str(path) for path in sorted(root.rglob("*.py")) if not _NOT_STDLIB & {*path.relative_to(root).parts}]


def input_files(inputs: Sequence[str]) -> list[str]:
    """Return the files named by paths, folders, globs and "stdlib", each once.

    A folder stands for all files below it except hidden ones.

    Raises:
        UserError: there are no inputs, or one of them names no file.
    """
    if not inputs:
        raise UserError("--input is empty; name text files, folders or globs, or `stdlib`")
    files: list[str] = []
    for name in inputs:
        path = Path(name)
        if name == "stdlib":
            found = stdlib_files()
        elif os.path.isfile(name):
            found = [name]
        elif os.path.isdir(name):
            inside = (file for file in sorted(path.rglob("*")) if file.is_file())
            found = [str(file) for file in inside if not _hidden(file.relative_to(path))]
        else:
            found = [file for file in sorted(glob.glob(name, recursive=True)) if os.path.isfile(file)]
        if not found:
            raise UserError(f"--input={name} names no files; it takes text files, folders or globs, or `stdlib`")
        files += found
    once: dict[str, str] = {}
    for file in files:
        # A document under two names could be both held out and trained on.
        once.setdefault(os.path.realpath(file), file)
    return list(once.values())


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _decode(raw: bytes, path: str, offset: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at offset {offset + error.start} "
            f"({error.reason}); convert the file or leave it out of --input"
        ) from error


def _json_text(line: str, where: str, key: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # numbers of thousands of digits, lists in lists in lists
        raise UserError(f"{where} is JSON that cannot be read: {error}") from error
    if not isinstance(record, dict) or key not in record:
        found = f"the keys {', '.join(record)}" if isinstance(record, dict) else f"a {type(record).__name__}"
        raise UserError(f"{where} has no key {key!r} but {found}; name the key of the text with --json_key")
    text = record[key]
    if not isinstance(text, str):
        raise UserError(f"{where} has {type(text).__name__} under {key!r} instead of a string")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(f"{where} has half of a surrogate pair in its text, which is not valid Unicode") from error
    return text


def _file_documents(path: str, json_key: str) -> Iterator[str]:
    with open(path, "rb") as file:
        if not path.endswith(".jsonl"):
            yield _decode(file.read(), path, 0)
            return
        offset = 0
        for number, line in enumerate(file, 1):
            text = _decode(line, path, offset)
            offset += len(line)
            if text.strip():
                yield _json_text(text, f"{path}, line {number},", json_key)


def documents(files: Sequence[str], json_key: str = "text") -> Iterator[str]:
    """Yield the documents of all files in order, without empty ones.

    Raises:
        UserError: a file cannot be read, is not UTF-8, or a .jsonl line holds no object with a text under `json_key`.
    """
    for path in files:
        try:
            if os.path.getsize(path) > _LARGEST_DOCUMENT and not path.endswith(".jsonl"):
                raise UserError(
                    f"{path} is larger than {_LARGEST_DOCUMENT} bytes, too large for one document; split it"
                )
            yield from filter(None, _file_documents(path, json_key))
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}") from error


@dataclasses.dataclass(frozen=True)
class _Corpus:
    """Documents and the indices of those held out; a single document holds out its text from `cut` on."""

    files: Sequence[str]
    json_key: str
    held_out: frozenset[int]
    cut: int
    characters: int

    def __iter__(self) -> Iterator[tuple[str, bool]]:
        """Yield (text, held out) for each document."""
        for index, text in enumerate(documents(self.files, self.json_key)):
            if self.cut:
                yield text[: self.cut], False
                yield text[self.cut :], True
            else:
                yield text, index in self.held_out

    def training(self) -> Iterator[str]:
        return (text for text, held_out in self if not held_out)


def _split(files: Sequence[str], json_key: str, fraction: float, seed: int) -> _Corpus:
    """Read everything once, to refuse bad input before anything is written, and choose the held-out documents."""
    lengths = [len(text) for text in tqdm(documents(files, json_key), "reading", unit=" documents", disable=None)]
    count, characters = len(lengths), sum(lengths)
    if characters < 2:
        raise UserError(f"--input has {characters} characters of text; training and validation need at least one each")
    share = round((characters if count == 1 else count) * fraction)
    if count == 1:
        return _Corpus(files, json_key, frozenset(), characters - min(max(share, 1), characters - 1), characters)
    chosen = np.random.default_rng(seed).choice(count, min(max(share, 1), count - 1), replace=False)
    return _Corpus(files, json_key, frozenset(chosen.tolist()), 0, characters)


class _Piece(NamedTuple):
    text: str
    held_out: bool
    ends_document: bool


def _batches(corpus: _Corpus, cut: bool) -> Iterator[list[_Piece]]:
    """Yield all documents, cut into pieces if `cut`, in lists of about _BATCH_CHARACTERS."""
    batch: list[_Piece] = []
    characters = 0
    for text, held_out in corpus:
        remaining = len(text)
        for piece in pieces(text) if cut else [text]:
            remaining -= len(piece)
            batch.append(_Piece(piece, held_out, remaining == 0))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _encode(corpus: _Corpus, tokenizer: Tokenizer, end: int, training: TokenWriter, validation: TokenWriter) -> None:
    with tqdm(desc="encoding", total=corpus.characters, unit=" chars", unit_scale=True, disable=None) as progress:
        for batch in _batches(corpus, cuts(tokenizer)):
            encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
            for piece, encoding in zip(batch, encodings, strict=True):
                writer = validation if piece.held_out else training
                writer.extend(encoding.ids)
                if piece.ends_document:
                    writer.extend([end])
                    writer.end_document()
                progress.update(len(piece.text))


def _publish(staging: Path, out: Path) -> None:
    """Move a complete data set into place; an interruption leaves no partial set that loads."""
    for name in ("train.idx", "validation.idx"):
        (out / name).unlink(missing_ok=True)
    for name in ("tokenizer.json", "validation.bin", "train.bin", "validation.idx", "train.idx"):
        os.replace(staging / name, out / name)


def _check_options(
    tokenizer: str,
    end_of_text: str,
    vocab_size: int | None,
    vocab: str | None,
    merges: str | None,
    fraction: float,
    seed: int,
) -> None:
    if tokenizer not in TOKENIZERS and not os.path.isfile(tokenizer):
        raise UserError(
            f"--tokenizer={tokenizer} must be one of {', '.join(TOKENIZERS)}, or the {FILE} of a data set or model"
        )
    if tokenizer in TOKENIZERS and end_of_text != END_OF_TEXT:
        raise UserError(
            f"--end_of_text={end_of_text} goes with a {FILE} only, got --tokenizer={tokenizer}, whose documents end "
            f"with {END_OF_TEXT}"
        )
    if vocab_size is not None and tokenizer != "bpe":
        raise UserError(f"--vocab_size={vocab_size} goes with --tokenizer=bpe only, got --tokenizer={tokenizer}")
    if vocab_size is not None and vocab_size < SMALLEST_BPE_VOCABULARY:
        raise UserError(
            f"--vocab_size={vocab_size} is too small: the bytes and {END_OF_TEXT} alone need {SMALLEST_BPE_VOCABULARY}"
        )
    if tokenizer == "gpt2" and not (vocab and merges):
        given = f"only --{'vocab' if vocab else 'merges'}" if vocab or merges else "neither"
        raise UserError(f"--tokenizer=gpt2 needs both --vocab=vocab.json and --merges=merges.txt, got {given}")
    if tokenizer != "gpt2" and (vocab or merges):
        raise UserError(f"--vocab and --merges go with --tokenizer=gpt2 only, got --tokenizer={tokenizer}")
    if not 0 < fraction < 1:
        raise UserError(f"--validation_fraction must be between 0 and 1, got {fraction}")
    if seed < 0:
        raise UserError(f"--seed must not be negative, got {seed}")


def prepare(
    inputs: Sequence[str],
    out: str | os.PathLike[str],
    *,
    tokenizer: str = "bytes",
    end_of_text: str = END_OF_TEXT,
    vocab_size: int | None = None,
    vocab: str | None = None,
    merges: str | None = None,
    json_key: str = "text",
    validation_fraction: float = 0.05,
    seed: int = 0,
) -> Prepared:
    """Tokenize text files into `out`; an interrupted run leaves no partial data set that loads.

    Args:
        inputs: files, folders, globs or "stdlib", see `input_files`.
        tokenizer: "bytes", "bpe" (trained on the training documents), "gpt2" (from `vocab` and `merges`), or the path
            of another data set's or a model's tokenizer.json.
        end_of_text: token after each document; only a tokenizer.json allows another than the default.
        vocab_size: largest vocabulary of "bpe"; None: DEFAULT_BPE_VOCABULARY.
        vocab, merges: paths of GPT-2's vocab.json and merges.txt.
        json_key: key of the text in the objects of .jsonl files.
        validation_fraction: share of the documents that is held out, at least one; a single document gives its end.
        seed: seed of the choice of held-out documents.

    Raises:
        UserError: options do not fit each other, input is unusable (see `documents`), or `out` is not writable.
    """
    _check_options(tokenizer, end_of_text, vocab_size, vocab, merges, validation_fraction, seed)
    files = input_files(inputs)
    out = Path(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=out) as name:
            staging = Path(name)
            if tokenizer == "bytes":
                encoder = bytes_tokenizer()
            elif tokenizer == "gpt2":
                encoder = gpt2_tokenizer(vocab, merges)
            elif tokenizer != "bpe":
                encoder = kept_tokenizer(tokenizer, end_of_text)
            corpus = _split(files, json_key, validation_fraction, seed)
            if tokenizer == "bpe":
                encoder = train_bpe(corpus.training(), vocab_size or DEFAULT_BPE_VOCABULARY)
            size = vocabulary_size(encoder)
            with TokenWriter(staging / "train", size) as train, TokenWriter(staging / "validation", size) as validation:
                _encode(corpus, encoder, encoder.token_to_id(end_of_text), train, validation)
            (staging / "tokenizer.json").write_text(encoder.to_str(pretty=True), "utf-8")
            _publish(staging, out)
    except OSError as error:
        raise UserError(f"cannot write to {out}: {error.strerror}; --out must name a writable directory") from error
    return Prepared(
        prefixes=(str(out / "train"), str(out / "validation")),
        documents=(train.documents, validation.documents),
        tokens=(train.tokens, validation.tokens),
        vocab_size=size,
        tokenizer=str(out / "tokenizer.json"),
    )


def define_flags() -> None:
    """Define this main's flags; mains that import `prepare` must not get them."""
    flags.DEFINE_list("input", ["stdlib"], "Text and .jsonl files, folders or globs; stdlib: Python's own library.")
    flags.DEFINE_string("out", "runs/data", "Directory for train.{bin,idx}, validation.{bin,idx} and tokenizer.json.")
    flags.DEFINE_string(
        "tokenizer", "bytes", "bytes, bpe (trained on the input), gpt2, or a data set's or model's tokenizer.json."
    )
    flags.DEFINE_string("end_of_text", END_OF_TEXT, "The token after each document, with a tokenizer.json.")
    flags.DEFINE_integer("vocab_size", None, f"Largest vocabulary of bpe; {DEFAULT_BPE_VOCABULARY} if not given.")
    flags.DEFINE_string("vocab", None, "GPT-2's vocab.json.")
    flags.DEFINE_string("merges", None, "GPT-2's merges.txt.")
    flags.DEFINE_string("json_key", "text", "Key of the text in .jsonl files.")
    flags.DEFINE_float("validation_fraction", 0.05, "Share of the documents that is held out for validation.")
    flags.DEFINE_integer("seed", 0, "Decides which documents are held out.")


def main(argv: Sequence[str]) -> None:
    """Prepare the data set that the flags describe, and print its sizes."""
    options = flags.FLAGS
    prepared = prepare(
        options.input,
        options.out,
        tokenizer=options.tokenizer,
        end_of_text=options.end_of_text,
        vocab_size=options.vocab_size,
        vocab=options.vocab,
        merges=options.merges,
        json_key=options.json_key,
        validation_fraction=options.validation_fraction,
        seed=options.seed,
    )
    print(f"vocabulary: {prepared.vocab_size} ids, {prepared.tokenizer}")
    for name, prefix, count, tokens in zip(
        ("training", "validation"), prepared.prefixes, prepared.documents, prepared.tokens, strict=True
    ):
        print(f"{name}: {count:,} documents, {tokens:,} tokens, {prefix}.bin and .idx")


if __name__ == "__main__":
    define_flags()
    run(main, hint=HINT)
