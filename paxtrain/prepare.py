"""Turn text into token files: DIR/train.{bin,idx,sha256}, DIR/validation.{bin,idx,sha256} and DIR/tokenizer.json.

    python -m paxtrain.prepare --out=runs/data                                # Python's standard library, as bytes
    python -m paxtrain.prepare --input=books/,web.jsonl --out=runs/books --tokenizer=bpe --vocab_size=8192
    python -m paxtrain.prepare --input=code/ --out=runs/code --tokenizer=runs/books/tokenizer.json      # to mix both
    python -m paxtrain.prepare --out=runs/data --verify                       # are the files still what was written?

A document is one file, or one line of a .jsonl file; every document ends with `<|endoftext|>`, or --end_of_text.
"""

import os
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.data import checksums
from paxtrain.data.preparation import PrepareOptions, prepare
from paxtrain.errors import UserError
from paxtrain.knobs import define, given

HINT = "name text files with --input="


def define_flags() -> None:
    """Define this main's flags."""
    flags.DEFINE_list("input", ["stdlib"], "Text and .jsonl files, folders or globs; stdlib: Python's own library.")
    flags.DEFINE_string("out", "runs/data", "Directory for train.{bin,idx}, validation.{bin,idx} and tokenizer.json.")
    define(PrepareOptions)
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


def main(argv: Sequence[str]) -> None:
    """Prepare the data set that the flags describe, and print its sizes."""
    f = flags.FLAGS
    if f.verify:
        _verify(f.out)
        return
    prepared = prepare(f.input, f.out, given(PrepareOptions))
    print(f"vocabulary: {prepared.vocab_size} ids, {prepared.tokenizer}")
    for name, prefix, count, tokens in zip(
        ("training", "validation"), prepared.prefixes, prepared.documents, prepared.tokens, strict=True
    ):
        print(f"{name}: {count:,} documents, {tokens:,} tokens, {prefix}.bin and .idx")


if __name__ == "__main__":
    run(main, define_flags, hint=HINT)
