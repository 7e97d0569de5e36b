"""Token files made from text: the training and validation sets of a corpus, and their tokenizer."""

import dataclasses
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tqdm import tqdm

from paxtrain import files
from paxtrain.config.model import MOST_VOCABULARY
from paxtrain.data import checksums
from paxtrain.data import corpus as corpora
from paxtrain.data.corpus import Corpus
from paxtrain.data.token_files import TokenWriter
from paxtrain.data.tokenizer import (
    END_OF_TEXT,
    FILE,
    SMALLEST_BPE_VOCABULARY,
    bytes_tokenizer,
    cuts,
    encoded,
    gpt2_tokenizer,
    kept_tokenizer,
    pieces,
    train_bpe,
    vocabulary_size,
)
from paxtrain.errors import UserError

TOKENIZERS = ("bytes", "bpe", "gpt2")
DEFAULT_BPE_VOCABULARY = 8192
_BATCH_CHARACTERS = 2**20


@dataclasses.dataclass(frozen=True)
class PrepareOptions:
    """Options of `prepare`; the flags of paxtrain.prepare have the same names.

    Attributes:
        tokenizer: one of bytes, bpe (trained on the training documents), gpt2 (from --vocab and --merges), or the path
            of another data set's or a model's tokenizer.json.
        end_of_text: token after each document; only a tokenizer.json allows another than the default.
        vocab_size: largest vocabulary of bpe; 8192 if not given.
        vocab: path of GPT-2's vocab.json.
        merges: path of GPT-2's merges.txt.
        json_key: key of the text in the objects of .jsonl files.
        validation_fraction: share of the documents that is held out for validation, at least one; a single document
            gives its end.
        seed: seed of the choice of held-out documents.

    Raises:
        UserError: a value makes no sense, or does not go with the tokenizer.
    """

    tokenizer: str = "bytes"
    end_of_text: str = END_OF_TEXT
    vocab_size: int | None = None
    vocab: str | None = None
    merges: str | None = None
    json_key: str = "text"
    validation_fraction: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        if self.tokenizer not in TOKENIZERS and not os.path.isfile(self.tokenizer):
            raise UserError(
                f"--tokenizer={self.tokenizer} must be one of {', '.join(TOKENIZERS)}, "
                f"or the {FILE} of a data set or model"
            )
        if self.tokenizer in TOKENIZERS and self.end_of_text != END_OF_TEXT:
            raise UserError(
                f"--end_of_text={self.end_of_text} goes with a {FILE} only, got --tokenizer={self.tokenizer}, whose "
                f"documents end with {END_OF_TEXT}"
            )
        if self.vocab_size is not None and self.tokenizer != "bpe":
            raise UserError(
                f"--vocab_size={self.vocab_size} goes with --tokenizer=bpe only, got --tokenizer={self.tokenizer}"
            )
        if self.vocab_size is not None and self.vocab_size < SMALLEST_BPE_VOCABULARY:
            raise UserError(
                f"--vocab_size={self.vocab_size} is too small: the bytes and {END_OF_TEXT} alone need "
                f"{SMALLEST_BPE_VOCABULARY}"
            )
        if self.vocab_size is not None and self.vocab_size > MOST_VOCABULARY:
            raise UserError(
                f"--vocab_size={self.vocab_size} is too large: a model may have {MOST_VOCABULARY:,} ids, and "
                "tokenizers have 8,192 to 262,144"
            )
        if self.tokenizer == "gpt2" and not (self.vocab and self.merges):
            one = "vocab" if self.vocab else "merges"
            given = f"only --{one}" if self.vocab or self.merges else "neither"
            raise UserError(f"--tokenizer=gpt2 needs both --vocab=vocab.json and --merges=merges.txt, got {given}")
        if self.tokenizer != "gpt2" and (self.vocab or self.merges):
            raise UserError(f"--vocab and --merges go with --tokenizer=gpt2 only, got --tokenizer={self.tokenizer}")
        if not 0 < self.validation_fraction < 1:
            raise UserError(f"--validation_fraction must be between 0 and 1, got {self.validation_fraction}")
        if self.seed < 0:
            raise UserError(f"--seed must not be negative, got {self.seed}")


DEFAULTS = PrepareOptions()


@dataclasses.dataclass(frozen=True)
class PreparedData:
    """The files that `prepare` wrote; pairs are (training, validation).

    Attributes:
        prefixes: paths of the data sets without suffix, as data.train and data.validation take them.
        documents: numbers of documents.
        tokens: numbers of tokens.
        vocab_size: number of the tokenizer's ids.
        tokenizer: path of tokenizer.json.
    """

    prefixes: tuple[str, str]
    documents: tuple[int, int]
    tokens: tuple[int, int]
    vocab_size: int
    tokenizer: str


class _Piece(NamedTuple):
    """Text that is encoded at once: a document or a part of one."""

    text: str
    held_out: bool
    ends_document: bool


def _batches(corpus: Corpus, cut: bool) -> Iterator[list[_Piece]]:
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


def _encode(corpus: Corpus, tokenizer: Tokenizer, end: int, training: TokenWriter, validation: TokenWriter) -> None:
    """Write the ids of all documents, each followed by the id `end`."""
    with tqdm(desc="encoding", total=corpus.characters, unit=" chars", unit_scale=True, disable=None) as progress:
        for batch in _batches(corpus, cuts(tokenizer)):
            encodings = encoded(tokenizer, [piece.text for piece in batch], "the tokenizer cannot encode the text")
            for piece, encoding in zip(batch, encodings, strict=True):
                writer = validation if piece.held_out else training
                writer.extend(encoding.ids)
                if piece.ends_document:
                    writer.extend([end])
                    writer.end_document()
                progress.update(len(piece.text))


def _publish(staging: Path, out: Path) -> None:
    """Move a complete data set into place; an interruption leaves no partial set that loads."""
    files.sync_tree(staging)
    for name in ("train.idx", "validation.idx"):
        (out / name).unlink(missing_ok=True)
    sums = [checksums.sidecar(name) for name in ("train", "validation")]
    for name in (FILE, *sums, "validation.bin", "train.bin", "validation.idx", "train.idx"):
        os.replace(staging / name, out / name)
    files.sync_folder(out)


def _given_tokenizer(options: PrepareOptions) -> Tokenizer | None:
    """Return the tokenizer that the options name, or None if it is trained on the corpus."""
    if options.tokenizer == "bytes":
        return bytes_tokenizer()
    if options.tokenizer == "gpt2":
        assert options.vocab and options.merges  # the options require both
        return gpt2_tokenizer(options.vocab, options.merges)
    return None if options.tokenizer == "bpe" else kept_tokenizer(options.tokenizer, options.end_of_text)


def prepare(inputs: Sequence[str], out: str | os.PathLike[str], options: PrepareOptions = DEFAULTS) -> PreparedData:
    """Tokenize text files into a folder; an interrupted run leaves no partial data set that loads.

    Args:
        inputs: files, folders, globs or "stdlib", see `corpus.input_files`.
        out: folder for train.{bin,idx,sha256}, validation.{bin,idx,sha256} and tokenizer.json.
        options: the tokenizer, the key of the text, and the share that is held out.

    Raises:
        UserError: the input is unusable (see `corpus.documents`), a file that the options name cannot be used, or `out`
            is not writable.
    """
    texts = corpora.input_files(inputs)
    folder = Path(out)
    with files.writable(folder, "--out must name a writable directory"):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".prepare-", dir=folder) as name:
            staging = Path(name)
            tokenizer = _given_tokenizer(options)
            corpus = corpora.split(texts, options.json_key, options.validation_fraction, options.seed)
            if tokenizer is None:
                tokenizer = train_bpe(corpus.training(), options.vocab_size or DEFAULT_BPE_VOCABULARY)
            size = vocabulary_size(tokenizer)
            with TokenWriter(staging / "train", size) as train, TokenWriter(staging / "validation", size) as validation:
                _encode(corpus, tokenizer, tokenizer.get_vocab()[options.end_of_text], train, validation)
            for part, writer in (("train", train), ("validation", validation)):
                Path(checksums.sidecar(str(staging / part))).write_text(checksums.text(writer.sums))
            (staging / FILE).write_text(tokenizer.to_str(pretty=True), "utf-8")
            _publish(staging, folder)
    return PreparedData(
        prefixes=(str(folder / "train"), str(folder / "validation")),
        documents=(train.documents, validation.documents),
        tokens=(train.tokens, validation.tokens),
        vocab_size=size,
        tokenizer=str(folder / FILE),
    )
