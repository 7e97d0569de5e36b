"""Token files in Megatron-LM's format, and the deterministic stream of samples that training reads from them.

PREFIX.bin holds the token ids of all sequences, one after the other. PREFIX.idx holds, little-endian:

    magic "MMIDIDX\\0\\0", uint64 version (1), uint8 dtype code, uint64 sequences N, uint64 document indices D,
    int32[N] tokens per sequence, int64[N] byte offset of each sequence, int64[D] first sequence of each document,
    beginning with 0 and ending with N (the documents number D - 1). Merged sets may list 0 alone; then each sequence
    is a document.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
"""

import array
import hashlib
import os
import struct
import sys
from collections.abc import Callable, Sequence

import grain
import numpy as np

from paxtrain.data import checksums, tokenizer
from paxtrain.errors import UserError, command

_MAGIC = b"MMIDIDX\x00\x00"
_VERSION = 1
_HEADER = struct.Struct("<9sQBQQ")
_DTYPES = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
_DTYPE_CODES = {np.dtype(dtype): code for code, dtype in _DTYPES.items()}

# Of larger files nothing is read at the start that a tokenizer beside them can tell.
_SCAN_BYTES = 64 * 2**20
_SCAN_TOKENS = 2**20

Prefix = str | os.PathLike[str]


class TokenWriter:
    """Writer of one data set, with one sequence per document.

    It is a context manager. The index is written last, when the block ends without an exception; without it the data
    set does not load.

    Attributes:
        tokens: tokens written so far.
        sums: SHA-256 and name of both files, once they are complete.
    """

    def __init__(self, prefix: Prefix, vocab_size: int) -> None:
        """Open PREFIX.bin; `vocab_size` decides between uint16 and int32 ids."""
        self._prefix = os.fspath(prefix)
        self._dtype = np.dtype(np.uint16 if vocab_size <= 2**16 else np.int32)
        self._bin = open(f"{self._prefix}.bin", "wb")  # noqa: SIM115 (closed by __exit__)
        self._sizes = array.array("i")
        self._ended = 0
        self._hash = hashlib.sha256()
        self.tokens = 0
        self.sums: list[tuple[str, str]] = []

    def extend(self, ids: Sequence[int]) -> None:
        """Append ids to the current document."""
        content = np.asarray(ids, self._dtype.newbyteorder("<")).tobytes()
        self._bin.write(content)
        self._hash.update(content)
        self.tokens += len(ids)

    def end_document(self) -> None:
        """End the current document; the next `extend` begins another one."""
        self._sizes.append(self.tokens - self._ended)
        self._ended = self.tokens

    @property
    def documents(self) -> int:
        """Number of documents ended so far."""
        return len(self._sizes)

    @property
    def lengths(self) -> Sequence[int]:
        """Tokens of each of these documents."""
        return self._sizes

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *_: object) -> None:
        self._bin.close()
        if exc_type is not None:
            return
        sizes = np.asarray(self._sizes, "<i4")
        ends = np.cumsum(sizes, dtype="<i8") * self._dtype.itemsize
        header = _HEADER.pack(_MAGIC, _VERSION, _DTYPE_CODES[self._dtype], len(sizes), len(sizes) + 1)
        starts = ends - sizes * np.int64(self._dtype.itemsize)
        index = b"".join([header, sizes.tobytes(), starts.tobytes(), np.arange(len(sizes) + 1, dtype="<i8").tobytes()])
        with open(f"{self._prefix}.idx", "wb") as file:
            file.write(index)
        name = os.path.basename(self._prefix)
        digests = self._hash.hexdigest(), hashlib.sha256(index).hexdigest()
        self.sums = list(zip(digests, (f"{name}.bin", f"{name}.idx")))


def _read_index(path: str) -> tuple[np.dtype, int, int, int]:
    """Return (dtype, tokens, documents, tokens of the first non-empty document) of a consistent .idx file."""
    length = os.path.getsize(path)
    if length == 0:
        raise UserError(f"{path} is empty; write the data set again")
    raw = np.memmap(path, np.uint8, "r")
    start = raw[: len(_MAGIC)].tobytes()
    if start != _MAGIC[: len(start)]:
        raise UserError(f"{path} is not a Megatron index: it begins with {start!r} instead of {_MAGIC!r}")
    if length < _HEADER.size:
        raise UserError(f"{path} is cut off: {length} bytes, but the header alone takes {_HEADER.size}")
    _, version, code, sequences, indices = _HEADER.unpack(raw[: _HEADER.size].tobytes())
    if version != _VERSION:
        raise UserError(f"{path} has version {version} of Megatron's index; only version {_VERSION} is known")
    if code not in _DTYPES:
        raise UserError(f"{path} has the unknown dtype code {code}; known are {min(_DTYPES)} to {max(_DTYPES)}")
    dtype = np.dtype(_DTYPES[code])
    if dtype.kind == "f":
        raise UserError(f"{path} says that its tokens are {dtype}; token ids must be integers")
    needed = _HEADER.size + 12 * sequences + 8 * indices
    if length < needed:
        raise UserError(
            f"{path} is cut off: {length} bytes, but {sequences} sequences and {indices} document indices take "
            f"{needed}; write the data set again"
        )
    sizes = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    pointers = np.frombuffer(raw, "<i8", sequences, _HEADER.size + 4 * sequences)
    documents = np.frombuffer(raw, "<i8", indices, _HEADER.size + 12 * sequences)
    if sequences == 0:
        raise UserError(f"{path} lists no sequences; prepare the data set from text that is not empty")
    if indices == 1 and documents[0] == 0:
        documents = np.arange(sequences + 1)
    if indices == 0 or documents[-1] != sequences:
        last = documents[-1] if indices else "none"
        raise UserError(f"{path} is damaged: its last document index is {last} instead of {sequences} sequences")
    if documents[0] != 0 or (np.diff(documents) < 0).any():
        raise UserError(f"{path} is damaged: its document indices do not ascend from 0")
    ends = np.cumsum(sizes, dtype=np.int64)
    if sizes.min() < 0 or pointers[0] != 0 or not np.array_equal(pointers[1:], ends[:-1] * dtype.itemsize):
        raise UserError(f"{path} is damaged: its sequences do not follow each other in the .bin file without gaps")
    boundaries = np.append(0, ends)[documents]
    first = next(iter(boundaries[boundaries > 0]), 0)
    return dtype, int(ends[-1]), len(documents) - 1, int(first)


class TokenFile:
    """A memory-mapped token file: the tokens of all its documents as one long sequence.

    Attributes:
        prefix: path without ".bin" and ".idx".
        vocab_size: ids must be below this.
        dtype: dtype of the ids in the file.
        documents: number of documents.
        first_document: tokens of the first non-empty document.
    """

    def __init__(self, prefix: Prefix, vocab_size: int = 2**31) -> None:
        """Open PREFIX.bin and PREFIX.idx and check that they fit each other; ids are checked when they are read.

        Raises:
            UserError: a file is missing, empty, cut off or no Megatron data set, or its tokens are not integers.
        """
        self.prefix = os.fspath(prefix)
        self.vocab_size = vocab_size
        path = f"{self.prefix}.bin"
        for needed in (path, f"{self.prefix}.idx"):
            if not os.path.isfile(needed):
                raise UserError(
                    f"there is no token file {needed}; name an existing data set without its suffix, "
                    f"or write one with `{command('paxtrain.prepare')} --input=TEXT --out=FOLDER`"
                )
        self.dtype, tokens, self.documents, self.first_document = _read_index(f"{self.prefix}.idx")
        expected, actual = tokens * self.dtype.itemsize, os.path.getsize(path)
        if actual == 0:
            raise UserError(f"{path} is empty, but its index lists {tokens} tokens; write the data set again")
        if actual != expected:
            trouble = "is cut off" if actual < expected else "does not belong to its index"
            raise UserError(
                f"{path} {trouble}: {actual} bytes, but the index lists {tokens} tokens of {self.dtype}, "
                f"{expected} bytes; write the data set again"
            )
        self._tokens = np.memmap(path, self.dtype.newbyteorder("<"), "r")

    def __len__(self) -> int:
        """Return the number of tokens in all documents."""
        return len(self._tokens)

    def sample(self, place: int, sequence: int) -> np.ndarray:
        """Return tokens [place * sequence, (place + 1) * sequence + 1), int32."""
        return self.read(place * sequence, (place + 1) * sequence + 1)

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the tokens [start, stop) as int32 [stop - start].

        Raises:
            UserError: an id is outside the vocabulary.
        """
        ids = self._tokens[start:stop]
        if ids.min() < 0 or ids.max() >= self.vocab_size:
            position = int(np.flatnonzero((ids < 0) | (ids >= self.vocab_size))[0])
            raise UserError(
                f"{self.prefix}.bin has token id {ids[position]} at position {start + position}, outside the model's "
                f"vocabulary of {self.vocab_size} ids; set model.vocab_size to that of the data's tokenizer"
            )
        return ids.astype(np.int32)


def samples_per_epoch(tokens: int, sequence: int) -> int:
    """Return the number of samples of `sequence` + 1 tokens, each beginning with the last token of the one before."""
    return (tokens - 1) // sequence


def load(prefix: Prefix, *, vocab_size: int, sequence: int, separator: int = -1, verify: bool = False) -> TokenFile:
    """Open a data set, and refuse one that would stop a training run before anything is compiled.

    Data sets of at most 64 MiB are compared with their checksums, if they have any. All ids are scanned, a gigabyte in
    about a second, unless the set is larger and the tokenizer.json beside it has no id outside the vocabulary; then the
    first 64 MiB are.

    Args:
        prefix: path without ".bin" and ".idx".
        vocab_size: number of token ids of the model; ids must be below this.
        sequence: tokens per sample, without the last target.
        separator: token that must begin or end documents; -1: any.
        verify: whether to compare a data set of any size with its checksums, which it must have then.

    Raises:
        UserError: a file is unusable (see TokenFile) or cannot be read, differs from its checksum, has too few tokens
            for one sample or an id outside the vocabulary, or uses another separator.
    """
    try:
        file = TokenFile(prefix, vocab_size)
        if verify:
            checksums.require(file.prefix)
        else:
            checksums.verify(file.prefix, most=_SCAN_BYTES)
    except OSError as error:
        raise UserError(f"{prefix}.bin and .idx cannot be read ({error}); check their permissions") from error
    if samples_per_epoch(len(file), sequence) < 1:
        raise UserError(
            f"{file.prefix}.bin has {len(file)} tokens, too few for one sample of model.sequence={sequence} plus one; "
            f"use more text or a model.sequence of at most {max(len(file) - 1, 0)}"
        )
    scanned, at_least = len(file), _SCAN_BYTES // file.dtype.itemsize
    beside = os.path.join(os.path.dirname(file.prefix), tokenizer.FILE)
    if scanned > at_least and os.path.isfile(beside):
        within = tokenizer.vocabulary_size(tokenizer.load(beside)) <= vocab_size
        scanned = at_least if within else scanned
    for start in range(0, scanned, _SCAN_TOKENS):
        file.read(start, min(start + _SCAN_TOKENS, scanned))
    if separator >= 0:
        _require_separator(file, separator)
    return file


def _require_separator(file: TokenFile, separator: int) -> None:
    first, last = (int(file.read(at, at + 1)[0]) for at in (0, file.first_document - 1))
    if separator not in (first, last):
        raise UserError(
            f"the first document of {file.prefix}.bin begins with token {first} and ends with token {last}, so "
            f"model.separator={separator} does not divide it from others; name the id that does, or -1 for none"
        )


def order(file: TokenFile, sequence: int, *, seed: int | Sequence[int] = 0, shuffle: bool = True) -> Sequence[int]:
    """Return the places of samples in a file through all epochs; place j begins at token j * sequence.

    Args:
        file: the token file.
        sequence: tokens per sample, without the last target.
        seed: seed that, with the epoch's number, determines the order of samples in an epoch.
        shuffle: whether to shuffle; False keeps the file's order.
    """
    places = grain.MapDataset.range(samples_per_epoch(len(file), sequence))
    if shuffle:
        # grain adds the epoch to its seed: hashing keeps epoch 1 of seed 0 from being epoch 0 of seed 1.
        places = places.shuffle(seed=int(np.random.SeedSequence(seed).generate_state(1)[0]))
    return places.repeat()


def stream(
    sample: Callable[[int], np.ndarray],
    *,
    global_batch: int,
    rows: Sequence[int],
    start_sample: int = 0,
    prefetch: int = 2,
) -> grain.DatasetIterator:
    """Return an iterator over this process's rows of all global batches; other rows are not read.

    Sample i depends on neither the mesh nor the batch size, so a run resumes from `start_sample` on any of them.

    Args:
        sample: sample number i, int32 [sequence + 1].
        global_batch: samples per batch over all processes.
        rows: rows of each global batch to read, in this order.
        start_sample: samples consumed before.
        prefetch: batches read ahead, each in a separate thread.

    Returns:
        An iterator whose item n is int32 [len(rows), sequence + 1]: samples start_sample + n * global_batch + row.

    Raises:
        UserError: (from the iterator) an id is outside the vocabulary.
    """
    rows = tuple(rows)
    first_samples = grain.MapDataset.range(start_sample, sys.maxsize, global_batch)
    stacked = first_samples.map(lambda first: np.stack([sample(first + row) for row in rows]))
    return iter(stacked.to_iter_dataset(grain.ReadOptions(num_threads=prefetch, prefetch_buffer_size=prefetch)))


def batches(
    file: TokenFile,
    *,
    sequence: int,
    global_batch: int,
    rows: Sequence[int],
    seed: int = 0,
    start_sample: int = 0,
    shuffle: bool = True,
    prefetch: int = 2,
) -> grain.DatasetIterator:
    """Return the `stream` of one file's samples, in their `order`.

    Args:
        file: the token file.
        sequence: tokens per sample, without the last target.
        global_batch: samples per batch over all processes.
        rows: rows of each global batch to read, in this order.
        seed: seed of the order of samples.
        start_sample: samples consumed before.
        shuffle: whether to shuffle; False keeps the file's order.
        prefetch: batches read ahead, each in a separate thread.
    """
    places = order(file, sequence, seed=seed, shuffle=shuffle)

    def sample(number: int) -> np.ndarray:
        return file.sample(places[number], sequence)

    return stream(sample, global_batch=global_batch, rows=rows, start_sample=start_sample, prefetch=prefetch)
