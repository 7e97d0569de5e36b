"""The tokenizers of paxtrain.prepare: byte-level BPEs of the `tokenizers` library, and those of a tokenizer.json.

The byte-level BPEs have the token `<|endoftext|>`. They do not normalize, so decoding returns the encoded text.
"""

import contextlib
import json
import os
import pathlib
import re
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

from tokenizers import Encoding, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from paxtrain.errors import UserError

FILE = "tokenizer.json"  # beside token files and checkpoints
END_OF_TEXT = "<|endoftext|>"
BYTES = 256
SMALLEST_BPE_VOCABULARY = BYTES + 1

# GPT-2's pattern never joins a character with a space or newline after it, so encoding each side alone gives the same.
_BOUNDARY = re.compile(r"\S(?=[ \n])")
_PIECE_CHARACTERS = 2**16
# Training scans a word once for each merge in it, so words are cut after this many bytes; tokens are far shorter.
_LONGEST_WORD = 256
# Processor seconds that an encoding may take, and those it may take more for each character. The library needs 1e-6.
_LIMIT, _LIMIT_PER_CHARACTER = 3.0, 2e-5


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Drop what the block writes to the process's stderr: Rust prints each panic there, with a trace."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


@contextlib.contextmanager
def errors_of_library(message: str) -> Iterator[None]:
    """Turn an error of the `tokenizers` library into a sentence.

    Its Rust code panics on some files, and on texts for which a file's regular expression takes too many steps: the
    library tries 10 million at each character. Panics are no Exceptions.

    Args:
        message: what cannot be done.

    Raises:
        UserError: the block has raised anything but KeyboardInterrupt, SystemExit or MemoryError.
    """
    try:
        with _without_stderr():
            yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:
        raise UserError(f"{message}: {' '.join(str(error).split())}") from error


def encoded(tokenizer: Tokenizer, texts: Sequence[str], message: str) -> list[Encoding]:
    """Return the encodings of texts, with nothing in front and behind, and bound the processor time that they take.

    A regular expression may stay just below the library's limit of steps at every character. An encoding cannot be
    interrupted, so it runs in a thread that the process does not wait for when it ends.

    Args:
        tokenizer: the tokenizer.
        texts: the texts.
        message: what cannot be done if it fails.

    Raises:
        UserError: the library cannot encode them, or takes too long.
    """
    found: list[list[Encoding]] = []
    errors: list[BaseException] = []

    def encode() -> None:
        try:
            found.append(tokenizer.encode_batch_fast(list(texts), add_special_tokens=False))
        except BaseException as error:  # panics are no Exceptions
            errors.append(error)

    characters = sum(map(len, texts))
    limit = _LIMIT + _LIMIT_PER_CHARACTER * characters
    until = time.process_time() + limit
    thread = threading.Thread(target=encode, daemon=True)
    with errors_of_library(message):
        thread.start()
        while thread.is_alive() and time.process_time() < until:
            thread.join(0.1)
        if errors:
            raise errors[0]
        if not found:
            raise TimeoutError(
                f"{characters:,} characters took more than {limit:.0f} s of the processor, so the regular expression "
                f"in its {FILE} is too slow"
            )
    return found[0]


def _byte_level(model: models.Model, *, split_words: bool) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_words)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.encode_special_tokens = True
    return tokenizer


def bytes_tokenizer() -> Tokenizer:
    """Return a tokenizer with one token per UTF-8 byte: the id is the byte's value, and `<|endoftext|>` is 256."""
    # GPT-2 writes printable bytes as themselves and the others as the characters from 256 on.
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(BYTES) if byte not in printable]
    vocab = {chr(byte): byte for byte in printable} | {chr(BYTES + i): byte for i, byte in enumerate(others)}
    # Without merges words make no difference, and finding them takes three times as long as everything else.
    tokenizer = _byte_level(models.BPE(vocab=vocab, merges=[]), split_words=False)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def gpt2_tokenizer(vocab: str, merges: str) -> Tokenizer:
    """Return GPT-2's BPE, made from its vocab.json and merges.txt.

    Raises:
        UserError: a file is missing or has the wrong content.
    """
    for path in (vocab, merges):
        if not os.path.isfile(path):
            raise UserError(f"there is no file {path}; --vocab and --merges name GPT-2's vocab.json and merges.txt")
    with errors_of_library(f"{vocab} and {merges} are not a GPT-2 vocabulary and its merges"):
        model = models.BPE.from_file(vocab, merges)
    tokenizer = _byte_level(model, split_words=True)
    tokenizer.add_special_tokens([END_OF_TEXT])
    return tokenizer


def load(path: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a tokenizer.json, without the truncation and the padding that a model's may have.

    Raises:
        UserError: the file is no tokenizer.
    """
    with errors_of_library(f"{path} is not a valid {FILE}"):
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer


def around(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the ids that a tokenizer puts in front of a text and behind it, such as Llama's `<s>` in front.

    Raises:
        UserError: the library cannot tell.
    """
    with errors_of_library(f"the {FILE} puts no tokens around a text that make sense"):
        made = tokenizer.post_process(Tokenizer(models.WordLevel({"x": 0}, "x")).encode("x"))
        text = made.special_tokens_mask.index(0)
    return made.ids[:text], made.ids[text + 1 :]


def put_in_front(tokenizer: Tokenizer, token: str | None) -> None:
    """Make a tokenizer put a token in front of each text, and nothing else; None: nothing at all.

    Raises:
        UserError: the library takes no such token.
    """
    number = None if token is None else tokenizer.token_to_id(token)
    if around(tokenizer) == ([] if number is None else [number], []):
        return
    with errors_of_library(f"the tokenizer cannot put {token} in front of a text"):
        tokenizer.post_processor = None
        if token is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[token, "$A"], pair=[token, "$A", token, "$B"], special_tokens=[(token, number)]
            )


def train_bpe(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Train a BPE with GPT-2's word pattern on `texts`; little text may give fewer tokens than `vocab_size`.

    `vocab_size` must be SMALLEST_BPE_VOCABULARY or more, since the bytes and `<|endoftext|>` need that many ids.
    """
    tokenizer = _byte_level(models.BPE(), split_words=True)
    words = tokenizer.pre_tokenizer
    parts = pre_tokenizers.Split(Regex(f".{{{_LONGEST_WORD}}}"), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, parts])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in texts for piece in pieces(text)), trainer)
    tokenizer.pre_tokenizer = words
    return tokenizer


def alike(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Return whether two tokenizer.json files give all texts the same ids, apart from what they put around them.

    Raises:
        UserError: a file is no tokenizer, or cannot be read.
    """
    try:
        if pathlib.Path(one).read_bytes() == pathlib.Path(other).read_bytes():
            return True
    except OSError as error:
        raise UserError(f"{error.filename} cannot be read ({error.strerror}); check its permissions") from error
    # The library writes the spellings of all its versions in one way.
    values = [json.loads(load(path).to_str()) for path in (one, other)]
    return all(values[0][part] == values[1][part] for part in ("model", "added_tokens", "normalizer", "pre_tokenizer"))


def vocabulary_size(tokenizer: Tokenizer) -> int:
    """Return the largest id plus one, which a model needs even if ids have gaps."""
    return max(tokenizer.get_vocab().values()) + 1


def cuts(tokenizer: Tokenizer) -> bool:
    """Return whether the `pieces` of a text encode to the ids of the whole; only GPT-2's word pattern ensures it.

    An added token that reaches across a cut, or takes the spaces behind it, would be lost.
    """
    words = tokenizer.pre_tokenizer
    plain = isinstance(words, pre_tokenizers.ByteLevel) and not words.add_prefix_space
    # Without words a token may reach across a cut, unless all tokens are one byte.
    alone = plain and (words.use_regex or vocabulary_size(tokenizer) <= SMALLEST_BPE_VOCABULARY)
    added = tokenizer.get_added_tokens_decoder().values()
    across = any(token.rstrip or _BOUNDARY.search(token.content) for token in added)
    return alone and not across and tokenizer.normalizer is None


def pieces(text: str, characters: int = _PIECE_CHARACTERS) -> Iterator[str]:
    """Cut a text into pieces of about `characters` that encode, one by one, to the ids of the whole text (see `cuts`).

    The library needs 150 bytes of memory per character, and encodes several pieces at the same time.
    """
    start = 0
    while start < len(text):
        boundary = _BOUNDARY.search(text, start + characters - 1)
        stop = boundary.end() if boundary else len(text)
        yield text[start:stop]
        start = stop
