"""Token files made from text: the training and validation sets of a corpus, and their tokenizer."""

import dataclasses
import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tqdm import tqdm

from paxtrain import files
from paxtrain.config.model import MOST_VOCABULARY
from paxtrain.data import checksums, documents, settings
from paxtrain.data import corpus as corpora
from paxtrain.data.corpus import Corpus
from paxtrain.data.token_files import TokenWriter
from paxtrain.data.tokenizer import (
    END_OF_TEXT,
    FILE,
    SMALLEST_BPE_VOCABULARY,
    around,
    bytes_tokenizer,
    cuts,
    encoded,
    gpt2_tokenizer,
    load,
    pieces,
    put_in_front,
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
        end_of_text: token after each document; if not given, the eos_token of the tokenizer_config.json beside a
            tokenizer.json, and otherwise <|endoftext|>, which is the only one of the other tokenizers.
        begin_of_text: token before each document, '' for none; if not given, the one that the tokenizer itself puts in
            front of a text, such as Llama's <s>, and none otherwise.
        special_tokens: encode special tokens that the text spells, such as <|im_start|>, as their ids, as transformers
            does; otherwise they are text like any other, so that no document can forge one.
        vocab_size: largest vocabulary of bpe; 8192 if not given.
        vocab: path of GPT-2's vocab.json.
        merges: path of GPT-2's merges.txt.
        json_key: key of the text in the objects of JSON, and name of its column in Parquet.
        validation_fraction: share of the documents that is held out for validation, at least one; a single document
            gives its end.
        seed: seed of the choice of held-out documents.

    Raises:
        UserError: a value makes no sense, or does not go with the tokenizer.
    """

    tokenizer: str = "bytes"
    end_of_text: str | None = None
    begin_of_text: str | None = None
    special_tokens: bool = False
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
        if self.tokenizer in TOKENIZERS and self.end_of_text not in (None, END_OF_TEXT):
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
        begin: token with which documents begin; None: they begin with their text.
        end: token with which they end.
        corpus: what was read.
        special: number of each special token that the text spells.
    """

    prefixes: tuple[str, str]
    documents: tuple[int, int]
    tokens: tuple[int, int]
    vocab_size: int
    tokenizer: str
    begin: str | None
    end: str
    corpus: Corpus
    special: dict[str, int]


class _Piece(NamedTuple):
    """Text that is encoded at once: a document or a part of one."""

    text: str
    held_out: bool
    begins_document: bool
    ends_document: bool


def _batches(corpus: Corpus, cut: bool) -> Iterator[list[_Piece]]:
    """Yield all documents, cut into pieces if `cut`, in lists of about _BATCH_CHARACTERS."""
    batch: list[_Piece] = []
    characters = 0
    for text, held_out in corpus:
        remaining = len(text)
        for piece in pieces(text) if cut else [text]:
            begins = remaining == len(text)
            remaining -= len(piece)
            batch.append(_Piece(piece, held_out, begins, remaining == 0))
            characters += len(piece)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch


def _encode(
    corpus: Corpus, tokenizer: Tokenizer, begin: Sequence[int], end: int, writers: tuple[TokenWriter, TokenWriter]
) -> dict[str, int]:
    """Write the ids of all documents between the ids `begin` and `end`, and count the special tokens in the text."""
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    spelled = re.compile("|".join(map(re.escape, sorted(filter(None, special), key=len, reverse=True))) or "(?!)")
    found: Counter[str] = Counter()
    with tqdm(desc="encoding", total=corpus.characters, unit=" chars", unit_scale=True, disable=None) as progress:
        for batch in _batches(corpus, cuts(tokenizer)):
            encodings = encoded(tokenizer, [piece.text for piece in batch], "the tokenizer cannot encode the text")
            for piece, encoding in zip(batch, encodings, strict=True):
                writer = writers[piece.held_out]
                writer.extend([*begin, *encoding.ids] if piece.begins_document else encoding.ids)
                if piece.ends_document:
                    writer.extend([end])
                    writer.end_document()
                found.update(spelled.findall(piece.text))
                progress.update(len(piece.text))
    return dict(found)


def _publish(staging: Path, out: Path) -> None:
    """Move a complete data set into place; an interruption leaves no partial set that loads."""
    files.sync_tree(staging)
    for name in ("train.idx", "validation.idx"):
        (out / name).unlink(missing_ok=True)
    sums = [checksums.sidecar(name) for name in ("train", "validation")]
    for name in (
        FILE,
        settings.FILE,
        documents.FILE,
        *sums,
        "validation.bin",
        "train.bin",
        "validation.idx",
        "train.idx",
    ):
        os.replace(staging / name, out / name)
    files.sync_folder(out)


def _given_tokenizer(options: PrepareOptions) -> Tokenizer | None:
    """Return the tokenizer that the options name, or None if it is trained on the corpus."""
    if options.tokenizer == "bytes":
        return bytes_tokenizer()
    if options.tokenizer == "gpt2":
        assert options.vocab and options.merges  # the options require both
        return gpt2_tokenizer(options.vocab, options.merges)
    return None if options.tokenizer == "bpe" else load(options.tokenizer)


def _marks(tokenizer: Tokenizer, options: PrepareOptions, known: settings.TokenizerSettings) -> tuple[str | None, str]:
    """Return the tokens that begin documents (None: none) and end them.

    Raises:
        UserError: the tokenizer does not have them.
    """
    front, _ = around(tokenizer)
    begin, end = options.begin_of_text, options.end_of_text
    if begin is None and front:
        begin = tokenizer.id_to_token(front[0]) if len(front) == 1 else None
        if begin is None:
            raise UserError(
                f"{options.tokenizer} puts the ids {front} in front of a text; name the token that begins documents by "
                "--begin_of_text, or --begin_of_text='' for none"
            )
    if end is None:
        end = settings.token(known, "eos_token") or END_OF_TEXT
    for flag, token, example in (("end_of_text", end, "</s>"), ("begin_of_text", begin, "<s>")):
        if token and tokenizer.token_to_id(token) is None:
            does = flag.partition("_")[0]
            raise UserError(
                f"{options.tokenizer} has no token {token}; name the one that {does}s its documents, such as "
                f"--{flag}='{example}'"
            )
    if not end:
        raise UserError("--end_of_text must name a token, since documents lie one after the other, got ''")
    return begin or None, end


def prepare(inputs: Sequence[str], out: str | os.PathLike[str], options: PrepareOptions = DEFAULTS) -> PreparedData:
    """Tokenize text files into a folder; an interrupted run leaves no partial data set that loads.

    Args:
        inputs: files, folders, globs or "stdlib", see `corpus.input_files`.
        out: folder for train.{bin,idx,sha256}, validation.{bin,idx,sha256}, tokenizer.json, tokenizer_config.json and
            lengths.csv, the numbers of documents by length.
        options: the tokenizer, what begins and ends documents, the key of the text, and the share that is held out.

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
            known = settings.read(Path(options.tokenizer).parent) if options.tokenizer not in TOKENIZERS else {}
            marks = None if tokenizer is None else _marks(tokenizer, options, known)
            corpus = corpora.split(texts, options.json_key, options.validation_fraction, options.seed)
            if tokenizer is None:
                tokenizer = train_bpe(corpus.training(), options.vocab_size or DEFAULT_BPE_VOCABULARY)
            begin, end = marks or _marks(tokenizer, options, known)
            put_in_front(tokenizer, begin)
            tokenizer.encode_special_tokens = not options.special_tokens  # the file does not store this setting
            size = vocabulary_size(tokenizer)
            ids = tokenizer.get_vocab()
            with TokenWriter(staging / "train", size) as train, TokenWriter(staging / "validation", size) as validation:
                first = [] if begin is None else [ids[begin]]
                special = _encode(corpus, tokenizer, first, ids[end], (train, validation))
            both = ("train", train), ("validation", validation)
            (staging / documents.FILE).write_text(documents.text((part, writer.lengths) for part, writer in both))
            for part, writer in both:
                Path(checksums.sidecar(str(staging / part))).write_text(checksums.text(writer.sums))
            (staging / FILE).write_text(tokenizer.to_str(pretty=True), "utf-8")
            values = settings.of_data(known, begin, end, options.special_tokens)
            (staging / settings.FILE).write_text(settings.text(values))
            _publish(staging, folder)
    return PreparedData(
        prefixes=(str(folder / "train"), str(folder / "validation")),
        documents=(train.documents, validation.documents),
        tokens=(train.tokens, validation.tokens),
        vocab_size=size,
        tokenizer=str(folder / FILE),
        begin=begin,
        end=end,
        corpus=corpus,
        special=special,
    )
