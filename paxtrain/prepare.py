"""Turn text into token files: train.{bin,idx,sha256}, validation.{bin,idx,sha256} and the tokenizer, in a folder.

    python -m paxtrain.prepare --out=runs/data                                # Python's standard library, as bytes
    python -m paxtrain.prepare --input='web/*.parquet,books.jsonl.zst' --json_key=content --out=runs/web
    python -m paxtrain.prepare --input=books/,web.jsonl --out=runs/books --tokenizer=bpe --vocab_size=8192
    python -m paxtrain.prepare --input=code/ --out=runs/code --tokenizer=runs/books/tokenizer.json      # to mix both
    python -m paxtrain.prepare --out=runs/data --verify                       # are the files still what was written?
    python -m paxtrain.prepare --show=runs/data/train                         # what is in a set, its first document too

A document is one file, or a text of a file that holds JSON lines, an array of objects, one object or Parquet. Files may
be compressed by gzip or Zstandard. Every document ends with `<|endoftext|>`, or --end_of_text.
"""

import os
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from paxtrain.command_line import run
from paxtrain.data import checksums, token_files, tokenizer
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.errors import UserError
from paxtrain.knobs import define, given

SHOWN = 32  # tokens of a set's first document
HINT = "name text files with --input="


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("input", ["stdlib"], "Files of text, JSON or Parquet, folders or globs; stdlib: Python's own.")
    flags.DEFINE_string("out", "runs/data", "Directory for train.{bin,idx}, validation.{bin,idx} and tokenizer.json.")
    define(PrepareOptions)
    flags.DEFINE_string("show", "", "Prepare nothing; print what is in the token files of this prefix.")
    flags.DEFINE_bool("verify", False, "Prepare nothing; compare the token files in --out with their checksums.")


def _verify(folder: str) -> None:
    """Compare all token files of a folder with their checksums, and print how many there are."""
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".idx"))
        for name in names:
            checksums.require(os.path.join(folder, name.removesuffix(".idx")))
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); --out names a folder of data") from error
    if not names:
        raise UserError(f"there are no token files in --out={folder} to verify; name a folder of prepared data")
    print(f"{2 * len(names)} files in {folder} are as their checksums say")


def _show(prefix: str) -> None:
    """Print the sizes of a data set, and the ids and the text with which its first document begins."""
    file = token_files.load(prefix, vocab_size=2**31, sequence=1)
    print(f"{prefix}: {file.documents:,} documents, {len(file):,} tokens of {file.dtype}")
    ids = file.read(0, min(file.first_document, SHOWN)).tolist()
    print(f"the first document: {file.first_document:,} tokens, {' '.join(map(str, ids))}")
    beside = Path(prefix).with_name(tokenizer.FILE)
    if beside.exists():
        print(f"as text: {tokenizer.load(beside).decode(ids, skip_special_tokens=False)!r}")


def main(argv: Sequence[str]) -> None:
    """Prepare the data set that the flags describe, and print its sizes."""
    f = flags.FLAGS
    if f.show:
        _show(f.show)
        return
    if f.verify:
        _verify(f.out)
        return
    prepared = prepare(f.input, f.out, given(PrepareOptions))
    corpus = prepared.corpus
    left_out = f", without {corpus.empty:,} empty ones" if corpus.empty else ""
    print(f"input: {corpus.documents:,} documents{left_out}, {corpus.bytes:,} bytes of {len(corpus.files):,} files")
    print(f"the first document: {corpus.first!r}")
    print(f"vocabulary: {prepared.vocab_size} ids, {prepared.tokenizer}")
    print(f"documents begin with {prepared.begin or 'their text'} and end with {prepared.end}")
    if prepared.special:
        found = ", ".join(f"{count:,} {token}" for token, count in prepared.special.items())
        how = "as their ids" if f.special_tokens else "as text; --special_tokens takes them as their ids"
        print(f"special tokens in the text, {how}: {found}")
    for name, prefix, count, tokens in zip(
        ("training", "validation"), prepared.prefixes, prepared.documents, prepared.tokens, strict=True
    ):
        print(f"{name}: {count:,} documents, {tokens:,} tokens, {prefix}.bin and .idx")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
