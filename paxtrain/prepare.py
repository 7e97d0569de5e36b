"""Turn text into token files: DIR/train.{bin,idx}, DIR/validation.{bin,idx} and DIR/tokenizer.json.

    python -m paxtrain.prepare --out=runs/data                                # Python's standard library, as bytes
    python -m paxtrain.prepare --input=books/,web.jsonl --out=runs/books --tokenizer=bpe --vocab_size=8192
    python -m paxtrain.prepare --input=code/ --out=runs/code --tokenizer=runs/books/tokenizer.json      # to mix both

A document is one file, or one line of a .jsonl file; every document ends with `<|endoftext|>`, or --end_of_text.
"""

import dataclasses
from collections.abc import Sequence

from absl import flags

from paxtrain.command_line import run
from paxtrain.data.preparation import DEFAULT_BPE_VOCABULARY, DEFAULTS, PrepareOptions, prepare

HINT = "name text files with --input="


def define_flags() -> None:
    """Define this main's flags."""
    d = DEFAULTS
    flags.DEFINE_list("input", ["stdlib"], "Text and .jsonl files, folders or globs; stdlib: Python's own library.")
    flags.DEFINE_string("out", "runs/data", "Directory for train.{bin,idx}, validation.{bin,idx} and tokenizer.json.")
    flags.DEFINE_string(
        "tokenizer", d.tokenizer, "bytes, bpe (trained on the input), gpt2, or a data set's or model's tokenizer.json."
    )
    flags.DEFINE_string("end_of_text", d.end_of_text, "The token after each document, with a tokenizer.json.")
    flags.DEFINE_integer("vocab_size", None, f"Largest vocabulary of bpe; {DEFAULT_BPE_VOCABULARY} if not given.")
    flags.DEFINE_string("vocab", None, "GPT-2's vocab.json.")
    flags.DEFINE_string("merges", None, "GPT-2's merges.txt.")
    flags.DEFINE_string("json_key", d.json_key, "Key of the text in .jsonl files.")
    description = "Share of the documents that is held out for validation."
    flags.DEFINE_float("validation_fraction", d.validation_fraction, description)
    flags.DEFINE_integer("seed", d.seed, "Decides which documents are held out.")


def main(argv: Sequence[str]) -> None:
    """Prepare the data set that the flags describe, and print its sizes."""
    f = flags.FLAGS
    options = PrepareOptions(**{field.name: getattr(f, field.name) for field in dataclasses.fields(PrepareOptions)})
    prepared = prepare(f.input, f.out, options)
    print(f"vocabulary: {prepared.vocab_size} ids, {prepared.tokenizer}")
    for name, prefix, count, tokens in zip(
        ("training", "validation"), prepared.prefixes, prepared.documents, prepared.tokens, strict=True
    ):
        print(f"{name}: {count:,} documents, {tokens:,} tokens, {prefix}.bin and .idx")


if __name__ == "__main__":
    define_flags()
    run(main, hint=HINT)
